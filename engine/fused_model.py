"""A dense decoder of `transformers`, taken apart at load and run by one compiled function per step.

A model is not recognised by its class. Its layers must have the parts that the kernels know, under the names that
`transformers` uses. Then the fused model and the plain one compute the same tokens, and only if their logits, keys and
values agree is the fused model used. A model that does other things between its parts (another order of norms, a scale
that is not known here, experts) differs by far more than rounding and stays plain.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch

from engine.attention.base import AttentionOptions
from engine.attention.torch_paged import TorchPagedAttention
from engine.config import Quantization
from engine.forward import Forward, OnLayerGroup, TransformersForward
from engine.kv_cache import KvCache, KvShape
from engine.native.decoder import (
    ACTIVATIONS,
    BLOCK,
    INPUT_MULTIPLE,
    DecoderLayer,
    DecoderWeights,
    NativeDecoder,
    NativeStep,
    PackedLinear,
    can_run,
    pack,
)
from engine.sequence import ScheduledSequence, Sequence
from engine.step_inputs import step_inputs

MAX_DIFFERENCE = 0.05
"""Of logits, keys and values, relative to their size. Rounding in bf16 makes 0.01 or so."""
MAX_QUANTIZED_DIFFERENCE = 0.15
"""The same, for weights of 8 bits."""
_LAYER_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embedding whose frequencies do not depend on the length of a sequence."""


class NotFusable(Exception):
    """The model has a part that the kernels do not know, or computes something else."""


@dataclass(frozen=True)
class FusedModel:
    """A model as the kernels run it."""

    weights: DecoderWeights
    embedding: torch.Tensor
    """[vocab_size, hidden_size] bf16."""
    embedding_scale: float
    rotary: Any
    """The model's own module for rotary embedding."""
    logit_scale: float
    logit_softcap: float | None

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [tokens, rotary_dim / 2], fp32. positions: [1, tokens]."""
        if getattr(self.rotary, "rope_type", "") in _STATIC_ROPE:
            angles = positions[0].float().unsqueeze(1) * self.rotary.inv_freq.float()
            scale = self.rotary.attention_scaling
            cos, sin = angles.cos(), angles.sin()
            return (cos, sin) if scale == 1 else (cos.mul_(scale), sin.mul_(scale))
        cos, sin = self.rotary(self.embedding.new_empty((1, 1), dtype=torch.float32), positions)
        half = cos.shape[-1] // 2
        return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()


class FusedForward:
    """See `engine.forward.Forward`."""

    def __init__(self, fused: FusedModel, kv_cache: KvCache) -> None:
        self._fused = fused
        self._decoder = NativeDecoder(fused.weights, kv_cache)
        self._layers_per_group = len(fused.weights.layers) // kv_cache.num_layer_groups

    def run(
        self,
        batch: Seq[ScheduledSequence],
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor | None,
        on_layer_group: OnLayerGroup | None = None,
    ) -> torch.Tensor | None:
        """See `Forward.run`."""
        fused = self._fused
        hidden = torch.nn.functional.embedding(token_ids[0], fused.embedding).float()
        if fused.embedding_scale != 1:
            hidden *= fused.embedding_scale
        step = NativeStep(self._decoder, batch, hidden, *fused.angles(positions))
        num_layers = len(fused.weights.layers)
        each = num_layers if on_layer_group is None else self._layers_per_group
        for first in range(0, num_layers, each):
            step.run(first, first + each)
            if on_layer_group is not None:
                on_layer_group(first // each, None)
        if rows is None:
            return None
        logits = step.logits(rows)
        if fused.logit_scale != 1:
            logits *= fused.logit_scale
        if fused.logit_softcap is not None:
            logits.div_(fused.logit_softcap).tanh_().mul_(fused.logit_softcap)
        return logits


def fuse(
    model: Any, shape: KvShape, options: Mapping[int, AttentionOptions], quantization: Quantization = "none"
) -> FusedModel:
    """The fused form of a bf16 model on a CPU. The weights of the model's layers are freed.

    options: attention options of each layer. Raises NotFusable with the reason; the model is unchanged then.
    """
    if model.device.type != "cpu" or model.dtype != torch.bfloat16:
        raise NotFusable("only models in bfloat16 on a CPU are")
    config = model.config.get_text_config()
    if not can_run(shape.head_dim, config.num_attention_heads // shape.num_kv_heads, quantization == "int8"):
        raise NotFusable("the compiled kernels are not there, or not for this processor or its heads")
    fused = _Dissection(options, quantization == "int8").fused(model, config, shape)
    _compare(model, fused, shape, MAX_QUANTIZED_DIFFERENCE if quantization == "int8" else MAX_DIFFERENCE)
    model.base_model.layers = torch.nn.ModuleList()
    return fused


class _Dissection:
    """Takes a model apart."""

    def __init__(self, options: Mapping[int, AttentionOptions], quantize: bool) -> None:
        self._options, self._quantize = options, quantize
        self._epsilons: set[float] = set()

    def fused(self, model: Any, config: Any, shape: KvShape) -> FusedModel:
        """The whole model."""
        base, embedding = model.base_model, model.get_input_embeddings()
        layers = _part(base, "layers")
        activation = getattr(config, "hidden_activation", None) or _part(config, "hidden_act")
        if activation not in ACTIVATIONS:
            raise NotFusable(f"its activation is {activation}")
        norm = self._norm(_part(base, "norm"))
        parts = tuple(self._layer(layer, self._options[index]) for index, layer in enumerate(layers))
        if len(self._epsilons) != 1:
            raise NotFusable("its norms differ in epsilon")
        rotary = _part(base, "rotary_emb")
        weights = DecoderWeights(
            layers=parts,
            norm=norm,
            head=self._pack([model.get_output_embeddings()]),
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            rotary_dim=_rotary_dim(rotary),
            activation=activation,
            epsilon=self._epsilons.pop(),
            residual_scale=float(getattr(layers[0], "residual_multiplier", 1.0)),
        )
        _check_sizes(weights)
        return FusedModel(
            weights,
            embedding.weight.detach(),
            _embedding_scale(model, layers[0]),
            rotary,
            1 / getattr(config, "logits_scaling", 1.0),
            getattr(config, "final_logit_softcapping", None),
        )

    def _layer(self, layer: Any, options: AttentionOptions) -> DecoderLayer:
        attention, mlp = _part(layer, "self_attn"), _part(layer, "mlp")
        norms = {name: self._norm(getattr(layer, name)) for name in _LAYER_NORMS if hasattr(layer, name)}
        normed_after = "pre_feedforward_layernorm" in norms
        before = norms.get("input_layernorm")
        before_mlp = norms.get("pre_feedforward_layernorm" if normed_after else "post_attention_layernorm")
        if before is None or before_mlp is None:
            raise NotFusable("its layers are not normed before attention and MLP")
        of_heads = {n: self._norm(getattr(attention, n)) for n in ("q_norm", "k_norm") if hasattr(attention, n)}
        if any(norm.numel() != attention.head_dim for norm in of_heads.values()):
            raise NotFusable("its queries are normed over all heads at once")
        return DecoderLayer(
            attention_norm=before,
            mlp_norm=before_mlp,
            after_attention_norm=norms.get("post_attention_layernorm") if normed_after else None,
            after_mlp_norm=norms.get("post_feedforward_layernorm") if normed_after else None,
            query_norm=of_heads.get("q_norm"),
            key_norm=of_heads.get("k_norm"),
            qkv=self._pack(_either(attention, ["qkv_proj"], ["q_proj", "k_proj", "v_proj"])),
            output=self._pack([_part(attention, "o_proj")]),
            gate_up=self._pack(_gate_and_up(mlp), in_turns=True),
            down=self._pack([_part(mlp, "down_proj")]),
            attention=options,
            rotates=bool(getattr(attention, "use_rope", True)),
        )

    def _pack(self, parts: Seq[Any], in_turns: bool = False) -> PackedLinear:
        for part in parts:
            if type(part) is not torch.nn.Linear or part.in_features % INPUT_MULTIPLE:
                raise NotFusable("not all of its products are linear layers of a fitting size")
        if len(parts) > 1 and any(part.out_features % BLOCK for part in parts):
            raise NotFusable(f"its linear layers have outputs that are no multiple of {BLOCK}")
        return pack(parts, in_turns, self._quantize)

    @torch.inference_mode()
    def _norm(self, norm: Any) -> torch.Tensor:
        """fp32 weight of an RMS norm, found by asking the norm: some models add 1 to what is stored."""
        epsilon = next((getattr(norm, name) for name in ("variance_epsilon", "eps") if hasattr(norm, name)), None)
        stored = getattr(norm, "weight", None)
        if not isinstance(epsilon, float) or not isinstance(stored, torch.Tensor) or stored.dim() != 1:
            raise NotFusable(f"{type(norm).__name__} is no RMS norm with a weight")
        self._epsilons.add(epsilon)
        weight: torch.Tensor = norm(torch.ones(1, stored.numel())).float()[0] * math.sqrt(1 + epsilon)
        x = torch.randn((5, stored.numel()), generator=torch.Generator().manual_seed(0)) * 2
        expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight
        if not torch.allclose(norm(x).float(), expected, rtol=1e-3, atol=1e-4):
            raise NotFusable(f"{type(norm).__name__} is no RMS norm")
        return weight.contiguous()


def _check_sizes(weights: DecoderWeights) -> None:
    """Kernels check nothing: a layer of another size would write beyond the buffers. Raises NotFusable."""
    w, hidden, inner = weights, weights.hidden_size, weights.intermediate_size
    of_heads, of_kv_heads = w.num_heads * w.head_dim, w.num_kv_heads * w.head_dim
    for layer in w.layers:
        linears = (layer.qkv, layer.output, layer.gate_up, layer.down)
        sizes = [(linear.inputs, linear.outputs) for linear in linears]
        wanted = [(hidden, of_heads + 2 * of_kv_heads), (of_heads, hidden), (hidden, 2 * inner), (inner, hidden)]
        norms = (layer.attention_norm, layer.mlp_norm, layer.after_attention_norm, layer.after_mlp_norm)
        of_one_head = (layer.query_norm, layer.key_norm)
        if (
            sizes != wanted
            or any(norm is not None and norm.numel() != hidden for norm in norms)
            or any(norm is not None and norm.numel() != w.head_dim for norm in of_one_head)
        ):
            raise NotFusable("its layers differ in size")
    if w.head.inputs != hidden or w.norm.numel() != hidden or w.rotary_dim > w.head_dim or w.rotary_dim % 2:
        raise NotFusable("its LM head or its rotary embedding is of another size")


def _rotary_dim(rotary: Any) -> int:
    try:
        cos, _ = rotary(torch.zeros((1, 1)), torch.zeros((1, 1), dtype=torch.long))
    except (TypeError, RuntimeError, AttributeError, KeyError) as error:
        raise NotFusable("its layers differ in rotary embedding") from error
    return int(cos.shape[-1])


def _part(owner: Any, name: str) -> Any:
    if not hasattr(owner, name):
        raise NotFusable(f"its {type(owner).__name__} has no {name}")
    return getattr(owner, name)


def _either(owner: Any, *names: list[str]) -> list[Any]:
    for some in names:
        if all(hasattr(owner, name) for name in some):
            return [getattr(owner, name) for name in some]
    raise NotFusable(f"its {type(owner).__name__} has no {' or '.join(names[-1])}")


def _gate_and_up(mlp: Any) -> list[torch.nn.Linear]:
    parts = _either(mlp, ["gate_up_proj"], ["gate_proj", "up_proj"])
    if len(parts) == 2:
        return parts
    both = parts[0]
    if not isinstance(both, torch.nn.Linear) or both.bias is not None:
        raise NotFusable("its gate and up are stored in an unknown way")
    halves = []
    for weight in both.weight.detach().chunk(2):
        half = torch.nn.Linear(both.in_features, weight.shape[0], bias=False, device="meta")
        half.weight = torch.nn.Parameter(weight, requires_grad=False)
        halves.append(half)
    return halves


class _FirstInput(Exception):
    """Ends a forward pass before the first layer."""


@torch.inference_mode()
def _embedding_scale(model: Any, first_layer: Any) -> float:
    """What a model multiplies embeddings by, found by looking at what its first layer gets."""
    captured: list[torch.Tensor] = []

    def capture(_: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        captured.append(args[0] if args else keywords["hidden_states"])
        raise _FirstInput

    token_ids = torch.arange(3).unsqueeze(0)
    handle = first_layer.register_forward_pre_hook(capture, with_kwargs=True)
    try:
        model.base_model(input_ids=token_ids, position_ids=token_ids, use_cache=False)
    except _FirstInput:
        pass
    finally:
        handle.remove()
    stored = torch.nn.functional.embedding(token_ids, model.get_input_embeddings().weight).float()
    scale = float((captured[0].float() * stored).sum() / stored.square().sum())
    return 1.0 if abs(scale - 1) < 1e-3 else scale


@torch.inference_mode()
def _compare(model: Any, fused: FusedModel, shape: KvShape, most: float) -> None:
    """Runs both forms. Raises NotFusable if their results differ by more than `most`."""
    caches = [KvCache(_TRIAL_PAGES, _TRIAL_PAGE_SIZE, shape, torch.bfloat16) for _ in range(2)]
    backend = TorchPagedAttention(caches[0])
    plain = TransformersForward(model, backend, shape.num_layers, 1, torch.device("cpu"))
    vocab_size = fused.embedding.shape[0]
    _check_close("logits", most, *(_trial_logits(f, vocab_size) for f in (plain, FusedForward(fused, caches[1]))))
    _check_close("keys and values", most, *(cache.tensor.float() for cache in caches))


_TRIAL_PAGES, _TRIAL_PAGE_SIZE = 5, 16


def _trial_logits(forward: Forward, vocab_size: int) -> torch.Tensor:
    """Logits of all tokens of a chunk, then of a single token beside another chunk."""
    generator = torch.Generator().manual_seed(1)
    first, second = (
        Sequence("trial", torch.randint(vocab_size, (length,), generator=generator).tolist(), 1, page_table=table)
        for length, table in ((37, [0, 1, 2]), (21, [3, 4]))
    )
    parts = []
    for sizes in ({first: 36}, {first: 1, second: 21}):
        batch = [ScheduledSequence(sequence, size) for sequence, size in sizes.items()]
        token_ids, positions = step_inputs(batch, None, torch.device("cpu"))
        logits = forward.run(batch, token_ids, positions, torch.arange(token_ids.numel()))
        assert logits is not None
        parts.append(logits)
        first.num_computed_tokens = 36
    return torch.cat(parts)


def _check_close(what: str, most: float, plain: torch.Tensor, fused: torch.Tensor) -> None:
    difference = float((plain - fused).norm() / plain.norm().clamp(min=1e-6))
    if not difference < most:
        raise NotFusable(f"{what} of the fused model differ by {difference:.2g}")
