"""Settings of the engine. No torch in here, so that command lines start fast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class EngineConfig:
    """What a worker needs to know to run a model."""

    model: str
    """Folder of a prepared model, a GGUF file, a hub id, or the name of a built-in model."""
    dtype: DTypeName = "auto"
    """Element type of weights and KV pages. auto: bfloat16 where the processor computes in it, else float32."""
    device: str = "cpu"
    """Torch device of weights and KV pages."""
    page_size: int = 16
    """Tokens in a KV page."""
    num_pages: int | None = None
    """Pages in the pool. Unset: room for 8 sequences of full length, at most an eighth of the free memory."""
    max_model_len: int | None = None
    """Longest sequence, prompt and output together, in tokens. Unset: what the model was trained for."""
    threads: int | None = None
    """Compute threads. Unset: the number of cores this process may use."""

    def __post_init__(self) -> None:
        if not 1 <= self.page_size <= 1024:
            raise ValueError(f"--page-size is {self.page_size}; it must be between 1 and 1024 tokens")
        if self.num_pages is not None and self.num_pages < 1:
            raise ValueError(f"--num-pages is {self.num_pages}; a pool needs at least 1 page")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(f"--max-model-len is {self.max_model_len}; a prompt and an answer need at least 2 tokens")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"--threads is {self.threads}; at least 1 is needed")
