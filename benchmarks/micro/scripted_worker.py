"""A worker without a model: sends every request tokens at a steady rate, or as fast as they are read.

For measuring and testing a router by itself. To the router it is a colocated worker. Token ids encode when they were
made: the system's monotonic clock in units of 0.1 ms, modulo `CLOCK_IDS`, so that a client on the same machine can
compute the latency of a token.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import tyro

from kv_transfer.request_ref import RequestRef
from protos import inference_pb2, kv_pb2, worker_pb2, worker_pb2_grpc
from rpc.config import ProcessConfig
from rpc.process import install_stop_signals, prepare_process, run_process, write_ready_file
from rpc.server import PortInUse, RpcServer

FIRST_ID = 300
CLOCK_IDS = 40_000
"""Ids that encode the time; they repeat after 4 seconds."""
UNITS_PER_SECOND = 10_000
VOCAB_SIZE = 1 << 18
"""As large as that of any tokenizer, so that a router takes every prompt."""


def clock_id() -> int:
    """The token id of this moment."""
    return FIRST_ID + int(time.monotonic() * UNITS_PER_SECOND) % CLOCK_IDS


def age_seconds(token_id: int) -> float:
    """How long ago a token was made; less than 4 seconds."""
    return (clock_id() - token_id) % CLOCK_IDS / UNITS_PER_SECOND


@dataclass(frozen=True)
class ScriptedConfig:
    """A worker without a model, for measuring a router."""

    tokenizer_hash: str
    """That of the router, so that it takes this worker."""
    process: ProcessConfig = field(default_factory=ProcessConfig)
    worker_id: str = "scripted"
    """Name of this worker."""
    step_ms: float = 0.0
    """Time between two tokens of each request; 0: as fast as they are read."""
    tokens_per_step: int = 1
    """Tokens of each request in one step."""
    max_num_sequences: int = 4096
    """Most requests at once."""
    max_model_len: int = 8192
    """Longest request in tokens."""


@dataclass(eq=False)
class _Request:
    max_tokens: int
    num_tokens: int = 0


class ScriptedServicer(worker_pb2_grpc.WorkerServiceServicer):
    """See `worker.proto`."""

    def __init__(self, config: ScriptedConfig, info: worker_pb2.WorkerInfo) -> None:
        self._config, self._info = config, info

    async def Session(
        self, request_iterator: AsyncIterator[worker_pb2.SessionRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[worker_pb2.SessionResponse]:
        """One router's connection: a step for all of its requests, again and again."""
        requests: dict[RequestRef, _Request] = {}
        came = asyncio.Event()

        async def read() -> None:
            async for request in request_iterator:
                match request.WhichOneof("command"):
                    case "generate":
                        command = request.generate
                        requests[RequestRef.from_proto(command.ref)] = _Request(command.spec.stop.max_tokens)
                        came.set()
                    case "abort":
                        requests.pop(RequestRef.from_proto(request.abort.ref), None)

        reader = asyncio.create_task(read())
        try:
            yield worker_pb2.SessionResponse(info=self._info)
            next_step = time.monotonic()
            while True:
                if not requests:
                    came.clear()
                    await came.wait()
                    next_step = time.monotonic()
                outputs = self._step(requests, self._config.tokens_per_step)
                yield worker_pb2.SessionResponse(step_output=worker_pb2.StepOutput(outputs=outputs))
                next_step += self._config.step_ms / 1e3
                await asyncio.sleep(max(0.0, next_step - time.monotonic()))
        finally:
            reader.cancel()

    @staticmethod
    def _step(requests: dict[RequestRef, _Request], num_tokens: int) -> list[worker_pb2.TokenOutput]:
        outputs, token = [], clock_id()
        for ref, request in list(requests.items()):
            first_index = request.num_tokens
            request.num_tokens = min(first_index + num_tokens, request.max_tokens)
            is_last = request.num_tokens >= request.max_tokens
            outputs.append(
                worker_pb2.TokenOutput(
                    ref=ref.to_proto(),
                    first_index=first_index,
                    token_ids=[token] * (request.num_tokens - first_index),
                    finish_reason=inference_pb2.FINISH_REASON_LENGTH
                    if is_last
                    else inference_pb2.FINISH_REASON_UNSPECIFIED,
                )
            )
            if is_last:
                del requests[ref]
        return outputs


async def _serve(config: ScriptedConfig) -> int:
    stop = asyncio.Event()
    install_stop_signals(stop)
    server = RpcServer(config.process.host, config.process.port, ["kvferry.v1.WorkerService"])
    page_size = 16
    limits = worker_pb2.WorkerLimits(
        num_pages=config.max_num_sequences * config.max_model_len // page_size,
        page_size=page_size,
        max_model_len=config.max_model_len,
        max_num_sequences=config.max_num_sequences,
        token_budget=1 << 30,
        vocab_size=VOCAB_SIZE,
    )
    info = worker_pb2.WorkerInfo(
        worker_id=config.worker_id,
        incarnation_id=str(time.time_ns()),
        tier=worker_pb2.TIER_COLOCATED,
        fingerprint=kv_pb2.Fingerprint(tokenizer_hash=config.tokenizer_hash),
        limits=limits,
        address=server.address,
    )
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(ScriptedServicer(config, info), server.server)
    await server.start()
    await server.set_ready(True)
    write_ready_file(config.process.ready_file, {"address": server.address})
    await stop.wait()
    await server.stop(0.5)
    return 0


def serve(config: ScriptedConfig) -> int:
    """Runs until a signal stops it."""
    prepare_process(config.process)
    return asyncio.run(_serve(config))


def tokenizer_hash(folder: Path) -> str:
    """What a router with this model's tokenizer asks for."""
    return hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()


if __name__ == "__main__":
    chosen = tyro.cli(tyro.conf.OmitArgPrefixes[ScriptedConfig], description=ScriptedConfig.__doc__)
    run_process(lambda: serve(chosen), (PortInUse,))
