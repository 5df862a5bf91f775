"""The interface between the model runner and attention backends.

A backend makes one plan per step, which every layer of the step uses. The plan is passed through the model's forward as
a keyword, so there is no global state.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.sequence import ScheduledSequence


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """Parameters of a layer's causal attention."""

    scaling: float
    """Factor of the scores."""
    sliding_window: int | None = None
    """A token attends to this many tokens, itself included. None: to all earlier tokens."""
    softcap: float | None = None
    """Scores become softcap * tanh(score / softcap). None: unchanged."""


class AttentionPlan(Protocol):
    """Attention of one step."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Writes the new keys and values to their pages, then attends over all pages of each sequence.

        query: [num_tokens, num_heads, head_dim]; key, value: [num_tokens, num_kv_heads, head_dim].
        Returns [num_tokens, num_heads, head_dim].
        """
        ...


class AttentionBackend(Protocol):
    """Makes plans over one KV cache."""

    def plan(self, batch: Seq[ScheduledSequence]) -> AttentionPlan:
        """Plans a step. The page tables must have pages for all new tokens."""
        ...
