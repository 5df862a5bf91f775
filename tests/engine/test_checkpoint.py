"""Files that are not the model they say they are: refused in one line that names the file or the tensor."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, BertConfig, BertForMaskedLM, BertModel

from engine.checkpoint import LFS_POINTER, check_folder
from engine.config import EngineConfig
from engine.errors import ModelLoadError, UnsupportedModelError
from engine.loader import load_model
from engine.model_store import ModelUnavailable, resolve_model
from tests.tiny_models import load_reference, make_tiny_model, save_byte_tokenizer, set_config_value


@pytest.fixture
def folder(tmp_path, tiny_model):
    return shutil.copytree(tiny_model("llama"), tmp_path / "model")


def load(folder):
    return load_model(EngineConfig(model=str(folder), device="cpu", dtype="float32"))


def change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def one_line(error):
    assert "\n" not in str(error.value)
    return str(error.value)


# weights


def test_a_missing_tensor_is_named(folder):
    change_weights(folder, lambda w: w.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelLoadError, match=r"its files lack model\.layers\.1\.mlp\.up_proj\.weight") as error:
        load(folder)
    one_line(error)


def test_many_missing_tensors_are_counted(folder):
    change_weights(folder, lambda w: [w.pop(name) for name in list(w) if ".layers.0." in name])
    with pytest.raises(ModelLoadError, match=r"its files lack .* and 4 more"):
        load(folder)


def test_a_missing_head_is_named(folder):
    """A base model without its LM head would get a random one."""
    change_weights(folder, lambda w: w.pop("lm_head.weight"))
    with pytest.raises(ModelLoadError, match=r"its files lack lm_head\.weight"):
        load(folder)


def test_a_tensor_without_a_place_is_named(folder):
    """Biases that the config does not announce would be left out of the computation."""
    change_weights(folder, lambda w: w.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}))
    with pytest.raises(ModelLoadError, match=r"the model does not have model\.layers\.0\.self_attn\.q_proj\.bias"):
        load(folder)


def test_a_tensor_of_another_shape_is_named_with_both(folder):
    change_weights(folder, lambda w: w.update({"model.norm.weight": torch.ones(3)}))
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight \(file \[3\], model \[64\]\)"):
        load(folder)


def test_buffers_that_models_compute_themselves_may_be_in_the_files(folder):
    change_weights(folder, lambda w: w.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    assert load(folder).vocab_size == 320


def test_tied_weights_need_no_tensor_of_their_own(folder):
    set_config_value(folder, "tie_word_embeddings", True)
    change_weights(folder, lambda w: w.pop("lm_head.weight"))
    model, reference = load(folder).model, load_reference(folder)
    assert torch.equal(model.get_output_embeddings().weight, reference.get_input_embeddings().weight)


@pytest.mark.parametrize("model_class", [BertModel, BertForMaskedLM])
def test_encoders_are_refused(model_class, tmp_path):
    """A masked-LM head loads without a word of complaint: what gives it away is that attention looks ahead."""
    config = BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=320
    )
    model_class(config).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=r"its files lack cls\.|it is an encoder"):
        load(tmp_path)


def test_an_encoder_decoder_gets_one_sentence(tmp_path):
    AutoConfig.for_model("t5").save_pretrained(tmp_path)
    save_byte_tokenizer(tmp_path)
    with pytest.raises(ModelUnavailable, match="t5 is an encoder-decoder model; only decoder-only models") as error:
        resolve_model(str(tmp_path))
    assert len(one_line(error)) < 300


def test_a_model_that_is_no_language_model_gets_one_sentence(tmp_path):
    AutoConfig.for_model("vit").save_pretrained(tmp_path)
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match="transformers has no text generation model for it") as error:
        load(tmp_path)
    assert len(one_line(error)) < 300


# files


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_pointers_of_git_lfs_are_named(name, folder):
    (folder / name).write_bytes(LFS_POINTER + b"/v1\noid sha256:00\nsize 1\n")
    with pytest.raises(ModelUnavailable, match=rf"{name}: is a git-lfs pointer.*git lfs pull") as error:
        resolve_model(str(folder))
    one_line(error)


def test_a_pointer_in_place_of_a_gguf_file_is_named(tmp_path):
    (tmp_path / "m.gguf").write_bytes(LFS_POINTER + b"/v1\n")
    with pytest.raises(ModelUnavailable, match=r"m\.gguf: is a git-lfs pointer"):
        resolve_model(str(tmp_path / "m.gguf"))


@pytest.mark.parametrize("keep", [0, 5, 100, 5000, -1])
def test_a_file_that_is_cut_off_is_named(keep, folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelUnavailable, match=r"model\.safetensors: is (truncated|not a safetensors file)") as error:
        resolve_model(str(folder))
    one_line(error)


@pytest.mark.parametrize("header", [b"[]", b"{]", b'{"a": 1}', b'{"a": {"data_offsets": []}}'])
def test_a_broken_header_is_named(header, folder):
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelUnavailable, match=r"model\.safetensors: its header can't be read"):
        resolve_model(str(folder))


def test_a_part_that_is_not_there_is_named(folder):
    names = list(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    parts = {name: f"model-0000{1 + (place > 5)}-of-00002.safetensors" for place, name in enumerate(names)}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": parts}))
    with pytest.raises(ModelUnavailable, match=r"names model-00002-of-00002.safetensors, which is missing"):
        resolve_model(str(folder))
    index.write_text(json.dumps({"weight_map": {**dict.fromkeys(names, parts[names[0]]), "x": parts[names[0]]}}))
    with pytest.raises(ModelUnavailable, match=r"names x, which none of its files contains"):
        resolve_model(str(folder))
    index.write_text("{}")
    with pytest.raises(ModelUnavailable, match=r"has no weight_map"):
        resolve_model(str(folder))


def test_an_index_that_was_left_beside_a_whole_file_is_not_read(folder):
    """transformers takes the whole file."""
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"x": "gone.safetensors"}}')
    resolve_model(str(folder))
    assert load(folder).vocab_size == 320


def test_a_missing_tokenizer_is_told_before_processes_start(folder):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelUnavailable, match="has no tokenizer"):
        resolve_model(str(folder))


def test_a_router_needs_no_weights(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelUnavailable, match="has no weights"):
        resolve_model(str(folder))
    assert resolve_model(str(folder), with_weights=False) == folder.resolve()


@pytest.mark.parametrize("content", ["{", "[]", ""])
def test_a_broken_config_is_named(content, folder):
    (folder / "config.json").write_text(content)
    with pytest.raises(ModelUnavailable, match=r"config\.json: (is not valid JSON|does not hold a JSON object)"):
        resolve_model(str(folder))


# quantized


@pytest.mark.parametrize("method", ["awq", "gptq", "bitsandbytes", "fp8", "compressed-tensors"])
def test_quantized_checkpoints_are_refused_by_method(method, folder):
    set_config_value(folder, "quantization_config", {"quant_method": method})
    with pytest.raises(ModelUnavailable, match=f"its weights are quantized with {method}"):
        resolve_model(str(folder))
    with pytest.raises(UnsupportedModelError, match=f"its weights are quantized with {method}"):
        load(folder)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_packed_tensors_are_named_where_the_config_says_nothing(dtype, folder):
    change_weights(folder, lambda w: w.update({"lm_head.weight": torch.zeros(320, 64).to(dtype)}))
    with pytest.raises(UnsupportedModelError, match=r"lm_head\.weight is quantized \((F8_E4M3|I8)\)"):
        check_folder(folder)


# length


def with_rope(tmp_path, **rope):
    folder = make_tiny_model("llama", tmp_path)
    set_config_value(folder, "rope_parameters", {"rope_theta": 10000.0, **rope})
    return load(folder).max_model_len


def test_yarn_stretches_the_original_length_by_its_factor(tmp_path):
    """Model cards ask people to add it to config.json and to leave max_position_embeddings (512 here) as it is."""
    assert with_rope(tmp_path, rope_type="yarn", factor=4.0, original_max_position_embeddings=512) == 2048
    assert with_rope(tmp_path, rope_type="yarn", factor=4.0, original_max_position_embeddings=128) == 512
    assert with_rope(tmp_path, rope_type="linear", factor=4.0) == 512
