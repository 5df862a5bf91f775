"""Tiny random models of many families, with a tokenizer, saved as a user would have them on disk."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 320
EOS = 1


@dataclass(frozen=True)
class Family:
    """What a family's config needs beyond the common sizes."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    model_type: str = ""
    """Empty: the name."""


_LLAMA3_ROPE = {
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 32}
FAMILIES = {
    family.name: family
    for family in (
        Family("llama"),
        Family("qwen2"),
        Family("qwen3", {"head_dim": 16}),
        Family("mistral", {"sliding_window": 24}),
        Family("gemma2", {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16}),
        Family("phi3", {"pad_token_id": 0, "original_max_position_embeddings": 512}),
        Family(
            "qwen3_moe",
            {
                "head_dim": 16,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
                "norm_topk_prob": True,
            },
        ),
        Family("granite", {"attention_multiplier": 0.3, "logits_scaling": 2.0}),
        Family("olmo2"),
        Family("smollm3", {"pad_token_id": 0, "no_rope_layers": [1, 0]}),
        Family("gemma3", {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16}, "gemma3_text"),
        Family("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        Family("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}),
        Family(
            "deepseek_v3",
            {
                "num_key_value_heads": 4,
                "q_lora_rank": None,
                "kv_lora_rank": 16,
                "n_routed_experts": 4,
                "n_group": 1,
                "topk_group": 1,
                "num_experts_per_tok": 2,
                "first_k_dense_replace": 1,
                "moe_intermediate_size": 32,
                "qk_nope_head_dim": 8,
                "qk_rope_head_dim": 8,
                "v_head_dim": 16,
            },
        ),
        Family("llama3 rope", {"rope_parameters": {"rope_type": "llama3", **_LLAMA3_ROPE}}, "llama"),
        # Short originals, so that tests' prompts go beyond them.
        Family("yarn", {"rope_parameters": {"rope_type": "yarn", **_YARN}}, "llama"),
        Family(
            "dynamic rope", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}, "llama"
        ),
    )
}


def make_tiny_model(family: str, folder: Path, max_model_len: int = 512, **options: Any) -> Path:
    """Saves a random model of a family in fp32 and returns its folder. options: of the config, before all others."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        FAMILIES[family].model_type or family,
        **{
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": max_model_len,
            "bos_token_id": 0,
            "eos_token_id": EOS,
            "initializer_range": 0.2,
        }
        | FAMILIES[family].options
        | options,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    save_byte_tokenizer(folder)
    return folder


def save_byte_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer without merges: two special tokens, then one token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": EOS} | {letter: index + 2 for index, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    wrapped.chat_template = (
        "{% for m in messages %}{% if m.role not in ['user', 'assistant', 'system'] %}"
        "{{ raise_exception('unknown role ' + m.role) }}{% endif %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    )
    wrapped.save_pretrained(folder)


def save_metaspace_tokenizer(folder: Path, byte_fallback: bool) -> Path:
    """A tokenizer in the manner of SentencePiece: letters with U+2581 for spaces. Returns its folder.

    byte_fallback: unknown letters become byte tokens, as in Llama 2; else they become the unknown token, and the
    decoder is the plain Metaspace one, as in T5.
    """
    letters = "\u2581abcdefghijklmnopqrstuvwxyzHTRS,.:\n\t"
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {letter: n + 3 for n, letter in enumerate(letters)}
    merges = []
    if byte_fallback:
        vocabulary |= {f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)}
        vocabulary["\u2581t"] = len(vocabulary)
        merges.append(("\u2581", "t"))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=byte_fallback))
    if byte_fallback:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
        steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(steps)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    wrapped.save_pretrained(folder)
    return folder


def load_reference(folder: Path) -> Any:
    """The model in plain `transformers`, fp32, stock eager attention."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.inference_mode()
def reference_tokens(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """Greedy continuation by `transformers`' own generate, EOS ignored."""
    model.generation_config.eos_token_id = None
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return list(output[0, len(prompt) :].tolist())


def set_config_value(folder: Path, name: str, value: Any) -> None:
    """Changes one value of a saved config.json."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config[name] = value
    path.write_text(json.dumps(config))
