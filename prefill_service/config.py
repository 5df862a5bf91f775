"""Settings of a prefill worker."""

from __future__ import annotations

from dataclasses import dataclass

from prefill_service.scheduler import Policy
from worker_runtime.config import WorkerConfig


@dataclass(frozen=True)
class PrefillConfig(WorkerConfig):
    """A prefill worker: computes prompts chunk by chunk and sends their pages to decode workers."""

    token_budget: int = 512
    """Prompt tokens computed per step, over all prompts. Longer prompts run as chunks."""

    prompt_order: Policy = "fcfs"
    """Order of prompts: by arrival, or bounded_slowdown: short ones overtake long ones, and none waits for ever."""
    prefix_cache: bool = True
    """Keep pages of computed prompts, and use them for prompts that begin alike."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.token_budget < 1:
            raise ValueError(f"--token-budget is {self.token_budget}; at least 1 token per step is needed")
