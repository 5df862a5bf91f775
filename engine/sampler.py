"""Chooses next tokens: greedy, or by inverse CDF with counter-based randomness.

The random number of a token depends on (seed, choice index, token index) only, so an answer does not depend on
its batch, its worker, its tier or a retry, and there is no generator state to hand over.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence as Seq

import torch

from engine.sequence import SamplingParams, Sequence

# Candidates looked at first when top-p alone limits the choice; widened until they hold the asked-for mass.
_FIRST_CANDIDATES = 1024


def uniform(seed: int, choice_index: int, token_index: int) -> float:
    """A number in [0, 1) with 53 random bits that depends on its arguments only (BLAKE2b as a counter-based hash)."""
    key = struct.pack("<QIQ", seed, choice_index, token_index)
    bits = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 11
    return bits / (1 << 53)


def sample(logits: torch.Tensor, sequences: Seq[Sequence]) -> list[int | None]:
    """Chooses one token per row of `logits` [len(sequences), vocab_size] (float32).

    None where the model gave NaN or infinity: that request fails, its neighbours go on.
    """
    best = logits.max(dim=-1)
    finite = torch.isfinite(best.values).tolist()
    chosen: list[int | None] = best.indices.tolist()
    for row, sequence in enumerate(sequences):
        if not finite[row]:
            chosen[row] = None
        elif not sequence.sampling.is_greedy:
            params = sequence.sampling
            number = uniform(params.seed, params.choice_index, sequence.num_output_tokens)
            chosen[row] = _choose(logits[row], params, number)
    return chosen


def _choose(logits: torch.Tensor, params: SamplingParams, number: float) -> int:
    """Inverse CDF over the filtered distribution of one row [vocab_size]."""
    # float64, so that sums over a whole vocabulary do not depend on how they are blocked.
    scaled = logits.double() / params.temperature
    if params.top_k == 0 and params.top_p >= 1.0:
        weights = torch.exp(scaled - scaled.max())
        return _pick(weights, number)
    weights, token_ids = filtered_weights(scaled, params)
    return int(token_ids[_pick(weights, number)])


def filtered_weights(scaled: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """What top-k, then top-p leave of a row of scaled logits [vocab_size].

    Returns (unnormalised probabilities, token ids), likeliest first; equal ones by token id.
    Top-p keeps the smallest set whose probability, among what top-k left, reaches `top_p`.
    """
    vocab_size = scaled.shape[-1]
    top_k = min(params.top_k, vocab_size) if params.top_k else vocab_size
    exact_total = None if top_k < vocab_size else torch.exp(scaled - scaled.max()).sum()
    num_candidates = min(top_k, _FIRST_CANDIDATES) if top_k == vocab_size else top_k
    while True:
        values, token_ids = _largest(scaled, num_candidates)
        weights = torch.exp(values - values[0])
        if params.top_p >= 1.0:
            return weights, token_ids
        mass = torch.cumsum(weights, 0)
        wanted = params.top_p * (mass[-1] if exact_total is None else exact_total)
        # Kept: every token before which less than the wanted mass was gathered.
        if num_candidates == top_k or mass[-1] >= wanted:
            kept = int(((mass - weights) < wanted).sum())
            return weights[:kept], token_ids[:kept]
        num_candidates = min(num_candidates * 8, top_k)


def _largest(scaled: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest values of a row and their ids, largest first, equal ones by id."""
    if count < scaled.shape[-1]:
        # topk leaves the order of equal values open: take all that reach the smallest, then sort them in a fixed way.
        threshold = torch.topk(scaled, count).values[-1]
        token_ids = (scaled >= threshold).nonzero().flatten()
    else:
        token_ids = torch.arange(scaled.shape[-1], device=scaled.device)
    values, order = torch.sort(scaled[token_ids], descending=True, stable=True)
    return values[:count], token_ids[order][:count]


def _pick(weights: torch.Tensor, number: float) -> int:
    """Index of the first entry at which the cumulated weight passes `number` of the whole."""
    cumulated = torch.cumsum(weights, 0)
    index = int(torch.searchsorted(cumulated, number * cumulated[-1], right=True))
    return min(index, weights.shape[-1] - 1)
