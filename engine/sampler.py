"""Chooses next tokens: greedy, or by chance with counter-based randomness. One pass over the whole batch.

Chance is the Gumbel-max trick: every candidate's log-weight gets its own Gumbel number, the largest sum wins (Gumbel
1954; Maddison et al. 2014, arXiv 1411.0030). The numbers depend on (seed, choice index, token index, token id) only, so
an answer does not depend on its batch, its worker, its tier or a retry, and there is no generator state to hand over.
An inverse CDF with one number per token would do for that if logits were always the same to the last bit, but they are
not: matrix products of other shapes round otherwise. Such noise moves every boundary of a large vocabulary's CDF at
once, and was seen to change a few tokens in a thousand. Here it only matters if the two best sums are as near as that.

Everything is done for all rows together; loops are over attempts and widths (and over rows that have both top_p and a
top_k of more than 256).
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from engine.device import ToHost, to_device
from engine.logprobs import AskedLogprobs, TokenLogprobs
from engine.sequence import SamplingParams, Sequence
from engine.token_history import TokenHistory

_FIRST_CANDIDATES = 256
"""Likeliest tokens looked at first by the filters; widened for rows whose filters may keep more."""
_BLOCK = 64
"""Tokens that a draw from a whole vocabulary takes together at first: then far fewer numbers are needed."""
_ELEMENTS_AT_ONCE = 1 << 20
"""Logits drawn from together on a CPU: several times faster for 64 rows than all 12 MB of them at once."""
_TRIES = 2
"""Draws from the whole vocabulary before a filtered row's candidates are sorted."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The next token of one sequence."""

    token_id: int | None
    """None where the model gave NaN or infinity: that request fails, its neighbours go on."""
    logprobs: TokenLogprobs | None = None
    """If asked for: those of the model, before penalties, bias, temperature and filters."""


class SampledBatch:
    """One sampled token per row: on the device, where the next step can use it, and on its way to the host."""

    def __init__(
        self,
        sequences: Seq[Sequence],
        token_ids: torch.Tensor,
        is_usable: torch.Tensor,
        logprobs: AskedLogprobs,
    ) -> None:
        """token_ids: [len(sequences)] int64, 0 where is_usable, of the same shape, says that there is none."""
        self.token_ids = token_ids
        self.rows = {sequence.sequence_id: row for row, sequence in enumerate(sequences)}
        """By sequence id: its place in `token_ids`."""
        self._logprobs = logprobs
        self._both = ToHost(torch.stack((token_ids, is_usable.to(token_ids.dtype))))

    def wait(self) -> list[SampledToken]:
        """The tokens by row, once the device has sampled them. The one time that the host waits for a device."""
        token_ids, is_usable = self._both.wait().tolist()
        logprobs = self._logprobs.wait()
        return [
            SampledToken(token, logprobs.get(row)) if usable else SampledToken(None)
            for row, (token, usable) in enumerate(zip(token_ids, is_usable, strict=True))
        ]


@torch.inference_mode()
def sample(logits: torch.Tensor, sequences: Seq[Sequence]) -> SampledBatch:
    """Chooses one token per row of `logits` [len(sequences), vocab_size] (float32), which are not changed.

    Does not wait for a device, unless rows have filters (top_p, top_k, min_p): how far those must look depends on what
    they see. All tokens before must be known.
    """
    usable = torch.isfinite(logits.amax(dim=-1))
    adjusted = _adjust(logits, sequences)
    best = adjusted.max(dim=-1)
    usable &= torch.isfinite(best.values)
    tokens = best.indices
    chancy = [row for row, s in enumerate(sequences) if not s.sampling.is_greedy]
    if chancy and (logits.device.type != "cpu" or not usable.all()):  # to ask a GPU would be to wait for it
        adjusted = torch.where(usable.unsqueeze(1), adjusted, 0.0)
    for rows in _slices(chancy, logits):
        if len(rows) == len(sequences):
            tokens = _Draw(adjusted, sequences).tokens()
        else:
            places = to_device(torch.tensor(rows), logits.device)
            tokens[places] = _Draw(adjusted[places], [sequences[row] for row in rows]).tokens()
    tokens = torch.where(usable, tokens, 0)
    return SampledBatch(sequences, tokens, usable, AskedLogprobs(logits, sequences, tokens))


def _slices(rows: list[int], logits: torch.Tensor) -> list[list[int]]:
    """Rows in portions that stay in a processor's caches; a GPU takes them all."""
    most = len(rows) if logits.device.type != "cpu" else max(1, _ELEMENTS_AT_ONCE // logits.shape[-1])
    return [rows[start : start + most] for start in range(0, len(rows), max(most, 1))]


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
    lengths = [len(history.token_ids) for history in histories]

    def per_token(values: list[float]) -> torch.Tensor:
        return _repeated(torch.tensor(values), lengths, logits.device)

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
    rows = _repeated(torch.tensor([row for row, _ in tokens]), [len(ids) for _, ids in tokens], logits.device)
    ids = _joined((ids for _, ids in tokens), torch.int32, logits.device)
    return rows, ids.long()


def _repeated(values: torch.Tensor, times: list[int], device: torch.device) -> torch.Tensor:
    """Each value so many times. On the host, which knows how many that are in all; a device would be asked."""
    return to_device(values.repeat_interleave(torch.tensor(times)), device)


def _joined(arrays: Iterable[array[int] | array[float]], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    joined = bytearray().join(memoryview(values) for values in arrays)
    if not joined:
        return torch.empty(0, dtype=dtype, device=device)
    return to_device(torch.frombuffer(joined, dtype=dtype), device)


# Chance.


class _Draw:
    """Draws one token per row of logits [n, vocab_size], each with its own parameters and random numbers."""

    def __init__(self, logits: torch.Tensor, sequences: Seq[Sequence]) -> None:
        self._logits, self._params = logits, [s.sampling for s in sequences]
        keys = [row_key(s.sampling.seed, s.sampling.choice_index, s.num_output_tokens) for s in sequences]
        self._keys = to_device(torch.tensor(keys), logits.device)
        temperature = to_device(torch.tensor([[p.temperature] for p in self._params]), logits.device)
        # Unnormalised probabilities; the likeliest token has 1.
        self._weights = (logits - logits.amax(dim=-1, keepdim=True)).div_(temperature).exp_()
        self._blocks = self._in_blocks()
        self._block_weights = self._blocks.sum(dim=-1, dtype=torch.float64)

    def tokens(self) -> torch.Tensor:
        """[n] token ids."""
        rows = torch.arange(len(self._params), device=self._keys.device)
        chosen = self._from_all(rows, 0)
        filtered = [place for place, p in enumerate(self._params) if p.has_filter]
        if not filtered:
            return chosen
        few = [place for place in filtered if 0 < self._params[place].top_k <= _FIRST_CANDIDATES]
        # What is drawn from everything, on condition that the filters keep it, is drawn from what they keep.
        pending = rows[[place for place in filtered if place not in few]]
        for attempt in range(1, _TRIES + 1):
            if not len(pending):
                break
            pending = pending[~self._is_kept(pending, chosen[pending])]
            if attempt < _TRIES:
                chosen[pending] = self._from_all(pending, attempt)
        pending = torch.cat([pending, rows[few]])
        if len(pending):
            chosen[pending] = self._from_candidates(pending)
        return chosen

    def _in_blocks(self) -> torch.Tensor:
        """The weights as [n, num_blocks, _BLOCK]."""
        num_rows, vocab_size = self._weights.shape
        missing = -vocab_size % _BLOCK
        padded = torch.nn.functional.pad(self._weights, (0, missing)) if missing else self._weights
        return padded.view(num_rows, -1, _BLOCK)

    def _from_all(self, rows: torch.Tensor, attempt: int) -> torch.Tensor:
        """From the whole vocabulary: first a block of tokens by its weight, then a token of the block."""
        domain = 2 * attempt * _DOMAIN
        block_ids = torch.arange(self._blocks.shape[1], device=rows.device).expand(len(rows), -1)
        keys = self._keys[rows]
        block = _heaviest(self._block_weights[rows], keys, block_ids + (domain + _DOMAIN))
        token_ids = block.unsqueeze(1) * _BLOCK + torch.arange(_BLOCK, device=rows.device)
        place = _heaviest(self._blocks[rows, block].double(), keys, token_ids + domain)
        return block * _BLOCK + place

    def _is_kept(self, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Whether the filters keep a token of each row: few enough are likelier, and it is likely enough."""
        everything = len(rows) == len(self._params)
        logits = self._logits if everything else self._logits[rows]
        weights = self._weights if everything else self._weights[rows]
        column = tokens.unsqueeze(1)
        its_logit, its_weight = logits.gather(1, column), weights.gather(1, column).squeeze(1)
        likelier, equal = logits > its_logit, logits == its_logit
        tied = equal.sum(dim=-1) > 1
        if tied.any():
            # Of equally likely ones, those with a smaller id come first.
            smaller = torch.arange(logits.shape[-1], device=rows.device) < column[tied]
            likelier[tied] |= equal[tied] & smaller
        params = [self._params[row] for row in rows.tolist()]
        top_p, min_p = (
            torch.tensor(values, dtype=torch.float64, device=rows.device)
            for values in zip(*((p.top_p, p.min_p) for p in params), strict=True)
        )
        mass = self._block_weights[rows].sum(dim=-1)
        for place, p in enumerate(params):
            if 0 < p.top_k < logits.shape[-1] and p.top_p < 1:
                # Rare: a top_k above _FIRST_CANDIDATES, since smaller ones do not come here, beside top_p.
                mass[place] = _mass_of_top(logits[place], weights[place], p.top_k)
        before = (weights * likelier).sum(dim=-1, dtype=torch.float64)
        kept = ((before < top_p * mass) | (top_p >= 1)) & (its_weight >= min_p)
        if any(p.top_k for p in params):
            top_k = torch.tensor([p.top_k or logits.shape[-1] for p in params], device=rows.device)
            kept &= likelier.sum(dim=-1) < top_k
        return kept

    def _from_candidates(self, rows: torch.Tensor) -> torch.Tensor:
        """From what the filters leave of the likeliest tokens."""
        vocab_size = self._logits.shape[-1]
        chosen = torch.empty_like(rows)
        pending, width = torch.arange(len(rows), device=rows.device), _FIRST_CANDIDATES
        fewest = min(self._params[row].top_k for row in rows.tolist())
        while width < fewest:
            width *= 8
        width = min(width, vocab_size)
        while len(pending):
            of = rows[pending]
            params = [self._params[row] for row in of.tolist()]
            kept = keep(self._logits[of], params, self._block_weights[of].sum(dim=-1), width)
            place = _heaviest(kept.weights, self._keys[of], kept.token_ids + 2 * _TRIES * _DOMAIN)
            chosen[pending] = kept.token_ids.gather(1, place.unsqueeze(1)).squeeze(1)
            pending, width = pending[~kept.is_complete], min(width * 8, vocab_size)
        return chosen


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
    return (_shift_right(bits, 12).double() + 0.5) / 2.0**52


def _shift_right(bits: torch.Tensor, by: int) -> torch.Tensor:
    """Of unsigned numbers, which torch has in int64."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


_GOLDEN, _MIX_1, _MIX_2 = (_signed(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_DOMAIN = 1 << 40
"""Keeps the numbers of tokens, of blocks and of each attempt apart."""


def _heaviest(weights: torch.Tensor, keys: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
    """Per row [n, m] (float64) a place by chance, each with the probability of its weight; never one without weight."""
    gumbel = -torch.log(-torch.log(uniform(keys, items)))
    return (torch.log(weights) + gumbel).argmax(dim=-1)


def _mass_of_top(logits: torch.Tensor, weights: torch.Tensor, top_k: int) -> torch.Tensor:
    """Weight of the `top_k` likeliest tokens of one row [vocab_size]; equally likely ones weigh the same."""
    last = torch.kthvalue(logits, logits.shape[-1] - top_k + 1).values
    above = logits > last
    its_weight = weights[logits == last][0].double()
    return (weights * above).sum(dtype=torch.float64) + its_weight * (top_k - above.sum())


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
    weights = torch.exp((values.double() - values[:, :1]) / column([p.temperature for p in params]))
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
