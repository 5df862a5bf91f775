"""Peak rates of the machine, measured, and the bounds on a model's step that follow from it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine import huge_pages
from engine.loader import LoadedModel
from engine.sequence import Sequence, num_pages_for

CPU = torch.device("cpu")


@dataclass(frozen=True)
class MachineRates:
    """Peak rates of the machine, measured."""

    matrix_gflops: float
    read_gbs: float


def timed(action: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each of `repeats` runs, after one warm-up run."""
    action()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return times


def typical(action: Callable[[], object], repeats: int) -> float:
    """Median seconds of `repeats` runs, after one warm-up run."""
    return statistics.median(timed(action, repeats))


def finish(device: torch.device) -> None:
    """Waits until a device has computed what was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def matrix_rate(dtype: torch.dtype, device: torch.device = CPU) -> float:
    """GFLOP/s of a large matrix product."""
    size = 2048 if device.type == "cpu" else 8192
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))

    def multiply() -> None:
        torch.nn.functional.linear(left, right)
        finish(device)

    return 2 * size**3 / min(timed(multiply, 8)) / 1e9


def read_rate(device: torch.device = CPU) -> float:
    """GB/s of reading memory once, from arrays far larger than the caches. On a CPU from huge pages, as weights lie."""
    if device.type == "cpu":
        numbers = huge_pages.zeros((64 << 20,), torch.float32).fill_(1.0)  # pages that nobody wrote to are one page
    else:
        numbers = torch.ones(2048 << 20, device=device)

    def read() -> None:
        numbers.sum()
        finish(device)

    return numbers.numel() * 4 / min(timed(read, 8)) / 1e9


def make_sequences(count: int, context: int, page_size: int) -> list[Sequence]:
    """Sequences whose first `context - 1` tokens count as computed, with pages for `context` tokens."""
    pages_each = num_pages_for(context, page_size)
    return [
        Sequence(
            str(i),
            [(i * 31 + t * 7) % 1000 + 10 for t in range(context)],
            context,
            page_table=list(range(i * pages_each, (i + 1) * pages_each)),
            num_computed_tokens=context - 1,
        )
        for i in range(count)
    ]


class Bounds:
    """Lower bounds on a step's time from the model's size and the machine's rates."""

    def __init__(self, loaded: LoadedModel, rates: MachineRates) -> None:
        self._body, self._head = loaded.num_parameters.body, loaded.num_parameters.head
        self._loaded, self._rates = loaded, rates
        self._item = torch.empty((), dtype=loaded.dtype).element_size()

    def seconds(self, num_tokens: int, num_sampled: int, contexts: list[int], attended: int) -> float:
        """At least this long for `num_tokens` new tokens, of which `num_sampled` get logits.

        contexts: tokens of KV read per sequence; attended: (query, key) pairs in all.
        """
        shape = self._loaded.kv_shape
        kv_token_bytes = shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim * self._item
        flops = 2 * (self._body * num_tokens + self._head * num_sampled)
        flops += 4 * self._loaded.num_query_heads * shape.head_dim * attended * shape.num_layers
        weights = self._body + (self._head if num_sampled else 0)
        read = weights * self._item + sum(contexts) * kv_token_bytes
        bound: float = max(flops / self._rates.matrix_gflops, read / self._rates.read_gbs) / 1e9
        return bound
