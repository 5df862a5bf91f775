"""How long sequences of a model may get."""

from __future__ import annotations

from typing import Any

from engine.config import EngineConfig
from engine.errors import ModelLoadError, UnsupportedModelError

# RoPE kinds whose frequencies depend on the longest sequence of a step: one request would change another's.
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


def _trained_len(text_config: Any) -> int:
    """The longest sequence that a model was trained for, in tokens.

    YaRN (Peng et al. 2023, arXiv 2309.00071) multiplies the original length by its factor. Model cards ask users to add
    YaRN to config.json without a change of `max_position_embeddings`.
    """
    trained: int = getattr(text_config, "max_position_embeddings", None) or 2048
    stretched = [
        round(rope["factor"] * (rope.get("original_max_position_embeddings") or trained))
        for rope in rope_parameters(text_config)
        if rope.get("rope_type") == "yarn" and rope.get("factor")
    ]
    return min(stretched, default=trained)


def max_model_len_of(config: EngineConfig, text_config: Any) -> int:
    trained = _trained_len(text_config)
    wanted = config.max_model_len or trained
    if wanted > trained:
        raise ModelLoadError(f"--max-model-len is {wanted}, but the model was trained for {trained} tokens")
    for rope in rope_parameters(text_config):
        if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
            original: int = rope.get("original_max_position_embeddings") or trained
            if config.max_model_len is None:
                wanted = min(wanted, original)
            elif wanted > original:
                raise UnsupportedModelError(
                    f"--max-model-len is {wanted}, but beyond {original} tokens this model's {rope['rope_type']} RoPE "
                    f"depends on the longest sequence of a step; use --max-model-len {original} or less"
                )
    return wanted


def rope_parameters(text_config: Any) -> list[dict[str, Any]]:
    """RoPE parameters, one entry per kind of layer with parameters of its own."""
    rope = getattr(text_config, "rope_parameters", None) or {}
    if any(isinstance(value, dict) for value in rope.values()):
        return [value for value in rope.values() if isinstance(value, dict)]
    return [rope]
