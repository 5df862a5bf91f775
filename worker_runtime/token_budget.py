"""How many tokens a worker computes per step, if that is left to it: by what steps take on its machine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from engine.attention.choice import choose_attention
from engine.config import EngineConfig
from engine.kv_cache import KvCache
from engine.loader import LoadedModel
from engine.model_runner import ModelRunner
from engine.sequence import ScheduledSequence, Sequence, num_pages_for

SMALLEST, LARGEST = 64, 8192
STEP_SECONDS = 0.06
"""Beside sequences that decode, a chunk should take no longer: their clients see the gap. With what the decoding
sequences take of a step, it stays below 100 ms, a usual objective for the time per output token."""
DECODE_STEPS = 3
"""A model whose decode step takes long may take as long as so many of them for a chunk."""
LEAST_GAIN = 1.05
"""Chunks of twice the size are of no use if they are not computed at so many times the rate."""
ENOUGH = 0.9
"""The share of the best rate for which a smaller chunk is taken: others wait for it, and its pages leave earlier."""
REPEATS = 4
MEASURING_SECONDS = 0.5
"""A size is not measured again after this time: large models on slow machines take seconds for a chunk."""

Seconds = Callable[[int], float]
"""What a chunk of so many tokens takes; infinity: it does not fit into memory."""


def budget_beside_decodes(seconds: Seconds, longest: int) -> int:
    """For steps in which other sequences get their next token: the largest chunk that takes little time.

    longest: chunk that can be measured, in tokens.
    """
    limit = max(STEP_SECONDS, DECODE_STEPS * seconds(1))
    best = SMALLEST
    for size in _sizes(longest):
        if seconds(size) > limit:
            break
        best = size
    return best


def budget_for_prompts(seconds: Seconds, longest: int) -> int:
    """For steps of nothing but prompts: the smallest chunk that is computed at nearly the best rate."""
    rates: dict[int, float] = {}
    for size in _sizes(longest):
        before = max(rates.values(), default=0.0)
        rates[size] = size / seconds(size)
        if rates[size] < LEAST_GAIN * before:
            break
    best = max(rates.values(), default=0.0)
    return next((size for size, rate in rates.items() if rate >= ENOUGH * best), SMALLEST)


def _sizes(longest: int) -> list[int]:
    return [size for n in range(20) if (size := SMALLEST << n) <= min(longest, LARGEST)]


def measured_token_budget(loaded: LoadedModel, config: EngineConfig, is_mixed: bool, num_decodes: int) -> int:
    """Tokens per step for a loaded model. Takes about a second, or a few chunks of a model that needs longer for one.
    For the engine thread, before the pool is made.

    is_mixed: steps contain up to `num_decodes` tokens of sequences that decode, which count too.
    """
    budget = _measure(loaded, config, budget_beside_decodes if is_mixed else budget_for_prompts)
    if loaded.device.type == "cuda":
        torch.cuda.empty_cache()  # what the steps used counts as free memory for the pool
    return max(budget, num_decodes + SMALLEST) if is_mixed else budget


def _measure(loaded: LoadedModel, config: EngineConfig, choose: Callable[[Seconds, int], int]) -> int:
    longest = min(loaded.max_model_len, LARGEST)
    if config.num_pages != "auto":
        longest = min(longest, config.num_pages * config.page_size)  # the pool's memory is there, more may not be
    num_pages = num_pages_for(longest, config.page_size)
    cache = KvCache(num_pages, config.page_size, loaded.kv_shape, loaded.dtype, loaded.device)
    name = config.attention
    runner = ModelRunner(loaded, cache, None if name == "auto" else choose_attention(loaded, cache, name))
    sequence = Sequence("", [0] * longest, longest, page_table=list(range(cache.num_pages)))

    def seconds(size: int) -> float:
        times: list[float] = []
        while len(times) < REPEATS and sum(times) < MEASURING_SECONDS:
            begin = time.perf_counter()
            try:
                runner.run([ScheduledSequence(sequence, size)])
                runner.settle()
            except torch.OutOfMemoryError:
                return math.inf
            times.append(time.perf_counter() - begin)
        return min(times)

    return choose(seconds, longest)
