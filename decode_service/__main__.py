"""A decode worker as a process: `kvferry decode` or `python -m decode_service`."""

from __future__ import annotations

import tyro

from decode_service.config import DecodeConfig
from decode_service.loop import DecodeLoop
from decode_service.ticket_closer import TicketCloser
from engine.errors import ModelLoadError
from kv_transfer.errors import TransferError
from protos import worker_pb2
from rpc.config import ConfigError
from rpc.process import run_process
from rpc.server import PortInUse
from rpc.tls import tls_files
from worker_runtime.parts import WorkerParts
from worker_runtime.process import run_worker

EXPECTED_ERRORS = (ModelLoadError, TransferError, PortInUse, ConfigError)


def serve(config: DecodeConfig) -> int:
    """Runs the worker until it is told to stop."""

    def build_loop(parts: WorkerParts) -> DecodeLoop:
        closer = TicketCloser(parts.loop, parts.inbox, tls_files(config.process))
        return DecodeLoop(parts, parts.runner, closer, config)

    return run_worker(config, worker_pb2.TIER_DECODE, worker_pb2.WorkerLimits(), build_loop, [])


def main() -> None:
    """Reads the command line and runs."""
    config = tyro.cli(tyro.conf.OmitArgPrefixes[DecodeConfig], description=DecodeConfig.__doc__)
    run_process(lambda: serve(config), EXPECTED_ERRORS)


if __name__ == "__main__":
    main()
