"""A colocated worker as a process: `kvferry colocated` or `python -m colocated_service`."""

from __future__ import annotations

import tyro

from colocated_service.config import ColocatedConfig
from colocated_service.loop import ColocatedLoop
from protos import worker_pb2
from rpc.process import run_process
from rpc.prompt_order import SLOWDOWN
from worker_runtime.errors import EXPECTED_ERRORS
from worker_runtime.process import WorkerKind, run_worker


def serve(config: ColocatedConfig) -> int:
    """Runs the worker until it is told to stop."""
    tier = WorkerKind(
        worker_pb2.TIER_COLOCATED,
        build_loop=lambda parts, runner, rng: ColocatedLoop(parts, runner, config),
        token_budget=config.token_budget,
        is_mixed=config.is_mixed,
        slowdown=SLOWDOWN[config.prompt_order],
        moves_pages=False,
    )
    return run_worker(config, tier)


def run(config: ColocatedConfig) -> None:
    """Runs the worker and ends this process."""
    run_process(lambda: serve(config), EXPECTED_ERRORS)


def main() -> None:
    """Reads the command line and runs."""
    config = tyro.cli(tyro.conf.OmitArgPrefixes[ColocatedConfig], description=ColocatedConfig.__doc__)
    run(config)


if __name__ == "__main__":
    main()
