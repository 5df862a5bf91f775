"""Loads a `transformers` model so that its attention runs over pages, and finds out what it needs.

What can't run is refused here, with the reason, never during a request:
a probe runs the model once on a few tokens and records what each layer asks of attention.
"""

from __future__ import annotations

import hashlib
import json
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
from engine.config import EngineConfig
from engine.errors import ModelLoadError, UnsupportedModelError
from engine.kv_cache import KvShape
from engine.native.rms_norm import replace_rms_norms
from engine.packed_linear import pack_linears

ATTENTION_NAME = "kvferry_paged"
PLAN_KEYWORD = "kvferry_plan"

# Keywords that attention functions get and that ask for nothing beyond what the plan does.
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
"""What attention keywords are called by people."""
_HARMLESS_TENSORS = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias", "attention.bias", "attention.masked_bias")
"""Ends of names of buffers that old checkpoints hold and that models compute themselves."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# RoPE kinds whose frequencies depend on the longest sequence of a step: one request would change another's.
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


@dataclass(frozen=True)
class ModelIdentity:
    """What must be equal on two workers before pages of one mean anything to the other."""

    config_hash: str
    weights_hash: str
    tokenizer_hash: str
    rope: str
    """RoPE parameters as canonical JSON."""


@dataclass(frozen=True)
class ParameterCounts:
    """How many weights a token meets on its way; for speed bounds."""

    body: int
    """All but the embedding and the LM head."""
    head: int
    """The LM head, which only sampled tokens meet."""


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, and what was found out about it."""

    model: Any
    kv_shape: KvShape
    num_query_heads: int
    attention_options: tuple[AttentionOptions, ...]
    """What its layers ask of attention, each kind once."""
    dtype: torch.dtype
    device: torch.device
    vocab_size: int
    num_parameters: ParameterCounts
    max_model_len: int
    """Longest sequence in tokens."""
    identity: ModelIdentity


def resolve_device(name: str) -> torch.device:
    """The device meant by `name`. Raises ModelLoadError if this machine lacks it."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ModelLoadError(f"--device {name}: {error}") from error
    if device.type not in ("cpu", "cuda"):
        raise ModelLoadError(f"--device {name}: known are cpu, cuda and cuda:N")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ModelLoadError(f"--device {name}: torch sees no GPU here")
        device = torch.device("cuda", device.index or 0)
        if device.index >= torch.cuda.device_count():
            raise ModelLoadError(f"--device {name}: this machine has {torch.cuda.device_count()} GPUs, counted from 0")
    return device


def resolve_dtype(name: str, device: torch.device | str = "cpu") -> torch.dtype:
    """The element type meant by `name`; "auto" is bfloat16 where the processor computes in it, else float32."""
    if name != "auto":
        return _DTYPES[name]
    if torch.device(device).type != "cpu":
        return torch.bfloat16
    return torch.bfloat16 if _processor_has_bfloat16() else torch.float32


def _processor_has_bfloat16() -> bool:
    """Whether the processor has bf16 instructions; without them bf16 is slower than fp32."""
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
    max_model_len = _max_model_len(config, text_config)
    _refuse_foreign_state(text_config)
    check_weights(folder)
    # Worker logs are no terminals, and what is said of the weights is read below.
    hf_logging.disable_progress_bar()
    hf_logging.set_verbosity_error()
    model = load_weights(folder, dtype, attn_implementation=ATTENTION_NAME)
    return adopt_model(model.to(device), max_model_len, _identity(folder, hf_config, text_config))


def load_weights(folder: Path, dtype: torch.dtype, **options: Any) -> Any:
    """A `transformers` model in which each weight is that of the files.

    options: for `from_pretrained`.
    Raises ModelLoadError if the files lack a tensor, hold one that the model has no place for, or one of another shape:
    transformers fills what is missing with random numbers, and each process with others.
    """
    try:
        model, said = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # told below, by name
            **options,
        )
    except Exception as error:
        # Whatever a library makes of a broken file: it is about this folder.
        first_line = next(iter(str(error).strip().splitlines()), "")
        message = f"--model {folder} can't be loaded: {first_line or type(error).__name__}"
        if "Unrecognized configuration class" in message:
            raise UnsupportedModelError(f"--model {folder}: transformers knows no text generation for it") from error
        raise ModelLoadError(message) from error
    missing = sorted(said["missing_keys"])
    unexpected = sorted(name for name in said["unexpected_keys"] if not name.endswith(_HARMLESS_TENSORS))
    mismatched = [
        f"{name} (file {list(found)}, model {list(wanted)})" for name, found, wanted in sorted(said["mismatched_keys"])
    ]
    problems = [
        f"{what} {some_names(names)}"
        for what, names in (
            ("its files lack", missing),
            ("its config has no place for", unexpected),
            ("of another shape than its config says:", mismatched),
            ("can't be read:", sorted(map(str, said.get("error_msgs", ())))),
        )
        if names
    ]
    if problems:
        raise ModelLoadError(
            f"--model {folder}: its weights are not those of a {model.config.model_type} model for text generation: "
            f"{'; '.join(problems)}"
        )
    return model


def adopt_model(model: Any, max_model_len: int, identity: ModelIdentity) -> LoadedModel:
    """Makes a `transformers` model, whose attention is ATTENTION_NAME, ready to run over pages on the device it is on.

    Raises UnsupportedModelError if it can't be run.
    """
    model = model.eval().requires_grad_(False)
    text_config = model.config.get_text_config()
    vocab_size, num_parameters = _sizes(model)
    pack_linears(model)
    replace_rms_norms(model)
    shape, options = _probe(model, text_config)
    return LoadedModel(
        model=model,
        kv_shape=shape,
        num_query_heads=text_config.num_attention_heads,
        attention_options=options,
        dtype=model.dtype,
        device=model.device,
        vocab_size=vocab_size,
        num_parameters=num_parameters,
        max_model_len=max_model_len,
        identity=identity,
    )


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

    query, key, value: [1, heads, num_tokens, head_dim], one flat row of all sequences of the step.
    Returns ([1, num_tokens, num_heads, head_dim], None).
    Raises UnsupportedModelError for a keyword it does not know: ignoring one would give wrong text.
    """
    unknown = [name for name, given in keywords.items() if name not in _HARMLESS_KEYWORDS and given is not None]
    if unknown:
        names = ", ".join(sorted(_KEYWORD_MEANINGS.get(name, name) for name in unknown))
        raise UnsupportedModelError(f"its attention needs {names}, which paged attention lacks")
    if keywords.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedModelError("its attention looks at later tokens too: it is an encoder")
    if attention_mask is not None:
        raise UnsupportedModelError("its attention brings a mask of its own, which paged attention can't honour")
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


class _ProbePlan:
    """Records what each layer brings to attention instead of computing it."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[int, int, int]] = {}
        self.options: dict[AttentionOptions, None] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Notes the shape of a layer's keys and values; the output's values do not matter."""
        if layer in self.layers:
            raise UnsupportedModelError(f"layer {layer} attends twice per token")
        if query.shape[1] % key.shape[1]:
            raise UnsupportedModelError(f"{query.shape[1]} query heads can't share {key.shape[1]} KV heads evenly")
        self.layers[layer] = (key.shape[1], key.shape[2], value.shape[2])
        self.options[options] = None
        return query.new_zeros(query.shape[0], query.shape[1], value.shape[2])


def _probe(model: Any, text_config: Any) -> tuple[KvShape, tuple[AttentionOptions, ...]]:
    plan = _ProbePlan()
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
            f"model type {name} can't be served: layers {missing[:4]} keep state other than paged keys and values"
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
    return KvShape(num_layers, num_kv_heads, key_dim), tuple(plan.options)


def _refuse_foreign_state(text_config: Any) -> None:
    known = {"full_attention", "sliding_attention"}
    foreign = sorted(set(getattr(text_config, "layer_types", None) or []) - known)
    if foreign:
        raise UnsupportedModelError(
            f"model type {text_config.model_type} can't be served: it has layers of kind {', '.join(foreign)}; "
            f"known are {', '.join(sorted(known))}"
        )


def _trained_len(text_config: Any) -> int:
    """The longest sequence that a model was made for, in tokens.

    YaRN (Peng et al. 2023, arXiv 2309.00071) stretches the original length by its factor; model cards ask people to
    add it to config.json and leave `max_position_embeddings` as it is.
    """
    trained: int = getattr(text_config, "max_position_embeddings", None) or 2048
    stretched = [
        round(rope["factor"] * (rope.get("original_max_position_embeddings") or trained))
        for rope in _rope_parameters(text_config)
        if rope.get("rope_type") == "yarn" and rope.get("factor")
    ]
    return min(stretched, default=trained)


def _max_model_len(config: EngineConfig, text_config: Any) -> int:
    trained = _trained_len(text_config)
    wanted = config.max_model_len or trained
    if wanted > trained:
        raise ModelLoadError(f"--max-model-len is {wanted}, but the model was trained for {trained} tokens")
    for rope in _rope_parameters(text_config):
        if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
            original: int = rope.get("original_max_position_embeddings") or trained
            if config.max_model_len is None:
                wanted = min(wanted, original)
            elif wanted > original:
                raise UnsupportedModelError(
                    f"--max-model-len is {wanted}, but this model's {rope['rope_type']} RoPE changes beyond {original} "
                    f"tokens with the longest request of a step; use --max-model-len {original} or less"
                )
    return wanted


def _rope_parameters(text_config: Any) -> list[dict[str, Any]]:
    """RoPE parameters, one entry per kind of layer that has its own."""
    rope = getattr(text_config, "rope_parameters", None) or {}
    if any(isinstance(value, dict) for value in rope.values()):
        return [value for value in rope.values() if isinstance(value, dict)]
    return [rope]


def _identity(folder: Path, hf_config: Any, text_config: Any) -> ModelIdentity:
    config = {
        name: value
        for name, value in hf_config.to_dict().items()
        if name not in {"_name_or_path", "transformers_version", "dtype", "torch_dtype"}
    }
    rope = json.dumps(_rope_parameters(text_config), sort_keys=True, default=str)
    return ModelIdentity(
        config_hash=_sha256(json.dumps(config, sort_keys=True, default=str).encode()),
        weights_hash=_weights_hash(folder),
        tokenizer_hash=_file_hash(folder / "tokenizer.json"),
        rope=rope,
    )


def _weights_hash(folder: Path) -> str:
    """Tells checkpoints apart without reading them whole: sizes, headers and samples of each weights file."""
    digest = hashlib.sha256()
    sample_bytes, num_samples = 4096, 64
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size};".encode())
        with path.open("rb") as file:
            for offset in range(0, size, max(1, size // num_samples)):
                file.seek(offset)
                digest.update(file.read(sample_bytes))
    return digest.hexdigest()


def _file_hash(path: Path) -> str:
    return _sha256(path.read_bytes()) if path.is_file() else ""


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def set_threads(threads: int | None) -> int:
    """Fixes the number of compute threads of this process; unset means one per usable core. Returns it."""
    number = threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(number)
    return number
