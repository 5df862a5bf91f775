"""`python -m engine.model_conversion FILE.gguf FOLDER`: a GGUF file as bf16 safetensors. Needs torch."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from engine.native.library import load_kernels


def convert(gguf: Path, target: Path) -> None:
    """Dequantizes the weights and saves model and tokenizer."""
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    # The saved weights are plain; a quantization_config would make loaders look for packed ones.
    vars(model.config).pop("quantization_config", None)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    # So that the first start does not have to.
    load_kernels()


if __name__ == "__main__":
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except Exception as error:  # one line for the parent process to show
        print(f"{type(error).__name__}: {error}".splitlines()[0], file=sys.stderr)
        sys.exit(1)
