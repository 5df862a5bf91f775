"""A comparison as files: one self-contained HTML page, PNG plots, JSON."""

from __future__ import annotations

import base64
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jinja2

from benchmarks.compare import ArmResult, Comparison
from benchmarks.metrics import wilson_interval
from benchmarks.plots import draw_all
from benchmarks.verdict import ratio, verdict

ARM_COLUMNS = (
    "arm", "goodput, requests/s", "95 % interval", "TTFT p50, ms", "TTFT p99, ms", "TPOT p50, ms", "TPOT p99, ms",
    "ITL p99, ms", "idle workers", "cached", "KV moved, MB",
)  # fmt: skip


def write_report(comparisons: list[Comparison], folder: Path) -> Path:
    """Writes everything into a folder. Returns the page."""
    folder.mkdir(parents=True, exist_ok=True)
    # Numbers first, so that they are not lost if a plot fails.
    (folder / "report.json").write_text(json.dumps([_as_json(c) for c in comparisons], indent=1, allow_nan=False))
    items = []
    for comparison in comparisons:
        plots = draw_all(comparison)
        for name, data in plots.items():
            (folder / f"{comparison.load}-{name}.png").write_bytes(data)
        items.append(
            {
                "comparison": comparison,
                "verdict": verdict(comparison),
                "plots": {name: base64.b64encode(data).decode() for name, data in plots.items()},
                "arms": [arm_row(arm, comparison) for arm in comparison.arms],
                "rows": run_rows(comparison),
            }
        )
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
    )
    page = folder / "report.html"
    template = environment.get_template("report.html.j2")
    first = comparisons[0]
    page.write_text(
        template.render(
            comparisons=items, machine=first.machine, facts=facts(comparisons), columns=ARM_COLUMNS, described=first
        )
    )
    return page


def facts(comparisons: list[Comparison]) -> dict[str, str]:
    """What the numbers hold for, by name."""
    first = comparisons[0]
    machine, settings, slo = first.machine, first.settings, first.slo
    found = {
        "machine": f"{machine['processor']}, {machine['cores']} cores, Python {machine['python']}",
        "versions": ", ".join(f"{name} {version}" for name, version in machine["versions"].items()),
        "date": machine["date"],
        **{name: str(value) for name, value in machine.get("served", {}).items()},
        "limits": f"TTFT {slo.ttft_ms or 0:g} ms, TPOT {slo.tpot_ms or 0:g} ms, for 90 % of what is offered",
        "runs": f"{settings['repeats']} per rate, {settings['seconds']:g} s each; at most {settings['trials']} rates",
        "seed and salt": f"{settings['seed']}, {settings['salt']}",
        "requests": f"{sum(comparison.num_requests for comparison in comparisons)} measured",
        "command": machine["command"],
    }
    return found


def arm_row(arm: ArmResult, comparison: Comparison) -> list[str]:
    """An arm's goodput, and its numbers at the rate that all attain. In the order of ARM_COLUMNS."""
    rate = comparison.shared_rate
    numbers = arm.at(rate) if rate is not None else {}
    keys = ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms", "p99_itl_ms")
    latencies = ["" if numbers.get(key) is None else f"{numbers[key]:.0f}" for key in keys]
    idle = arm.idle_at(rate) if rate is not None else {}
    cached = numbers.get("cached_share")
    return [
        arm.name,
        f"{'at least ' if arm.is_lower_bound else ''}{arm.goodput:.2f}",
        f"{arm.interval[0]:.2f} to {arm.interval[1]:.2f}",
        *latencies,
        ", ".join(f"{name} {share:.0%}" for name, share in sorted(idle.items())),
        "" if cached is None else f"{cached:.0%}",
        f"{comparison.kv_bytes_moved[arm.name] / 1e6:.0f}",
    ]


def run_rows(comparison: Comparison) -> list[list[str]]:
    """One row per measured run, by arm and rate."""
    rows = []
    for arm in comparison.arms:
        for run in sorted(arm.runs, key=lambda r: r.rate):
            numbers = run.summary
            met = round((numbers["slo_attainment"] or 0.0) * numbers["offered"])
            low, high = wilson_interval(met, numbers["offered"])
            keys = ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms", "p99_itl_ms")
            latencies = ["" if numbers[key] is None else f"{numbers[key]:.0f}" for key in keys]
            share = "" if numbers["slo_attainment"] is None else f"{numbers['slo_attainment']:.0%}"
            left_out = numbers["left_out_of_ttft"], numbers["left_out_of_tpot"]
            rows.append([arm.name, f"{run.rate:.2f}", str(numbers["offered"]), share, f"{low:.0%} to {high:.0%}",
                         *latencies, f"{left_out[0]}, {left_out[1]}", str(numbers["failed"]),
                         f"{run.generator_lag_ms:.0f}"])  # fmt: skip
    return rows


def _as_json(comparison: Comparison) -> dict[str, Any]:
    for arm in comparison.arms:
        for run in arm.runs:
            assert len(run.records) == run.summary["offered"]
    result = asdict(comparison)
    for arm, shown in zip(comparison.arms, result["arms"], strict=True):
        shown["at_shared_rate"] = None if comparison.shared_rate is None else arm.at(comparison.shared_rate)
        for run in shown["runs"]:
            # Hundreds of thousands of numbers; the distribution is in the summary.
            del run["records"]
    result["goodput_ratio"] = ratio(comparison)
    result["verdict"] = verdict(comparison)
    return result
