"""The whole command against servers whose times are known, and what is checked before a run."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.commands import run_command
from benchmarks.config import BenchCommand, CompareCommand, RunCommand
from benchmarks.micro.bench_generator import known_server, measure

KVFERRY = [sys.executable, "-m", "kvferry"]


@pytest.fixture(scope="module")
def known():
    with known_server(ttft_ms=100, itl_ms=10) as url:
        yield url


def bench(*arguments):
    return subprocess.run([*KVFERRY, "bench", *arguments], capture_output=True, text=True, timeout=120)


def test_the_generator_says_what_the_server_did(known):
    point = measure(known, 64, num_tokens=20, rounds=1)
    assert point.summary["completed"] == 64
    late = point.server["p99_ms"] + point.generator.p99_lag_ms + 1
    assert 99 <= point.summary["median_ttft_ms"] <= 100 + 2 * late + 60
    assert point.summary["median_itl_ms"] == pytest.approx(10, abs=late)


def test_servers_that_run_already_are_compared(known, tmp_path):
    done = bench(
        "compare", "--servers", f"one={known}/v1", f"two={known}/v1", "--workload", "fixed", "--prompt-tokens", "20",
        "--output-tokens", "8", "--seconds", "1", "--repeats", "1", "--trials", "2", "--first-rate", "8",
        "--slo-ttft-ms", "400", "--slo-tpot-ms", "40", "--output", str(tmp_path / "out"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "kvferry: own, repeat 1 of 1: one at 8.00/s" in done.stderr
    [content] = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [arm["name"] for arm in content["arms"]] == ["one", "two"]
    assert all(arm["is_lower_bound"] for arm in content["arms"])
    assert all(95 <= arm["at_shared_rate"]["median_ttft_ms"] <= 300 for arm in content["arms"])
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Servers compared" in page
    assert f"one={known}/v1" in page


def test_a_run_against_any_openai_server_tells_salt_and_hit_rate(known, tmp_path):
    output = tmp_path / "deep" / "run.json"
    done = bench(
        "run", "--openai-url", f"{known}/v1", "--num-requests", "6", "--rate", "inf", "--prompt-tokens", "9",
        "--output-tokens", "4", "--warmup", "1", "--output", str(output),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    content = json.loads(output.read_text())
    assert content["request_rate"] == "inf"
    assert isinstance(content["salt"], int)
    assert content["generator_was_limit"] is False
    assert content["cached_share"] == 0
    assert "kvferry: 6 of 6 requests ended" in done.stderr


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (RunCommand(openai_url="http://127.0.0.1:9/v1", output=Path("/proc/none/x.json")), "--output"),
        (RunCommand(rate=math.nan), "--rate is nan"),
        (RunCommand(workload="azure", trace=Path("/no/such.csv")), "/no/such.csv"),
        (CompareCommand(servers=("nameless",)), "must look like NAME=host:port"),
        (CompareCommand(servers=("a=127.0.0.1:9",)), "--servers a=127.0.0.1:9"),
        (CompareCommand(servers=("a=http://127.0.0.1:9/v1",)), "a first request failed"),
        (CompareCommand(workload="azure", trace=Path("/no/such.csv")), "/no/such.csv"),
        (CompareCommand(loads=("heavy",)), "--loads has 'heavy'"),
        (CompareCommand(output=Path("/proc/none")), "--output"),
    ],
)
def test_what_can_not_be_measured_is_told_before_anything_runs(command, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_command(BenchCommand(command)) == 2
    assert words in capsys.readouterr().err.splitlines()[-1]
