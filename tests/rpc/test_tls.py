"""TLS of our servers and channels: who may connect, and what a renewal does."""

import contextlib
import ssl

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvferry.client import ClientTls
from rpc.channel import open_channel
from rpc.config import ConfigError, ProcessConfig
from rpc.server import RpcServer
from rpc.tls import TlsFiles, tls_files
from tests.rpc.certificates import Authority


@pytest.fixture(scope="module")
def ca(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("tls") / "ca")


@pytest.fixture
def ours(ca, tmp_path):
    return TlsFiles(ca.issue(tmp_path / "ours"))


@contextlib.asynccontextmanager
async def serving(tls, **options):
    server = RpcServer("127.0.0.1", 0, [], tls, **options)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0)


async def ask(channel):
    async with channel:
        reply = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service="live"), timeout=3
        )
    return reply.status == health_pb2.HealthCheckResponse.SERVING


async def is_refused(channel):
    try:
        await ask(channel)
    except grpc.aio.AioRpcError as error:
        return error.code() is grpc.StatusCode.UNAVAILABLE
    return False


async def test_processes_of_ours_reach_each_other_by_any_address(ours):
    async with serving(ours) as server:
        assert await ask(open_channel(server.address, ours))


async def test_nobody_else_gets_in(ours, tmp_path):
    other = TlsFiles(Authority(tmp_path / "other-ca").issue(tmp_path / "other"))
    async with serving(ours) as server:
        assert await is_refused(open_channel(server.address))  # in the clear
        assert await is_refused(open_channel(server.address, other))  # of another CA
        without = grpc.ssl_channel_credentials((ours.folder / "ca.crt").read_bytes())
        options = [("grpc.ssl_target_name_override", "kvferry")]
        assert await is_refused(grpc.aio.secure_channel(server.address, without, options))  # no certificate


async def test_a_server_whose_certificate_is_for_another_name_is_not_believed(ca, ours, tmp_path):
    async with serving(TlsFiles(ca.issue(tmp_path / "named", "somebody"))) as server:
        assert await is_refused(open_channel(server.address, ours))


async def test_a_router_may_take_clients_without_certificates(ours):
    async with serving(ours, verify_clients=False) as server:
        tls = ClientTls(ca=ours.folder / "ca.crt", server_name="kvferry")
        assert await ask(grpc.aio.secure_channel(server.address, tls.credentials(), tls.options()))


async def test_a_renewed_certificate_is_used_at_the_next_handshake(ca, ours):
    def shown(server):
        return ssl.get_server_certificate(("127.0.0.1", server.port))

    async with serving(ours, verify_clients=False) as server:
        import asyncio

        first = await asyncio.to_thread(shown, server)
        ca.issue(ours.folder)
        second = await asyncio.to_thread(shown, server)
        assert first != second
        (ours.folder / "tls.crt").write_text("half of a fi")
        assert await asyncio.to_thread(shown, server) == second  # a broken renewal changes nothing


async def test_probes_have_a_port_of_their_own_in_the_clear_with_nothing_else(ours):
    async with serving(ours, health_port=0) as server:
        assert await ask(grpc.aio.insecure_channel(f"127.0.0.1:{server.health_port}"))
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.health_port}") as channel:
            call = channel.unary_unary("/kvferry.v1.AdminService/GetClusterStatus")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(b"", timeout=3)
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_what_is_missing_is_named(tmp_path):
    assert tls_files(ProcessConfig()) is None
    files = tls_files(ProcessConfig(tls_folder=tmp_path))
    with pytest.raises(ConfigError, match=r"--tls-folder .*No such file.*tls.crt"):
        files.read()
    for name in ("tls.crt", "tls.key", "ca.crt"):
        (tmp_path / name).write_text("nonsense")
    with pytest.raises(ConfigError, match=r"tls.crt is not a PEM file"):
        files.server_credentials(True)
