"""Which sequences a decode step advances. Pure: no clock, socket, thread or tensor.

reserved ── every page arrived ──> running ── EOS, a stop or a limit ──> released

Admission promises every page that a sequence may ever need, prompt and longest answer, so that none runs out of
memory half-way. Prompt pages are taken at once, since they are written from outside; the rest when it is reached.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.page_pool import PagePool
from engine.sequence import ScheduledSequence, Sequence, num_pages_for

Shortage = Literal["pages", "sequences"]


@dataclass(frozen=True)
class DecodeStep:
    """What the next step computes: one token per running sequence."""

    batch: tuple[ScheduledSequence, ...]


class DecodeScheduler:
    """Admits sequences by pages and runs all of them in every step."""

    def __init__(self, pool: PagePool, page_size: int, max_num_sequences: int) -> None:
        self._pool, self._page_size, self._max_num_sequences = pool, page_size, max_num_sequences
        self._promised: dict[str, int] = {}  # sequence id -> pages still to be taken
        self._running: dict[str, Sequence] = {}

    @property
    def num_sequences(self) -> int:
        """Sequences reserved or running."""
        return len(self._promised)

    @property
    def num_running(self) -> int:
        """Sequences that get a token in each step."""
        return len(self._running)

    @property
    def promised_pages(self) -> int:
        """Pages that admitted sequences may still take."""
        return sum(self._promised.values())

    def pages_needed(self, max_num_tokens: int) -> int:
        """Pages of a sequence of at most `max_num_tokens` tokens; the last token's KV is never computed."""
        return num_pages_for(max_num_tokens - 1, self._page_size)

    def can_ever_fit(self, max_num_tokens: int) -> bool:
        """Whether such a sequence fits an empty pool."""
        return self.pages_needed(max_num_tokens) <= self._pool.num_pages

    def reserve(self, sequence: Sequence, max_num_tokens: int) -> Shortage | None:
        """Takes pages for the tokens known and promises the rest. Returns what was short, or None."""
        if len(self._promised) >= self._max_num_sequences:
            return "sequences"
        now = num_pages_for(sequence.num_tokens, self._page_size)
        in_all = max(now, self.pages_needed(max_num_tokens))
        if self.promised_pages + in_all > self._pool.num_free:
            return "pages"
        page_table = self._pool.allocate(now)
        assert page_table is not None  # just checked
        sequence.page_table = page_table
        self._promised[sequence.sequence_id] = in_all - now
        return None

    def start(self, sequence: Sequence) -> None:
        """The sequence's KV is here; it runs from the next step on."""
        self._running[sequence.sequence_id] = sequence

    def schedule(self) -> DecodeStep | None:
        """Plans the next step, or None if nothing runs. Takes pages where a token begins a new one."""
        if not self._running:
            return None
        for sequence in self._running.values():
            missing = num_pages_for(sequence.num_tokens, self._page_size) - len(sequence.page_table)
            if missing > 0:
                page_ids = self._pool.allocate(missing)
                assert page_ids is not None  # promised at admission
                self._promised[sequence.sequence_id] -= missing
                sequence.page_table += page_ids
        return DecodeStep(tuple(ScheduledSequence(sequence, 1) for sequence in self._running.values()))

    def update(self, step: DecodeStep) -> None:
        """Takes note that a step was computed."""
        for entry in step.batch:
            entry.sequence.num_computed_tokens += entry.num_new_tokens

    def release(self, sequence: Sequence) -> None:
        """Forgets a sequence and lets go of its pages; those a writer may still touch are quarantined."""
        self._running.pop(sequence.sequence_id, None)
        if self._promised.pop(sequence.sequence_id, None) is not None:
            self._pool.release(sequence.page_table)
            sequence.page_table = []
