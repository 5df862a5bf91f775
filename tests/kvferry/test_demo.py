"""The demo's text is long enough to show what the product does."""

from __future__ import annotations

import importlib.resources

from kvferry.demo import QUESTION
from router.tokenizer import Tokenizer


def test_the_text_needs_at_least_three_chunks(real_model):
    text = importlib.resources.files("kvferry").joinpath("data/harbour_log.txt").read_text()
    num_tokens = len(Tokenizer(real_model).encode(text + QUESTION))
    assert 1500 <= num_tokens < 4096 - 200
    assert -(-num_tokens // 512) >= 3
