"""The one test that proves the whole: two tiers = plain `transformers`, token for token, and KV really moved."""

from __future__ import annotations

import random

import pytest

from tests.integration.conftest import MAX_MODEL_LEN, TOKEN_BUDGET
from tests.integration.support import running_cluster
from tests.tiny_models import load_reference, reference_tokens

PAGE = 16
FAMILIES = ("llama", "qwen3", "mistral", "gemma2", "phi3", "qwen3_moe")


def edge_lengths(page, budget, limit):
    return [1, page - 1, page, page + 1, budget - 1, budget, budget + 1, 2 * budget + 1, limit - 1]


def check_equal_to_reference(cluster, reference, lengths, vocabulary, limit, num_tokens):
    page_bytes = None
    cluster.client.flush_prefix_cache()
    for length in lengths:
        prompt = random.Random(length).choices(vocabulary, k=length)
        max_tokens = min(num_tokens, limit - length)
        result = cluster.greedy(prompt, max_tokens)
        assert list(result.token_ids) == reference_tokens(reference, prompt, max_tokens), f"length {length}"
        assert result.finish_reason == "length"
        assert result.usage.prompt_tokens == length
        assert result.usage.completion_tokens == max_tokens
        moved = result.kv_transfer
        assert moved.decode_computed_prompt_tokens == 0
        assert moved.num_chunks == -(-length // cluster.config.token_budget)
        if max_tokens > 1:
            pages = -(-length // PAGE)
            page_bytes = page_bytes or moved.bytes // pages
            assert moved.bytes == pages * page_bytes > 0
            assert moved.transport == "nixl/UCX"


@pytest.mark.slow
def test_real_model_equals_transformers_at_every_edge(cluster, real_model):
    lengths = edge_lengths(PAGE, TOKEN_BUDGET, MAX_MODEL_LEN)
    check_equal_to_reference(cluster, load_reference(real_model), lengths, range(3, 40000), MAX_MODEL_LEN, 12)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_equal_transformers_at_every_edge(family, tiny_model, tmp_path):
    budget, limit = 40, 128
    folder = tiny_model(family)
    with running_cluster(
        tmp_path, model=str(folder), token_budget=budget, max_model_len=limit, num_pages=64
    ) as cluster:
        lengths = edge_lengths(PAGE, budget, limit)
        check_equal_to_reference(cluster, load_reference(folder), lengths, range(2, 258), limit, 20)


def test_budgets_and_company_do_not_change_an_answer(cluster, real_model):
    """Casebook C060: a long prompt in chunks, alone and beside others, seeded and greedy."""
    prompt = random.Random(5).choices(range(3, 40000), k=3 * TOKEN_BUDGET - 1)
    options = {"temperature": 0.8, "top_p": 0.95, "seed": 11}
    alone = [cluster.greedy(prompt), cluster.greedy(prompt, **options)]
    streams = [
        cluster.client.generate(p, max_tokens=8, ignore_eos=True, return_token_ids=True, timeout=120, **o)
        for p, o in (
            (prompt, {"temperature": 0.0}),
            (prompt[:100], {"seed": 1}),
            (prompt, options),
            (prompt[:7], {"seed": 2}),
        )
    ]
    together = [stream.result() for stream in streams]
    assert [alone[0].token_ids, alone[1].token_ids] == [together[0].token_ids, together[2].token_ids]
    assert alone[1].seed == 11
