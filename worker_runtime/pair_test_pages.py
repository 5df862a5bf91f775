"""Test pages: sent over the real transport before a pair of workers is used, and compared byte by byte.

They lie behind the pages of the pool, so no request ever sees them, and a late write to them does no harm.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

import torch

from engine.kv_cache import KvCache


class PairTestPages(Protocol):
    """The test pages of a worker."""

    page_ids: tuple[int, ...]

    def digest(self) -> bytes:
        """SHA-256 of their bytes."""
        ...

    def clear(self) -> None:
        """Forgets what is in them, so that only a new write can make them equal again."""
        ...


class KvTestPages:
    """See `PairTestPages`. Filled with noise at the start, which is what a prefill worker sends."""

    def __init__(self, kv_cache: KvCache) -> None:
        self.page_ids = tuple(range(kv_cache.num_pages, kv_cache.num_pages + kv_cache.num_test_pages))
        self._bytes = kv_cache.tensor[kv_cache.num_pages :].view(torch.uint8)
        self._bytes.random_(0, 256)

    def digest(self) -> bytes:
        """See `PairTestPages.digest`."""
        return hashlib.sha256(self._bytes.cpu().numpy().tobytes()).digest()

    def clear(self) -> None:
        """See `PairTestPages.clear`."""
        self._bytes.zero_()
        if self._bytes.is_cuda:
            # The device may not have done it yet, and the next test may be on its way.
            torch.cuda.synchronize(self._bytes.device)
