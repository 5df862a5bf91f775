"""Which prompts a prefill step computes. Pure: no clock, socket, thread or tensor; time is an argument.

waiting ── a slot, and pages for all of it ──> running ── all tokens computed ──> finished
   ^                                             │
   └── gave its pages back (only when nothing else could run) ──┘

A step has two budgets, both in `Budget`: tokens computed, and pages. Admission promises pages for the whole prompt, so
that half-computed prompts can't block each other; the pages themselves are taken chunk by chunk.

For the order of prompts see `rpc.prompt_order`. In order of arrival an unfinished prompt goes first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.page_pool import PagePool
from engine.prefix_cache import PrefixCache
from engine.sequence import ScheduledSequence, Sequence, num_pages_for
from rpc.prompt_order import SLOWDOWN, Arrivals, Order, PromptOrder
from worker_runtime.step import SchedulerLoad, Step, StepLimits

MAX_LOGIT_ROWS = 256
"""Prompt tokens per step whose logits are computed: [256, 128k vocabulary] in fp32 take 134 MB."""


@dataclass
class Budget:
    """What is left of a step's two budgets while it is planned."""

    tokens: int
    reserved_pages: int
    """Pages of the pool that must be left to others."""
    logit_rows: int = MAX_LOGIT_ROWS
    """Prompt tokens whose logits may be computed, for log-probabilities of the prompt."""
    batch: list[ScheduledSequence] = field(default_factory=list)


@dataclass(eq=False)
class _Prompt:
    sequence: Sequence
    order: Order
    deadline: float | None
    overtaken_tokens: int = 0
    """Prompt tokens of later ones that were admitted while this one lacked pages."""


class PrefillScheduler:
    """Admits prompts and cuts them into chunks."""

    def __init__(
        self,
        pool: PagePool,
        cache: PrefixCache,
        page_size: int,
        token_budget: int,
        max_num_sequences: int,
        prompt_order: PromptOrder = "fcfs",
        growth_pages: Callable[[Sequence], int] = lambda sequence: 0,
    ) -> None:
        """growth_pages: the pages that the output of a prompt will take, if it is generated on this worker."""
        self._growth_pages = growth_pages
        self.pool, self._cache, self._page_size = pool, cache, page_size
        self._token_budget, self._max_num_sequences = token_budget, max_num_sequences
        self._prompt_order: PromptOrder = prompt_order
        self._waiting: dict[str, _Prompt] = {}
        self._running: dict[str, _Prompt] = {}
        self._arrivals = Arrivals()
        self.refusals: Counter[str] = Counter()
        """How often a prompt had to wait, by what was short: sequences, pages, pages_after_lock, chunk_pages."""
        self.num_restarts = 0
        """Half-computed prompts that gave their pages back."""

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
        """Prompt tokens of prompts not begun."""
        return sum(prompt.sequence.num_uncomputed_tokens for prompt in self._waiting.values())

    @property
    def running_tokens(self) -> int:
        """Prompt tokens still to compute of prompts begun."""
        return sum(prompt.sequence.num_uncomputed_tokens for prompt in self._running.values())

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether a prompt of this length fits an empty pool."""
        return num_pages_for(num_tokens, self._page_size) <= self.pool.num_pages

    def add(
        self, sequence: Sequence, priority: int = 0, deadline: float | None = None, is_resumed: bool = False
    ) -> None:
        """Queues a prompt. deadline: on the clock of `schedule`'s `now`. is_resumed: it goes ahead of new ones."""
        slowdown = SLOWDOWN[self._prompt_order]
        order = self._arrivals.order(sequence.num_tokens, priority, slowdown, is_new=not is_resumed)
        self._waiting[sequence.sequence_id] = _Prompt(sequence, order, deadline)

    def schedule(self, limits: StepLimits = StepLimits()) -> Step | None:  # noqa: B008
        """See `Scheduler.schedule`."""
        expired = self._expire(limits.now, limits.tokens_per_second)
        batch = self._plan(limits)
        while not batch and limits.token_budget != 0 and self.num_running > 1 and self.give_back_youngest():
            batch = self._plan(limits)
        return Step(prompts=tuple(batch), expired=expired) if batch or expired else None

    def update(self, step: Step) -> None:
        """See `Scheduler.update`. Computed prompts leave; their pages stay held until `finish` or `abort`."""
        for entry in step.prompts:
            sequence = entry.sequence
            sequence.num_computed_tokens += entry.num_new_tokens
            self._cache.publish(sequence)
            if sequence.num_uncomputed_tokens == 0:
                del self._running[sequence.sequence_id]

    def finish(self, sequence: Sequence) -> None:
        """See `Scheduler.finish`."""
        self.abort(sequence)

    def load(self) -> SchedulerLoad:
        """See `Scheduler.load`."""
        return SchedulerLoad(
            {"waiting": self.num_waiting, "running": self.num_running},
            queued_tokens=self.queued_tokens,
            running_tokens=self.running_tokens,
            refusals=self.refusals,
            num_restarts=self.num_restarts,
        )

    def abort(self, sequence: Sequence) -> None:
        """See `Scheduler.abort`. Pages that a transfer still reads stay pinned."""
        self._waiting.pop(sequence.sequence_id, None)
        self._running.pop(sequence.sequence_id, None)
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        # From the end: a page is of no use to the cache without the pages before it.
        self.pool.release(reversed(sequence.page_table))
        sequence.page_table = []

    def _expire(self, now: float, tokens_per_second: float | None) -> tuple[Sequence, ...]:
        """Prompts whose deadline passed, or can't be met any more, leave."""
        late: list[Sequence] = []
        for prompts, is_waiting in ((self._running, False), (self._waiting, True)):
            for prompt in prompts.values():
                if prompt.deadline is None:
                    continue
                needed = 0.0
                if is_waiting and tokens_per_second:
                    needed = prompt.sequence.num_uncomputed_tokens / tokens_per_second
                    if now + needed >= prompt.deadline:
                        # What the cache has need not be computed.
                        num_cached = len(self._match(prompt.sequence)) * self._page_size
                        needed -= num_cached / tokens_per_second
                if now + needed >= prompt.deadline:
                    late.append(prompt.sequence)
        for sequence in late:
            self.abort(sequence)
        return tuple(late)

    def _plan(self, limits: StepLimits) -> list[ScheduledSequence]:
        token_budget = self._token_budget if limits.token_budget is None else limits.token_budget
        max_running = self._max_num_sequences if limits.max_num_prompts is None else limits.max_num_prompts
        budget = Budget(token_budget, limits.reserved_pages)
        blocked: list[_Prompt] = []
        for prompt in self._in_order():
            if budget.tokens == 0:
                break
            sequence = prompt.sequence
            if sequence.sequence_id not in self._running:
                if len(self._running) >= max_running:
                    self.refusals["sequences"] += 1
                    continue
                # Later prompts may pass one that lacks pages, but only its own length of them.
                if any(other.overtaken_tokens >= other.sequence.num_tokens for other in blocked):
                    continue
                if not self._admit(prompt, budget):
                    blocked.append(prompt)
                    continue
                for other in blocked:
                    other.overtaken_tokens += sequence.num_uncomputed_tokens
            self._take_chunk(sequence, budget)
        return budget.batch

    def _in_order(self) -> list[_Prompt]:
        running = sorted(self._running.values(), key=lambda prompt: prompt.order)
        waiting = sorted(self._waiting.values(), key=lambda prompt: prompt.order)
        if self._prompt_order == "fcfs":
            return running + waiting
        return sorted(running + waiting, key=lambda prompt: prompt.order)

    def _admit(self, prompt: _Prompt, budget: Budget) -> bool:
        """Match the prefix, fit, lock, fit again; else unlock. False: not now."""
        sequence = prompt.sequence
        matched = self._match(sequence)
        needed = num_pages_for(sequence.num_tokens, self._page_size) - len(matched)
        if self._running or budget.reserved_pages:  # alone it may try: what does not fit is computed again later
            needed += self._growth_pages(sequence)
        if needed > self._unpromised_pages(budget):
            self.refusals["pages"] += 1
            return False
        self.pool.hold(matched)
        # Locking turned evictable pages into held ones, so there may be fewer to be had than a moment ago.
        if needed > self._unpromised_pages(budget):
            self.pool.release(reversed(matched))
            self.refusals["pages_after_lock"] += 1
            return False
        sequence.page_table = matched
        sequence.num_published_pages = len(matched)
        sequence.num_computed_tokens = sequence.num_cached_tokens = len(matched) * self._page_size
        del self._waiting[sequence.sequence_id]
        self._running[sequence.sequence_id] = prompt
        return True

    def _match(self, sequence: Sequence) -> list[int]:
        """Pages of the cache that a prompt can begin with."""
        # The last token is always computed: its logits are needed. With prompt_logprobs those of all tokens are.
        return self._cache.match(sequence, 0 if sequence.sampling.prompt_logprobs else sequence.num_tokens - 1)

    def _unpromised_pages(self, budget: Budget) -> int:
        promised = sum(
            num_pages_for(p.sequence.num_tokens, self._page_size)
            - len(p.sequence.page_table)
            + self._growth_pages(p.sequence)
            for p in self._running.values()
        )
        return self.pool.num_available - budget.reserved_pages - promised

    def _take_chunk(self, sequence: Sequence, budget: Budget) -> None:
        """As many of the sequence's next tokens as both budgets allow; with few pages left the chunk shrinks."""
        tokens = min(sequence.num_uncomputed_tokens, budget.tokens)
        if sequence.sampling.prompt_logprobs:
            tokens = min(tokens, budget.logit_rows)
            if tokens == 0:
                return  # in the next step
        room = (len(sequence.page_table) + self.pool.num_available - budget.reserved_pages) * self._page_size
        tokens = min(tokens, room - sequence.num_computed_tokens)
        if tokens <= 0:
            self.refusals["chunk_pages"] += 1
            return
        missing = num_pages_for(sequence.num_computed_tokens + tokens, self._page_size) - len(sequence.page_table)
        page_ids = self.pool.allocate(max(missing, 0))
        assert page_ids is not None  # within `room`
        sequence.page_table += page_ids
        budget.batch.append(ScheduledSequence(sequence, tokens))
        budget.tokens -= tokens
        if sequence.sampling.prompt_logprobs:
            budget.logit_rows -= tokens

    def give_back_youngest(self) -> bool:
        """When half-computed prompts hold what others lack: the last in order starts anew. False if there is none.

        Promises make this needless unless others took pages that were promised (a colocated worker's decodes).
        """
        if not self._running:
            return False
        prompt = max(self._running.values(), key=lambda p: p.order)
        sequence = prompt.sequence
        self._release(sequence)
        sequence.num_computed_tokens = sequence.num_cached_tokens = sequence.num_published_pages = 0
        del self._running[sequence.sequence_id]
        self._waiting[sequence.sequence_id] = prompt
        self.num_restarts += 1
        return True
