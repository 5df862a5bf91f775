"""`make bench-engine`: how near the engine comes to what the machine can do.

One run measures the machine's matrix rate and memory read rate, then prefill and decode, and prints each as a
ratio to the bound that those two rates give: the time needed for its floating-point operations or for
reading the weights and the KV once, whichever is longer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

from engine.config import DTypeName, EngineConfig
from engine.kv_cache import KvCache
from engine.loader import LoadedModel, load_model, resolve_dtype, set_threads
from engine.model_runner import ModelRunner
from engine.model_store import DEFAULT_MODEL, resolve_model
from engine.sequence import ScheduledSequence, Sequence, num_pages_for

CHUNKS = (128, 512, 2048)
BATCHES = (1, 8, 32)
CONTEXTS = (256, 1024)


@dataclass(frozen=True)
class MachineRates:
    """What the machine can do at best, measured."""

    matrix_gflops: float
    read_gbs: float


def fastest(action: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of `repeats` runs, after one that does not count."""
    action()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)


def typical(action: Callable[[], object], repeats: int) -> float:
    """Median seconds of `repeats` runs, after one that does not count."""
    action()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def matrix_rate(dtype: torch.dtype) -> float:
    """GFLOP/s of a large matrix product."""
    size = 2048
    left, right = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    return 2 * size**3 / fastest(lambda: torch.nn.functional.linear(left, right), 8) / 1e9


def read_rate() -> float:
    """GB/s of reading memory once, from arrays far larger than the caches."""
    numbers = torch.ones(64 * 1024 * 1024)
    return numbers.numel() * 4 / fastest(numbers.sum, 8) / 1e9


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


def main(
    model: str = DEFAULT_MODEL,
    dtype: DTypeName = "auto",
    threads: Annotated[int | None, tyro.conf.arg(help="unset: one per usable core")] = None,
    page_size: int = 16,
    repeats: int = 5,
) -> None:
    """Measures the engine against the machine."""
    console = Console()
    num_threads = set_threads(threads)
    folder = resolve_model(model)
    torch_dtype = resolve_dtype(dtype)
    rates = MachineRates(matrix_rate(torch_dtype), read_rate())
    both = {str(t).removeprefix("torch."): matrix_rate(t) for t in (torch.float32, torch.bfloat16)}
    loaded = load_model(EngineConfig(model=str(folder), dtype=dtype))
    num_pages = max(BATCHES) * num_pages_for(max(CONTEXTS), page_size)
    cache = KvCache(num_pages, page_size, loaded.kv_shape, loaded.dtype)
    runner = ModelRunner(loaded, cache)
    bounds = Bounds(loaded, rates)
    console.print(
        f"{folder.name}, {str(loaded.dtype).removeprefix('torch.')}, {num_threads} threads, pages of {page_size}"
    )
    rate_text = ", ".join(f"{name} {rate:.0f} GFLOP/s" for name, rate in both.items())
    console.print(f"machine: matrix rate {rate_text}; memory read {rates.read_gbs:.1f} GB/s")

    prefill = Table(title="prefill of one chunk, no history")
    for column in ("chunk", "tokens/s", "ms", "bound ms", "time / bound", "share of matrix rate"):
        prefill.add_column(column, justify="right")
    for chunk in track(CHUNKS, "prefill", console=console, transient=True):
        sequence = make_sequences(1, chunk, page_size)[0]
        sequence.num_computed_tokens = 0
        seconds = typical(lambda s=sequence, c=chunk: runner.run([ScheduledSequence(s, c)]), repeats)  # type: ignore[misc]
        bound = bounds.seconds(chunk, 1, [chunk], chunk * (chunk + 1) // 2)
        prefill.add_row(
            str(chunk),
            f"{chunk / seconds:.0f}",
            f"{seconds * 1e3:.1f}",
            f"{bound * 1e3:.1f}",
            f"{seconds / bound:.2f}",
            f"{bound / seconds:.0%}",
        )
    console.print(prefill)

    decode = Table(title="one decode step")
    for column in ("batch", "context", "ms", "bound ms", "time / bound", "tokens/s"):
        decode.add_column(column, justify="right")
    for batch, context in track([(b, c) for c in CONTEXTS for b in BATCHES], "decode", console=console, transient=True):
        step = [ScheduledSequence(s, 1) for s in make_sequences(batch, context, page_size)]
        seconds = typical(lambda s=step: runner.run(s), repeats * 2)  # type: ignore[misc]
        bound = bounds.seconds(batch, batch, [context] * batch, batch * context)
        decode.add_row(
            str(batch),
            str(context),
            f"{seconds * 1e3:.1f}",
            f"{bound * 1e3:.1f}",
            f"{seconds / bound:.2f}",
            f"{batch / seconds:.0f}",
        )
    console.print(decode)


if __name__ == "__main__":
    tyro.cli(main)
