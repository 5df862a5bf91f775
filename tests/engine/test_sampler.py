"""The sampler against exact references, and its independence of everything but (seed, token index)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import sampler
from engine.sequence import SamplingParams, Sequence

VOCAB = 50


def make_sequence(params, num_output_tokens=0):
    return Sequence("s", [0] * (3 + num_output_tokens), 3, params)


def reference_filter(logits, params):
    """float64 reference: probabilities that top-k, then top-p leave, renormalised, by token id."""
    scaled = logits.double().numpy() / params.temperature
    order = np.argsort(-scaled, kind="stable")
    probabilities = np.exp(scaled - scaled.max())
    if params.top_k:
        order = order[: params.top_k]
    kept, mass = [], 0.0
    wanted = params.top_p * probabilities[order].sum()
    for token in order:
        if params.top_p < 1 and mass >= wanted:
            break
        kept.append(token)
        mass += probabilities[token]
    result = np.zeros(len(scaled))
    result[kept] = probabilities[kept] / probabilities[kept].sum()
    return result


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from([0.3, 1.0, 2.5]),
    st.sampled_from([0, 1, 3, 49, 50, 60]),
    st.sampled_from([1.0, 0.9, 0.5, 0.01, 1e-9]),
)
def test_filters_equal_the_float64_reference(seed, temperature, top_k, top_p):
    torch.manual_seed(seed)
    logits = torch.randn(VOCAB) * 3
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    weights, token_ids = sampler.filtered_weights(logits.double() / temperature, params)
    found = torch.zeros(VOCAB, dtype=torch.float64)
    found[token_ids] = weights / weights.sum()
    np.testing.assert_allclose(found.numpy(), reference_filter(logits, params), atol=1e-12)


def test_top_p_widens_its_candidates_on_a_flat_distribution(monkeypatch):
    monkeypatch.setattr(sampler, "_FIRST_CANDIDATES", 4)
    params = SamplingParams(top_p=0.9)
    weights, _ = sampler.filtered_weights(torch.zeros(100, dtype=torch.float64), params)
    assert len(weights) == 90


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 1.5, "top_p": 0.8},
        {"temperature": 1.0, "top_k": 20, "top_p": 0.5},
    ],
)
def test_draws_follow_the_exact_distribution(params):
    """Chi-square of 4000 draws, one per token index, against exact probabilities (critical value at 1e-6)."""
    torch.manual_seed(1)
    logits = torch.randn(VOCAB)
    sampling = SamplingParams(seed=7, **params)
    expected = reference_filter(logits, sampling)
    draws = 4000
    counts = np.zeros(VOCAB)
    for index in range(draws):
        [token] = sampler.sample(logits.unsqueeze(0), [make_sequence(sampling, index)])
        counts[token] += 1
    assert counts[expected == 0].sum() == 0
    likely = expected * draws >= 5
    rest = 1 - expected[likely].sum()
    observed = np.append(counts[likely], counts[~likely].sum()) if rest > 1e-9 else counts[likely]
    wanted = np.append(expected[likely], rest) * draws if rest > 1e-9 else expected[likely] * draws
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    degrees = len(observed) - 1
    # Wilson-Hilferty approximation of the chi-square quantile at 1 - 1e-6 (normal quantile 4.753).
    critical = degrees * (1 - 2 / (9 * degrees) + 4.753 * (2 / (9 * degrees)) ** 0.5) ** 3
    assert statistic < critical


def test_a_token_depends_on_seed_and_index_only():
    """Alone or in a batch, in any row, beside greedy and filtered neighbours."""
    torch.manual_seed(2)
    logits = torch.randn(4, VOCAB)
    params = [
        SamplingParams(temperature=1.0, seed=5),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.9, top_k=3, seed=5),
        SamplingParams(temperature=1.2, top_p=0.6, seed=9),
    ]
    sequences = [make_sequence(p, 4) for p in params]
    together = sampler.sample(logits, sequences)
    alone = [sampler.sample(row.unsqueeze(0), [s])[0] for row, s in zip(logits, sequences, strict=True)]
    backwards = sampler.sample(logits.flip(0), sequences[::-1])[::-1]
    assert together == alone == backwards


def test_seeds_indices_and_choices_give_different_numbers():
    numbers = {sampler.uniform(s, c, i) for s in range(20) for c in range(3) for i in range(20)}
    assert len(numbers) == 20 * 3 * 20
    assert all(0 <= number < 1 for number in numbers)
    assert sampler.uniform(2**64 - 1, 0, 2**31) == sampler.uniform(2**64 - 1, 0, 2**31)


@pytest.mark.parametrize("temperature", [0.0, 1e-8, 1e-6])
def test_tiny_temperatures_are_greedy(temperature):
    """Casebook C024."""
    logits = torch.tensor([[0.0, 30000.0, 29999.0]])
    assert sampler.sample(logits, [make_sequence(SamplingParams(temperature=temperature))]) == [1]


@pytest.mark.parametrize("temperature", [1e-4, 100.0, 1e6, 3e38])
def test_extreme_temperatures_stay_finite(temperature):
    logits = torch.tensor([[-30000.0, 30000.0, 29999.0]])
    [token] = sampler.sample(logits, [make_sequence(SamplingParams(temperature=temperature, top_p=0.9))])
    assert token in (0, 1, 2)


@pytest.mark.parametrize("top_k", [VOCAB, VOCAB + 1, 9_999_999])
def test_top_k_beyond_the_vocabulary_is_off(top_k):
    """Casebook C025."""
    logits = torch.randn(1, VOCAB)
    off = sampler.sample(logits, [make_sequence(SamplingParams(seed=3))])
    clamped = SamplingParams(seed=3, top_k=top_k)
    weights, _ = sampler.filtered_weights(logits[0].double(), clamped)
    assert len(weights) == VOCAB
    assert sampler.sample(logits, [make_sequence(clamped)])[0] is not None
    assert off[0] is not None


def test_broken_logits_fail_their_row_only():
    logits = torch.zeros(3, VOCAB)
    logits[1, 4] = float("nan")
    logits[2, 7] = 5.0
    greedy = SamplingParams(temperature=0.0)
    assert sampler.sample(logits, [make_sequence(greedy)] * 3) == [0, None, 7]


def test_equal_logits_at_the_edge_of_top_k_are_taken_by_id():
    weights, token_ids = sampler.filtered_weights(torch.zeros(9, dtype=torch.float64), SamplingParams(top_k=4))
    assert token_ids.tolist() == [0, 1, 2, 3]
    assert len(weights) == 4
