"""What the model runner asks of an attention backend.

A backend makes one plan per step; every layer of that step uses it. Nothing is global: the plan travels
through the model's forward as a keyword.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.sequence import ScheduledSequence


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What a model's layer asks for beside plain causal attention."""

    scaling: float
    """Factor on the scores."""
    sliding_window: int | None = None
    """A token sees this many tokens, itself included. None: all before it."""
    softcap: float | None = None
    """Scores become softcap * tanh(score / softcap). None: unchanged."""


class AttentionPlan(Protocol):
    """Attention of one step."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Stores the new keys and values in their pages, then attends over all pages of each sequence.

        query: [num_tokens, num_heads, head_dim]; key, value: [num_tokens, num_kv_heads, head_dim].
        Returns [num_tokens, num_heads, head_dim].
        """
        ...


class AttentionBackend(Protocol):
    """Makes plans over one KV cache."""

    def plan(self, batch: Seq[ScheduledSequence]) -> AttentionPlan:
        """Lays out a step. Pages for all its new tokens must be in the sequences' page tables."""
        ...
