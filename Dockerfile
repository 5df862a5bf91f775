# kvferry for plain machines (CPU). Two stages: what is needed to install, and what is needed to run.
#   docker build -t kvferry:cpu .

FROM python:3.11-slim-bookworm AS build
# Everything goes into one folder, which the second stage copies.
RUN python -m venv /opt/kvferry
ENV PATH=/opt/kvferry/bin:$PATH
WORKDIR /src
# torch first and by itself: it is most of the bytes, and this layer stays when only our code changes. PyPI's torch brings
# CUDA along; to leave that out, name PyTorch's index of CPU builds: --build-arg PIP_EXTRA_INDEX_URL=...
ARG PIP_EXTRA_INDEX_URL=""
COPY constraints.txt .
RUN pip install --no-cache-dir --constraint constraints.txt torch setuptools
COPY . .
# A second install of the dependencies costs nothing where they are there already.
RUN pip install --no-cache-dir --constraint constraints.txt .

FROM python:3.11-slim-bookworm
# A compiler for the decode kernel, which is built for the processor it runs on. Without it steps in bf16 are slower.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/kvferry /opt/kvferry
ENV PATH=/opt/kvferry/bin:$PATH \
    KVFERRY_CACHE=/tmp/kvferry \
    PYTHONUNBUFFERED=1
# No root, no home: models and caches are mounted, or below /tmp.
USER 10001:10001
ENTRYPOINT ["kvferry"]
CMD ["--help"]
