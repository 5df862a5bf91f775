"""Both phases over one page pool: the schedulers of the two tiers, composed. Pure, as they are.

waiting ──> running prompt ── all computed ──> decoding ──> finished
   ^                                              │
   └──────── preempted: computed again ───────────┘

* ``mixed`` (Sarathi-Serve, Agrawal et al., OSDI 2024): every step gives each decoding sequence a token, and the rest of
  the token budget to chunks of prompts. A long prompt never stalls decoding sequences for longer than a step.
* ``prefill_first`` (as mini-sglang does): prompts go before decoding. Best for time to first token, worst for gaps
  between tokens.

When pages run out, half-computed prompts give theirs back before a decoding sequence has to. The youngest decoding
sequence that has to go waits as a prompt again, with the tokens it has, and is computed again in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from decode_service.scheduler import DecodeScheduler
from engine.page_pool import PagePool
from engine.prefix_cache import PrefixCache
from engine.sequence import Sequence
from prefill_service.scheduler import PrefillScheduler
from rpc.prompt_order import PromptOrder
from worker_runtime.step import SchedulerLoad, Step, StepLimits

StepPolicy = Literal["mixed", "prefill_first"]
NOTHING = Step()
NO_PREEMPTION = StepLimits(may_preempt=False)


@dataclass(eq=False)
class _Known:
    """What a sequence needs to be queued again."""

    sequence: Sequence
    max_tokens: int
    priority: int
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
        step_policy: StepPolicy = "mixed",
        prompt_order: PromptOrder = "fcfs",
    ) -> None:
        self._token_budget, self._max_num_sequences, self._step_policy = token_budget, max_num_sequences, step_policy
        self.prompts = PrefillScheduler(
            pool, cache, page_size, token_budget, max_num_sequences, prompt_order, self._growth_pages
        )
        self.decodes = DecodeScheduler(pool, cache, page_size, max_num_sequences)
        self._known: dict[str, _Known] = {}

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether a sequence, prompt and longest output, fits an empty pool."""
        return self.decodes.can_ever_fit(num_tokens)

    def add(
        self,
        sequence: Sequence,
        max_tokens: int,
        priority: int = 0,
        deadline: float | None = None,
        is_resumed: bool = False,
    ) -> None:
        """Queues a prompt. deadline: for its first token, on the clock of `StepLimits.now`. is_resumed: it goes before
        new prompts."""
        self._known[sequence.sequence_id] = _Known(sequence, max_tokens, priority)
        self.prompts.add(sequence, priority, deadline, is_resumed)

    def schedule(self, limits: StepLimits = StepLimits()) -> Step | None:  # noqa: B008
        """See `Scheduler.schedule`."""
        if self._step_policy == "prefill_first":
            prompts = self._schedule_prompts(limits, self._token_budget)
            decodes = self._schedule_decodes(limits) if not prompts.prompts else NOTHING
        else:
            decodes = self._schedule_decodes(limits)
            if decodes.is_short_of_pages:
                return decodes
            prompts = self._schedule_prompts(limits, self._token_budget - len(decodes.decodes))
        if prompts is NOTHING and decodes is NOTHING:
            return None
        return Step(decodes.decodes, prompts.prompts, prompts.expired, decodes.preempted, decodes.is_short_of_pages)

    def update(self, step: Step) -> None:
        """See `Scheduler.update`. Computed prompts begin to decode: their next token may be added."""
        self.decodes.update(step)
        self.prompts.update(step)
        for entry in step.prompts:
            if entry.sequence.num_uncomputed_tokens == 0:
                known = self._known[entry.sequence.sequence_id]
                self.decodes.adopt(entry.sequence, known.max_tokens, known.was_preempted)

    def finish(self, sequence: Sequence) -> None:
        """See `Scheduler.finish`. The length of an output is learned."""
        if self._known.pop(sequence.sequence_id, None) is not None:
            self.decodes.finish(sequence)
            self.prompts.abort(sequence)

    def abort(self, sequence: Sequence) -> None:
        """See `Scheduler.abort`."""
        if self._known.pop(sequence.sequence_id, None) is not None:
            self.decodes.abort(sequence)
            self.prompts.abort(sequence)

    def load(self) -> SchedulerLoad:
        """See `Scheduler.load`."""
        prompts, decodes = self.prompts, self.decodes
        return SchedulerLoad(
            {"waiting": prompts.num_waiting, "prompt": prompts.num_running, "running": decodes.num_running},
            prompts.queued_tokens,
            prompts.running_tokens,
            decodes.expected_growth_pages,
            prompts.refusals,
            prompts.num_restarts,
        )

    def _growth_pages(self, sequence: Sequence) -> int:
        return self.decodes.forecast_pages(sequence, self._known[sequence.sequence_id].max_tokens)

    def _schedule_decodes(self, limits: StepLimits) -> Step:
        # Before a decoding sequence is preempted, half-computed prompts give their pages back.
        step = self.decodes.schedule(NO_PREEMPTION) or NOTHING
        while step.is_short_of_pages and limits.may_preempt:
            may_give_back = self.prompts.give_back_youngest()
            step = self.decodes.schedule(NO_PREEMPTION if may_give_back else limits) or NOTHING
        for sequence in step.preempted:
            known = self._known[sequence.sequence_id]
            known.was_preempted = True
            sequence.num_computed_tokens = sequence.num_cached_tokens = sequence.num_published_pages = 0
            # The client has tokens already, so the deadline for the first one does not count any more.
            self.prompts.add(sequence, known.priority, None, is_resumed=True)
        return step

    def _schedule_prompts(self, limits: StepLimits, token_budget: int) -> Step:
        if not (self.prompts.num_waiting or self.prompts.num_running):
            return NOTHING
        of_prompts = StepLimits(
            limits.now,
            limits.tokens_per_second,
            token_budget=max(token_budget, 0),
            max_num_prompts=self._max_num_sequences - self.decodes.num_sequences,
            reserved_pages=self.decodes.peak_growth_pages,
        )
        return self.prompts.schedule(of_prompts) or NOTHING
