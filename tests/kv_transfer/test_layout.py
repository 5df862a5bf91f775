"""Workers whose pages do not mean the same are told apart, in words."""

from __future__ import annotations

import dataclasses

import pytest

from kv_transfer.errors import LayoutMismatch
from kv_transfer.layout import Fingerprint, check_equal


def make_fingerprint(**changes):
    base = Fingerprint("config", "weights", "tokenizer", "float32", 16, 30, 3, 64, "layer,kv", "{}", 2048, "none")
    return dataclasses.replace(base, **changes)


def test_equal_ones_pair_and_survive_the_wire():
    fingerprint = make_fingerprint()
    check_equal(fingerprint, Fingerprint.from_proto(fingerprint.to_proto()))


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Fingerprint)])
def test_each_difference_is_named_with_both_values(field):
    """Casebook C090, C091: page size, element type, layers, heads, RoPE, tokenizer, length, protocol version."""
    value = getattr(make_fingerprint(), field)
    other = value + 1 if isinstance(value, int) else f"other-{value}"
    with pytest.raises(LayoutMismatch) as caught:
        check_equal(make_fingerprint(), make_fingerprint(**{field: other}))
    assert f"{field} (prefill {value}, decode {other})" in str(caught.value)
