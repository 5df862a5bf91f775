"""Log-probabilities: those of the model, before penalties, bias, temperature and filters."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from engine.device import ToHost, to_device
from engine.sequence import Sequence

LOWEST_LOGPROB = -10_000.0
"""Given for tokens that the model makes impossible, so that every value is finite."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the token that is there, then the likeliest ones, best first."""

    token_ids: list[int]
    logprobs: list[float]


def logprobs_at(logits: torch.Tensor, token_ids: Seq[int], num_top: int) -> list[TokenLogprobs]:
    """Log-probabilities of one token per row of `logits` [len(token_ids), vocab_size], and of the `num_top` likeliest.

    Of equally likely ones any may be left out. Values are at least LOWEST_LOGPROB.
    """
    ids, values = _logprobs_at(logits, to_device(torch.tensor(token_ids), logits.device), num_top)
    return [TokenLogprobs(*pair) for pair in zip(ids.tolist(), values.tolist(), strict=True)]


def _logprobs_at(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and log-probabilities, both [n, 1 + num_top], of which the first are those of `token_ids` [n]."""
    there = token_ids.unsqueeze(1)
    top = torch.topk(logits, min(num_top, logits.shape[-1]), dim=-1)
    highest = logits.amax(dim=-1, keepdim=True)
    total = torch.exp(logits - highest).sum(dim=-1, keepdim=True, dtype=torch.float64)
    raw = torch.cat([logits.gather(1, there), top.values], dim=1).double()
    values = (raw - highest - torch.log(total)).clamp(min=LOWEST_LOGPROB, max=0.0)
    return torch.cat([there, top.indices], dim=1), values


class AskedLogprobs:
    """Log-probabilities of the rows that want them, on their way to the host."""

    def __init__(self, logits: torch.Tensor, sequences: Seq[Sequence], token_ids: torch.Tensor) -> None:
        params = (s.sampling for s in sequences)
        self._asked = {row: p.num_logprobs for row, p in enumerate(params) if p.num_logprobs is not None}
        if self._asked:
            rows = to_device(torch.tensor(list(self._asked)), logits.device)
            found = _logprobs_at(logits[rows], token_ids[rows], max(self._asked.values()))
            self._ids, self._values = map(ToHost, found)

    def wait(self) -> dict[int, TokenLogprobs]:
        """By row."""
        if not self._asked:
            return {}
        found = zip(self._asked.items(), self._ids.wait().tolist(), self._values.wait().tolist(), strict=True)
        return {row: TokenLogprobs(ids[: 1 + number], values[: 1 + number]) for (row, number), ids, values in found}
