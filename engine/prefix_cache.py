"""Finds pages that already hold the KV of a prefix, by a chain of hashes over full pages.

Keys are made in `page_keys`: equal keys mean equal tokens from the beginning of the sequence on, in every process.
Only full pages are shared. A shared page is computed, or its step is launched before any step that reads the page.
To get logits, a caller must exclude the last token from the match, because that token has to be computed.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.page_keys import first_parent, page_key
from engine.page_pool import PagePool
from engine.sequence import Sequence


def hash_full_pages(sequence: Sequence, page_size: int) -> list[bytes]:
    """Keys of all full pages of a sequence, without its pending token. Computed once and kept in the sequence."""
    hashes = sequence.page_hashes
    while (len(hashes) + 1) * page_size <= len(sequence.token_ids):
        start = len(hashes) * page_size
        parent = hashes[-1] if hashes else first_parent(sequence.cache_salt)
        hashes.append(page_key(parent, sequence.token_ids[start : start + page_size]))
    return hashes


@dataclass(frozen=True)
class CacheEvents:
    """Changes since the last call. No key is in both lists: only the last change of a key is reported."""

    added: list[bytes]
    evicted: list[bytes]

    def __bool__(self) -> bool:
        return bool(self.added or self.evicted)


class PrefixCache:
    """An index of cached pages. The pool counts holders and evicts the least recently used page."""

    def __init__(self, pool: PagePool, page_size: int, enabled: bool = True) -> None:
        self._pool, self._page_size, self._enabled = pool, page_size, enabled
        self._page_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._changed: dict[bytes, bool] = {}  # key -> whether the key is cached now
        pool.on_evict = self._on_evict

    def __len__(self) -> int:
        return len(self._page_of)

    def match(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Cached pages of a sequence's prefix of at most `num_tokens` tokens. The caller has to hold the pages."""
        if not self._enabled:
            return []
        most = num_tokens // self._page_size
        found: list[int] = []
        for key in hash_full_pages(sequence, self._page_size)[:most]:
            page = self._page_of.get(key)
            if page is None:
                break
            found.append(page)
        return found

    def publish(self, sequence: Sequence) -> None:
        """Adds the full, computed pages of a sequence to the cache. If a key is cached already, its page stays."""
        if not self._enabled:
            return
        hashes = hash_full_pages(sequence, self._page_size)
        num_full = min(sequence.num_computed_tokens // self._page_size, len(hashes))
        for index in range(sequence.num_published_pages, num_full):
            page, key = sequence.page_table[index], hashes[index]
            if key not in self._page_of:
                self._page_of[key], self._hash_of[page] = page, key
                self._pool.keep(page)
                self._changed[key] = True
        sequence.num_published_pages = max(num_full, sequence.num_published_pages)

    def flush(self) -> None:
        """Empties the cache. Pages in use stay with their holders."""
        for page in list(self._hash_of):
            self._forget(page)
            self._pool.drop(page)

    def take_events(self) -> CacheEvents:
        """Keys added and evicted since the last call."""
        changed, self._changed = self._changed, {}
        return CacheEvents(
            added=[key for key, is_cached in changed.items() if is_cached],
            evicted=[key for key, is_cached in changed.items() if not is_cached],
        )

    def keys(self) -> list[bytes]:
        """Keys of all cached pages."""
        return list(self._page_of)

    def _on_evict(self, page: int) -> None:
        self._forget(page)

    def _forget(self, page: int) -> None:
        key = self._hash_of.pop(page)
        del self._page_of[key]
        self._changed[key] = False
