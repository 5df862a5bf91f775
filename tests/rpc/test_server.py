"""The server that every process has."""

from __future__ import annotations

import asyncio
import time

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rpc.server import RpcServer


async def test_somebody_who_watches_health_is_told_and_does_not_hold_up_the_end():
    server = RpcServer("127.0.0.1", 0, ["some.Service"])
    await server.start()
    await server.set_ready(True)
    async with grpc.aio.insecure_channel(server.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="some.Service"))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        started = time.monotonic()
        stopping = asyncio.create_task(server.stop(20.0))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await stopping
        assert time.monotonic() - started < 5
