"""Both phases over one page pool: the two tiers' schedulers, composed. Pure, as they are.

waiting ──> running prompt ── all computed ──> running answer ──> finished
   ^                                               │
   └──────── pages ran out: computed again ────────┘

* ``mixed`` (Sarathi-Serve, Agrawal et al., OSDI 2024): every step gives each running answer a token, and the rest of
  the token budget to chunks of prompts, so that a long prompt never stalls answers for longer than a step.
* ``prefill_first`` (as mini-sglang does): prompts go before answers; best for time to first token, worst for pauses.

When pages run out, half-done prompts give theirs back before an answer has to; the youngest answer that has to go
waits as a prompt again, with the tokens it has, and is computed again in place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from decode_service.scheduler import DecodeScheduler
from engine.page_pool import PagePool
from engine.prefix_cache import PrefixCache
from engine.sequence import ScheduledSequence, Sequence
from prefill_service.scheduler import Policy, PrefillScheduler, PrefillStep

StepPolicy = Literal["mixed", "prefill_first"]


@dataclass(frozen=True)
class ColocatedStep:
    """What the next step computes: answers first, then chunks of prompts."""

    answers: tuple[ScheduledSequence, ...]
    prompts: tuple[ScheduledSequence, ...]
    expired: tuple[Sequence, ...] = ()
    """Prompts that are too late to be computed."""
    preempted: tuple[Sequence, ...] = ()
    """Answers that had to give their pages back; they wait as prompts again."""

    @property
    def batch(self) -> tuple[ScheduledSequence, ...]:
        """Everything, for one run of the model."""
        return self.answers + self.prompts

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of the step."""
        return sum(entry.num_new_tokens for entry in self.prompts)


@dataclass(eq=False)
class _Known:
    """What a sequence needs to be queued again."""

    sequence: Sequence
    max_tokens: int
    priority: int
    deadline: float | None
    was_preempted: bool = False


class ColocatedScheduler:
    """Decides what each step computes."""

    def __init__(
        self,
        pool: PagePool,
        cache: PrefixCache,
        page_size: int,
        token_budget: int,
        max_num_sequences: int,
        policy: StepPolicy = "mixed",
        prompt_order: Policy = "fcfs",
    ) -> None:
        self._token_budget, self._max_num_sequences, self._policy = token_budget, max_num_sequences, policy
        self.prompts = PrefillScheduler(
            pool, cache, page_size, token_budget, max_num_sequences, prompt_order, self._growth_pages
        )
        self.answers = DecodeScheduler(pool, cache, page_size, max_num_sequences)
        self._known: dict[str, _Known] = {}

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether a sequence, prompt and longest answer, fits an empty pool."""
        return self.answers.can_ever_fit(num_tokens)

    def add(self, sequence: Sequence, max_tokens: int, priority: int = 0, deadline: float | None = None) -> None:
        """Queues a prompt. deadline: on the clock of `schedule`'s `now`, for its first token."""
        self._known[sequence.sequence_id] = _Known(sequence, max_tokens, priority, deadline)
        self.prompts.add(sequence, priority, deadline)

    def schedule(
        self,
        now: float = 0.0,
        prompt_tokens_per_second: float | None = None,
        find_pages: Callable[[], bool] = lambda: False,
    ) -> ColocatedStep | None:
        """Plans the next step, or None if nothing can run and nothing expired. Takes pages.

        find_pages: see `DecodeScheduler.schedule`; asked before half-done prompts give theirs back for an answer.
        """
        if self._policy == "prefill_first":
            prompts = self._schedule_prompts(now, prompt_tokens_per_second, self._token_budget)
            if prompts is not None and prompts.batch:
                return ColocatedStep((), prompts.batch, prompts.expired)
            answers, preempted = self._schedule_answers(find_pages)
        else:
            answers, preempted = self._schedule_answers(find_pages)
            prompts = self._schedule_prompts(now, prompt_tokens_per_second, self._token_budget - len(answers))
        if prompts is None and not answers and not preempted:
            return None
        return ColocatedStep(answers, prompts.batch if prompts else (), prompts.expired if prompts else (), preempted)

    def update(self, step: ColocatedStep) -> None:
        """Takes note that a step was computed, or launched. Prompts that are done become answers, whose next token may
        be added."""
        for entry in step.answers:
            entry.sequence.num_computed_tokens += entry.num_new_tokens
        self.prompts.update(PrefillStep(step.prompts))
        for entry in step.prompts:
            if entry.sequence.num_uncomputed_tokens == 0:
                known = self._known[entry.sequence.sequence_id]
                self.answers.adopt(entry.sequence, known.max_tokens, known.was_preempted)

    def finish(self, sequence: Sequence) -> None:
        """A sequence ended here, in whatever phase; the length of an answer is worth knowing."""
        if self._known.pop(sequence.sequence_id, None) is not None:
            self.answers.finish(sequence)
            self.prompts.abort(sequence)

    def abort(self, sequence: Sequence) -> None:
        """Forgets a sequence, wherever it is, and lets go of its pages."""
        if self._known.pop(sequence.sequence_id, None) is not None:
            self.answers.release(sequence)
            self.prompts.abort(sequence)

    def _growth_pages(self, sequence: Sequence) -> int:
        return self.answers.forecast_pages(sequence, self._known[sequence.sequence_id].max_tokens)

    def _schedule_answers(
        self, find_pages: Callable[[], bool]
    ) -> tuple[tuple[ScheduledSequence, ...], tuple[Sequence, ...]]:
        step = self.answers.schedule(lambda: find_pages() or self.prompts.give_back_youngest())
        if step is None:
            return (), ()
        for sequence in step.preempted:
            known = self._known[sequence.sequence_id]
            known.was_preempted = True
            sequence.num_computed_tokens = sequence.num_cached_tokens = sequence.num_published_pages = 0
            # Its client has tokens already, so the deadline for the first one does not count any more.
            self.prompts.add(sequence, known.priority, None, is_resumed=True)
        return step.batch, step.preempted

    def _schedule_prompts(
        self, now: float, prompt_tokens_per_second: float | None, token_budget: int
    ) -> PrefillStep | None:
        has_prompts = self.prompts.num_waiting or self.prompts.num_running
        return self.prompts.schedule(
            now,
            prompt_tokens_per_second,
            reserved_pages=self.answers.peak_growth_pages if has_prompts else 0,
            token_budget=max(token_budget, 0),
            max_running=self._max_num_sequences - self.answers.num_sequences,
        )
