"""Settings of a cluster: declared once, checked before anything starts, told to its processes as flags."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
import tyro

from colocated_service.config import ColocatedConfig
from decode_service.config import DecodeConfig
from engine.config import EngineConfig
from local_cluster.config import ClusterConfig, defaults_of
from local_cluster.flags import flags_of
from prefill_service.config import PrefillConfig
from router.config import RouterConfig
from rpc.config import ProcessConfig


@dataclass(frozen=True)
class Inner:
    cache: bool = True
    shown: bool = False
    folder: Path | None = None


@dataclass(frozen=True)
class Outer:
    name: str = ""
    limit: int | None = 4
    pages: int | Literal["auto"] = "auto"
    rate: float = 1.0
    sizes: tuple[int, ...] = (1, 2)
    inner: Inner = field(default_factory=Inner)


def read_back(flags, kind):
    return tyro.cli(kind, args=flags, config=(tyro.conf.OmitArgPrefixes,))


def test_only_what_differs_becomes_a_flag():
    assert flags_of(Outer(), Outer()) == []
    config = Outer("-x y", None, 12, -1e-05, (), Inner(cache=False, shown=True, folder=Path("/tmp/a b")))
    flags = ["--name=-x y", "--limit=None", "--pages=12", "--rate=-1e-05", "--sizes", "--no-cache", "--shown"]
    assert flags_of(config, Outer()) == [*flags, "--folder=/tmp/a b"]
    assert flags_of(Outer(sizes=(3,)), Outer()) == ["--sizes", "3"]
    assert read_back(flags_of(config, Outer()), Outer) == config


def test_what_no_flag_can_tell_is_refused():
    @dataclass(frozen=True)
    class Odd:
        table: dict = field(default_factory=dict)

    with pytest.raises(TypeError, match=r"table is .*, which no flag can express"):
        flags_of(Odd({1: 2}), Odd())


@pytest.mark.parametrize(
    "config",
    [
        PrefillConfig(EngineConfig("m"), worker_id="prefill-0"),
        PrefillConfig(
            EngineConfig("m", "float32", num_pages=7, cuda_graph_sizes=(), threads=3, memory_fraction=0.85 / 3),
            ProcessConfig(port=7001, cpus="0,2-3", ready_file=Path("a/b.json"), log_level="warning", lifeline_fd=5),
            prompt_order="bounded_slowdown",
            prefix_cache=False,
        ),
        DecodeConfig(
            EngineConfig("m", max_model_len=99), decode_admission="full", overlap="off", quarantine_timeout=0.5,
            require_rdma=True,
        ),
        ColocatedConfig(EngineConfig("m", device="cuda:1"), step_policy="prefill_first", token_budget=8),
        RouterConfig("m", ("a:1", "b:2"), ("c:3",), http_port=8000, max_queue_seconds=2.5, http_tls=False),
    ],
)  # fmt: skip
def test_every_process_reads_its_settings_back(config):
    assert read_back(flags_of(config, defaults_of(config)), type(config)) == config


def test_a_cluster_hands_its_settings_to_its_processes():
    config = ClusterConfig(
        prefill=1, decode=1, colocated=1, dtype="float32", page_size=8, num_pages=50, max_num_sequences=9,
        token_budget=40,
        prompt_order="bounded_slowdown", step_policy="prefill_first", prefix_cache=False, decode_admission="full",
        overlap="off", drain_seconds=3.0, worker_silence_seconds=4.0, port=0,
    )  # fmt: skip
    engine, process = config.engine(), ProcessConfig()
    common = {"engine": engine, "process": process, "worker_id": "w", "drain_seconds": 3.0, "max_num_sequences": 9}
    prompts = {"token_budget": 40, "prompt_order": "bounded_slowdown", "prefix_cache": False}
    assert engine == EngineConfig(config.model, "float32", page_size=8, num_pages=50)
    assert config.worker("prefill", engine, process, "w") == PrefillConfig(**common, **prompts)
    assert config.worker("decode", engine, process, "w") == DecodeConfig(
        **common, decode_admission="full", overlap="off"
    )
    assert config.worker("colocated", engine, process, "w") == ColocatedConfig(
        **common, **prompts, step_policy="prefill_first", overlap="off"
    )
    router = config.router(process, {"prefill": ("a:1",)})
    assert (router.prefill, router.drain_seconds, router.worker_silence_seconds) == (("a:1",), 3.0, 4.0)


def test_no_default_of_a_process_is_another_in_a_cluster():
    config, process = ClusterConfig(prefill=1, decode=1, colocated=1), ProcessConfig()
    for tier in ("prefill", "decode", "colocated"):
        worker = config.worker(tier, config.engine(), process)
        usual = type(worker)(EngineConfig(config.model))
        assert worker == dataclasses.replace(usual, drain_seconds=config.drain_seconds)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_size": 0}, "--page-size is 0"),
        ({"num_pages": 0}, "--num-pages is 0"),
        ({"token_budget": 0}, "--token-budget is 0"),
        ({"max_model_len": 1}, "--max-model-len is 1"),
        ({"max_num_sequences": 0}, "--max-num-sequences is 0"),
        ({"memory_fraction": 1.5, "prefill": 2}, "--memory-fraction is 1.5"),
        ({"drain_seconds": -1}, "--drain-seconds is -1"),
        ({"worker_silence_seconds": 1}, "--worker-silence-seconds is 1"),
        ({"port": 70000}, "--port is 70000"),
        ({"http_port": -1}, "--http-port is -1"),
        ({"prefill": 0}, "--prefill is 0; at least 1 worker of each tier is needed"),
        ({"colocated": -1}, "--prefill, --decode and --colocated can't be negative"),
        ({"colocated": 1, "token_budget": 64}, "--token-budget is 64 and --max-num-sequences 64"),
    ],
)
def test_a_wrong_setting_is_told_by_its_flag_before_anything_starts(options, message):
    with pytest.raises(ValueError, match=message):
        ClusterConfig(**options)


def test_a_budget_that_only_colocated_workers_mind():
    assert ClusterConfig(token_budget=64).token_budget == 64
