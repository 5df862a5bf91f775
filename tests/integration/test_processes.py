"""Processes: what users type wrong is told in one line, nothing is left behind, workers may die."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys

import httpx
import psutil
import pytest

from kvferry.client import Client, KvferryError
from router.config import RouterConfig
from rpc.config import ProcessConfig
from tests.integration.support import running_cluster, wait_for
from tests.tiny_models import set_config_value

LOCAL = ProcessConfig(port=0)

KVFERRY = [sys.executable, "-m", "kvferry"]


def run(*arguments, **options):
    return subprocess.run([*KVFERRY, *arguments], capture_output=True, text=True, timeout=120, **options)


def gone(pids):
    return all(not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE for pid in pids)


@pytest.fixture
def up(tiny_model, tmp_path):
    """`kvferry up` as a user types it; gives the process and the ready file's content."""
    ready = tmp_path / "ready.json"
    command = [*KVFERRY, "up", "--model", str(tiny_model("llama")), "--port", "0", "--ready-file", str(ready)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: ready.exists() or process.poll() is not None)
    assert process.poll() is None, process.stderr.read()
    content = json.loads(ready.read_text())
    yield process, content
    process.kill()
    process.wait()
    wait_for(lambda: gone(all_pids(content)), 20)


def all_pids(content):
    return [content["router"]["pid"], *(w["pid"] for tier in ("prefill", "decode") for w in content[tier])]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_up_ends_everything_on_a_signal(up, signum):
    process, content = up
    assert content["pid"] == process.pid
    with Client(content["address"]) as client:
        assert client.generate("hello", max_tokens=3).result().usage.completion_tokens <= 3
    process.send_signal(signum)
    _, log = process.communicate(timeout=30)
    assert process.returncode == 0, log
    assert log.splitlines()[0].startswith("kvferry: starting a router and 1 prefill and 1 decode worker(s)")
    assert log.splitlines()[-1].endswith("Ctrl-C stops the cluster"), "an ordinary life is quiet to its end"
    assert len(log.splitlines()) == 2
    assert gone(all_pids(content))


def test_no_orphan_survives_even_a_killed_parent(up):
    process, content = up
    os.kill(process.pid, signal.SIGKILL)
    wait_for(lambda: gone(all_pids(content)), 20)


def test_up_starts_a_dead_worker_again_and_ends_with_its_router(up):
    process, content = up
    with Client(content["address"]) as client:
        expected = client.generate("hello", max_tokens=200, temperature=0.0, ignore_eos=True).result().text
        running = client.generate("hello", max_tokens=200, temperature=0.0, ignore_eos=True)
        pieces = iter(running)
        next(pieces)
        os.kill(content["decode"][0]["pid"], signal.SIGKILL)
        for _ in pieces:
            pass
        assert running.result().text == expected
    os.kill(content["router"]["pid"], signal.SIGKILL)
    _, log = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "decode-0 ended with code -9; restarting the worker" in log
    assert "error: router ended with code -9" in log.splitlines()[-1]


def test_a_port_in_use_is_named(tiny_model):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run("up", "--model", str(tiny_model("llama")), "--port", str(port))
        assert done.returncode == 2
        assert f"--port {port} on 127.0.0.1 can't be listened on" in done.stderr.splitlines()[-1]
        assert not any("worker" in line for line in done.stderr.splitlines()[1:]), "workers were started for nothing"
        done = run("decode", "--model", str(tiny_model("llama")), "--metrics-port", str(port))
        assert done.returncode == 2
        assert f"--metrics-port {port}" in done.stderr.splitlines()[-1]
        assert "model loaded" not in done.stderr


@pytest.mark.parametrize("command", ["up", "prefill", "decode", "router"])
def test_a_missing_model_is_named(command):
    done = run(command, "--model", "/no/such/model")
    assert done.returncode == 2
    assert "--model /no/such/model: there is no such folder or GGUF file" in done.stderr.splitlines()[-1]


def test_a_model_that_can_not_be_run_is_named_by_up(tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    set_config_value(folder, "model_type", "no_such_kind")
    done = run("up", "--model", str(folder), "--port", "0")
    assert done.returncode == 2
    assert "its config.json can't be read" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["up", "--prefill", "0"], "--prefill is 0"),
        (["up", "--page-size", "0"], "--page-size is 0"),
        (["up", "--token-budget", "-5"], "--token-budget is -5"),
        (["up", "--port", "70000"], "--port is 70000"),
        (["prefill", "--model", "x", "--token-budget", "0"], "--token-budget is 0"),
        (["decode", "--model", "x", "--num-pages", "0"], "--num-pages is 0"),
        (["decode", "--model", "x", "--cpus", "a-b"], "--cpus is 'a-b'"),
        (["router", "--model", "x", "--prefill", "nowhere"], "must look like host:port"),
        (["up", "--dtype", "int3"], "int3"),
        (["up", "--no-such-flag"], "--no-such-flag"),
    ],
)
def test_bad_flags_are_refused_before_anything_starts(arguments, words):
    done = run(*arguments, env=os.environ | {"COLUMNS": "200"})
    assert done.returncode == 2
    assert words in done.stderr + done.stdout


def test_pages_that_do_not_fit_memory_are_refused(tiny_model):
    done = run("decode", "--model", str(tiny_model("llama")), "--num-pages", "999999999")
    assert done.returncode == 2
    assert "--num-pages is 999999999, which takes" in done.stderr.splitlines()[-1]


def test_a_broken_transport_never_becomes_ready(tiny_model, tmp_path):
    """Casebook C109."""
    ready = tmp_path / "ready.json"
    env = os.environ | {"UCX_TLS": "nonsense"}
    done = run("decode", "--model", str(tiny_model("llama")), "--ready-file", str(ready), env=env)
    assert done.returncode == 2
    assert "NIXL with UCX can't start" in done.stderr.splitlines()[-1]
    assert not ready.exists()


def test_commands_without_a_router_say_so():
    for arguments in (["generate", "hi"], ["status"]):
        done = run(*arguments, "--address", "127.0.0.1:1")
        assert done.returncode == 1
        assert "UNAVAILABLE" in done.stderr


class TestTwoByTwo:
    """Two workers of each tier; they may die and come back."""

    @pytest.fixture(scope="class")
    def cluster(self, tiny_model, tmp_path_factory):
        with running_cluster(
            tmp_path_factory.mktemp("logs"),
            model=str(tiny_model("llama")),
            prefill=2,
            decode=2,
            token_budget=32,
            num_pages=200,
        ) as cluster:
            yield cluster

    def test_the_command_line_serves(self, cluster):
        done = run("generate", "hello there", "--address", cluster.address, "--json", "--max-tokens", "4")
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        assert answer["usage"]["completion_tokens"] == len(answer["token_ids"]) <= 4
        assert answer["kv_transfer"]["bytes"] > 0
        assert answer["timings_ms"]["finished"] > 0
        streamed = run("generate", "-", "--address", cluster.address, "--max-tokens", "4", input="hello there")
        assert streamed.stdout.rstrip("\n") == answer["text"].rstrip("\n")
        status = run("status", "--address", cluster.address)
        assert "4 ready pairs" in status.stdout
        [of_decode] = [line for line in status.stdout.splitlines() if line.startswith("decode-1")]
        assert {"decode", cluster.cluster.find("decode-1").address, "ready"} <= set(of_decode.split())
        assert max(map(len, status.stdout.splitlines())) <= 110

    def test_a_prompt_from_a_pipe_is_the_prompt_that_was_typed(self, cluster):
        typed = run("generate", "--address", cluster.address, "--max-tokens", "6", "caf\xe9")
        piped = run("generate", "--address", cluster.address, "--max-tokens", "6", input="caf\xe9\n")
        assert typed.returncode == piped.returncode == 0
        assert typed.stdout == piped.stdout

    def test_a_chat_answers_each_line_of_a_pipe(self, cluster):
        done = run("chat", "--address", cluster.address, "--max-tokens", "5", input="one\n\ntwo\n")
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("model> ") == 2

    def test_all_pairs_work(self, cluster):
        expected = cluster.greedy([5, 6, 7] * 20, 8).token_ids
        streams = [
            cluster.client.generate([5, 6, 7] * 20, max_tokens=8, temperature=0, ignore_eos=True, return_token_ids=True)
            for _ in range(24)
        ]
        assert {stream.result().token_ids for stream in streams} == {expected}
        for worker in ("prefill-0", "prefill-1"):
            assert cluster.metrics(worker)["kvferry_kv_bytes_total"] > 0

    @pytest.mark.slow
    @pytest.mark.parametrize("tier", ["decode", "prefill"])
    def test_a_killed_worker_costs_no_request_and_no_token(self, cluster, tier):
        """Promise 3, in its simplest form: streams go on elsewhere from the next token."""
        # Long prompts where prefill is to be hit, short ones with long answers where decode is.
        prompts = [[9, 8, i + 10] * (4 if tier == "decode" else 34) for i in range(8)]
        expected = [cluster.greedy(p, 400).token_ids for p in prompts]
        cluster.client.flush_prefix_cache()
        retries = f"kvferry_request_retries_total,{tier}_lost"
        retried = cluster.metrics("router").get(retries, 0)
        streams = [
            cluster.client.generate(p, max_tokens=400, temperature=0.0, ignore_eos=True, return_token_ids=True)
            for p in prompts
        ]
        iterators = [iter(stream) for stream in streams]
        if tier == "decode":
            for iterator in iterators:
                next(iterator)
        os.kill(cluster.cluster.find(f"{tier}-0").pid, signal.SIGKILL)
        results = []
        for stream, iterator in zip(streams, iterators, strict=True):
            for _ in iterator:
                pass
            results.append(stream.result().token_ids)
        assert results == expected
        assert cluster.metrics("router")[retries] > retried, "nothing ran on the killed worker"
        cluster.settle(10)
        self.bring_back(cluster, tier)

    def bring_back(self, cluster, tier):
        """Starts the dead worker again at its address, with a new incarnation."""
        cluster.cluster.restart_worker(cluster.cluster.find(f"{tier}-0"))
        wait_for(lambda: cluster.client.cluster_status().ready_pairs == 4)

    def test_a_worker_that_came_back_is_used_again(self, cluster):
        """Casebook C150."""
        before = cluster.metrics("prefill-0")["kvferry_kv_bytes_total"]
        streams = [cluster.client.generate([7 + i] * 90, max_tokens=3, ignore_eos=True) for i in range(16)]
        for stream in streams:
            stream.result()
        assert cluster.metrics("prefill-0")["kvferry_kv_bytes_total"] > before

    def test_a_router_without_workers_says_what_is_missing(self, cluster, tiny_model, tmp_path):
        config = RouterConfig(str(tiny_model("llama")), prefill=("127.0.0.1:1",), process=LOCAL, http_port=0)
        process = cluster.cluster.start_process("lonely", "router", config)
        wait_for(lambda: any("router listens" in line for line in process.recent))
        address = next(line for line in process.recent if "router listens" in line).split("address=")[1].split()[0]
        with Client(address) as client, pytest.raises(KvferryError, match="no decode worker") as caught:
            client.generate("hi").result()
        assert caught.value.code.name == "UNAVAILABLE"
        process.popen.terminate()
        assert process.popen.wait(20) == 0
        cluster.cluster.processes.remove(process)

    def test_different_page_sizes_are_refused_with_both_values(self, cluster, tiny_model):
        """Casebook C090."""
        workers = cluster.cluster
        other = workers.start_worker("decode", 9, "--page-size", "8")
        workers.wait_ready(other)
        prefill = workers.find("prefill-0").address
        model = str(tiny_model("llama"))
        config = RouterConfig(model, prefill=(prefill,), decode=(other.address,), process=LOCAL, http_port=0)
        router = workers.start_process("strict", "router", config)
        wait_for(lambda: any("pair refused" in line for line in router.recent))
        assert any("page_size (prefill 16, decode 8)" in line for line in router.recent)
        for process in (router, other):
            process.popen.terminate()
            assert process.popen.wait(20) == 0
            workers.processes.remove(process)


@pytest.mark.slow
def test_a_cluster_over_ipv6(tiny_model, tmp_path):
    """Each process by itself, with addresses in brackets and, as Kubernetes writes a pod's own, without."""
    model = ["--model", str(tiny_model("llama")), "--host", "::1"]
    started = []

    def start(name, *arguments):
        ready = tmp_path / f"{name}.json"
        log = (tmp_path / f"{name}.log").open("w")
        started.append(subprocess.Popen([*KVFERRY, *arguments, "--ready-file", str(ready)], stdout=log, stderr=log))
        wait_for(ready.exists, 60, f"{name} that is ready")
        return json.loads(ready.read_text())

    with socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        port = probe.getsockname()[1]
    try:
        workers = ["--num-pages", "50", "--dtype", "float32"]
        prefill = start(
            "prefill", "prefill", *model, *workers, "--port", str(port), "--advertise-address", f"::1:{port}"
        )
        decode = start("decode", "decode", *model, *workers)
        assert prefill["address"] == f"[::1]:{port}"
        unbracketed = decode["address"].replace("[", "").replace("]", "")
        router = start("router", "router", *model, "--prefill", prefill["address"], "--decode", unbracketed)
        with Client(router["address"]) as client:
            result = client.generate([5, 6, 7], max_tokens=4, ignore_eos=True, timeout=60).result()
        assert result.usage.completion_tokens == 4
        assert result.kv_transfer.bytes > 0
        assert httpx.get(f"{router['http']}/readyz").status_code == 200
        assert httpx.get(router["metrics"]).status_code == 200
    finally:
        for process in reversed(started):
            process.terminate()
        codes = [process.wait(30) for process in started]
    assert codes == [0, 0, 0]


@pytest.mark.slow
def test_a_writer_that_is_not_at_its_address_is_never_paired(tiny_model, tmp_path):
    """It would be paired, and after its death its pages at decode would never be given back."""
    with socket.socket() as elsewhere:
        elsewhere.bind(("127.0.0.1", 0))
        wrong = f"127.0.0.1:{elsewhere.getsockname()[1]}"
    flags = ["--model", str(tiny_model("llama")), "--num-pages", "50", "--dtype", "float32"]
    started = []
    try:
        addresses = {}
        for name, more in (("prefill", ["--advertise-address", wrong]), ("decode", [])):
            ready = tmp_path / f"{name}.json"
            log = (tmp_path / f"{name}.log").open("w")
            command = [*KVFERRY, name, *flags, *more, "--ready-file", str(ready)]
            started.append(subprocess.Popen(command, stdout=log, stderr=log))
            wait_for(ready.exists, 60, f"{name} that is ready")
            addresses[name] = json.loads(ready.read_text())["address"]
        router_log = (tmp_path / "router.log").open("w")
        command = [*KVFERRY, "router", "--model", str(tiny_model("llama")), "--http-port", "0"]
        command += ["--prefill", addresses["prefill"], "--decode", addresses["decode"]]
        started.append(subprocess.Popen(command, stdout=router_log, stderr=router_log))
        said = tmp_path / "router.log"
        wait_for(lambda: f"advertises {wrong}, where it does not respond" in said.read_text(), 60, "a pair refused")
        assert "pair ready" not in said.read_text()
    finally:
        for process in reversed(started):
            process.terminate()
        assert [process.wait(30) for process in started] == [0, 0, 0]
