"""A router with 2 + 2 workers: where prompts go, and what joins and leaves under load."""

from __future__ import annotations

import asyncio
import os
import random
import signal

import grpc
import pytest
from safetensors.torch import load_file, save_file

from benchmarks.micro.bench_routing import compare
from kvferry.client import AsyncClient
from tests.integration.support import first_tokens, running_cluster, wait_for
from tests.tiny_models import make_tiny_model

PREFIX = 400


@pytest.fixture(scope="module")
def two_by_two(tmp_path_factory):
    model = make_tiny_model("llama", tmp_path_factory.mktemp("long"), max_model_len=2400)
    with running_cluster(
        tmp_path_factory.mktemp("logs"), model=str(model), prefill=2, decode=2, num_pages=700, token_budget=128
    ) as cluster:
        yield cluster


@pytest.fixture
def second_router(two_by_two):
    cluster = two_by_two.cluster
    name = cluster.start_another_router().name
    yield cluster.find(name)
    router = cluster.find(name)  # it may have been started again
    router.popen.kill()
    router.popen.wait()
    cluster.forget(router)


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


@pytest.mark.slow
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


def test_prompts_of_2000_tokens_meet_their_pages_more_often_than_by_turns(two_by_two):
    """8 users: of one shared prefix each worker has to compute it once; of own ones only routing finds them again."""
    found = {}
    for load in ("one prefix", "own prefixes"):
        found[load] = compare(two_by_two.cluster, load, 8, 3, 2000, range(2, 258), gap_seconds=0.01)
        print(load, {routing: f"{outcome.hit_rate:.2f}" for routing, outcome in found[load].items()})
    one, own = found["one prefix"], found["own prefixes"]
    assert one["cache_aware"].hit_rate > 0.85  # 2 of 24 prompts can't find it
    assert one["cache_aware"].hit_rate >= one["round_robin"].hit_rate - 0.05
    # 8 prefixes of 125 pages: a worker's 700 pages hold 4 with room to spare, not 8.
    assert own["cache_aware"].hit_rate > own["round_robin"].hit_rate + 0.15
    assert own["cache_aware"].hit_rate > 0.5


async def test_a_killed_router_takes_nothing_from_another_ones_requests(two_by_two, second_router):
    """Casebook C151: workers free what it had while the other's requests run on; started again, it serves again."""
    cluster = two_by_two
    rng = random.Random(4)
    prompts = [rng.choices(range(2, 258), k=60) for _ in range(3)]
    options = {"max_tokens": 1000, "temperature": 0.0, "ignore_eos": True, "return_token_ids": True}
    expected = [await asyncio.to_thread(cluster.greedy, p, 1000) for p in prompts]
    async with AsyncClient(cluster.address) as ours, AsyncClient(second_router.address) as theirs:
        clients = [ours] * len(prompts) + [theirs] * len(prompts)
        tasks = await first_tokens(
            [client.generate(p, **options) for client, p in zip(clients, prompts * 2, strict=True)]
        )
        keeping, losing = tasks[: len(prompts)], tasks[len(prompts) :]
        os.kill(second_router.pid, signal.SIGKILL)

        def in_decode():
            values = [cluster.metrics(name) for name in ("decode-0", "decode-1")]
            return sum(v.get("kvferry_sequences,running", 0) for v in values)

        await asyncio.to_thread(wait_for, lambda: in_decode() <= len(prompts), what="the end of the lost ones")
        assert not any(task.done() for task in keeping), "the test is to look while they run"
        lost = await asyncio.gather(*losing, return_exceptions=True)
        assert {getattr(error, "code", error) for error in lost} == {grpc.StatusCode.UNAVAILABLE}
        for task, alone in zip(keeping, expected, strict=True):
            assert (await task).token_ids == alone.token_ids
    await asyncio.to_thread(second_router.popen.wait)
    await asyncio.to_thread(cluster.settle)
    again = await asyncio.to_thread(cluster.cluster.restart_router, second_router)
    async with AsyncClient(again.address) as client:
        assert (await client.generate(prompts[0], **options).result()).token_ids == expected[0].token_ids


@pytest.mark.slow
async def test_two_generations_of_a_model_serve_side_by_side_and_only_equals_are_paired(tmp_path):
    """A rollout: workers with other weights come up beside the old ones, the old ones go, no request fails."""
    old, new = (make_tiny_model("llama", tmp_path / name) for name in ("old", "new"))
    change_weights(new)
    with running_cluster(
        tmp_path / "logs", model=str(old), num_pages=200, token_budget=64, drain_seconds=60
    ) as cluster:
        rng = random.Random(5)
        prompt = rng.choices(range(2, 258), k=40)
        by_old = cluster.greedy(prompt, 30).token_ids
        workers = [cluster.cluster.start_worker(tier, 1, "--model", str(new)) for tier in ("prefill", "decode")]
        for worker in workers:
            cluster.cluster.wait_ready(worker)
        router = cluster.cluster.start_another_router()
        async with AsyncClient(router.address) as client:

            async def ask():
                stream = client.generate(prompt, max_tokens=30, temperature=0.0, ignore_eos=True, return_token_ids=True)
                return (await stream.result()).token_ids

            await asyncio.to_thread(cluster.wait_for_pairs, 2, router.address)
            answers = await asyncio.gather(*(ask() for _ in range(40)))
            [by_new] = set(answers) - {by_old}
            assert set(answers) == {by_old, by_new}
            states = {(w.tier, w.state) for w in (await client.cluster_status()).workers}
            assert states == {("prefill", "ready"), ("decode", "ready")}
            running = [asyncio.create_task(ask()) for _ in range(20)]
            for name in ("prefill-0", "decode-0"):
                process = cluster.cluster.find(name)
                process.popen.terminate()
                running += [asyncio.create_task(ask()) for _ in range(5)]
                await asyncio.to_thread(process.popen.wait)
            assert set(await asyncio.gather(*running)) <= {by_old, by_new}
            assert {await ask() for _ in range(5)} == {by_new}


def change_weights(model):
    weights = load_file(model / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"].flip(0).contiguous()
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
