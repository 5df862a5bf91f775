"""`kvferry bench` with real clusters: its numbers are the server's, and a comparison is one command."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


def kvferry(*arguments, timeout=250):
    return subprocess.run(
        [sys.executable, "-m", "kvferry", *map(str, arguments)], capture_output=True, text=True, timeout=timeout
    )


def counted(cluster):
    values = cluster.metrics("router")
    ended = {k.split(",")[1]: v for k, v in values.items() if k.startswith("kvferry_requests_total,")}
    return ended, values["kvferry_output_tokens_total"], values["kvferry_prompt_tokens_total"]


@pytest.mark.slow
def test_the_clients_numbers_are_the_servers(cluster, tmp_path):
    """Casebook C170: requests, errors and tokens; some requests can't be served."""
    before = counted(cluster)
    output = tmp_path / "run.json"
    done = kvferry(
        "bench", "run", "--address", cluster.address, "--num-requests", 24, "--rate", 6, "--prompt-tokens", 380,
        "--output-tokens", 12, "--spread", 0.5, "--warmup", 0, "--output", output,
        "--slo-ttft-ms", 60000, "--slo-tpot-ms", 60000,
    )  # fmt: skip
    after = counted(cluster)
    summary = json.loads(output.read_text())
    grown = {status: after[0][status] - before[0].get(status, 0) for status in after[0]}
    grown = {status: number for status, number in grown.items() if number}
    assert summary["statuses"] == grown
    assert summary["statuses"]["INVALID_ARGUMENT"] >= 1, "prompts longer than the model's limit were among them"
    assert summary["total_output_tokens"] == pytest.approx(after[1] - before[1], rel=0.01)
    assert summary["total_input_tokens"] == pytest.approx(after[2] - before[2], rel=0.01)
    assert summary["total_kv_bytes"] > 0
    assert summary["slo_attainment"] == pytest.approx(summary["completed"] / summary["offered"])
    assert done.returncode == 1, "some failed"
    assert "INVALID_ARGUMENT" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workload", "sharegpt"], "give --trace"),
        (["--workload", "azure", "--trace", "/nowhere.csv"], "/nowhere.csv"),
        (["--rate", "0"], "--rate is 0.0"),
        (["--arrivals", "trace"], "has no times of its own"),
        (["--arrivals", "closed", "--concurrency", "0"], "--concurrency is 0"),
    ],
)
def test_settings_that_make_no_sense_are_said_in_words(arguments, words, cluster):
    done = kvferry("bench", "run", "--address", cluster.address, "--num-requests", 1, *arguments)
    assert done.returncode == 2
    assert words in done.stderr


def test_nothing_to_measure_is_an_error(tmp_path):
    """Casebook C163: all failing."""
    output = tmp_path / "run.json"
    done = kvferry("bench", "run", "--address", "127.0.0.1:9", "--num-requests", 2, "--rate", 50, "--output", output,
                   "--timeout", 2, "--warmup", 0)  # fmt: skip
    assert done.returncode == 2
    assert json.loads(output.read_text())["mean_ttft_ms"] is None


@pytest.mark.parametrize("arrivals", ["closed", "ramp", "gamma", "trace"])
def test_every_kind_of_arrival_runs(arrivals, cluster):
    workload = ["--workload", "azure", "--scale", "0.1", "--speed", "20"] if arrivals == "trace" else []
    done = kvferry(
        "bench", "run", "--address", cluster.address, "--arrivals", arrivals, "--num-requests", 6, "--rate", 20,
        "--prompt-tokens", 20, "--output-tokens", 3, "--warmup", 1, *workload,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout


@pytest.mark.slow
def test_a_comparison_is_one_command(tiny_model, tmp_path):
    """Short: the numbers mean nothing, the machinery is whole. Arms are matched, outputs equal, KV moved."""
    done = kvferry(
        "bench", "compare", "--model", tiny_model("llama"), "--loads", "mixed", "--seconds", 1, "--trials", 2,
        "--repeats", 1, "--token-budgets", 128, "--first-rate", 4, "--pages-per-worker", 300, "--max-model-len", 512,
        "--dtype", "float32", "--output", tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    assert "equal tokens on all arms: 100% of the probes" in done.stdout
    [content] = json.loads((tmp_path / "report.json").read_text())
    assert content["kv_bytes_moved"]["1 prefill + 1 decode"] > 0
    assert content["kv_bytes_moved"]["2 colocated, budget 128"] == 0
    assert [arm["name"] for arm in content["arms"]] == ["2 colocated, budget 128", "1 prefill + 1 decode"]
    assert "Two tiers against one" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_a_map_is_one_command(tiny_model, tmp_path):
    done = kvferry(
        "bench", "map", "--model", tiny_model("llama"), "--prompt-tokens", 40, "--output-tokens", 4, "--seconds", 0.5,
        "--trials", 2, "--token-budgets", 128, "--pages-per-worker", 300, "--max-model-len", 512, "--output", tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    [cell] = json.loads((tmp_path / "map.json").read_text())
    assert (cell["prompt_tokens"], cell["output_tokens"]) == (40, 4)
    assert cell["slo"]["ttft_ms"] > 0


def test_unknown_loads_and_splits_are_named():
    assert "'nope'; there are long-prompts" in kvferry("bench", "compare", "--loads", "nope").stderr
    assert "--splits has '1-1'" in kvferry("bench", "compare", "--splits", "1-1").stderr
    assert "cores: 2 colocated" in kvferry("bench", "compare", "--splits", "2:1").stderr
