"""All layers of a dense decoder on a CPU in one call: `decoder.c` over packed bf16 weights."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

from engine import huge_pages
from engine.attention.base import AttentionOptions
from engine.kv_cache import KvCache
from engine.native.library import HEAD_DIM_MULTIPLE, MAX_GROUP, MAX_HEAD_DIM, load_kernels, num_splits
from engine.sequence import ScheduledSequence, num_pages_for

BLOCK = 16
"""Outputs in a block of packed weights, as in matmul.h."""
ROW_MULTIPLE = 16
"""Rows of scratch are padded to this, as in matmul.h."""
INPUT_MULTIPLE = 32
FEW_ROWS = 8
CHUNK_KEYS = 64
ACTIVATIONS = {"silu": 0, "gelu_pytorch_tanh": 1}
"""As in decoder.c."""


class _Linear(ctypes.Structure):
    _fields_ = (
        ("packed", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("inputs", ctypes.c_int32),
        ("outputs", ctypes.c_int32),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        ("attention_norm", ctypes.c_void_p),
        ("after_attention_norm", ctypes.c_void_p),
        ("mlp_norm", ctypes.c_void_p),
        ("after_mlp_norm", ctypes.c_void_p),
        ("query_norm", ctypes.c_void_p),
        ("key_norm", ctypes.c_void_p),
        ("qkv", _Linear),
        ("output", _Linear),
        ("gate_up", _Linear),
        ("down", _Linear),
        ("window", ctypes.c_int32),
        ("rotates", ctypes.c_int32),
        ("scaling", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


class _Decoder(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.POINTER(_Layer)),
        ("cache", ctypes.c_void_p),
        ("page_stride", ctypes.c_int64),
        ("layer_stride", ctypes.c_int64),
        *(
            (name, ctypes.c_int32)
            for name in (
                "hidden",
                "num_heads",
                "num_kv_heads",
                "head_dim",
                "intermediate",
                "rotary_dim",
                "page_size",
                "activation",
            )
        ),
        ("epsilon", ctypes.c_float),
        ("residual_scale", ctypes.c_float),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_int32)
            for name in (
                "num_tokens",
                "num_sequences",
                "max_pages",
                "first_layer",
                "last_layer",
                "num_threads",
                "num_splits",
                "num_chunks",
            )
        ),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "hidden",
                "cos",
                "sin",
                "page_tables",
                "first_token",
                "num_new",
                "num_computed",
                "lengths",
                "pack_offset",
                "slots",
                "inputs",
                "input_scales",
                "qkv",
                "attended",
                "activated",
                "branch",
                "packed_kv",
                "partial",
            )
        ),
    )


@dataclass(frozen=True)
class PackedLinear:
    """A linear layer whose weight is packed; see matmul.h. All per output, padded to whole blocks."""

    packed: torch.Tensor
    bias: torch.Tensor | None
    """fp32."""
    scales: torch.Tensor | None
    """fp32: the weights are 8-bit integers times this. None: the weights are bf16."""
    offsets: torch.Tensor | None
    """int32: 128 times the sum of an output's integers."""
    inputs: int
    outputs: int

    def argument(self) -> _Linear:
        """For the kernels. Points into this object, which must outlive it."""
        pointers = (_address(tensor) for tensor in (self.packed, self.bias, self.scales, self.offsets))
        return _Linear(*pointers, self.inputs, self.outputs)


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def pack(parts: Seq[torch.nn.Linear], in_turns: bool = False, quantize: bool = False) -> PackedLinear:
    """Packs bf16 linear layers with the same inputs into one.

    in_turns: blocks of two layers in turns, as gate and up are stored; else one layer after the other.
    quantize: as 8-bit integers with a scale for each output.
    """
    inputs, outputs = parts[0].in_features, sum(part.out_features for part in parts)
    padded_outputs = _padded(outputs, BLOCK)
    packed = huge_pages.zeros((padded_outputs * inputs,), torch.int8 if quantize else torch.bfloat16)
    scales = torch.zeros(padded_outputs) if quantize else None
    offsets = torch.zeros(padded_outputs, dtype=torch.int32) if quantize else None
    kernels = load_kernels()
    assert kernels is not None
    first = 0
    for index, part in enumerate(parts):
        weight = part.weight.detach().contiguous()
        begin, step = (index, len(parts)) if in_turns else (first, 1)
        arguments = (weight.data_ptr(), part.out_features, inputs, packed.data_ptr(), begin, step)
        if quantize:
            kernels.kvferry_pack_int8(*arguments, _address(scales), _address(offsets))
        else:
            kernels.kvferry_pack(*arguments)
        first += part.out_features // BLOCK
    return PackedLinear(packed, _joined_bias(parts, in_turns), scales, offsets, inputs, outputs)


def _joined_bias(parts: Seq[torch.nn.Linear], in_turns: bool) -> torch.Tensor | None:
    if all(part.bias is None for part in parts):
        return None
    biases = [torch.zeros(part.out_features) if part.bias is None else part.bias.detach().float() for part in parts]
    joined = torch.stack([bias.view(-1, BLOCK) for bias in biases], dim=1).flatten() if in_turns else torch.cat(biases)
    return torch.nn.functional.pad(joined, (0, -len(joined) % BLOCK))


@dataclass(frozen=True)
class DecoderLayer:
    """A layer's weights. Norms are fp32 weights of RMS norms."""

    attention_norm: torch.Tensor
    mlp_norm: torch.Tensor
    after_attention_norm: torch.Tensor | None
    """Of the attention's output, before it is added to the residual stream."""
    after_mlp_norm: torch.Tensor | None
    query_norm: torch.Tensor | None
    """[head_dim]"""
    key_norm: torch.Tensor | None
    qkv: PackedLinear
    output: PackedLinear
    gate_up: PackedLinear
    """Blocks of gate and up in turns."""
    down: PackedLinear
    attention: AttentionOptions
    rotates: bool

    def argument(self) -> _Layer:
        """For the kernels. Points into this object, which must outlive it."""
        norms = (
            self.attention_norm,
            self.after_attention_norm,
            self.mlp_norm,
            self.after_mlp_norm,
            self.query_norm,
            self.key_norm,
        )
        return _Layer(
            *(_address(norm) for norm in norms),
            *(linear.argument() for linear in (self.qkv, self.output, self.gate_up, self.down)),
            self.attention.sliding_window or 0,
            int(self.rotates),
            self.attention.scaling,
            self.attention.softcap or 0.0,
        )


@dataclass(frozen=True)
class DecoderWeights:
    """Weights and constants of all layers, and of the LM head."""

    layers: tuple[DecoderLayer, ...]
    norm: torch.Tensor
    """After the last layer, fp32."""
    head: PackedLinear
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    """Elements of a head that are rotated."""
    activation: str
    """A key of ACTIVATIONS."""
    epsilon: float
    residual_scale: float

    @property
    def intermediate_size(self) -> int:
        """Width of the MLP."""
        return self.layers[0].down.inputs


def can_run(head_dim: int, group: int, quantized: bool) -> bool:
    """Whether the kernels are there and take heads of this size, `group` query heads for each KV head."""
    kernels = load_kernels()
    fits = head_dim % HEAD_DIM_MULTIPLE == 0 and head_dim <= MAX_HEAD_DIM and group <= MAX_GROUP
    needed = "kvferry_pack_int8" if quantized else "kvferry_pack"
    return fits and kernels is not None and hasattr(kernels, needed)


class _Scratch:
    """Buffers of a step, kept and grown."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def get(self, name: str, size: int, dtype: torch.dtype) -> int:
        """Address of at least `size` elements."""
        found = self._buffers.get(name)
        if found is None or found.numel() < size:
            found = self._buffers[name] = huge_pages.zeros((size + size // 4,), dtype)
        address: int = found.data_ptr()
        return address


class NativeDecoder:
    """The layers over one KV cache. For one thread at a time."""

    def __init__(self, weights: DecoderWeights, kv_cache: KvCache) -> None:
        """kv_cache: bf16 in host memory."""
        self._weights, self._cache = weights, kv_cache
        kernels = load_kernels()
        assert kernels is not None
        self._kernels = kernels
        self._layers = (_Layer * len(weights.layers))(*(layer.argument() for layer in weights.layers))
        self._head = weights.head.argument()
        w = weights
        self._decoder = _Decoder(
            self._layers,
            kv_cache.base_address,
            kv_cache.tensor.stride(0),
            kv_cache.tensor.stride(1),
            w.hidden_size,
            w.num_heads,
            w.num_kv_heads,
            w.head_dim,
            w.intermediate_size,
            w.rotary_dim,
            kv_cache.page_size,
            ACTIVATIONS[w.activation],
            w.epsilon,
            w.residual_scale,
        )
        self._scratch = _Scratch()

    def run_layers(self, step: _Step) -> None:
        """Computes layers [first_layer, last_layer) of a step."""
        self._kernels.kvferry_run_layers(ctypes.byref(self._decoder), ctypes.byref(step))

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Final norm and LM head for some rows, int64 indices into `hidden`. Returns [rows, vocab_size] fp32."""
        head, count = self._weights.head, rows.numel()
        padded_rows, padded_outputs = _padded(count, ROW_MULTIPLE), _padded(head.outputs, BLOCK)
        logits = torch.empty((padded_rows, padded_outputs), dtype=torch.float32)
        self._kernels.kvferry_run_head(
            ctypes.byref(self._head),
            self._weights.norm.data_ptr(),
            self._weights.epsilon,
            hidden.data_ptr(),
            rows.data_ptr(),
            count,
            self._scratch.get("inputs", padded_rows * head.inputs, torch.bfloat16),
            self._scratch.get("input_scales", padded_rows, torch.float32),
            logits.data_ptr(),
            torch.get_num_threads(),
        )
        return logits[:count, : head.outputs].contiguous()

    def lay_out(
        self, batch: Seq[ScheduledSequence], hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[_Step, list[object]]:
        """The kernels' arguments for a step, and what they point to."""
        w, page_size, threads = self._weights, self._cache.page_size, torch.get_num_threads()
        placed, num_tokens = [], 0
        for entry in batch:
            placed.append((num_tokens, entry))
            num_tokens += entry.num_new_tokens
        placed.sort(key=lambda at: at[1].num_new_tokens == 1)  # chunks first; the sort is stable
        num_sequences = len(placed)
        num_chunks = sum(entry.num_new_tokens > 1 for _, entry in placed)
        counts = np.array(
            [(first, entry.num_new_tokens, entry.sequence.num_computed_tokens, 0) for first, entry in placed],
            dtype=np.int32,
        ).T.copy()
        counts[3] = counts[1] + counts[2]
        lengths: list[int] = counts[3].tolist()
        used = [num_pages_for(length, page_size) for length in lengths]
        tables = np.zeros((num_sequences, max(used)), dtype=np.int32)
        for row, (_, entry) in enumerate(placed):
            # Kernels check nothing: with a table that is too short they would write to pages of other sequences.
            assert len(entry.sequence.page_table) >= used[row], f"{entry.sequence.sequence_id} lacks pages"
            tables[row, : used[row]] = entry.sequence.page_table[: used[row]]
        each = [
            -(-length // CHUNK_KEYS) * CHUNK_KEYS * w.head_dim * w.num_kv_heads * 2 for length in lengths[:num_chunks]
        ]
        offsets = np.zeros(num_chunks + 1, dtype=np.int64)
        np.cumsum(each, out=offsets[1:])
        num_decodes, splits = num_sequences - num_chunks, 1
        if num_decodes:
            splits = num_splits(num_decodes * w.num_kv_heads, max(lengths[num_chunks:]))
        rows, get = _padded(num_tokens, ROW_MULTIPLE), self._scratch.get
        most_rows = max(rows, threads * _padded(FEW_ROWS, ROW_MULTIPLE))
        bf16, fp32 = torch.bfloat16, torch.float32
        qkv_width = (w.num_heads + 2 * w.num_kv_heads) * w.head_dim
        group = w.num_heads // w.num_kv_heads
        step = _Step(
            num_tokens,
            num_sequences,
            tables.shape[1],
            0,
            len(w.layers),
            threads,
            splits,
            num_chunks,
            hidden.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            tables.ctypes.data,
            *(counts[row].ctypes.data for row in range(4)),
            offsets.ctypes.data,
            get("slots", num_tokens, torch.int64),
            get("inputs", most_rows * max(w.hidden_size, w.num_heads * w.head_dim, w.intermediate_size), bf16),
            get("input_scales", most_rows, fp32),
            get("qkv", rows * qkv_width, bf16),
            get("attended", rows * w.num_heads * w.head_dim, bf16),
            get("activated", rows * w.intermediate_size, bf16),
            get("branch", rows * w.hidden_size, fp32),
            get("packed_kv", int(offsets[-1]), bf16),
            get("partial", max(1, num_decodes * w.num_kv_heads * splits * group * (w.head_dim + 2)), fp32),
        )
        return step, [hidden, cos, sin, tables, counts, offsets]


class NativeStep:
    """One step of a `NativeDecoder`. Page tables must have pages for all new tokens."""

    def __init__(
        self,
        decoder: NativeDecoder,
        batch: Seq[ScheduledSequence],
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> None:
        """batch: in any order, with new tokens in the order of `hidden`.

        hidden: [tokens, hidden_size] fp32 embeddings; the layers change it. cos, sin: [tokens, rotary_dim / 2] fp32.
        """
        self._decoder, self._hidden = decoder, hidden
        self._step, self._kept_alive = decoder.lay_out(batch, hidden, cos, sin)

    def run(self, first_layer: int, last_layer: int) -> None:
        """Computes layers [first_layer, last_layer). K and V of these layers are in their pages then."""
        self._step.first_layer, self._step.last_layer = first_layer, last_layer
        self._decoder.run_layers(self._step)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """After all layers: see `NativeDecoder.logits`."""
        return self._decoder.logits(self._hidden, rows)


def _padded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
