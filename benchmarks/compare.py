"""`kvferry bench compare`: does splitting pay for this load? Colocated arms against splits, on one machine, matched; or
servers that run already against each other.

Every arm of ours is a real cluster with the same cores, pages, model, kernels, router, prompts, arrivals and lengths.
All clusters are up at once, but only one is under load at any time, and they take turns, so that a slow minute of the
machine hits all.
For each arm the highest rate is sought at which at least 90 % of the offered requests meet both SLOs (goodput). Each
rate is measured several times, with other prompts and arrivals, and the counts are added up before the search decides.
Then all arms are measured at one rate, the highest that each of them attains: latencies are compared there and nowhere
else. Of the colocated arms (one per token budget) the best one counts: the baseline has to be a strong one.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import random
import shlex
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.arms import Load
from benchmarks.arms_under_test import ArmUnderTest, Kind, Say
from benchmarks.driver import duration_of
from benchmarks.goodput import GoodputSearch, Trial
from benchmarks.metrics import Slo, summarise
from benchmarks.records import RequestRecord
from benchmarks.workload import LoadRequest, cut, salted


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
    salt: int = 0
    """Of this comparison, so that its prompts share no prefix with those of another."""
    with_timeline: bool = True
    """Also measure gaps between tokens while a long prompt arrives."""


@dataclass
class Run:
    """One arm under one rate."""

    arm: str
    rate: float
    repeat: int
    summary: dict[str, Any]
    busy: dict[str, float]
    """Share of the time that each worker's engine was in a step."""
    records: list[RequestRecord] = field(default_factory=list)
    generator_lag_ms: float = 0.0
    """How late the load generator's event loop woke up (p99)."""
    generator_was_limit: bool = False


@dataclass
class ArmResult:
    """What one arm reached."""

    name: str
    kind: Kind
    goodput: float = 0.0
    """Requests per second."""
    interval: tuple[float, float] = (0.0, 0.0)
    """95 % confidence interval of it."""
    trials: list[Trial] = field(default_factory=list)
    """Each rate, all repeats together."""
    runs: list[Run] = field(default_factory=list)
    has_attained: bool = False
    """Some measured rate attained the target."""
    is_lower_bound: bool = False
    """No measured rate missed the target."""
    timeline: list[tuple[float, float]] = field(default_factory=list)
    """(seconds, gap between tokens in ms) while one long prompt arrives."""

    def at(self, rate: float) -> dict[str, Any]:
        """The numbers of all runs at one rate together."""
        runs = [run.records for run in self.runs if run.rate == rate]
        return summarise([record for records in runs for record in records], sum(map(duration_of, runs)))

    def idle_at(self, rate: float) -> dict[str, float]:
        """Share of the time that each worker's engine was in no step, over the runs at one rate."""
        runs = [run.busy for run in self.runs if run.rate == rate]
        return {name: 1 - sum(busy[name] for busy in runs) / len(runs) for name in (runs[0] if runs else ())}


@dataclass
class Comparison:
    """Everything that was measured for one load."""

    load: str
    describe: str
    slo: Slo
    arms: list[ArmResult]
    equal_outputs: float | None
    """Share of probe requests with the same output tokens on all arms; None if an arm does not return token ids."""
    kv_bytes_moved: dict[str, int]
    """By arm, over all runs."""
    machine: dict[str, Any]
    settings: dict[str, Any]
    shared_rate: float | None = None
    """The highest rate that every arm attained; all were measured at it. None: some arm attained no rate."""

    @property
    def best_colocated(self) -> ArmResult | None:
        """The strongest baseline."""
        return max((a for a in self.arms if a.kind == "colocated"), key=lambda a: a.goodput, default=None)

    @property
    def best_two_tier(self) -> ArmResult | None:
        """The best split."""
        return max((a for a in self.arms if a.kind == "two-tier"), key=lambda a: a.goodput, default=None)

    @property
    def num_requests(self) -> int:
        """Measured requests of all arms."""
        return sum(len(run.records) for arm in self.arms for run in arm.runs)


def compare(arms: list[ArmUnderTest], load: Load, settings: CompareSettings, say: Say) -> Comparison:
    """Measures one load on all arms, taking turns."""
    results = [ArmResult(under_test.name, under_test.kind) for under_test in arms]
    searches = [GoodputSearch(settings.first_rate, settings.trials) for _ in arms]
    while any(rates := [search.next_rate() for search in searches]):
        _measure_all(arms, results, searches, rates, load, settings, say)
    shared = _shared_rate(searches)
    while shared is not None:
        missing = [None if any(run.rate == shared for run in result.runs) else shared for result in results]
        _measure_all(arms, results, searches, missing, load, settings, say)
        # The new counts may show that an arm does not attain this rate.
        before, shared = shared, _shared_rate(searches)
        if shared == before:
            break
    for search, result in zip(searches, results, strict=True):
        result.has_attained = search.attained is not None
        result.goodput, result.interval = search.goodput, search.interval(settings.seed)
        result.trials, result.is_lower_bound = search.trials, search.missed is None
    if settings.with_timeline:
        for under_test, result in zip(arms, results, strict=True):
            say(f"{load.name}: one long prompt among streams, {under_test.name}")
            result.timeline = _timeline(under_test, settings)
    return Comparison(
        load=load.name,
        describe=load.describe,
        slo=settings.slo,
        arms=results,
        equal_outputs=_equal_outputs(arms, load, settings.seed),
        kv_bytes_moved={r.name: sum(run.summary["total_kv_bytes"] for run in r.runs) for r in results},
        machine=machine(),
        settings={**asdict(settings), "slo": asdict(settings.slo)},
        shared_rate=shared,
    )


def _shared_rate(searches: list[GoodputSearch]) -> float | None:
    """The highest measured rate that every arm attains, by all counts so far."""
    attained = [search.attained.rate if search.attained else None for search in searches]
    return None if None in attained else min(rate for rate in attained if rate is not None)


def _measure_all(
    arms: list[ArmUnderTest],
    results: list[ArmResult],
    searches: list[GoodputSearch],
    rates: list[float | None],
    load: Load,
    settings: CompareSettings,
    say: Say,
) -> None:
    """Each arm at its rate, if it has one, in turns."""
    trials = [Trial(rate or 0.0, 0, 0) for rate in rates]
    for repeat in range(settings.repeats):
        for index, (under_test, rate) in enumerate(zip(arms, rates, strict=True)):
            if rate is None:
                continue
            say(f"{load.name}, repeat {repeat + 1} of {settings.repeats}: {under_test.name} at {rate:.2f}/s")
            run, met = _measure(under_test, load, rate, repeat, settings)
            results[index].runs.append(run)
            trials[index] += Trial(rate, met, run.summary["offered"])
    for search, trial in zip(searches, trials, strict=True):
        if trial.offered:
            search.add(trial)


def _measure(
    under_test: ArmUnderTest, load: Load, rate: float, repeat: int, settings: CompareSettings
) -> tuple[Run, int]:
    # The same prompts, lengths and arrivals for every arm at this rate and repeat, and at no other.
    requests = load.requests(rate, settings.seconds, settings.seed * 1000 + repeat)
    requests = salted(requests, hash((settings.salt, rate, repeat)) % (1 << 62))
    offered = under_test.offer(requests, timeout=4 * settings.seconds)
    summary = summarise(offered.records, duration_of(offered.records), settings.slo)
    met = sum(settings.slo.is_met(record) for record in offered.records)
    generator = offered.generator
    run = Run(
        under_test.name, rate, repeat, summary, offered.busy, offered.records, generator.p99_lag_ms, generator.is_limit
    )
    return run, met


def _equal_outputs(arms: list[ArmUnderTest], load: Load, seed: int) -> float | None:
    """Each probe alone on each arm: what share has the same tokens everywhere?"""
    longest = min((arm.max_model_len for arm in arms if arm.max_model_len is not None), default=1 << 30)
    probes = cut(load.make(6, seed + 99), longest)
    outputs = [tuple(arm.greedy_tokens(request) for arm in arms) for request in probes]
    if any(tokens is None for output in outputs for tokens in output):
        return None
    return sum(len(set(output)) == 1 for output in outputs) / len(outputs)


def _timeline(
    under_test: ArmUnderTest, settings: CompareSettings, num_streams: int = 4, long_tokens: int = 1500
) -> list[tuple[float, float]]:
    """Gaps between tokens of running streams, while one long prompt arrives after a second."""
    rng = random.Random(1)

    def request(length: int, max_tokens: int, arrival: float) -> LoadRequest:
        return LoadRequest(tuple(rng.choices(range(300, 30_000), k=length)), max_tokens, arrival)

    streams = [request(32, 150, 0.0) for _ in range(num_streams)]
    load = salted([*streams, request(long_tokens, 2, 1.0)], settings.salt)
    records = under_test.offer(load, timeout=120).records
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
        "command": shlex.join(["kvferry", *sys.argv[1:]]),
    }
