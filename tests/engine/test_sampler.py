"""The sampler against exact references, and its independence of everything but (seed, choice, token index)."""

from __future__ import annotations

import random
from array import array

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from engine import logprobs, sampler
from engine.sequence import LogitBias, SamplingParams, Sequence

VOCAB = 50


def make_sequence(params, num_output_tokens=0):
    return Sequence("s", [0] * (3 + num_output_tokens), 3, params)


def choose(logits, sequences):
    return [choice.token_id for choice in sampler.sample(logits, sequences).wait()]


def make_bias(values):
    return LogitBias(array("i", values.keys()), array("f", values.values()))


def reference_adjust(logits, params, token_ids, num_prompt_tokens):
    """float64 reference of penalties, bias and min_tokens, token by token."""
    result = logits.double().numpy().copy()
    output = token_ids[num_prompt_tokens:]
    for token in set(token_ids):
        value = result[token]
        result[token] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        result[token] -= params.frequency_penalty * output.count(token)
        result[token] -= params.presence_penalty * (token in output)
    if params.logit_bias:
        for token, bias in zip(params.logit_bias.token_ids, params.logit_bias.biases, strict=True):
            result[token] += bias
    if len(output) < params.min_tokens:
        result[list(params.ending_token_ids)] = -np.inf
    return result


def reference_filter(logits, params):
    """float64 reference: probabilities that top-k, top-p, then min-p leave, renormalised, by token id."""
    scaled = np.asarray(logits, dtype=np.float64) / params.temperature
    order = np.argsort(-scaled, kind="stable")
    probabilities = np.exp(scaled - scaled.max())
    if params.top_k:
        order = order[: params.top_k]
    kept, mass = [], 0.0
    wanted = params.top_p * probabilities[order].sum()
    for token in order:
        if params.top_p < 1 and mass >= wanted:
            break
        mass += probabilities[token]
        if probabilities[token] >= params.min_p:
            kept.append(token)
    result = np.zeros(len(scaled))
    result[kept] = probabilities[kept] / probabilities[kept].sum()
    return result


def kept_probabilities(logits, all_params, width=None):
    """What `keep` leaves of rows, by token id; widened as the sampler does."""
    vocab = logits.shape[-1]
    found = torch.zeros(logits.shape, dtype=torch.float64)
    temperature = torch.tensor([[p.temperature] for p in all_params], dtype=torch.float64)
    totals = torch.exp((logits - logits.amax(-1, keepdim=True)).double() / temperature).sum(-1)
    width, pending = min(width or vocab, vocab), set(range(len(all_params)))
    while pending:
        kept = sampler.keep(logits, all_params, totals, width)
        for row in [r for r in pending if kept.is_complete[r]]:
            found[row, kept.token_ids[row]] = kept.weights[row] / kept.weights[row].sum()
            pending.discard(row)
        width = min(width * 2, vocab)
    return found.numpy()


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 3, 49, 50, 60]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.01, 1e-9]),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
)


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10_000), st.lists(PARAMS, min_size=1, max_size=5), st.sampled_from([2, 8, VOCAB]))
def test_filters_of_a_mixed_batch_equal_the_float64_reference(seed, all_params, width):
    torch.manual_seed(seed)
    logits = (torch.randn(len(all_params), VOCAB) * 3).round(decimals=1)  # rounded, so that some are equally likely
    found = kept_probabilities(logits, all_params, width)
    for row, params in enumerate(all_params):
        np.testing.assert_allclose(found[row], reference_filter(logits[row], params), atol=1e-9)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.lists(PARAMS, min_size=1, max_size=4))
def test_accepting_a_token_is_what_the_filters_keep(seed, all_params):
    """The way without sorting and the way with it agree about every token, equally likely ones too."""
    torch.manual_seed(seed)
    logits = (torch.randn(len(all_params), VOCAB) * 3).round(decimals=1)
    draw = sampler._Draw(logits, [make_sequence(p) for p in all_params])
    rows = torch.arange(len(all_params))
    accepted = torch.stack([draw._is_kept(rows, torch.full_like(rows, token)) for token in range(VOCAB)], 1)
    for row, params in enumerate(all_params):
        assert accepted[row].tolist() == (reference_filter(logits[row], params) > 0).tolist()


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 10_000),
    st.lists(
        st.builds(
            SamplingParams,
            repetition_penalty=st.sampled_from([1.0, 1.3, 0.5]),
            presence_penalty=st.sampled_from([0.0, 1.5, -2.0]),
            frequency_penalty=st.sampled_from([0.0, 0.7, -0.1]),
            logit_bias=st.sampled_from([None, make_bias({3: 5.0, 49: -100.0}), make_bias({0: 1.0})]),
            min_tokens=st.sampled_from([0, 4]),
            ending_token_ids=st.sampled_from([(), (1,), (2, 7)]),
        ),
        min_size=1,
        max_size=5,
    ),
)
def test_adjustments_of_a_mixed_batch_equal_the_float64_reference(seed, all_params):
    torch.manual_seed(seed)
    rng = random.Random(seed)
    logits = torch.randn(len(all_params), VOCAB) * 3
    untouched = logits.clone()
    sequences = [
        Sequence("s", rng.choices(range(10), k=rng.randint(3, 12)), 3, params, num_computed_tokens=0)
        for params in all_params
    ]
    for _ in range(3):  # as answers grow
        adjusted = sampler._adjust(logits, sequences)
        for row, sequence in enumerate(sequences):
            wanted = reference_adjust(logits[row], sequence.sampling, sequence.token_ids, 3)
            np.testing.assert_allclose(adjusted[row].numpy(), wanted, rtol=1e-5, atol=1e-5)
            sequence.token_ids.append(rng.randrange(VOCAB))
    assert torch.equal(logits, untouched)


def test_the_repetition_penalty_counts_a_token_once_as_transformers_does():
    """Casebook C038: a prompt that holds a token 50 times."""
    logits = torch.randn(1, VOCAB)
    ids = [7] * 50 + [9, 11]
    sequence = Sequence("s", ids, 50, SamplingParams(temperature=0.0, repetition_penalty=1.1))
    wanted = RepetitionPenaltyLogitsProcessor(1.1)(torch.tensor([ids]), logits.clone())
    torch.testing.assert_close(sampler._adjust(logits, [sequence]), wanted)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 1.5, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 1.0, "top_k": 20, "top_p": 0.7, "min_p": 0.02},
        {"temperature": 1.0, "top_p": 0.3},
        {"temperature": 1.0, "repetition_penalty": 2.0, "logit_bias": make_bias({5: 2.0, 6: -100.0})},
    ],
)
def test_draws_follow_the_exact_distribution(params):
    """Chi-square of 6000 draws, one per token index, against exact probabilities (critical value at 1e-6)."""
    torch.manual_seed(1)
    logits = torch.randn(VOCAB)
    sampling = SamplingParams(seed=7, **params)
    sequences = [Sequence("s", [0, 1, 2] + [1] * index, 3, sampling) for index in range(3, 6003)]
    adjusted = reference_adjust(logits, sampling, [0, 1, 2, 1], 3)
    expected = reference_filter(adjusted, sampling)
    counts = np.zeros(VOCAB)
    for start in range(0, len(sequences), 500):
        some = sequences[start : start + 500]
        np.add.at(counts, choose(logits.expand(len(some), VOCAB).contiguous(), some), 1)
    draws = len(sequences)
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


def test_draws_from_a_large_vocabulary_follow_the_exact_distribution():
    """Chi-square over 40 classes of a vocabulary whose size is no multiple of the block (critical value at 1e-6)."""
    torch.manual_seed(3)
    vocab, classes, draws = 5003, 40, 8000
    logits = torch.randn(vocab) * 2
    expected = np.zeros(classes)
    np.add.at(expected, np.arange(vocab) % classes, torch.softmax(logits.double(), -1).numpy())
    counts = np.zeros(classes)
    for start in range(0, draws, 500):
        sequences = [make_sequence(SamplingParams(seed=11), start + n) for n in range(500)]
        np.add.at(counts, np.array(choose(logits.expand(500, vocab), sequences)) % classes, 1)
    statistic = ((counts - expected * draws) ** 2 / (expected * draws)).sum()
    assert statistic < 95.0  # chi-square with 39 degrees of freedom: 1 - 1e-6


@pytest.mark.parametrize("params", [{"top_k": 700}, {"top_k": 700, "top_p": 0.9}, {"top_k": 4000, "top_p": 0.99}])
def test_a_large_top_k_draws_from_the_exact_distribution(params):
    """Chi-square over 30 classes (critical value at 1e-6), on a flat distribution, where most draws are refused."""
    torch.manual_seed(5)
    vocab, classes, draws = 5003, 30, 3000
    logits = torch.randn(vocab) * 0.3
    sampling = SamplingParams(seed=12, **params)
    exact = reference_filter(logits, sampling)
    expected, counts = np.zeros(classes), np.zeros(classes)
    np.add.at(expected, np.arange(vocab) % classes, exact)
    for start in range(0, draws, 500):
        sequences = [make_sequence(sampling, start + n) for n in range(500)]
        tokens = choose(logits.expand(500, vocab), sequences)
        assert (exact[tokens] > 0).all()
        np.add.at(counts, np.array(tokens) % classes, 1)
    assert ((counts - expected * draws) ** 2 / (expected * draws)).sum() < 80.0  # 29 degrees of freedom


@pytest.mark.parametrize("params", [{}, {"temperature": 0.7}, {"top_p": 0.95}, {"min_p": 0.001}, {"top_k": 500}])
def test_rounding_noise_in_logits_does_not_change_tokens(params):
    """Other batch shapes round otherwise: seen to change 1 of 160 tokens while one number went through a CDF."""
    torch.manual_seed(4)
    vocab, draws = 20_000, 1000
    logits = torch.randn(vocab) * 3
    noisy = logits + torch.randn(vocab) * 2e-6
    sequences = [make_sequence(SamplingParams(seed=5, **params), n) for n in range(draws)]
    plain, other = (
        [t for start in range(0, draws, 100) for t in choose(some.expand(100, vocab), sequences[start : start + 100])]
        for some in (logits, noisy)
    )
    assert plain == other


def test_a_token_depends_on_seed_and_index_only():
    """Alone or in a batch, in any row, beside greedy, filtered and penalised neighbours."""
    torch.manual_seed(2)
    vocab = 4099
    params = [
        SamplingParams(temperature=1.0, seed=5),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.9, top_k=3, seed=5),
        SamplingParams(temperature=1.2, top_p=0.6, seed=9),
        SamplingParams(temperature=1.0, top_k=3000, seed=9),
        SamplingParams(temperature=2.0, min_p=0.001, repetition_penalty=1.4, seed=2**64 - 1),
        SamplingParams(temperature=1.0, frequency_penalty=1.0, num_logprobs=3, seed=4),
    ] * 9
    logits = torch.randn(len(params), vocab)
    sequences = [make_sequence(p, 4) for p in params]
    together = choose(logits, sequences)
    alone = [choose(row.unsqueeze(0), [s])[0] for row, s in zip(logits, sequences, strict=True)]
    backwards = choose(logits.flip(0), sequences[::-1])[::-1]
    assert together == alone == backwards
    torch.set_num_threads(1)
    try:
        assert choose(logits, sequences) == together
    finally:
        torch.set_num_threads(2)


def test_seeds_indices_and_choices_give_different_numbers():
    keys = [sampler.row_key(s, c, i) for s in range(20) for c in range(3) for i in range(20)]
    assert len(set(keys)) == 20 * 3 * 20
    assert sampler.row_key(2**64 - 1, 0, 2**31) == sampler.row_key(2**64 - 1, 0, 2**31)
    numbers = sampler.uniform(torch.tensor(keys), torch.arange(50).expand(len(keys), 50))
    assert len(set(numbers.flatten().tolist())) == numbers.numel()
    assert ((numbers > 0) & (numbers < 1)).all()
    # Uniform, and independent of each other along both axes (standard errors of 60000 numbers).
    assert abs(float(numbers.mean()) - 0.5) < 0.006
    for other in (numbers.roll(1, 0), numbers.roll(1, 1)):
        assert abs(float(torch.corrcoef(torch.stack([numbers.flatten(), other.flatten()]))[0, 1])) < 0.02


def test_random_numbers_are_splitmix64_in_every_process_and_on_every_device():
    """Fixed values, written out in Python's own integers: a changed number would change every seeded answer."""

    def splitmix(key, item):
        mask = 2**64 - 1
        bits = (key + item * 0x9E3779B97F4A7C15) & mask
        bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & mask
        bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & mask
        return (((bits ^ (bits >> 31)) >> 12) + 0.5) / 2**52

    items = [0, 1, 49151, sampler._DOMAIN + 7]
    assert (2**52 - 1 + 0.5) / 2**52 < 1, "the largest number there can be"
    for key in (0, -1, 5, -(2**63), 2**63 - 1, sampler.row_key(3, 1, 4)):
        found = sampler.uniform(torch.tensor([key]), torch.tensor([items]))[0].tolist()
        assert found == [splitmix(key, item) for item in items]


def test_tokens_without_weight_are_never_drawn():
    logits = torch.full((1, 200), -torch.inf)
    logits[0, [70, 71, 130]] = 0.0
    for params in ({}, {"top_k": 100}, {"top_p": 0.9999999}, {"min_p": 0.5}):
        drawn = {choose(logits, [make_sequence(SamplingParams(seed=n, **params))])[0] for n in range(60)}
        assert drawn == {70, 71, 130}


@pytest.mark.parametrize("temperature", [0.0, 1e-8, 1e-6])
def test_tiny_temperatures_are_greedy(temperature):
    """Casebook C024."""
    logits = torch.tensor([[0.0, 30000.0, 29999.0]])
    assert choose(logits, [make_sequence(SamplingParams(temperature=temperature))]) == [1]


@pytest.mark.parametrize("temperature", [1e-4, 100.0, 1e6, 3e38])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 2}, {"min_p": 0.5}])
def test_extreme_temperatures_stay_finite(temperature, filters):
    """Casebook C024."""
    logits = torch.tensor([[-30000.0, 30000.0, 29999.0]])
    params = SamplingParams(temperature=temperature, **filters)
    possible = set(np.flatnonzero(reference_filter(logits[0], params) > 1e-6).tolist())
    drawn = choose(logits.expand(200, 3).contiguous(), [make_sequence(params, n) for n in range(200)])
    assert set(drawn) == possible


def test_top_k_of_any_size_beside_greedy_neighbours():
    """Casebook C025."""
    sizes = [9_999_999, VOCAB, VOCAB + 1, 1, 0]
    logits = torch.randn(2 * len(sizes), VOCAB)
    off = make_sequence(SamplingParams(seed=3))
    sequences = [make_sequence(SamplingParams(seed=3, top_k=size)) for size in sizes]
    sequences += [make_sequence(SamplingParams(temperature=0.0))] * len(sizes)
    tokens = choose(logits, sequences)
    assert tokens[3] == int(logits[3].argmax())
    assert tokens[len(sizes) :] == logits[len(sizes) :].argmax(-1).tolist()
    probabilities = kept_probabilities(logits[:3], [SamplingParams(top_k=size) for size in sizes[:3]])
    assert (probabilities > 0).all()
    assert choose(logits[4:5], [off]) == [tokens[4]]


def test_broken_logits_fail_their_row_only():
    logits = torch.zeros(5, VOCAB)
    logits[1, 4] = float("nan")
    logits[2, 7] = 5.0
    logits[3, 0] = float("inf")
    logits[4, :] = -torch.inf
    params = [SamplingParams(temperature=0.0)] * 3 + [SamplingParams(top_p=0.5, num_logprobs=2)] * 2
    assert choose(logits, [make_sequence(p) for p in params]) == [0, None, 7, None, None]


def test_equal_logits_at_the_edge_of_top_k_are_taken_by_id():
    logits = torch.zeros(1, 900)
    assert kept_probabilities(logits, [SamplingParams(top_k=4)], width=4)[0].nonzero()[0].tolist() == [0, 1, 2, 3]
    assert kept_probabilities(logits, [SamplingParams(top_p=0.5)], width=4)[0].nonzero()[0].tolist() == list(range(450))


def test_ending_tokens_are_impossible_before_min_tokens():
    """Casebook C017."""
    logits = torch.zeros(1, VOCAB)
    logits[0, 1] = 50.0
    params = SamplingParams(temperature=0.0, min_tokens=3, ending_token_ids=(1,))
    assert [choose(logits, [make_sequence(params, n)])[0] for n in range(5)] == [0, 0, 0, 1, 1]


def test_bias_forces_and_forbids():
    logits = torch.randn(1, VOCAB) * 3
    logits[0, 9] = -40
    forced = SamplingParams(logit_bias=make_bias({9: 100.0}), seed=1)
    assert choose(logits, [make_sequence(forced)]) == [9]
    forbidden = SamplingParams(temperature=0.0, logit_bias=make_bias({int(logits.argmax()): -100.0}))
    assert choose(logits, [make_sequence(forbidden)]) != [int(logits.argmax())]


def test_logprobs_are_those_of_the_model_whatever_is_done_to_the_logits():
    """Casebook C026: with top_k 1 and hundreds of biases every value is finite."""
    torch.manual_seed(0)
    logits = torch.randn(3, VOCAB)
    logits[2, 40:] = -torch.inf
    bias = make_bias(dict.fromkeys(range(5, 45), -100.0))
    params = [
        SamplingParams(num_logprobs=20, top_k=1, temperature=0.4),
        SamplingParams(num_logprobs=0, logit_bias=bias, repetition_penalty=1.5),
        SamplingParams(num_logprobs=50, temperature=0.0),
    ]
    choices = sampler.sample(logits, [make_sequence(p) for p in params]).wait()
    exact = torch.log_softmax(logits.double(), -1)
    for row, choice in enumerate(choices):
        found = choice.logprobs
        assert found.token_ids[0] == choice.token_id
        assert len(found.token_ids) == 1 + params[row].num_logprobs
        assert np.isfinite(found.logprobs).all()
        wanted = exact[row, found.token_ids].clamp(min=logprobs.LOWEST_LOGPROB)
        np.testing.assert_allclose(found.logprobs, wanted, atol=1e-5)
        assert found.logprobs[1:] == sorted(found.logprobs[1:], reverse=True)
    assert sampler.sample(logits, [make_sequence(SamplingParams())] * 3).wait()[0].logprobs is None


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(),
        SamplingParams(temperature=0.7, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.1),
        SamplingParams(logit_bias=make_bias({3: 1.0, 7: -2.0})),
        SamplingParams(min_tokens=9, ending_token_ids=(1, 2)),
        SamplingParams(temperature=0.0, num_logprobs=3),
    ],
)
def test_no_device_is_waited_for_before_the_tokens_are_asked_for(params):
    """A meta tensor has no values: whatever would wait for one raises."""
    sequences = [make_sequence(params, 4), make_sequence(SamplingParams(temperature=0.0))]
    for batch in (sequences, sequences[:1]):
        tokens = sampler.sample(torch.empty(len(batch), VOCAB, device="meta"), batch)
        assert tokens.token_ids.shape == (len(batch),)
        with pytest.raises(NotImplementedError):
            tokens.wait()


def test_a_row_without_values_gives_the_next_step_a_token_that_exists():
    logits = torch.randn(3, VOCAB)
    logits[1] = float("nan")
    logits[2, 5] = float("inf")
    for params in (SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_p=0.5, top_k=3)):
        tokens = sampler.sample(logits, [make_sequence(params)] * 3)
        assert tokens.token_ids[1:].tolist() == [0, 0]
        assert [choice.token_id is None for choice in tokens.wait()] == [False, True, True]
