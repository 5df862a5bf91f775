"""Which prompts a prefill step computes. Pure: no clock, socket, thread or tensor.

waiting ── a slot and pages for the whole prompt ──> running ── all tokens computed ──> finished

Two budgets per step: tokens computed, and pages. Prompts go in order of arrival. One over the token budget runs
as chunks; an unfinished one keeps its pages and goes first in the next step, so it can't be pushed out half-way.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from engine.page_pool import PagePool
from engine.sequence import ScheduledSequence, Sequence, num_pages_for


@dataclass(frozen=True)
class PrefillStep:
    """What the next step computes."""

    batch: tuple[ScheduledSequence, ...]

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of the step."""
        return sum(entry.num_new_tokens for entry in self.batch)


class PrefillScheduler:
    """Admits prompts and cuts them into chunks."""

    def __init__(self, pool: PagePool, page_size: int, token_budget: int, max_num_sequences: int) -> None:
        self._pool, self._page_size = pool, page_size
        self._token_budget, self._max_num_sequences = token_budget, max_num_sequences
        self._waiting: OrderedDict[str, Sequence] = OrderedDict()
        self._running: OrderedDict[str, Sequence] = OrderedDict()

    @property
    def num_waiting(self) -> int:
        """Prompts not begun."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Prompts begun and not finished."""
        return len(self._running)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens still to compute."""
        return sum(
            sequence.num_uncomputed_tokens for queue in (self._waiting, self._running) for sequence in queue.values()
        )

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether a prompt of this length fits an empty pool."""
        return num_pages_for(num_tokens, self._page_size) <= self._pool.num_pages

    def add(self, sequence: Sequence) -> None:
        """Queues a prompt."""
        self._waiting[sequence.sequence_id] = sequence

    def schedule(self) -> PrefillStep | None:
        """Plans the next step, or None if nothing can run now. Takes pages for admitted prompts."""
        budget = self._token_budget
        batch: list[ScheduledSequence] = []
        for sequence in self._running.values():
            if budget == 0:
                break
            chunk = min(sequence.num_uncomputed_tokens, budget)
            batch.append(ScheduledSequence(sequence, chunk))
            budget -= chunk
        while budget and self._waiting and len(self._running) < self._max_num_sequences:
            sequence = next(iter(self._waiting.values()))
            if not self._admit(sequence):
                break
            chunk = min(sequence.num_uncomputed_tokens, budget)
            batch.append(ScheduledSequence(sequence, chunk))
            budget -= chunk
        return PrefillStep(tuple(batch)) if batch else None

    def _admit(self, sequence: Sequence) -> bool:
        """Takes pages for the whole prompt, so that it can't get stuck half-way."""
        page_table = self._pool.allocate(num_pages_for(sequence.num_tokens, self._page_size))
        if page_table is None:
            return False
        sequence.page_table = page_table
        del self._waiting[sequence.sequence_id]
        self._running[sequence.sequence_id] = sequence
        return True

    def update(self, step: PrefillStep) -> None:
        """Takes note that a step was computed. Finished prompts leave; their pages stay held until `release`."""
        for entry in step.batch:
            entry.sequence.num_computed_tokens += entry.num_new_tokens
            if entry.sequence.num_uncomputed_tokens == 0:
                del self._running[entry.sequence.sequence_id]

    def abort(self, sequence: Sequence) -> None:
        """Forgets a prompt, wherever it is, and lets go of its pages."""
        self._waiting.pop(sequence.sequence_id, None)
        self._running.pop(sequence.sequence_id, None)
        self.release(sequence)

    def release(self, sequence: Sequence) -> None:
        """Lets go of a sequence's pages; those that a transfer still reads stay pinned."""
        self._pool.release(sequence.page_table)
        sequence.page_table = []
