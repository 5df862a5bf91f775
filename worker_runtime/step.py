"""What a scheduler is asked and what it decides: plain records, without clock, socket, thread or tensor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from engine.sequence import ScheduledSequence, Sequence


@dataclass(frozen=True)
class StepLimits:
    """What one step may use."""

    now: float = 0.0
    """The time, on the clock of the requests' deadlines."""
    tokens_per_second: float | None = None
    """Measured rate of computing prompts. Prompts that can't be computed before their deadline expire."""
    may_preempt: bool = True
    """False: a step is in flight whose tokens may free pages. If pages are short, the scheduler says so (see
    `Step.is_short_of_pages`) and preempts nobody."""
    token_budget: int | None = None
    """Prompt tokens. None: the scheduler's own budget."""
    max_num_prompts: int | None = None
    """Prompts that run at once. None: the scheduler's own limit."""
    reserved_pages: int = 0
    """Pages that must be left to others."""


@dataclass(frozen=True)
class Step:
    """The plan of one step, which is one forward pass: what it computes and who has to go for it."""

    decodes: tuple[ScheduledSequence, ...] = ()
    """Sequences that get their next token."""
    prompts: tuple[ScheduledSequence, ...] = ()
    """Chunks of prompts."""
    expired: tuple[Sequence, ...] = ()
    """Prompts whose deadline can't be met. The scheduler has forgotten them."""
    preempted: tuple[Sequence, ...] = ()
    """Sequences whose pages were needed. They have none any more."""
    is_short_of_pages: bool = False
    """Nothing is to run: deliver the step in flight, then ask again."""

    @property
    def batch(self) -> tuple[ScheduledSequence, ...]:
        """Everything, for one run of the model."""
        return self.decodes + self.prompts

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens that the step computes."""
        return sum(entry.num_new_tokens for entry in self.prompts)


@dataclass(frozen=True)
class SchedulerLoad:
    """What a scheduler has to do."""

    sequences: dict[str, int]
    """Number of sequences by state."""
    queued_tokens: int = 0
    """Prompt tokens of prompts that wait."""
    running_tokens: int = 0
    """Prompt tokens still to compute of prompts that run."""
    expected_growth_pages: int = 0
    """Pages that admitted sequences are expected to take until they end."""
    refusals: dict[str, int] = field(default_factory=dict)
    """How often a prompt had to wait since the start, by what was short."""
    num_restarts: int = 0
    """Half-computed prompts that gave their pages back since the start."""


class Scheduler(Protocol):
    """Decides what each step computes. Admission differs between tiers, so it is not part of this."""

    def schedule(self, limits: StepLimits) -> Step | None:
        """Plans the next step and takes its pages. None: nothing can run, and nothing expired."""
        ...

    def update(self, step: Step) -> None:
        """Takes note that a step was launched: what it computes counts as computed."""
        ...

    def finish(self, sequence: Sequence) -> None:
        """A sequence has ended in its own time. Harmless for unknown ones."""
        ...

    def abort(self, sequence: Sequence) -> None:
        """Forgets a sequence, whatever its state, and lets go of its pages. Harmless for unknown ones."""
        ...

    def load(self) -> SchedulerLoad:
        """What there is to do."""
        ...
