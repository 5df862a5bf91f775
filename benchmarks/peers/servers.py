"""The arms: each way to serve the built-in model on all usable cores, started for its turn and stopped after it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes.util import find_library
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from benchmarks.peers.environments import Environment, LlamaCpp
from benchmarks.peers.processes import PeerFailed, process_group, wait_ready
from engine.model_store import DEFAULT_MODEL, cache_folder
from local_cluster.cluster import LocalCluster
from local_cluster.config import ClusterConfig
from local_cluster.process import StartFailed

ArmName = Literal["vllm", "llama-bf16", "llama-q8", "llama-q4", "split", "colocated-each", "colocated"]
ARMS: tuple[ArmName, ...] = get_args(ArmName)
GGUF_OF: dict[ArmName, str] = {"llama-bf16": "BF16", "llama-q8": "Q8_0", "llama-q4": "Q4_1"}
START_SECONDS = 600.0
"""Most time for a peer to become ready. vLLM compiles the model at its first start."""
KV_GIB = 2
MAX_SEQUENCES = 64
"""Most sequences at once, of every server."""


@dataclass(frozen=True)
class Server:
    """A running server with OpenAI's completions."""

    url: str
    """Without a path."""
    pids: tuple[int, ...] = ()
    """Of its processes, less their descendants."""


@dataclass(frozen=True)
class Setting:
    """What all arms share."""

    model: Path
    """Folder of the prepared model."""
    max_model_len: int
    logs: Path
    vllm: Environment
    llama_cpp: LlamaCpp | None
    """Only if one of its arms is measured."""


def usable_cores() -> list[int]:
    """Cores that this process, and so every server, may use."""
    return sorted(os.sched_getaffinity(0))


def label(arm: ArmName, cores: int) -> str:
    """What exactly an arm is."""
    match arm:
        case "vllm":
            return "vLLM, bf16"
        case "llama-bf16":
            return "llama.cpp, BF16 made of Q4_1"
        case "llama-q8":
            return "llama.cpp, Q8_0 made of Q4_1"
        case "llama-q4":
            return "llama.cpp, Q4_1"
        case "split":
            return f"kvferry, bf16, 1 prefill + 1 decode, {_cores(max(1, cores // 2))} each"
        case "colocated-each":
            return f"kvferry, bf16, {cores} colocated, 1 core each"
        case "colocated":
            return f"kvferry, bf16, 1 colocated, {_cores(cores)}"


def _cores(number: int) -> str:
    return f"{number} core{'s' if number > 1 else ''}"


@contextmanager
def running(arm: ArmName, setting: Setting, name: str) -> Iterator[Server]:
    """An arm's server, ready for requests. name: of its logs. Raises PeerFailed."""
    if arm == "vllm":
        manager = _vllm(setting, setting.logs / f"{name}.log")
    elif arm in GGUF_OF:
        manager = _llama_cpp(setting, GGUF_OF[arm], setting.logs / f"{name}.log")
    else:
        manager = _kvferry(arm, setting, setting.logs / name)
    with manager as server:
        yield server


@contextmanager
def _vllm(setting: Setting, log: Path) -> Iterator[Server]:
    port = _free_port()
    command = [
        str(setting.vllm.folder / "bin" / "vllm"),
        "serve",
        str(setting.model),
        *("--served-model-name", DEFAULT_MODEL),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "bfloat16"),
        *("--max-model-len", str(setting.max_model_len)),
        *("--max-num-seqs", str(MAX_SEQUENCES)),
        "--no-enable-prefix-caching",
    ]
    variables = vllm_variables() | {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, usable_cores())),
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "LD_PRELOAD": ":".join(preloaded(setting.vllm)),
    }
    with process_group(command, log, variables) as process:
        url = f"http://127.0.0.1:{port}"
        wait_ready(process, f"{url}/health", START_SECONDS, log)
        yield Server(url, (process.pid,))


def preloaded(vllm: Environment) -> list[str]:
    """Libraries that vLLM's documentation asks to preload: Intel's OpenMP, which comes with it, and tcmalloc if this
    machine has it."""
    found = [find_library("tcmalloc_minimal"), *map(str, vllm.folder.glob("lib/libiomp5.so"))]
    return [library for library in found if library]


def vllm_variables() -> dict[str, str]:
    """For every process of vLLM: it asks nobody, and keeps what it compiles in our cache."""
    return {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(cache_folder() / "peers" / "vllm-compiled"),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }


@contextmanager
def _llama_cpp(setting: Setting, gguf: str, log: Path) -> Iterator[Server]:
    assert setting.llama_cpp is not None
    port, threads = _free_port(), str(len(usable_cores()))
    command = [
        str(setting.llama_cpp.server),
        *("--model", str(setting.llama_cpp.models[gguf]), "--alias", DEFAULT_MODEL),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--threads", threads, "--threads-batch", threads),
        # The context is divided among the slots.
        *("--parallel", str(MAX_SEQUENCES), "--ctx-size", str(MAX_SEQUENCES * setting.max_model_len)),
        *("--no-cache-prompt", "--cache-ram", "0"),
        *(() if setting.llama_cpp.repacks else ("--no-repack",)),
        "--no-ui",
    ]
    with process_group(command, log) as process:
        url = f"http://127.0.0.1:{port}"
        wait_ready(process, f"{url}/health", START_SECONDS, log)
        yield Server(url, (process.pid,))


def cluster_config(arm: ArmName, cores: int, max_model_len: int, logs: Path) -> ClusterConfig:
    """The cluster of one of our arms: pages for as many sequences as the other servers may hold, and no cache."""
    number = {"split": 0, "colocated-each": cores, "colocated": 1}[arm]
    return ClusterConfig(
        dtype="bfloat16",
        max_model_len=max_model_len,
        max_num_sequences=MAX_SEQUENCES,
        num_pages=MAX_SEQUENCES * -(-max_model_len // ClusterConfig.page_size),
        prefix_cache=False,
        decode_prefix_cache=False,
        colocated=number,
        port=0,
        log_dir=logs,
    )


@contextmanager
def _kvferry(arm: ArmName, setting: Setting, logs: Path) -> Iterator[Server]:
    config = cluster_config(arm, len(usable_cores()), setting.max_model_len, logs)
    try:
        with LocalCluster(config) as cluster:
            url = str(cluster.find("router").info["http"])
            yield Server(url, tuple(process.pid for process in cluster.processes))
    except StartFailed as error:
        raise PeerFailed(f"kvferry: {error}") from error


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
