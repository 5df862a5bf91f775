"""The forward pass of a step, and the one that runs a `transformers` model with attention over pages."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, Protocol

import torch

from engine.attention.base import AttentionBackend, AttentionOptions, AttentionPlan
from engine.device import DeviceEvent, IsWritten
from engine.sequence import ScheduledSequence

PLAN_KEYWORD = "kvferry_plan"
"""Keyword under which a plan passes through a model's forward to its attention."""

OnLayerGroup = Callable[[int, IsWritten | None], None]
"""Called during a step with the index of a layer group. With `IsWritten`: writing the group's K and V is launched, and
`IsWritten` tells when they can be read. With None: K and V are in their pages."""


class Forward(Protocol):
    """Computes a model's layers over paged K and V."""

    def run(
        self,
        batch: Seq[ScheduledSequence],
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor | None,
        on_layer_group: OnLayerGroup | None = None,
    ) -> torch.Tensor | None:
        """Writes K and V of all new tokens to their pages.

        token_ids, positions: [1, tokens] on the device. rows: int64 indices of the tokens that get logits; None: none.
        Returns logits [rows, vocab_size] fp32.
        """
        ...


class TransformersForward:
    """See `Forward`."""

    def __init__(
        self, model: Any, backend: AttentionBackend, num_layers: int, num_layer_groups: int, device: torch.device
    ) -> None:
        self._model, self._backend, self._device = model, backend, device
        self._layers_per_group = num_layers // num_layer_groups

    def run(
        self,
        batch: Seq[ScheduledSequence],
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor | None,
        on_layer_group: OnLayerGroup | None = None,
    ) -> torch.Tensor | None:
        """See `Forward.run`."""
        plan = self._backend.plan(batch)
        if on_layer_group is not None:
            plan = _GroupedPlan(plan, self._layers_per_group, on_layer_group, self._device)
        inputs = {"input_ids": token_ids, "position_ids": positions, "use_cache": False, PLAN_KEYWORD: plan}
        if rows is None:
            # Nothing is sampled, for example after a middle chunk: skip the LM head.
            self._model.base_model(**inputs)
            return None
        logits: torch.Tensor = self._model(**inputs, logits_to_keep=rows).logits[0].float()
        return logits


class _GroupedPlan:
    """A plan that calls `on_layer_group` after each group of layers."""

    def __init__(
        self, plan: AttentionPlan, layers_per_group: int, on_layer_group: OnLayerGroup, device: torch.device
    ) -> None:
        self._plan, self._layers_per_group = plan, layers_per_group
        self._on_layer_group, self._device = on_layer_group, device

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """See `AttentionPlan.attend`."""
        output = self._plan.attend(layer, query, key, value, options)
        if (layer + 1) % self._layers_per_group == 0:
            is_written = DeviceEvent().is_done if self._device.type == "cuda" else None
            self._on_layer_group(layer // self._layers_per_group, is_written)
        return output
