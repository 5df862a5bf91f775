"""Workers die, freeze, are cut off, drain, and come back, under load; the long form is `make chaos`."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvferry.client import AsyncClient, Client, KvferryError
from tests.chaos.load import Load
from tests.faults.faulty_kvferry import FAULTY, Faults
from tests.faults.link_proxy import LinkProxy
from tests.integration.support import first_tokens, running_cluster, wait_for

IDS = range(2, 258)
MAX_TOKENS = 150
GREEDY = {"temperature": 0.0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def two_by_two(tiny_model, tmp_path_factory, faults_file):
    with running_cluster(
        tmp_path_factory.mktemp("logs"), model=str(tiny_model("llama")), prefill=2, decode=2, num_pages=300,
        token_budget=64, worker_silence_seconds=3.0, commands={"prefill-0": FAULTY}, overlap="on",
    ) as cluster:  # fmt: skip
        rng = random.Random(1)
        load = Load(cluster.address, [rng.choices(IDS, k=rng.randint(20, 250)) for _ in range(8)], MAX_TOKENS)
        asyncio.run(load.learn())
        cluster.prompts, cluster.expected = load.prompts, load.expected
        yield cluster


@pytest.fixture
def cluster(two_by_two):
    for process in [p for p in two_by_two.cluster.processes if p.popen.poll() is not None]:
        two_by_two.cluster.restart_worker(process)  # a test before this one failed half-way
    yield two_by_two
    two_by_two.settle(10.0)


class Running:
    """Load around a fault."""

    def __init__(self, cluster, address=None):
        self.load = Load(address or cluster.address, cluster.prompts, MAX_TOKENS, cluster.expected)
        self._stop = asyncio.Event()

    async def __aenter__(self):
        self._task = asyncio.create_task(self.load.run(6, self._stop))
        await asyncio.sleep(0.5)
        return self.load

    async def __aexit__(self, kind, error, trace):
        await asyncio.sleep(0.5)
        self._stop.set()
        await self._task
        assert not self.load.lost, self.load.lost[:2]
        assert not self.load.wrong, self.load.wrong[:2]
        assert len(self.load.done) > 10


async def come_back(cluster, process):
    await asyncio.to_thread(process.popen.wait)
    await asyncio.to_thread(cluster.cluster.restart_worker, process)


async def test_killed_workers_cost_time_and_nothing_else(cluster):
    """Casebook C094, C096: prefill and decode, while they compute, send and receive; the survivors live on."""
    others = {name: cluster.cluster.find(name).pid for name in ("prefill-1", "decode-1")}
    killed = [cluster.cluster.find(name) for name in ("prefill-0", "decode-0")]
    async with Running(cluster):
        for process in killed:
            await gets_work(cluster, process)
            os.kill(process.pid, signal.SIGKILL)
            await asyncio.sleep(1.0)
    for process in killed:  # when the load is over: starting beside it takes three times as long
        await come_back(cluster, process)
    assert all(psutil.pid_exists(pid) for pid in others.values())


async def test_a_prefill_worker_dies_and_its_client_goes_in_the_same_moment(cluster):
    """Casebook C085: decode's pages come back all the same."""
    rng = random.Random(2)
    async with AsyncClient(cluster.address) as client:
        streams = [client.generate(rng.choices(IDS, k=300), max_tokens=60, **GREEDY) for _ in range(6)]
        reading = [asyncio.create_task(stream.result()) for stream in streams]
        await asyncio.sleep(0.03)
        process = cluster.cluster.find("prefill-1")
        os.kill(process.pid, signal.SIGKILL)
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
    await asyncio.to_thread(process.popen.wait)
    await asyncio.to_thread(cluster.settle, 6.0)
    await come_back(cluster, process)


@pytest.mark.long
async def test_a_frozen_worker_is_left_and_taken_back(cluster):
    """Casebook C095, C141, C153: longer than the router waits to hear of it."""
    process = psutil.Process(cluster.cluster.find("decode-1").pid)
    async with Running(cluster) as load:
        process.suspend()
        await asyncio.sleep(5.0)
        during = {w.address: w for w in (await asyncio.to_thread(cluster.client.cluster_status)).workers}
        frozen = during[cluster.cluster.find("decode-1").address]
        assert frozen.state in ("lost", "connecting")
        num_done = len(load.done)
        await asyncio.sleep(1.0)
        assert len(load.done) > num_done, "the rest goes on"
        process.resume()
        await asyncio.sleep(3.0)
    assert cluster.client.cluster_status().ready_pairs == 4


async def gets_work(cluster, process):
    """Waits until something runs there."""

    def has_some():
        return any(v for key, v in cluster.metrics(process.name).items() if key.startswith("kvferry_sequences,"))

    await asyncio.to_thread(wait_for, has_some, what=f"work for {process.name}")


async def start_long_answers(client):
    """Answers of 400 tokens that run now; some of them on each decode worker."""
    prompts = [[number] * 20 for number in range(10, 18)]
    return await first_tokens([client.generate(p, max_tokens=400, **GREEDY) for p in prompts])


async def drain(cluster, process):
    """SIGTERM under load; gives how many requests were handed over. Nothing is lost, and it exits with 0 in time."""
    before = cluster.metrics("router").get("kvferry_request_retries_total,draining", 0)
    async with Running(cluster), AsyncClient(cluster.address) as client:
        await gets_work(cluster, process)
        long_ones = await start_long_answers(client)
        process.popen.terminate()
        started = time.monotonic()
        assert await asyncio.to_thread(process.popen.wait) == 0
        assert time.monotonic() - started < 8
        assert {len(result.token_ids) for result in await asyncio.gather(*long_ones)} == {400}
    return cluster.metrics("router").get("kvferry_request_retries_total,draining", 0) - before


@pytest.mark.slow
async def test_a_worker_that_is_told_to_end_ends_well(cluster):
    """Casebook C145, C147: not ready, nothing new; what runs is finished or goes on elsewhere; exit 0."""
    prefill, decode = cluster.cluster.find("prefill-0"), cluster.cluster.find("decode-0")
    await drain(cluster, prefill)
    await come_back(cluster, prefill)
    assert await drain(cluster, decode) == 0
    cluster.cluster.forget(decode)
    port = decode.address.rpartition(":")[2]
    decode = cluster.cluster.start_worker("decode", 0, "--port", port, "--drain", "handover")
    await asyncio.to_thread(cluster.cluster.wait_ready, decode)
    await asyncio.to_thread(cluster.wait_for_pairs, 4)
    assert await drain(cluster, decode) > 0
    await come_back(cluster, decode)


async def test_a_second_sigterm_ends_a_process_at_once(cluster):
    process = cluster.cluster.find("decode-0")
    async with Running(cluster), AsyncClient(cluster.address) as client:
        running = await start_long_answers(client)
        process.popen.terminate()
        await asyncio.to_thread(wait_for, lambda: any("draining" in line for line in process.recent))
        process.popen.terminate()
        assert await asyncio.to_thread(process.popen.wait) == 1
        await asyncio.gather(*running)
    await come_back(cluster, process)


async def test_a_draining_router_finishes_its_streams_and_takes_none(cluster):
    router = await asyncio.to_thread(cluster.cluster.start_another_router)
    async with AsyncClient(router.address) as client:
        running = await start_long_answers(client)
        router.popen.terminate()
        await asyncio.to_thread(wait_for, lambda: any("router drains" in line for line in router.recent))
        with Client(router.address) as late, pytest.raises(KvferryError) as refused:
            await asyncio.to_thread(late.generate([5], max_tokens=2).result)
        assert refused.value.code is grpc.StatusCode.UNAVAILABLE
        alone = [cluster.greedy([number] * 20, 400).token_ids for number in (10, 17)]
        answers = [(await task).token_ids for task in running]
        assert [answers[0], answers[-1]] == alone
    assert await asyncio.to_thread(router.popen.wait) == 0
    cluster.cluster.forget(router)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["cut", "silence"])
async def test_a_link_to_a_worker_fails_and_heals(cluster, kind):
    """Casebook C088, C108: reset, or half-open, between the router and a worker of each tier."""
    names = ("prefill-0", "prefill-1", "decode-0", "decode-1")
    proxies = {name: await LinkProxy(cluster.cluster.find(name).address).start() for name in names}
    flags = [
        *("--prefill", proxies["prefill-0"].address, proxies["prefill-1"].address),
        *("--decode", proxies["decode-0"].address, proxies["decode-1"].address),
    ]
    router = await asyncio.to_thread(cluster.cluster.start_another_router, *flags)
    async with AsyncClient(router.address) as client:
        await asyncio.to_thread(cluster.wait_for_pairs, 4, router.address)
        async with Running(cluster, router.address):
            for name in ("prefill-0", "decode-1"):
                (proxies[name].silence if kind == "silence" else proxies[name].cut)()
                await asyncio.sleep(4.5 if kind == "silence" else 1.0)
                proxies[name].heal()
                await asyncio.sleep(1.0)
        assert (await client.cluster_status()).ready_pairs == 4
    router.popen.terminate()
    await asyncio.to_thread(router.popen.wait)
    cluster.cluster.forget(router)
    for proxy in proxies.values():
        await proxy.close()


@pytest.mark.parametrize(
    "faults",
    [
        Faults(post_fails=0.1),
        Faults(notification_lost=0.1),
        Faults(notification_twice=0.5, notification_late=0.5),
    ],
    ids=["posts fail", "notifications get lost", "notifications come twice and late"],
)
async def test_a_bad_transport_costs_time_and_nothing_else(cluster, faults_file, faults):
    """Casebook C088, C115: one of two prefill workers has it."""
    faults.write_to(faults_file)
    try:
        async with Running(cluster):
            await asyncio.sleep(2.5)
    finally:
        Faults().write_to(faults_file)


@pytest.mark.long
async def test_a_worker_whose_transport_hangs_is_not_ready_and_recovers(cluster, faults_file):
    """Casebook C141: the process lives and answers, but nothing moves; it says where, and its requests go on."""
    port = cluster.cluster.find("prefill-0").address.rpartition(":")[2]
    process = cluster.cluster.find("prefill-0")
    process.popen.terminate()
    await asyncio.to_thread(process.popen.wait)
    cluster.cluster.forget(process)
    process = cluster.cluster.start_worker("prefill", 0, "--port", port, "--wedge-seconds", "0.5")
    await asyncio.to_thread(cluster.cluster.wait_ready, process)
    await asyncio.to_thread(cluster.wait_for_pairs, 4)

    def health():
        with grpc.insecure_channel(process.address) as channel:
            return health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5).status

    async with Running(cluster):
        assert health() == health_pb2.HealthCheckResponse.SERVING
        Faults(hang_seconds=3.0).write_to(faults_file)
        await asyncio.to_thread(wait_for, lambda: health() != health_pb2.HealthCheckResponse.SERVING)
        workers = (await asyncio.to_thread(cluster.client.cluster_status)).workers
        [told] = [w for w in workers if w.address == process.address]
        assert told.state == "faulty"
        assert "the transfer thread has stood for" in told.reason
        Faults().write_to(faults_file)
        await asyncio.to_thread(wait_for, lambda: health() == health_pb2.HealthCheckResponse.SERVING)
    process.popen.terminate()
    await come_back(cluster, process)


@pytest.mark.long
async def test_two_workers_with_one_name_are_two_workers(cluster):
    """Pages, sessions and connections belong to incarnations, not to names."""
    process = cluster.cluster.start_worker("prefill", 1)  # a second "prefill-1"
    await asyncio.to_thread(cluster.cluster.wait_ready, process)
    router = await asyncio.to_thread(cluster.cluster.start_another_router)
    await asyncio.to_thread(cluster.wait_for_pairs, 6, router.address)
    async with Running(cluster, router.address):
        os.kill(process.pid, signal.SIGKILL)
        await asyncio.to_thread(process.popen.wait)
        await asyncio.sleep(1.0)
    cluster.cluster.forget(process)
    router.popen.terminate()
    await asyncio.to_thread(router.popen.wait)
    cluster.cluster.forget(router)
