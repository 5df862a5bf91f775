"""Keys of cached pages."""

from __future__ import annotations

import pytest

from engine.page_keys import first_parent, page_key, page_keys


@pytest.mark.parametrize("num_tokens", [0, 3, 4, 5, 8, 41])
def test_keys_of_all_pages_are_those_of_each_page(num_tokens):
    """Routers compute all at once, workers page by page."""
    tokens = [n * 7919 % 200_000 for n in range(num_tokens)]
    parent, each = first_parent("salt"), []
    for start in range(0, num_tokens - 3, 4):
        parent = page_key(parent, tokens[start : start + 4])
        each.append(parent)
    assert page_keys(tokens, 4, "salt") == tuple(each)
    assert len(set(each)) == num_tokens // 4
