"""The engine alone against stock `transformers`: chunks, mixed batches, page edges, ten families."""

from __future__ import annotations

import random

import pytest
import torch

from engine.config import EngineConfig
from engine.kv_cache import KvCache
from engine.loader import load_model
from engine.model_runner import ModelRunner
from engine.page_pool import PagePool
from engine.sequence import ScheduledSequence, Sequence, num_pages_for
from tests.tiny_models import FAMILIES, VOCAB_SIZE, load_reference, reference_tokens

PAGE_SIZE = 8


class Rig:
    """A runner with a small pool."""

    def __init__(self, folder, num_pages=200):
        self.loaded = load_model(EngineConfig(model=str(folder), device="cpu", dtype="float32"))
        self.cache = KvCache(num_pages, PAGE_SIZE, self.loaded.kv_shape, self.loaded.dtype)
        self.runner = ModelRunner(self.loaded, self.cache)
        self.pool = PagePool(num_pages)

    def sequence(self, prompt, name="s", room=32):
        sequence = Sequence(name, list(prompt), len(prompt))
        pages = self.pool.allocate(num_pages_for(len(prompt) + room, PAGE_SIZE))
        # Not in order, so that a page table is really used.
        sequence.page_table = random.Random(len(prompt)).sample(pages, len(pages))
        return sequence

    def step(self, *entries):
        result = self.runner.run([ScheduledSequence(s, n) for s, n in entries])
        for sequence, num_new_tokens in entries:
            sequence.num_computed_tokens += num_new_tokens
        for entry, row in zip(result.scheduled, result.logits if result.logits is not None else [], strict=True):
            entry.sequence.token_ids.append(int(row.argmax()))
        return result


def make_prompt(length, seed=0):
    return random.Random(seed * 1000 + length).choices(range(2, 258), k=length)


@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_chunks_and_steps_equal_lone_greedy_generation(family, tiny_model):
    """Three prompts in uneven chunks, prefill and decode mixed in one batch, over page edges."""
    rig, reference = Rig(tiny_model(family)), load_reference(tiny_model(family))
    prompts = [make_prompt(n) for n in (PAGE_SIZE * 5 + 3, PAGE_SIZE, 1)]
    long, page, one = (rig.sequence(p, str(i)) for i, p in enumerate(prompts))
    rig.step((long, 13), (one, 1))
    rig.step((long, 14), (page, PAGE_SIZE - 1), (one, 1))
    rig.step((page, 1), (one, 1), (long, long.num_uncomputed_tokens))
    for _ in range(5):
        rig.step(*((s, 1) for s in (long, page, one)))
    for sequence, prompt in zip((long, page, one), prompts, strict=True):
        generated = sequence.token_ids[len(prompt) :]
        assert generated == reference_tokens(reference, prompt, len(generated))


def test_logits_equal_those_of_stock_attention_to_rounding(tiny_model):
    rig, reference = Rig(tiny_model("llama")), load_reference(tiny_model("llama"))
    prompt = make_prompt(77)
    logits = rig.step((rig.sequence(prompt), 77)).logits[0]
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0, -1]
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_a_middle_chunk_never_runs_the_lm_head(tiny_model):
    rig = Rig(tiny_model("llama"))
    calls = []
    rig.loaded.model.get_output_embeddings().register_forward_hook(lambda *_: calls.append(1))
    sequence = rig.sequence(make_prompt(20))
    assert rig.step((sequence, 12)).logits is None
    assert calls == []
    result = rig.step((sequence, 8))
    assert result.logits.shape == (1, VOCAB_SIZE)
    assert len(calls) == 1


def test_stale_values_in_padding_and_reused_pages_do_not_leak(tiny_model):
    """Pages full of huge finite garbage give the same tokens as fresh ones."""
    rig, reference = Rig(tiny_model("mistral")), load_reference(tiny_model("mistral"))
    rig.cache.tensor.fill_(1e4)
    prompts = [make_prompt(n) for n in (33, 70)]
    sequences = [rig.sequence(p, str(i)) for i, p in enumerate(prompts)]
    rig.step(*((s, s.num_tokens) for s in sequences))
    for _ in range(3):
        rig.step(*((s, 1) for s in sequences))
    for sequence, prompt in zip(sequences, prompts, strict=True):
        assert sequence.token_ids[len(prompt) :] == reference_tokens(reference, prompt, 4)


def test_bf16_packed_layers_stay_near_plain_ones(tiny_model):
    """The packed layout changes speed, not numbers: same weights, bf16 rounding at most."""
    folder = tiny_model("llama")
    loaded = load_model(EngineConfig(model=str(folder), device="cpu", dtype="bfloat16"))
    cache = KvCache(20, PAGE_SIZE, loaded.kv_shape, loaded.dtype)
    prompt = make_prompt(40)
    sequence = Sequence("s", prompt, len(prompt), page_table=list(range(5)))
    logits = ModelRunner(loaded, cache).run([ScheduledSequence(sequence, 40)]).logits[0]
    with torch.inference_mode():
        expected = load_reference(folder).to(torch.bfloat16)(torch.tensor([prompt])).logits[0, -1].float()
    assert torch.nn.functional.cosine_similarity(logits, expected, dim=0) > 0.999
