"""The comparison with other servers, without any: its loads, the generator's result files, ratios, sentences."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.metrics import Slo
from benchmarks.peers.__main__ import Options
from benchmarks.peers.environments import needed, what
from benchmarks.peers.generator import Load, Run, command, parse_load, records
from benchmarks.peers.processes import PeerFailed, clean_environment, cpu_seconds, process_group, reason, wait_ready
from benchmarks.peers.results import MEASURES, ArmResult, cells, generator_verdict, ratio, together, unequal_tokens
from benchmarks.peers.servers import ARMS, cluster_config, label

SLO = Slo(2000, 100)
LOAD = Load(4, 3, 1.0)


def make_result(requests=((0.5, (0.05, 0.05)),), duration=2.0, prompt_tokens=4):
    """A detailed result file of `vllm bench serve`. requests: TTFT and gaps; None for a failed one."""
    return {
        "duration": duration,
        "start_times": [10.0 + number for number in range(len(requests))],
        "ttfts": [0.0 if request is None else request[0] for request in requests],
        "itls": [[] if request is None else list(request[1]) for request in requests],
        "input_lens": [prompt_tokens] * len(requests),
        "output_lens": [0 if request is None else 1 + len(request[1]) for request in requests],
        "errors": ["refused" if request is None else "" for request in requests],
    }


def make_run(*requests, duration=2.0, **cores):
    """See `make_result`."""
    result = make_result(requests, duration)
    return Run(records(result), result["duration"], **cores)


def test_a_load_is_read_and_written_alike():
    assert parse_load("512/64@1") == Load(512, 64, 1.0)
    assert str(parse_load("128/128@0.5")) == "128/128@0.5"


@pytest.mark.parametrize("text", ["512", "512/64", "512/64@", "512/64@0", "0/64@1", "512/1@1", "a/b@c", "512/64@-1"])
def test_a_load_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="--loads has"):
        parse_load(text)


def test_options_name_the_baseline_and_the_length_that_all_servers_need():
    assert Options().baseline == "vllm"
    assert Options(arms=("split", "llama-q4")).baseline == "split"
    assert Options(loads=("512/64@1", "128/128@3")).max_model_len == 768
    for wrong in ({"arms": ()}, {"arms": ("split", "split")}, {"rounds": 0}, {"num_prompts": 0}, {"loads": ()}):
        with pytest.raises(ValueError, match="--"):
            Options(**wrong)


def test_every_server_gets_the_same_command_but_for_its_address():
    made = [
        command(Path("vllm"), url, Path("model"), LOAD, 40, 7, SLO, Path("o/r.json"))
        for url in ("http://a", "http://b")
    ]
    assert [one for one, other in zip(*made, strict=True) if one != other] == ["http://a"]
    text = " ".join(made[0])
    for part in ("--seed 7", "--random-input-len 4", "--random-output-len 3", "--request-rate 1", "--num-prompts 40"):
        assert part in text
    assert "--goodput ttft:2000 tpot:100" in text and "--ignore-eos" in text


def test_a_result_file_gives_records():
    first, failed = records(make_result([(0.5, (0.05, 0.15)), None]))
    assert first.ttft == pytest.approx(0.5)
    assert first.itls == pytest.approx([0.05, 0.15])
    assert first.tpot == pytest.approx(0.1)
    assert first.is_ok and first.prompt_tokens == 4 and first.output_tokens == 3
    assert not failed.is_ok and failed.error == "refused" and failed.ttft is None


def test_several_tokens_in_one_message_count_as_the_server_counts_them():
    result = make_result([(0.5, (0.4,))])
    result["output_lens"] = [5]
    [record] = records(result)
    assert record.tpot == pytest.approx(0.1)


def test_a_ratio_is_taken_within_rounds_and_its_interval_over_them():
    equal = ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert equal.value == pytest.approx(2.0) and equal.interval == pytest.approx((2.0, 2.0))
    spread = ratio([1.0, 4.0], [1.0, 1.0])
    assert spread.value == pytest.approx(2.0)
    low, high = spread.interval
    assert low < 1 and high > 4 and low * high == pytest.approx(4.0)  # two rounds say little
    assert str(ratio([1.5], [1.0])) == "x1.50"  # and one says nothing


@pytest.mark.parametrize(
    ("values", "baseline"), [([1.0], [0.0]), ([None, 1.0], [1.0, 1.0]), ([1.0, 1.0], [None, 1.0]), ([], [])]
)
def test_without_a_number_on_both_sides_there_is_no_ratio(values, baseline):
    assert ratio(values, baseline) is None


def test_an_arm_without_goodput_has_a_ratio_and_no_interval():
    nothing = ratio([0.0, 1.0], [1.0, 1.0])
    assert nothing.value == 0.5 and nothing.interval is None


def test_rounds_are_added_up():
    fast, slow = make_run((0.5, (0.05, 0.05)), server_cores=1.0, generator_cores=0.1), make_run((2.5, (0.05, 0.05)))
    result = together([fast, slow], [fast, fast], SLO)
    assert result.summary["offered"] == 2 and result.summary["slo_attainment"] == 0.5
    assert result.summary["request_goodput"] == pytest.approx(0.25)
    assert result.ratios["request_goodput"].value == pytest.approx(0.5)
    assert result.ratios["output_throughput"].value == pytest.approx(1.0)
    assert result.prompt_tokens == 4 and result.output_tokens == 3
    assert result.server_cores == 0.5 and result.generator_cores == 0.1
    row = cells(result)
    assert len(row) == len(MEASURES) + 2 and row[0] == "0.25\nx0.50" and row[-2] == "50%"


def test_failed_requests_are_said_in_the_row():
    result = together([make_run(None)], [make_run((0.5, (0.05, 0.05)))], SLO)
    assert "1 failed" in cells(result)[-2] and cells(result)[1] == "-\n-"


def test_a_server_with_other_tokens_is_named():
    def with_tokens(prompt, output, completed=1) -> ArmResult:
        return ArmResult({"completed": completed}, {}, prompt, output, 0.0, 0.0)

    results = {"good": with_tokens(512, 64), "more": with_tokens(530, 64), "less": with_tokens(512, 63.5)}
    results["none"] = with_tokens(0, 0, completed=0)
    sentences = unequal_tokens(results, Load(512, 64, 1.0))
    assert [sentence.partition(",")[0] for sentence in sentences] == ["more", "less"]


def test_the_verdict_on_the_generator_follows_from_its_lag_and_its_core():
    on_time, late = make_run((0.201, (0.05, 0.051))), make_run((0.2, (0.05, 0.12)))
    assert "was not the limit" in generator_verdict({"l": on_time}, 200, 50, 0.1)[-1]
    assert "may have been the limit" in generator_verdict({"l": on_time}, 200, 50, 0.8)[-1]
    assert "may have been the limit" in generator_verdict({"l": on_time, "m": late}, 200, 50, 0.1)[-1]
    assert "not proven" in generator_verdict({"l": make_run(None)}, 200, 50, 0.1)[-1]


def test_requirements_that_apply_here_are_installed():
    found = needed(
        [
            "regex",
            "torch==2.13.0+cpu",
            "uvicorn[standard]<2,>=1",
            "old; python_version < '3'",
            "pandas; extra == 'bench'",
        ]
    )
    assert found == ["regex", "uvicorn[standard]<2,>=1"]


def test_a_failure_is_one_line():
    assert reason("Collecting x\nERROR: No matching distribution found for x\nnote\n").startswith("ERROR: No matching")
    assert reason("a\nb\n") == "b" and reason("") == "it said nothing"
    assert what(("--quiet", "a==1", "b", "c", "d")) == "a==1, b, c and 1 more"


def test_every_arm_of_ours_caches_no_prefix():
    for arm in ("split", "colocated-each", "colocated"):
        config = cluster_config(arm, 4, 768, Path("logs"))
        assert not config.prefix_cache and not config.decode_prefix_cache
        assert config.num_workers == {"split": 2, "colocated-each": 4, "colocated": 1}[arm]
    assert len({label(arm, 2) for arm in ARMS}) == len(ARMS)


def test_a_peer_does_not_see_our_packages(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "here")
    assert "PYTHONPATH" not in clean_environment({}) and clean_environment({"A": "b"})["A"] == "b"


def test_a_group_ends_with_all_that_it_started(tmp_path):
    """The leader of this one does not end its child, as a server that is killed may not end its workers."""
    child = "import time; time.sleep(60)"
    leader = (
        f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {child!r}]).pid, flush=True); {child}"
    )
    with process_group([sys.executable, "-c", leader], tmp_path / "log", stdout=subprocess.PIPE) as process:
        pid = int(process.stdout.readline())
        assert cpu_seconds([process.pid]) > 0
    assert process.returncode == -signal.SIGTERM
    end = time.monotonic() + 5
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_server_that_ends_before_it_is_ready_says_why(tmp_path):
    log = tmp_path / "peer.log"
    with (
        process_group([sys.executable, "-c", "raise SystemExit('error: no model')"], log) as process,
        pytest.raises(PeerFailed, match=r"peer ended with code 1: error: no model"),
    ):
        wait_ready(process, "http://127.0.0.1:9/health", 20, log)
