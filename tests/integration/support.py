"""Real clusters for tests: processes, NIXL, gRPC on loopback; and the promises checked after each use."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import psutil
from prometheus_client.parser import text_string_to_metric_families

from kvferry.client import Client
from local_cluster.cluster import LocalCluster
from local_cluster.config import ClusterConfig


def wait_for(condition, seconds=60.0, what="what the test waits for"):
    """Looks again and again until `condition()` holds; fails when it takes `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen within {seconds} s"
        time.sleep(0.002)


async def first_tokens(streams):
    """Starts them all; once each has begun its answer gives their tasks, which end with the whole results.

    From here on the answers run: no look at gauges from outside is needed, which may come too late for quick ones.
    Fails with what a stream fails with, or if one has ended already.
    """
    begun = [asyncio.get_running_loop().create_future() for _ in streams]

    async def take(stream, first):
        async for _ in stream:
            if not first.done():
                first.set_result(None)
        return await stream.result()

    tasks = [asyncio.create_task(take(stream, first)) for stream, first in zip(streams, begun, strict=True)]
    try:
        async with asyncio.timeout(60):
            for first, task in zip(begun, tasks, strict=True):
                await asyncio.wait([first, task], return_when=asyncio.FIRST_COMPLETED)
                if not first.done():
                    task.result()
        assert not any(task.done() for task in tasks), "the test is to look while they run"
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    return tasks


class TestCluster:
    """A local cluster, a client, and looks inside."""

    __test__ = False

    def __init__(self, cluster: LocalCluster, client: Client, config: ClusterConfig):
        self.cluster, self.client, self.config = cluster, client, config

    @property
    def address(self):
        return self.cluster.address

    def metrics(self, name):
        """{sample name + labels: value} of a process."""
        with urllib.request.urlopen(self.cluster.find(name).info["metrics"], timeout=10) as response:
            text = response.read().decode()
        return {
            sample.name + "".join(f",{v}" for k, v in sorted(sample.labels.items()) if k != "tier"): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def workers(self):
        return [p.name for p in self.cluster.processes if not p.name.startswith("router") and p.popen.poll() is None]

    def busy(self):
        """What is not at rest, by process: pages not free, sequences, requests."""
        found = {}
        for name in self.workers():
            values = self.metrics(name)
            pages = {k.split(",")[1]: v for k, v in values.items() if k.startswith("kvferry_pages,")}
            assert sum(pages.values()) == values["kvferry_pages_total"], f"{name}: pages do not add up: {pages}"
            found |= {f"{name} pages {k}": v for k, v in pages.items() if v and k not in ("free", "cached")}
            found |= {f"{name} {k}": v for k, v in values.items() if k.startswith("kvferry_sequences,") and v}
        for name in (p.name for p in self.cluster.processes if p.name.startswith("router") and p.popen.poll() is None):
            values = self.metrics(name)
            found |= {f"{name} {k}": v for k, v in values.items() if k.startswith("kvferry_active_requests,") and v}
        return found

    def settle(self, seconds=1.0):
        """SETTLE: within `seconds`, every page is free and every gauge 0. Then no process was restarted."""
        end = time.monotonic() + seconds
        while (busy := self.busy()) and time.monotonic() < end:
            time.sleep(0.02)
        assert not busy, f"not at rest after {seconds} s: {busy}"

    def wait_for_pairs(self, number, address=None):
        """Until the router, or another one with this address, has so many pairs to send requests to."""
        with Client(address or self.address) as client:
            wait_for(lambda: client.cluster_status().ready_pairs >= number, what=f"{number} ready pairs")

    def greedy(self, prompt, max_tokens=8, **options):
        """A whole greedy answer, EOS ignored, with ids."""
        options = {"temperature": 0.0, "ignore_eos": True, "return_token_ids": True, "timeout": 120} | options
        return self.client.generate(prompt, max_tokens=max_tokens, **options).result()


@contextmanager
def running_cluster(log_dir: Path, commands=None, **options):
    """A cluster that is at rest and gone at the end; its logs are shown if something fails."""
    config = ClusterConfig(**({"dtype": "float32", "port": 0, "log_dir": log_dir} | options))
    try:
        with LocalCluster(config, commands=commands) as cluster, Client(cluster.address) as client:
            pids = [process.pid for process in cluster.processes]
            test_cluster = TestCluster(cluster, client, config)
            yield test_cluster
            test_cluster.settle()
            pids += [process.pid for process in cluster.processes]
    except BaseException:
        for log in sorted(log_dir.glob("*.log")):
            print(f"--- {log.name}\n{log.read_text()[-4000:]}")
        raise
    assert not [pid for pid in pids if psutil.pid_exists(pid)], "processes are left behind"
