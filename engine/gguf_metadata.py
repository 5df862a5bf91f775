"""Carries a GGUF file's metadata over to a `transformers` config.

`transformers` reads the weights and a part of the metadata and ignores the rest silently: RoPE scaling, the tensor
`rope_freqs`, attention windows, soft caps. This module handles every key of the architecture, or raises an error that
names the unknown key. Afterwards the finished config is compared with the file.
The keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and the `gguf` package's constants.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter

from engine.errors import ModelLoadError, UnsupportedModelError

ARCHITECTURES = frozenset({"llama", "qwen2", "qwen3", "qwen3moe", "gemma2", "gemma3", "phi3"})
"""Architectures whose conversion the tests compare with the original model."""
_WINDOWED = frozenset({"gemma2", "gemma3", "phi3"})
_ATTRIBUTES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "vocab_size": "vocab_size",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
"""GGUF key, without the architecture's prefix, to attribute of the config."""
_OFF: dict[str, Any] = {
    "expert_count": 0,
    "expert_used_count": 0,
    "expert_shared_count": 0,
    "attention.causal": True,
    "attention.sliding_window": 0,
    "use_parallel_residual": False,
}
"""Values that equal the default behaviour."""
_HANDLED_KEYS = frozenset(
    {
        "rope.freq_base",
        "rope.freq_base_swa",
        "rope.dimension_count",
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "rope.scaling.attn_factor",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "rope.scaling.finetuned",
        "attention.value_length",
        "attention.sliding_window_pattern",
        "tensor_data_layout",
    }
)
"""Keys that the code below reads by name, and one key that has no effect (the last)."""
_ROPE_TENSORS = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
_GEMMA3_PATTERN = 6
_LLAMA3_CANDIDATES = ((8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192))
"""(factor, low_freq_factor, high_freq_factor, original length) of Llama 3.1 and 3.3, and of Llama 3.2."""
TOLERANCE = 1e-4


class GgufMetadata:
    """Metadata of one file. Raises ModelLoadError if the file can't be read, UnsupportedModelError if unsupported."""

    def __init__(self, path: Path) -> None:
        try:
            self._reader = GGUFReader(path)
        except Exception as error:  # libraries raise any type for a broken file
            raise ModelLoadError(f"it is not a complete GGUF file: {error}") from error
        self.architecture = str(self.get("general.architecture") or "")
        if self.architecture not in ARCHITECTURES:
            raise UnsupportedModelError(
                f"GGUF files of architecture {self.architecture or '(none)'} are not supported; supported are "
                f"{', '.join(sorted(ARCHITECTURES))}"
            )
        self.tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    def get(self, key: str) -> Any:
        """The value of a full key; None: the file does not have the key."""
        field = self._reader.fields.get(key)
        return None if field is None else field.contents()

    def own(self, name: str) -> Any:
        """The value of a key with the architecture's prefix; None: the file does not have the key."""
        return self.get(f"{self.architecture}.{name}")

    def apply(self, config: Any) -> None:
        """Sets the config values that transformers left out. Raises UnsupportedModelError naming an unknown key."""
        prefix = f"{self.architecture}."
        for key in self._reader.fields:
            name = key.removeprefix(prefix)
            if not key.startswith(prefix) or name in _HANDLED_KEYS or self.own(name) == _OFF.get(name):
                continue
            attribute = _ATTRIBUTES.get(name)
            is_known = attribute is not None and (hasattr(config, attribute) or name == "attention.key_length")
            if not is_known or (attribute == "sliding_window" and self.architecture not in _WINDOWED):
                raise UnsupportedModelError(f"{key} = {self.own(name)} is not known for this kind of model")
            if attribute is not None and hasattr(config, attribute):
                setattr(config, attribute, self.own(name))
        if self.architecture in ("gemma2", "gemma3"):
            config.query_pre_attn_scalar = self._gemma_attention_scalar()
        if self.architecture == "phi3" and (original := self.own("rope.scaling.original_context_length")):
            config.original_max_position_embeddings = original
        config.rope_parameters = self._rope_parameters(config)

    def differences(self, config: Any) -> list[str]:
        """Differences between a config and the file, one sentence each."""
        found = []
        for name, attribute in _ATTRIBUTES.items():
            value = self.own(name)
            if value is None or value == _OFF.get(name):
                continue
            ours = self._head_dim(config) if attribute == "head_dim" else getattr(config, attribute, None)
            if not _is_close(ours, value):
                found.append(f"{attribute} is {ours}, but {self.architecture}.{name} is {value}")
        rope = self._rope_parameters(config)
        if not _is_same_rope(config.rope_parameters, rope):
            found.append(f"rope_parameters are {config.rope_parameters}, but those of the file are {rope}")
        is_tied = "output.weight" not in self.tensors
        if bool(config.tie_word_embeddings) != is_tied:
            found.append(f"tie_word_embeddings is {config.tie_word_embeddings}, but the file says {is_tied}")
        return found

    def num_weights(self) -> int:
        """Number of elements of all weight tensors."""
        return sum(int(tensor.n_elements) for name, tensor in self.tensors.items() if name not in _ROPE_TENSORS)

    @staticmethod
    def _head_dim(config: Any) -> int:
        return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)

    def _gemma_attention_scalar(self) -> int:
        """The file has no key for this scalar. Published models use the head size, except the two 27B models, which are
        recognized by their number of layers."""
        heads, key_length = self.own("attention.head_count"), self.own("attention.key_length")
        if self.own("block_count") == {"gemma2": 46, "gemma3": 62}[self.architecture]:
            return int(self.own("embedding_length")) // int(heads)
        return int(key_length or self.own("embedding_length") // heads)

    def _rope_parameters(self, config: Any) -> dict[str, Any]:
        """RoPE parameters in the form of a config. Raises UnsupportedModelError naming a value without such a form."""
        head_dim = self._head_dim(config)
        if (self.own("attention.value_length") or head_dim) != head_dim:
            raise UnsupportedModelError(f"attention.value_length differs from the size of a head, {head_dim}")
        theta = float(self.own("rope.freq_base") or 10_000.0)
        rope = {"rope_theta": theta, **self._rope_scaling(config, theta, head_dim)}
        num_rotated = self.own("rope.dimension_count") or head_dim
        if self.architecture == "phi3":
            rope["partial_rotary_factor"] = num_rotated / head_dim
        elif num_rotated != head_dim:
            raise UnsupportedModelError(f"rope.dimension_count is {num_rotated}, but a head has {head_dim} elements")
        if self.architecture != "gemma3":
            if self.own("rope.freq_base_swa") not in (None, theta):
                raise UnsupportedModelError("rope.freq_base_swa is not known for this kind of model")
            return rope
        if self.own("attention.sliding_window_pattern") not in (None, _GEMMA3_PATTERN):
            raise UnsupportedModelError(
                f"attention.sliding_window_pattern is {self.own('attention.sliding_window_pattern')}, not 6"
            )
        sliding = float(self.own("rope.freq_base_swa") or 10_000.0)
        return {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": sliding}}

    def _rope_scaling(self, config: Any, theta: float, head_dim: int) -> dict[str, Any]:
        kind = self.own("rope.scaling.type") or "none"
        factor, original = self.own("rope.scaling.factor"), self.own("rope.scaling.original_context_length")
        if (factors := self.tensors.get("rope_freqs.weight")) is not None:
            return self._llama3(np.asarray(factors.data, np.float64).ravel(), theta, head_dim)
        if "rope_factors_long.weight" in self.tensors:
            long, short = (
                [float(value) for value in self.tensors[f"rope_factors_{which}.weight"].data.ravel()]
                for which in ("long", "short")
            )
            if not original:
                raise UnsupportedModelError("rope.scaling.original_context_length is missing beside rope_factors_long")
            self._check_longrope_factor(config.max_position_embeddings / original, original)
            return {
                "rope_type": "longrope",
                "long_factor": long,
                "short_factor": short,
                "original_max_position_embeddings": original,
            }
        if kind == "none" or not factor or factor == 1:
            return {"rope_type": "default"}
        if kind == "linear":
            return {"rope_type": "linear", "factor": float(factor)}
        if kind == "yarn" and original and self.own("rope.scaling.attn_factor") in (None, 1.0):
            betas = {
                name: float(value)
                for name in ("beta_fast", "beta_slow")
                if (value := self.own(f"rope.scaling.yarn_{name}")) is not None
            }
            stretched = {"factor": float(factor), "original_max_position_embeddings": original}
            return {"rope_type": "yarn", **stretched, **betas}
        raise UnsupportedModelError(
            f"rope.scaling.type {kind} with factor {factor}, original length {original} and attn_factor "
            f"{self.own('rope.scaling.attn_factor')} is not known"
        )

    def _check_longrope_factor(self, stretch: float, original: int) -> None:
        """transformers derives the attention factor. Raises UnsupportedModelError if the file has another factor."""
        derived = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
        given = self.own("rope.scaling.attn_factor")
        if given is not None and not _is_close(derived, given, 1e-2):
            raise UnsupportedModelError(
                f"rope.scaling.attn_factor is {given}; only longrope's {derived:.4f} is supported"
            )

    def _llama3(self, factors: np.ndarray, theta: float, head_dim: int) -> dict[str, Any]:
        """Llama 3 parameters that give the frequency ratios (plain / scaled) in the tensor `rope_freqs`."""
        if np.allclose(factors, 1.0):
            return {"rope_type": "default"}
        plain = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        wavelengths = 2 * math.pi / plain
        for factor, low, high, original in _LLAMA3_CANDIDATES if len(factors) == head_dim // 2 else ():
            smooth = (original / wavelengths - low) / (high - low)
            expected = 1 / ((1 - smooth) / factor + smooth)
            expected = np.where(wavelengths < original / high, 1.0, expected)
            expected = np.where(wavelengths > original / low, factor, expected)
            if np.allclose(factors, expected, rtol=TOLERANCE, atol=0):
                return {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": low,
                    "high_freq_factor": high,
                    "original_max_position_embeddings": original,
                }
        raise UnsupportedModelError("the tensor rope_freqs holds factors that no Llama 3 model has")


def merge_parts(parts: list[Path], target: Path) -> None:
    """Writes one file with the metadata of the first part and the unchanged tensors of all parts.

    Raises ModelLoadError if `parts` are not all parts of one file, in order.
    """
    readers = [GGUFReader(part) for part in parts]
    first = readers[0]
    for number, (part, reader) in enumerate(zip(parts, readers, strict=True)):
        found = (_number(reader, "split.no"), _number(reader, "split.count"))
        if found != (number, len(parts)):
            raise ModelLoadError(f"{part.name} says that it is part {found[0]} (from 0) of {found[1]}")
    tensors = [(reader, tensor) for reader in readers for tensor in reader.tensors]
    if _number(first, "split.tensors.count") != len(tensors):
        raise ModelLoadError(
            f"{parts[0].name} says that there are {_number(first, 'split.tensors.count')} tensors, but the parts have "
            f"{len(tensors)}"
        )
    writer = GGUFWriter(target, first.fields["general.architecture"].contents(), endianess=first.endianess)
    writer.data_alignment = int(first.alignment)
    for name, field in first.fields.items():
        if name == "general.architecture" or name.startswith(("GGUF.", "split.")):
            continue
        kind, value = field.types[0], field.contents()
        is_empty_array = kind == GGUFValueType.ARRAY and not value  # GGUFWriter can't write empty arrays
        if is_empty_array:
            continue
        writer.add_key_value(name, value, kind, field.types[-1] if kind == GGUFValueType.ARRAY else None)
    for _, tensor in tensors:
        data = tensor.data
        writer.add_tensor_info(tensor.name, data.shape, data.dtype, data.nbytes, tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for reader, tensor in tensors:
        writer.write_tensor_data(tensor.data, tensor_endianess=reader.endianess)
    writer.close()


def _number(reader: GGUFReader, key: str) -> int | None:
    field = reader.fields.get(key)
    return None if field is None else int(field.contents())


def _is_close(one: Any, other: Any, tolerance: float = TOLERANCE) -> bool:
    """Whether numbers are equal up to the precision of the 32-bit floats in files."""
    return one is not None and math.isclose(float(one), float(other), rel_tol=tolerance)


def _is_same_rope(one: Any, other: dict[str, Any]) -> bool:
    """Whether `one` has every entry of `other`, with the same value."""
    if not isinstance(one, dict):
        return False
    for name, value in other.items():
        found = one.get(name)
        if isinstance(value, dict):
            same = _is_same_rope(found, value)
        elif isinstance(value, str):
            same = found == value
        elif isinstance(value, list):
            same = isinstance(found, list) and np.allclose(found, value, rtol=TOLERANCE)
        else:
            same = _is_close(found, value)
        if not same:
            return False
    return True
