"""FlashInfer's attention against plain torch in fp32, for the heads of common models."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch

from engine.attention import flashinfer
from engine.attention.base import AttentionOptions
from engine.attention.torch_paged import TorchPagedAttention
from engine.kv_cache import KvCache, KvShape
from engine.sequence import ScheduledSequence, Sequence, num_pages_for

pytestmark = pytest.mark.gpu
MOST_ERROR = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Norm of the difference to fp32 over the norm of that. Rounding bf16 inputs alone gives 2e-3 to 4e-3."""


@dataclass(frozen=True)
class Heads:
    """The heads of a common model."""

    name: str
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    options: tuple[AttentionOptions, ...] = ()

    @property
    def asked(self) -> tuple[AttentionOptions, ...]:
        """What its layers ask for."""
        return self.options or (AttentionOptions(self.head_dim**-0.5),)


HEADS = (
    Heads("SmolLM2 135M", 9, 3, 64),
    Heads("Llama 3.2 1B", 32, 8, 64),
    Heads("Llama 3 8B", 32, 8, 128),
    Heads("Qwen2.5 7B", 28, 4, 128),
    Heads("Llama 2 7B", 32, 32, 128),
    Heads("window and soft cap", 16, 8, 128, options=(AttentionOptions(128**-0.5, 40, 50.0),)),
    Heads("Llama 3 8B fp16", 32, 8, 128, torch.float16),
    Heads(
        "Gemma 2 9B",
        16,
        8,
        256,
        options=(AttentionOptions(256**-0.5, 40, 50.0), AttentionOptions(256**-0.5, None, 50.0)),
    ),
)
NUM_USUAL = 5
"""So many of HEADS are checked unless slow tests are asked for: FlashInfer builds its kernels where they run, and each
kind of head (size, element type, window, soft cap) takes about 20 minutes of processor time."""
PAGE_SIZES = (16, 1, 8, 32)
EVERY_HEAD = [
    pytest.param(heads, id=heads.name, marks=() if place < NUM_USUAL else pytest.mark.slow)
    for place, heads in enumerate(HEADS)
]


@pytest.fixture(scope="module")
def kernels(device, request):
    """Builds the kernels of all heads that are tested, side by side. Gives the error by name."""
    mine = [item for item in request.session.items if item.path == request.path]
    asked = [heads for heads in HEADS if any(item.callspec.params["heads"] is heads for item in mine)]
    started = time.monotonic()
    with ThreadPoolExecutor(len(asked)) as threads:
        errors = threads.map(lambda heads: build_error(heads, device), asked)
        found = {heads.name: error for heads, error in zip(asked, errors, strict=True)}
    print(f"building kernels: {time.monotonic() - started:.0f} s")
    return found


def build_error(heads, device):
    try:
        torch.cuda.set_device(device)
        attend_both(heads, device, [(5, 3), (0, 9)], 16, random.Random(0))
        attend_both(heads, device, [(5, 1)], 16, random.Random(0))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize("heads", EVERY_HEAD)
def test_attention_is_that_of_plain_torch(heads, device, kernels):
    """Fresh random batches: lengths odd and at the edges of pages; steps, chunks and both."""
    assert kernels[heads.name] is None
    seed = random.randrange(2**32)
    print(f"{heads.name}: seed {seed}")
    rng = random.Random(seed)
    worst = 0.0
    for page_size in PAGE_SIZES:
        edges = [0, 1, page_size - 1, page_size, page_size + 1, 3 * page_size, 777]
        for kind in ("steps", "chunks", "mixed") * 3:
            batch = []
            for _ in range(rng.randint(1, 17)):
                new = 1 if kind == "steps" or (kind == "mixed" and rng.random() < 0.5) else rng.randint(2, 150)
                batch.append((rng.choice([*edges, rng.randint(0, 1500)]), new))
            error, is_stored_equal = attend_both(heads, device, batch, page_size, rng)
            assert is_stored_equal, f"stored pages differ: {batch}"
            worst = max(worst, error)
    print(f"{heads.name}: worst error {worst:.1e}")
    assert worst < MOST_ERROR[heads.dtype]


def attend_both(
    heads: Heads, device: torch.device, lengths: list[tuple[int, int]], page_size: int, rng: random.Random
) -> tuple[float, bool]:
    """Relative error of FlashInfer to fp32 in plain torch, and whether both stored the same.

    lengths: (tokens computed, new tokens) per sequence. What no sequence may see is NaN.
    """
    generator = torch.Generator(device).manual_seed(rng.getrandbits(48))
    num_layers = 2
    shape = KvShape(num_layers, heads.num_kv_heads, heads.head_dim)
    needed = [num_pages_for(computed + new, page_size) for computed, new in lengths]
    ids = list(range(sum(needed) + 3))
    rng.shuffle(ids)
    batch, seen = [], torch.zeros(len(ids) * page_size, dtype=torch.bool, device=device)
    for index, (computed, new) in enumerate(lengths):
        table, ids = ids[: needed[index]], ids[needed[index] :]
        places = [table[at // page_size] * page_size + at % page_size for at in range(computed)]
        seen[places] = True
        tokens = [0] * (computed + new)
        sequence = Sequence(str(index), tokens, len(tokens), page_table=table, num_computed_tokens=computed)
        batch.append(ScheduledSequence(sequence, new))
    cache = KvCache(sum(needed) + 3, page_size, shape, heads.dtype, device)
    pages = cache.tensor[: cache.num_pages]
    pages.copy_(torch.randn(pages.shape, generator=generator, device=device))
    hidden = ~seen.view(cache.num_pages, 1, 1, 1, page_size, 1)
    pages.masked_fill_(hidden, float("nan"))
    exact = KvCache(cache.num_pages, page_size, shape, torch.float32, device)
    exact.tensor.copy_(cache.tensor)
    fast = flashinfer.FlashInferAttention(cache, heads.num_query_heads, heads.asked).plan(batch)
    oracle = TorchPagedAttention(exact).plan(batch)
    num_tokens = sum(new for _, new in lengths)
    worst = 0.0
    for layer in range(num_layers):
        options = heads.asked[layer % len(heads.asked)]
        query, key, value = (
            torch.randn((num_tokens, number, heads.head_dim), generator=generator, device=device).to(heads.dtype)
            for number in (heads.num_query_heads, heads.num_kv_heads, heads.num_kv_heads)
        )
        found = fast.attend(layer, query, key, value, options).float()
        expected = oracle.attend(layer, query.float(), key.float(), value.float(), options)
        error = float((found - expected).norm() / expected.norm())
        worst = max(worst, error if error == error else float("inf"))
    stored = torch.equal(cache.tensor.float().nan_to_num(7.0), exact.tensor.nan_to_num(7.0))
    return worst, stored
