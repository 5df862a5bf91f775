# kvferry for plain machines and for GPUs. The final images have no build tools but a compiler, and run without root and home.
#   docker build --target cpu -t kvferry:cpu .
#   docker build --target gpu -t kvferry:gpu .

# Plain machines.

FROM python:3.11-slim-bookworm AS build-cpu
# Everything goes into one folder, which the last stage copies.
RUN python -m venv /opt/kvferry
ENV PATH=/opt/kvferry/bin:$PATH
WORKDIR /src
# torch first and by itself: it is most of the bytes, and this layer stays cached when only kvferry's code changes. PyPI's torch brings
# CUDA along; to leave that out, name PyTorch's index of CPU builds: --build-arg PIP_EXTRA_INDEX_URL=...
ARG PIP_EXTRA_INDEX_URL=""
COPY constraints.txt .
RUN pip install --no-cache-dir --constraint constraints.txt torch setuptools
COPY . .
# A second install of the dependencies costs nothing where they are there already.
RUN pip install --no-cache-dir --constraint constraints.txt ".[tracing]"

FROM python:3.11-slim-bookworm AS cpu
# A compiler for the decode kernel, which is built for the processor it runs on. Without it steps in bf16 are slower.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build-cpu /opt/kvferry /opt/kvferry
ENV PATH=/opt/kvferry/bin:$PATH \
    KVFERRY_CACHE=/tmp/kvferry \
    PYTHONUNBUFFERED=1
# Models and caches are mounted, or below /tmp.
USER 10001:10001
ENTRYPOINT ["kvferry"]
CMD ["--help"]

# GPUs.

FROM nvidia/cuda:13.0.2-base-ubuntu24.04 AS python-gpu
# The same interpreter in both stages, since the folder that is copied points to it.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*

FROM python-gpu AS build-gpu
RUN python3 -m venv /opt/kvferry
ENV PATH=/opt/kvferry/bin:$PATH
WORKDIR /src
# Open ranges here: which torch fits depends on the driver. torch brings the CUDA libraries that it uses itself.
RUN pip install --no-cache-dir "torch>=2.8" "setuptools>=77"
COPY . .
# hadolint ignore=DL3013
RUN pip install --no-cache-dir ".[gpu,tracing]"

FROM python-gpu AS gpu
# FlashInfer builds the kernels of a model's kind of heads at the first start: a compiler, and the headers they include.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        cuda-cccl-13-0 cuda-cudart-dev-13-0 cuda-nvcc-13-0 g++ libcublas-dev-13-0 libcurand-dev-13-0 python3-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build-gpu /opt/kvferry /opt/kvferry
# Kernels take minutes to build: mount a volume at /cache to have them built once.
ENV PATH=/opt/kvferry/bin:/usr/local/cuda/bin:$PATH \
    CUDA_HOME=/usr/local/cuda \
    FLASHINFER_WORKSPACE_BASE=/cache \
    KVFERRY_CACHE=/tmp/kvferry \
    PYTHONUNBUFFERED=1
RUN mkdir /cache && chown 10001:10001 /cache
USER 10001:10001
ENTRYPOINT ["kvferry"]
CMD ["--help"]
