"""Which sequences a decode step advances, and whom to let in. Pure: no clock, socket, thread or tensor.

reserved ── every page arrived ──> running ── EOS, a stop or a limit ──> finished
                                      └────── pages ran out ───────────> preempted: it goes back to the router

A sequence is admitted if it fits together with the growth of all others. With ``admission="learned"`` growth is a
forecast from outputs that have ended. What counts is the peak: at the end of each sequence, the sequences that end
later have grown until then, and those that ended before have given their pages back (as in Gong et al., "Past-Future
Scheduler", ASPLOS 2025). Where the forecast was too low, the youngest sequence outside the step is preempted.
With ``admission="full"`` every admitted sequence is promised its longest output, and none is ever preempted.

Prompt pages are taken at once, since they are written from outside; the rest when they are reached.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from decode_service.growth import OutputLengths
from engine.page_pool import PagePool
from engine.prefix_cache import PrefixCache
from engine.sequence import ScheduledSequence, Sequence, num_pages_for
from worker_runtime.step import SchedulerLoad, Step, StepLimits

Shortage = Literal["pages", "sequences"]
DecodeAdmission = Literal["learned", "full"]


@dataclass(eq=False)
class _Admitted:
    sequence: Sequence
    max_tokens: int
    was_preempted: bool
    arrival: int
    is_running: bool = False

    @property
    def seniority(self) -> tuple[bool, int]:
        """Smaller is preempted later: a sequence that was preempted before is not the next victim."""
        return (not self.was_preempted, self.arrival)


class DecodeScheduler:
    """Admits sequences by pages and runs all of them in every step."""

    def __init__(
        self,
        pool: PagePool,
        cache: PrefixCache,
        page_size: int,
        max_num_sequences: int,
        admission: DecodeAdmission = "learned",
    ) -> None:
        self.pool, self._cache, self._page_size = pool, cache, page_size
        self._max_num_sequences, self._admission = max_num_sequences, admission
        self._admitted: dict[str, _Admitted] = {}
        self._arrivals = itertools.count()
        self.lengths = OutputLengths()

    @property
    def num_sequences(self) -> int:
        """Sequences reserved or running."""
        return len(self._admitted)

    @property
    def num_running(self) -> int:
        """Sequences that get a token in each step."""
        return sum(admitted.is_running for admitted in self._admitted.values())

    @property
    def peak_growth_pages(self) -> int:
        """Most pages that admitted sequences are expected to take on top of theirs, at the same time."""
        return self._peak_growth_pages(self._admitted.values())

    @property
    def expected_growth_pages(self) -> int:
        """Pages that admitted sequences are expected to take until they end."""
        return sum(self._growth_pages(a, self._final_num_tokens(a)) for a in self._admitted.values())

    def forecast_pages(self, sequence: Sequence, max_tokens: int) -> int:
        """Pages that a sequence which is not admitted yet is expected to take beyond those of its known tokens."""
        final = sequence.num_prompt_tokens + self.lengths.forecast(sequence.num_output_tokens, max_tokens)
        now = num_pages_for(sequence.num_tokens, self._page_size)
        return max(0, self.pages_needed(final) - now)

    def pages_needed(self, num_tokens: int) -> int:
        """Pages of a whole sequence of `num_tokens` tokens; the last token's KV is never computed."""
        return num_pages_for(num_tokens - 1, self._page_size)

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether such a sequence fits an empty pool."""
        return self.pages_needed(num_tokens) <= self.pool.num_pages

    def reserve(self, sequence: Sequence, max_tokens: int, was_preempted: bool = False) -> Shortage | None:
        """Takes pages for the tokens known, those of a known beginning from the cache. Returns what was short, or None.

        max_tokens: of output. On success `page_table` is filled and `num_cached_tokens` says how much is there already.
        """
        if len(self._admitted) >= self._max_num_sequences:
            return "sequences"
        matched = self._cache.match(sequence, sequence.num_tokens)
        # First locked, then counted: locking turns pages that were to be had into held ones.
        self.pool.hold(matched)
        missing = num_pages_for(sequence.num_tokens, self._page_size) - len(matched)
        sequence.page_table = matched
        new = _Admitted(sequence, max_tokens, was_preempted, next(self._arrivals))
        page_ids = self.pool.allocate(missing) if self._fits(new, missing) else None
        if page_ids is None:
            self.pool.release(reversed(matched))
            sequence.page_table = []
            return "pages"
        sequence.page_table = matched + page_ids
        sequence.num_published_pages = len(matched)
        sequence.num_cached_tokens = len(matched) * self._page_size
        self._admitted[sequence.sequence_id] = new
        return None

    def adopt(self, sequence: Sequence, max_tokens: int, was_preempted: bool) -> None:
        """A sequence whose KV was computed here, into pages that it has already: it runs from the next step on."""
        new = _Admitted(sequence, max_tokens, was_preempted, next(self._arrivals), is_running=True)
        self._admitted[sequence.sequence_id] = new

    def start(self, sequence: Sequence) -> None:
        """The sequence's KV is here; it runs from the next step on, and its pages can be shared."""
        self._admitted[sequence.sequence_id].is_running = True
        self._cache.publish(sequence)

    def schedule(self, limits: StepLimits = StepLimits()) -> Step | None:  # noqa: B008
        """See `Scheduler.schedule`. Takes a page where a token begins a new one."""
        waiting = sorted((a for a in self._admitted.values() if _goes_on(a)), key=lambda a: a.seniority)
        batch: list[ScheduledSequence] = []
        preempted: list[Sequence] = []
        while waiting:
            first = waiting.pop(0)
            while not self._grow(first.sequence):
                if not limits.may_preempt:
                    return Step(is_short_of_pages=True)
                if (victim := self._youngest_with_pages(waiting)) is None:
                    break
                waiting.remove(victim)
                preempted.append(self._preempt(victim))
            if self._has_room(first.sequence):
                batch.append(ScheduledSequence(first.sequence, 1))
            elif batch:
                preempted.append(self._preempt(first))
            elif (reserved := self._youngest_with_pages(self._being_filled())) is not None:
                # An older sequence must not wait for a foreign prompt: the reservation of that prompt goes.
                preempted.append(self._preempt(reserved))
            # Else the sequence waits for a writer to let go of pages.
        if preempted:
            self.lengths.ran_out()
        return Step(decodes=tuple(batch), preempted=tuple(preempted)) if batch or preempted else None

    def _youngest_with_pages(self, candidates: Iterable[_Admitted]) -> _Admitted | None:
        """The next victim: the youngest that would give pages back."""
        fitting = [a for a in candidates if self.pool.num_exclusive(a.sequence.page_table)]
        return max(fitting, key=lambda a: a.seniority, default=None)

    def _being_filled(self) -> list[_Admitted]:
        """Those that wait for their KV; none while pages of earlier ones are still on their way back from a writer."""
        if self.pool.counts().quarantined:
            return []
        return [a for a in self._admitted.values() if not a.is_running]

    def update(self, step: Step) -> None:
        """See `Scheduler.update`."""
        for entry in step.decodes:
            entry.sequence.num_computed_tokens += entry.num_new_tokens

    def finish(self, sequence: Sequence) -> None:
        """See `Scheduler.finish`. The length of the output is learned, and the pages stay cached."""
        admitted = self._admitted.get(sequence.sequence_id)
        if admitted is not None and admitted.is_running:
            self.lengths.learn(sequence.num_output_tokens - sequence.num_pending_tokens, admitted.max_tokens)
            self._cache.publish(sequence)
        self.abort(sequence)

    def abort(self, sequence: Sequence) -> None:
        """See `Scheduler.abort`. Pages that a writer may still touch are quarantined."""
        if self._admitted.pop(sequence.sequence_id, None) is not None:
            # From the end: a page is of no use to the cache without the pages before it.
            self.pool.release(reversed(sequence.page_table))
            sequence.page_table = []

    def load(self) -> SchedulerLoad:
        """See `Scheduler.load`."""
        return SchedulerLoad(
            {"receiving": self.num_sequences - self.num_running, "running": self.num_running},
            expected_growth_pages=self.expected_growth_pages,
        )

    def _fits(self, new: _Admitted, missing: int) -> bool:
        """Whether `missing` pages can be taken now, and those that all will need later."""
        available = self.pool.num_available
        if missing > available:
            return False
        everyone = [*self._admitted.values(), new]
        # If the sum fits, so does the peak, which takes longer to find.
        in_all = sum(self._growth_pages(a, self._final_num_tokens(a)) for a in everyone)
        return in_all <= available or (self._admission == "learned" and self._peak_growth_pages(everyone) <= available)

    def _peak_growth_pages(self, everyone: Iterable[_Admitted]) -> int:
        """Most pages that will be taken on top of those taken now, if every forecast is right."""
        by_end = sorted(((self._final_num_tokens(a) - a.sequence.num_tokens, a) for a in everyone), key=lambda e: e[0])
        peak = freed = 0
        for index, (steps, ending) in enumerate(by_end):
            taken = sum(self._growth_pages(a, a.sequence.num_tokens + steps) for _, a in by_end[index:])
            peak = max(peak, taken - freed)
            freed += self.pool.num_exclusive(ending.sequence.page_table)
        return peak

    def _final_num_tokens(self, admitted: _Admitted) -> int:
        sequence = admitted.sequence
        if self._admission == "full":
            return sequence.num_prompt_tokens + admitted.max_tokens
        return sequence.num_prompt_tokens + self.lengths.forecast(sequence.num_output_tokens, admitted.max_tokens)

    def _growth_pages(self, admitted: _Admitted, num_tokens: int) -> int:
        """Pages to take until a sequence has `num_tokens` tokens, or those it has now."""
        if admitted.is_running and not _goes_on(admitted):
            return 0  # its KV ends before its last token
        now = num_pages_for(admitted.sequence.num_tokens, self._page_size)
        return max(now, self.pages_needed(num_tokens)) - len(admitted.sequence.page_table)

    def _has_room(self, sequence: Sequence) -> bool:
        return len(sequence.page_table) * self._page_size >= sequence.num_tokens

    def _grow(self, sequence: Sequence) -> bool:
        """Takes a page if the next token begins one. False: none is to be had."""
        if self._has_room(sequence):
            return True
        page_ids = self.pool.allocate(1)
        if page_ids is None:
            return False
        sequence.page_table += page_ids
        return True

    def _preempt(self, victim: _Admitted) -> Sequence:
        """Takes a sequence's pages. Those filled stay as cache while nobody needs them, for when it comes back."""
        if victim.is_running:
            self._cache.publish(victim.sequence)
        self.abort(victim.sequence)
        return victim.sequence


def _goes_on(admitted: _Admitted) -> bool:
    """Whether a sequence gets another token. One whose last token is pending does not."""
    sequence = admitted.sequence
    is_last_pending = bool(sequence.num_pending_tokens) and sequence.num_output_tokens >= admitted.max_tokens
    return admitted.is_running and not is_last_pending
