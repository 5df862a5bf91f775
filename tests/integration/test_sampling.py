"""Sampling through both tiers with the real model: every parameter from the first token on, the same everywhere."""

from __future__ import annotations

import math
import random

import grpc
import pytest
import torch

from kvferry.client import KvferryError
from tests.integration.support import running_cluster
from tests.tiny_models import load_reference

PROMPT = random.Random(3).choices(range(3, 40000), k=150)  # two chunks
LOOPING = "one two three " * 11 + "one two"


@pytest.fixture(scope="module")
def reference(real_model):
    return load_reference(real_model)


@torch.no_grad()
def reference_logits(model, token_ids):
    """[len(token_ids), vocab_size] of plain transformers."""
    return model(torch.tensor([token_ids])).logits[0].float()


def penalised_greedy(model, prompt, num_tokens, repetition=1.0, presence=0.0, frequency=0.0):
    """Greedy with penalties, written out."""
    ids = list(prompt)
    for _ in range(num_tokens):
        logits = reference_logits(model, ids)[-1]
        output = ids[len(prompt) :]
        for token in set(ids):
            logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
            logits[token] -= frequency * output.count(token) + presence * (token in output)
        ids.append(int(logits.argmax()))
    return tuple(ids[len(prompt) :])


@pytest.mark.parametrize(
    ("repetition", "presence", "frequency"), [(1.3, 0.0, 0.0), (1.5, 0.0, 0.0), (1.0, 2.0, 0.0), (1.0, 0.5, 1.5)]
)
def test_penalties_equal_the_reference_from_the_first_token_on(repetition, presence, frequency, cluster, reference):
    """Casebook C037, C043: prompt and first token count on decode too, and a cached prompt changes nothing."""
    prompt = cluster.client.tokenize(LOOPING)
    options = {
        "repetition_penalty": repetition,
        "presence_penalty": presence,
        "frequency_penalty": frequency,
        "max_tokens": 10,
    }
    answers = [cluster.greedy(prompt, **options) for _ in range(3)]
    assert answers[2].usage.cached_tokens > 0
    wanted = penalised_greedy(reference, prompt, 10, repetition, presence, frequency)
    assert [a.token_ids for a in answers] == [wanted] * 3
    assert wanted != cluster.greedy(prompt, 10).token_ids


def test_logprobs_equal_the_reference_on_both_tiers(cluster, reference):
    """Casebook C032: the first token's come from prefill, the others' from decode."""
    for max_tokens in (1, 4):
        answer = cluster.greedy(PROMPT, max_tokens, num_logprobs=5, temperature=0.7, seed=2)
        logprobs = torch.log_softmax(reference_logits(reference, PROMPT + list(answer.token_ids)), -1)
        assert len(answer.logprobs) == max_tokens
        for place, entry in enumerate(answer.logprobs):
            row = logprobs[len(PROMPT) + place - 1]
            assert entry.chosen.token_id == answer.token_ids[place]
            assert entry.chosen.logprob == pytest.approx(float(row[entry.chosen.token_id]), abs=1e-3)
            assert [t.logprob for t in entry.top] == pytest.approx(row.topk(5).values.tolist(), abs=1e-3)
            assert [t.token_id for t in entry.top] == row.topk(5).indices.tolist()


def test_prompt_logprobs_equal_the_reference_over_chunks_and_whatever_is_cached(cluster, reference):
    """Casebook C027: top_k 1 beside them; raw distribution; one entry per prompt token after the first."""
    logprobs = torch.log_softmax(reference_logits(reference, PROMPT), -1)
    for _ in range(2):
        answer = cluster.greedy(
            PROMPT, 2, num_logprobs=1, echo_prompt_logprobs=True, temperature=1.0, top_k=1, cache_salt="echo"
        )
        assert answer.usage.cached_tokens == 0
        assert [p.chosen.token_id for p in answer.prompt_logprobs] == PROMPT[1:]
        found = [p.chosen.logprob for p in answer.prompt_logprobs]
        wanted = [float(logprobs[place, token]) for place, token in enumerate(PROMPT[1:])]
        assert found == pytest.approx(wanted, abs=2e-3)
        assert [p.top[0].token_id for p in answer.prompt_logprobs] == logprobs[:-1].argmax(-1).tolist()


def test_values_are_finite_with_narrow_filters_and_hundreds_of_biases(cluster):
    """Casebook C026."""
    bias = dict.fromkeys(range(300), -100.0)
    answer = cluster.greedy(PROMPT, 4, temperature=1.0, top_k=1, num_logprobs=20, logit_bias=bias)
    values = [t.logprob for entry in answer.logprobs for t in (entry.chosen, *entry.top)]
    assert len(values) == 4 * 21
    assert all(math.isfinite(value) for value in values)


def test_bias_forces_tokens_on_both_tiers(cluster):
    answer = cluster.greedy(PROMPT, 5, logit_bias={49151: 100.0}, temperature=1.0)
    assert answer.token_ids == (49151,) * 5


def test_min_tokens_hold_off_the_end(cluster):
    """Casebook C017."""
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    short = cluster.client.generate(chat, temperature=0.0, max_tokens=60, return_token_ids=True).result()
    longer = cluster.client.generate(
        chat, temperature=0.0, max_tokens=60, min_tokens=30, return_token_ids=True
    ).result()
    assert short.usage.completion_tokens < 30 < longer.usage.completion_tokens
    assert 2 not in longer.token_ids[:30]
    one = cluster.client.generate(chat, temperature=0.0, max_tokens=1, min_tokens=1, return_token_ids=True).result()
    assert (one.finish_reason, len(one.token_ids)) == ("length", 1)
    stop = short.text[0]
    stopped = cluster.client.generate(chat, temperature=0.0, max_tokens=40, min_tokens=5, stop=[stop]).result()
    assert stopped.usage.completion_tokens >= 5


@pytest.mark.parametrize("temperature", [1e-8, 1e-6])
def test_tiny_temperatures_equal_greedy(temperature, cluster):
    """Casebook C024."""
    greedy = cluster.greedy(PROMPT, 6)
    tiny = cluster.greedy(PROMPT, 6, temperature=temperature, seed=5)
    assert tiny.token_ids == greedy.token_ids
    assert tiny.text == greedy.text != ""


def test_hot_answers_are_valid_text(cluster):
    """Casebook C009, C024: whatever comes, text is valid and the same in pieces and as a whole."""
    streams = [
        cluster.client.generate(
            [5, 6, 7], max_tokens=24, ignore_eos=True, return_token_ids=True, temperature=temperature, seed=seed
        )
        for temperature in (2.0, 5.0, 100.0, 1e6)
        for seed in range(8)
    ]
    for answer in (stream.result() for stream in streams):
        assert len(answer.token_ids) == 24
        answer.text.encode("utf-8")
        assert answer.text == cluster.client.detokenize(answer.token_ids)


def test_answers_of_one_request_differ_and_the_first_is_the_lone_one(cluster):
    options = {"temperature": 1.0, "seed": 77, "cache_salt": "several"}
    prompt = PROMPT[:144]  # full pages only
    stream = cluster.client.generate(
        prompt, n=4, max_tokens=8, ignore_eos=True, return_token_ids=True, num_logprobs=0, **options
    )
    answers = stream.results()
    assert [a.index for a in answers] == [0, 1, 2, 3]
    assert len({a.token_ids for a in answers}) == 4
    assert all(len(a.logprobs) == len(a.token_ids) == a.usage.completion_tokens == 8 for a in answers)
    # The prompt is computed and moved once: the others find all but what has to be computed in both caches.
    assert [a.usage.cached_tokens for a in answers] == [0, 128, 128, 128]
    assert all(a.kv_transfer.bytes == 0 for a in answers[1:])
    assert all(a.kv_transfer.decode_cached_tokens == 144 for a in answers[1:])
    assert cluster.greedy(prompt, 8, **options).token_ids == answers[0].token_ids
    again = cluster.client.generate(
        prompt, n=4, max_tokens=8, ignore_eos=True, return_token_ids=True, **options
    ).results()
    assert [a.token_ids for a in again] == [a.token_ids for a in answers]


def mixed_requests():
    """Every parameter, several lengths."""
    rng = random.Random(8)
    kinds = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.2, "top_k": 40},
        {"temperature": 1.5, "min_p": 0.05},
        {"temperature": 1.0, "repetition_penalty": 1.3},
        {"temperature": 0.9, "presence_penalty": 1.0, "frequency_penalty": 0.5, "top_k": 3000},
        {"temperature": 0.7, "logit_bias": {17: 4.0, 99: -100.0}, "top_p": 0.5, "top_k": 9_999_999},
    ]
    return [
        (rng.choices(range(3, 40000), k=rng.choice((1, 16, 33, 140))), {"seed": 100 + n, **kinds[n % len(kinds)]})
        for n in range(16)
    ]


@pytest.mark.slow
def test_answers_do_not_depend_on_batch_chunks_workers_or_pages(cluster, real_model, tmp_path):
    """Casebook C035, C040: alone, together, and on another cluster with other budgets, pages,
    worker counts and colocated workers, and steps launched before the tokens of the last are known."""
    requests = mixed_requests()
    lone = [cluster.greedy(prompt, 10, **options).token_ids for prompt, options in requests]

    def together(client):
        streams = [
            client.generate(prompt, max_tokens=10, ignore_eos=True, return_token_ids=True, cache_salt="b", **options)
            for prompt, options in requests
        ]
        return [stream.result().token_ids for stream in streams]

    assert together(cluster.client) == lone
    with running_cluster(
        tmp_path, model=str(real_model), prefill=2, decode=1, colocated=1, token_budget=48, page_size=8,
        max_model_len=512, num_pages=400, max_num_sequences=32, overlap="on",
    ) as other:  # fmt: skip
        assert together(other.client) == lone


BAD = [
    ({"top_p": 0.0}, "sampling.top_p"),
    ({"top_p": 1.0001}, "sampling.top_p"),
    ({"top_p": math.nan}, "sampling.top_p"),
    ({"min_p": 1.5}, "sampling.min_p"),
    ({"repetition_penalty": 0.0}, "sampling.repetition_penalty"),
    ({"presence_penalty": math.nan}, "sampling.presence_penalty"),
    ({"logit_bias": {49152: -100.0}}, "sampling.logit_bias[49152]"),
    ({"logit_bias": {-1: 5.0}}, "sampling.logit_bias[-1]"),
    ({"logit_bias": {5: math.inf}}, "sampling.logit_bias[5]"),
    ({"n": 33}, "sampling.n"),
    ({"min_tokens": 9}, "stop.min_tokens"),
    ({"num_logprobs": 21}, "num_logprobs"),
    ({"top_k": -2}, "sampling.top_k"),
]


@pytest.mark.parametrize(("options", "field"), BAD)
def test_values_out_of_range_are_refused_and_neighbours_go_on(options, field, cluster):
    """Casebook C028, C039, C042."""
    expected = cluster.greedy([9, 10, 11], 8)
    running = cluster.client.generate(
        [9, 10, 11], max_tokens=8, temperature=0.0, ignore_eos=True, return_token_ids=True
    )
    with pytest.raises(KvferryError) as caught:
        cluster.client.generate([1, 2], **({"max_tokens": 8} | options)).result()
    assert (caught.value.code, caught.value.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)
    assert running.result().token_ids == expected.token_ids
