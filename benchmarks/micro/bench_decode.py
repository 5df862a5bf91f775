"""`make bench-decode`: what a decode step costs, by batch and context, and what of it is not the model.

For each batch size the time of one step is split into the model's part (against the bound that the machine's matrix and
read rates give, measured in the same run), the sampler's, for greedy and for top-p requests, and the router's part that
turns the step's tokens into text.
"""

from __future__ import annotations

from collections.abc import Callable
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
from engine.sampler import sample
from engine.sequence import SamplingParams, ScheduledSequence, Sequence, num_pages_for
from router.tokenizer import Tokenizer

BATCHES = (1, 4, 16, 32, 64)
CONTEXTS = (256, 1024)
SAMPLING = {
    "greedy": SamplingParams(temperature=0.0),
    "T=1": SamplingParams(temperature=1.0, seed=1),
    "top-p 0.9": SamplingParams(temperature=1.0, top_p=0.9, seed=1),
    "penalties": SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.1, frequency_penalty=0.2, seed=1),
}


def detokenizing(tokenizer: Tokenizer, batch: int) -> Callable[[], object]:
    """One step's text: one token for each of `batch` running streams."""
    ids = tokenizer.encode("The keeper of the light wrote down every ship that passed the point. " * 4)
    detokenizers = [tokenizer.detokenizer() for _ in range(batch)]
    for detokenizer in detokenizers:
        detokenizer.add(ids[:20])
    return lambda: [detokenizer.add(ids[index % 40 : index % 40 + 1]) for index, detokenizer in enumerate(detokenizers)]


def main(
    model: str = DEFAULT_MODEL,
    dtype: DTypeName = "auto",
    threads: Annotated[int | None, tyro.conf.arg(help="unset: one per usable core")] = None,
    page_size: int = 16,
    repeats: int = 8,
) -> None:
    """Measures decode steps, the sampler and the detokenizer against the machine."""
    console = Console()
    num_threads = set_threads(threads)
    folder = resolve_model(model)
    rates = MachineRates(matrix_rate(resolve_dtype(dtype)), read_rate())
    loaded = load_model(EngineConfig(model=str(folder), dtype=dtype, device="cpu"))
    cache = KvCache(max(BATCHES) * num_pages_for(max(CONTEXTS), page_size), page_size, loaded.kv_shape, loaded.dtype)
    runner, bounds, tokenizer = ModelRunner(loaded, cache), Bounds(loaded, rates), Tokenizer(folder)
    console.print(
        f"{folder.name}, {str(loaded.dtype).removeprefix('torch.')}, {num_threads} threads, pages of {page_size}; "
        f"machine: {rates.matrix_gflops:.0f} GFLOP/s, memory read {rates.read_gbs:.1f} GB/s"
    )
    steps = Table(title="one decode step")
    for column in ("batch", "context", "model ms", "bound ms", "model / bound", "tokens/s with top-p"):
        steps.add_column(column, justify="right")
    rest = Table(title="what of a step is not the model, in ms and as share of the step")
    for column in ("batch", "context", *SAMPLING, "text", "top-p", "text"):
        rest.add_column(column, justify="right")
    for batch, context in track([(b, c) for c in CONTEXTS for b in BATCHES], "decode", console=console, transient=True):
        sequences = make_sequences(batch, context, page_size)
        step = [ScheduledSequence(s, 1) for s in sequences]
        logits = runner.run(step).logits
        assert logits is not None
        model_seconds = typical(lambda s=step: runner.run(s), repeats)  # type: ignore[misc]
        bound = bounds.seconds(batch, batch, [context] * batch, batch * context)
        sampling = {name: _sampling_seconds(logits, sequences, params, repeats) for name, params in SAMPLING.items()}
        text = typical(detokenizing(tokenizer, batch), repeats)
        whole = model_seconds + sampling["top-p 0.9"]
        steps.add_row(
            str(batch),
            str(context),
            f"{model_seconds * 1e3:.1f}",
            f"{bound * 1e3:.1f}",
            f"{model_seconds / bound:.2f}",
            f"{batch / whole:.0f}",
        )
        rest.add_row(
            str(batch),
            str(context),
            *(f"{seconds * 1e3:.2f}" for seconds in (*sampling.values(), text)),
            f"{sampling['top-p 0.9'] / whole:.0%}",
            f"{text / whole:.2%}",
        )
    console.print(steps)
    console.print(rest)


def _sampling_seconds(logits: torch.Tensor, sequences: list[Sequence], params: SamplingParams, repeats: int) -> float:
    asked = [Sequence(s.sequence_id, s.token_ids, s.num_prompt_tokens // 2, params) for s in sequences]
    return typical(lambda: sample(logits, asked).wait(), repeats)


if __name__ == "__main__":
    tyro.cli(main)
