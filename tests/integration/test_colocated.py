"""Colocated workers as processes: the same answers as two tiers, alone, beside pairs, and when one dies."""

from __future__ import annotations

import asyncio
import random
import signal
import threading
import time

import pytest

from kvferry.client import AsyncClient
from tests.integration.conftest import MAX_MODEL_LEN, TOKEN_BUDGET
from tests.integration.support import running_cluster
from tests.integration.test_decode_memory import give_short_answers, make_prompts
from tests.integration.test_sampling import mixed_requests

PAGE = 16


@pytest.fixture(scope="module")
def colocated(real_model, tmp_path_factory):
    """The real model in fp32 on one colocated worker, with the budget and pages of the shared two-tier cluster."""
    with running_cluster(
        tmp_path_factory.mktemp("logs"), model=str(real_model), colocated=1, token_budget=TOKEN_BUDGET,
        max_model_len=MAX_MODEL_LEN, num_pages=1400,
    ) as cluster:  # fmt: skip
        yield cluster


def test_colocated_equals_two_tiers_at_every_edge(cluster, colocated):
    """Two tiers equal plain transformers (test_oracle), so colocated does. Nothing is moved here."""
    for length in (1, PAGE, PAGE + 1, TOKEN_BUDGET - 1, TOKEN_BUDGET, 2 * TOKEN_BUDGET + 1, MAX_MODEL_LEN - 1):
        prompt = random.Random(length).choices(range(3, 40000), k=length)
        max_tokens = min(8, MAX_MODEL_LEN - length)
        one, two = colocated.greedy(prompt, max_tokens), cluster.greedy(prompt, max_tokens)
        assert one.token_ids == two.token_ids
        assert (one.text, one.finish_reason, one.usage.prompt_tokens) == (two.text, "length", length)
        assert one.kv_transfer.bytes == 0
        assert one.kv_transfer.num_chunks == -(-length // TOKEN_BUDGET)


@pytest.mark.slow
def test_every_way_of_sampling_is_the_same_alone_together_and_in_two_tiers(cluster, colocated):
    requests = mixed_requests()
    lone = [cluster.greedy(prompt, 8, **options).token_ids for prompt, options in requests]
    streams = [
        colocated.client.generate(prompt, max_tokens=8, ignore_eos=True, return_token_ids=True, **options)
        for prompt, options in requests
    ]
    assert [stream.result().token_ids for stream in streams] == lone


def test_text_stops_several_answers_and_logprobs_work(colocated):
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    full = colocated.client.generate(chat, temperature=0.0, max_tokens=40).result()
    assert "Paris" in full.text
    assert full.finish_reason == "stop"
    stopped = colocated.client.generate(chat, temperature=0.0, max_tokens=40, stop=["capital"]).result()
    assert stopped.text == full.text[: full.text.find("capital")]
    answers = colocated.client.generate(
        chat, n=3, seed=1, max_tokens=6, num_logprobs=2, echo_prompt_logprobs=True, return_token_ids=True
    ).results()
    assert len({a.token_ids for a in answers}) > 1
    assert all(len(a.logprobs) == len(a.token_ids) for a in answers)
    assert len(answers[0].prompt_logprobs) == answers[0].usage.prompt_tokens - 1
    stages = full.timings_ms
    assert 0 < stages["prefill_started"] < stages["prefill_finished"] <= stages["decode_started"] < stages["finished"]


def test_a_long_prompt_beside_a_stream_keeps_both_going(colocated):
    """Casebook C071: in every step the stream gets a token and the prompt gets on."""
    stream = colocated.client.generate([5, 6], max_tokens=60, temperature=0.0, ignore_eos=True, return_token_ids=True)
    pieces = iter(stream)
    next(pieces)
    arrivals = []
    reader = threading.Thread(target=lambda: arrivals.extend(time.monotonic() for _ in pieces))
    reader.start()
    started = time.monotonic()
    long = colocated.client.generate(
        random.Random(0).choices(range(3, 40000), k=500), max_tokens=2, temperature=0.0, ignore_eos=True,
        cache_salt="starve",
    )  # fmt: skip
    assert long.result().kv_transfer.num_chunks == 4
    ended = time.monotonic()
    reader.join()
    assert stream.result().usage.completion_tokens == 60
    # One token with each of its four chunks, at least three of them between its start and its end.
    assert len([t for t in arrivals if started < t < ended]) >= 3


def test_cancelled_requests_leave_nothing_behind(colocated):
    for number in range(8):
        stream = colocated.client.generate([number + 5] * 300, max_tokens=100, ignore_eos=True)
        if number % 2:
            next(iter(stream))
        stream.cancel()
    colocated.settle(5.0)


@pytest.mark.slow
async def test_answers_without_pages_are_computed_again_in_place_and_come_out_the_same(tiny_model, tmp_path):
    with running_cluster(
        tmp_path, model=str(tiny_model("llama")), colocated=1, num_pages=120, token_budget=256
    ) as cluster:
        prompts = make_prompts(32, 20)
        lone = [await asyncio.to_thread(cluster.greedy, prompt, 120) for prompt in prompts]
        async with AsyncClient(cluster.address) as client:
            await give_short_answers(client, 200, max_tokens=100)
            options = {"max_tokens": 120, "temperature": 0.0, "ignore_eos": True, "return_token_ids": True}
            streams = [client.generate(p, cache_salt="crowd", **options) for p in prompts]
            together = await asyncio.gather(*(stream.result() for stream in streams))
        values = cluster.metrics("colocated-0")
        assert values["kvferry_preemptions_total,false"] > 0
        assert [r.token_ids for r in together] == [r.token_ids for r in lone]


@pytest.mark.slow
async def test_a_pair_and_colocated_workers_serve_side_by_side_and_replace_each_other(tiny_model, tmp_path):
    with running_cluster(
        tmp_path, model=str(tiny_model("llama")), prefill=1, decode=1, colocated=1, num_pages=400
    ) as cluster:
        assert cluster.client.cluster_status().ready_pairs == 2
        prompts = make_prompts(40, 100)
        expected = [await asyncio.to_thread(cluster.greedy, p, 100) for p in prompts[:10]]
        async with AsyncClient(cluster.address) as client:
            options = {"max_tokens": 100, "temperature": 0.0, "ignore_eos": True, "return_token_ids": True}
            streams = [client.generate(p, **options) for p in prompts]
            tasks = [asyncio.create_task(stream.result()) for stream in streams]
            await asyncio.sleep(0.15)
            process = cluster.cluster.find("colocated-0")
            process.popen.send_signal(signal.SIGKILL)
            results = await asyncio.gather(*tasks)
        process.popen.wait()
        # Those that the colocated worker had went on through the pair.
        assert any(r.kv_transfer.bytes > 0 for r in results)
        assert [r.token_ids for r in results[:10]] == [r.token_ids for r in expected]
        assert all(r.usage.completion_tokens == 100 for r in results)
        assert cluster.client.cluster_status().ready_pairs == 1
