"""What tells one model from another: hashes of config, weights and tokenizer."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.model_length import rope_parameters


@dataclass(frozen=True)
class ModelIdentity:
    """Values that must be equal on two workers before one can use pages of the other."""

    config_hash: str
    weights_hash: str
    tokenizer_hash: str
    rope: str
    """RoPE parameters as canonical JSON."""


def model_identity(folder: Path, hf_config: Any, text_config: Any) -> ModelIdentity:
    config = {
        name: value
        for name, value in hf_config.to_dict().items()
        if name not in {"_name_or_path", "transformers_version", "dtype", "torch_dtype"}
    }
    rope = json.dumps(rope_parameters(text_config), sort_keys=True, default=str)
    return ModelIdentity(
        config_hash=_sha256(json.dumps(config, sort_keys=True, default=str).encode()),
        weights_hash=_weights_hash(folder),
        tokenizer_hash=_file_hash(folder / "tokenizer.json"),
        rope=rope,
    )


def _weights_hash(folder: Path) -> str:
    """Identifies a checkpoint without reading all of its bytes: hashes size, header and samples of each file."""
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
