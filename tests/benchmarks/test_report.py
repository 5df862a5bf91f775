"""Words, plots and files of a comparison, from numbers made by hand."""

from __future__ import annotations

import json

import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_hex

from benchmarks import plots
from benchmarks.breakeven import Cell, write_map
from benchmarks.compare import ArmResult, Comparison, Run
from benchmarks.goodput import Trial
from benchmarks.metrics import Slo, summarise
from benchmarks.plots import Styles
from benchmarks.records import RequestRecord
from benchmarks.report import write_report
from benchmarks.verdict import ratio, verdict

SLO = Slo(1000, 100)


def make_arm(name, kind, interval):
    def records():
        return [
            RequestRecord(0.0, 0.0, [0.2, 0.25, 0.31], 0.31, "OK", prompt_tokens=9, output_tokens=3, kv_bytes=100)
            for _ in range(10)
        ]

    runs = []
    for rate in (1.0, 2.0):
        came = records()
        runs.append(Run(name, rate, 0, summarise(came, 10 / rate, SLO), {"worker-0": 0.25}, came))
    trials = [Trial(1.0, 10, 10), Trial(2.0, 8, 10)]
    goodput = sum(interval) / 2
    timeline = [(0.5, 30.0), (1.2, 400.0)]
    return ArmResult(name, kind, goodput, tuple(interval), trials, runs, bool(goodput), timeline=timeline)


MACHINE = {
    "processor": "a <fast> one", "cores": 2, "python": "3.11", "versions": {"torch": "2"}, "date": "today",
    "command": "kvferry bench compare", "served": {"model": "tiny", "pages": "2000 of 16 tokens"},
}  # fmt: skip
SETTINGS = {"repeats": 3, "seconds": 8.0, "trials": 4, "seed": 5, "salt": 77}


def make_comparison(colocated=(1.0, 1.1), split=(2.0, 2.1), arms=None, **options):
    arms = arms or [
        make_arm("2 colocated, budget 128", "colocated", [c / 2 for c in colocated]),
        make_arm("2 colocated, budget 512", "colocated", colocated),
        make_arm("1 prefill + 1 decode", "two-tier", split),
    ]
    moved = {arm.name: 2000 if arm.kind == "two-tier" else 0 for arm in arms}
    options = {"shared_rate": 1.0} | options
    return Comparison("load", "long & short prompts", SLO, arms, 1.0, moved, dict(MACHINE), SETTINGS, **options)


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
    assert "the goodput of 1 prefill + 1 decode is a lower bound" in verdict(comparison)[-1]


def test_the_report_is_one_page_with_everything_in_it(tmp_path):
    page = write_report([make_comparison()], tmp_path)
    html = page.read_text()
    assert "data:image/png;base64," in html
    assert "http://" not in html.replace("http://www.w3.org", "")
    assert "long &amp; short prompts" in html
    assert "a &lt;fast&gt; one" in html
    for words in ("kvferry bench compare", "tiny", "2000 of 16 tokens", "5, 77", "60 measured", "worker-0 75%"):
        assert words in html
    [content] = json.loads((tmp_path / "report.json").read_text())
    assert content["goodput_ratio"] == pytest.approx(2.05 / 1.05)
    pictures = sorted(path.name for path in tmp_path.glob("*.png"))
    assert pictures == [f"load-{n}.png" for n in ("attainment", "idle", "itl", "timeline", "tpot", "ttft")]
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in pictures)


def test_latencies_are_compared_at_one_rate_for_all():
    text = " ".join(verdict(make_comparison()))
    assert "At 1.00 requests/s, which every arm attains, p50 and p99 in ms: 2 colocated, budget 128: TTFT 200" in text
    none = make_comparison(shared_rate=None, colocated=(0.0, 0.0))
    assert "Latencies are not compared: 2 colocated, budget 128 and 2 colocated, budget 512 attained no" in " ".join(
        verdict(none)
    )


def test_numbers_of_several_runs_count_the_time_of_these_runs_only():
    """Between them others are under load."""
    arm = make_arm("a", "colocated", (1.0, 1.1))
    again = [
        RequestRecord(100.0, 100.0, [100.2, 100.25, 100.31], 100.31, "OK", prompt_tokens=9, output_tokens=3)
        for _ in range(10)
    ]
    alone = arm.at(1.0)
    arm.runs.append(Run("a", 1.0, 1, summarise(again, 10.0, SLO), {}, again))
    together = arm.at(1.0)
    assert together["offered"] == 20
    assert together["request_throughput"] == pytest.approx(alone["request_throughput"])


def test_servers_are_compared_without_a_word_of_tiers(tmp_path):
    arms = [make_arm("ours", "server", (2.0, 2.1)), make_arm("theirs", "server", (1.0, 1.1))]
    comparison = make_comparison(arms=arms)
    text = " ".join(verdict(comparison))
    assert "goodput, requests/s: ours 2.05, theirs 1.05" in text
    assert "ours wins: 1.95 times the goodput of theirs" in text
    assert "Servers compared" in write_report([comparison], tmp_path).read_text()
    alone = make_comparison(arms=arms[:1])
    assert "wins" not in " ".join(verdict(alone))
    write_report([alone], tmp_path)


def test_an_arm_looks_the_same_in_all_plots():
    """Its colour and marker go by its place among all arms, whatever a plot shows of them."""
    styles = Styles([arm.name for arm in make_comparison().arms])
    seen = [tuple(styles[arm.name].values()) for arm in make_comparison().arms]
    assert len(set(seen)) == 3
    places = [styles.dodged(arm.name, 2.0) for arm in make_comparison().arms]
    assert len(set(places)) == 3
    assert places[1] == 2.0
    for draw in (plots._attainment, plots._latency("ttft", "TTFT"), plots._itl, plots._timeline, plots._idle):
        figure, axes = plt.subplots()
        draw(axes, make_comparison(), styles)
        handles, labels = axes.get_legend_handles_labels()
        shown = {}
        for handle, label in zip(handles, labels, strict=True):
            artist = handle[0] if isinstance(handle, tuple) else handle
            colour = artist.get_color() if hasattr(artist, "get_color") else artist.get_facecolor()
            shown[label] = to_hex(colour)
        plt.close(figure)
        assert shown == {name: styles[name]["color"].lower() for name in shown}
        assert len(shown) == 3
        assert "," in axes.get_xlabel() or "%" in axes.get_xlabel(), "an axis without a unit"


def test_a_generator_that_was_the_limit_is_told():
    comparison = make_comparison()
    comparison.arms[0].runs[0].generator_was_limit, comparison.arms[0].runs[0].generator_lag_ms = True, 41.0
    assert "The load generator was the limit in 1 runs: it looked up to 41 ms late" in " ".join(verdict(comparison))


def test_a_map_shows_cells_of_both_kinds(tmp_path):
    cells = [Cell(64, 8, SLO, 2.0, 1.0, 0.5), Cell(64, 32, SLO, 1.0, 2.0, 2.0), Cell(256, 8, SLO, 0.0, 1.0, None)]
    assert write_map(cells, tmp_path).read_bytes().startswith(b"\x89PNG")
    assert [c["goodput_ratio"] for c in json.loads((tmp_path / "map.json").read_text())] == [0.5, 2.0, None]
