"""`kvferry bench compare`: does splitting pay for this load? Colocated arms against splits, on one machine, matched.

Every arm is a real cluster with the same cores, pages, model, kernels, router, prompts, arrivals and lengths. All
clusters are up at once, but only one is under load at any time, and they take turns, so that a slow minute of the
machine hits all.
For each arm the highest rate is sought at which at least 90 % of the offered requests meet both SLOs (goodput). Each
rate is measured several times, with other prompts and arrivals, and the counts are added up before the search decides.
Of the colocated arms (one per token budget) the best one counts: the baseline has to be a strong one.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import platform
import random
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.arms import Arm, Load
from benchmarks.driver import duration_of, open_loop
from benchmarks.goodput import GoodputSearch, Trial
from benchmarks.metrics import Slo, summarise
from benchmarks.records import RequestRecord
from benchmarks.targets import GrpcTarget
from benchmarks.workload import HIGHEST_TOKEN, LoadRequest, cut, fitted
from kvferry.client import Client, KvferryError
from kvferry.local import LocalCluster

Say = Callable[[str], object]


@dataclass(frozen=True)
class CompareSettings:
    """How a comparison is run."""

    slo: Slo
    seconds: float
    """Length of each measured run."""
    repeats: int
    """Runs per rate, each with other arrivals and prompts."""
    trials: int
    """Measured rates per arm, at most."""
    first_rate: float
    """Requests per second to begin with."""
    seed: int = 0


@dataclass
class Run:
    """One arm under one rate."""

    arm: str
    rate: float
    repeat: int
    summary: dict[str, Any]
    busy: dict[str, float]
    """Share of the time that each worker's engine was in a step."""
    itls_ms: list[float]


@dataclass
class ArmResult:
    """What one arm reached."""

    name: str
    is_two_tier: bool
    goodput: float = 0.0
    """Requests per second."""
    interval: tuple[float, float] = (0.0, 0.0)
    """95 % confidence interval of it."""
    trials: list[Trial] = field(default_factory=list)
    """Each rate, all repeats together."""
    runs: list[Run] = field(default_factory=list)
    is_lower_bound: bool = False
    """No measured rate missed the target."""
    timeline: list[tuple[float, float]] = field(default_factory=list)
    """(seconds, gap in ms) of the answers while one long prompt arrives."""


@dataclass
class Comparison:
    """Everything that was measured for one load."""

    load: str
    describe: str
    slo: Slo
    arms: list[ArmResult]
    equal_outputs: float
    """Share of probe requests that all arms answered with the same tokens."""
    kv_bytes_moved: dict[str, int]
    """By arm, over all runs."""
    machine: dict[str, Any]
    settings: dict[str, Any]

    @property
    def best_colocated(self) -> ArmResult:
        """The strongest baseline."""
        return max((a for a in self.arms if not a.is_two_tier), key=lambda a: a.goodput)

    @property
    def best_two_tier(self) -> ArmResult:
        """The best split."""
        return max((a for a in self.arms if a.is_two_tier), key=lambda a: a.goodput)


class ArmUnderTest:
    """A running cluster of an arm."""

    def __init__(self, arm: Arm, cluster: LocalCluster, client: Client) -> None:
        self.arm, self.cluster, self.client = arm, cluster, client

    def busy_seconds(self) -> dict[str, float]:
        """Seconds that each worker spent in steps so far."""
        found = {}
        for process in self.cluster.processes:
            if process.name != "router":
                with urllib.request.urlopen(process.info["metrics"], timeout=10) as response:
                    families = text_string_to_metric_families(response.read().decode())
                    samples = {s.name: s.value for family in families for s in family.samples}
                found[process.name] = samples["kvferry_step_seconds_sum"]
        return found

    def offer(self, requests: list[LoadRequest], timeout: float) -> tuple[list[RequestRecord], dict[str, float]]:
        """Runs a load from empty caches. Returns its records, and each worker's busy share."""
        self.client.flush_prefix_cache()
        before, started = self.busy_seconds(), time.perf_counter()

        fitting = cut(requests, self.client.model_info().max_model_len)

        async def run() -> list[RequestRecord]:
            async with GrpcTarget(self.cluster.address, timeout) as target:
                return await open_loop(target, fitting, lambda: None)

        records = asyncio.run(run())
        seconds = time.perf_counter() - started
        busy = {name: min(1.0, (total - before[name]) / seconds) for name, total in self.busy_seconds().items()}
        return records, busy


@contextmanager
def running_arms(arms: list[Arm], say: Say) -> Iterator[list[ArmUnderTest]]:
    """All arms' clusters, up and warm."""
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as logs, ExitStack() as stack:
        running = []
        for number, arm in enumerate(arms):
            say(f"starting {arm.name}")
            config = replace(arm.cluster, log_dir=Path(logs) / str(number))
            cluster = stack.enter_context(LocalCluster(config))
            client = stack.enter_context(Client(cluster.address))
            vocab_size = client.model_info().vocab_size
            for length in (16, 300):  # not measured; other prompts than any that is
                length = min(length, client.model_info().max_model_len - 4)
                prompt = random.Random(length).choices(range(HIGHEST_TOKEN, HIGHEST_TOKEN + 9000), k=length)
                client.generate([token % vocab_size for token in prompt], max_tokens=4).result()
            running.append(ArmUnderTest(arm, cluster, client))
        yield running


def compare(arms: list[ArmUnderTest], load: Load, settings: CompareSettings, say: Say) -> Comparison:
    """Measures one load on all arms, taking turns."""
    results = [ArmResult(under_test.arm.name, under_test.arm.is_two_tier) for under_test in arms]
    searches = [GoodputSearch(settings.first_rate, settings.trials) for _ in arms]
    while any(rates := [search.next_rate() for search in searches]):
        trials = [Trial(rate or 0.0, 0, 0) for rate in rates]
        for repeat in range(settings.repeats):
            for place, (under_test, rate) in enumerate(zip(arms, rates, strict=True)):
                if rate is None:
                    continue
                say(f"{load.name}, repeat {repeat + 1} of {settings.repeats}: {under_test.arm.name} at {rate:.2f}/s")
                run, met = _measure(under_test, load, rate, repeat, settings)
                results[place].runs.append(run)
                trials[place] += Trial(rate, met, run.summary["offered"])
        for search, trial in zip(searches, trials, strict=True):
            if trial.offered:
                search.add(trial)
    for search, result in zip(searches, results, strict=True):
        result.goodput, result.interval = search.goodput, search.interval(settings.seed)
        result.trials, result.is_lower_bound = search.trials, search.missed is None
    for under_test, result in zip(arms, results, strict=True):
        say(f"{load.name}: one long prompt among streams, {under_test.arm.name}")
        result.timeline = _timeline(under_test)
    return Comparison(
        load=load.name,
        describe=load.describe,
        slo=settings.slo,
        arms=results,
        equal_outputs=_equal_outputs(arms, load, settings.seed),
        kv_bytes_moved={r.name: sum(run.summary["total_kv_bytes"] for run in r.runs) for r in results},
        machine=machine(),
        settings={**asdict(settings), "slo": asdict(settings.slo)},
    )


def _measure(
    under_test: ArmUnderTest, load: Load, rate: float, repeat: int, settings: CompareSettings
) -> tuple[Run, int]:
    # The same prompts, lengths and arrivals for every arm at this rate and repeat.
    requests = load.requests(rate, settings.seconds, settings.seed * 1000 + repeat)
    records, busy = under_test.offer(requests, timeout=4 * settings.seconds)
    summary = summarise(records, duration_of(records), settings.slo)
    met = sum(settings.slo.is_met(record) for record in records)
    itls = [gap * 1e3 for record in records for gap in record.itls]
    return Run(under_test.arm.name, rate, repeat, summary, busy, itls), met


def _equal_outputs(arms: list[ArmUnderTest], load: Load, seed: int) -> float:
    """Each probe alone on each arm: what share has the same tokens everywhere?"""
    info = arms[0].client.model_info()
    probes = cut(load.make(6, seed + 99), info.max_model_len)

    def ask(arm: ArmUnderTest, request: LoadRequest) -> tuple[int, ...]:
        prompt, max_tokens = fitted(request.prompt, info.vocab_size), min(request.max_tokens, 24)
        options: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "return_token_ids": True}
        try:
            return arm.client.generate(prompt, max_tokens=max_tokens, **options).result().token_ids
        except KvferryError:
            return (-1, arms.index(arm))  # equal to no other arm's

    answers = [tuple(ask(arm, request) for arm in arms) for request in probes]
    return sum(len(set(answer)) == 1 for answer in answers) / len(answers)


def _timeline(under_test: ArmUnderTest, num_streams: int = 4, long_tokens: int = 1500) -> list[tuple[float, float]]:
    """Gaps between tokens of running answers, while one long prompt arrives after a second."""
    rng = random.Random(1)

    def request(length: int, max_tokens: int, arrival: float) -> LoadRequest:
        return LoadRequest(tuple(rng.choices(range(300, 30_000), k=length)), max_tokens, arrival)

    streams = [request(32, 150, 0.0) for _ in range(num_streams)]
    records, _ = under_test.offer([*streams, request(long_tokens, 2, 1.0)], timeout=120)
    start = min(record.sent for record in records)
    short = [record for record in records if record.output_tokens > 2]
    return sorted(
        (later - start, (later - earlier) * 1e3)
        for record in short
        for earlier, later in zip(record.token_times, record.token_times[1:], strict=False)
    )


def machine() -> dict[str, Any]:
    """What the numbers hold for."""
    versions = {
        name: importlib.metadata.version(name) for name in ("kvferry", "torch", "transformers", "nixl", "grpcio")
    }
    model = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": versions,
        "date": time.strftime("%Y-%m-%d"),
    }
