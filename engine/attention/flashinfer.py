"""Paged attention on CUDA by FlashInfer's kernels (Ye et al. 2025, arXiv 2501.01005); FlashInfer 0.6 and 0.7.

A layer of the cache has FlashInfer's layout `HND` with a page stride: keys and values [num_pages, num_kv_heads,
page_size, head_dim]. The stride from page to page covers all layers. Nothing is copied or rearranged.

A step is planned once per kind of layer (window, soft cap, scaling); all layers of that kind share the plan. Single
tokens use the decode kernels and chunks use the prefill kernels, also when both are in one step.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from engine.attention.base import AttentionOptions, AttentionPlan
from engine.device import DeviceEvent, to_device
from engine.kv_cache import KvCache
from engine.sequence import ScheduledSequence, Sequence, num_pages_for

WORKSPACE_BYTES = 256 << 20
"""For partial results of long sequences that are split over thread blocks. All wrappers share one workspace, because
they run one after another. 64 heads of 128 on a GPU with 132 multiprocessors can need 138 MB."""
HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)
MAX_GROUP_WITHOUT_TENSOR_CORES = 2
"""Most query heads per KV head for which the decode kernel without tensor cores is used."""
LAYOUT = "HND"


@dataclass(frozen=True)
class PagedBatch:
    """Kernel inputs for a step: int32 tensors in host memory. A "sequence" is an entry of the batch."""

    query_indptr: torch.Tensor
    """[sequences + 1] index of each sequence's first new token in the flat batch."""
    page_indptr: torch.Tensor
    """[sequences + 1] index of each sequence's first page in `page_ids`."""
    page_ids: torch.Tensor
    """[pages of all sequences]"""
    last_page_lengths: torch.Tensor
    """[sequences] tokens in the last page, new tokens included."""
    token_sequences: torch.Tensor
    """[tokens] index of each new token's sequence."""
    token_positions: torch.Tensor
    """[tokens] position of each new token in its sequence."""


def lay_out(batch: Seq[ScheduledSequence], page_size: int) -> PagedBatch:
    """Makes the kernel inputs of a step. The page tables must have pages for all new tokens."""
    query_indptr, page_indptr = [0], [0]
    page_ids: list[int] = []
    last_page_lengths: list[int] = []
    token_sequences: list[int] = []
    token_positions: list[int] = []
    for index, entry in enumerate(batch):
        start = entry.sequence.num_computed_tokens
        end = start + entry.num_new_tokens
        num_pages = num_pages_for(end, page_size)
        # Kernels do no checks: if a table is too short, they write to pages of other sequences.
        assert len(entry.sequence.page_table) >= num_pages, f"{entry.sequence.sequence_id} lacks pages"
        page_ids += entry.sequence.page_table[:num_pages]
        query_indptr.append(query_indptr[-1] + entry.num_new_tokens)
        page_indptr.append(page_indptr[-1] + num_pages)
        last_page_lengths.append(end - (num_pages - 1) * page_size)
        token_sequences += [index] * entry.num_new_tokens
        token_positions += range(start, end)
    return PagedBatch(
        *(
            torch.tensor(values, dtype=torch.int32)
            for values in (query_indptr, page_indptr, page_ids, last_page_lengths, token_sequences, token_positions)
        )
    )


def _load_kernels() -> Any:
    import flashinfer

    return flashinfer


def why_not(kv_cache: KvCache) -> str | None:
    """Why FlashInfer can't be used with this cache; None if it can."""
    tensor, shape = kv_cache.tensor, kv_cache.shape
    if tensor.device.type != "cuda":
        return "it runs on CUDA devices only"
    if tensor.dtype not in DTYPES:
        return f"it has no kernels for {str(tensor.dtype).removeprefix('torch.')}"
    if shape.head_dim not in HEAD_DIMS:
        return f"it has no kernels for heads of {shape.head_dim} elements"
    try:
        _load_kernels()
    except ImportError as error:
        return f"the flashinfer package can't be loaded: {error}"
    return None


class _Slots(NamedTuple):
    """Where the K and V of new tokens are stored, int32 on the device; see `PagedBatch`."""

    token_sequences: torch.Tensor
    token_positions: torch.Tensor
    page_ids: torch.Tensor
    page_indptr: torch.Tensor
    last_page_lengths: torch.Tensor


class FlashInferAttention:
    """See `AttentionBackend`."""

    def __init__(
        self, kv_cache: KvCache, num_query_heads: int, options: Seq[AttentionOptions], kernels: Any = None
    ) -> None:
        """options: attention options of all layers. kernels: a substitute for the flashinfer package, for tests."""
        self.kernels = kernels or _load_kernels()
        self.options = tuple(options)
        self.page_size, self.device = kv_cache.page_size, kv_cache.tensor.device
        shape, self._dtype = kv_cache.shape, kv_cache.tensor.dtype
        self._num_query_heads, self._num_kv_heads, self._head_dim = num_query_heads, shape.num_kv_heads, shape.head_dim
        self._use_tensor_cores = num_query_heads // shape.num_kv_heads > MAX_GROUP_WITHOUT_TENSOR_CORES
        self.layers = [(kv_cache.tensor[:, n, 0], kv_cache.tensor[:, n, 1]) for n in range(shape.num_layers)]
        """Keys and values of each layer: [num_pages, num_kv_heads, page_size, head_dim]."""
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        self._planned: DeviceEvent | None = None
        self.chunk_wrappers = {kind: self.make_chunk_wrapper() for kind in self.options}
        self.decode_wrappers = {kind: self.make_decode_wrapper() for kind in self.options}
        """Wrappers for steps outside CUDA graphs."""

    def make_chunk_wrapper(self, **buffers: Any) -> Any:
        """A wrapper for chunks. buffers: fixed buffers, for a wrapper recorded in a CUDA graph."""
        return self.kernels.BatchPrefillWithPagedKVCacheWrapper(self._workspace, LAYOUT, **buffers)

    def make_decode_wrapper(self, **buffers: Any) -> Any:
        """A wrapper for single tokens. buffers: fixed buffers, for a wrapper recorded in a CUDA graph."""
        return self.kernels.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, LAYOUT, use_tensor_cores=self._use_tensor_cores, **buffers
        )

    def plan(self, batch: Seq[ScheduledSequence]) -> AttentionPlan:
        """Plans a step."""
        return _FlashInferPlan(self, batch)

    def store(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, slots: _Slots
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes keys and values, each [num_tokens, num_kv_heads, head_dim], to a layer's cache. Returns the cache."""
        cache = self.layers[layer]
        self.kernels.append_paged_kv_cache(
            key.contiguous(),
            value.contiguous(),
            slots.token_sequences,
            slots.token_positions,
            cache,
            slots.page_ids,
            slots.page_indptr,
            slots.last_page_lengths,
            kv_layout=LAYOUT,
        )
        return cache

    def plan_decode(self, wrapper: Any, paged: PagedBatch, page_ids: torch.Tensor, options: AttentionOptions) -> None:
        """Plans a wrapper for single tokens. page_ids: `paged.page_ids` on the device."""
        self._await_last_plan()
        wrapper.plan(
            paged.page_indptr,
            page_ids,
            paged.last_page_lengths,
            self._num_query_heads,
            self._num_kv_heads,
            self._head_dim,
            self.page_size,
            **self._plan_options(options),
        )

    def plan_chunks(self, wrapper: Any, paged: PagedBatch, page_ids: torch.Tensor, options: AttentionOptions) -> None:
        """Plans a wrapper for chunks. page_ids: `paged.page_ids` on the device."""
        self._await_last_plan()
        wrapper.plan(
            paged.query_indptr,
            paged.page_indptr,
            page_ids,
            paged.last_page_lengths,
            self._num_query_heads,
            self._num_kv_heads,
            self._head_dim,
            self.page_size,
            causal=True,
            **self._plan_options(options),
        )

    def _await_last_plan(self) -> None:
        """Waits until the last plan is on the device: the next plan of a wrapper overwrites its host memory."""
        if self._planned is not None:
            self._planned.wait()
            self._planned = None

    def all_planned(self) -> None:
        """Must be called after a step is planned and before it is launched."""
        if self.device.type == "cuda":
            self._planned = DeviceEvent()

    def warm_up(self) -> None:
        """Builds all kernels that this model uses, and runs them on a chunk and on a single token.

        If the kernels can't be built or run, FlashInfer's error is raised. Writes to page 0, which must not be in use.
        """
        shapes = ((self._num_query_heads, self._head_dim), (self._num_kv_heads, self._head_dim))
        for num_tokens in (2, 1):
            table = [0] * num_pages_for(num_tokens, self.page_size)
            plan = self.plan(
                [ScheduledSequence(Sequence("warm-up", [0] * num_tokens, 1, page_table=table), num_tokens)]
            )
            query, key = (torch.zeros((num_tokens, *shape), dtype=self._dtype, device=self.device) for shape in shapes)
            for options in self.options:
                plan.attend(0, query, key, key, options)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _plan_options(self, options: AttentionOptions) -> dict[str, Any]:
        return {
            "q_data_type": self._dtype,
            "kv_data_type": self._dtype,
            "sm_scale": options.scaling,
            # Our window includes the token itself; FlashInfer's does not.
            "window_left": -1 if options.sliding_window is None else options.sliding_window - 1,
            "logits_soft_cap": options.softcap,
        }


class _Part:
    """The single tokens of a step, or its chunks: planned wrappers, and indices of the tokens in the flat batch."""

    def __init__(self, wrappers: dict[AttentionOptions, Any], tokens: slice | torch.Tensor) -> None:
        self.wrappers, self.tokens = wrappers, tokens


class _FlashInferPlan:
    """Plan of one step."""

    def __init__(self, backend: FlashInferAttention, batch: Seq[ScheduledSequence]) -> None:
        self._backend = backend
        paged = lay_out(batch, backend.page_size)
        # One copy to the device for all inputs.
        parts = (
            paged.page_indptr,
            paged.page_ids,
            paged.last_page_lengths,
            paged.token_sequences,
            paged.token_positions,
        )
        on_device = torch.split(to_device(torch.cat(parts), backend.device), [part.numel() for part in parts])
        page_indptr, page_ids, last_page_lengths, sequences, positions = on_device
        self._slots = _Slots(sequences, positions, page_ids, page_indptr, last_page_lengths)
        starts = paged.query_indptr.tolist()
        decodes = [index for index, entry in enumerate(batch) if entry.num_new_tokens == 1]
        chunks = [index for index, entry in enumerate(batch) if entry.num_new_tokens > 1]
        self._parts: list[_Part] = []
        for indices in (decodes, chunks):
            if not indices:
                continue
            if len(indices) == len(batch):
                of_part, of_part_ids = paged, page_ids
            else:
                of_part = lay_out([batch[index] for index in indices], backend.page_size)
                of_part_ids = to_device(of_part.page_ids, backend.device)
            wrappers = backend.chunk_wrappers if indices is chunks else backend.decode_wrappers
            plan = backend.plan_chunks if indices is chunks else backend.plan_decode
            for options, wrapper in wrappers.items():
                plan(wrapper, of_part, of_part_ids, options)
            ranges = [range(starts[index], starts[index + 1]) for index in indices]
            self._parts.append(_Part(wrappers, _tokens(ranges, backend.device)))
        backend.all_planned()

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """See `AttentionPlan.attend`."""
        cache = self._backend.store(layer, key, value, self._slots)
        query = query.contiguous()
        if len(self._parts) == 1:
            whole: torch.Tensor = self._parts[0].wrappers[options].run(query, cache)
            return whole
        output = torch.empty_like(query)
        for part in self._parts:
            output[part.tokens] = part.wrappers[options].run(query[part.tokens], cache)
        return output


def _tokens(ranges: list[range], device: torch.device) -> slice | torch.Tensor:
    """Indices in the flat batch; a slice if the ranges are consecutive, as they are if single tokens come first."""
    if all(before.stop == after.start for before, after in itertools.pairwise(ranges)):
        return slice(ranges[0].start, ranges[-1].stop)
    return to_device(torch.tensor([index for r in ranges for index in r]), device)


class RecordedPlan:
    """A plan for a fixed number of sequences and of tokens per sequence. Its kernels can be recorded in a CUDA graph.

    Inputs that change from step to step are in tensors with fixed addresses; `update` overwrites them.
    """

    def __init__(
        self, backend: FlashInferAttention, num_sequences: int, tokens_each: int, page_ids: torch.Tensor
    ) -> None:
        """page_ids: int32 on the device, with room for the page tables of all sequences; plans may share it."""
        self._backend, self._tokens_each, self._page_ids = backend, tokens_each, page_ids

        def buffer(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=backend.device)

        self._query_indptr = buffer(num_sequences + 1)
        self._page_indptr, self._last_page_lengths = buffer(num_sequences + 1), buffer(num_sequences)
        self._positions = buffer(num_sequences * tokens_each)
        every = torch.arange(num_sequences, dtype=torch.int32, device=backend.device)
        self._slots = _Slots(
            every.repeat_interleave(tokens_each), self._positions, page_ids, self._page_indptr, self._last_page_lengths
        )
        self._wrappers = {options: self._make_wrapper() for options in backend.options}

    def _make_wrapper(self) -> Any:
        if self._tokens_each == 1:
            return self._backend.make_decode_wrapper(
                use_cuda_graph=True,
                paged_kv_indptr_buffer=self._page_indptr,
                paged_kv_indices_buffer=self._page_ids,
                paged_kv_last_page_len_buffer=self._last_page_lengths,
            )
        return self._backend.make_chunk_wrapper(
            use_cuda_graph=True,
            qo_indptr_buf=self._query_indptr,
            paged_kv_indptr_buf=self._page_indptr,
            paged_kv_indices_buf=self._page_ids,
            paged_kv_last_page_len_buf=self._last_page_lengths,
        )

    def update(self, batch: Seq[ScheduledSequence]) -> None:
        """Plans a step, which must have this plan's number of sequences and tokens."""
        paged = lay_out(batch, self._backend.page_size)
        self._positions.copy_(to_device(paged.token_positions, self._backend.device))
        page_ids = to_device(paged.page_ids, self._backend.device)
        for options, wrapper in self._wrappers.items():
            if self._tokens_each == 1:
                self._backend.plan_decode(wrapper, paged, page_ids, options)
            else:
                self._backend.plan_chunks(wrapper, paged, page_ids, options)
        self._backend.all_planned()

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """See `AttentionPlan.attend`."""
        cache = self._backend.store(layer, key, value, self._slots)
        output: torch.Tensor = self._wrappers[options].run(query.contiguous(), cache)
        return output
