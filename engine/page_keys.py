"""Keys under which prefix caches find pages, equal in every process. This module does not import torch.

A page's key is a 128-bit BLAKE2b of its parent's key and its own token ids. The first page's parent is a hash of the
cache salt. So equal keys mean equal tokens from the beginning of the sequence on.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence as Seq

KEY_BYTES = 16


def first_parent(cache_salt: str) -> bytes:
    """The parent key of a sequence's first page."""
    return hashlib.blake2b(cache_salt.encode(), digest_size=KEY_BYTES, person=b"kvferry salt").digest()


def page_key(parent: bytes, token_ids: Seq[int]) -> bytes:
    """Key of a full page with these tokens after the page with key `parent`."""
    return _key(parent + array("i", token_ids).tobytes())


def page_keys(token_ids: Seq[int], page_size: int, cache_salt: str) -> tuple[bytes, ...]:
    """Keys of all full pages of a sequence."""
    keys: list[bytes] = []
    parent = first_parent(cache_salt)
    tokens = array("i", token_ids)
    content = tokens.tobytes()
    page_bytes = page_size * tokens.itemsize
    for end in range(page_bytes, len(content) + 1, page_bytes):
        parent = _key(parent + content[end - page_bytes : end])
        keys.append(parent)
    return tuple(keys)


def _key(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=KEY_BYTES).digest()
