"""Serves an HTTP app on the router's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from rpc.addresses import bare_host
from rpc.server import PortInUse
from rpc.tls import HttpsContext

LONGEST_HEADERS_BYTES = 64 * 1024
"""Limit of a request's headers, with the request line: fits 32 KiB of headers and a long URL."""
CHECK_SECONDS = 0.5
"""Time between checks whether a client with a closed sending side still receives."""
STILL_WORKING = b"HTTP/1.1 102 Processing\r\n\r\n"
"""An interim response, which clients ignore (RFC 9110, section 15.2)."""


class _Protocol(H11Protocol):
    """HTTP/1.1 for clients that close only their sending side: they still get the response.

    TCP does not distinguish such a client from one that has disconnected. A write does: if the client has disconnected,
    the connection is reset. So interim responses are written until the response begins.
    """

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio's own protocol may return it
        """The client has closed its sending side. Returns whether the connection stays open."""
        # If the request is incomplete, the client does not wait for a response.
        is_over = self.cycle is None or self.cycle.response_complete or self.cycle.more_body
        if is_over or self.conn.their_http_version != b"1.1" or self.transport.get_extra_info("ssl_object"):
            return False
        self.loop.create_task(self._until_response())
        return True

    async def _until_response(self) -> None:
        while not self.transport.is_closing():
            if self.cycle.response_complete:
                self.transport.close()
                return
            if not self.cycle.response_started:
                self.transport.write(STILL_WORKING)
            await asyncio.sleep(CHECK_SECONDS)


class HttpServer:
    """Serves an app on the current event loop."""

    def __init__(
        self,
        app: Starlette,
        host: str,
        port: int,
        drain_seconds: float = 2.0,
        tls: HttpsContext | None = None,
        keepalive_seconds: float = 75.0,
    ) -> None:
        """Binds the port; 0 picks a free one. Raises PortInUse.

        drain_seconds: time for running requests after `stop`. keepalive_seconds: how long an idle connection stays
        open.
        """
        host = bare_host(host)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # IPPROTO_TCP is necessary: only then asyncio sets TCP_NODELAY. Without it, tokens are delayed by up to 40 ms.
        self._socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise PortInUse(f"--http-port {port} on {host} can't be listened on: {error}") from error
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            app,
            http=_Protocol,
            h11_max_incomplete_event_size=LONGEST_HEADERS_BYTES,
            timeout_keep_alive=math.ceil(keepalive_seconds),
            log_config=None,
            lifespan="off",
            access_log=False,
            timeout_graceful_shutdown=max(1, round(drain_seconds)),
        )
        self._tls = tls
        if tls is not None:
            config.load()
            config.ssl = tls.context
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts serving."""
        self._task = asyncio.get_running_loop().create_task(self._server.serve(sockets=[self._socket]))

    @property
    def scheme(self) -> str:
        """Scheme of URLs: http or https."""
        return "http" if self._tls is None else "https"

    def renew_certificate(self) -> None:
        """Loads changed TLS files."""
        if self._tls is not None:
            self._tls.renew()

    async def stop(self) -> None:
        """Rejects new requests, waits up to drain_seconds for running requests, then stops."""
        self._server.should_exit = True
        if self._task is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._task


class _Server(uvicorn.Server):
    """Leaves signals to the process, which also has to stop other parts."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures no signals."""
        yield
