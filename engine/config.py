"""Settings of the engine. This module does not import torch, so that command lines start fast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
AttentionName = Literal["auto", "torch", "flashinfer"]
Quantization = Literal["none", "int8"]
MaybeNumber = Annotated[int | None, tyro.conf.arg(metavar="N")]
"""A flag shown as `N` in `--help`."""


@dataclass(frozen=True)
class ModelOptions:
    """The model to serve."""

    model: str
    """Folder of a prepared model, a GGUF file, a hub id, or the name of a built-in model."""
    dtype: DTypeName = "auto"
    """Element type of weights and KV pages. auto: bfloat16 if the processor has bfloat16 instructions, else float32."""
    quantize: Quantization = "none"
    """Weights in fewer bits. int8: 8-bit integers with a scale for each output, half the memory to read per token; for
    dense models in bfloat16, on CPUs with AVX512-BF16 and VNNI."""
    max_model_len: MaybeNumber = None
    """Longest sequence, prompt and output together, in tokens. Unset: the length that the model was trained for."""


@dataclass(frozen=True, kw_only=True)
class PoolOptions:
    """The device, and the KV pages on it."""

    device: str = "auto"
    """Torch device of weights and KV pages: cpu, cuda or cuda:N. Several workers may share a device. auto: the first
    GPU if there is one, else the CPU."""
    page_size: int = 16
    """Tokens in a KV page."""
    num_pages: int | Literal["auto"] = "auto"
    """KV pages of a worker. auto: on a CPU, room for 8 sequences of full length, but at most an eighth of the free
    memory; on a GPU, all of --memory-fraction that weights and the largest step leave free."""


@dataclass(frozen=True)
class EngineConfig(PoolOptions, ModelOptions):
    """Settings with which a worker runs a model."""

    memory_fraction: float = 0.85
    """Fraction of a GPU's memory for this worker in total, if --num-pages is auto. Two workers may share a GPU."""
    attention: AttentionName = "auto"
    """Attention backend. auto: FlashInfer on a GPU, our own kernels on a CPU; plain torch if neither can run."""
    cuda_graph_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
    """On a GPU: batch sizes (sequences) for which decode steps are recorded as CUDA graphs. A batch is padded to the
    next size; a batch larger than all sizes runs without a graph. None given: no graphs."""
    threads: MaybeNumber = None
    """Compute threads. Unset: one for each core that this process may use."""

    def __post_init__(self) -> None:
        if not 1 <= self.page_size <= 1024:
            raise ValueError(f"--page-size is {self.page_size}; it must be between 1 and 1024 tokens")
        if self.num_pages != "auto" and self.num_pages < 1:
            raise ValueError(f"--num-pages is {self.num_pages}; a pool needs at least 1 page")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(f"--max-model-len is {self.max_model_len}; a prompt and an output need at least 2 tokens")
        if not 0 < self.memory_fraction <= 1:
            raise ValueError(f"--memory-fraction is {self.memory_fraction:g}; it must be above 0 and at most 1")
        if any(size < 1 for size in self.cuda_graph_sizes):
            raise ValueError(f"--cuda-graph-sizes are {self.cuda_graph_sizes}; each must be at least 1 sequence")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"--threads is {self.threads}; at least 1 is needed")
