"""Records steps as CUDA graphs: one launch in place of some hundreds.

A graph has a fixed number of tokens. Two kinds are recorded: decode steps by number of sequences, and, for prompts
longer than the token budget, the chunk that takes the whole budget.

A decode batch is padded to the next recorded size with copies of its shortest sequence. The copies write the same K and
V to the same page as that sequence, so they need no page of their own.

Measured on an H200, Llama 3 8B: launching a step takes 22 ms. A decode step of one sequence takes 7.5 ms recorded and
22.8 ms otherwise. Chunks of 2,048 tokens or more take longer to compute than to launch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch

from engine.attention.flashinfer import FlashInferAttention, RecordedPlan
from engine.forward import PLAN_KEYWORD
from engine.sampler import SampledBatch
from engine.sequence import ScheduledSequence, Sequence, num_pages_for
from engine.step_inputs import step_inputs

log = logging.getLogger(__name__)

LARGEST_CHUNK = 1024
"""Most tokens of a recorded chunk: larger chunks take longer to compute than to launch."""
WARM_UPS = 2
"""Runs before recording, in which libraries select kernels and allocate their buffers."""


@dataclass(frozen=True)
class GraphSizes:
    """Sizes of the recorded steps."""

    decode: tuple[int, ...] = ()
    """Numbers of sequences."""
    chunk: int = 0
    """Tokens of a chunk that does not end its prompt; 0: none."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "decode", tuple(sorted(set(self.decode))))

    def decode_size_for(self, num_sequences: int) -> int | None:
        """The recorded size that a batch is padded to; None if the batch is larger than all sizes."""
        return next((size for size in self.decode if size >= num_sequences), None)


def graph_sizes(wanted: Seq[int], max_decode_batch: int, token_budget: int, max_model_len: int) -> GraphSizes:
    """Sizes that a worker records: the wanted sizes that can occur, its largest batch, and its chunk if small.

    max_decode_batch: sequences of its largest decode batch; token_budget: prompt tokens per step; 0 for none.
    """
    if not wanted:
        return GraphSizes()
    decode = [size for size in wanted if size < max_decode_batch]
    if max_decode_batch and max(wanted) >= max_decode_batch:
        decode.append(max_decode_batch)
    # A chunk that does not end its prompt is shorter than the longest sequence.
    can_occur = 1 < token_budget <= LARGEST_CHUNK and token_budget < max_model_len
    return GraphSizes(tuple(decode), token_budget if can_occur else 0)


@dataclass(frozen=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    plan: RecordedPlan
    token_ids: torch.Tensor
    """[1, tokens]"""
    positions: torch.Tensor
    """[1, tokens]"""
    logits: torch.Tensor | None
    """[tokens, vocab_size] float32 of a decode step; the next replay overwrites it."""


class StepGraphs:
    """The recorded steps of a model."""

    def __init__(self, model: Any, backend: FlashInferAttention, sizes: GraphSizes, max_model_len: int) -> None:
        """Records all sizes. Raises RuntimeError if the model's forward can't be recorded."""
        self._model, self._backend, self._sizes = model, backend, sizes
        most = max([*sizes.decode, 1])
        self._page_ids = torch.zeros(
            most * num_pages_for(max_model_len, backend.page_size), dtype=torch.int32, device=backend.device
        )
        self._pool: Any = None
        started = time.monotonic()
        # Largest first: smaller graphs reuse the memory that the largest one allocated.
        self._chunk = self._record(1, sizes.chunk) if sizes.chunk else None
        self._decode = {size: self._record(size, 1) for size in reversed(sizes.decode)}
        log.info(
            "steps recorded",
            extra={
                "decode": ",".join(map(str, sizes.decode)),
                "chunk": sizes.chunk,
                "seconds": round(time.monotonic() - started, 1),
            },
        )

    def decode(self, batch: Seq[ScheduledSequence], previous: SampledBatch | None) -> torch.Tensor | None:
        """Logits [len(batch), vocab_size] of a decode batch, valid until the next call. None if the batch has chunks,
        or more sequences than the largest recorded size. previous: see `step_inputs`."""
        size = self._sizes.decode_size_for(len(batch))
        if size is None or any(entry.num_new_tokens != 1 or not entry.is_sampled for entry in batch):
            return None
        shortest = min(batch, key=lambda entry: entry.sequence.num_computed_tokens)
        recording = self._decode[size]
        self._replay(recording, [*batch, *[shortest] * (size - len(batch))], previous)
        assert recording.logits is not None
        return recording.logits[: len(batch)]

    def chunk(self, batch: Seq[ScheduledSequence]) -> bool:
        """Computes a batch that is one chunk of the recorded size. False, and nothing computed, for any other batch."""
        if self._chunk is None or len(batch) != 1:
            return False
        [entry] = batch
        if entry.num_new_tokens != self._sizes.chunk or entry.is_sampled:
            return False
        self._replay(self._chunk, batch, None)
        return True

    def _replay(self, recording: _Recording, batch: Seq[ScheduledSequence], previous: SampledBatch | None) -> None:
        recording.plan.update(batch)
        token_ids, positions = step_inputs(batch, previous, self._backend.device)
        recording.token_ids.copy_(token_ids)
        recording.positions.copy_(positions)
        recording.graph.replay()

    def _record(self, num_sequences: int, tokens_each: int) -> _Recording:
        device = self._backend.device
        plan = RecordedPlan(self._backend, num_sequences, tokens_each, self._page_ids)
        # The recorded runs write to page 0, which no sequence holds yet.
        table = [0] * num_pages_for(tokens_each, self._backend.page_size)
        dummy = Sequence("recording", [0] * tokens_each, tokens_each, page_table=table)
        plan.update([ScheduledSequence(dummy, tokens_each)] * num_sequences)
        token_ids = torch.zeros((1, num_sequences * tokens_each), dtype=torch.int64, device=device)
        positions = torch.zeros_like(token_ids)
        inputs = {"input_ids": token_ids, "position_ids": positions, "use_cache": False, PLAN_KEYWORD: plan}

        def forward() -> torch.Tensor | None:
            if tokens_each > 1:
                self._model.base_model(**inputs)
                return None
            logits: torch.Tensor = self._model(**inputs).logits[0].float()
            return logits

        graph, logits = self._capture(forward)
        return _Recording(graph, plan, token_ids, positions, logits)

    def _capture(self, forward: Callable[[], torch.Tensor | None]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor | None]:
        """A graph of `forward`, and the tensor that `forward` returned; each replay overwrites that tensor."""
        device = self._backend.device
        side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                forward()
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = forward()
        self._pool = self._pool or graph.pool()
        return graph, output
