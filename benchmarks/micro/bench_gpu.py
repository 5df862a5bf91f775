"""`make gpu-check`, its second half: how near does this project come to what a GPU can do?

Needs a CUDA device, torch, transformers and flashinfer, and for `--part loop` what else kvferry installs. Without a GPU
it reports a skip and exits with 0. `tests/gpu` checks the results.
"""

from __future__ import annotations

import argparse
import sys

import torch

from benchmarks.micro.machine import Bounds, MachineRates, finish, make_sequences, matrix_rate, read_rate, typical
from benchmarks.micro.random_models import LLAMA_3_8B, make_model
from engine.cuda_graphs import GraphSizes
from engine.kv_cache import KvCache
from engine.model_runner import ModelRunner
from engine.sequence import ScheduledSequence, num_pages_for

PAGE_SIZE = 16
BATCHES = (1, 8, 32, 128)
CONTEXT = 1024
DTYPE = torch.bfloat16


def main() -> int:
    """Measures the parts asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=("engine", "loop", "all"), default="all")
    part = parser.parse_args().part
    if not torch.cuda.is_available():
        print(f"skipped: torch {torch.__version__} sees no CUDA device here")
        return 0
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, Python {sys.version.split()[0]}")
    with torch.inference_mode():
        if part != "loop":
            measure_engine(device)
        if part != "engine":
            measure_loop(device)
    return 0


def measure_engine(device: torch.device) -> None:
    """Tokens/s and milliseconds against bounds from rates that are measured in the same run."""
    rates = MachineRates(matrix_rate(DTYPE, device), read_rate(device))
    print(f"\nmatrix rate {rates.matrix_gflops / 1e3:.0f} TFLOP/s, memory read {rates.read_gbs:.0f} GB/s")
    loaded = make_model(device, DTYPE, **LLAMA_3_8B)
    bounds = Bounds(loaded, rates)
    cache = KvCache(max(BATCHES) * num_pages_for(CONTEXT, PAGE_SIZE), PAGE_SIZE, loaded.kv_shape, DTYPE, device)
    eager = ModelRunner(loaded, cache)
    print("\nLlama 3 8B, random weights, bf16")
    _measure_chunks(eager, ModelRunner(loaded, cache, eager.backend, GraphSizes((), 512)), bounds, device)
    _measure_steps(eager, ModelRunner(loaded, cache, eager.backend, GraphSizes(BATCHES)), bounds, device)


def _measure_chunks(eager: ModelRunner, recorded: ModelRunner, bounds: Bounds, device: torch.device) -> None:
    print("\nprefill chunk   tokens/s   ms   time / bound   share of matrix rate")
    step = [_chunk(1024, 512)]
    both = [typical(lambda r=r: _run(r, step, device), 5) * 1e3 for r in (recorded, eager)]  # type: ignore[misc]
    print(f"(a middle chunk of 512 as a CUDA graph: {both[0]:.1f} ms, otherwise {both[1]:.1f} ms)")
    for chunk in (128, 512, 2048, 8192):
        step = [_chunk(chunk, chunk)]
        seconds = typical(lambda step=step: _run(eager, step, device), 5)  # type: ignore[misc]
        attended = chunk * (chunk + 1) // 2
        bound = bounds.seconds(chunk, 1, [chunk], attended)
        print(
            f"{chunk:13} {chunk / seconds:10.0f} {seconds * 1e3:6.1f} {seconds / bound:10.2f} "
            f"{bounds.seconds(chunk, 1, [0], attended) / seconds:14.0%}"
        )


def _measure_steps(eager: ModelRunner, recorded: ModelRunner, bounds: Bounds, device: torch.device) -> None:
    print(f"\ndecode batch x {CONTEXT}   ms with graph   time / bound   ms without   time / bound")
    for batch in BATCHES:
        step = [ScheduledSequence(s, 1) for s in make_sequences(batch, CONTEXT, PAGE_SIZE)]
        bound = bounds.seconds(batch, batch, [CONTEXT] * batch, batch * CONTEXT)
        with_graph = typical(lambda step=step: _run(recorded, step, device), 10)  # type: ignore[misc]
        without = typical(lambda step=step: _run(eager, step, device), 5)  # type: ignore[misc]
        print(
            f"{batch:12} {with_graph * 1e3:18.2f} {with_graph / bound:14.2f} "
            f"{without * 1e3:12.2f} {without / bound:14.2f}"
        )


def _chunk(num_tokens: int, num_new_tokens: int) -> ScheduledSequence:
    """The first tokens of a prompt."""
    sequence = make_sequences(1, num_tokens, PAGE_SIZE)[0]
    sequence.num_computed_tokens = 0
    return ScheduledSequence(sequence, num_new_tokens)


def _run(runner: ModelRunner, step: list[ScheduledSequence], device: torch.device) -> None:
    runner.run(step)
    finish(device)


def measure_loop(device: torch.device) -> None:
    """Milliseconds per step of a worker's whole loop, with async scheduling and without, beside the bare step."""
    from benchmarks.micro import bench_overlap

    page_size, batches, num_steps = bench_overlap.PAGE_SIZE, (1, 32, 128), 64
    loaded = make_model(device, DTYPE, **LLAMA_3_8B)
    num_pages = max(batches) * num_pages_for(CONTEXT + num_steps, page_size)
    cache = KvCache(num_pages, page_size, loaded.kv_shape, DTYPE, device)
    runner = ModelRunner(loaded, cache, graph_sizes=GraphSizes(batches))
    print(f"\ndecode batch x {CONTEXT}   bare step ms   worker's loop, async schedule   each step waited for")
    for batch in batches:
        step = [ScheduledSequence(s, 1) for s in make_sequences(batch, CONTEXT, page_size)]
        bare = typical(lambda step=step: _run(runner, step, device), 10) * 1e3  # type: ignore[misc]
        ahead, waited = (
            bench_overlap.seconds_per_step(runner, overlap, batch, CONTEXT, loaded.vocab_size, num_steps) * 1e3
            for overlap in ("on", "off")
        )
        print(f"{batch:12} {bare:21.2f} {ahead:31.2f} {waited:21.2f}")


if __name__ == "__main__":
    sys.exit(main())
