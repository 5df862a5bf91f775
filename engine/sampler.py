"""Chooses next tokens: greedy, or by chance with counter-based randomness. One pass over the whole batch.

Chance is the Gumbel-max trick: every candidate's log-weight gets its own Gumbel number, the largest sum wins (Gumbel
1954; Maddison et al. 2014, arXiv 1411.0030). The numbers depend on (seed, choice index, token index, token id) only, so
an answer does not depend on its batch, its worker, its tier or a retry, and there is no generator state to hand over.
An inverse CDF with one number per token would do for that if logits were always the same to the last bit, but they are
not: matrix products of other shapes round otherwise. Such noise moves every boundary of a large vocabulary's CDF at
once, and was seen to change a few tokens in a thousand. Here it only matters if the two best sums are as near as that.

Everything is done for all rows together; the loops here are over widths of the candidate list, never over requests.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from engine.sequence import SamplingParams, Sequence
from engine.token_history import TokenHistory

_FIRST_CANDIDATES = 256
"""Likeliest tokens looked at first by the filters; widened for rows whose filters may keep more."""
_BLOCK = 64
"""Tokens that a draw from a whole vocabulary takes together at first: then far fewer numbers are needed."""
LOWEST_LOGPROB = -10_000.0
"""Given for tokens that the model makes impossible, so that every value is finite."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the token that is there, then the likeliest ones, best first."""

    token_ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True, slots=True)
class Choice:
    """The next token of one sequence."""

    token_id: int | None
    """None where the model gave NaN or infinity: that request fails, its neighbours go on."""
    logprobs: TokenLogprobs | None = None
    """If asked for: those of the model, before penalties, bias, temperature and filters."""


@torch.inference_mode()
def sample(logits: torch.Tensor, sequences: Seq[Sequence]) -> list[Choice]:
    """Chooses one token per row of `logits` [len(sequences), vocab_size] (float32), which are not changed."""
    usable = torch.isfinite(logits.amax(dim=-1))
    adjusted = _adjust(logits, sequences)
    best = adjusted.max(dim=-1)
    usable &= torch.isfinite(best.values)
    tokens = best.indices
    is_usable = usable.tolist()
    chancy = [row for row, s in enumerate(sequences) if is_usable[row] and not s.sampling.is_greedy]
    for filtered in (False, True):
        rows = [row for row in chancy if sequences[row].sampling.has_filter is filtered]
        if rows:
            of_rows = adjusted if len(rows) == len(sequences) else adjusted[rows]
            draw = _Draw(of_rows, [sequences[row] for row in rows])
            tokens[rows] = draw.from_candidates() if filtered else draw.from_all()
    chosen: list[int] = tokens.tolist()
    logprobs = _asked_logprobs(logits, sequences, chosen)
    return [
        Choice(token, logprobs.get(row)) if usable_row else Choice(None)
        for row, (token, usable_row) in enumerate(zip(chosen, is_usable, strict=True))
    ]


def logprobs_at(logits: torch.Tensor, token_ids: Seq[int], num_top: int) -> list[TokenLogprobs]:
    """Log-probabilities of one token per row of `logits` [len(token_ids), vocab_size], and of the `num_top` likeliest.

    Of equally likely ones any may be left out. Values are at least LOWEST_LOGPROB.
    """
    there = torch.tensor(token_ids, device=logits.device).unsqueeze(1)
    top = torch.topk(logits, min(num_top, logits.shape[-1]), dim=-1)
    highest = logits.amax(dim=-1, keepdim=True)
    total = torch.exp(logits - highest).sum(dim=-1, keepdim=True, dtype=torch.float64)
    raw = torch.cat([logits.gather(1, there), top.values], dim=1).double()
    values = (raw - highest - torch.log(total)).clamp(min=LOWEST_LOGPROB, max=0.0)
    ids = torch.cat([there, top.indices], dim=1)
    return [TokenLogprobs(*pair) for pair in zip(ids.tolist(), values.tolist(), strict=True)]


def _asked_logprobs(logits: torch.Tensor, sequences: Seq[Sequence], chosen: Seq[int]) -> dict[int, TokenLogprobs]:
    """By row, for the rows that want them."""
    asked = {row: s.sampling.num_logprobs for row, s in enumerate(sequences) if s.sampling.num_logprobs is not None}
    if not asked:
        return {}
    found = logprobs_at(logits[list(asked)], [chosen[row] for row in asked], max(asked.values()))
    return {
        row: TokenLogprobs(of_row.token_ids[: 1 + number], of_row.logprobs[: 1 + number])
        for (row, number), of_row in zip(asked.items(), found, strict=True)
    }


# What changes logits before chance: penalties, bias, min_tokens.


def _adjust(logits: torch.Tensor, sequences: Seq[Sequence]) -> torch.Tensor:
    """The logits with penalties, bias and min_tokens; the same tensor if there are none."""
    penalised = [(row, s) for row, s in enumerate(sequences) if s.sampling.has_penalties]
    biased = [(row, s.sampling.logit_bias) for row, s in enumerate(sequences) if s.sampling.logit_bias is not None]
    too_early = [
        (row, array("i", s.sampling.ending_token_ids))
        for row, s in enumerate(sequences)
        if s.num_output_tokens < s.sampling.min_tokens and s.sampling.ending_token_ids
    ]
    if not (penalised or biased or too_early):
        return logits
    adjusted = logits.clone()
    if penalised:
        _penalise(adjusted, penalised)
    if biased:
        places = _places(adjusted, [(row, bias.token_ids) for row, bias in biased])
        adjusted[places] += _joined((bias.biases for _, bias in biased), torch.float32, adjusted.device)
    if too_early:
        adjusted[_places(adjusted, too_early)] = -torch.inf
    return adjusted


def _penalise(logits: torch.Tensor, sequences: Seq[tuple[int, Sequence]]) -> None:
    """Repetition penalty over prompt and output, then frequency and presence penalty over the output."""
    histories = [_history(sequence) for _, sequence in sequences]
    pairs = zip(sequences, histories, strict=True)
    places = _places(logits, [(row, history.token_ids) for (row, _), history in pairs])
    counts = _joined((history.output_counts for history in histories), torch.int32, logits.device)
    lengths = torch.tensor([len(history.token_ids) for history in histories], device=logits.device)

    def per_token(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, device=logits.device).repeat_interleave(lengths)

    params = [sequence.sampling for _, sequence in sequences]
    repetition = per_token([p.repetition_penalty for p in params])
    values = logits[places]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= per_token([p.frequency_penalty for p in params]) * counts
    values -= per_token([p.presence_penalty for p in params]) * (counts > 0)
    logits[places] = values


def _history(sequence: Sequence) -> TokenHistory:
    if sequence.history is None:
        sequence.history = TokenHistory()
    sequence.history.update(sequence.token_ids, sequence.num_prompt_tokens)
    return sequence.history


def _places(logits: torch.Tensor, tokens: Seq[tuple[int, array[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Index of the given tokens' logits: (rows, token ids), flat."""
    rows = torch.tensor([row for row, _ in tokens], device=logits.device)
    lengths = torch.tensor([len(ids) for _, ids in tokens], device=logits.device)
    ids = _joined((ids for _, ids in tokens), torch.int32, logits.device)
    return rows.repeat_interleave(lengths), ids.long()


def _joined(arrays: Iterable[array[int] | array[float]], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    joined = bytearray().join(memoryview(values) for values in arrays)
    return torch.frombuffer(joined, dtype=dtype).to(device) if joined else torch.empty(0, dtype=dtype, device=device)


# Chance.


class _Draw:
    """Draws one token per row of logits [n, vocab_size], each with its own parameters and random numbers."""

    def __init__(self, logits: torch.Tensor, sequences: Seq[Sequence]) -> None:
        self._logits, self._params = logits, [s.sampling for s in sequences]
        keys = [row_key(s.sampling.seed, s.sampling.choice_index, s.num_output_tokens) for s in sequences]
        self._keys = torch.tensor(keys, device=logits.device)
        self._highest = logits.amax(dim=-1, keepdim=True)

    def from_all(self) -> torch.Tensor:
        """From the whole vocabulary: first a block of tokens by its weight, then a token of the block."""
        num_rows, vocab_size = self._logits.shape
        num_blocks = -(-vocab_size // _BLOCK)
        padded = torch.zeros(num_rows, num_blocks * _BLOCK, device=self._logits.device)
        padded[:, :vocab_size] = self._weights()
        blocks = padded.view(num_rows, num_blocks, _BLOCK)
        block_ids = torch.arange(num_blocks, device=padded.device).expand(num_rows, -1)
        block = _heaviest(blocks.sum(dim=-1, dtype=torch.float64), self._keys, block_ids + _BLOCK_DOMAIN)
        token_ids = block.unsqueeze(1) * _BLOCK + torch.arange(_BLOCK, device=padded.device)
        rows = torch.arange(num_rows, device=padded.device)
        place = _heaviest(blocks[rows, block].double(), self._keys, token_ids)
        return token_ids[rows, place]

    def from_candidates(self) -> torch.Tensor:
        """From what the filters leave."""
        num_rows, vocab_size = self._logits.shape
        chosen = torch.empty(num_rows, dtype=torch.long, device=self._logits.device)
        totals = self._weights().sum(dim=-1, dtype=torch.float64)
        pending, width = torch.arange(num_rows, device=chosen.device), min(_FIRST_CANDIDATES, vocab_size)
        while len(pending):
            params = [self._params[row] for row in pending.tolist()]
            kept = keep(self._logits[pending], params, totals[pending], width)
            place = _heaviest(kept.weights, self._keys[pending], kept.token_ids)
            chosen[pending] = kept.token_ids.gather(1, place.unsqueeze(1)).squeeze(1)
            pending, width = pending[~kept.is_complete], min(width * 8, vocab_size)
        return chosen

    def _weights(self) -> torch.Tensor:
        """Unnormalised probabilities [n, vocab_size], float32; the likeliest token has 1."""
        temperature = torch.tensor([[p.temperature] for p in self._params], device=self._logits.device)
        return torch.exp((self._logits - self._highest) / temperature)


def row_key(seed: int, choice_index: int, token_index: int) -> int:
    """A signed 64-bit number that depends on its arguments only: the key of one token's random numbers."""
    key = struct.pack("<QIQ", seed, choice_index, token_index)
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little", signed=True)


def uniform(keys: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
    """Numbers in (0, 1), float64, that depend on (key of the row, item) only.

    SplitMix64 (Steele, Lea, Flood 2014) with the item as counter. keys: [n] int64; items: [n, m] int64.
    """
    bits = keys.unsqueeze(1) + items * _GOLDEN
    bits = (bits ^ _shift_right(bits, 30)) * _MIX_1
    bits = (bits ^ _shift_right(bits, 27)) * _MIX_2
    bits = bits ^ _shift_right(bits, 31)
    return (_shift_right(bits, 11).double() + 0.5) / 2.0**53


def _shift_right(bits: torch.Tensor, by: int) -> torch.Tensor:
    """Of unsigned numbers, which torch has in int64."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


_GOLDEN, _MIX_1, _MIX_2 = (_signed(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_BLOCK_DOMAIN = 1 << 40
"""Keeps the numbers of blocks apart from those of tokens."""


def _heaviest(weights: torch.Tensor, keys: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
    """Per row [n, m] (float64) a place by chance, each with the probability of its weight; never one without weight."""
    gumbel = -torch.log(-torch.log(uniform(keys, items)))
    return (torch.log(weights) + gumbel).argmax(dim=-1)


@dataclass(frozen=True)
class Kept:
    """What top_k, top_p and min_p leave of rows of logits, among the `width` likeliest tokens."""

    token_ids: torch.Tensor
    """[n, width], likeliest first, equally likely ones by id."""
    weights: torch.Tensor
    """[n, width] float64, unnormalised probabilities; 0 where a filter took a token out."""
    is_complete: torch.Tensor
    """[n] bool: no token behind the first `width` could have been kept."""


def keep(logits: torch.Tensor, params: Seq[SamplingParams], totals: torch.Tensor, width: int) -> Kept:
    """Applies the filters to `logits` [n, vocab_size].

    top_k keeps the k likeliest. Of those, top_p keeps the smallest set whose probability, among what top_k left,
    reaches it. Of all, min_p keeps those at least min_p times as likely as the likeliest.
    totals: [n] float64, the unnormalised probability of whole rows.
    """
    device, vocab_size = logits.device, logits.shape[-1]

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=device).unsqueeze(1)

    top_k = torch.tensor([[p.top_k if 0 < p.top_k < vocab_size else vocab_size] for p in params], device=device)
    top_p, min_p = column([p.top_p for p in params]), column([p.min_p for p in params])
    values, token_ids = _likeliest(logits, width)
    weights = torch.exp((values - values[:, :1]).double() / column([p.temperature for p in params]))
    in_top_k = torch.arange(width, device=device) < top_k
    mass = torch.cumsum(weights * in_top_k, dim=-1)
    wanted = top_p * torch.where(top_k < vocab_size, mass[:, -1:], totals.unsqueeze(1))
    # Kept by top_p: every token before which less than the wanted mass was gathered.
    kept = in_top_k & ((mass - weights < wanted) | (top_p >= 1)) & (weights >= min_p)
    num_kept = kept.sum(dim=-1, keepdim=True)
    # Of tokens as likely as the last candidate any may be missing, so none of those may be among the kept.
    ends_inside = (num_kept < width) & (values.gather(1, (num_kept - 1).clamp(min=0)) > values[:, -1:])
    is_complete = (ends_inside & ((top_k <= width) | (top_k == vocab_size))).squeeze(1) | (width == vocab_size)
    return Kept(token_ids, weights * kept, is_complete)


def _likeliest(logits: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `width` largest logits of each row and their ids, largest first, equal ones by id."""
    top = torch.topk(logits, width, dim=-1, sorted=False)
    ids, by_id = top.indices.sort(dim=-1)
    values, order = top.values.gather(1, by_id).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)
