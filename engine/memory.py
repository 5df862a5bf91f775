"""Computes how many KV pages fit on a GPU beside the weights and the largest step."""

from __future__ import annotations

import logging

import torch

from engine.attention.choice import choose_attention
from engine.attention.torch_paged import TorchPagedAttention
from engine.config import EngineConfig
from engine.errors import ModelLoadError
from engine.kv_cache import KvCache, page_bytes
from engine.loader import LoadedModel
from engine.model_runner import ModelRunner
from engine.sampler import sample
from engine.sequence import SamplingParams, ScheduledSequence, Sequence, num_pages_for

log = logging.getLogger(__name__)

UNSEEN_BYTES = 1 << 30
"""Memory that torch's allocator does not count: CUDA's context, loaded kernels, the transport."""
GRAPH_BYTES = 40 << 20
"""Per recorded size and kind of attention, logits not counted: FlashInfer's plan and unshared activations."""


def pages_that_fit(loaded: LoadedModel, config: EngineConfig, num_tokens: int, num_sequences: int) -> int:
    """Pages for a pool, so that the worker takes `config.memory_fraction` of the GPU in total.

    Runs and samples one step of `num_tokens` tokens in `num_sequences` sequences to measure its memory.
    Raises ModelLoadError if not even one page fits.
    """
    device = loaded.device
    _, total = torch.cuda.mem_get_info(device)
    weights = torch.cuda.memory_allocated(device)
    activations = _measure_step(loaded, config, num_tokens, num_sequences)
    graphs = sum(
        GRAPH_BYTES * len(loaded.attention_options) + size * loaded.vocab_size * torch.float32.itemsize
        for size in config.cuda_graph_sizes
        if size <= num_sequences
    )
    budget = int(total * config.memory_fraction)
    left = budget - weights - activations - graphs - UNSEEN_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    left = min(left, free - activations - graphs - UNSEEN_BYTES)
    per_page = page_bytes(loaded.kv_shape, config.page_size, loaded.dtype)
    log.info(
        "memory measured",
        extra={
            "total_gb": round(total / 1e9, 1),
            "weights_gb": round(weights / 1e9, 2),
            "step_gb": round(activations / 1e9, 2),
            "pages_gb": round(left / 1e9, 1),
        },
    )
    if left < per_page:
        raise ModelLoadError(
            f"--memory-fraction {config.memory_fraction:g} of {total / 1e9:.1f} GB leaves no room for pages: weights "
            f"take {weights / 1e9:.1f} GB, the largest step {activations / 1e9:.1f} GB; {free / 1e9:.1f} GB are free. "
            "Fewer sequences (--max-num-sequences) or shorter ones (--max-model-len) need less"
        )
    return left // per_page


def _measure_step(loaded: LoadedModel, config: EngineConfig, num_tokens: int, num_sequences: int) -> int:
    """Peak bytes of a step, weights and pages not counted."""
    num_sequences = min(num_sequences, num_tokens)
    each, rest = divmod(num_tokens, num_sequences)
    lengths = [min(loaded.max_model_len - 1, each + (1 if n < rest else 0)) for n in range(num_sequences)]
    sampling = SamplingParams(top_p=0.9)
    batch, num_pages = [], 0
    for n, length in enumerate(lengths):
        pages = num_pages_for(length, config.page_size)
        table = list(range(num_pages, num_pages + pages))
        num_pages += pages
        batch.append(ScheduledSequence(Sequence(str(n), [0] * length, length, sampling, table), length))
    before = torch.cuda.memory_allocated(loaded.device)
    torch.cuda.reset_peak_memory_stats(loaded.device)
    cache = KvCache(num_pages, config.page_size, loaded.kv_shape, loaded.dtype, loaded.device)
    cache_bytes = torch.cuda.memory_allocated(loaded.device) - before
    backend = choose_attention(loaded, cache, config.attention)
    runner = ModelRunner(loaded, cache, backend)
    logits = runner.run(batch).logits
    assert logits is not None  # the step reaches the last token of every sequence
    sample(logits, [entry.sequence for entry in batch]).wait()
    torch.cuda.synchronize(loaded.device)
    peak = torch.cuda.max_memory_allocated(loaded.device) - before - cache_bytes
    if isinstance(backend, TorchPagedAttention):
        # The backend also gathers earlier tokens of each sequence. The sequences of this test step have none.
        peak += backend.most_gathered_bytes(num_sequences * loaded.max_model_len)
    del logits, runner, backend, cache
    torch.cuda.empty_cache()
    return peak
