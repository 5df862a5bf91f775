"""Settings of a prefill worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rpc.prompt_order import PromptOrder
from worker_runtime.config import WorkerConfig


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """How workers compute prompts: prefill and colocated ones."""

    token_budget: int | Literal["auto"] = "auto"
    """Tokens per step, over all prompts. Longer prompts run as chunks. In a mixed step of a colocated worker the tokens
    of decoding sequences count too. auto: measured at the start. A prefill worker takes the smallest chunk that is
    computed at nearly the best rate, a colocated one the largest that delays decoding sequences by at most 60 ms."""
    prompt_order: PromptOrder = "fcfs"
    """Order of prompts. fcfs: by arrival. bounded_slowdown: short prompts overtake long ones, none waits for ever."""
    prefix_cache: bool = True
    """Keep pages of computed tokens, and use them for prompts that begin with the same tokens."""

    def check_prompts(self) -> None:
        """Raises ValueError for what no worker can do."""
        if self.token_budget != "auto" and self.token_budget < 1:
            raise ValueError(f"--token-budget is {self.token_budget}; at least 1 token per step is needed")


@dataclass(frozen=True)
class PrefillConfig(PromptOptions, WorkerConfig):
    """A prefill worker: computes prompts chunk by chunk and sends their pages to decode workers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_prompts()
