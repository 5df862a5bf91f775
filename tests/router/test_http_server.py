"""The HTTP front's socket."""

from __future__ import annotations

import asyncio
import socket

from starlette.applications import Starlette

from router.http_api import HttpServer


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
