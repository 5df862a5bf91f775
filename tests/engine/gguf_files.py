"""Tiny GGUF files of random models, written as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB_SIZE = 320


def make_model(model_type: str, **options: Any) -> Any:
    """A random model whose weights are the same in bf16 and fp32."""
    sizes = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(sizes | options))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    for parameter in model.parameters():
        # Norms' weights around 1, or around 0 where the model adds 1 itself.
        around = 1.0 if parameter.ndim == 1 and not model_type.startswith("gemma") else 0.0
        parameter.data = (torch.randn_like(parameter) * 0.1 + around).bfloat16().float()
    return model.eval()


def byte_level_tokenizer(writer: gguf.GGUFWriter, pre: str = "llama-bpe") -> None:
    """Bytes, a few merges, and special tokens up to the size of the vocabulary."""
    tokens = [*sorted(ByteLevel.alphabet()), "he", "ll", "hell", "hello", "11"]
    merges = ["h e", "l l", "he ll", "hell o", "1 1"]
    special = [f"<|special_{number}|>" for number in range(VOCAB_SIZE - len(tokens) - 1)]
    tokens += ["<|endoftext|>", *special]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(VOCAB_SIZE - 1)
    writer.add_eos_token_id(VOCAB_SIZE - 2)
    writer.add_eot_token_id(VOCAB_SIZE - 3)


def sentencepiece_tokenizer(writer: gguf.GGUFWriter) -> None:
    """Words with byte fallback."""
    tokens, types = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"], [3, 3, 3, 2, 3]
    tokens += [f"<0x{byte:02X}>" for byte in range(256)]
    types += [6] * 256
    words = ["\u2581", "h", "e", "l", "o", "he", "ll", "hell", "hello", "\u2581hello", "a", "b"]
    special = [f"<special_{number}>" for number in range(VOCAB_SIZE - len(tokens) - len(words))]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*tokens, *words, *special])
    writer.add_token_types([*types, *[1] * len(words), *[3] * len(special)])
    writer.add_token_scores([-float(n) for n in range(VOCAB_SIZE)])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)


def _interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows as llama.cpp's RoPE of llama models has them."""
    shape = (num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return weight.reshape(shape).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    architecture: str,
    model: Any,
    keys: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    leave_out: tuple[str, ...] = (),
    tokenizer: Any = byte_level_tokenizer,
    parts: int = 1,
) -> Path:
    """keys: more metadata, without the architecture's name; tensors: more of them. Returns the (first) file."""
    config = model.config.get_text_config()
    split = 0 if parts == 1 else 1 + len(model.state_dict()) // parts
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    known = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
    }
    for key, value in (known | (keys or {})).items():
        name = key if key.startswith("tokenizer.") else f"{architecture}.{key}"
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](name, value)
    tokenizer(writer)
    [enum] = [number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture]
    names = gguf.get_tensor_name_map(enum, config.num_hidden_layers)
    for name, parameter in model.state_dict().items():
        weight = parameter.float().numpy()
        base, _, suffix = name.rpartition(".")
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue
        if architecture == "llama" and ".q_proj." in name:
            weight = _interleaved(weight, config.num_attention_heads)
        if architecture == "llama" and ".k_proj." in name:
            weight = _interleaved(weight, config.num_key_value_heads)
        if architecture.startswith("gemma") and "norm.weight" in name:
            weight = weight + 1
        if ".experts." in name:
            block = name.split(".")[2]
            halves = np.split(weight, 2, axis=1) if suffix == "gate_up_proj" else [weight]
            for kind, part in zip(("gate", "up") if len(halves) == 2 else ("down",), halves, strict=True):
                writer.add_tensor(f"blk.{block}.ffn_{kind}_exps.weight", np.ascontiguousarray(part))
            continue
        written = f"{names.get_name(base)}.{suffix}"
        if written not in leave_out:
            writer.add_tensor(written, np.ascontiguousarray(weight))
    for name, weight in (tensors or {}).items():
        writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if parts == 1 else sorted(path.parent.glob(f"{path.stem}-0*.gguf"))[0]
