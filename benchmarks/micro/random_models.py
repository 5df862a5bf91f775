"""Models of a real size with random weights, made on the device, so that nothing has to be downloaded."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.loader import ATTENTION_NAME, LoadedModel, adopt_model
from engine.model_identity import ModelIdentity

LLAMA_3_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}


def make_model(device: torch.device, dtype: torch.dtype, **sizes: Any) -> LoadedModel:
    """A random Llama of some size, made on the device."""
    config = AutoConfig.for_model("llama", bos_token_id=0, eos_token_id=1, **sizes)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME)
    return adopt_model(model, config.max_position_embeddings, ModelIdentity("", "", "", ""))
