"""Loads a `transformers` model so that its attention runs over pages.

A model that can't be served is rejected here with the reason, never during a request. A dry run of a few tokens records
which attention options and which KV shape each layer needs.
"""

from __future__ import annotations

import logging
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as hf_logging

from engine.attention.base import AttentionOptions, AttentionPlan
from engine.checkpoint import check_weights, some_names
from engine.config import EngineConfig, Quantization
from engine.errors import ModelLoadError, UnsupportedModelError
from engine.forward import PLAN_KEYWORD
from engine.fused_model import FusedModel, NotFusable, fuse
from engine.kv_cache import KvShape
from engine.model_identity import ModelIdentity, model_identity
from engine.model_length import max_model_len_of
from engine.native.rms_norm import replace_rms_norms
from engine.packed_linear import pack_linears

log = logging.getLogger(__name__)

ATTENTION_NAME = "kvferry_paged"

# Keywords of attention functions that change nothing, since a plan already does what they ask for.
_HARMLESS_KEYWORDS = frozenset(
    {
        PLAN_KEYWORD,
        "dropout",
        "is_causal",
        "position_ids",
        "use_cache",
        "cache_position",
        "output_attentions",
        "output_router_logits",
    }
)
_KEYWORD_MEANINGS = {"s_aux": "attention sinks", "head_mask": "a mask of heads", "position_bias": "a position bias"}
"""Readable names of attention keywords."""
_HARMLESS_TENSORS = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias", "attention.bias", "attention.masked_bias")
"""Name suffixes of buffers in old checkpoints; models compute these buffers themselves."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class ParameterCounts:
    """Number of weights that a token is multiplied with; for speed bounds."""

    body: int
    """All weights except the embedding and the LM head."""
    head: int
    """The LM head. Only rows that are sampled need it."""


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, and its properties."""

    model: Any
    """Of `transformers`. Without layers if there is a fused form."""
    fused: FusedModel | None
    """What a CPU runs; None: it runs `model`."""
    quantization: Quantization
    kv_shape: KvShape
    num_query_heads: int
    attention_options: tuple[AttentionOptions, ...]
    """Attention options of its layers, without duplicates."""
    dtype: torch.dtype
    device: torch.device
    vocab_size: int
    num_parameters: ParameterCounts
    max_model_len: int
    """Longest sequence in tokens."""
    identity: ModelIdentity


def resolve_device(name: str) -> torch.device:
    """The device called `name`. Raises ModelLoadError if this machine does not have that device."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelLoadError(f"--device {name}: {error}") from error
    if device.type not in ("cpu", "cuda"):
        raise ModelLoadError(f"--device {name}: it must be cpu, cuda or cuda:N")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ModelLoadError(f"--device {name}: torch sees no GPU here")
        device = torch.device("cuda", device.index or 0)
        if device.index >= torch.cuda.device_count():
            raise ModelLoadError(f"--device {name}: this machine has {torch.cuda.device_count()} GPUs, counted from 0")
    return device


def resolve_dtype(name: str, device: torch.device | str = "cpu") -> torch.dtype:
    """The element type called `name`; "auto" is bfloat16 if the processor has bfloat16 instructions, else float32."""
    if name != "auto":
        return _DTYPES[name]
    if torch.device(device).type != "cpu":
        return torch.bfloat16
    return torch.bfloat16 if _processor_has_bfloat16() else torch.float32


def _processor_has_bfloat16() -> bool:
    """Whether the processor has bf16 instructions. Without such instructions bf16 is slower than fp32."""
    if platform.system() != "Linux":
        return False
    flags = next(
        (line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "Feat"))), ""
    )
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(flags.split()))


def load_model(config: EngineConfig) -> LoadedModel:
    """Loads the model in folder `config.model`.

    Raises ModelLoadError if the folder can't be used, UnsupportedModelError if the model can't be run.
    """
    folder = Path(config.model)
    if not (folder / "config.json").is_file():
        raise ModelLoadError(f"--model {config.model}: no config.json there; it must be the folder of a prepared model")
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    try:
        hf_config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, KeyError, OSError) as error:
        raise ModelLoadError(f"--model {config.model}: its config.json can't be read: {error}") from error
    text_config = hf_config.get_text_config()
    max_model_len = max_model_len_of(config, text_config)
    _refuse_foreign_state(text_config)
    check_weights(folder)
    # A worker's log is not a terminal. Warnings about weights are not needed: `load_weights` reads the loading info.
    hf_logging.disable_progress_bar()
    hf_logging.set_verbosity_error()
    model = load_weights(folder, dtype, attn_implementation=ATTENTION_NAME)
    identity = model_identity(folder, hf_config, text_config)
    model = model.to(device)
    return adopt_model(model, max_model_len, identity, config.attention == "auto", config.quantize)


def load_weights(folder: Path, dtype: torch.dtype, **options: Any) -> Any:
    """A `transformers` model whose weights all come from the files.

    options: for `from_pretrained`.
    Raises ModelLoadError if a tensor is missing, unexpected, or of another shape. transformers would fill missing
    weights with random numbers, different in each process.
    """
    try:
        model, loading_info = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, by name
            **options,
        )
    except Exception as error:
        # Libraries raise any type for a broken file. The message must name the folder.
        first_line = next(iter(str(error).strip().splitlines()), "")
        message = f"--model {folder} can't be loaded: {first_line or type(error).__name__}"
        if "Unrecognized configuration class" in message:
            raise UnsupportedModelError(
                f"--model {folder}: transformers has no text generation model for it"
            ) from error
        raise ModelLoadError(message) from error
    missing = sorted(loading_info["missing_keys"])
    unexpected = sorted(name for name in loading_info["unexpected_keys"] if not name.endswith(_HARMLESS_TENSORS))
    mismatched = [
        f"{name} (file {list(found)}, model {list(wanted)})"
        for name, found, wanted in sorted(loading_info["mismatched_keys"])
    ]
    problems = [
        f"{what} {some_names(names)}"
        for what, names in (
            ("its files lack", missing),
            ("the model does not have", unexpected),
            ("of another shape than in its config:", mismatched),
            ("can't be read:", sorted(map(str, loading_info.get("error_msgs", ())))),
        )
        if names
    ]
    if problems:
        raise ModelLoadError(
            f"--model {folder}: its weights do not fit a {model.config.model_type} model for text generation: "
            f"{'; '.join(problems)}"
        )
    return model


def adopt_model(
    model: Any,
    max_model_len: int,
    identity: ModelIdentity,
    may_fuse: bool = True,
    quantization: Quantization = "none",
) -> LoadedModel:
    """Makes a `transformers` model, loaded with attention ATTENTION_NAME, ready to run over pages on its device.

    may_fuse: False keeps its layers as they are, for a named attention backend.
    Raises UnsupportedModelError if the model can't be run, or not quantized as asked for.
    """
    model = model.eval().requires_grad_(False)
    text_config = model.config.get_text_config()
    vocab_size, num_parameters = _sizes(model)
    shape, options = _dry_run(model, text_config)
    fused = _fused(model, shape, options, may_fuse, quantization)
    if fused is None:
        pack_linears(model)
        replace_rms_norms(model)
    return LoadedModel(
        model=model,
        fused=fused,
        quantization=quantization,
        kv_shape=shape,
        num_query_heads=text_config.num_attention_heads,
        attention_options=tuple(dict.fromkeys(options.values())),
        dtype=model.dtype,
        device=model.device,
        vocab_size=vocab_size,
        num_parameters=num_parameters,
        max_model_len=max_model_len,
        identity=identity,
    )


def _fused(
    model: Any, shape: KvShape, options: dict[int, AttentionOptions], may_fuse: bool, quantization: Quantization
) -> FusedModel | None:
    try:
        if not may_fuse:
            raise NotFusable("an attention backend was named")
        return fuse(model, shape, options, quantization)
    except NotFusable as reason:
        if quantization != "none":
            raise UnsupportedModelError(
                f"--quantize {quantization}: this model can't be quantized: {reason}"
            ) from reason
        if model.device.type == "cpu" and model.dtype == torch.bfloat16:
            log.info("the model runs layer by layer in torch, which is slower: %s", reason)
    return None


def _sizes(model: Any) -> tuple[int, ParameterCounts]:
    """Vocabulary size, and parameters of body and LM head."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    body = sum(p.numel() for p in model.parameters()) - embedding.numel()
    if head.data_ptr() != embedding.data_ptr():
        body -= head.numel()
    return head.shape[0], ParameterCounts(body, head.numel())


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function registered with `transformers`.

    query, key, value: [1, heads, num_tokens, head_dim]; the tokens of all sequences of the step, concatenated.
    Returns ([1, num_tokens, num_heads, head_dim], None).
    Raises UnsupportedModelError for an unknown keyword: ignoring the keyword could give wrong text.
    """
    unknown = [name for name, given in keywords.items() if name not in _HARMLESS_KEYWORDS and given is not None]
    if unknown:
        names = ", ".join(sorted(_KEYWORD_MEANINGS.get(name, name) for name in unknown))
        raise UnsupportedModelError(f"its attention needs {names}, which paged attention lacks")
    if keywords.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedModelError("its attention also attends to later tokens: it is an encoder")
    if attention_mask is not None:
        raise UnsupportedModelError("its attention uses a mask of its own, which paged attention does not support")
    plan: AttentionPlan = keywords[PLAN_KEYWORD]
    options = AttentionOptions(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        softcap=softcap,
    )
    output = plan.attend(
        module.layer_idx, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), options
    )
    return output.unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, paged_attention)


class _DryRunPlan:
    """Records the KV shape and attention options of each layer instead of computing attention."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[int, int, int]] = {}
        self.options: dict[int, AttentionOptions] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Records the shape of a layer's keys and values. Returns zeros."""
        if layer in self.layers:
            raise UnsupportedModelError(f"layer {layer} computes attention twice per token")
        if query.shape[1] % key.shape[1]:
            raise UnsupportedModelError(f"{query.shape[1]} query heads can't share {key.shape[1]} KV heads evenly")
        self.layers[layer] = (key.shape[1], key.shape[2], value.shape[2])
        self.options[layer] = options
        return query.new_zeros(query.shape[0], query.shape[1], value.shape[2])


def _dry_run(model: Any, text_config: Any) -> tuple[KvShape, dict[int, AttentionOptions]]:
    plan = _DryRunPlan()
    num_tokens = 3
    name = text_config.model_type
    positions = torch.arange(num_tokens, device=model.device).unsqueeze(0)
    try:
        with torch.inference_mode():
            model(
                input_ids=torch.zeros_like(positions),
                position_ids=positions,
                use_cache=False,
                logits_to_keep=1,
                **{PLAN_KEYWORD: plan},
            )
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"model type {name} can't be served: {error}") from error
    except (KeyError, TypeError, AttributeError, RuntimeError, ValueError) as error:
        raise UnsupportedModelError(f"model type {name} can't be served, its forward pass failed: {error}") from error
    num_layers = text_config.num_hidden_layers
    if sorted(plan.layers) != list(range(num_layers)):
        missing = sorted(set(range(num_layers)) - set(plan.layers))
        raise UnsupportedModelError(
            f"model type {name} can't be served: layers {missing[:4]} keep state other than keys and values"
        )
    shapes = set(plan.layers.values())
    if len(shapes) > 1:
        raise UnsupportedModelError(
            f"model type {name} can't be served: its layers differ in KV shape: {sorted(shapes)}"
        )
    num_kv_heads, key_dim, value_dim = shapes.pop()
    if key_dim != value_dim:
        raise UnsupportedModelError(
            f"model type {name} can't be served: keys have {key_dim} elements per head, values {value_dim}"
        )
    return KvShape(num_layers, num_kv_heads, key_dim), plan.options


def _refuse_foreign_state(text_config: Any) -> None:
    known = {"full_attention", "sliding_attention"}
    foreign = sorted(set(getattr(text_config, "layer_types", None) or []) - known)
    if foreign:
        raise UnsupportedModelError(
            f"model type {text_config.model_type} can't be served: it has layers of kind {', '.join(foreign)}; "
            f"supported are {', '.join(sorted(known))}"
        )


def set_threads(threads: int | None) -> int:
    """Sets the number of compute threads of the calling thread; None: one per usable core. Returns the number.

    Threads that have not used torch yet will compute with this number too, until another thread sets another.
    """
    number = threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(number)
    torch.get_num_threads()  # asked for the first time, a thread takes over what was set last by any thread
    return number
