"""Samples next tokens for a whole batch: greedy, or at random with counter-based random numbers.

Random sampling uses the Gumbel-max trick: each candidate's log-weight plus its own Gumbel number; the largest sum wins
(Gumbel 1954; Maddison et al. 2014, arXiv 1411.0030). The numbers depend on (seed, choice index, token index, token id)
only. So an output does not depend on its batch, worker, tier or retries, and no generator state has to be transferred.

An inverse CDF with one random number per token is less robust. Logits differ in their last bits, because matrix
products of other shapes round differently. Such noise moves all boundaries of a large vocabulary's CDF at once;
measured, a few tokens in a thousand changed. Here noise matters only if the two largest sums are nearly equal.

All rows are sampled together. Loops are over attempts and widths, and over rows with both top_p and a top_k above 256.
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
from engine.logprobs import RequestedLogprobs, TokenLogprobs
from engine.sequence import SamplingParams, Sequence
from engine.token_history import TokenHistory

_FIRST_CANDIDATES = 256
"""Number of likeliest tokens that are sorted first; more for rows whose filters may keep more."""
_BLOCK = 64
"""Tokens per block. A draw from the whole vocabulary draws a block first: this needs far fewer random numbers."""
_ELEMENTS_AT_ONCE = 1 << 20
"""Logits per slice of rows on a CPU. For 64 rows, slices are several times faster than all 12 MB at once."""
_TRIES = 2
"""Draws from the whole vocabulary, for a row with filters, before its candidates are sorted."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The next token of one sequence."""

    token_id: int | None
    """None if the model's logits are NaN or infinite: this request fails, the rest of the batch continues."""
    logprobs: TokenLogprobs | None = None
    """If requested: log-probabilities of the raw logits, before penalties, bias, temperature and filters."""


class SampledBatch:
    """One sampled token per row: on the device for the next step, and being copied to the host."""

    def __init__(
        self,
        sequences: Seq[Sequence],
        token_ids: torch.Tensor,
        is_usable: torch.Tensor,
        logprobs: RequestedLogprobs,
    ) -> None:
        """token_ids: [len(sequences)] int64, 0 where no token could be sampled. is_usable: False for those rows."""
        self.token_ids = token_ids
        self.rows = {sequence.sequence_id: row for row, sequence in enumerate(sequences)}
        """Sequence id to index in `token_ids`."""
        self._logprobs = logprobs
        self._both = ToHost(torch.stack((token_ids, is_usable.to(token_ids.dtype))))

    def wait(self) -> list[SampledToken]:
        """Blocks until the device has sampled, then returns the tokens by row. No other code on the hot path blocks."""
        token_ids, is_usable = self._both.wait().tolist()
        logprobs = self._logprobs.wait()
        return [
            SampledToken(token, logprobs.get(row)) if usable else SampledToken(None)
            for row, (token, usable) in enumerate(zip(token_ids, is_usable, strict=True))
        ]


@torch.inference_mode()
def sample(logits: torch.Tensor, sequences: Seq[Sequence]) -> SampledBatch:
    """Samples one token per row of `logits` [len(sequences), vocab_size] (float32). `logits` is not changed.

    Does not wait for the device, unless rows have filters (top_p, top_k, min_p): the number of candidates to sort
    depends on the logits. No sequence may have a pending token.
    """
    usable = torch.isfinite(logits.amax(dim=-1))
    adjusted = _adjust(logits, sequences)
    best = adjusted.max(dim=-1)
    usable &= torch.isfinite(best.values)
    tokens = best.indices
    random_rows = [row for row, s in enumerate(sequences) if not s.sampling.is_greedy]
    if random_rows and (logits.device.type != "cpu" or not usable.all()):  # reading `usable` would wait for a GPU
        adjusted = torch.where(usable.unsqueeze(1), adjusted, 0.0)
    for rows in _slices(random_rows, logits):
        if len(rows) == len(sequences):
            tokens = _Draw(adjusted, sequences).tokens()
        else:
            indices = to_device(torch.tensor(rows), logits.device)
            tokens[indices] = _Draw(adjusted[indices], [sequences[row] for row in rows]).tokens()
    tokens = torch.where(usable, tokens, 0)
    return SampledBatch(sequences, tokens, usable, RequestedLogprobs(logits, sequences, tokens))


def _slices(rows: list[int], logits: torch.Tensor) -> list[list[int]]:
    """Rows in slices that fit a processor's caches; one slice on a GPU."""
    most = len(rows) if logits.device.type != "cpu" else max(1, _ELEMENTS_AT_ONCE // logits.shape[-1])
    return [rows[start : start + most] for start in range(0, len(rows), max(most, 1))]


# Changes to logits before sampling: penalties, bias, min_tokens.


def _adjust(logits: torch.Tensor, sequences: Seq[Sequence]) -> torch.Tensor:
    """The logits with penalties, bias and min_tokens applied; the same tensor if no row has any."""
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
        indices = _flat_indices(adjusted, [(row, bias.token_ids) for row, bias in biased])
        adjusted[indices] += _joined((bias.biases for _, bias in biased), torch.float32, adjusted.device)
    if too_early:
        adjusted[_flat_indices(adjusted, too_early)] = -torch.inf
    return adjusted


def _penalise(logits: torch.Tensor, sequences: Seq[tuple[int, Sequence]]) -> None:
    """Repetition penalty over prompt and output, then frequency and presence penalty over the output."""
    histories = [_history(sequence) for _, sequence in sequences]
    pairs = zip(sequences, histories, strict=True)
    indices = _flat_indices(logits, [(row, history.token_ids) for (row, _), history in pairs])
    counts = _joined((history.output_counts for history in histories), torch.int32, logits.device)
    lengths = [len(history.token_ids) for history in histories]

    def per_token(values: list[float]) -> torch.Tensor:
        return _repeated(torch.tensor(values), lengths, logits.device)

    params = [sequence.sampling for _, sequence in sequences]
    repetition = per_token([p.repetition_penalty for p in params])
    values = logits[indices]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= per_token([p.frequency_penalty for p in params]) * counts
    values -= per_token([p.presence_penalty for p in params]) * (counts > 0)
    logits[indices] = values


def _history(sequence: Sequence) -> TokenHistory:
    if sequence.history is None:
        sequence.history = TokenHistory()
    sequence.history.update(sequence.token_ids, sequence.num_prompt_tokens)
    return sequence.history


def _flat_indices(logits: torch.Tensor, tokens: Seq[tuple[int, array[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of the given tokens' logits: (rows, token ids), each [number of tokens]."""
    rows = _repeated(torch.tensor([row for row, _ in tokens]), [len(ids) for _, ids in tokens], logits.device)
    ids = _joined((ids for _, ids in tokens), torch.int32, logits.device)
    return rows, ids.long()


def _repeated(values: torch.Tensor, times: list[int], device: torch.device) -> torch.Tensor:
    """Repeats each value. On the host, since on a device torch would wait to learn the size of the result."""
    return to_device(values.repeat_interleave(torch.tensor(times)), device)


def _joined(arrays: Iterable[array[int] | array[float]], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    joined = bytearray().join(memoryview(values) for values in arrays)
    if not joined:
        return torch.empty(0, dtype=dtype, device=device)
    return to_device(torch.frombuffer(joined, dtype=dtype), device)


# Random sampling.


class _Draw:
    """Draws one token per row of logits [n, vocab_size], each with its own parameters and random numbers."""

    def __init__(self, logits: torch.Tensor, sequences: Seq[Sequence]) -> None:
        self._logits, self._params = logits, [s.sampling for s in sequences]
        keys = [row_key(s.sampling.seed, s.sampling.choice_index, s.num_output_tokens) for s in sequences]
        self._keys = to_device(torch.tensor(keys), logits.device)
        temperature = to_device(torch.tensor([[p.temperature] for p in self._params]), logits.device)
        # Unnormalized probabilities; the likeliest token has 1.
        self._weights = (logits - logits.amax(dim=-1, keepdim=True)).div_(temperature).exp_()
        self._blocks = self._in_blocks()
        self._block_weights = self._blocks.sum(dim=-1, dtype=torch.float64)

    def tokens(self) -> torch.Tensor:
        """[n] token ids."""
        rows = torch.arange(len(self._params), device=self._keys.device)
        drawn = self._from_all(rows, 0)
        filtered = [row for row, p in enumerate(self._params) if p.has_filter]
        if not filtered:
            return drawn
        few = [row for row in filtered if 0 < self._params[row].top_k <= _FIRST_CANDIDATES]
        # Rejection sampling: draw from the whole vocabulary until the filters keep the token.
        pending = rows[[row for row in filtered if row not in few]]
        for attempt in range(1, _TRIES + 1):
            if not len(pending):
                break
            pending = pending[~self._is_kept(pending, drawn[pending])]
            if attempt < _TRIES:
                drawn[pending] = self._from_all(pending, attempt)
        pending = torch.cat([pending, rows[few]])
        if len(pending):
            drawn[pending] = self._from_candidates(pending)
        return drawn

    def _in_blocks(self) -> torch.Tensor:
        """The weights as [n, num_blocks, _BLOCK]."""
        num_rows, vocab_size = self._weights.shape
        missing = -vocab_size % _BLOCK
        padded = torch.nn.functional.pad(self._weights, (0, missing)) if missing else self._weights
        return padded.view(num_rows, -1, _BLOCK)

    def _from_all(self, rows: torch.Tensor, attempt: int) -> torch.Tensor:
        """Draws from the whole vocabulary: a block of tokens by its weight, then a token of the block."""
        domain = 2 * attempt * _DOMAIN
        block_ids = torch.arange(self._blocks.shape[1], device=rows.device).expand(len(rows), -1)
        keys = self._keys[rows]
        block = _heaviest(self._block_weights[rows], keys, block_ids + (domain + _DOMAIN))
        token_ids = block.unsqueeze(1) * _BLOCK + torch.arange(_BLOCK, device=rows.device)
        offset = _heaviest(self._blocks[rows, block].double(), keys, token_ids + domain)
        return block * _BLOCK + offset

    def _is_kept(self, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """[len(rows)] bool: whether the filters of each row keep its token of `tokens`."""
        everything = len(rows) == len(self._params)
        logits = self._logits if everything else self._logits[rows]
        weights = self._weights if everything else self._weights[rows]
        column = tokens.unsqueeze(1)
        its_logit, its_weight = logits.gather(1, column), weights.gather(1, column).squeeze(1)
        likelier, equal = logits > its_logit, logits == its_logit
        tied = equal.sum(dim=-1) > 1
        if tied.any():
            # Ties are ordered by token id.
            smaller = torch.arange(logits.shape[-1], device=rows.device) < column[tied]
            likelier[tied] |= equal[tied] & smaller
        params = [self._params[row] for row in rows.tolist()]
        top_p, min_p = (
            torch.tensor(values, dtype=torch.float64, device=rows.device)
            for values in zip(*((p.top_p, p.min_p) for p in params), strict=True)
        )
        mass = self._block_weights[rows].sum(dim=-1)
        for row, p in enumerate(params):
            if 0 < p.top_k < logits.shape[-1] and p.top_p < 1:
                # Rare: top_p with a top_k above _FIRST_CANDIDATES. Rows with a smaller top_k do not get here.
                mass[row] = _mass_of_top(logits[row], weights[row], p.top_k)
        before = (weights * likelier).sum(dim=-1, dtype=torch.float64)
        kept = ((before < top_p * mass) | (top_p >= 1)) & (its_weight >= min_p)
        if any(p.top_k for p in params):
            top_k = torch.tensor([p.top_k or logits.shape[-1] for p in params], device=rows.device)
            kept &= likelier.sum(dim=-1) < top_k
        return kept

    def _from_candidates(self, rows: torch.Tensor) -> torch.Tensor:
        """Draws from the tokens that the filters keep, after sorting the likeliest tokens."""
        vocab_size = self._logits.shape[-1]
        drawn = torch.empty_like(rows)
        pending, width = torch.arange(len(rows), device=rows.device), _FIRST_CANDIDATES
        fewest = min(self._params[row].top_k for row in rows.tolist())
        while width < fewest:
            width *= 8
        width = min(width, vocab_size)
        while len(pending):
            of = rows[pending]
            params = [self._params[row] for row in of.tolist()]
            kept = keep(self._logits[of], params, self._block_weights[of].sum(dim=-1), width)
            rank = _heaviest(kept.weights, self._keys[of], kept.token_ids + 2 * _TRIES * _DOMAIN)
            drawn[pending] = kept.token_ids.gather(1, rank.unsqueeze(1)).squeeze(1)
            pending, width = pending[~kept.is_complete], min(width * 8, vocab_size)
        return drawn


def row_key(seed: int, choice_index: int, token_index: int) -> int:
    """Key of one token's random numbers: a signed 64-bit hash of the arguments."""
    key = struct.pack("<QIQ", seed, choice_index, token_index)
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little", signed=True)


def uniform(keys: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
    """Pseudorandom numbers in (0, 1), [n, m] float64, that depend on (key of the row, item) only.

    SplitMix64 (Steele, Lea, Flood 2014) with the item as counter. keys: [n] int64; items: [n, m] int64.
    """
    bits = keys.unsqueeze(1) + items * _GOLDEN
    bits = (bits ^ _shift_right(bits, 30)) * _MIX_1
    bits = (bits ^ _shift_right(bits, 27)) * _MIX_2
    bits = bits ^ _shift_right(bits, 31)
    return (_shift_right(bits, 12).double() + 0.5) / 2.0**52


def _shift_right(bits: torch.Tensor, by: int) -> torch.Tensor:
    """Logical shift: torch's shift of int64 is arithmetic."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


_GOLDEN, _MIX_1, _MIX_2 = (_signed(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_DOMAIN = 1 << 40
"""Offset between the counters of tokens and blocks, and of each attempt, so that random numbers are not reused."""


def _heaviest(weights: torch.Tensor, keys: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
    """Samples one column per row of `weights` [n, m] (float64), with probability proportional to its weight."""
    gumbel = -torch.log(-torch.log(uniform(keys, items)))
    return (torch.log(weights) + gumbel).argmax(dim=-1)


def _mass_of_top(logits: torch.Tensor, weights: torch.Tensor, top_k: int) -> torch.Tensor:
    """Total weight of the `top_k` likeliest tokens of one row [vocab_size]; tied tokens have equal weight."""
    last = torch.kthvalue(logits, logits.shape[-1] - top_k + 1).values
    above = logits > last
    its_weight = weights[logits == last][0].double()
    return (weights * above).sum(dtype=torch.float64) + its_weight * (top_k - above.sum())


@dataclass(frozen=True)
class Kept:
    """The tokens that top_k, top_p and min_p keep, among the `width` likeliest tokens of each row."""

    token_ids: torch.Tensor
    """[n, width], likeliest first, ties by token id."""
    weights: torch.Tensor
    """[n, width] float64, unnormalized probabilities; 0 for tokens that a filter removed."""
    is_complete: torch.Tensor
    """[n] bool: the filters keep no token after the first `width`."""


def keep(logits: torch.Tensor, params: Seq[SamplingParams], totals: torch.Tensor, width: int) -> Kept:
    """Applies the filters to `logits` [n, vocab_size].

    top_k keeps the k likeliest tokens. Of these, top_p keeps the smallest set whose probability, renormalized after
    top_k, reaches top_p. Of these, min_p keeps the tokens at least min_p times as likely as the likeliest token.
    totals: [n] float64, the sum of unnormalized probabilities of each row.
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
    # top_p keeps a token if the tokens before have less than the wanted mass.
    kept = in_top_k & ((mass - weights < wanted) | (top_p >= 1)) & (weights >= min_p)
    num_kept = kept.sum(dim=-1, keepdim=True)
    # topk may have left out any token tied with the last candidate, so a row with such a token kept is incomplete.
    ends_inside = (num_kept < width) & (values.gather(1, (num_kept - 1).clamp(min=0)) > values[:, -1:])
    is_complete = (ends_inside & ((top_k <= width) | (top_k == vocab_size))).squeeze(1) | (width == vocab_size)
    return Kept(token_ids, weights * kept, is_complete)


def _likeliest(logits: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `width` largest logits of each row and their ids, largest first, ties by id."""
    top = torch.topk(logits, width, dim=-1, sorted=False)
    ids, by_id = top.indices.sort(dim=-1)
    values, order = top.values.gather(1, by_id).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)
