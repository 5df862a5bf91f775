"""What the command says when something is wrong: the flag, and the true reason."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading

import pytest

from kvferry.client import make_request
from local_cluster.cluster import LocalCluster
from local_cluster.config import ClusterConfig
from local_cluster.process import StartFailed
from router.config import RouterConfig
from rpc.config import ProcessConfig
from rpc.server import RpcServer
from rpc.tls import TlsFiles
from tests.rpc.certificates import Authority


def run(*arguments):
    return subprocess.run([sys.executable, "-m", "kvferry", *arguments], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("flag", ["log_dir", "ready_file"])
def test_a_folder_that_cannot_be_made_ends_the_start_before_it_begins(flag, tmp_path):
    """A log that nobody could write was a pipe that nobody read, and the cluster stood still."""
    (tmp_path / "file").write_text("")
    config = ClusterConfig(model="there is none", **{flag: tmp_path / "file" / "x" / "y"})
    cluster = LocalCluster(config)
    with pytest.raises(StartFailed, match=f"--{flag.replace('_', '-')}: the folder .* can't be made"):
        cluster.start()
    assert cluster.processes == []


def test_clients_are_not_verified_silently_by_nobody(tmp_path):
    with pytest.raises(ValueError, match="--tls-clients verified needs --tls-folder"):
        RouterConfig(model="m", tls_clients="verified")
    with pytest.raises(ValueError, match="excludes --no-http-tls"):
        RouterConfig(model="m", tls_clients="verified", http_tls=False, process=ProcessConfig(tls_folder=tmp_path))


def test_only_where_nothing_listens_one_is_told_to_start_a_router():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
        done = run("status", "--address", address)
    assert (done.returncode, f"no router listens at {address}" in done.stderr) == (1, True)


async def test_a_certificate_for_another_name_is_told_as_that(tmp_path):
    ca = Authority(tmp_path / "ca")
    server = RpcServer("127.0.0.1", 0, [], TlsFiles(ca.issue(tmp_path / "router")))
    await server.start()
    try:
        flags = ["--address", server.address, "--tls-ca", str(ca.folder / "ca.crt")]
        done = await asyncio.to_thread(run, "status", *flags)
        assert done.returncode == 1
        assert "no router listens" not in done.stderr
        assert "erification" in done.stderr
        half = await asyncio.to_thread(run, "status", *flags, "--tls-cert", "x")
        assert "--tls-cert and --tls-key belong together" in half.stderr + half.stdout
    finally:
        await server.stop(0)


def test_the_version_and_what_it_is_for():
    assert run("--version").stdout.startswith("kvferry 0.")
    shown = run("--help").stdout
    assert "Serves a large language model" in shown
    assert "`kvferry up` starts everything" in shown


def test_flags_stand_in_groups_with_placeholders():
    shown = run("up", "--help").stdout
    for words in ("serving options", "workers options", "scheduling options", "addresses options", "output options"):
        assert words in shown
    for command in ("up", "generate", "router", "decode", "bench"):
        assert "{None}" not in run(command, "--help").stdout


def test_a_url_where_an_address_belongs_gets_a_sentence():
    done = run("generate", "--address", "http://127.0.0.1:8000", "hi")
    assert done.returncode == 2
    assert "it must be host:port of gRPC" in " ".join((done.stderr + done.stdout).replace("\u2502", " ").split())


def test_the_http_port_by_mistake_gets_a_sentence():
    """HTTP's answer to what it does not understand, as gRPC tells it."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        address = f"127.0.0.1:{listening.getsockname()[1]}"

        def answer():
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
                connection.close()

        threading.Thread(target=answer, daemon=True).start()
        done = run("status", "--address", address)
        listening.shutdown(socket.SHUT_RDWR)
    assert f"{address} serves HTTP; give the gRPC port as --address" in done.stderr


def test_the_log_level_is_quiet_unless_it_goes_to_files(tmp_path):
    assert ClusterConfig().process_log_level == "warning"
    assert ClusterConfig(log_dir=tmp_path).process_log_level == "info"
    assert ClusterConfig(log_dir=tmp_path, log_level="error").process_log_level == "error"


def test_what_a_message_has_beyond_its_text_is_not_lost_in_silence():
    request = make_request([{"role": "user", "content": "hi", "name": "Bo"}], seed=-1)
    [message] = request.chat.messages
    assert (message.role, message.content, message.name) == ("user", "hi", "Bo")
    assert request.sampling.seed == 2**64 - 1
    with pytest.raises(TypeError, match="tool_calls is not served"):
        make_request([{"role": "assistant", "content": "x", "tool_calls": []}])
    with pytest.raises(ValueError, match="out of range"):
        make_request("x", seed=-(2**63) - 1)
