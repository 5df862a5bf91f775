"""What the command says when something is wrong: the flag, and the true reason."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys

import pytest

from kvferry.local import ClusterConfig, LocalCluster, StartFailed
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
    assert (done.returncode, f"no router answers at {address}" in done.stderr) == (1, True)


async def test_a_certificate_for_another_name_is_told_as_that(tmp_path):
    ca = Authority(tmp_path / "ca")
    server = RpcServer("127.0.0.1", 0, [], TlsFiles(ca.issue(tmp_path / "router")))
    await server.start()
    try:
        flags = ["--address", server.address, "--tls-ca", str(ca.folder / "ca.crt")]
        done = await asyncio.to_thread(run, "status", *flags)
        assert done.returncode == 1
        assert "no router answers" not in done.stderr
        assert "erification" in done.stderr
        half = await asyncio.to_thread(run, "status", *flags, "--tls-cert", "x")
        assert "--tls-cert and --tls-key belong together" in half.stderr + half.stdout
    finally:
        await server.stop(0)
