"""From runs to the table: numbers of all rounds together, and ratios to the baseline with intervals over rounds. Pure.

In each round every arm gets the same prompts and arrivals, so a ratio is taken within a round. The interval is that of
the mean of the logarithms of these ratios (Student's t), which few rounds make wide, as they should.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

from scipy.stats import t

from benchmarks.metrics import Slo, summarise
from benchmarks.peers.generator import Load, Run

MEASURES = {
    "request_goodput": ("goodput, requests/s", 2),
    "median_ttft_ms": ("TTFT p50 ms", 0),
    "p99_ttft_ms": ("TTFT p99 ms", 0),
    "median_tpot_ms": ("TPOT p50 ms", 1),
    "p99_itl_ms": ("ITL p99 ms", 1),
    "output_throughput": ("output tokens/s", 1),
}
"""What the table shows, by its name in a summary: title and decimals."""
BUSY_CORES = 0.5
"""A generator that keeps more than this of its one core busy may be late itself."""
LAG_MS = 25.0
"""More than this above what a server of known times took is the generator's own."""


@dataclass(frozen=True)
class Ratio:
    """A ratio to the baseline, with its 95 % confidence interval if there is one."""

    value: float
    interval: tuple[float, float] | None = None

    def __str__(self) -> str:
        return f"x{self.value:.2f}" + (f" [{self.interval[0]:.2f}, {self.interval[1]:.2f}]" if self.interval else "")


@dataclass(frozen=True)
class ArmResult:
    """One arm under one load, in all rounds."""

    summary: dict[str, Any]
    """All rounds together, as `benchmarks.metrics.summarise` names them."""
    ratios: dict[str, Ratio | None]
    """To the baseline, by measure."""
    prompt_tokens: float
    """Mean of the prompts, as the server counts them."""
    output_tokens: float
    """Mean of the outputs, as the server counts them."""
    server_cores: float
    generator_cores: float
    """The most of any round."""


def ratio(values: Sequence[float | None], baseline: Sequence[float | None]) -> Ratio | None:
    """The ratio of values to those of the baseline in the same rounds; None if one is missing or the baseline is 0.

    The interval needs two rounds, and ratios above 0.
    """
    pairs = [(value, base) for value, base in zip(values, baseline, strict=True) if value is not None and base]
    if not pairs or len(pairs) < len(values):
        return None
    ratios = [value / base for value, base in pairs]
    if min(ratios) <= 0:
        return Ratio(mean(ratios))
    logs = [math.log(found) for found in ratios]
    if len(logs) < 2:
        return Ratio(ratios[0])
    half = float(t.ppf(0.975, len(logs) - 1)) * stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(mean(logs)), (math.exp(mean(logs) - half), math.exp(mean(logs) + half)))


def together(runs: Sequence[Run], baseline: Sequence[Run], slo: Slo) -> ArmResult:
    """An arm's runs under one load, one per round, against the baseline's runs in the same rounds."""
    each, base = ([summarise(run.records, run.duration, slo) for run in of] for of in (runs, baseline))
    every = [record for run in runs for record in run.records]
    done = [record for record in every if record.is_ok]
    return ArmResult(
        summary=summarise(every, sum(run.duration for run in runs), slo),
        ratios={key: ratio([one[key] for one in each], [one[key] for one in base]) for key in MEASURES},
        prompt_tokens=mean([record.prompt_tokens for record in done] or [0]),
        output_tokens=mean([record.output_tokens for record in done] or [0]),
        server_cores=mean(run.server_cores for run in runs),
        generator_cores=max(run.generator_cores for run in runs),
    )


def cells(result: ArmResult) -> list[str]:
    """A row of the table, after the name of the arm: each measure, and below it its ratio to the baseline."""
    row = []
    for key, (_, decimals) in MEASURES.items():
        value, compared = result.summary[key], result.ratios[key]
        row.append(f"{'-' if value is None else f'{value:.{decimals}f}'}\n{compared or '-'}")
    failed = result.summary["failed"]
    attained = f"{result.summary['slo_attainment'] or 0:.0%}" + (f"\n{failed} failed" if failed else "")
    return [*row, attained, f"{result.server_cores:.2f}"]


def unequal_tokens(results: Mapping[str, ArmResult], load: Load) -> list[str]:
    """Sentences about servers that did not get, or send, the tokens of the load."""
    return [
        f"{name}, {load}: prompts of {result.prompt_tokens:.1f} and outputs of {result.output_tokens:.1f} (mean)."
        for name, result in results.items()
        if result.summary["completed"]
        and (abs(result.prompt_tokens / load.prompt_tokens - 1) > 0.01 or result.output_tokens != load.output_tokens)
    ]


def generator_verdict(known: Mapping[str, Run], ttft_ms: float, itl_ms: float, busiest: float) -> list[str]:
    """Sentences on whether the load generator was the limit.

    known: its runs, by load, against a server that computes nothing and sends the first token `ttft_ms` after a request
    and the others `itl_ms` after each other. busiest: most cores that it kept busy against any arm.
    """
    lag, parts = 0.0, []
    for name, run in known.items():
        numbers = summarise(run.records, run.duration)
        if not numbers["completed"]:
            return [f"{name}: no request to the server of known times was completed: the load generator is not proven."]
        ttft, ttft99, itl, itl99 = (numbers[f"{p}_{of}_ms"] for of in ("ttft", "itl") for p in ("median", "p99"))
        lag = max(lag, ttft99 - ttft_ms, itl99 - itl_ms)
        parts.append(f"{name}: TTFT {ttft:.1f} and {ttft99:.1f}, ITL {itl:.1f} and {itl99:.1f}")
    is_limit = lag > LAG_MS or busiest > BUSY_CORES
    return [
        f"The load generator kept at most {busiest:.2f} of a core busy under load. Of a server that takes {ttft_ms:g} "
        f"ms to the first token and {itl_ms:g} to each other, it reported (p50 and p99, ms): {'; '.join(parts)}.",
        "So it may have been the limit: trust these numbers less."
        if is_limit
        else "So it was not the limit. It ran on the servers' cores, against every arm alike.",
    ]
