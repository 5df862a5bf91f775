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
"""Of a request, its first line included: 32 KiB of headers and a long URL fit."""
LOOK_SECONDS = 0.5
"""How often a client that sends no more is asked for a sign of life."""
STILL_WORKING = b"HTTP/1.1 102 Processing\r\n\r\n"
"""An answer before the answer, which clients pass over (RFC 9110, section 15.2)."""


class _Protocol(H11Protocol):
    """A client that has closed only its sending side still gets its answer.

    TCP does not tell such a client from one that is gone. Writing does: who is gone resets the connection. Before the
    answer begins, interim responses are written for that; after that the answer itself is what is written.
    """

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio's own protocol may return it
        """Nothing more is sent by the client. Returns whether the connection stays open."""
        # One whose request is not complete is no client that waits for its answer.
        is_over = self.cycle is None or self.cycle.response_complete or self.cycle.more_body
        if is_over or self.conn.their_http_version != b"1.1" or self.transport.get_extra_info("ssl_object"):
            return False
        self.loop.create_task(self._until_answered())
        return True

    async def _until_answered(self) -> None:
        while not self.transport.is_closing():
            if self.cycle.response_complete:
                self.transport.close()
                return
            if not self.cycle.response_started:
                self.transport.write(STILL_WORKING)
            await asyncio.sleep(LOOK_SECONDS)


class HttpServer:
    """Runs the app on the current event loop."""

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

        drain_seconds: for what runs when it is stopped. keepalive_seconds: how long a connection without a request
        stays open.
        """
        host = bare_host(host)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # With the protocol named: only then asyncio sets TCP_NODELAY, without which tokens wait 40 ms for each other.
        self._socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise PortInUse(f"--http-port is {port}, which can't be used on {host}: {error}") from error
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
        """Begins to serve."""
        self._task = asyncio.get_running_loop().create_task(self._server.serve(sockets=[self._socket]))

    @property
    def scheme(self) -> str:
        """http or https."""
        return "http" if self._tls is None else "https"

    def renew_certificate(self) -> None:
        """Takes up files that changed."""
        if self._tls is not None:
            self._tls.renew()

    async def stop(self) -> None:
        """Takes nothing new, lets what runs end in its time, and ends."""
        self._server.should_exit = True
        if self._task is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._task


class _Server(uvicorn.Server):
    """Leaves signals to the process, which has other things to end too."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield
