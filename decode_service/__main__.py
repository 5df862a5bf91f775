"""A decode worker as a process: `kvferry decode` or `python -m decode_service`."""

from __future__ import annotations

import random

import tyro

from decode_service.config import DecodeConfig
from decode_service.loop import DecodeLoop
from decode_service.ticket_revoker import GrpcWriters, TicketRevoker
from engine.model_runner import StepRunner
from protos import worker_pb2
from rpc.process import run_process
from rpc.tls import tls_files
from worker_runtime.errors import EXPECTED_ERRORS
from worker_runtime.parts import WorkerParts
from worker_runtime.process import WorkerKind, run_worker


def serve(config: DecodeConfig) -> int:
    """Runs the worker until it is told to stop."""

    def build_loop(parts: WorkerParts, runner: StepRunner, rng: random.Random) -> DecodeLoop:
        writers = GrpcWriters(tls_files(config.process))
        return DecodeLoop(parts, runner, TicketRevoker(parts.inbox, writers, parts.clock, rng), config)

    return run_worker(config, WorkerKind(worker_pb2.TIER_DECODE, build_loop))


def run(config: DecodeConfig) -> None:
    """Runs the worker and ends this process."""
    run_process(lambda: serve(config), EXPECTED_ERRORS)


def main() -> None:
    """Reads the command line and runs."""
    config = tyro.cli(tyro.conf.OmitArgPrefixes[DecodeConfig], description=DecodeConfig.__doc__)
    run(config)


if __name__ == "__main__":
    main()
