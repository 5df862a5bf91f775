PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PROTOS := protos/kv.proto protos/inference.proto protos/worker.proto

.PHONY: setup demo test test-unit test-slow test-k8s k8s-lint soak chaos check protos bench bench-engine bench-prefill bench-policy bench-decode bench-overlap bench-loop bench-accuracy bench-chat bench-generator bench-router bench-routing bench-peers gpu-check kind-demo clean

setup: $(VENV)/.ready

# torch goes first and from the constraints, so that a plain CPU machine gets the CPU build and nixl finds it.
$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "kvferry needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make setup PYTHON=python3.12"; exit 1; }
	# An unfinished environment, or one whose Python is gone, is created again.
	@$(BIN)/python -m pip --version > /dev/null 2>&1 || rm -rf $(VENV)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip==26.3"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch setuptools
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	# For tests of the arguments of its kernels. On a CPU it imports with these few; all its dependencies are gigabytes.
	$(BIN)/python -m pip install --quiet --no-deps --constraint constraints.txt flashinfer-python apache-tvm-ffi einops \
		ninja nvidia-ml-py tabulate
	touch $@

demo: setup
	$(BIN)/kvferry demo

test: setup
	$(BIN)/python -m pytest

soak: setup
	$(BIN)/python -m pytest tests/soak -s

# Without processes, clusters and faults: a minute or two.
test-unit: setup
	$(BIN)/python -m pytest --ignore=tests/integration --ignore=tests/faults --ignore=tests/k8s/test_cluster.py \
		--ignore=tests/k8s/test_scaling.py

# Those of the cluster of processes are in test-k8s.
test-slow: setup
	$(BIN)/python -m pytest -m slow --ignore=tests/k8s/test_cluster.py

test-k8s: setup
	$(BIN)/python -m pytest tests/k8s -m ""

# checkov has some hundred dependencies of its own, so it has its own environment.
k8s-lint: setup
	test -x .venv-checkov/bin/checkov || ($(PYTHON) -m venv .venv-checkov && .venv-checkov/bin/pip install --quiet "checkov==3.3.30")
	rm -rf build/k8s && mkdir -p build/k8s
	for overlay in $$(ls k8s/overlays); do $(BIN)/kubectl kustomize k8s/overlays/$$overlay > build/k8s/$$overlay.yaml; done
	.venv-checkov/bin/checkov --config-file k8s/checkov.yaml --directory build/k8s

chaos: setup
	$(BIN)/python -m pytest tests/chaos tests/faults -m "" -s

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint
	$(BIN)/hadolint Dockerfile
	PATH="$(CURDIR)/$(BIN):$$PATH" sh protos/generate.sh --check

protos: setup
	PATH="$(CURDIR)/$(BIN):$$PATH" sh protos/generate.sh

bench: setup
	$(BIN)/kvferry bench compare --loads long-prompts long-answers --seconds 8 --trials 3 --repeats 1

bench-engine: setup
	$(BIN)/python -m benchmarks.micro.bench_engine

bench-accuracy: setup
	$(BIN)/python -m benchmarks.micro.bench_accuracy

bench-loop: setup
	$(BIN)/python -m benchmarks.micro.bench_loop

bench-prefill: setup
	$(BIN)/python -m benchmarks.micro.bench_prefill

bench-policy: setup
	$(BIN)/python -m benchmarks.micro.bench_policy

bench-overlap: setup
	$(BIN)/python -m benchmarks.micro.bench_overlap

bench-decode: setup
	$(BIN)/python -m benchmarks.micro.bench_decode

bench-router: setup
	$(BIN)/python -m benchmarks.micro.bench_router

bench-routing: setup
	$(BIN)/python -m benchmarks.micro.bench_routing

# With .venv if there is one, else with $(PYTHON), which needs pytest. Without a GPU it reports a skip and exits with 0.
GPU_PYTHON = $(if $(wildcard $(VENV)/.ready),$(BIN)/python,$(PYTHON))
gpu-check:
	$(GPU_PYTHON) -m pytest tests/gpu --confcutdir=tests/gpu -s
	$(GPU_PYTHON) -m benchmarks.micro.bench_gpu

# Needs docker, kind and kubectl. The cluster stays afterwards: `kind delete cluster --name kvferry`.
kind-demo:
	docker build --target cpu -t kvferry:cpu .
	kind get clusters | grep -qx kvferry || kind create cluster --name kvferry
	kind load docker-image kvferry:cpu --name kvferry
	kubectl --context kind-kvferry apply -k k8s/overlays/cpu-demo
	kubectl --context kind-kvferry -n kvferry rollout status deployment/kvferry-router --timeout=15m
	@echo "now: kubectl --context kind-kvferry -n kvferry port-forward service/kvferry 8000:8000"

bench-generator: setup
	$(BIN)/python -m benchmarks.micro.bench_generator

bench-chat: setup
	$(BIN)/python -m benchmarks.micro.bench_chat

# Installs vLLM and llama.cpp into the cache at its first run, each into an environment of its own.
bench-peers: setup
	$(BIN)/python -m benchmarks.peers $(PEERS)

clean:
	rm -rf $(VENV) .venv-checkov build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
