"""Who owns which page. Ids and counts only; the memory is `kv_cache`'s.

A page has up to two kinds of owner: sequences that *hold* it, and transfers that may touch it.
It can be given to another only when both let go:

    free ── allocate ──> held ── release, a transfer still open ──> pinned or quarantined
      ^                   │                                             │
      └──── or cached <───┴── release ──────────── transfer ended ──────┘

*pinned*: one of our own writes may still read the page. *quarantined*: a foreign writer may still write to it.
*cached*: nobody owns it, but the prefix cache knows what is in it; the one unused for longest is taken when pages
run out.
At every moment ``free + held + cached + pinned + quarantined == total``.
"""

from __future__ import annotations

import bisect
import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from engine.errors import PagePoolError

HISTORY_LENGTH = 200
"""Changes that are remembered, for the log of a pool that does not add up."""


@dataclass(frozen=True)
class PageCounts:
    """Pages by owner. They add up to the pool."""

    free: int
    held: int
    cached: int
    pinned: int
    quarantined: int

    @property
    def total(self) -> int:
        """All pages of the pool."""
        return self.free + self.held + self.cached + self.pinned + self.quarantined


class PagePool:
    """Hands out pages and takes them back. Not thread-safe: one thread owns it."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        # Lowest id first, so that pages handed out together tend to be neighbours and travel as one run.
        self._free = list(range(num_pages))
        self._holders = [0] * num_pages
        self._readers = [0] * num_pages
        self._writers = [0] * num_pages
        self._is_cached = bytearray(num_pages)
        self._evictable: OrderedDict[int, None] = OrderedDict()  # cached pages without owner, oldest use first
        self.on_evict: Callable[[int], None] = lambda page: None
        """Told about a cached page just before it is given to somebody else."""
        self._num_held = 0
        self._num_pinned = 0
        self._num_quarantined = 0
        self._history: deque[tuple[str, tuple[int, ...]]] = deque(maxlen=HISTORY_LENGTH)

    def __repr__(self) -> str:
        counts = self.counts()
        parts = [f"{counts.free} free", f"{counts.held} held"]
        parts += [
            f"{n} {name}"
            for name, n in (("cached", counts.cached), ("pinned", counts.pinned), ("quarantined", counts.quarantined))
            if n
        ]
        return f"<PagePool {', '.join(parts)}>"

    @property
    def num_free(self) -> int:
        """Pages nobody owns."""
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can give: free ones, and cached ones that nobody owns."""
        return len(self._free) + len(self._evictable)

    def counts(self) -> PageCounts:
        """Pages by owner."""
        return PageCounts(
            len(self._free), self._num_held, len(self._evictable), self._num_pinned, self._num_quarantined
        )

    def allocate(self, num_pages: int) -> list[int] | None:
        """Takes pages for one holder, neighbours where possible. None: not now."""
        if num_pages > self.num_available:
            return None
        while len(self._free) < num_pages:
            page, _ = self._evictable.popitem(last=False)
            self.on_evict(page)
            self._is_cached[page] = False
            heapq.heappush(self._free, page)
        page_ids = [heapq.heappop(self._free) for _ in range(num_pages)]
        for page in page_ids:
            self._holders[page] = 1
        self._num_held += num_pages
        self._history.append(("allocate", tuple(page_ids)))
        return page_ids

    def hold(self, page_ids: Iterable[int]) -> None:
        """One more holder for pages found in the cache."""
        page_ids = tuple(page_ids)
        self._history.append(("hold", page_ids))
        for page in page_ids:
            if not self._is_cached[page]:
                raise PagePoolError(f"page {page} is not in the cache, so nobody can join its holders")
            self._forget(page)
            self._holders[page] += 1
            self._remember(page)

    def num_exclusive(self, page_table: list[int]) -> int:
        """About how many pages of a holder's table nobody else holds.

        Pages are shared from the beginning of sequences on, so it is looked up where sharing ends. Where two equal
        prompts were computed at once, each may have some early pages of its own; those can be missed.
        """
        return len(page_table) - bisect.bisect_left(page_table, True, key=lambda page: self._holders[page] == 1)

    def keep(self, page: int) -> None:
        """The prefix cache knows what is in a page from now on; it must be held."""
        if self._holders[page] == 0:
            raise PagePoolError(f"page {page} is put into the cache but nobody holds it")
        self._is_cached[page] = True

    def drop(self, page: int) -> None:
        """The prefix cache forgets a page."""
        self._is_cached[page] = False
        if page in self._evictable:
            del self._evictable[page]
            heapq.heappush(self._free, page)

    def release(self, page_ids: Iterable[int]) -> None:
        """A holder lets go. Of pages released together, the first is the first to be evicted."""
        page_ids = tuple(page_ids)
        self._history.append(("release", page_ids))
        for page in page_ids:
            if self._holders[page] == 0:
                raise PagePoolError(f"page {page} is released by a holder it does not have")
            self._forget(page)
            self._holders[page] -= 1
            self._remember(page)

    def pin(self, page_ids: Iterable[int]) -> None:
        """One of our writes is about to read these pages; they must be held."""
        self._add_owner("pin", self._readers, page_ids)

    def unpin(self, page_ids: Iterable[int]) -> None:
        """That write ended."""
        self._drop_owner("unpin", self._readers, page_ids)

    def open_to_writer(self, page_ids: Iterable[int]) -> None:
        """A foreign writer may write to these pages from now on; they must be held."""
        self._add_owner("open to a writer", self._writers, page_ids)

    def is_open_to_writer(self, page: int) -> bool:
        """Whether a foreign writer may write to a page."""
        return self._writers[page] > 0

    def close_to_writer(self, page_ids: Iterable[int]) -> None:
        """That writer will not touch them again."""
        self._drop_owner("close to a writer", self._writers, page_ids)

    def history(self) -> list[str]:
        """The last changes, oldest first."""
        return [f"{change} {list(page_ids)}" for change, page_ids in self._history]

    def check(
        self,
        tables: Iterable[Iterable[int]],
        reads: Iterable[Iterable[int]] = (),
        writes: Iterable[Iterable[int]] = (),
    ) -> list[str]:
        """What is wrong, in words, if the pages of all holders, open reads and open writes are these."""
        faults = []
        for name, owners, expected in (
            ("holders", self._holders, tables),
            ("readers", self._readers, reads),
            ("writers", self._writers, writes),
        ):
            counted = [0] * self.num_pages
            for page_ids in expected:
                for page in page_ids:
                    counted[page] += 1
            if counted != owners:
                pages = [page for page in range(self.num_pages) if counted[page] != owners[page]]
                faults.append(f"{name} of {len(pages)} pages are not those of the requests, first page {pages[0]}")
        if self.counts().total != self.num_pages:
            faults.append(f"{self.counts()} do not sum up to {self.num_pages}")
        return faults

    def _add_owner(self, change: str, owners: list[int], page_ids: Iterable[int]) -> None:
        page_ids = tuple(page_ids)
        self._history.append((change, page_ids))
        for page in page_ids:
            if self._holders[page] == 0:
                raise PagePoolError(f"page {page} is given to a transfer but nobody holds it")
            owners[page] += 1

    def _drop_owner(self, change: str, owners: list[int], page_ids: Iterable[int]) -> None:
        page_ids = tuple(page_ids)
        self._history.append((change, page_ids))
        for page in page_ids:
            if owners[page] == 0:
                raise PagePoolError(f"page {page} is let go by a transfer that does not own it")
            self._forget(page)
            owners[page] -= 1
            self._remember(page)

    def _forget(self, page: int) -> None:
        """Takes an owned page out of the counts, before its owners change."""
        if self._holders[page]:
            self._num_held -= 1
        elif self._writers[page]:
            self._num_quarantined -= 1
        elif self._readers[page]:
            self._num_pinned -= 1
        elif page in self._evictable:
            del self._evictable[page]
        else:
            raise PagePoolError(f"page {page} is free already")

    def _remember(self, page: int) -> None:
        """Puts a page back into the counts, after its owners changed."""
        if self._holders[page]:
            self._num_held += 1
        elif self._writers[page]:
            self._num_quarantined += 1
        elif self._readers[page]:
            self._num_pinned += 1
        elif self._is_cached[page]:
            self._evictable[page] = None
        else:
            heapq.heappush(self._free, page)
