"""`make bench-loop`: what a decode step costs in a running worker, beside the same step alone.

For each way to run a worker, one stream generates tokens through the router, and the worker's own clock says what its
steps took. The bare step is the same work called in a plain process on the same cores. What the stream's client sees
per token is more: the loop, the session, the router.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import httpx
import tyro
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from benchmarks.micro.machine import make_sequences, typical
from engine.config import EngineConfig
from engine.kv_cache import KvCache
from engine.loader import load_model, set_threads
from engine.model_runner import ModelRunner
from engine.model_store import DEFAULT_MODEL, resolve_model
from engine.sequence import ScheduledSequence, num_pages_for
from local_cluster.cluster import LocalCluster
from local_cluster.config import ClusterConfig
from local_cluster.process import share_of_cores
from router_client.clients import Client

PAGE_SIZE = 16
PROMPT_TOKENS = 256


@dataclass(frozen=True)
class Arm:
    """A cluster of workers, one of which generates the stream."""

    name: str
    prefill: int
    decode: int
    colocated: int

    @property
    def num_workers(self) -> int:
        """All workers."""
        return self.prefill + self.decode + self.colocated

    @property
    def position(self) -> int:
        """Which of the workers generates, as cores are shared."""
        return self.prefill

    @property
    def generating(self) -> str:
        """How names of workers that may generate begin."""
        return "decode-" if self.decode else "colocated-"


def bare_seconds(model: str, cpus: set[int], threads: int, num_tokens: int, repeats: int) -> float:
    """Seconds of one decode step of a sequence of `num_tokens` tokens, called in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_bare_seconds, model, cpus, threads, num_tokens, repeats).result()


def _bare_seconds(model: str, cpus: set[int], threads: int, num_tokens: int, repeats: int) -> float:
    os.sched_setaffinity(0, cpus)
    set_threads(threads)
    loaded = load_model(EngineConfig(model=model, device="cpu"))
    cache = KvCache(num_pages_for(num_tokens, PAGE_SIZE), PAGE_SIZE, loaded.kv_shape, loaded.dtype)
    runner = ModelRunner(loaded, cache)
    [sequence] = make_sequences(1, num_tokens, PAGE_SIZE)

    def step() -> None:
        result = runner.run([ScheduledSequence(sequence, 1)])
        assert result.logits is not None
        runner.sample(result.logits, [sequence]).wait()

    return typical(step, repeats)


@dataclass(frozen=True)
class Live:
    """Seconds per token of a lone stream."""

    step: float
    """By the worker's clock, launch to delivery."""
    client: float
    """Between tokens at the client, median."""


def live(cluster: LocalCluster, arm: Arm, num_tokens: int) -> Live:
    """Runs one stream of `num_tokens` tokens."""
    with Client(cluster.address) as client:
        for measured in (False, True):  # the first stream warms up
            before, arrivals = _steps(cluster, arm), []
            stream = client.generate(
                list(range(100, 100 + PROMPT_TOKENS)),
                max_tokens=num_tokens,
                temperature=0.0,
                ignore_eos=True,
                return_token_ids=True,
            )
            for _ in stream:
                arrivals.append(time.perf_counter())
                if len(arrivals) == 1:
                    before = _steps(cluster, arm)
            if not measured:
                continue
            total, count = (b - a for a, b in zip(before, _steps(cluster, arm), strict=True))
            gaps = [b - a for a, b in itertools.pairwise(arrivals)]
            return Live(total / count, statistics.median(gaps))
    raise AssertionError


def _steps(cluster: LocalCluster, arm: Arm) -> tuple[float, float]:
    """Total seconds, and number, of steps of the workers that may generate. All but one of them are idle."""
    total, count = 0.0, 0.0
    for process in cluster.processes:
        if process.name.startswith(arm.generating):
            text = httpx.get(str(process.info["metrics"])).text
            samples = {s.name: s.value for family in text_string_to_metric_families(text) for s in family.samples}
            total += samples["kvferry_step_seconds_sum"]
            count += samples["kvferry_step_seconds_count"]
    return total, count


def main(model: str = DEFAULT_MODEL, num_tokens: int = 80, rounds: int = 7) -> None:
    """Compares live and bare steps. rounds: bare, live, bare, live, ...; a machine's memory rate changes meanwhile."""
    console, folder = Console(), str(resolve_model(model))
    number_of_cores = len(os.sched_getaffinity(0))
    arms = [Arm("1 prefill, 1 decode", 1, 1, 0), Arm("colocated, 1 core each", 0, 0, number_of_cores)]
    if number_of_cores > 1:
        arms.append(Arm("1 colocated", 0, 0, 1))
    table = Table(title=f"one stream, {PROMPT_TOKENS} tokens in, {num_tokens} out: ms per token, median of {rounds}")
    for column in ("workers", "threads", "bare step", "step in the loop", "loop / bare", "at the client"):
        table.add_column(column, justify="left" if column == "workers" else "right")
    for arm in arms:
        cpus, threads = share_of_cores(arm.position, arm.num_workers)
        mine = os.sched_getaffinity(0) if cpus is None else {int(cpu) for cpu in cpus.split(",")}
        config = ClusterConfig(
            model=model, prefill=arm.prefill, decode=arm.decode, colocated=arm.colocated, port=0, log_level="error"
        )
        bare: list[float] = []
        lives: list[Live] = []
        with LocalCluster(config) as cluster:
            for _ in range(rounds):
                bare.append(bare_seconds(folder, mine, threads, PROMPT_TOKENS + num_tokens // 2, 60))
                lives.append(live(cluster, arm, num_tokens))
        ratios = [one.step / alone for one, alone in zip(lives, bare, strict=True)]
        table.add_row(
            arm.name,
            str(threads),
            f"{statistics.median(bare) * 1e3:.2f}",
            f"{statistics.median(one.step for one in lives) * 1e3:.2f}",
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            f"{statistics.median(one.client for one in lives) * 1e3:.2f}",
        )
    console.print(table)


if __name__ == "__main__":
    tyro.cli(main)
