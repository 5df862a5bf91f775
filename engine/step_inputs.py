"""Builds the model's input tensors for a step, on the device."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from engine.device import to_device
from engine.sampler import SampledBatch
from engine.sequence import ScheduledSequence


def step_inputs(
    batch: Seq[ScheduledSequence], previous: SampledBatch | None, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and positions of all new tokens, each [1, tokens].

    previous: the last sampled batch, which has the pending tokens of this batch. Pending tokens stay on the device.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    pending: dict[int, str] = {}  # index in the flat batch -> sequence id
    for entry in batch:
        sequence, start = entry.sequence, entry.sequence.num_computed_tokens
        end = start + entry.num_new_tokens
        known = sequence.token_ids[start:end]
        token_ids += known
        positions += range(start, end)
        if len(known) < entry.num_new_tokens:
            pending[len(token_ids)] = sequence.sequence_id
            token_ids.append(0)
    if not pending:
        both = to_device(torch.tensor([token_ids, positions]), device)
        return both[:1], both[1:]
    assert previous is not None, "a pending token comes from an earlier step"
    rows = [previous.rows[pending[index]] if index in pending else -1 for index in range(len(token_ids))]
    all_three = to_device(torch.tensor([token_ids, positions, rows]), device)
    ids, at, sources = all_three[:1], all_three[1:2], all_three[2:]
    return torch.where(sources < 0, ids, previous.token_ids[sources.clamp(min=0)]), at
