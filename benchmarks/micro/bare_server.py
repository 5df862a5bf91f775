"""Upper bound for a router: the public service without a router. Every token is a ready-made message.

For `make bench-router`, as the bound of its gRPC rows: what gRPC itself costs for as many messages.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import tyro

from protos import inference_pb2, inference_pb2_grpc
from rpc.config import ProcessConfig
from rpc.process import install_stop_signals, prepare_process, run_process, write_ready_file
from rpc.server import PortInUse, RpcServer


@dataclass(frozen=True)
class BareConfig:
    """A server that streams ready-made messages."""

    process: ProcessConfig = field(default_factory=ProcessConfig)
    step_ms: float = 0.0
    """Time between two tokens, of all streams at once; 0: as fast as they are read."""


class _Servicer(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self, step_seconds: float) -> None:
        self._step_seconds, self._step = step_seconds, asyncio.Event()

    async def pace(self) -> None:
        """Wakes all streams at every step."""
        while self._step_seconds:
            await asyncio.sleep(self._step_seconds)
            step, self._step = self._step, asyncio.Event()
            step.set()

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        token = inference_pb2.GenerateResponse(request_id=request.request_id, text=" token", token_ids=[300])
        for _ in range(request.stop.max_tokens - 1):
            if self._step_seconds:
                await self._step.wait()
            yield token
        token.finish_reason = inference_pb2.FINISH_REASON_LENGTH
        yield token


async def _serve(config: BareConfig) -> int:
    stop = asyncio.Event()
    install_stop_signals(stop)
    server = RpcServer(config.process.host, config.process.port, ["kvferry.v1.InferenceService"])
    servicer = _Servicer(config.step_ms / 1e3)  # type: ignore[abstract]  # nothing else is measured
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server.server)
    await server.start()
    write_ready_file(config.process.ready_file, {"address": server.address, "pid": os.getpid()})
    pacing = asyncio.create_task(servicer.pace())
    await stop.wait()
    pacing.cancel()
    await server.stop(0.5)
    return 0


def serve(config: BareConfig) -> int:
    """Runs until a signal stops it."""
    prepare_process(config.process)
    return asyncio.run(_serve(config))


if __name__ == "__main__":
    chosen = tyro.cli(tyro.conf.OmitArgPrefixes[BareConfig], description=BareConfig.__doc__)
    run_process(lambda: serve(chosen), (PortInUse,))
