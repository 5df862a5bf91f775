"""How many KV pages a worker's pool gets."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from engine.config import EngineConfig
from engine.kv_cache import page_bytes
from engine.loader import LoadedModel
from engine.memory import pages_that_fit
from engine.sequence import num_pages_for
from rpc.config import ConfigError

CGROUP = Path("/sys/fs/cgroup")
DEFAULT_SEQUENCES = 8
"""On a CPU the default pool holds this many sequences of full length, memory permitting."""


def num_pool_pages(config: EngineConfig, loaded: LoadedModel, token_budget: int, max_num_sequences: int) -> int:
    """Pages of the pool: as configured, or what fits. Raises ConfigError if they take more memory than there is.

    token_budget: prompt tokens per step; 0 for a decode worker.
    """
    if config.num_pages != "auto":
        num_pages = config.num_pages
    elif loaded.device.type == "cuda":
        num_pages = pages_that_fit(loaded, config, token_budget or max_num_sequences, max_num_sequences)
    else:
        wanted = DEFAULT_SEQUENCES * num_pages_for(loaded.max_model_len, config.page_size)
        num_pages = max(1, min(wanted, free_memory(loaded.device) // 8 // _page_bytes(config, loaded)))
    needed, free = num_pages * _page_bytes(config, loaded), free_memory(loaded.device)
    if needed > free:
        raise ConfigError(
            f"--num-pages is {num_pages}, which takes {needed / 1e9:.1f} GB; "
            f"free are {free / 1e9:.1f} GB on {loaded.device}"
        )
    return num_pages


def free_memory(device: torch.device) -> int:
    """Bytes that can be had on a device; in a container what its limit leaves, whatever the machine has."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    free = int(psutil.virtual_memory().available)
    try:
        limit = int((CGROUP / "memory.max").read_text())
        return min(free, limit - int((CGROUP / "memory.current").read_text()))
    except (OSError, ValueError):
        return free  # no limit ("max"), or no cgroup v2


def _page_bytes(config: EngineConfig, loaded: LoadedModel) -> int:
    return page_bytes(loaded.kv_shape, config.page_size, loaded.dtype)
