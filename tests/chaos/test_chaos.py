"""`make chaos`: 2 prefill and 2 decode workers under steady load, and something goes wrong every few seconds.

No request may be lost, no token wrong, no page leaked. What each kind of fault costs is printed. Bounded to minutes.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from contextlib import asynccontextmanager

import psutil
import pytest

from kvferry.client import AsyncClient
from tests.chaos.load import OPTIONS, Load
from tests.faults.faulty_kvferry import FAULTY, Faults
from tests.faults.link_proxy import LinkProxy
from tests.integration.support import running_cluster
from tests.simulation.__main__ import main as simulate

CLIENTS = 8
MAX_TOKENS = 80
QUIET_SECONDS = 5.0
WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
IDS = range(2, 258)


@pytest.fixture(scope="module")
def cluster(tiny_model, tmp_path_factory, faults_file):
    with running_cluster(
        tmp_path_factory.mktemp("logs"), model=str(tiny_model("llama")), prefill=2, decode=2, num_pages=300,
        token_budget=64, worker_silence_seconds=4.0,
        commands={"prefill-0": FAULTY, "prefill-1": FAULTY},
    ) as cluster:  # fmt: skip
        yield cluster


@pytest.fixture(scope="module")
def answers(cluster):
    """Prompts and what each gets alone."""
    rng = random.Random(1)
    load = Load(cluster.address, [rng.choices(IDS, k=rng.randint(20, 300)) for _ in range(24)], MAX_TOKENS)
    asyncio.run(load.learn())
    return load.prompts, load.expected


@asynccontextmanager
async def steady_load(cluster, answers, address=None):
    """Load that began a while ago; at the end nothing is lost, wrong or leaked."""
    prompts, expected = answers
    load = Load(address or cluster.address, prompts, MAX_TOKENS, expected)
    stop, faults = asyncio.Event(), []
    running = asyncio.create_task(load.run(CLIENTS, stop))
    await asyncio.sleep(QUIET_SECONDS)
    quiet_until = time.monotonic()
    try:
        yield faults
    finally:
        await asyncio.sleep(1.0)
        stop.set()
        await running
    print(f"\n{load.report(quiet_until, faults)}")
    assert not load.wrong, load.wrong[:3]
    assert not load.lost, load.lost[:3]
    await asyncio.to_thread(cluster.settle, 15.0)


async def restart(cluster, process):
    await asyncio.to_thread(process.popen.wait)
    await asyncio.to_thread(cluster.cluster.restart_worker, process)


@pytest.mark.timeout(300)
async def test_a_random_worker_is_killed_every_few_seconds(cluster, answers):
    rng = random.Random(2)
    async with steady_load(cluster, answers) as faults:
        for _ in range(10):
            process = cluster.cluster.find(rng.choice(WORKERS))
            faults.append((time.monotonic(), f"SIGKILL of {process.name.partition('-')[0]}"))
            os.kill(process.pid, signal.SIGKILL)
            await restart(cluster, process)
            await asyncio.sleep(rng.uniform(0.5, 2.0))


@pytest.mark.timeout(300)
async def test_a_random_worker_is_stopped_and_wakes_up(cluster, answers):
    """SIGSTOP for a moment (nobody notices but its requests) or for longer than the router waits to hear of it."""
    rng = random.Random(3)
    async with steady_load(cluster, answers) as faults:
        for seconds in (0.5, 7.0, 1.0, 7.0, 2.0, 7.0):
            process = psutil.Process(cluster.cluster.find(rng.choice(WORKERS)).pid)
            faults.append((time.monotonic(), f"SIGSTOP for {seconds:g} s"))
            process.suspend()
            await asyncio.sleep(seconds)
            process.resume()
            await asyncio.sleep(rng.uniform(1.0, 3.0))


@pytest.mark.timeout(300)
async def test_every_process_is_restarted_in_turn(cluster, answers):
    """A rolling restart: SIGTERM, the router too; not one request fails. Both ways of draining."""
    async with steady_load(cluster, answers) as faults:
        for name in (*WORKERS, "router"):
            process = cluster.cluster.find(name)
            faults.append((time.monotonic(), f"SIGTERM of {name.partition('-')[0]}"))
            process.popen.terminate()
            if name == "router":
                assert await asyncio.to_thread(process.popen.wait) == 0
                await asyncio.to_thread(cluster.cluster.restart_router, process)
            else:
                assert await asyncio.to_thread(process.popen.wait) == 0
                await restart(cluster, process)
            await asyncio.sleep(1.0)


@pytest.mark.timeout(300)
async def test_links_are_cut_go_silent_and_heal(cluster, answers):
    """Between the router and workers: reset, or half-open, one or several at a time."""
    proxies = {name: await LinkProxy(cluster.cluster.find(name).address).start() for name in WORKERS}
    flags = [
        *("--prefill", proxies["prefill-0"].address, proxies["prefill-1"].address),
        *("--decode", proxies["decode-0"].address, proxies["decode-1"].address),
    ]
    router = await asyncio.to_thread(cluster.cluster.start_another_router, *flags)
    rng = random.Random(4)
    async with steady_load(cluster, answers, router.address) as faults:
        for kind in ("cut", "silence", "cut", "cut two", "silence", "slow"):
            chosen = rng.sample(WORKERS, 2 if kind == "cut two" else 1)
            faults.append((time.monotonic(), f"link {kind}"))
            for name in chosen:
                if kind == "slow":
                    proxies[name].delay_seconds = 0.05
                else:
                    (proxies[name].silence if kind == "silence" else proxies[name].cut)()
            await asyncio.sleep(7.0 if kind == "silence" else 2.0)
            for name in chosen:
                proxies[name].delay_seconds = 0.0
                proxies[name].heal()
            await asyncio.sleep(2.0)
    router.popen.kill()
    router.popen.wait()
    cluster.cluster.forget(router)
    for proxy in proxies.values():
        await proxy.close()


@pytest.mark.timeout(300)
async def test_transfers_fail_and_their_messages_get_lost(cluster, answers, faults_file):
    """Posts fail, notifications are lost, doubled and late, on both prefill workers."""
    async with steady_load(cluster, answers) as faults:
        for kind, setting in (
            ("post fails (5 %)", Faults(post_fails=0.05)),
            ("notification lost (5 %)", Faults(notification_lost=0.05)),
            ("notification late or twice (50 %)", Faults(notification_late=0.25, notification_twice=0.25)),
        ):
            faults.append((time.monotonic(), kind))
            setting.write_to(faults_file)
            await asyncio.sleep(6.0)
            Faults().write_to(faults_file)
            await asyncio.sleep(1.0)


@pytest.mark.timeout(600)
async def test_10000_cancels_leave_nothing_behind(cluster):
    """Casebook C085, C097, C098, C100, C105: at every stage; pools and memory are flat."""
    rng = random.Random(5)
    load = Load(cluster.address, [[5] * 20], MAX_TOKENS)
    await load.learn()
    processes = {name: psutil.Process(cluster.cluster.find(name).pid) for name in (*WORKERS, "router")}

    async def cancel_some(number):
        async with AsyncClient(cluster.address) as client:
            for _ in range(number):
                prompt = rng.choices(IDS, k=rng.randint(5, 300))
                stream = client.generate(prompt, max_tokens=100, **OPTIONS)
                reading = asyncio.create_task(stream.result())
                await asyncio.sleep(rng.random() ** 2 * 0.3)
                stream.cancel()
                await asyncio.gather(reading, return_exceptions=True)

    async def storm(number):
        await asyncio.gather(*(cancel_some(number // 32) for _ in range(32)))
        await asyncio.to_thread(cluster.settle, 5.0)
        return {name: process.memory_info().rss for name, process in processes.items()}

    before = await storm(2_000)
    after = await storm(10_000)
    grown = {name: (after[name] - before[name]) / 1e6 for name in after}
    print(f"\n10,000 cancels; MB grown: { ({name: round(mb, 1) for name, mb in grown.items()}) }")
    assert all(mb < 30 for mb in grown.values()), grown
    async with steady_load(cluster, (load.prompts, load.expected)):
        pass


@pytest.mark.timeout(1500)
def test_100000_schedules_break_no_promise():
    """In simulated time; see tests/simulation."""
    with pytest.raises(SystemExit) as ended:
        simulate(schedules=100_000)
    assert ended.value.code == 0
