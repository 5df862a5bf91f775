"""A router with 2 + 2 workers: where prompts go, and what joins and leaves under load."""

from __future__ import annotations

import asyncio
import random

import pytest

from kvferry.client import AsyncClient
from tests.integration.support import running_cluster

PREFIX = 400


@pytest.fixture(scope="module")
def two_by_two(tiny_model, tmp_path_factory):
    with running_cluster(
        tmp_path_factory.mktemp("logs"), model=str(tiny_model("llama")), prefill=2, decode=2, num_pages=600,
        token_budget=128,
    ) as cluster:  # fmt: skip
        yield cluster


def counts(cluster, metric):
    return {name: cluster.metrics(name)[metric] for name in cluster.workers()}


async def test_equal_workers_get_equal_shares(two_by_two):
    """At equal load the shares of equal workers differ by less than 20 %."""
    cluster = two_by_two
    cluster.client.flush_prefix_cache()
    before = counts(cluster, "kvferry_output_tokens_total")
    rng = random.Random(1)
    async with AsyncClient(cluster.address) as client:
        for _ in range(30):
            prompts = [rng.choices(range(2, 258), k=100) for _ in range(10)]
            streams = [client.generate(p, max_tokens=6, temperature=0.0, ignore_eos=True) for p in prompts]
            await asyncio.gather(*(stream.result() for stream in streams))
    after = counts(cluster, "kvferry_output_tokens_total")
    grown = {name: after[name] - before[name] for name in after}
    for tier in ("prefill", "decode"):
        shares = [grown[f"{tier}-0"], grown[f"{tier}-1"]]
        assert max(shares) / min(shares) < 1.2, grown


async def test_users_of_one_prefix_find_it_more_often_than_by_turns(two_by_two):
    """8 users, each with a long prefix of its own, 6 turns: the router sends each where its pages are."""
    cluster = two_by_two
    cluster.client.flush_prefix_cache()
    rng = random.Random(2)
    prefixes = [rng.choices(range(2, 258), k=PREFIX) for _ in range(8)]
    cached = moved = total = 0
    async with AsyncClient(cluster.address) as client:
        for turn in range(6):
            streams = [
                client.generate(p + rng.choices(range(2, 258), k=20), max_tokens=4, temperature=0.0, ignore_eos=True)
                for p in prefixes
            ]
            for result in await asyncio.gather(*(stream.result() for stream in streams)):
                if turn:
                    cached += result.usage.cached_tokens
                    moved += result.kv_transfer.decode_cached_tokens
                    total += PREFIX
    # By turns, the worker that has a prefix is met half of the time until both have it.
    print(f"prefill hit rate {cached / total:.2f}, decode {moved / total:.2f}")
    assert cached / total > 0.8
    assert moved / total > 0.6


async def test_workers_join_and_leave_under_load_without_a_failed_request(two_by_two):
    cluster = two_by_two
    rng = random.Random(3)
    prompts = [rng.choices(range(2, 258), k=60) for _ in range(6)]
    expected = [await asyncio.to_thread(cluster.greedy, p, 60) for p in prompts]
    stop = asyncio.Event()
    done = []

    async def keep_asking(n, client):
        while not stop.is_set():
            stream = client.generate(prompts[n], max_tokens=60, temperature=0.0, ignore_eos=True, return_token_ids=True)
            result = await stream.result()
            assert result.token_ids == expected[n].token_ids
            done.append(n)

    async with AsyncClient(cluster.address) as client:
        tasks = [asyncio.create_task(keep_asking(n, client)) for n in range(len(prompts))]
        for name in ("prefill-0", "decode-1"):
            await asyncio.sleep(1.0)
            process = cluster.cluster.find(name)
            process.popen.terminate()
            await asyncio.to_thread(process.popen.wait)
            await asyncio.sleep(1.0)
            await asyncio.to_thread(cluster.cluster.restart_worker, process)
        await asyncio.sleep(1.0)
        before = counts(cluster, "kvferry_output_tokens_total")
        await asyncio.sleep(2.0)
        after = counts(cluster, "kvferry_output_tokens_total")
        stop.set()
        await asyncio.gather(*tasks)
    assert len(done) > 20
    # Those that came back get work again. Casebook C150.
    assert all(after[name] > before[name] for name in after)
