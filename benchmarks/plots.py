"""Plots of a comparison, as PNG."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from benchmarks.compare import ArmResult, Comparison

Draw = Callable[[Any, Comparison], None]


def draw_all(comparison: Comparison) -> dict[str, bytes]:
    """PNG by name."""
    return {
        "attainment": _png(_attainment, comparison),
        "ttft": _png(_latency("ttft"), comparison),
        "tpot": _png(_latency("tpot"), comparison),
        "itl": _png(_itl, comparison),
        "timeline": _png(_timeline, comparison),
        "idle": _png(_idle, comparison),
    }


def _png(draw: Draw, comparison: Comparison) -> bytes:
    figure, axes = plt.subplots(figsize=(6.4, 3.6), dpi=110, layout="constrained")
    draw(axes, comparison)
    target = io.BytesIO()
    figure.savefig(target, format="png")
    plt.close(figure)
    return target.getvalue()


def _by_rate(result: ArmResult, key: str) -> tuple[list[float], list[float]]:
    """Rates, and the median of a number over the repeats at each."""
    points: dict[float, list[float]] = {}
    for run in result.runs:
        if run.summary[key] is not None:
            points.setdefault(run.rate, []).append(run.summary[key])
    rates = sorted(points)
    return rates, [float(np.median(points[rate])) for rate in rates]


def _attainment(axes: Any, comparison: Comparison) -> None:
    for result in comparison.arms:
        trials = sorted(result.trials, key=lambda t: t.rate)
        shares = [100 * t.attainment for t in trials]
        # The Wilson interval does not always hold the share itself, by a rounding error.
        errors = [
            [max(0.0, share - 100 * t.interval[0]) for t, share in zip(trials, shares, strict=True)],
            [max(0.0, 100 * t.interval[1] - share) for t, share in zip(trials, shares, strict=True)],
        ]
        axes.errorbar([t.rate for t in trials], shares, errors, marker="o", capsize=3, label=result.name)
    axes.axhline(90, color="grey", linestyle=":")
    axes.set(title="SLO attainment against offered rate", xlabel="requests/s offered", ylabel="% of offered requests")
    axes.legend(fontsize=8)


def _latency(name: str) -> Draw:
    def draw(axes: Any, comparison: Comparison) -> None:
        for result in comparison.arms:
            for key, style in ((f"median_{name}_ms", "-"), (f"p99_{name}_ms", "--")):
                rates, values = _by_rate(result, key)
                label = result.name if style == "-" else None
                [line] = axes.plot(rates, values, style, marker=".", label=label)
                if style == "-":
                    color = line.get_color()
                else:
                    line.set_color(color)
        limit = comparison.slo.ttft_ms if name == "ttft" else comparison.slo.tpot_ms
        if limit is not None:
            axes.axhline(limit, color="grey", linestyle=":")
        axes.set(
            title=f"{name.upper()} against offered rate (median, dashed p99)", xlabel="requests/s offered", ylabel="ms",
            yscale="log",
        )  # fmt: skip
        axes.legend(fontsize=8)

    return draw


def _itl(axes: Any, comparison: Comparison) -> None:
    for result in (comparison.best_colocated, comparison.best_two_tier):
        run = min(result.runs, key=lambda r: abs(r.rate - result.goodput))
        gaps = np.sort(run.itls_ms)
        if len(gaps):
            axes.plot(gaps, np.linspace(0, 100, len(gaps)), label=f"{result.name} at {run.rate:.2f}/s")
    axes.set(title="Gaps between tokens, near each arm's goodput", xlabel="ITL ms", ylabel="% of gaps", xscale="log")
    axes.legend(fontsize=8)


def _timeline(axes: Any, comparison: Comparison) -> None:
    for result in comparison.arms:
        if result.timeline:
            times, gaps = zip(*result.timeline, strict=True)
            axes.plot(times, gaps, ".", markersize=3, label=result.name)
    axes.axvline(1.0, color="grey", linestyle=":")
    axes.set(
        title="4 answers; at 1 s a prompt of 1,500 tokens arrives", xlabel="seconds", ylabel="gap in ms", yscale="log"
    )
    axes.legend(fontsize=8)


def _idle(axes: Any, comparison: Comparison) -> None:
    bars: list[tuple[str, float]] = []
    for result in (comparison.best_colocated, comparison.best_two_tier):
        run = min(result.runs, key=lambda r: abs(r.rate - result.goodput))
        bars += [(f"{name}\n({result.name})", 100 * (1 - busy)) for name, busy in sorted(run.busy.items())]
    axes.bar([name for name, _ in bars], [share for _, share in bars])
    axes.tick_params(axis="x", labelsize=7)
    axes.set(title="Idle share of each worker near its arm's goodput", ylabel="% of the time")
