"""Tracks the owners of each KV page. This module has ids and counts only; `kv_cache` has the memory.

A page has two kinds of owners: sequences that *hold* the page, and transfers that read or write the page.
A page can be allocated again only after all owners have released the page:

    free ── allocate ──> held ── release, a transfer still open ──> pinned or quarantined
      ^                   │                                             │
      └──── or cached <───┴── release ──────────── transfer ended ──────┘

*pinned*: one of our own transfers may still read the page. *quarantined*: a remote writer may still write to the page.
*cached*: the page has no owner, but the prefix cache can find it. When free pages run out, the least recently used
cached page is evicted.
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
"""Number of changes that are kept, for the log of a pool whose counts are inconsistent."""


@dataclass(frozen=True)
class PageCounts:
    """Pages by kind of owner. The counts add up to the pool."""

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
    """Allocates and releases pages. Not thread-safe: one thread owns a pool."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        # A heap, lowest id first: pages allocated together tend to be consecutive, so a transfer can merge them.
        self._free = list(range(num_pages))
        self._holders = [0] * num_pages
        self._readers = [0] * num_pages
        self._writers = [0] * num_pages
        self._is_cached = bytearray(num_pages)
        self._evictable: OrderedDict[int, None] = OrderedDict()  # cached pages without owner, least recently used first
        self.on_evict: Callable[[int], None] = lambda page: None
        """Called with a cached page just before that page is allocated to another holder."""
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
        """Pages without owner that are not cached."""
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can return: free pages, and cached pages without owner."""
        return len(self._free) + len(self._evictable)

    def counts(self) -> PageCounts:
        """Pages by kind of owner."""
        return PageCounts(
            len(self._free), self._num_held, len(self._evictable), self._num_pinned, self._num_quarantined
        )

    def allocate(self, num_pages: int) -> list[int] | None:
        """Allocates pages for one holder, consecutive where possible. None: too few pages are available."""
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
        """Adds a holder to pages found in the cache."""
        page_ids = tuple(page_ids)
        self._history.append(("hold", page_ids))
        for page in page_ids:
            if not self._is_cached[page]:
                raise PagePoolError(f"page {page} is not in the cache, so a holder can't be added")
            self._uncount(page)
            self._holders[page] += 1
            self._count(page)

    def num_exclusive(self, page_table: list[int]) -> int:
        """Estimates how many pages of a holder's table have no other holder.

        Sequences share a prefix, so a binary search finds the end of sharing. If two equal prompts were computed at
        once, some early pages are not shared either, and the estimate can be too low.
        """
        return len(page_table) - bisect.bisect_left(page_table, True, key=lambda page: self._holders[page] == 1)

    def keep(self, page: int) -> None:
        """Marks a page as cached: the prefix cache can find the page from now on. The page must be held."""
        if self._holders[page] == 0:
            raise PagePoolError(f"page {page} is added to the cache, but nobody holds it")
        self._is_cached[page] = True

    def drop(self, page: int) -> None:
        """Marks a page as not cached any more."""
        self._is_cached[page] = False
        if page in self._evictable:
            del self._evictable[page]
            heapq.heappush(self._free, page)

    def release(self, page_ids: Iterable[int]) -> None:
        """Removes a holder from pages. Of pages released together, the first is evicted first."""
        page_ids = tuple(page_ids)
        self._history.append(("release", page_ids))
        for page in page_ids:
            if self._holders[page] == 0:
                raise PagePoolError(f"page {page} is released by a holder it does not have")
            self._uncount(page)
            self._holders[page] -= 1
            self._count(page)

    def pin(self, page_ids: Iterable[int]) -> None:
        """One of our transfers is about to read these pages. The pages must be held."""
        self._add_owner("pin", self._readers, page_ids)

    def unpin(self, page_ids: Iterable[int]) -> None:
        """Our transfer does not read these pages any more."""
        self._drop_owner("unpin", self._readers, page_ids)

    def open_to_writer(self, page_ids: Iterable[int]) -> None:
        """A remote writer may write to these pages from now on. The pages must be held."""
        self._add_owner("open to a writer", self._writers, page_ids)

    def is_open_to_writer(self, page: int) -> bool:
        """Whether a remote writer may write to a page."""
        return self._writers[page] > 0

    def close_to_writer(self, page_ids: Iterable[int]) -> None:
        """The remote writer will not write to these pages any more."""
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
        """Compares the counts with the pages of all holders, open reads and open writes. Returns faults as text."""
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
                faults.append(f"{name} of {len(pages)} pages differ from those of the requests, first page {pages[0]}")
        if self.counts().total != self.num_pages:
            faults.append(f"{self.counts()} do not sum up to {self.num_pages}")
        return faults

    def _add_owner(self, change: str, owners: list[int], page_ids: Iterable[int]) -> None:
        page_ids = tuple(page_ids)
        self._history.append((change, page_ids))
        for page in page_ids:
            if self._holders[page] == 0:
                raise PagePoolError(f"page {page} is given to a transfer, but nobody holds it")
            owners[page] += 1

    def _drop_owner(self, change: str, owners: list[int], page_ids: Iterable[int]) -> None:
        page_ids = tuple(page_ids)
        self._history.append((change, page_ids))
        for page in page_ids:
            if owners[page] == 0:
                raise PagePoolError(f"page {page} is released by a transfer that does not own it")
            self._uncount(page)
            owners[page] -= 1
            self._count(page)

    def _uncount(self, page: int) -> None:
        """Removes an owned page from the counts, before its owners change."""
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

    def _count(self, page: int) -> None:
        """Adds a page to the counts again, after its owners changed."""
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
