"""`make bench-engine`: how near the engine comes to what the machine can do.

One run measures the machine's matrix rate and memory read rate, then prefill and decode, and prints each as a
ratio to the bound that those two rates give: the time needed for its floating-point operations or for
reading the weights and the KV once, whichever is longer.
"""

from __future__ import annotations

from typing import Annotated

import torch
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.micro.machine import Bounds, MachineRates, make_sequences, matrix_rate, read_rate, typical
from engine.config import DTypeName, EngineConfig
from engine.kv_cache import KvCache
from engine.loader import load_model, resolve_dtype, set_threads
from engine.model_runner import ModelRunner
from engine.model_store import DEFAULT_MODEL, resolve_model
from engine.sequence import ScheduledSequence, num_pages_for

CHUNKS = (128, 512, 2048)
BATCHES = (1, 8, 32)
CONTEXTS = (256, 1024)


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
    loaded = load_model(EngineConfig(model=str(folder), dtype=dtype, device="cpu"))
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
