"""Log-probabilities of the model's raw logits: before penalties, bias, temperature and filters."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from engine.device import ToHost, to_device
from engine.sequence import Sequence

LOWEST_LOGPROB = -10_000.0
"""Reported for tokens with probability 0, so that every value is finite."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: of the token at that position, then of the likeliest tokens, best first."""

    token_ids: list[int]
    logprobs: list[float]


def logprobs_at(logits: torch.Tensor, token_ids: Seq[int], num_top: int) -> list[TokenLogprobs]:
    """Log-probabilities of one token per row of `logits` [len(token_ids), vocab_size], and of the `num_top` likeliest.

    If tokens are tied for the last rank, any of them may be left out. Values are at least LOWEST_LOGPROB.
    """
    ids, values = _logprobs_at(logits, to_device(torch.tensor(token_ids), logits.device), num_top)
    return [TokenLogprobs(*pair) for pair in zip(ids.tolist(), values.tolist(), strict=True)]


def _logprobs_at(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and log-probabilities, both [n, 1 + num_top]. Column 0 is about `token_ids` [n]."""
    column = token_ids.unsqueeze(1)
    top = torch.topk(logits, min(num_top, logits.shape[-1]), dim=-1)
    highest = logits.amax(dim=-1, keepdim=True)
    total = torch.exp(logits - highest).sum(dim=-1, keepdim=True, dtype=torch.float64)
    raw = torch.cat([logits.gather(1, column), top.values], dim=1).double()
    values = (raw - highest - torch.log(total)).clamp(min=LOWEST_LOGPROB, max=0.0)
    return torch.cat([column, top.indices], dim=1), values


class RequestedLogprobs:
    """Log-probabilities of the rows that requested them, while they are copied to the host."""

    def __init__(self, logits: torch.Tensor, sequences: Seq[Sequence], token_ids: torch.Tensor) -> None:
        params = (s.sampling for s in sequences)
        self._requested = {row: p.num_logprobs for row, p in enumerate(params) if p.num_logprobs is not None}
        if self._requested:
            rows = to_device(torch.tensor(list(self._requested)), logits.device)
            found = _logprobs_at(logits[rows], token_ids[rows], max(self._requested.values()))
            self._ids, self._values = map(ToHost, found)

    def wait(self) -> dict[int, TokenLogprobs]:
        """Blocks until the copy is done. Returns log-probabilities by row."""
        if not self._requested:
            return {}
        found = zip(self._requested.items(), self._ids.wait().tolist(), self._values.wait().tolist(), strict=True)
        return {row: TokenLogprobs(ids[: 1 + number], values[: 1 + number]) for (row, number), ids, values in found}
