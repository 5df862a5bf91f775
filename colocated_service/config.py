"""Settings of a colocated worker."""

from __future__ import annotations

from dataclasses import dataclass

from colocated_service.scheduler import StepPolicy
from prefill_service.config import PromptOptions
from worker_runtime.config import OverlapOptions, WorkerConfig


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """What goes into a colocated worker's steps."""

    step_policy: StepPolicy = "mixed"
    """Of colocated workers. mixed: each step gives every decoding sequence a token and the rest of the budget to chunks
    of prompts. prefill_first: prompts are computed before any sequence decodes."""


@dataclass(frozen=True)
class ColocatedConfig(StepOptions, PromptOptions, OverlapOptions, WorkerConfig):
    """A colocated worker: computes prompts and generates tokens in one process. The baseline of two tiers."""

    @property
    def is_mixed(self) -> bool:
        """Whether steps contain both phases."""
        return self.step_policy == "mixed"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_prompts()
        if self.is_mixed and self.token_budget != "auto" and self.token_budget <= self.max_num_sequences:
            raise ValueError(
                f"--token-budget is {self.token_budget} and --max-num-sequences {self.max_num_sequences}; "
                "with mixed steps the budget must be larger, or decoding sequences leave nothing for prompts"
            )
