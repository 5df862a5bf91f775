"""`make bench-accuracy`: what `--quantize int8` costs in accuracy, against bf16 and fp32.

Perplexity of the project's own pages, in windows, and the share of greedy tokens that are the same as in bf16: where
both continue the same text, so that one early difference does not count for all tokens after it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import torch
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.micro.texts import own_pages
from engine.config import DTypeName, EngineConfig
from engine.kv_cache import KvCache
from engine.loader import load_model
from engine.model_runner import ModelRunner
from engine.model_store import DEFAULT_MODEL, resolve_model
from engine.sequence import SamplingParams, ScheduledSequence, Sequence, num_pages_for
from router.tokenizer import Tokenizer

PAGE_SIZE = 16
FORMS: dict[str, tuple[DTypeName, Literal["none", "int8"]]] = {
    "fp32": ("float32", "none"),
    "bf16": ("bfloat16", "none"),
    "int8": ("bfloat16", "int8"),
}


def windows(tokenizer: Tokenizer, length: int, most: int) -> Iterator[list[int]]:
    """Pieces of the texts, in tokens."""
    token_ids = [token for page in own_pages() for token in tokenizer.encode(page)]
    for start in range(0, min(len(token_ids) - length, most * length), length):
        yield token_ids[start : start + length]


def measure(folder: str, form: str, texts: list[list[int]]) -> tuple[float, torch.Tensor]:
    """Perplexity, and the likeliest next token after each token of each text: [texts, length]."""
    dtype, quantize = FORMS[form]
    loaded = load_model(EngineConfig(model=folder, dtype=dtype, device="cpu", quantize=quantize))
    num_pages = num_pages_for(len(texts[0]), PAGE_SIZE)
    runner = ModelRunner(loaded, KvCache(num_pages, PAGE_SIZE, loaded.kv_shape, loaded.dtype))
    loss, likeliest = 0.0, []
    for text in texts:
        sequence = Sequence("text", text, len(text), SamplingParams(prompt_logprobs=True), list(range(num_pages)))
        [prompt] = runner.run([ScheduledSequence(sequence, len(text))]).prompts
        likeliest.append(prompt.logits.argmax(dim=-1))
        loss += float(torch.nn.functional.cross_entropy(prompt.logits[:-1], torch.tensor(text[1:])))
    return math.exp(loss / len(texts)), torch.stack(likeliest)


def main(model: str = DEFAULT_MODEL, length: int = 512, num_texts: int = 40) -> None:
    """Compares the forms in which a CPU computes a model. length: tokens of a window."""
    folder = resolve_model(model)
    texts = list(windows(Tokenizer(folder), length, num_texts))
    table = Table(title=f"{folder.name} on {len(texts)} texts of {length} tokens")
    for column in ("form", "perplexity", "against bf16", "same greedy token as bf16"):
        table.add_column(column, justify="left" if column == "form" else "right")
    found = {form: measure(str(folder), form, texts) for form in FORMS}
    base, tokens = found["bf16"]
    for form, (perplexity, likeliest) in found.items():
        same = float((likeliest == tokens).float().mean())
        table.add_row(form, f"{perplexity:.3f}", f"{perplexity / base - 1:+.2%}", f"{same:.2%}")
    Console().print(table)


if __name__ == "__main__":
    tyro.cli(main)
