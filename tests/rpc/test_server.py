"""The server that every process has."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvferry.client import AsyncClient
from protos import inference_pb2, inference_pb2_grpc
from rpc.server import LIVE_SERVICE, PortInUse, RpcServer


class Answers(inference_pb2_grpc.InferenceServiceServicer):
    """Two messages to everybody."""

    async def Generate(self, request, context):
        for reason in (0, inference_pb2.FINISH_REASON_LENGTH):
            yield inference_pb2.GenerateResponse(text="x", finish_reason=reason)
            await asyncio.sleep(0.002)


async def start(port=0):
    for _ in range(500):
        try:
            server = RpcServer("127.0.0.1", port, ["kvferry.v1.InferenceService"])
            break
        except PortInUse:
            await asyncio.sleep(0.01)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(Answers(), server.server)
    await server.start()
    return server


async def test_calls_in_the_moment_of_a_restart_are_made_again():
    """A server that ends cancels calls that it had accepted and not begun; without a retry tens of them are lost."""
    server = await start()
    stop, answered = asyncio.Event(), []

    async def keep_asking(client):
        while not stop.is_set():
            result = await client.generate("x", wait_for_ready=True, timeout=30).result()
            answered.append(result.text)

    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(AsyncClient(server.address)) for _ in range(4)]
        asking = [asyncio.create_task(keep_asking(client)) for client in clients for _ in range(16)]
        for _ in range(3):
            await asyncio.sleep(0.3)
            await server.stop(5)
            server = await start(server.port)
        await asyncio.sleep(0.3)
        stop.set()
        await asyncio.gather(*asking)
    await server.stop(1)
    assert set(answered) == {"xx"}


async def test_a_process_that_takes_no_work_is_alive():
    server = await start()
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        serving = health_pb2.HealthCheckResponse
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == serving.NOT_SERVING
        assert (await stub.Check(health_pb2.HealthCheckRequest(service=LIVE_SERVICE))).status == serving.SERVING
    await server.stop(1)


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
