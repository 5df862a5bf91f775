"""Logits of a whole model by plain torch, FlashInfer and CUDA graphs against fp32, step by step."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator

import pytest
import torch

from benchmarks.micro.random_models import make_model
from engine.attention.torch_paged import TorchPagedAttention
from engine.cuda_graphs import GraphSizes
from engine.kv_cache import KvCache
from engine.loader import LoadedModel, adopt_model
from engine.model_runner import ModelRunner
from engine.sequence import ScheduledSequence, Sequence, num_pages_for
from tests.gpu.small_model import SMALL

pytestmark = pytest.mark.gpu
CHUNK = 96
"""Longer prompts are computed in chunks of so many tokens first."""


@pytest.fixture(scope="module")
def logits(device):
    """By name, [steps, prompts, vocab_size]. All get the oracle's tokens."""
    rng = random.Random()
    prompts = [[rng.randrange(2, 2048) for _ in range(n)] for n in (3, 17, 100, 333, 64, 48, 1, 250, 31, 129, 16)]
    num_steps = 24
    with torch.inference_mode():
        loaded = make_model(device, torch.bfloat16, **SMALL)
        exact = adopt_model(copy.deepcopy(loaded.model).float(), loaded.max_model_len, loaded.identity)
        oracle = torch.stack(list(greedy(exact, device, prompts, num_steps, "torch", None)))
        tokens = list(oracle.argmax(-1))
        return {"oracle": oracle} | {
            name: torch.stack(list(greedy(loaded, device, prompts, num_steps, name, tokens)))
            for name in ("torch", "flashinfer", "graphs")
        }


def error_to_oracle(logits, name):
    return float((logits[name] - logits["oracle"]).norm() / logits["oracle"].norm())


@pytest.mark.parametrize("name", ["flashinfer", "graphs"])
def test_tokens_are_equal_wherever_the_lead_is_larger_than_what_rounding_moves(name, logits):
    oracle = logits["oracle"]
    best = oracle.topk(2, dim=-1).values
    # What rounding to bf16 moves in this model, by plain torch, is what others may move too.
    noise = (logits["torch"] - oracle).abs().amax(dim=-1)
    is_clear = (best[..., 0] - best[..., 1]) > 3 * noise
    equal = logits[name].argmax(-1) == oracle.argmax(-1)
    mine, plain = error_to_oracle(logits, name), error_to_oracle(logits, "torch")
    print(f"{name}: error to fp32 {mine:.3f} ({plain:.3f} by plain torch), {int(equal.sum())} of {equal.numel()} equal")
    assert not (is_clear & ~equal).any()
    assert mine < 1.2 * plain


def test_cuda_graphs_change_nothing(logits):
    assert float((logits["graphs"] - logits["flashinfer"]).abs().max()) < 1e-2


def greedy(
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
