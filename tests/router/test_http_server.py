"""The HTTP front's socket, and its TLS."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from router.config import RouterConfig
from router.http_server import HttpServer
from rpc.config import ConfigError
from rpc.tls import TlsFiles
from tests.rpc.certificates import Authority, run


async def test_tokens_do_not_wait_for_each_other_in_the_network():
    """Without TCP_NODELAY, a small event waits up to 40 ms until the one before it is acknowledged."""
    server = HttpServer(Starlette(), "127.0.0.1", 0)
    accepted = asyncio.get_running_loop().create_future()

    class Accept(asyncio.Protocol):
        def connection_made(self, transport):
            sock = transport.get_extra_info("socket")
            accepted.set_result(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            transport.close()

    listener = await asyncio.get_running_loop().create_server(Accept, sock=server._socket)
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    assert await asyncio.wait_for(accepted, 5)
    writer.close()
    listener.close()


@pytest.fixture(scope="module")
def ca(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("tls") / "ca")


@pytest.fixture
def files(ca, tmp_path):
    return TlsFiles(ca.issue(tmp_path / "router"))


@contextlib.asynccontextmanager
async def serving(files, verify_clients=False):
    app = Starlette(routes=[Route("/scheme", lambda request: PlainTextResponse(request.url.scheme))])
    server = HttpServer(app, "127.0.0.1", 0, tls=files.https(verify_clients))
    server.start()
    while not server._server.started:
        await asyncio.sleep(0.005)
    try:
        yield server
    finally:
        await server.stop()


def client(ca, certificate=None):
    """One that trusts the CA, with a certificate if it has one."""
    context = ssl.create_default_context(cafile=ca.folder / "ca.crt")
    if certificate is not None:
        context.load_cert_chain(certificate / "tls.crt", certificate / "tls.key")
    return httpx.AsyncClient(verify=context, timeout=5)


async def ask(client, server, scheme="https"):
    async with client:
        request = client.build_request("GET", f"{scheme}://127.0.0.1:{server.port}/scheme")
        request.extensions["sni_hostname"] = "kvferry"
        return (await client.send(request)).text


async def test_http_over_tls(ca, files):
    async with serving(files) as server:
        assert server.scheme == "https"
        assert await ask(client(ca), server) == "https"
        with pytest.raises(httpx.TransportError):
            await ask(client(ca), server, "http")
        with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
            await ask(httpx.AsyncClient(timeout=5), server)


async def test_http_clients_may_have_to_show_who_they_are(ca, files, tmp_path):
    async with serving(files, verify_clients=True) as server:
        assert await ask(client(ca, ca.issue(tmp_path / "client")), server) == "https"
        with pytest.raises(httpx.TransportError):
            await ask(client(ca), server)
        stranger = Authority(tmp_path / "other").issue(tmp_path / "stranger")
        with pytest.raises(httpx.TransportError):
            await ask(client(ca, stranger), server)


def shown_certificate(ca, server):
    context = ssl.create_default_context(cafile=ca.folder / "ca.crt")
    with (
        socket.create_connection(("127.0.0.1", server.port), 5) as plain,
        context.wrap_socket(plain, server_hostname="kvferry") as connection,
    ):
        return connection.getpeercert()["serialNumber"]


async def test_a_renewed_certificate_is_shown_without_a_restart(ca, files, caplog):
    async with serving(files) as server:
        first = await asyncio.to_thread(shown_certificate, ca, server)
        ca.issue(files.folder)
        assert await asyncio.to_thread(shown_certificate, ca, server) == first
        server.renew_certificate()
        renewed = await asyncio.to_thread(shown_certificate, ca, server)
        assert renewed != first
        (files.folder / "tls.crt").write_text("half written")
        server.renew_certificate()
        assert await asyncio.to_thread(shown_certificate, ca, server) == renewed
        other = ca.issue(files.folder.parent / "other")
        (other / "tls.crt").replace(files.folder / "tls.crt")  # a good one, whose key is not there yet
        server.renew_certificate()
        server.renew_certificate()
        assert await asyncio.to_thread(shown_certificate, ca, server) == renewed
        assert caplog.text.count("renewed TLS files can't be used") == 2, "once for each change"
        ca.issue(files.folder)
        server.renew_certificate()
        assert await asyncio.to_thread(shown_certificate, ca, server) not in (first, renewed)


async def test_a_ca_that_was_replaced_is_not_trusted_any_more(ca, files, tmp_path):
    """Clients who ask for no name, too."""
    new_ca = Authority(tmp_path / "new-ca")
    old_client, new_client = ca.issue(tmp_path / "old"), new_ca.issue(tmp_path / "new")
    async with serving(files, verify_clients=True) as server:
        assert await ask(client(ca, old_client), server) == "https"
        with pytest.raises(httpx.TransportError):
            await ask(client(ca, new_client), server)
        new_ca.issue(files.folder)
        server.renew_certificate()
        assert await ask(client(new_ca, new_client), server) == "https"
        with pytest.raises(httpx.TransportError):
            await ask(client(new_ca, old_client), server)
        nameless = ssl.create_default_context(cafile=new_ca.folder / "ca.crt")
        nameless.check_hostname = False
        async with httpx.AsyncClient(verify=nameless, timeout=5) as stranger:
            with pytest.raises(httpx.TransportError):
                await stranger.get(f"https://127.0.0.1:{server.port}/scheme")
        nameless.load_cert_chain(new_client / "tls.crt", new_client / "tls.key")
        async with httpx.AsyncClient(verify=nameless, timeout=5) as known:
            assert (await known.get(f"https://127.0.0.1:{server.port}/scheme")).text == "https"


def test_a_certificate_that_does_not_fit_its_key_is_named(ca, files, tmp_path):
    other = ca.issue(tmp_path / "other")
    (other / "tls.key").replace(files.folder / "tls.key")
    with pytest.raises(ConfigError, match=r"--tls-folder .*can't be used together"):
        files.https(False)
    with pytest.raises(ConfigError, match=r"--tls-folder .*can't be used together"):
        files.server_credentials(False)


def test_an_encrypted_key_is_named_and_nobody_is_asked_for_its_password(files):
    key = files.folder / "tls.key"
    run("ec", "-in", key, "-aes128", "-passout", "pass:secret", "-out", "encrypted.key", folder=files.folder)
    (files.folder / "encrypted.key").replace(key)
    with pytest.raises(ConfigError, match="not encrypted"):
        files.server_credentials(False)


def test_connections_stay_open_longer_than_proxies_keep_them():
    """Often 60 s; else the proxy sends requests into connections that are closing."""
    server = HttpServer(Starlette(), "127.0.0.1", 0, keepalive_seconds=RouterConfig(model="m").http_keepalive_seconds)
    assert server._server.config.timeout_keep_alive > 60
    server._socket.close()


async def test_a_client_that_closes_before_its_request_is_complete_is_gone():
    """It waits for no answer, and none would ever come."""

    async def echo(request):
        return PlainTextResponse(await request.body())

    server = HttpServer(Starlette(routes=[Route("/echo", echo, methods=["POST"])]), "127.0.0.1", 0)
    server.start()
    while not server._server.started:
        await asyncio.sleep(0.005)
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nx")
        await asyncio.sleep(0.05)
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()
    finally:
        await server.stop()
