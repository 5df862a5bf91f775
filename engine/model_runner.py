"""Runs one step: a flat row of new tokens of many sequences through the model."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from engine.attention.base import AttentionBackend
from engine.attention.native_steps import native_attention
from engine.attention.torch_paged import TorchPagedAttention
from engine.kv_cache import KvCache
from engine.loader import PLAN_KEYWORD, LoadedModel
from engine.sequence import ScheduledSequence


@dataclass(frozen=True, slots=True)
class PromptLogits:
    """Logits behind all new tokens of a sequence that wants log-probabilities of its prompt."""

    scheduled: ScheduledSequence
    logits: torch.Tensor
    """[num_new_tokens, vocab_size] float32."""


@dataclass(frozen=True, slots=True)
class StepLogits:
    """Logits of the sequences whose last known token was computed in a step."""

    scheduled: list[ScheduledSequence]
    """The sampled ones, in batch order."""
    logits: torch.Tensor | None
    """[len(scheduled), vocab_size] float32; None if nothing is sampled."""
    prompts: list[PromptLogits] = field(default_factory=list)


class StepRunner(Protocol):
    """What a worker's loop needs of the model: the real runner, or a scripted one in tests."""

    def run(self, batch: Seq[ScheduledSequence]) -> StepLogits:
        """Computes K and V of all new tokens, and logits where a next token can be chosen. Changes no sequence.

        When it returns, the pages hold what they should: they may be sent.
        """
        ...


class ModelRunner:
    """Runs a `transformers` model over a paged KV cache."""

    def __init__(self, loaded: LoadedModel, kv_cache: KvCache, backend: AttentionBackend | None = None) -> None:
        self._model: Any = loaded.model
        self._device = kv_cache.tensor.device
        if backend is None:
            backend = native_attention(kv_cache, loaded.num_query_heads) or TorchPagedAttention(kv_cache)
        self.backend: AttentionBackend = backend

    @torch.inference_mode()
    def run(self, batch: Seq[ScheduledSequence]) -> StepLogits:
        """See `StepRunner.run`. Pages for all new tokens must be in the page tables."""
        token_ids: list[int] = []
        positions: list[int] = []
        sampled: list[ScheduledSequence] = []
        sampled_rows: list[int] = []
        prompts: list[ScheduledSequence] = []
        prompt_rows: list[int] = []
        for entry in batch:
            start = entry.sequence.num_computed_tokens
            end = start + entry.num_new_tokens
            if entry.sequence.sampling.prompt_logprobs and start < entry.sequence.num_prompt_tokens:
                prompts.append(entry)
                prompt_rows += range(len(token_ids), len(token_ids) + entry.num_new_tokens)
            token_ids += entry.sequence.token_ids[start:end]
            positions += range(start, end)
            if entry.is_sampled:
                sampled.append(entry)
                sampled_rows.append(len(token_ids) - 1)
        inputs = {
            "input_ids": torch.tensor([token_ids], device=self._device),
            "position_ids": torch.tensor([positions], device=self._device),
            "use_cache": False,
            PLAN_KEYWORD: self.backend.plan(batch),
        }
        logits: torch.Tensor | None = None
        of_prompts: list[PromptLogits] = []
        if sampled_rows or prompt_rows:
            rows = torch.tensor(sampled_rows + prompt_rows, device=self._device)
            all_logits = self._model(**inputs, logits_to_keep=rows).logits[0].float()
            logits = all_logits[: len(sampled)] if sampled else None
            pieces = all_logits[len(sampled) :].split([entry.num_new_tokens for entry in prompts]) if prompts else ()
            of_prompts = [PromptLogits(entry, piece) for entry, piece in zip(prompts, pieces, strict=True)]
        else:
            # A middle chunk: the body only, the LM head never runs.
            self._model.base_model(**inputs)
        if self._device.type == "cuda":
            # Whoever sends these pages must not read them before they are written.
            torch.cuda.synchronize(self._device)
        return StepLogits(sampled, logits, of_prompts)
