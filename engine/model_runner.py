"""Runs one step: one forward pass over the concatenated new tokens of many sequences.

On a GPU `run` returns while the device still computes. At most two steps are in flight: `run` launches a step, then
waits for the step before.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

import torch

from engine.attention.base import AttentionBackend
from engine.attention.choice import choose_attention
from engine.attention.flashinfer import FlashInferAttention
from engine.cuda_graphs import GraphSizes, StepGraphs
from engine.device import DeviceEvent, IsWritten, to_device
from engine.forward import Forward, OnLayerGroup, TransformersForward
from engine.fused_model import FusedForward
from engine.kv_cache import KvCache
from engine.loader import LoadedModel
from engine.sampler import SampledBatch, sample
from engine.sequence import ScheduledSequence, Sequence
from engine.step_inputs import step_inputs

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PromptLogits:
    """Logits after each new token of a sequence, for log-probabilities of its prompt."""

    sequence: Sequence
    start: int
    """Position of the first of these tokens."""
    logits: torch.Tensor
    """[num_new_tokens, vocab_size] float32."""


@dataclass(frozen=True, slots=True)
class StepLogits:
    """Logits of the sequences whose last known token a step has computed."""

    scheduled: list[ScheduledSequence]
    """The entries to sample, in batch order."""
    logits: torch.Tensor | None
    """[len(scheduled), vocab_size] float32; None if nothing is sampled."""
    prompts: list[PromptLogits] = field(default_factory=list)
    is_written: IsWritten | None = None
    """Tells when the step's K and V are in their pages; None: they are already."""


class StepRunner(Protocol):
    """The model as the engine loop sees it: a ModelRunner, or a scripted one in tests."""

    @property
    def runs_ahead(self) -> bool:
        """Whether `run` returns while its step still runs. The step before is done by then."""
        ...

    def run(
        self,
        batch: Seq[ScheduledSequence],
        on_layer_group: OnLayerGroup | None = None,
        previous: SampledBatch | None = None,
    ) -> StepLogits:
        """Computes K and V of all new tokens, and logits of the entries to sample. Changes no sequence.

        Pages may be sent once `StepLogits.is_written` returns True, or sooner by layer group with `on_layer_group`.
        previous: the batch sampled in the last step, with the pending tokens of sequences in this batch.
        """
        ...

    def sample(self, logits: torch.Tensor, sequences: Seq[Sequence]) -> SampledBatch:
        """Samples the next token of each sequence; see `engine.sampler.sample`."""
        ...

    def settle(self) -> None:
        """Waits until the device is idle. Call this after a failed step, before the step's pages are freed."""
        ...


class ModelRunner:
    """Runs a `transformers` model over a paged KV cache."""

    def __init__(
        self,
        loaded: LoadedModel,
        kv_cache: KvCache,
        backend: AttentionBackend | None = None,
        graph_sizes: GraphSizes | None = None,
    ) -> None:
        """backend: of attention; None: the fused model if there is one, else the fastest backend that can run here.
        graph_sizes: steps to record as CUDA graphs; used with FlashInfer only.
        """
        self._device = kv_cache.tensor.device
        self.backend: AttentionBackend | None = backend
        if backend is None and loaded.fused is not None:
            self._forward: Forward = FusedForward(loaded.fused, kv_cache)
        else:
            self.backend = backend or choose_attention(loaded, kv_cache)
            num_layers, num_groups = loaded.kv_shape.num_layers, kv_cache.num_layer_groups
            self._forward = TransformersForward(loaded.model, self.backend, num_layers, num_groups, self._device)
        self._graphs = self._record(loaded, graph_sizes)
        self._last_step: DeviceEvent | None = None

    @torch.inference_mode()
    def _record(self, loaded: LoadedModel, sizes: GraphSizes | None) -> StepGraphs | None:
        if (
            sizes is None
            or sizes == GraphSizes()
            or not isinstance(self.backend, FlashInferAttention)
            or self._device.type != "cuda"
        ):
            return None
        try:
            return StepGraphs(loaded.model, self.backend, sizes, loaded.max_model_len)
        except RuntimeError as error:
            log.warning("steps run without CUDA graphs, because this model's steps can't be recorded: %s", error)
            return None

    @torch.inference_mode()
    def run(
        self,
        batch: Seq[ScheduledSequence],
        on_layer_group: OnLayerGroup | None = None,
        previous: SampledBatch | None = None,
    ) -> StepLogits:
        """See `StepRunner.run`. Pages for all new tokens must be in the page tables."""
        is_plain = on_layer_group is None and not any(map(_wants_prompt_logits, batch))
        if self._graphs is not None and is_plain:
            logits = self._graphs.decode(batch, previous)
            if logits is not None:
                return StepLogits(list(batch), logits, is_written=self._launched())
            if self._graphs.chunk(batch):
                return StepLogits([], None, is_written=self._launched())
        return self._run_forward(batch, on_layer_group, previous)

    def sample(self, logits: torch.Tensor, sequences: Seq[Sequence]) -> SampledBatch:
        """See `StepRunner.sample`."""
        return sample(logits, sequences)

    def settle(self) -> None:
        """See `StepRunner.settle`. Raises RuntimeError if the device is broken."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    @property
    def runs_ahead(self) -> bool:
        """See `StepRunner.runs_ahead`."""
        return self._device.type == "cuda"

    @property
    def has_graphs(self) -> bool:
        """Whether steps were recorded."""
        return self._graphs is not None

    def _run_forward(
        self, batch: Seq[ScheduledSequence], on_layer_group: OnLayerGroup | None, previous: SampledBatch | None
    ) -> StepLogits:
        num_tokens = 0
        sampled: list[ScheduledSequence] = []
        sampled_rows: list[int] = []
        prompts: list[ScheduledSequence] = []
        prompt_rows: list[int] = []
        for entry in batch:
            if _wants_prompt_logits(entry):
                prompts.append(entry)
                prompt_rows += range(num_tokens, num_tokens + entry.num_new_tokens)
            num_tokens += entry.num_new_tokens
            if entry.is_sampled:
                sampled.append(entry)
                sampled_rows.append(num_tokens - 1)
        token_ids, positions = step_inputs(batch, previous, self._device)
        rows = (
            to_device(torch.tensor(sampled_rows + prompt_rows), self._device) if sampled_rows or prompt_rows else None
        )
        all_logits = self._forward.run(batch, token_ids, positions, rows, on_layer_group)
        logits: torch.Tensor | None = None
        of_prompts: list[PromptLogits] = []
        if all_logits is not None:
            logits = all_logits[: len(sampled)] if sampled else None
            pieces = (
                torch.split(all_logits[len(sampled) :], [entry.num_new_tokens for entry in prompts]) if prompts else ()
            )
            of_prompts = [
                PromptLogits(entry.sequence, entry.sequence.num_computed_tokens, piece)
                for entry, piece in zip(prompts, pieces, strict=True)
            ]
        return StepLogits(sampled, logits, of_prompts, self._launched())

    def _launched(self) -> IsWritten | None:
        """Called after each launch. Waits for the step before. Returns a check whether the launched step is done."""
        if self._device.type != "cuda":
            return None
        launched = DeviceEvent()
        if self._last_step is not None:
            self._last_step.wait()
        self._last_step = launched
        return launched.is_done


def _wants_prompt_logits(entry: ScheduledSequence) -> bool:
    sequence = entry.sequence
    return sequence.sampling.prompt_logprobs and sequence.num_computed_tokens < sequence.num_prompt_tokens
