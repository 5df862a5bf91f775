"""Plots of a comparison, as PNG. One arm has one colour and one marker in all of them."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks.compare import ArmResult, Comparison

Draw = Callable[[Any, Comparison, "Styles"], None]
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000", "#F0E442")
"""Distinguishable for colour-blind people too (Okabe and Ito 2008)."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DODGE = 0.012
"""Points of arms at the same rate stand beside each other, by this share of the rate."""


class Styles:
    """Colour and marker by arm."""

    def __init__(self, names: list[str]) -> None:
        self._indexes = {name: index for index, name in enumerate(names)}

    def __getitem__(self, name: str) -> dict[str, Any]:
        index = self._indexes[name]
        return {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}

    def dodged(self, name: str, rate: float) -> float:
        """Where a point of an arm stands on an axis of rates."""
        return rate * (1 + DODGE * (self._indexes[name] - (len(self._indexes) - 1) / 2))


def draw_all(comparison: Comparison) -> dict[str, bytes]:
    """PNG by name."""
    plots = {
        "attainment": _png(_attainment, comparison),
        "ttft": _png(_latency("ttft", "TTFT"), comparison),
        "tpot": _png(_latency("tpot", "TPOT"), comparison),
    }
    if comparison.shared_rate is not None:
        plots["itl"] = _png(_itl, comparison)
        if any(arm.idle_at(comparison.shared_rate) for arm in comparison.arms):
            plots["idle"] = _png(_idle, comparison)
    if any(arm.timeline for arm in comparison.arms):
        plots["timeline"] = _png(_timeline, comparison)
    return plots


def _png(draw: Draw, comparison: Comparison) -> bytes:
    # Legible on a phone, where it is some 9 cm wide.
    with plt.rc_context({"font.size": 12, "axes.titlesize": 13, "legend.fontsize": 10, "lines.markersize": 6}):
        figure, axes = plt.subplots(figsize=(6.4, 4.6), dpi=130, layout="constrained")
        draw(axes, comparison, Styles([arm.name for arm in comparison.arms]))
        axes.grid(alpha=0.25)
        target = io.BytesIO()
        figure.savefig(target, format="png")
        plt.close(figure)
    return target.getvalue()


def _plain(value: float, _: object = None) -> str:
    return f"{value:g}"


def _log_axis(axis: Any, scale: Callable[[str], object]) -> None:
    """Logarithmic, with numbers that people read: 20, 50, 100."""
    scale("log")
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(_plain))
    axis.set_minor_formatter(NullFormatter())


def _limit(axes: Any, value: float, text: str, is_upright: bool = False) -> None:
    """A labelled line at a limit."""
    (axes.axvline if is_upright else axes.axhline)(value, color="#444444", linestyle=":", linewidth=1.2)
    if is_upright:
        axes.text(value, 0.02, f" {text}", transform=axes.get_xaxis_transform(), color="#444444", fontsize=10)
    else:
        axes.text(0.99, value, text, transform=axes.get_yaxis_transform(), color="#444444", fontsize=10, ha="right",
                  va="bottom")  # fmt: skip


def _legend(axes: Any) -> None:
    """Below the plot, where it covers nothing."""
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, frameon=False)


def _attainment(axes: Any, comparison: Comparison, styles: Styles) -> None:
    for result in comparison.arms:
        trials = sorted(result.trials, key=lambda t: t.rate)
        shares = [100 * t.attainment for t in trials]
        # The Wilson interval does not always hold the share itself, by a rounding error.
        errors = [
            [max(0.0, share - 100 * t.interval[0]) for t, share in zip(trials, shares, strict=True)],
            [max(0.0, 100 * t.interval[1] - share) for t, share in zip(trials, shares, strict=True)],
        ]
        places = [styles.dodged(result.name, t.rate) for t in trials]
        axes.errorbar(places, shares, errors, capsize=3, label=result.name, **styles[result.name])
    axes.set(title="Requests within the limits", xlabel="offered, requests/s", ylabel="% of offered requests")
    axes.set_ylim(-3, 106)
    _limit(axes, 90, "target: 90 %")
    _legend(axes)


def _by_rate(result: ArmResult, key: str) -> tuple[list[float], list[float]]:
    """Rates, and a number over all runs at each."""
    found = {rate: result.at(rate)[key] for rate in sorted({run.rate for run in result.runs})}
    return [rate for rate, value in found.items() if value is not None], [v for v in found.values() if v is not None]


def _latency(name: str, title: str) -> Draw:
    def draw(axes: Any, comparison: Comparison, styles: Styles) -> None:
        for result in comparison.arms:
            for key, line in ((f"median_{name}_ms", "-"), (f"p99_{name}_ms", "--")):
                rates, values = _by_rate(result, key)
                label = result.name if line == "-" else None
                axes.plot(rates, values, line, label=label, **styles[result.name])
        limit = comparison.slo.ttft_ms if name == "ttft" else comparison.slo.tpot_ms
        if limit is not None:
            _limit(axes, limit, f"limit: {limit:g} ms")
        axes.set(title=f"{title}: median, and p99 (dashed)", xlabel="offered, requests/s", ylabel=f"{title}, ms")
        _log_axis(axes.yaxis, axes.set_yscale)
        _legend(axes)

    return draw


def _itl(axes: Any, comparison: Comparison, styles: Styles) -> None:
    rate = comparison.shared_rate
    for result in comparison.arms:
        gaps = np.sort([g * 1e3 for run in result.runs if run.rate == rate for r in run.records for g in r.itls])
        if len(gaps):
            style = styles[result.name]
            axes.plot(gaps, np.linspace(0, 100, len(gaps)), label=result.name, color=style["color"])
    axes.set(title=f"Gaps between tokens, all at {rate:.2f} requests/s", xlabel="ITL, ms", ylabel="% of gaps")
    # Tokens of one message have no gap, which a logarithmic axis can't show.
    axes.set_xlim(left=max(1.0, axes.get_xlim()[0]))
    _log_axis(axes.xaxis, axes.set_xscale)
    _legend(axes)


def _timeline(axes: Any, comparison: Comparison, styles: Styles) -> None:
    for result in comparison.arms:
        if result.timeline:
            times, gaps = zip(*result.timeline, strict=True)
            style = styles[result.name] | {"markersize": 4, "alpha": 0.7}
            axes.plot(times, gaps, linestyle="", label=result.name, **style)
    axes.set(title="Four streams; then a prompt of 1,500 tokens", xlabel="time, s", ylabel="gap between tokens, ms")
    _log_axis(axes.yaxis, axes.set_yscale)
    _limit(axes, 1.0, "the prompt arrives", is_upright=True)
    _legend(axes)


def _idle(axes: Any, comparison: Comparison, styles: Styles) -> None:
    rate = comparison.shared_rate
    assert rate is not None
    place, ticks, names = 0.0, [], []
    for result in comparison.arms:
        idle = result.idle_at(rate)
        for number, (name, share) in enumerate(sorted(idle.items())):
            label = result.name if number == 0 else None
            axes.barh(place, 100 * share, color=styles[result.name]["color"], label=label)
            ticks.append(place)
            names.append(name)
            place += 1
        place += 0.6
    axes.set_yticks(ticks, names)
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set(title=f"Idle workers, all at {rate:.2f} requests/s", xlabel="% of the time in no step")
    _legend(axes)
