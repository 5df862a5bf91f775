"""Settings of a colocated worker."""

from __future__ import annotations

from dataclasses import dataclass

from colocated_service.scheduler import StepPolicy
from prefill_service.scheduler import Policy
from worker_runtime.config import Overlap, WorkerConfig


@dataclass(frozen=True)
class ColocatedConfig(WorkerConfig):
    """A colocated worker: computes prompts and generates tokens in one process. The baseline of two tiers."""

    token_budget: int = 512
    """Tokens per step: in mixed steps those of running answers and the rest for prompts."""
    step_policy: StepPolicy = "mixed"
    """mixed: each step gives every running answer a token and the rest of the budget to chunks of prompts;
    prefill_first: prompts are computed before any answer goes on."""
    prompt_order: Policy = "fcfs"
    """Order of prompts: by arrival, or bounded_slowdown: short ones overtake long ones, and none waits for ever."""
    overlap: Overlap = "auto"
    """Plan and launch a step while the one before it is computed. auto: on a GPU."""
    prefix_cache: bool = True
    """Keep pages of computed prompts and answers, and use them for prompts that begin alike."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.token_budget < 1:
            raise ValueError(f"--token-budget is {self.token_budget}; at least 1 token per step is needed")
        if self.step_policy == "mixed" and self.token_budget <= self.max_num_sequences:
            raise ValueError(
                f"--token-budget is {self.token_budget} and --max-num-sequences {self.max_num_sequences}; "
                "with mixed steps the budget must be larger, or running answers leave nothing for prompts"
            )
