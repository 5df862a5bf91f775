"""A decode worker in a network of its own, reached over TCP: the link to it is cut and heals."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from contextlib import contextmanager

import pytest

from tests.chaos.load import Load
from tests.integration.support import running_cluster

NAMESPACE, NEAR, FAR = f"kvferry-{os.getpid()}", "10.203.77.1", "10.203.77.2"
IDS = range(2, 258)


def ip(*arguments):
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True)


@contextmanager
def far_network():
    """A network namespace behind a pair of virtual interfaces. Gives the name of the near one."""
    near = f"kvn{os.getpid() % 100000}"
    try:
        ip("netns", "add", NAMESPACE)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', error)}")
    try:
        ip("link", "add", near, "type", "veth", "peer", "name", "far0", "netns", NAMESPACE)
        ip("addr", "add", f"{NEAR}/24", "dev", near)
        ip("link", "set", near, "up")
        ip("-n", NAMESPACE, "addr", "add", f"{FAR}/24", "dev", "far0")
        ip("-n", NAMESPACE, "link", "set", "far0", "up")
        ip("-n", NAMESPACE, "link", "set", "lo", "up")
        yield near
    finally:
        subprocess.run(["ip", "netns", "del", NAMESPACE], check=False)


@pytest.fixture(scope="module")
def far(tiny_model, tmp_path_factory):
    """1 prefill and 2 decode workers, one of these far; a router that knows them."""
    os.environ["UCX_TLS"] = "tcp"  # else pages go through shared memory, which no cut of a network touches
    try:
        with (
            far_network() as near,
            running_cluster(
                tmp_path_factory.mktemp("logs"), model=str(tiny_model("llama")), num_pages=300, token_budget=64,
                worker_silence_seconds=3.0,
                commands={"decode-1": ["ip", "netns", "exec", NAMESPACE, sys.executable, "-m", "kvferry"]},
            ) as cluster,
        ):  # fmt: skip
            local = cluster.cluster
            prefill = local.start_worker("prefill", 1, "--host", NEAR)
            decode = local.start_worker("decode", 1, "--host", FAR)
            for process in (prefill, decode):
                local.wait_ready(process)
            router = local.start_another_router("--prefill", prefill.address)
            cluster.near, cluster.router = near, router
            yield cluster
    finally:
        del os.environ["UCX_TLS"]


@pytest.mark.long
@pytest.mark.parametrize("seconds", [1.0, 8.0])
async def test_a_cut_between_tiers_costs_time_and_nothing_else(far, seconds):
    """Casebook C113: shorter and longer than it takes to notice. Bytes and messages of before may come after."""
    rng = random.Random(1)
    load = Load(far.router.address, [rng.choices(IDS, k=rng.randint(20, 250)) for _ in range(8)], 60)
    await load.learn()
    stop = asyncio.Event()
    running = asyncio.create_task(load.run(6, stop))
    await asyncio.sleep(1.0)
    ip("link", "set", far.near, "down")
    await asyncio.sleep(seconds)
    num_done = len(load.done)
    ip("link", "set", far.near, "up")
    await asyncio.sleep(4.0)
    stop.set()
    await running
    assert load.lost == []
    assert load.wrong == []
    assert len(load.done) > num_done > 0
    await asyncio.to_thread(far.settle, 20.0)
