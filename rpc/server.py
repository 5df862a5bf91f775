"""A gRPC server with standard health and reflection."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Seq

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from rpc.channel import SERVER_OPTIONS

LIVE_SERVICE = "live"
"""Health of the process itself: SERVING while it answers, whatever work it takes. For liveness probes."""
LAST_STATUS_SECONDS = 0.1
"""For a watcher to be told that a server ends."""


class PortInUse(Exception):
    """The port can't be listened on."""


class _Health(health.aio.HealthServicer):  # type: ignore[misc]  # the package has no types
    """Standard health, whose watchers do not keep a server from ending."""

    def __init__(self) -> None:
        super().__init__()
        self._is_over = asyncio.Event()

    async def Watch(
        self,
        request: health_pb2.HealthCheckRequest,
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]
    ) -> None:
        """As the standard says, until the server ends."""
        watching = asyncio.ensure_future(super().Watch(request, context))
        over = asyncio.ensure_future(self._is_over.wait())
        try:
            await asyncio.wait({watching, over}, return_when=asyncio.FIRST_COMPLETED)
            if not watching.done():
                await asyncio.sleep(LAST_STATUS_SECONDS)
        finally:
            for task in (watching, over):
                task.cancel()
            await asyncio.gather(watching, over, return_exceptions=True)

    def end(self) -> None:
        """Watchers have been told NOT_SERVING; that was all."""
        self._is_over.set()


class RpcServer:
    """A server whose health is NOT_SERVING until it is said to be ready."""

    def __init__(self, host: str, port: int, service_names: Seq[str]) -> None:
        """Raises PortInUse. service_names: full names, for health and reflection."""
        self.server = grpc.aio.server(options=SERVER_OPTIONS)
        self._health = _Health()
        self._service_names = ["", *service_names]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        reflection.enable_server_reflection([*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME], self.server)
        self._host = host
        try:
            self.port = self.server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            raise PortInUse(f"--port {port} on {host} can't be listened on (in use?): {error}") from error
        if self.port == 0:
            raise PortInUse(f"--port {port} on {host} can't be listened on; is it in use?")

    @property
    def address(self) -> str:
        """host:port of this server."""
        return f"{self._host}:{self.port}"

    async def start(self) -> None:
        """Starts serving, not ready yet."""
        await self.set_ready(False)
        await self._health.set(LIVE_SERVICE, health_pb2.HealthCheckResponse.SERVING)
        await self.server.start()

    async def set_ready(self, ready: bool) -> None:
        """Sets the health of all services."""
        serving = health_pb2.HealthCheckResponse
        for name in self._service_names:
            await self._health.set(name, serving.SERVING if ready else serving.NOT_SERVING)

    async def stop(self, grace: float) -> None:
        """Refuses new calls, waits up to `grace` seconds for running ones, then ends them."""
        await self._health.enter_graceful_shutdown()
        self._health.end()
        await self.server.stop(grace)
