"""A real L7 proxy in front of two routers: nginx, with the configuration that is shipped as an example."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import time

import grpc
import httpx
import pytest

from kvferry.client import AsyncClient, KvferryError
from tests.integration.support import first_tokens, running_cluster
from tests.k8s.tools import K8S, debian_program

OPTIONS = {"temperature": 0.0, "ignore_eos": True, "return_token_ids": True}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Proxy:
    """nginx over two routers."""

    def __init__(self, program, folder, cluster, routers):
        self.cluster, self.routers = cluster, routers
        text = (K8S / "examples" / "nginx.conf").read_text()
        ports = [router.address.rpartition(":")[2] for router in routers]
        http = [httpx.URL(router.info["http"]).port for router in routers]
        self.grpc_port, self.http_port = free_port(), free_port()
        mine = {
            "50051": ports[0], "50052": ports[1], "8000": http[0], "8001": http[1],
            "8443": self.grpc_port, "8080": self.http_port,
        }  # fmt: skip
        for example, port in mine.items():
            assert f"127.0.0.1:{example}" in text
            text = text.replace(f"127.0.0.1:{example}", f"127.0.0.1:<{port}>")
        text = text.replace("<", "").replace(">", "")
        paths = "".join(
            f"  {kind}_temp_path {folder}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        (folder / "nginx.conf").write_text(text.replace("\nhttp {\n", "\nhttp {\n" + paths))
        options = f"daemon off; pid {folder}/pid; error_log {folder}/error.log;"
        self.process = subprocess.Popen(
            [program, "-p", folder, "-e", folder / "error.log", "-c", folder / "nginx.conf", "-g", options]
        )
        end = time.monotonic() + 10
        while time.monotonic() < end and not self._answers():
            time.sleep(0.02)

    def _answers(self):
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.grpc_port)) == 0

    @property
    def address(self):
        return f"127.0.0.1:{self.grpc_port}"


@pytest.fixture(scope="module")
def proxy(tmp_path_factory, tiny_model):
    program = debian_program("nginx", "usr/sbin/nginx")
    folder = tmp_path_factory.mktemp("nginx")
    with running_cluster(folder / "logs", model=str(tiny_model("llama")), num_pages=1200, token_budget=64) as cluster:
        routers = [cluster.cluster.find("router"), cluster.cluster.start_another_router()]
        made = Proxy(program, folder, cluster, routers)
        yield made
        made.process.send_signal(signal.SIGQUIT)
        try:
            assert made.process.wait(10) == 0
        finally:
            made.process.kill()


def came_one_by_one(arrived):
    """The start and the times at which things arrived: many apart, half of them well before the end."""
    assert sum(b - a > 0.0005 for a, b in itertools.pairwise(arrived)) > 50
    halfway = (arrived[len(arrived) // 2] - arrived[0]) / (arrived[-1] - arrived[0])
    assert halfway < 0.9, "they were held back until the end"


async def test_streams_pass_token_by_token(proxy):
    async with AsyncClient(proxy.address) as client:
        arrived = [time.monotonic()]
        async for piece in client.generate([7, 8, 9], max_tokens=300, **OPTIONS):
            arrived += [time.monotonic()] * len(piece.token_ids)
    assert len(arrived) == 301
    came_one_by_one(arrived)


async def test_http_streams_pass_token_by_token(proxy):
    body = {"model": "", "prompt": "abc", "max_tokens": 200, "stream": True, "ignore_eos": True, "temperature": 0}
    async with httpx.AsyncClient(timeout=60) as client:
        models = (await client.get(f"http://127.0.0.1:{proxy.http_port}/v1/models")).json()
        body["model"] = models["data"][0]["id"]
        arrived = [time.monotonic()]
        async with client.stream("POST", f"http://127.0.0.1:{proxy.http_port}/v1/completions", json=body) as response:
            assert response.status_code == 200
            lines = response.aiter_lines()
            arrived += [time.monotonic() async for line in lines if line.startswith("data: ")]
    came_one_by_one(arrived)


async def test_a_router_that_dies_takes_only_its_own_streams_and_new_ones_go_on(proxy):
    cluster, victim = proxy.cluster, proxy.routers[1]
    async with AsyncClient(proxy.address) as client:

        def num_ended(router):
            return cluster.metrics(router.name).get("kvferry_requests_total,OK", 0)

        expected = (await client.generate([5, 6, 7], max_tokens=400, **OPTIONS).result()).token_ids
        ended = await asyncio.to_thread(num_ended, proxy.routers[0])
        running = await first_tokens([client.generate([5, 6, 7], max_tokens=400, **OPTIONS) for _ in range(16)])
        os.kill(victim.pid, signal.SIGKILL)
        results = await asyncio.gather(*running, return_exceptions=True)
        failed = [r for r in results if isinstance(r, KvferryError)]
        # What the victim had answered by then may have reached its client, or not.
        on_other = await asyncio.to_thread(num_ended, proxy.routers[0]) - ended
        assert 0 < on_other < 16
        assert 0 < len(failed) <= 16 - on_other
        assert {error.code for error in failed} <= {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL}
        assert {r.token_ids for r in results if not isinstance(r, Exception)} == {expected}
        for _ in range(20):
            assert (await client.generate([5, 6, 7], max_tokens=10, **OPTIONS).result()).token_ids == expected[:10]
    await asyncio.to_thread(victim.popen.wait)
    cluster.cluster.forget(victim)
    await asyncio.to_thread(cluster.settle, 5.0)
