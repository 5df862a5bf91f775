"""Converts a GGUF file to bf16 safetensors: `python -m engine.model_conversion FILE.gguf FOLDER`. Needs torch.

transformers converts the weights. Metadata that transformers ignores is set from the file. At the end the folder is
compared with the file.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from engine.checkpoint import gguf_parts, some_names
from engine.errors import EngineError, ModelLoadError, UnsupportedModelError
from engine.gguf_metadata import GgufMetadata, merge_parts
from engine.native.library import load_kernels

_OWN_SPLITS = {
    # Each digit by itself, then as GPT-2.
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
}
"""Pre-tokenizers of byte-level vocabularies that transformers lacks, by `tokenizer.ggml.pre`."""


def convert(gguf: Path, target: Path) -> None:
    """Dequantizes the weights and saves model and tokenizer. gguf: the file, or any part of it.

    Raises ModelLoadError if the file is incomplete, UnsupportedModelError naming metadata that is not supported.
    """
    # Alone in a folder: transformers would prefer a tokenizer.json beside the GGUF to the GGUF's own tokenizer.
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        alone = Path(folder) / "model.gguf"
        parts = gguf_parts(gguf)
        if len(parts) > 1:
            merge_parts(parts, alone)
        else:
            alone.symlink_to(gguf.resolve())
        _convert(alone, target)
    # Compile the kernels now, so that the first start does not wait for the compiler.
    load_kernels()


def _convert(gguf: Path, target: Path) -> None:
    metadata = GgufMetadata(gguf)
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    config = AutoConfig.from_pretrained(**where)
    metadata.apply(config)
    tokenizer = AutoTokenizer.from_pretrained(**where)
    _set_split(tokenizer, metadata)
    model, loading_info = AutoModelForCausalLM.from_pretrained(
        **where,
        config=config,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
        output_loading_info=True,
    )
    if loading_info["missing_keys"]:
        raise ModelLoadError(f"the file lacks weights: {some_names(sorted(loading_info['missing_keys']))}")
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    if num_weights != metadata.num_weights():
        raise UnsupportedModelError(
            f"the file's tensors have {metadata.num_weights()} elements, but the model uses {num_weights} of them: the "
            "file has weights that this kind of model does not have"
        )
    # The saved weights are not quantized. A quantization_config would make loaders look for quantized weights.
    vars(model.config).pop("quantization_config", None)
    model.generation_config.eos_token_id = _end_token_ids(metadata)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    _drop_added_tokens(target, len(metadata.get("tokenizer.ggml.tokens") or []))
    _check_tokenizer(AutoTokenizer.from_pretrained(target), metadata)
    differences = metadata.differences(AutoConfig.from_pretrained(target))
    if differences:
        raise UnsupportedModelError(f"the converted model differs from the file: {'; '.join(differences)}")


def _set_split(tokenizer: Any, metadata: GgufMetadata) -> None:
    """Sets the pre-tokenizer that the file names. Raises UnsupportedModelError if the name is unknown."""
    if metadata.get("tokenizer.ggml.model") != "gpt2":
        return
    name = metadata.get("tokenizer.ggml.pre")
    if name in _OWN_SPLITS:
        tokenizer.backend_tokenizer.pre_tokenizer = _OWN_SPLITS[name]
    elif name not in GGUF_PRE_TOKENIZER_SPLITS:
        known = ", ".join(sorted({*GGUF_PRE_TOKENIZER_SPLITS, *_OWN_SPLITS}))
        raise UnsupportedModelError(f"tokenizer.ggml.pre is {name!r}; supported are {known}")


def _drop_added_tokens(target: Path, num_tokens: int) -> None:
    """Removes special tokens that the tokenizer's class added and that the model has no embedding for."""
    path = target / "tokenizer.json"
    content = json.loads(path.read_text())
    added = content.get("added_tokens", [])
    dropped = {token["content"] for token in added if token["id"] >= num_tokens}
    if not dropped:
        return
    content["added_tokens"] = [token for token in added if token["id"] < num_tokens]
    path.write_text(json.dumps(content, ensure_ascii=False))
    path = target / "tokenizer_config.json"
    named = {name: value for name, value in json.loads(path.read_text()).items() if str(value) not in dropped}
    path.write_text(json.dumps(named, ensure_ascii=False, indent=2))


def _check_tokenizer(tokenizer: Any, metadata: GgufMetadata) -> None:
    """Raises UnsupportedModelError if the converted tokenizer differs from the file's."""
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    ids = range(len(tokens))
    differing = [n for n, token in zip(ids, tokenizer.convert_ids_to_tokens(list(ids)), strict=True)
                 if token != tokens[n]]  # fmt: skip
    if differing or len(tokenizer) > len(tokens):
        raise UnsupportedModelError(
            f"its tokenizer has {len(tokenizer)} tokens and the file {len(tokens)}, of which {len(differing)} differ"
        )
    wants_space = metadata.get("tokenizer.ggml.add_space_prefix")
    if wants_space is not None and metadata.get("tokenizer.ggml.model") == "llama":
        has_space = str(tokenizer.tokenize("a")[:1]).count("\u2581") > 0
        if has_space != bool(wants_space):
            raise UnsupportedModelError(
                f"tokenizer.ggml.add_space_prefix is {wants_space}, but the converted tokenizer differs"
            )


def _end_token_ids(metadata: GgufMetadata) -> list[int]:
    """Tokens that end an output: end of sequence, of turn, of message."""
    named = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return sorted({int(token) for token in named if token is not None})


if __name__ == "__main__":
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except EngineError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        sys.exit(1)
    except Exception as error:  # one line for the parent process to show
        print(f"{type(error).__name__}: {error}".splitlines()[0], file=sys.stderr)
        sys.exit(1)
