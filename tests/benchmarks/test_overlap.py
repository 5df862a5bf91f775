"""The benchmark of steps that are launched ahead: its device is busy for as long as it says."""

import pytest

from benchmarks.micro.bench_overlap import PAGE_SIZE, VOCAB_SIZE, StandIn, seconds_per_step
from engine.config import EngineConfig
from engine.kv_cache import KvCache
from engine.loader import load_model
from engine.model_runner import ModelRunner
from engine.sequence import num_pages_for

STEP = 0.004


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_a_step_takes_no_less_than_the_device(overlap):
    device = StandIn(STEP, is_waited_for=overlap == "off")
    assert seconds_per_step(device, overlap, 3, 20, VOCAB_SIZE, 24) > 0.97 * STEP


def test_the_loop_runs_around_a_real_model(tiny_model):
    """As `make gpu-check` has it do on a GPU."""
    loaded = load_model(EngineConfig(model=str(tiny_model("llama")), dtype="float32", device="cpu"))
    num_steps, batch, context = 16, 3, 20
    cache = KvCache(batch * num_pages_for(context + num_steps, PAGE_SIZE), PAGE_SIZE, loaded.kv_shape, loaded.dtype)
    runner = ModelRunner(loaded, cache)
    for overlap in ("on", "off"):
        assert seconds_per_step(runner, overlap, batch, context, loaded.vocab_size, num_steps) > 0
