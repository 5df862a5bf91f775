"""A comparison as files: one self-contained HTML page, PNG plots, JSON."""

from __future__ import annotations

import base64
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jinja2

from benchmarks.compare import Comparison
from benchmarks.metrics import wilson_interval
from benchmarks.plots import draw_all
from benchmarks.verdict import ratio, verdict


def write_report(comparisons: list[Comparison], folder: Path) -> Path:
    """Writes everything into a folder. Returns the page."""
    folder.mkdir(parents=True, exist_ok=True)
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
                "rows": run_rows(comparison),
            }
        )
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
    )
    page = folder / "report.html"
    template = environment.get_template("report.html.j2")
    page.write_text(template.render(comparisons=items, machine=comparisons[0].machine))
    (folder / "report.json").write_text(json.dumps([_as_json(c) for c in comparisons], indent=1, allow_nan=False))
    return page


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
            rows.append([arm.name, f"{run.rate:.2f}", share, f"{low:.0%} to {high:.0%}", *latencies,
                         str(numbers["failed"])])  # fmt: skip
    return rows


def _as_json(comparison: Comparison) -> dict[str, Any]:
    result = asdict(comparison)
    for arm in result["arms"]:
        for run in arm["runs"]:
            # Hundreds of thousands of numbers; the distribution is in the summary.
            del run["itls_ms"]
    result["goodput_ratio"] = ratio(comparison)
    result["verdict"] = verdict(comparison)
    return result
