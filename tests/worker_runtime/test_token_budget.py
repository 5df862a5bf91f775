"""The token budget that a worker chooses by what its steps take."""

import math

import pytest
import torch

from engine.config import EngineConfig
from engine.kv_cache import KvCache
from engine.loader import load_model
from engine.model_runner import ModelRunner
from worker_runtime import token_budget
from worker_runtime.token_budget import (
    LARGEST,
    SMALLEST,
    STEP_SECONDS,
    budget_beside_decodes,
    budget_for_prompts,
    measured_token_budget,
)


def steps(weights_ms, token_ms, quadratic_ms=0.0):
    """Step times of a machine: weights are read or tokens are computed, whichever takes longer, then attention."""
    return lambda size: (max(weights_ms, token_ms * size) + quadratic_ms * size**2) / 1e3


@pytest.mark.parametrize(
    ("machine", "longest", "expected"),
    [
        (steps(17, 0.31), 8192, 128),  # a small model on one core
        (steps(10, 0.2), 8192, 256),  # on two
        (steps(1000, 10), 8192, 256),  # a large model on a CPU: three of its decode steps
        (steps(200, 80), 8192, SMALLEST),  # nothing is short enough
        (steps(5, 0.027), 8192, 2048),  # an 8B model on a GPU
        (steps(0.1, 0.001), 8192, LARGEST),  # a tiny model
        (steps(0.1, 0.001), 300, 256),  # whose sequences are short
        (steps(0.1, 0.001), 30, SMALLEST),
    ],
)
def test_a_chunk_beside_decodes_takes_little_time(machine, longest, expected):
    assert budget_beside_decodes(machine, longest) == expected
    if expected > SMALLEST:
        assert machine(expected) <= max(STEP_SECONDS, 3 * machine(1))


@pytest.mark.parametrize(
    ("machine", "longest", "expected"),
    [
        (steps(17, 0.31), 8192, 64),  # tokens cost more than weights already
        (steps(17, 0.1, 1e-5), 8192, 256),
        (steps(5, 0.027), 8192, 256),
        (steps(60, 0.03), 8192, 2048),  # weights take long to read
        (steps(1, 0.0), 1000, 512),
        (steps(1, 0.1), 30, SMALLEST),
    ],
)
def test_a_chunk_of_prompts_has_nearly_the_best_rate(machine, longest, expected):
    assert budget_for_prompts(machine, longest) == expected
    sizes = [SMALLEST << n for n in range(8) if SMALLEST << n <= longest]
    best = max((size / machine(size) for size in sizes), default=0.0)
    assert not sizes or expected / machine(expected) >= 0.85 * best


def test_larger_chunks_are_not_measured_without_need():
    asked = []

    def seconds(size):
        asked.append(size)
        return 0.001 * size if size < 600 else math.inf

    assert budget_for_prompts(seconds, 8192) == 64
    assert budget_beside_decodes(seconds, 8192) == SMALLEST
    assert max(asked) <= 128


@pytest.mark.parametrize("fitting", [0, 64, 100, 300])
def test_a_chunk_that_does_not_fit_into_memory_is_not_chosen(fitting):
    def seconds(size):
        return 0.001 if size <= fitting else math.inf

    largest = max([SMALLEST, *(size for size in (64, 128, 256) if size <= fitting)])
    assert budget_for_prompts(seconds, 8192) == largest
    if fitting:
        assert budget_beside_decodes(seconds, 8192) == largest


def test_steps_out_of_memory_and_slow_steps_end_the_measuring(tiny_model, monkeypatch):
    config = EngineConfig(model=str(tiny_model("llama")), device="cpu", max_model_len=300)
    loaded = load_model(config)
    sizes = []

    def run(runner, batch):
        sizes.append(batch[0].num_new_tokens)
        if sizes[-1] > 64:
            raise torch.OutOfMemoryError

    monkeypatch.setattr(ModelRunner, "run", run)
    monkeypatch.setattr(token_budget.time, "perf_counter", lambda: len(sizes) * 10.0)
    assert measured_token_budget(loaded, config, is_mixed=False, num_decodes=500) == 64
    assert sizes == [64, 128]


def test_no_more_pages_are_used_than_the_pool_is_to_have(tiny_model, monkeypatch):
    config = EngineConfig(model=str(tiny_model("llama")), device="cpu", num_pages=10)
    loaded, made = load_model(config), []
    monkeypatch.setattr(token_budget, "KvCache", lambda *given: made.append(given[0]) or KvCache(*given))
    assert measured_token_budget(loaded, config, is_mixed=False, num_decodes=0) <= 160
    assert made == [10]


def test_it_is_measured_with_the_model_and_leaves_room_beside_decodes(tiny_model):
    config = EngineConfig(model=str(tiny_model("llama")), device="cpu", max_model_len=300)
    loaded = load_model(config)
    assert measured_token_budget(loaded, config, is_mixed=False, num_decodes=500) <= 256
    assert measured_token_budget(loaded, config, is_mixed=True, num_decodes=500) >= 500 + SMALLEST
