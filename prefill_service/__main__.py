"""A prefill worker as a process: `kvferry prefill` or `python -m prefill_service`."""

from __future__ import annotations

import tyro
from grpc import aio

from prefill_service.config import PrefillConfig
from prefill_service.loop import PrefillLoop
from prefill_service.servicer import SERVICE_NAME, PageTicketServicer
from protos import kv_pb2_grpc, worker_pb2
from rpc.process import run_process
from rpc.prompt_order import SLOWDOWN
from worker_runtime.errors import EXPECTED_ERRORS
from worker_runtime.parts import WorkerParts
from worker_runtime.process import WorkerKind, run_worker


def _add_services(server: aio.Server, parts: WorkerParts) -> None:
    servicer = PageTicketServicer(parts.inbox, parts.worker_id, parts.incarnation_id)
    kv_pb2_grpc.add_PageTicketServiceServicer_to_server(servicer, server)


def serve(config: PrefillConfig) -> int:
    """Runs the worker until it is told to stop."""
    tier = WorkerKind(
        worker_pb2.TIER_PREFILL,
        build_loop=lambda parts, runner, rng: PrefillLoop(parts, runner, config),
        token_budget=config.token_budget,
        slowdown=SLOWDOWN[config.prompt_order],
        service_names=(SERVICE_NAME,),
        add_services=_add_services,
    )
    return run_worker(config, tier)


def run(config: PrefillConfig) -> None:
    """Runs the worker and ends this process."""
    run_process(lambda: serve(config), EXPECTED_ERRORS)


def main() -> None:
    """Reads the command line and runs."""
    config = tyro.cli(tyro.conf.OmitArgPrefixes[PrefillConfig], description=PrefillConfig.__doc__)
    run(config)


if __name__ == "__main__":
    main()
