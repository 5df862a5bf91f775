"""The compiled kernels against the same in plain torch."""

from __future__ import annotations

import random
import shutil

import pytest
import torch

from engine.attention.base import AttentionOptions
from engine.attention.native_decode import native_attention
from engine.attention.torch_paged import TorchPagedAttention
from engine.config import EngineConfig
from engine.kv_cache import KvCache, KvShape
from engine.loader import load_model
from engine.model_runner import ModelRunner
from engine.native import library, rms_norm
from engine.sequence import ScheduledSequence, Sequence, num_pages_for

# By the compiler, not by whether the kernels load: kernels that do not compile must fail here.
pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler on this machine")


def make_batch(page_size, contexts, chunk=0):
    """One new token for each context length, with shuffled pages; optionally a chunk in the middle."""
    sizes = [(context, 1) for context in contexts]
    if chunk:
        sizes.insert(len(sizes) // 2, (37, chunk))
    needed = [num_pages_for(computed + new, page_size) for computed, new in sizes]
    pages = random.Random(0).sample(range(sum(needed)), sum(needed))
    batch = []
    for (computed, new), number in zip(sizes, needed, strict=True):
        table, pages = pages[:number], pages[number:]
        sequence = Sequence("s", [1] * (computed + new), 1, page_table=table, num_computed_tokens=computed)
        batch.append(ScheduledSequence(sequence, new))
    return batch, sum(needed)


@pytest.mark.parametrize("page_size", [16, 32, 8, 20, 1])
@pytest.mark.parametrize(
    ("heads", "group", "head_dim", "window", "softcap"),
    [
        (3, 3, 64, None, None),
        (2, 4, 128, None, 30.0),
        (1, 8, 64, 33, None),
        (2, 5, 96, 17, 20.0),
        (1, 1, 256, None, None),
    ],
)
@pytest.mark.parametrize("chunk", [0, 29])
def test_steps_equal_plain_torch(page_size, heads, group, head_dim, window, softcap, chunk):
    torch.manual_seed(0)
    batch, num_pages = make_batch(page_size, [0, 1, 15, 16, 17, 130, 700], chunk)
    shape = KvShape(3, heads, head_dim)
    caches = [KvCache(num_pages, page_size, shape, torch.bfloat16) for _ in range(2)]
    caches[0].tensor.normal_()
    caches[1].tensor.copy_(caches[0].tensor)
    native, plain = native_attention(caches[0], heads * group), TorchPagedAttention(caches[1])
    tokens = sum(entry.num_new_tokens for entry in batch)
    options = AttentionOptions(head_dim**-0.5, window, softcap)
    plans = native.plan(batch), plain.plan(batch)
    for layer in range(3):
        # As models give them: query transposed from [heads, tokens, dim], value a view of a wider row.
        query = torch.randn(heads * group, tokens, head_dim).bfloat16().transpose(0, 1)
        key = torch.randn(heads, tokens, head_dim).bfloat16().transpose(0, 1)
        value = torch.randn(tokens, heads, head_dim).bfloat16()
        found, expected = (plan.attend(layer, query, key, value, options) for plan in plans)
        torch.testing.assert_close(found.float(), expected.float(), atol=0.03, rtol=0.03)
    assert torch.equal(caches[0].tensor, caches[1].tensor), "keys and values are stored at the same places"


@pytest.mark.parametrize(
    ("make", "window"),
    [(TorchPagedAttention, None), *((lambda cache: native_attention(cache, 9), window) for window in (None, 4, 7))],
)
def test_what_lies_in_hidden_places_does_not_matter_even_nan(make, window):
    """Tails of reused pages, and the page that pads short tables, may hold anything. For our kernel, what lies before a
    window too."""
    batch, num_pages = make_batch(16, [5, 40])
    cache = KvCache(num_pages, 16, KvShape(1, 3, 64), torch.bfloat16)
    cache.tensor.fill_(float("nan"))
    for entry in batch:
        num_tokens = entry.sequence.num_computed_tokens + 1
        for position in range(0 if window is None else max(0, num_tokens - window), num_tokens - 1):
            page = entry.sequence.page_table[position // 16]
            cache.tensor[page, :, :, :, position % 16] = 1.0
    query, key = torch.ones(2, 9, 64).bfloat16(), torch.ones(2, 3, 64).bfloat16()
    found = make(cache).plan(batch).attend(0, query, key, key, AttentionOptions(0.125, window))
    assert torch.equal(found, torch.ones_like(found))


def test_denormal_numbers_of_others_stay_what_they_are():
    """The kernel flushes its own to 0, since microcode computes them; afterwards its threads do as before."""
    batch, num_pages = make_batch(16, [40])
    cache = KvCache(num_pages, 16, KvShape(1, 3, 64), torch.bfloat16)
    query, key = torch.randn(1, 9, 64).bfloat16(), torch.randn(1, 3, 64).bfloat16()
    native_attention(cache, 9).plan(batch).attend(0, query, key, key, AttentionOptions(0.125))
    assert (torch.full((100_000,), 1e-40) * 1.5 > 0).all()


def test_threads_do_not_change_the_result():
    batch, num_pages = make_batch(16, [900, 3])
    cache = KvCache(num_pages, 16, KvShape(1, 3, 64), torch.bfloat16)
    cache.tensor.normal_()
    query, key = torch.randn(2, 9, 64).bfloat16(), torch.randn(2, 3, 64).bfloat16()
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        plan = native_attention(cache, 9).plan(batch)
        results.append(plan.attend(0, query, key, key, AttentionOptions(0.125)).float())
    torch.testing.assert_close(*results, atol=0.01, rtol=0.01)


def test_sizes_the_kernel_has_no_room_for_stay_in_torch():
    for dtype, head_dim, heads in ((torch.float32, 64, 9), (torch.bfloat16, 72, 9), (torch.bfloat16, 64, 3 * 17)):
        assert native_attention(KvCache(1, 16, KvShape(1, 3, head_dim), dtype), heads) is None


@pytest.mark.parametrize(("family", "replaced"), [("llama", 5), ("qwen3", 9), ("gemma2", 0)])
def test_norms_are_replaced_only_where_the_numbers_are_the_same(family, replaced, tiny_model, monkeypatch):
    loaded = load_model(EngineConfig(model=str(tiny_model(family)), device="cpu", dtype="bfloat16"))
    assert sum(isinstance(m, rms_norm.NativeRmsNorm) for m in loaded.model.modules()) == replaced
    monkeypatch.setattr("engine.loader.replace_rms_norms", lambda model: 0)
    plain = load_model(EngineConfig(model=str(tiny_model(family)), device="cpu", dtype="bfloat16"))
    logits = []
    for model in (loaded, plain):
        sequence = Sequence("s", list(range(2, 42)), 40, page_table=list(range(5)))
        runner = ModelRunner(model, KvCache(5, 8, model.kv_shape, model.dtype))
        logits.append(runner.run([ScheduledSequence(sequence, 40)]).logits[0])
    assert torch.nn.functional.cosine_similarity(*logits, dim=0) > 0.999


@pytest.mark.parametrize("compiler", ["/no/such/compiler", "/bin/false"])
def test_without_a_compiler_the_engine_still_runs(compiler, tiny_model, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path))
    library.load_kernels.cache_clear()
    try:
        loaded = load_model(EngineConfig(model=str(tiny_model("llama")), device="cpu", dtype="bfloat16"))
        runner = ModelRunner(loaded, KvCache(5, 8, loaded.kv_shape, loaded.dtype))
        assert isinstance(runner.backend, TorchPagedAttention)
        assert "can't be used, decode steps run in plain torch" in caplog.text
    finally:
        library.load_kernels.cache_clear()
