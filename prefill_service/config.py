"""Settings of a prefill worker."""

from __future__ import annotations

from dataclasses import dataclass

from prefill_service.scheduler import Policy
from worker_runtime.config import WorkerConfig


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """How workers compute prompts: prefill and colocated ones."""

    token_budget: int = 512
    """Tokens per step, over all prompts: longer prompts run as chunks. In a colocated worker's mixed steps those of
    running answers count too."""
    prompt_order: Policy = "fcfs"
    """Order of prompts: by arrival, or bounded_slowdown: short ones overtake long ones, and none waits for ever."""
    prefix_cache: bool = True
    """Keep pages of what was computed, and use them for prompts that begin alike."""

    def check_prompts(self) -> None:
        """Raises ValueError for what no worker can do."""
        if self.token_budget < 1:
            raise ValueError(f"--token-budget is {self.token_budget}; at least 1 token per step is needed")


@dataclass(frozen=True)
class PrefillConfig(PromptOptions, WorkerConfig):
    """A prefill worker: computes prompts chunk by chunk and sends their pages to decode workers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_prompts()
