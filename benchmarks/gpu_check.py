"""`make gpu-check`: is what this project computes on a GPU right, and how near does it come to what the GPU can do?

Two parts. `kernels` needs a CUDA device, torch, transformers and flashinfer; `transfer` needs nixl too, and what else
kvferry installs. Without a GPU it says so and ends well. Its exit code is 1 if anything differed.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from benchmarks.machine import Bounds, MachineRates, finish, make_sequences, matrix_rate, read_rate, typical
from engine.attention import flashinfer
from engine.attention.base import AttentionOptions
from engine.attention.torch_paged import TorchPagedAttention
from engine.cuda_graphs import GraphSizes
from engine.kv_cache import KvCache, KvShape
from engine.loader import ATTENTION_NAME, LoadedModel, ModelIdentity, adopt_model
from engine.model_runner import ModelRunner
from engine.sequence import ScheduledSequence, Sequence, num_pages_for

MOST_ERROR = {torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Norm of the difference to fp32 over the norm of that. Rounding bf16 inputs alone gives 2e-3 to 4e-3."""


@dataclass(frozen=True)
class Heads:
    """The heads of a common model."""

    name: str
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    options: tuple[AttentionOptions, ...] = ()

    @property
    def asked(self) -> tuple[AttentionOptions, ...]:
        """What its layers ask for."""
        return self.options or (AttentionOptions(self.head_dim**-0.5),)


HEADS = (
    Heads("SmolLM2 135M", 9, 3, 64),
    Heads("Llama 3.2 1B", 32, 8, 64),
    Heads("Llama 3 8B", 32, 8, 128),
    Heads("Qwen2.5 7B", 28, 4, 128),
    Heads("Llama 2 7B", 32, 32, 128),
    Heads("window and soft cap", 16, 8, 128, options=(AttentionOptions(128**-0.5, 40, 50.0),)),
    Heads("Llama 3 8B fp16", 32, 8, 128, torch.float16),
    Heads(
        "Gemma 2 9B",
        16,
        8,
        256,
        options=(AttentionOptions(256**-0.5, 40, 50.0), AttentionOptions(256**-0.5, None, 50.0)),
    ),
)
NUM_USUAL = 5
"""So many of HEADS are checked unless others are named: FlashInfer builds its kernels where they run, and each kind of
head (size, element type, window, soft cap) takes about 20 minutes of processor time."""
PAGE_SIZES = (16, 1, 8, 32)


@dataclass
class Report:
    """What was checked, what differed, and what was measured."""

    failures: list[str] = field(default_factory=list)
    num_checks: int = 0

    def check(self, name: str, ok: bool, told: str) -> None:
        """Notes the outcome of one check."""
        self.num_checks += 1
        if not ok:
            self.failures.append(f"{name}: {told}")
        print(f"{'ok  ' if ok else 'FAIL'}  {name}: {told}", flush=True)


def main() -> int:
    """Runs the parts asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=("kernels", "transfer", "all"), default="all")
    usual = [heads.name for heads in HEADS[:NUM_USUAL]]
    parser.add_argument("--heads", nargs="+", default=usual, choices=[heads.name for heads in HEADS])
    parser.add_argument("--only-attention", action="store_true", help="no whole models, no speed")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"skipped: torch {torch.__version__} sees no CUDA device here")
        return 0
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, Python {sys.version.split()[0]}")
    report = Report()
    if arguments.part != "transfer":
        check_kernels(device, report, arguments.heads, arguments.only_attention)
    if arguments.part != "kernels":
        check_transfer(device, report)
        with torch.inference_mode():
            measure_overlap(device)
    print(f"\n{report.num_checks} checks, {len(report.failures)} failed")
    for failure in report.failures:
        print(f"  {failure}")
    return 1 if report.failures else 0


# kernels


def check_kernels(device: torch.device, report: Report, names: list[str], only_attention: bool) -> None:
    """FlashInfer against plain torch, tokens of whole models, CUDA graphs, speed."""
    heads_asked = [heads for heads in HEADS if heads.name in names]
    started = time.monotonic()
    with ThreadPoolExecutor(len(heads_asked)) as threads:
        for heads, error in zip(
            heads_asked, threads.map(lambda heads: _compile(heads, device), heads_asked), strict=True
        ):
            report.check(f"kernels for {heads.name}", error is None, error or "built")
    print(f"building kernels: {time.monotonic() - started:.0f} s")
    if report.failures:
        return
    rng = random.Random()
    for heads in heads_asked:
        _check_heads(heads, device, rng, report)
    if only_attention:
        return
    with torch.inference_mode():
        _check_tokens(device, rng, report)
        measure(device)


def _compile(heads: Heads, device: torch.device) -> str | None:
    try:
        torch.cuda.set_device(device)
        _attend_both(heads, device, [(5, 3), (0, 9)], 16, random.Random(0))
        _attend_both(heads, device, [(5, 1)], 16, random.Random(0))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _check_heads(heads: Heads, device: torch.device, rng: random.Random, report: Report) -> None:
    """Fresh random batches: lengths odd and at the edges of pages; steps, chunks and both."""
    worst, num_batches = 0.0, 0
    stored_equal = True
    for page_size in PAGE_SIZES:
        edges = [0, 1, page_size - 1, page_size, page_size + 1, 3 * page_size, 777]
        for kind in ("steps", "chunks", "mixed"):
            for _ in range(3):
                batch = []
                for _ in range(rng.randint(1, 17)):
                    new = 1 if kind == "steps" or (kind == "mixed" and rng.random() < 0.5) else rng.randint(2, 150)
                    batch.append((rng.choice([*edges, rng.randint(0, 1500)]), new))
                error, is_stored = _attend_both(heads, device, batch, page_size, rng)
                worst, stored_equal, num_batches = max(worst, error), stored_equal and is_stored, num_batches + 1
    report.check(
        f"attention of {heads.name}",
        worst < MOST_ERROR[heads.dtype] and stored_equal,
        f"{num_batches} batches, worst error {worst:.1e}, stored pages {'equal' if stored_equal else 'DIFFER'}",
    )


def _attend_both(
    heads: Heads, device: torch.device, lengths: list[tuple[int, int]], page_size: int, rng: random.Random
) -> tuple[float, bool]:
    """Relative error of FlashInfer to fp32 in plain torch, and whether both stored the same.

    lengths: (tokens computed, new tokens) per sequence. What no sequence may see is NaN.
    """
    generator = torch.Generator(device).manual_seed(rng.getrandbits(48))
    num_layers = 2
    shape = KvShape(num_layers, heads.num_kv_heads, heads.head_dim)
    needed = [num_pages_for(computed + new, page_size) for computed, new in lengths]
    ids = list(range(sum(needed) + 3))
    rng.shuffle(ids)
    batch, seen = [], torch.zeros(len(ids) * page_size, dtype=torch.bool, device=device)
    for index, (computed, new) in enumerate(lengths):
        table, ids = ids[: needed[index]], ids[needed[index] :]
        places = [table[at // page_size] * page_size + at % page_size for at in range(computed)]
        seen[places] = True
        tokens = [0] * (computed + new)
        sequence = Sequence(str(index), tokens, len(tokens), page_table=table, num_computed_tokens=computed)
        batch.append(ScheduledSequence(sequence, new))
    cache = KvCache(sum(needed) + 3, page_size, shape, heads.dtype, device)
    pages = cache.tensor[: cache.num_pages]
    pages.copy_(torch.randn(pages.shape, generator=generator, device=device))
    hidden = ~seen.view(cache.num_pages, 1, 1, 1, page_size, 1)
    pages.masked_fill_(hidden, float("nan"))
    exact = KvCache(cache.num_pages, page_size, shape, torch.float32, device)
    exact.tensor.copy_(cache.tensor)
    fast = flashinfer.FlashInferAttention(cache, heads.num_query_heads, heads.asked).plan(batch)
    oracle = TorchPagedAttention(exact).plan(batch)
    num_tokens = sum(new for _, new in lengths)
    worst = 0.0
    for layer in range(num_layers):
        options = heads.asked[layer % len(heads.asked)]
        query, key, value = (
            torch.randn((num_tokens, number, heads.head_dim), generator=generator, device=device).to(heads.dtype)
            for number in (heads.num_query_heads, heads.num_kv_heads, heads.num_kv_heads)
        )
        found = fast.attend(layer, query, key, value, options).float()
        expected = oracle.attend(layer, query.float(), key.float(), value.float(), options)
        error = float((found - expected).norm() / expected.norm())
        worst = max(worst, error if error == error else float("inf"))
    stored = torch.equal(cache.tensor.float().nan_to_num(7.0), exact.tensor.nan_to_num(7.0))
    return worst, stored


# whole models


def make_model(device: torch.device, dtype: torch.dtype, **sizes: Any) -> LoadedModel:
    """A random Llama of some size, made on the device."""
    config = AutoConfig.for_model("llama", bos_token_id=0, eos_token_id=1, **sizes)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME)
    return adopt_model(model, config.max_position_embeddings, ModelIdentity("", "", "", ""))


CHUNK = 96
"""Longer prompts are computed in chunks of so many tokens first."""
SMALL = {
    "vocab_size": 2048,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,
}
LLAMA_3_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}


def _check_tokens(device: torch.device, rng: random.Random, report: Report) -> None:
    """Logits of a whole model by plain torch, FlashInfer and CUDA graphs against fp32, step by step.

    All get the oracle's tokens. Theirs are equal wherever the oracle's lead is larger than what rounding moves.
    """
    loaded = make_model(device, torch.bfloat16, **SMALL)
    exact = adopt_model(copy.deepcopy(loaded.model).float(), loaded.max_model_len, loaded.identity)
    prompts = [[rng.randrange(2, 2048) for _ in range(n)] for n in (3, 17, 100, 333, 64, 48, 1, 250, 31, 129, 16)]
    num_steps = 24
    oracle = torch.stack(list(_greedy(exact, device, prompts, num_steps, "torch", None)))
    tokens = list(oracle.argmax(-1))
    runs = {
        name: torch.stack(list(_greedy(loaded, device, prompts, num_steps, name, tokens)))
        for name in ("torch", "flashinfer", "graphs")
    }
    errors = {name: float((logits - oracle).norm() / oracle.norm()) for name, logits in runs.items()}
    best = oracle.topk(2, dim=-1).values
    # What rounding to bf16 moves in this model, by plain torch, is what others may move too.
    noise = (runs["torch"] - oracle).abs().amax(dim=-1)
    for name in ("flashinfer", "graphs"):
        logits = runs[name]
        is_clear = (best[..., 0] - best[..., 1]) > 3 * noise
        equal = logits.argmax(-1) == oracle.argmax(-1)
        wrong = int((is_clear & ~equal).sum())
        told = f"error to fp32 {errors[name]:.3f} ({errors['torch']:.3f} by plain torch), {int(equal.sum())} of "
        told += f"{equal.numel()} tokens equal, {wrong} of {int(is_clear.sum())} with a clear lead differ"
        ok = wrong == 0 and errors[name] < 1.2 * errors["torch"]
        report.check(f"tokens of a model in bf16, {name}", ok, told)
    moved = float((runs["graphs"] - runs["flashinfer"]).abs().max())
    report.check("CUDA graphs on and off", moved < 1e-2, f"logits differ by {moved:.1e} at most")


def _greedy(
    loaded: LoadedModel,
    device: torch.device,
    prompts: list[list[int]],
    num_steps: int,
    name: str,
    forced: list[torch.Tensor] | None,
) -> Iterator[torch.Tensor]:
    """Logits of each step, [prompts, vocab_size]; the tokens are `forced` ones or its own likeliest."""
    page_size = 16
    each = num_pages_for(max(map(len, prompts)) + num_steps, page_size)
    cache = KvCache(each * len(prompts), page_size, loaded.kv_shape, loaded.dtype, device)
    backend = TorchPagedAttention(cache) if name == "torch" else None
    wants_graphs = name == "graphs"
    runner = ModelRunner(loaded, cache, backend, GraphSizes((4, 16), CHUNK) if wants_graphs else None)
    assert runner.has_graphs == wants_graphs
    sequences = [
        Sequence(str(n), list(prompt), len(prompt), page_table=list(range(n * each, (n + 1) * each)))
        for n, prompt in enumerate(prompts)
    ]
    for step in range(num_steps):
        for sequence in sequences:
            while sequence.num_uncomputed_tokens > CHUNK:
                runner.run([ScheduledSequence(sequence, CHUNK)])
                sequence.num_computed_tokens += CHUNK
        batch = [ScheduledSequence(s, s.num_uncomputed_tokens) for s in sequences]
        logits = runner.run(batch).logits
        assert logits is not None
        yield logits.clone()
        chosen = (logits.argmax(-1) if forced is None else forced[step]).tolist()
        for sequence, token in zip(sequences, chosen, strict=True):
            sequence.num_computed_tokens = sequence.num_tokens
            sequence.token_ids.append(token)


# speed


def measure(device: torch.device) -> None:
    """Tokens/s and milliseconds against bounds from rates that are measured in the same run."""
    dtype = torch.bfloat16
    rates = MachineRates(matrix_rate(dtype, device), read_rate(device))
    print(f"\nmatrix rate {rates.matrix_gflops / 1e3:.0f} TFLOP/s, memory read {rates.read_gbs:.0f} GB/s")
    loaded = make_model(device, dtype, **LLAMA_3_8B)
    bounds = Bounds(loaded, rates)
    page_size, batches, context = 16, (1, 8, 32, 128), 1024
    cache = KvCache(max(batches) * num_pages_for(context, page_size), page_size, loaded.kv_shape, dtype, device)
    eager = ModelRunner(loaded, cache)
    runner = ModelRunner(loaded, cache, eager.backend, GraphSizes(batches))
    print("\nLlama 3 8B, random weights, bf16\n\nprefill chunk   tokens/s   ms   time / bound   share of matrix rate")
    print("(a middle chunk of 512 as a CUDA graph: ", end="")
    recorded = ModelRunner(loaded, cache, eager.backend, GraphSizes((), 512))
    sequence = make_sequences(1, 1024, page_size)[0]
    sequence.num_computed_tokens = 0
    step = [ScheduledSequence(sequence, 512)]
    both = [typical(lambda r=r: _run(r, step, device), 5) * 1e3 for r in (recorded, eager)]  # type: ignore[misc]
    print(f"{both[0]:.1f} ms, otherwise {both[1]:.1f} ms)")
    for chunk in (128, 512, 2048, 8192):
        sequence = make_sequences(1, chunk, page_size)[0]
        sequence.num_computed_tokens = 0
        step = [ScheduledSequence(sequence, chunk)]
        seconds = typical(lambda step=step: _run(eager, step, device), 5)  # type: ignore[misc]
        bound = bounds.seconds(chunk, 1, [chunk], chunk * (chunk + 1) // 2)
        print(
            f"{chunk:13} {chunk / seconds:10.0f} {seconds * 1e3:6.1f} {seconds / bound:10.2f} "
            f"{bounds.seconds(chunk, 1, [0], chunk * (chunk + 1) // 2) / seconds:14.0%}"
        )
    print(f"\ndecode batch x {context}   ms with graph   time / bound   ms without   time / bound")
    for batch in batches:
        step = [ScheduledSequence(s, 1) for s in make_sequences(batch, context, page_size)]
        bound = bounds.seconds(batch, batch, [context] * batch, batch * context)
        with_graph = typical(lambda step=step: _run(runner, step, device), 10)  # type: ignore[misc]
        without = typical(lambda step=step: _run(eager, step, device), 5)  # type: ignore[misc]
        print(
            f"{batch:12} {with_graph * 1e3:18.2f} {with_graph / bound:14.2f} "
            f"{without * 1e3:12.2f} {without / bound:14.2f}"
        )


def _run(runner: ModelRunner, step: list[ScheduledSequence], device: torch.device) -> None:
    runner.run(step)
    finish(device)


# transfer


def check_transfer(device: torch.device, report: Report) -> None:
    """Two tiers as real processes on one GPU: pages go from VRAM to VRAM, and answers are those of one process."""
    from kvferry.client import Client
    from kvferry.cluster_config import ClusterConfig
    from kvferry.local import LocalCluster
    from worker_runtime.config import Overlap

    os.environ["UCX_PROTO_INFO"] = "y"  # it tells which transports it took
    sizes = SMALL | {"vocab_size": 320, "num_hidden_layers": 30}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        config = AutoConfig.for_model("llama", bos_token_id=0, eos_token_id=1, **sizes)
        with device:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder)
        _save_tokenizer(folder)
        del model
        torch.cuda.empty_cache()
        rng = random.Random()
        prompts = [[rng.randrange(2, 320) for _ in range(n)] for n in (5, 100, 1000, 3000, 3500)]
        answers: dict[str, list[tuple[int, ...]]] = {}
        arms: tuple[tuple[str, int, Overlap], ...] = (
            ("colocated", 1, "auto"),
            ("each step waited for", 1, "off"),
            ("two tiers", 0, "auto"),
        )
        for arm, colocated, overlap in arms:
            logs = Path(scratch) / arm.replace(" ", "-")
            cluster_config = ClusterConfig(
                model=str(folder),
                colocated=colocated,
                overlap=overlap,
                port=0,
                log_dir=logs,
                memory_fraction=0.4,
                device=str(device),
            )
            try:
                with LocalCluster(cluster_config) as cluster, Client(cluster.address) as client:
                    answers[arm] = []
                    for prompt in prompts:
                        started = time.monotonic()
                        result = client.generate(
                            prompt, max_tokens=32, temperature=0, ignore_eos=True, return_token_ids=True
                        ).result()
                        seconds = time.monotonic() - started
                        answers[arm].append(result.token_ids)
                        moved = result.kv_transfer
                        told = ""
                        stages = result.timings_ms
                        if moved.bytes:
                            told = (
                                f", {moved.bytes / 1e6:.1f} MB over {moved.transport} at {moved.gb_per_s:.1f} GB/s, "
                                f"{moved.bytes_while_computing / moved.bytes:.0%} while computing, exposed "
                                f"{stages['transfer_finished'] - stages['prefill_finished']:.1f} ms"
                            )
                        print(f"      {arm}: {len(prompt)} tokens, {seconds * 1e3:.0f} ms{told}", flush=True)
            except Exception as error:
                report.check(arm, False, f"{type(error).__name__}: {error}")
                for path in sorted(logs.glob("*")):
                    print(f"--- {path.name}\n{path.read_text()[-3000:]}")
                return
        assert all(answers["two tiers"])
        log = (Path(scratch) / "two-tiers" / "prefill-0.log").read_text().splitlines()
        print("      UCX took: " + ", ".join(_transports(log)))
        for arm in ("each step waited for", "two tiers"):
            equal = [one == other for one, other in zip(answers[arm], answers["colocated"], strict=True)]
            report.check(f"answers: {arm}", all(equal), f"{sum(equal)} of {len(equal)} equal to those of one process")


def measure_overlap(device: torch.device) -> None:
    """Milliseconds per step of a worker's whole loop, with steps launched ahead and without, beside the bare step."""
    from benchmarks.overlap import PAGE_SIZE, seconds_per_step

    dtype, batches, context, num_steps = torch.bfloat16, (1, 32, 128), 1024, 64
    loaded = make_model(device, dtype, **LLAMA_3_8B)
    num_pages = max(batches) * num_pages_for(context + num_steps, PAGE_SIZE)
    cache = KvCache(num_pages, PAGE_SIZE, loaded.kv_shape, dtype, device)
    runner = ModelRunner(loaded, cache, graph_sizes=GraphSizes(batches))
    print(f"\ndecode batch x {context}   bare step ms   worker's loop, launched ahead   each step waited for")
    for batch in batches:
        step = [ScheduledSequence(s, 1) for s in make_sequences(batch, context, PAGE_SIZE)]
        bare = typical(lambda step=step: _run(runner, step, device), 10) * 1e3  # type: ignore[misc]
        ahead, waited = (
            seconds_per_step(runner, overlap, batch, context, loaded.vocab_size, num_steps) * 1e3
            for overlap in ("on", "off")
        )
        print(f"{batch:12} {bare:21.2f} {ahead:31.2f} {waited:21.2f}")


def _transports(log: list[str]) -> list[str]:
    """What UCX's tables (UCX_PROTO_INFO) name as carrying bytes from GPU to GPU, such as cuda_ipc/cuda."""
    found: dict[str, None] = {}
    is_ours = False
    for line in log:
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 1:
            is_ours = "from cuda" in cells[0] and "to cuda" in cells[0]
        elif is_ours and len(cells) == 3:
            found[f"{cells[2]} ({cells[1]})"] = None
    return list(found)


def _save_tokenizer(folder: Path) -> None:
    """One token per byte behind two special ones: the router wants a tokenizer, though prompts here are tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1} | {letter: index + 2 for index, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(main())
