"""Checks a model's files before the model is loaded. This module does not import torch, so a command reports a bad
folder at once.

Only headers are read: the check takes milliseconds for a checkpoint of any size.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from engine.errors import ModelLoadError, UnsupportedModelError

LFS_POINTER = b"version https://git-lfs"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
"""A folder needs one of these files to have a tokenizer."""
PLAIN_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
LONGEST_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format."""
NAMES_IN_A_MESSAGE = 5
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def check_folder(folder: Path, with_weights: bool = True) -> None:
    """Checks whether the model in a folder can be served, as far as its files show.

    with_weights: False for a process that reads config and tokenizer only.
    Raises ModelLoadError naming the file, or UnsupportedModelError naming the unsupported weight format.
    """
    config = read_json(folder / "config.json")
    if config.get("is_encoder_decoder"):
        raise UnsupportedModelError(
            f"{folder}: {config.get('model_type', 'the model')} is an encoder-decoder model; only decoder-only models "
            "are served"
        )
    tokenizers = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if not tokenizers:
        raise ModelLoadError(
            f"{folder}: has no tokenizer (tokenizer.json or tokenizer.model); copy one into the folder"
        )
    refuse_pointer(tokenizers[0])  # the file that the tokenizer is loaded from
    if with_weights:
        check_weights(folder)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ModelLoadError naming the file."""
    if not path.is_file():
        raise ModelLoadError(f"{path.parent}: has no {path.name}")
    refuse_pointer(path)
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ModelLoadError(f"{path}: is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path}: does not hold a JSON object")
    return content


def gguf_parts(path: Path) -> list[Path]:
    """All parts of a split GGUF, in order, given any part of it. A GGUF that is not split is its own only part.

    Raises ModelLoadError naming the missing parts.
    """
    name = _PART.fullmatch(path.name)
    if name is None:
        return [path]
    parts = [path.with_name(f"{name['stem']}-{n:05}-of-{name['count']}.gguf") for n in range(1, int(name["count"]) + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ModelLoadError(f"{path.name} is one of {len(parts)} parts; missing beside it: {', '.join(missing)}")
    return parts


def some_names(names: list[str]) -> str:
    """The first few names, and the number of the others."""
    shown = ", ".join(names[:NAMES_IN_A_MESSAGE])
    return shown if len(names) <= NAMES_IN_A_MESSAGE else f"{shown} and {len(names) - NAMES_IN_A_MESSAGE} more"


def refuse_pointer(path: Path) -> None:
    """Raises ModelLoadError if a file is a git-lfs pointer instead of the large file itself."""
    with path.open("rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise ModelLoadError(f"{path}: is a git-lfs pointer, not the file itself; run `git lfs pull` in its folder")


def _refuse_quantized(folder: Path, config: dict[str, Any]) -> None:
    text_config = config.get("text_config")
    for section in (config, text_config if isinstance(text_config, dict) else {}):
        found = section.get("quantization_config") or section.get("compression_config")
        if found:
            method = found.get("quant_method") or found.get("format") if isinstance(found, dict) else None
            raise UnsupportedModelError(
                f"{folder}: its weights are quantized with {method or 'an unnamed method'} (quantization_config in "
                "config.json); only unquantized checkpoints and GGUF files are served"
            )


def check_weights(folder: Path) -> None:
    """Checks that the weights are present, complete and unquantized.

    Raises ModelLoadError naming the file, or UnsupportedModelError naming the unsupported weight format.
    """
    _refuse_quantized(folder, read_json(folder / "config.json"))
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():  # transformers prefers this file to an index too
        tensors = _safetensors_header(folder / "model.safetensors")
    elif index.is_file():
        tensors = _indexed_headers(index)
    else:
        _check_pickles(folder)
        return
    packed = sorted(name for name, tensor in tensors.items() if _is_packed(name, str(tensor.get("dtype"))))
    if packed:
        dtypes = ", ".join(sorted({str(tensors[name].get("dtype")) for name in packed}))
        raise UnsupportedModelError(
            f"{folder}: {some_names(packed)} {_is_are(packed)} quantized ({dtypes}); only unquantized checkpoints and "
            "GGUF files are served"
        )


def _indexed_headers(index: Path) -> dict[str, dict[str, Any]]:
    """Headers of all tensors in the files that an index names, by tensor name."""
    folder, weight_map = index.parent, read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ModelLoadError(f"{index}: has no weight_map")
    shards = sorted(set(weight_map.values()))
    missing = [name for name in shards if not (folder / name).is_file()]
    if missing:
        raise ModelLoadError(f"{folder}: {index.name} names {some_names(missing)}, which {_is_are(missing)} missing")
    tensors = {name: tensor for shard in shards for name, tensor in _safetensors_header(folder / shard).items()}
    absent = sorted(set(weight_map) - set(tensors))
    if absent:
        raise ModelLoadError(f"{folder}: {index.name} names {some_names(absent)}, which none of its files contains")
    return tensors


def _check_pickles(folder: Path) -> None:
    """Checks an older checkpoint in torch's own format."""
    files = sorted(folder.glob("pytorch_model*.bin"))
    if not files:
        raise ModelLoadError(f"{folder}: has no weights (model.safetensors, or an index of its parts)")
    for path in files:
        refuse_pointer(path)


def _is_packed(name: str, dtype: str) -> bool:
    """Whether a tensor is a quantized weight. Integer buffers and masks are not weights."""
    return dtype not in PLAIN_DTYPES and (dtype.startswith("F") or "weight" in name.rpartition(".")[2])


def _safetensors_header(path: Path) -> dict[str, dict[str, Any]]:
    """Headers of a file's tensors, by name. Raises ModelLoadError if the file is broken or truncated.

    The format: 8 bytes (length of the header, little endian), the header as JSON, then the tensors.
    """
    refuse_pointer(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= LONGEST_HEADER_BYTES:
            raise ModelLoadError(f"{path}: is not a safetensors file")
        raw = file.read(length)
    if len(raw) < length:
        raise ModelLoadError(
            f"{path}: is truncated: the file has {size} bytes, but its header alone needs {8 + length}"
        )
    try:
        header = json.loads(raw)
        tensors: dict[str, dict[str, Any]] = {name: t for name, t in header.items() if name != "__metadata__"}
        end = 8 + length + max((int(tensor["data_offsets"][1]) for tensor in tensors.values()), default=0)
    except (ValueError, AttributeError, KeyError, TypeError, IndexError) as error:
        raise ModelLoadError(f"{path}: its header can't be read: {error!r}") from error
    if end > size:
        raise ModelLoadError(f"{path}: is truncated: {size} of {end} bytes are there; download the file again")
    return tensors


def _is_are(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"
