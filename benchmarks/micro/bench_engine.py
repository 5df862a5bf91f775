"""`make bench-engine`: how near the engine comes to what the machine can do.

One run measures the machine's matrix rate and memory read rate, then prefill and decode, and prints each as a
ratio to the bound that those two rates give: the time needed for its floating-point operations or for
reading the weights and the KV once, whichever is longer. *In the loop* is the time of the same step, sampled and
delivered, in a worker's own loop; bare steps before and after it are what it is compared with.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Annotated

import torch
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.micro.bench_overlap import PAGE_SIZE, seconds_per_step, turn_seconds
from benchmarks.micro.machine import Bounds, MachineRates, make_sequences, matrix_rate, read_rate, typical
from engine.config import DTypeName, EngineConfig
from engine.kv_cache import KvCache
from engine.loader import LoadedModel, load_model, resolve_dtype, set_threads
from engine.model_runner import ModelRunner
from engine.model_store import DEFAULT_MODEL, resolve_model
from engine.sequence import ScheduledSequence, num_pages_for

CHUNKS = (128, 512, 2048)
BATCHES = (1, 8, 32)
CONTEXTS = (256, 1024)
LOOP_STEPS = 32
LOOP_COLUMNS = ("in the loop ms", "loop / bare")


def both_ways(
    runner: ModelRunner, batch: list[ScheduledSequence], repeats: int, loop_seconds: Callable[[], float]
) -> tuple[float, tuple[float, float]]:
    """Seconds of a bare step; and seconds in the loop with what it is compared with, a bare step and its sampling."""
    sequences = [entry.sequence for entry in batch]

    def step() -> None:
        logits = runner.run(batch).logits
        assert logits is not None
        runner.sample(logits, sequences).wait()

    bare = typical(lambda: runner.run(batch), repeats)
    before, in_loop, after = typical(step, repeats), loop_seconds(), typical(step, repeats)
    return bare, (in_loop, (before + after) / 2)


def loop_cells(in_loop: tuple[float, float]) -> list[str]:
    """For LOOP_COLUMNS."""
    return [f"{in_loop[0] * 1e3:.1f}", f"{in_loop[0] / in_loop[1]:.2f}"]


def decode_turns(runner: ModelRunner, batch: int, context: int, loaded: LoadedModel) -> float:
    """Seconds per step while outputs grow around `context` tokens."""
    return seconds_per_step(runner, "off", batch, context - LOOP_STEPS // 2, loaded.vocab_size, LOOP_STEPS)


def prompt_turns(runner: ModelRunner, num_tokens: int, loaded: LoadedModel, repeats: int) -> float:
    """Seconds of a turn that computes a prompt and samples its first token."""
    turns = [turn_seconds(runner, "off", 1, num_tokens, loaded.vocab_size, 1) for _ in range(1 + repeats)]
    return statistics.median(each[0] for each in turns[1:])


def main(
    model: str = DEFAULT_MODEL,
    dtype: DTypeName = "auto",
    threads: Annotated[int | None, tyro.conf.arg(help="unset: one per usable core")] = None,
    repeats: int = 5,
) -> None:
    """Measures the engine against the machine."""
    console = Console()
    num_threads = set_threads(threads)
    folder = resolve_model(model)
    torch_dtype = resolve_dtype(dtype)
    both = {t: matrix_rate(t) for t in (torch.float32, torch.bfloat16)}
    rates = MachineRates(both.get(torch_dtype) or matrix_rate(torch_dtype), read_rate())
    loaded = load_model(EngineConfig(model=str(folder), dtype=dtype, device="cpu"))
    num_pages = max(BATCHES) * num_pages_for(max(CONTEXTS) + LOOP_STEPS, PAGE_SIZE)
    cache = KvCache(num_pages, PAGE_SIZE, loaded.kv_shape, loaded.dtype)
    runner = ModelRunner(loaded, cache)
    bounds = Bounds(loaded, rates)
    console.print(
        f"{folder.name}, {str(loaded.dtype).removeprefix('torch.')}, {num_threads} threads, pages of {PAGE_SIZE}"
    )
    rate_text = ", ".join(f"{str(t).removeprefix('torch.')} {rate:.0f} GFLOP/s" for t, rate in both.items())
    console.print(f"machine: matrix rate {rate_text}; memory read {rates.read_gbs:.1f} GB/s")

    prefill = Table(title="prefill of one chunk, no history")
    for column in ("chunk", "tokens/s", "ms", "bound ms", "time / bound", "share of matrix rate", *LOOP_COLUMNS):
        prefill.add_column(column, justify="right")
    for chunk in track(CHUNKS, "prefill", console=console, transient=True):
        sequence = make_sequences(1, chunk, PAGE_SIZE)[0]
        sequence.num_computed_tokens = 0
        batch = [ScheduledSequence(sequence, chunk)]
        seconds, in_loop = both_ways(runner, batch, repeats, partial(prompt_turns, runner, chunk, loaded, repeats))
        bound = bounds.seconds(chunk, 1, [chunk], chunk * (chunk + 1) // 2)
        prefill.add_row(
            str(chunk),
            f"{chunk / seconds:.0f}",
            f"{seconds * 1e3:.1f}",
            f"{bound * 1e3:.1f}",
            f"{seconds / bound:.2f}",
            f"{bound / seconds:.0%}",
            *loop_cells(in_loop),
        )
    console.print(prefill)

    decode = Table(title="one decode step")
    for column in ("batch", "context", "ms", "bound ms", "time / bound", "tokens/s", *LOOP_COLUMNS):
        decode.add_column(column, justify="right")
    for size, context in track([(b, c) for c in CONTEXTS for b in BATCHES], "decode", console=console, transient=True):
        step = [ScheduledSequence(s, 1) for s in make_sequences(size, context, PAGE_SIZE)]
        in_turns = partial(decode_turns, runner, size, context, loaded)
        seconds, in_loop = both_ways(runner, step, repeats * 2, in_turns)
        bound = bounds.seconds(size, size, [context] * size, size * context)
        decode.add_row(
            str(size),
            str(context),
            f"{seconds * 1e3:.1f}",
            f"{bound * 1e3:.1f}",
            f"{seconds / bound:.2f}",
            f"{size / seconds:.0f}",
            *loop_cells(in_loop),
        )
    console.print(decode)


if __name__ == "__main__":
    tyro.cli(main)
