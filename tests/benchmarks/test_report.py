"""Words, plots and files of a comparison, from numbers made by hand."""

from __future__ import annotations

import json

import pytest

from benchmarks.breakeven import Cell, write_map
from benchmarks.compare import ArmResult, Comparison, Run
from benchmarks.goodput import Trial
from benchmarks.metrics import Slo, summarise
from benchmarks.records import RequestRecord
from benchmarks.report import write_report
from benchmarks.verdict import ratio, verdict

SLO = Slo(1000, 100)


def make_arm(name, is_two_tier, interval):
    records = [
        RequestRecord(0.0, 0.0, [0.2, 0.25, 0.31], 0.31, "OK", prompt_tokens=9, output_tokens=3, kv_bytes=100)
        for _ in range(10)
    ]
    runs = [Run(name, rate, 0, summarise(records, 10 / rate, SLO), {"worker-0": 0.25}, [50.0, 60.0])
            for rate in (1.0, 2.0)]  # fmt: skip
    trials = [Trial(1.0, 10, 10), Trial(2.0, 8, 10)]
    goodput = sum(interval) / 2
    return ArmResult(name, is_two_tier, goodput, tuple(interval), trials, runs, timeline=[(0.5, 30.0), (1.2, 400.0)])


def make_comparison(colocated=(1.0, 1.1), split=(2.0, 2.1), **options):
    arms = [
        make_arm("2 colocated, budget 128", False, [c / 2 for c in colocated]),
        make_arm("2 colocated, budget 512", False, colocated),
        make_arm("1 prefill + 1 decode", True, split),
    ]
    moved = {arm.name: 2000 if arm.is_two_tier else 0 for arm in arms}
    machine = {"processor": "a <fast> one", "cores": 2, "python": "3.11", "versions": {"torch": "2"}, "date": "today"}
    return Comparison("load", "long & short prompts", SLO, arms, 1.0, moved, machine, {}, **options)


def test_the_best_baseline_counts_and_the_winner_is_named_with_its_ratio():
    comparison = make_comparison()
    assert ratio(comparison) == pytest.approx(2.05 / 1.05)
    text = " ".join(verdict(comparison))
    assert "1 prefill + 1 decode wins: 1 prefill + 1 decode 2.05 requests/s, 2 colocated, budget 512 1.05" in text
    assert "on the side where splitting pays" in text
    assert "worker-0 75%" in text


def test_a_win_of_the_baseline_is_said_as_plainly():
    text = " ".join(verdict(make_comparison(colocated=(2.0, 2.1), split=(1.0, 1.1))))
    assert "2 colocated, budget 512 wins" in text
    assert "on the side where it does not" in text


@pytest.mark.parametrize("split", [(1.0, 1.4), (1.06, 1.07)])
def test_noise_is_not_a_win(split):
    text = " ".join(verdict(make_comparison(split=split)))
    assert "neither wins" in text
    assert "does not decide" in text


def test_a_baseline_that_met_nothing_is_no_division_by_zero():
    comparison = make_comparison(colocated=(0.0, 0.0))
    assert ratio(comparison) is None
    assert "at no measured rate" in verdict(comparison)[0]


def test_a_lower_bound_is_called_one():
    comparison = make_comparison()
    comparison.best_two_tier.is_lower_bound = True
    assert "lower bound" in verdict(comparison)[-1]


def test_the_report_is_one_page_with_everything_in_it(tmp_path):
    page = write_report([make_comparison()], tmp_path)
    html = page.read_text()
    assert "data:image/png;base64," in html
    assert "http://" not in html.replace("http://www.w3.org", "")
    assert "long &amp; short prompts" in html
    assert "a &lt;fast&gt; one" in html
    [content] = json.loads((tmp_path / "report.json").read_text())
    assert content["goodput_ratio"] == pytest.approx(2.05 / 1.05)
    pictures = sorted(path.name for path in tmp_path.glob("*.png"))
    assert pictures == [f"load-{n}.png" for n in ("attainment", "idle", "itl", "timeline", "tpot", "ttft")]
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in pictures)


def test_a_map_shows_cells_of_both_kinds(tmp_path):
    cells = [Cell(64, 8, SLO, 2.0, 1.0, 0.5), Cell(64, 32, SLO, 1.0, 2.0, 2.0), Cell(256, 8, SLO, 0.0, 1.0, None)]
    assert write_map(cells, tmp_path).read_bytes().startswith(b"\x89PNG")
    assert [c["goodput_ratio"] for c in json.loads((tmp_path / "map.json").read_text())] == [0.5, 2.0, None]
