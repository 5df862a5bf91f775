"""Models that can't be served are refused at load, with the reason."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine import loader
from engine.config import EngineConfig
from engine.errors import ModelLoadError, UnsupportedModelError
from tests.tiny_models import make_tiny_model, set_config_value


def load(folder, **options):
    return loader.load_model(EngineConfig(model=str(folder), device="cpu", dtype="float32", **options))


def test_shape_and_limits_are_read_from_the_model(tiny_model):
    loaded = load(tiny_model("qwen3"), max_model_len=100)
    assert (loaded.kv_shape.num_layers, loaded.kv_shape.num_kv_heads, loaded.kv_shape.head_dim) == (2, 2, 16)
    assert (loaded.max_model_len, loaded.vocab_size) == (100, 320)


def test_a_missing_folder_is_named():
    with pytest.raises(ModelLoadError, match=r"--model /no/such/folder: no config.json there"):
        load("/no/such/folder")


def test_a_broken_config_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(ModelLoadError, match=r"its config.json can't be read"):
        load(tmp_path)


def test_missing_weights_are_named(tmp_path, tiny_model):
    (tmp_path / "config.json").write_text((tiny_model("llama") / "config.json").read_text())
    with pytest.raises(ModelLoadError, match="has no weights"):
        load(tmp_path)


def test_more_length_than_trained_is_refused(tiny_model):
    with pytest.raises(ModelLoadError, match="--max-model-len is 513, but the model was trained for 512 tokens"):
        load(tiny_model("llama"), max_model_len=513)


def test_attention_keywords_that_matter_are_refused():
    """gpt_oss passes `s_aux` (attention sinks): ignoring it would give wrong text."""
    tensor = torch.zeros(1, 1, 1, 8)
    with pytest.raises(UnsupportedModelError, match="needs attention sinks"):
        loader.paged_attention(None, tensor, tensor, tensor, None, s_aux=torch.zeros(1), kvferry_plan=None)


def test_attention_masks_are_refused():
    tensor = torch.zeros(1, 1, 1, 8)
    with pytest.raises(UnsupportedModelError, match="mask of its own"):
        loader.paged_attention(None, tensor, tensor, tensor, torch.zeros(1), kvferry_plan=None)


@pytest.mark.parametrize(
    ("model_type", "options", "reason"),
    [
        ("mamba", {"state_size": 8}, "can't be served"),
        ("gpt_oss", {"num_local_experts": 2, "head_dim": 16}, "attention sinks"),
        ("qwen3_next", {"head_dim": 16, "num_experts": 2, "linear_num_value_heads": 2}, "linear_attention"),
        (
            "deepseek_v3",
            {"q_lora_rank": None, "kv_lora_rank": 16, "n_routed_experts": 2, "n_group": 1, "topk_group": 1,
             "num_experts_per_tok": 1, "first_k_dense_replace": 2, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
             "v_head_dim": 16, "num_key_value_heads": 4},
            "elements per head",
        ),
        ("bloom", {"n_head": 4, "n_layer": 2}, "can't be served"),
    ],
)  # fmt: skip
def test_models_with_other_state_are_refused_with_the_reason(model_type, options, reason, tmp_path):
    sizes = {
        "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    }  # fmt: skip
    config = AutoConfig.for_model(model_type, **(sizes | options))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=reason):
        load(tmp_path)


def test_rope_that_depends_on_the_longest_request_of_a_step_is_bounded(tmp_path):
    """longrope switches its frequencies beyond the original length: one request would change its neighbours."""
    folder = make_tiny_model("phi3", tmp_path)
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 256,
    }
    set_config_value(folder, "rope_parameters", rope)
    set_config_value(folder, "original_max_position_embeddings", 256)
    assert load(folder).max_model_len == 256
    with pytest.raises(UnsupportedModelError, match="use --max-model-len 256 or less"):
        load(folder, max_model_len=300)


def test_identity_tells_weights_tokenizers_and_configs_apart(tmp_path, tiny_model):
    first = load(tiny_model("llama")).identity
    other = make_tiny_model("llama", tmp_path)
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-4:] = b"\0\0\0\0"
    (other / "model.safetensors").write_bytes(weights)
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text() + " ")
    set_config_value(other, "rms_norm_eps", 0.01)
    second = load(other).identity
    assert first.weights_hash != second.weights_hash
    assert first.tokenizer_hash != second.tokenizer_hash
    assert first.config_hash != second.config_hash
    assert load(tiny_model("llama")).identity == first
