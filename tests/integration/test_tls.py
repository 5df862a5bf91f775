"""Router and workers over mutual TLS, as real processes."""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
import time

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvferry.client import Client, ClientTls, KvferryError
from tests.rpc.certificates import Authority


class Process:
    """One `kvferry` command."""

    def __init__(self, folder, command, *flags):
        self.ready_file, self.log = folder / f"{command}.json", folder / f"{command}.log"
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "kvferry", command, *map(str, flags), "--ready-file", str(self.ready_file)],
            stdout=self.log.open("w"), stderr=subprocess.STDOUT,
        )  # fmt: skip

    def info(self):
        end = time.monotonic() + 90
        while not self.ready_file.exists():
            assert self.popen.poll() is None and time.monotonic() < end, self.log.read_text()
            time.sleep(0.05)
        return json.loads(self.ready_file.read_text())


@pytest.fixture(scope="module")
def secure(tmp_path_factory, tiny_model):
    """(the CA's file, what the processes say of themselves)"""
    folder, model = tmp_path_factory.mktemp("secure"), tiny_model("llama")
    ca = Authority(folder / "ca")
    shared = ["--model", model, "--health-port", 0, "--tls-folder"]
    workers = {
        tier: Process(folder, tier, *shared, ca.issue(folder / tier), "--num-pages", 100, "--threads", 1)
        for tier in ("prefill", "decode")
    }
    info = {tier: worker.info() for tier, worker in workers.items()}
    flags = [f"--{tier}={info[tier]['address']}" for tier in info]
    router = Process(folder, "router", *shared, ca.issue(folder / "router"), *flags)
    info["router"] = router.info()
    yield folder / "ca" / "ca.crt", info
    for process in (router, *workers.values()):
        process.popen.terminate()
    for process in (router, *workers.values()):
        assert process.popen.wait(30) == 0, process.log.read_text()


def test_answers_come_over_tls_and_pages_move(secure):
    ca, info = secure
    with Client(info["router"]["address"], ClientTls(ca=ca, server_name="kvferry")) as client:
        result = client.generate([5, 6, 7] * 20, max_tokens=8, ignore_eos=True).result()
    assert result.usage.completion_tokens == 8
    assert result.kv_transfer.bytes > 0


def test_the_command_line_speaks_it_too(secure):
    ca, info = secure
    done = subprocess.run(
        [sys.executable, "-m", "kvferry", "status", "--address", info["router"]["address"],
         "--tls-ca", str(ca), "--tls-name", "kvferry"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "1 ready pairs" in done.stdout


def test_http_is_tls_too(secure):
    ca, info = secure
    url = info["router"]["http"]
    assert url.startswith("https://")
    body = {"model": info["router"]["model"], "prompt": "abc", "max_tokens": 5, "ignore_eos": True, "stream": True}
    with httpx.Client(verify=ssl.create_default_context(cafile=ca), timeout=30) as client:
        request = client.build_request("POST", f"{url}/v1/completions", json=body)
        request.extensions["sni_hostname"] = "kvferry"
        lines = [line for line in client.send(request).text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    with httpx.Client(timeout=5) as client, pytest.raises(httpx.TransportError):
        client.get(url.replace("https", "http") + "/v1/models")


def test_who_speaks_in_the_clear_is_not_served(secure):
    _, info = secure
    with Client(info["router"]["address"]) as client, pytest.raises(KvferryError) as refused:
        client.generate("a", max_tokens=1, timeout=5).result()
    assert refused.value.code is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("name", ["router", "prefill", "decode"])
def test_probes_find_their_port(secure, name):
    _, info = secure
    with grpc.insecure_channel(f"127.0.0.1:{info[name]['health_port']}") as channel:
        reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_a_folder_without_files_is_named_at_the_start(tmp_path, tiny_model):
    done = subprocess.run(
        [sys.executable, "-m", "kvferry", "router", "--model", tiny_model("llama"), "--tls-folder", tmp_path],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert "kvferry: error: --tls-folder" in done.stderr
