"""Many schedules in several processes: `python -m tests.simulation --schedules 100000`. Failing seeds are printed."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import time

import tyro
from rich.progress import track

from tests.simulation.world import BrokenPromise, Plan, run_schedule

BLOCK = 500


def run_block(first: int) -> list[str]:
    """What went wrong, for seeds from `first` on."""
    logging.disable(logging.CRITICAL)
    wrong = []
    for seed in range(first, first + BLOCK):
        try:
            run_schedule(seed, Plan())
        except BrokenPromise as error:
            wrong.append(str(error))
    return wrong


def main(schedules: int = 100_000, first_seed: int = 0, processes: int = os.cpu_count() or 1) -> None:
    """Runs schedules and says how many broke a promise; exit status 1 if any did."""
    started, wrong = time.monotonic(), []
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        blocks = range(first_seed, first_seed + schedules, BLOCK)
        for found in track(pool.imap_unordered(run_block, blocks), "schedules", total=len(blocks)):
            wrong += found
    for text in wrong[:5]:
        print(text)
    rate = schedules / (time.monotonic() - started)
    print(f"{schedules} schedules, {len(wrong)} broke a promise; {rate:.0f} schedules per second")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    tyro.cli(main)
