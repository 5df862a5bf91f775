"""Paged attention on a CPU with a compiled kernel for single tokens (decode steps) in bf16.

The kernel reads each page once, while `torch_paged` first gathers pages into a buffer. Chunks of many tokens stay in
torch, because matrix products dominate their time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Seq

import torch

from engine.attention.base import AttentionOptions, AttentionPlan
from engine.attention.torch_paged import TorchPagedAttention, TorchPagedPlan
from engine.kv_cache import KvCache
from engine.native.library import HEAD_DIM_MULTIPLE, MAX_GROUP, MAX_HEAD_DIM, DecodeAttention, load_kernels, num_splits
from engine.sequence import ScheduledSequence, num_pages_for


class NativeDecodeAttention:
    """Computes chunks with `torch_paged` and single tokens with the kernel."""

    def __init__(self, kv_cache: KvCache, kernels: ctypes.CDLL) -> None:
        self._kernels = kernels
        self._torch = TorchPagedAttention(kv_cache)
        self._cache = kv_cache
        shape = kv_cache.shape
        self._arguments = DecodeAttention(
            page_stride=kv_cache.tensor.stride(0),
            num_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            page_size=kv_cache.page_size,
        )
        self._layer_bytes = kv_cache.tensor.stride(1) * kv_cache.tensor.element_size()
        self._partial = torch.empty(0)

    def plan(self, batch: Seq[ScheduledSequence]) -> AttentionPlan:
        """Plans a step."""
        return _NativePlan(self, batch)

    def attend_decode(
        self,
        layer: int,
        tables: torch.Tensor,
        lengths: torch.Tensor,
        token_indices: torch.Tensor,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        options: AttentionOptions,
    ) -> None:
        """Stores K and V of single tokens, then attends. tensors: query, key, value, output [tokens, heads, dim]."""
        query, key, value, output = tensors
        a = self._arguments
        a.cache = self._cache.base_address + layer * self._layer_bytes
        a.query, a.query_token, a.query_head = query.data_ptr(), query.stride(0), query.stride(1)
        a.key, a.key_token, a.key_head = key.data_ptr(), key.stride(0), key.stride(1)
        a.value, a.value_token, a.value_head = value.data_ptr(), value.stride(0), value.stride(1)
        a.output, a.page_tables, a.lengths = output.data_ptr(), tables.data_ptr(), lengths.data_ptr()
        a.token_indices = token_indices.data_ptr()
        a.num_sequences, a.max_pages = tables.shape
        a.group = query.shape[1] // a.num_heads
        a.splits = num_splits(a.num_sequences * a.num_heads, a.max_pages * a.page_size)
        size = a.num_sequences * a.num_heads * a.splits * a.group * (a.head_dim + 2)
        if self._partial.numel() < size:
            self._partial = torch.empty(size * 2, dtype=torch.float32)
        a.partial = self._partial.data_ptr()
        a.window = options.sliding_window or 0
        a.scaling, a.softcap = options.scaling, options.softcap or 0.0
        self._kernels.kvferry_attend_decode(ctypes.byref(a))


class _NativePlan:
    """Plan of one step."""

    def __init__(self, backend: NativeDecodeAttention, batch: Seq[ScheduledSequence]) -> None:
        self._backend = backend
        decodes: list[tuple[int, ScheduledSequence]] = []
        chunks: list[tuple[int, ScheduledSequence]] = []
        first = 0
        for entry in batch:
            (decodes if entry.num_new_tokens == 1 else chunks).append((first, entry))
            first += entry.num_new_tokens
        self._chunk_plan = TorchPagedPlan(backend._torch, chunks) if chunks else None
        page_size = backend._cache.page_size
        lengths = [entry.sequence.num_computed_tokens + 1 for _, entry in decodes]
        max_pages = max((num_pages_for(length, page_size) for length in lengths), default=0)
        self._tables = torch.zeros((len(decodes), max_pages), dtype=torch.int32)
        for row, (length, (_, entry)) in enumerate(zip(lengths, decodes, strict=True)):
            used = num_pages_for(length, page_size)
            self._tables[row, :used] = torch.tensor(entry.sequence.page_table[:used], dtype=torch.int32)
        self._lengths = torch.tensor(lengths, dtype=torch.int32)
        self._token_indices = torch.tensor([index for index, _ in decodes], dtype=torch.int32)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """See `AttentionPlan.attend`."""
        output = query.new_empty(query.shape)
        if self._chunk_plan is not None:
            self._chunk_plan.attend_into(layer, query, key, value, options, output)
        if len(self._tables):
            tensors = (_rows(query), _rows(key), _rows(value), output)
            self._backend.attend_decode(layer, self._tables, self._lengths, self._token_indices, tensors, options)
        return output


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with contiguous head elements, as the kernel requires."""
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()


def native_attention(kv_cache: KvCache, num_query_heads: int) -> NativeDecodeAttention | None:
    """The backend; None unless the cache is bf16 on a CPU, sizes are within the kernel's limits, and gcc is there."""
    tensor, shape = kv_cache.tensor, kv_cache.shape
    fits = (
        tensor.device.type == "cpu"
        and tensor.dtype == torch.bfloat16
        and shape.head_dim <= MAX_HEAD_DIM
        and shape.head_dim % HEAD_DIM_MULTIPLE == 0
        and num_query_heads // shape.num_kv_heads <= MAX_GROUP
    )
    kernels = load_kernels() if fits else None
    return NativeDecodeAttention(kv_cache, kernels) if kernels is not None else None
