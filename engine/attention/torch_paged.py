"""Paged attention in plain torch: runs on any device and is the reference for the other backends.

Optimizations for CPUs (each measured; without them it is 10-20 times slower):

* Pages are gathered by `index_select` of whole rows into a buffer that lives as long as the backend. A row is
  one head of one page: ``((page * num_layers + layer) * 2 + kv) * num_kv_heads + head``. Row numbers are computed
  once per step, for layer 0. A layer's view of the cache begins at its first row, so the numbers fit every layer.
* The query heads that share a KV head become rows of one matrix (grouped-query attention without copies of K and V).
* Single tokens of sequences with similar length are computed together. A chunk of many tokens is computed in
  blocks of query rows, each with only the keys that the block attends to.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from engine.attention.base import AttentionOptions
from engine.kv_cache import KvCache
from engine.sequence import ScheduledSequence, num_pages_for

# Query rows per block of a chunk: large enough for the matrix kernels, small enough that scores stay in cache.
BLOCK_TOKENS = {torch.bfloat16: 128, torch.float16: 128, torch.float32: 64}
# From this length on, blocks of double size are 10 % faster in bf16 (2048 new tokens: 306 against 278 GFLOP/s).
LONG_CHUNK_TOKENS = 1024
# Sequences are computed together while padding is at most this fraction of the shortest (plus one page).
MAX_PADDING = 0.25


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Sequences with one new token each and about the same length."""

    rows: torch.Tensor  # [2 * group * num_kv_heads * num_pages] rows of K, then of V, for layer 0
    token_indices: torch.Tensor  # [group] indices in the flat batch
    lengths: torch.Tensor  # [group] tokens to attend to, the new token included
    num_pages: int


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Several new tokens of one sequence."""

    rows: torch.Tensor  # [2 * num_kv_heads * num_pages]
    first_token: int  # index in the flat batch
    num_new_tokens: int
    num_computed_tokens: int
    num_pages: int


class TorchPagedAttention:
    """See `AttentionBackend`. Owns views of the cache and the gather buffer."""

    def __init__(self, kv_cache: KvCache) -> None:
        shape = kv_cache.shape
        self.cache = kv_cache
        self.page_size = kv_cache.page_size
        self.num_layers, self.num_kv_heads, self.head_dim = shape.num_layers, shape.num_kv_heads, shape.head_dim
        self.device = kv_cache.tensor.device
        self.dtype = kv_cache.tensor.dtype
        # page_rows: one row per head of a page. token_rows: one row per token of a head of a page.
        self.page_rows = kv_cache.tensor.view(-1, self.page_size * self.head_dim)
        self.token_rows = kv_cache.tensor.view(-1, self.head_dim)
        self._gathered = torch.empty(0, dtype=self.dtype, device=self.device)

    def plan(self, batch: Seq[ScheduledSequence]) -> TorchPagedPlan:
        """Plans a step."""
        placed, first = [], 0
        for entry in batch:
            placed.append((first, entry))
            first += entry.num_new_tokens
        return TorchPagedPlan(self, placed)

    def most_gathered_bytes(self, num_tokens: int) -> int:
        """Largest gather buffer, in bytes, of decode steps whose sequences have `num_tokens` tokens in total."""
        return (
            3 * num_tokens * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        )  # K and V, and half as much again for growth

    def gather(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """Gathers rows of a layer: [len(rows), page_size * head_dim]. The next call overwrites the result."""
        width = self.page_size * self.head_dim
        needed = rows.numel() * width
        if self._gathered.numel() < needed:
            self._gathered = torch.empty(needed + needed // 2, dtype=self.dtype, device=self.device)
        out = self._gathered[:needed].view(rows.numel(), width)
        torch.index_select(self.page_rows[layer * 2 * self.num_kv_heads :], 0, rows, out=out)
        return out

    def store(self, layer: int, rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Writes keys and values, each [num_tokens, num_kv_heads, head_dim]. rows: token rows in layer 0."""
        layer_rows = self.num_kv_heads * self.page_size
        first = layer * 2 * layer_rows
        self.token_rows[first:].index_copy_(0, rows, key.reshape(-1, self.head_dim))
        self.token_rows[first + layer_rows :].index_copy_(0, rows, value.reshape(-1, self.head_dim))

    def head_page_rows(self, page_table: torch.Tensor) -> torch.Tensor:
        """Layer-0 rows of K and V for page tables [..., num_pages]. Returns [2, ..., num_kv_heads, num_pages]."""
        heads = torch.arange(self.num_kv_heads, device=self.device).unsqueeze(1)
        keys = page_table.unsqueeze(-2) * (self.num_layers * 2 * self.num_kv_heads) + heads
        return torch.stack((keys, keys + self.num_kv_heads))


class TorchPagedPlan:
    """Plan of one step: where new tokens are stored, and which pages each sequence reads."""

    def __init__(self, backend: TorchPagedAttention, placed: Seq[tuple[int, ScheduledSequence]]) -> None:
        """placed: the entries to compute, each with the index of its first token in the flat batch."""
        self._backend = backend
        self._store_tokens, self._store_rows = self._plan_store(placed)
        self._chunks: list[_Chunk] = []
        decodes: list[tuple[int, int, ScheduledSequence]] = []  # (pages read, index in the flat batch, entry)
        for first, entry in placed:
            sequence = entry.sequence
            num_pages = num_pages_for(sequence.num_computed_tokens + entry.num_new_tokens, backend.page_size)
            if entry.num_new_tokens == 1:
                decodes.append((num_pages, first, entry))
            else:
                table = torch.tensor(sequence.page_table[:num_pages], device=backend.device)
                rows = backend.head_page_rows(table).flatten()
                self._chunks.append(_Chunk(rows, first, entry.num_new_tokens, sequence.num_computed_tokens, num_pages))
        self._groups = self._plan_groups(decodes)
        self._masks: dict[tuple[int, int | None], torch.Tensor] = {}

    def _plan_store(self, placed: Seq[tuple[int, ScheduledSequence]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices of new tokens in the flat batch [tokens], and their layer-0 token rows of K [tokens * heads]."""
        backend, page_size = self._backend, self._backend.page_size
        tokens: list[int] = []
        page_ids: list[int] = []
        offsets: list[int] = []
        for first, entry in placed:
            start = entry.sequence.num_computed_tokens
            table = entry.sequence.page_table
            tokens += range(first, first + entry.num_new_tokens)
            for position in range(start, start + entry.num_new_tokens):
                page_ids.append(table[position // page_size])
                offsets.append(position % page_size)
        pages = torch.tensor(page_ids, device=backend.device).unsqueeze(1)
        slots = torch.tensor(offsets, device=backend.device).unsqueeze(1)
        heads = torch.arange(backend.num_kv_heads, device=backend.device)
        rows = ((pages * (backend.num_layers * 2 * backend.num_kv_heads) + heads) * page_size + slots).flatten()
        return torch.tensor(tokens, device=backend.device), rows

    def _plan_groups(self, decodes: list[tuple[int, int, ScheduledSequence]]) -> list[_DecodeGroup]:
        decodes.sort(key=lambda decode: decode[0])
        groups: list[_DecodeGroup] = []
        start = 0
        for end in range(1, len(decodes) + 1):
            if end == len(decodes) or decodes[end][0] > decodes[start][0] * (1 + MAX_PADDING) + 1:
                groups.append(self._make_group(decodes[start:end]))
                start = end
        return groups

    def _make_group(self, decodes: list[tuple[int, int, ScheduledSequence]]) -> _DecodeGroup:
        device = self._backend.device
        num_pages = decodes[-1][0]
        # Short tables are padded with page 0; the mask hides its tokens.
        tables = [entry.sequence.page_table[:used] + [0] * (num_pages - used) for used, _, entry in decodes]
        return _DecodeGroup(
            rows=self._backend.head_page_rows(torch.tensor(tables, device=device)).flatten(),
            token_indices=torch.tensor([first for _, first, _ in decodes], device=device),
            lengths=torch.tensor([entry.sequence.num_computed_tokens + 1 for _, _, entry in decodes], device=device),
            num_pages=num_pages,
        )

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """See `AttentionPlan.attend`."""
        output = query.new_empty(query.shape)
        self.attend_into(layer, query, key, value, options, output)
        return output

    def attend_into(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
        output: torch.Tensor,
    ) -> None:
        """Like `attend`, for the planned entries only. Writes the rows of these entries in `output`."""
        if len(self._store_tokens) < len(key):
            key, value = key[self._store_tokens], value[self._store_tokens]
        self._backend.store(layer, self._store_rows, key, value)
        for index, group in enumerate(self._groups):
            self._attend_group(layer, index, group, query, output, options)
        for chunk in self._chunks:
            self._attend_chunk(layer, chunk, query, output, options)

    def _attend_group(
        self,
        layer: int,
        index: int,
        group: _DecodeGroup,
        query: torch.Tensor,
        output: torch.Tensor,
        options: AttentionOptions,
    ) -> None:
        backend = self._backend
        size, heads = group.token_indices.numel(), backend.num_kv_heads
        keys, values = backend.gather(layer, group.rows).view(2, size * heads, -1, backend.head_dim)
        # Query heads of one KV head are consecutive: [size * heads, query heads per KV head, head_dim]
        rows = query[group.token_indices].reshape(size * heads, -1, backend.head_dim)
        scores = _scores(rows, keys, options)
        hidden = self._group_mask(index, group, options.sliding_window)
        # Hidden tokens may be anything, even NaN. They are overwritten, because NaN * 0 would still be NaN.
        scores.view(size, heads, rows.shape[1], -1).masked_fill_(hidden, float("-inf"))
        values.view(size, heads, -1, backend.head_dim).masked_fill_(hidden.transpose(2, 3), 0.0)
        attended = torch.bmm(torch.softmax(scores, dim=-1), values)
        output[group.token_indices] = attended.view(size, -1, backend.head_dim)

    def _group_mask(self, index: int, group: _DecodeGroup, window: int | None) -> torch.Tensor:
        """True for hidden tokens: [group, 1, 1, num_pages * page_size]. The same for all layers with this window."""
        if (index, window) not in self._masks:
            positions = torch.arange(group.num_pages * self._backend.page_size, device=self._backend.device)
            lengths = group.lengths.unsqueeze(1)
            hidden = positions >= lengths
            if window is not None:
                hidden |= positions < lengths - window
            self._masks[index, window] = hidden[:, None, None, :]
        return self._masks[index, window]

    def _attend_chunk(
        self, layer: int, chunk: _Chunk, query: torch.Tensor, output: torch.Tensor, options: AttentionOptions
    ) -> None:
        backend = self._backend
        heads = backend.num_kv_heads
        keys, values = backend.gather(layer, chunk.rows).view(2, heads, -1, backend.head_dim)
        window = options.sliding_window
        block = BLOCK_TOKENS[backend.dtype]
        if chunk.num_new_tokens >= LONG_CHUNK_TOKENS and backend.dtype != torch.float32:
            block *= 2
        for start in range(0, chunk.num_new_tokens, block):
            end = min(start + block, chunk.num_new_tokens)
            first, last = chunk.num_computed_tokens + start, chunk.num_computed_tokens + end  # positions [first, last)
            low = 0 if window is None else max(0, first - window + 1)
            tokens = slice(chunk.first_token + start, chunk.first_token + end)
            # [tokens, heads, group, dim] -> [heads, group * tokens, dim]
            rows = query[tokens].view(end - start, heads, -1, backend.head_dim).permute(1, 2, 0, 3)
            group = rows.shape[1]
            scores = _scores(rows.reshape(heads, -1, backend.head_dim), keys[:, low:last], options)
            # Without a window, only the block's own tokens need a mask; all earlier tokens are visible.
            masked_from = first if window is None else low
            by_token = scores.view(heads, group, end - start, last - low)
            by_token[..., masked_from - low :] += self._block_mask(first, last, masked_from, window)
            attended = torch.bmm(torch.softmax(scores, dim=-1), values[:, low:last])
            output[tokens] = (
                attended.view(heads, group, end - start, backend.head_dim)
                .permute(2, 0, 1, 3)
                .reshape(end - start, -1, backend.head_dim)
            )

    def _block_mask(self, first: int, last: int, low: int, window: int | None) -> torch.Tensor:
        """[queries, keys]: 0 where a query of [first, last) attends to a key of [low, last), else -inf."""
        device = self._backend.device
        queries = torch.arange(first, last, device=device).unsqueeze(1)
        keys = torch.arange(low, last, device=device)
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        mask = torch.zeros(hidden.shape, dtype=self._backend.dtype, device=device)
        return mask.masked_fill_(hidden, float("-inf"))


def _scores(query: torch.Tensor, keys: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
    """Scaled and soft-capped scores of query [batch, rows, dim] on keys [batch, tokens, dim]: [batch, rows, tokens]."""
    unused = query.new_empty(1)
    scores = torch.baddbmm(unused, query, keys.transpose(1, 2), beta=0, alpha=options.scaling)
    if options.softcap is not None:
        scores = scores.div_(options.softcap).tanh_().mul_(options.softcap)
    return scores
