"""A prefill worker as a process: `kvferry prefill` or `python -m prefill_service`."""

from __future__ import annotations

import tyro
from grpc import aio

from engine.errors import ModelLoadError
from kv_transfer.errors import TransferError
from prefill_service.config import PrefillConfig
from prefill_service.loop import PrefillLoop
from prefill_service.scheduler import SLOWDOWN
from prefill_service.servicer import SERVICE_NAME, PageTicketServicer
from protos import kv_pb2_grpc, worker_pb2
from rpc.config import ConfigError
from rpc.process import run_process
from rpc.server import PortInUse
from worker_runtime.parts import WorkerParts
from worker_runtime.process import run_worker

EXPECTED_ERRORS = (ModelLoadError, TransferError, PortInUse, ConfigError)


def _add_services(server: aio.Server, parts: WorkerParts) -> None:
    servicer = PageTicketServicer(parts.inbox, parts.worker_id, parts.incarnation_id)
    kv_pb2_grpc.add_PageTicketServiceServicer_to_server(servicer, server)


def serve(config: PrefillConfig) -> int:
    """Runs the worker until it is told to stop."""

    def build_loop(parts: WorkerParts) -> PrefillLoop:
        return PrefillLoop(parts, parts.runner, config)

    limits = worker_pb2.WorkerLimits(token_budget=config.token_budget, slowdown=SLOWDOWN[config.prompt_order])
    return run_worker(config, worker_pb2.TIER_PREFILL, limits, build_loop, [SERVICE_NAME], _add_services)


def main() -> None:
    """Reads the command line and runs."""
    config = tyro.cli(tyro.conf.OmitArgPrefixes[PrefillConfig], description=PrefillConfig.__doc__)
    run_process(lambda: serve(config), EXPECTED_ERRORS)


if __name__ == "__main__":
    main()
