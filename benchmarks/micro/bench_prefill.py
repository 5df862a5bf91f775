"""`make bench-prefill`: prompt tokens/s against the token budget, and what a prefix hit saves.

Runs the prefill tier's scheduler over the real model in one process, no transfer. Every figure is from one run; rates
are also given as a share of the best rate for that prompt length, hits as a ratio to the same prompt cold.
"""

from __future__ import annotations

import itertools
import random
import time
from pathlib import Path

import tyro
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from engine.config import DTypeName, EngineConfig
from engine.kv_cache import KvCache
from engine.loader import load_model, set_threads
from engine.model_runner import ModelRunner
from engine.model_store import DEFAULT_MODEL, resolve_model
from engine.page_pool import PagePool
from engine.prefix_cache import PrefixCache
from engine.sequence import Sequence, num_pages_for
from prefill_service.scheduler import PrefillScheduler

BUDGETS = (64, 128, 256, 512, 1024, 2048, 4096)
LENGTHS = (128, 1024, 6000)
WORK_TOKENS = {128: 2048, 1024: 4096, 6000: 6000}
"""Prompt tokens per measurement: several short prompts, or one long one."""
PAGE_SIZE = 16


class Bench:
    """A model and fresh schedulers over one pool's memory."""

    def __init__(self, model: str, dtype: DTypeName, threads: int | None) -> None:
        self.threads = set_threads(threads)
        self.loaded = load_model(EngineConfig(model=str(resolve_model(model)), dtype=dtype, device="cpu"))
        self.num_pages = 2 * num_pages_for(max(WORK_TOKENS.values()), PAGE_SIZE)
        cache = KvCache(self.num_pages, PAGE_SIZE, self.loaded.kv_shape, self.loaded.dtype)
        self.runner = ModelRunner(self.loaded, cache)
        self._random = random.Random(0)
        self._names = itertools.count()

    def scheduler(self, token_budget: int) -> PrefillScheduler:
        """With an empty pool and cache."""
        pool = PagePool(self.num_pages)
        return PrefillScheduler(pool, PrefixCache(pool, PAGE_SIZE), PAGE_SIZE, token_budget, 64)

    def prompt(self, length: int) -> list[int]:
        """Random tokens."""
        return self._random.choices(range(10, self.loaded.vocab_size), k=length)

    def seconds(self, scheduler: PrefillScheduler, prompts: list[list[int]]) -> float:
        """Time to compute all prompts, given at once."""
        sequences = [Sequence(str(next(self._names)), list(prompt), len(prompt)) for prompt in prompts]
        started = time.perf_counter()
        for sequence in sequences:
            scheduler.add(sequence)
        while (step := scheduler.schedule()) is not None:
            self.runner.run(step.batch)
            scheduler.update(step)
        elapsed = time.perf_counter() - started
        for sequence in sequences:
            scheduler.finish(sequence)
        return elapsed


def main(
    model: str = DEFAULT_MODEL,
    dtype: DTypeName = "auto",
    threads: int | None = None,
    repeats: int = 2,
    plot: Path = Path("bench-prefill.png"),
) -> None:
    """Measures the prefill tier's scheduler and engine. `plot`: where the picture goes."""
    console = Console()
    bench = Bench(model, dtype, threads)
    rates: dict[int, list[float]] = {length: [] for length in LENGTHS}
    hits: list[tuple[int, float, float]] = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("prefill", total=len(LENGTHS) * (len(BUDGETS) + 1))
        for length, budget in itertools.product(LENGTHS, BUDGETS):
            count = WORK_TOKENS[length] // length
            best = min(
                bench.seconds(bench.scheduler(budget), [bench.prompt(length) for _ in range(count)])
                for _ in range(repeats)
            )
            rates[length].append(count * length / best)
            progress.advance(task)
        for length in LENGTHS:
            scheduler, prompt = bench.scheduler(512), bench.prompt(length)
            cold = bench.seconds(scheduler, [prompt])
            hits.append((length, cold, min(bench.seconds(scheduler, [prompt]) for _ in range(repeats))))
            progress.advance(task)
    dtype_name = str(bench.loaded.dtype).removeprefix("torch.")
    table = Table(title=f"prompt tokens/s by token budget ({dtype_name}, {bench.threads} threads)")
    table.add_column("budget", justify="right")
    for length in LENGTHS:
        table.add_column(f"prompts of {length}", justify="right")
    for index, budget in enumerate(BUDGETS):
        cells = [f"{rates[n][index]:.0f} ({rates[n][index] / max(rates[n]):.0%} of best)" for n in LENGTHS]
        table.add_row(str(budget), *cells)
    console.print(table)
    hit_table = Table("prompt", "cold ms", "wholly cached ms", "speed-up", title="prefix hit, budget 512")
    for length, cold, warm in hits:
        hit_table.add_row(str(length), f"{cold * 1e3:.0f}", f"{warm * 1e3:.1f}", f"{cold / warm:.0f} x")
    console.print(hit_table)
    draw(rates, hits, plot)
    console.print(f"plot: {plot}")


def draw(rates: dict[int, list[float]], hits: list[tuple[int, float, float]], path: Path) -> None:
    """Two panels: rate against budget, and time cold against cached."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2))
    for length, values in rates.items():
        left.plot(BUDGETS, values, marker="o", label=f"prompts of {length}")
    left.set(
        xscale="log", xlabel="token budget (tokens per step)", ylabel="prompt tokens/s", title="Rate by token budget"
    )
    left.set_xticks(BUDGETS, [str(budget) for budget in BUDGETS])
    left.minorticks_off()
    left.set_ylim(bottom=0)
    left.grid(alpha=0.3)
    left.legend()
    places = range(len(hits))
    right.bar([p - 0.2 for p in places], [cold for _, cold, _ in hits], width=0.4, label="cold")
    right.bar([p + 0.2 for p in places], [warm for _, _, warm in hits], width=0.4, label="wholly cached")
    right.set(yscale="log", ylabel="seconds to the first token's logits", title="Prefix hit")
    right.set_xticks(list(places), [f"{length} tokens" for length, _, _ in hits])
    right.grid(alpha=0.3, axis="y")
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    tyro.cli(main)
