"""Settings of the engine. No torch in here, so that command lines start fast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
AttentionName = Literal["auto", "torch", "flashinfer"]
MaybeNumber = Annotated[int | None, tyro.conf.arg(metavar="N")]
"""With a placeholder that people can read in `--help`."""


@dataclass(frozen=True)
class ModelOptions:
    """What is served."""

    model: str
    """Folder of a prepared model, a GGUF file, a hub id, or the name of a built-in model."""
    dtype: DTypeName = "auto"
    """Element type of weights and KV pages. auto: bfloat16 where the processor computes in it, else float32."""
    max_model_len: MaybeNumber = None
    """Longest sequence, prompt and output together, in tokens. Unset: what the model was trained for."""


@dataclass(frozen=True, kw_only=True)
class PoolOptions:
    """Where it is computed, and in how many pages."""

    device: str = "auto"
    """Torch device of weights and KV pages: cpu, cuda or cuda:N, which several workers may share. auto: the first GPU
    if there is one, else the CPU."""
    page_size: int = 16
    """Tokens in a KV page."""
    num_pages: int | Literal["auto"] = "auto"
    """Pages of a worker. auto: on a CPU room for 8 sequences of full length, at most an eighth of the free memory; on a
    GPU what --memory-fraction leaves beside weights and the largest step."""


@dataclass(frozen=True)
class EngineConfig(PoolOptions, ModelOptions):
    """What a worker needs to know to run a model."""

    memory_fraction: float = 0.85
    """Of a GPU's memory, what this worker takes altogether, if --num-pages is auto. Two workers may share a GPU."""
    attention: AttentionName = "auto"
    """Who computes attention. auto: on a GPU FlashInfer if it can, on a CPU our own kernels; else plain torch."""
    cuda_graph_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
    """On a GPU: numbers of sequences for which decode steps are recorded as CUDA graphs. A step is padded to the next;
    one with more than the largest runs without. None given: no graphs."""
    threads: MaybeNumber = None
    """Compute threads. Unset: the number of cores this process may use."""

    def __post_init__(self) -> None:
        if not 1 <= self.page_size <= 1024:
            raise ValueError(f"--page-size is {self.page_size}; it must be between 1 and 1024 tokens")
        if self.num_pages != "auto" and self.num_pages < 1:
            raise ValueError(f"--num-pages is {self.num_pages}; a pool needs at least 1 page")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(f"--max-model-len is {self.max_model_len}; a prompt and an answer need at least 2 tokens")
        if not 0 < self.memory_fraction <= 1:
            raise ValueError(f"--memory-fraction is {self.memory_fraction:g}; it must be above 0 and at most 1")
        if any(size < 1 for size in self.cuda_graph_sizes):
            raise ValueError(f"--cuda-graph-sizes are {self.cuda_graph_sizes}; each must be at least 1 sequence")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"--threads is {self.threads}; at least 1 is needed")
