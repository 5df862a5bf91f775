"""A colocated worker as a process: `kvferry colocated` or `python -m colocated_service`."""

from __future__ import annotations

import tyro

from colocated_service.config import ColocatedConfig
from colocated_service.loop import ColocatedLoop
from engine.errors import ModelLoadError
from kv_transfer.errors import TransferError
from prefill_service.scheduler import SLOWDOWN
from protos import worker_pb2
from rpc.config import ConfigError
from rpc.process import run_process
from rpc.server import PortInUse
from worker_runtime.parts import WorkerParts
from worker_runtime.process import run_worker

EXPECTED_ERRORS = (ModelLoadError, TransferError, PortInUse, ConfigError)


def serve(config: ColocatedConfig) -> int:
    """Runs the worker until it is told to stop."""

    def build_loop(parts: WorkerParts) -> ColocatedLoop:
        return ColocatedLoop(parts, parts.runner, config)

    limits = worker_pb2.WorkerLimits(token_budget=config.token_budget, slowdown=SLOWDOWN[config.prompt_order])
    return run_worker(config, worker_pb2.TIER_COLOCATED, limits, build_loop, [])


def main() -> None:
    """Reads the command line and runs."""
    config = tyro.cli(tyro.conf.OmitArgPrefixes[ColocatedConfig], description=ColocatedConfig.__doc__)
    run_process(lambda: serve(config), EXPECTED_ERRORS)


if __name__ == "__main__":
    main()
