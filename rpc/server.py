"""A gRPC server with standard health and reflection."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence as Seq

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from rpc.addresses import bare_host, join_address
from rpc.channel import SERVER_OPTIONS
from rpc.config import ProcessConfig
from rpc.tls import TlsFiles

LIVE_SERVICE = "live"
"""Health of the process itself: SERVING while the process responds, even if it takes no work. For liveness probes."""
LAST_STATUS_SECONDS = 0.1
"""Time for health watchers to receive the last status before the server stops."""


class PortInUse(Exception):
    """A port can't be bound."""


class _Health(health.aio.HealthServicer):  # type: ignore[misc]  # the package has no types
    """The standard health service, but open Watch calls do not delay the server's shutdown."""

    def __init__(self) -> None:
        super().__init__()
        self._stopping = asyncio.Event()

    async def Watch(
        self,
        request: health_pb2.HealthCheckRequest,
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]
    ) -> None:
        """The standard Watch, until the server stops."""
        watching = asyncio.ensure_future(super().Watch(request, context))
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({watching, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not watching.done():
                await asyncio.sleep(LAST_STATUS_SECONDS)
        finally:
            for task in (watching, stopping):
                task.cancel()
            await asyncio.gather(watching, stopping, return_exceptions=True)

    def end(self) -> None:
        """Ends open Watch calls. Their watchers were sent NOT_SERVING before."""
        self._stopping.set()


class RpcServer:
    """A gRPC server whose health is NOT_SERVING until `set_ready`."""

    def __init__(
        self,
        host: str,
        port: int,
        service_names: Seq[str],
        tls: TlsFiles | None = None,
        verify_clients: bool = True,
        health_port: int | None = None,
    ) -> None:
        """service_names: full names, for health and reflection.

        verify_clients: with TLS, only clients with a certificate of our CA may call. health_port: a second port that
        serves only health checks, without TLS; None: none.
        Raises PortInUse, and ConfigError if TLS files can't be read.
        """
        self.server = grpc.aio.server(options=SERVER_OPTIONS)
        self._health = _Health()
        self._service_names = ["", *service_names]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        reflection.enable_server_reflection([*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME], self.server)
        self._host = host
        credentials = tls.server_credentials(verify_clients) if tls is not None else None
        self.port = _listen(self.server, "--port", host, port, credentials)
        self.health_port: int | None = None
        self._health_server: grpc.aio.Server | None = None
        if health_port is not None:
            self._health_server = grpc.aio.server(options=SERVER_OPTIONS)
            health_pb2_grpc.add_HealthServicer_to_server(self._health, self._health_server)
            self.health_port = _listen(self._health_server, "--health-port", host, health_port, None)

    @property
    def address(self) -> str:
        """host:port of this server."""
        return join_address(self._host, self.port)

    async def start(self) -> None:
        """Starts serving. The server is not ready yet."""
        await self.set_ready(False)
        await self._health.set(LIVE_SERVICE, health_pb2.HealthCheckResponse.SERVING)
        await self.server.start()
        if self._health_server is not None:
            await self._health_server.start()

    async def set_ready(self, ready: bool) -> None:
        """Sets the health of all services except LIVE_SERVICE."""
        serving = health_pb2.HealthCheckResponse
        for name in self._service_names:
            await self._health.set(name, serving.SERVING if ready else serving.NOT_SERVING)

    async def stop(self, grace: float) -> None:
        """Rejects new calls, waits up to `grace` seconds for running calls, then cancels them."""
        await self._health.enter_graceful_shutdown()
        self._health.end()
        await self.server.stop(grace)
        if self._health_server is not None:
            await self._health_server.stop(0)


def try_ports(config: ProcessConfig) -> None:
    """Checks that a process can bind its ports, before its slow start. Raises PortInUse."""
    for flag, port in (
        ("--port", config.port),
        ("--metrics-port", config.metrics_port),
        ("--health-port", config.health_port or 0),
    ):
        try_port(flag, config.host, port)


def try_port(flag: str, host: str, port: int) -> None:
    """Raises PortInUse if a port can't be bound now."""
    bare = bare_host(host)
    with socket.socket(socket.AF_INET6 if ":" in bare else socket.AF_INET) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((bare, port))
        except OSError as error:
            raise PortInUse(f"{flag} {port} on {host} can't be listened on: {error.strerror or error}") from error


def _listen(
    server: grpc.aio.Server, flag: str, host: str, port: int, credentials: grpc.ServerCredentials | None
) -> int:
    """Binds a server to a port. Returns the port. Raises PortInUse."""
    address = join_address(host, port)
    try:
        found = (
            server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials)
        )
    except RuntimeError as error:
        raise PortInUse(f"{flag} {port} on {host} can't be listened on (in use?): {error}") from error
    if found == 0:
        raise PortInUse(f"{flag} {port} on {host} can't be listened on; is it in use?")
    return found
