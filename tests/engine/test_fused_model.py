"""Models that a CPU runs in one call per step, against the same models layer by layer and against `transformers`."""

from __future__ import annotations

import random
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.attention.torch_paged import TorchPagedAttention
from engine.config import EngineConfig
from engine.errors import UnsupportedModelError
from engine.kv_cache import KvCache
from engine.loader import load_model
from engine.model_runner import ModelRunner
from engine.native import library
from engine.native.library import load_kernels
from engine.sequence import SamplingParams, ScheduledSequence, Sequence, num_pages_for
from tests.tiny_models import FAMILIES, VOCAB_SIZE, load_reference, make_tiny_model

SIZES = {"hidden_size": 128, "head_dim": 32, "initializer_range": 0.08}
FUSED = {
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "phi3",
    "granite",
    "smollm3",
    "llama3 rope",
    "yarn",
    "dynamic rope",
}


def has_kernels():
    if shutil.which("gcc") is None:
        return False
    kernels = load_kernels()
    assert kernels is not None, "the kernels do not compile"
    return hasattr(kernels, "kvferry_run_layers")


pytestmark = pytest.mark.skipif(not has_kernels(), reason="no C compiler, or a processor without AVX512-BF16")


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    made = {}

    def make(family):
        if family not in made:
            sizes = dict(SIZES)
            if family == "deepseek_v3":
                del sizes["head_dim"]
            made[family] = make_tiny_model(family, tmp_path_factory.mktemp("model"), **sizes)
        return made[family]

    return make


def load(folder, attention="auto", dtype="bfloat16", quantize="none"):
    config = EngineConfig(model=str(folder), device="cpu", dtype=dtype, attention=attention, quantize=quantize)
    return load_model(config)


def random_prompt(length, seed=0):
    return random.Random(seed).choices(range(2, VOCAB_SIZE), k=length)


class Rig:
    """A runner with pages of any size, in no order."""

    def __init__(self, loaded, page_size=16, num_pages=400, plain=False):
        self.cache = KvCache(num_pages, page_size, loaded.kv_shape, loaded.dtype)
        self.runner = ModelRunner(loaded, self.cache, TorchPagedAttention(self.cache) if plain else None)
        self._free = random.Random(1).sample(range(num_pages), num_pages)

    def sequence(self, prompt, **sampling):
        table = [self._free.pop() for _ in range(num_pages_for(len(prompt) + 8, self.cache.page_size))]
        return Sequence(str(len(self._free)), list(prompt), len(prompt), SamplingParams(**sampling), table)

    def step(self, *entries):
        result = self.runner.run([ScheduledSequence(sequence, count) for sequence, count in entries])
        for sequence, count in entries:
            sequence.num_computed_tokens += count
        return result


def difference(found, expected):
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("family", FAMILIES)
def test_what_can_be_fused_is_fused_and_the_rest_runs_as_it_is(family, folder_of):
    """The fused model is no further from fp32 than the plain one in bf16 is."""
    folder = folder_of(family)
    fused, plain = load(folder), load(folder, attention="torch")
    assert (fused.fused is not None) == (family in FUSED)
    assert plain.fused is None
    reference = load_reference(folder)
    prompt = random_prompt(90)
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0, -1].float()
    errors = []
    for rig in (Rig(fused), Rig(plain, plain=True)):
        sequence = rig.sequence(prompt)
        rig.step((sequence, 50))
        rig.step((sequence, 39))
        errors.append(difference(rig.step((sequence, 1)).logits[0], expected))
    assert errors[0] < max(1.3 * errors[1], 0.02)


@pytest.mark.parametrize("page_size", [16, 1, 20, 64])
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen2"])
def test_mixed_batches_of_chunks_and_single_tokens(family, page_size, folder_of):
    """Every chunk and every token ends with the same keys, values and logits as in torch, in whatever batch it was."""
    folder = folder_of(family)
    rigs = [
        Rig(load(folder), page_size, 1200 if page_size == 1 else 400),
        Rig(load(folder, attention="torch"), page_size, 1200 if page_size == 1 else 400, plain=True),
    ]
    found = []
    for rig in rigs:
        rng = random.Random(3)
        left = [rig.sequence(random_prompt(length, length)) for length in (150, 1, 64, 65, 130, 17, 33, 200)]
        logits = {}
        while left:
            batch = []
            for sequence in rng.sample(left, rng.randint(1, len(left))):
                most = sequence.num_uncomputed_tokens
                batch.append((sequence, rng.choice([1, min(most, rng.randint(1, 97))])))
            result = rig.step(*batch)
            for entry, row in zip(result.scheduled, result.logits if result.logits is not None else [], strict=True):
                logits[entry.sequence.num_prompt_tokens] = row
            left = [sequence for sequence in left if sequence.num_uncomputed_tokens]
        found.append(logits)
        rig.logits = logits
    for length, row in found[1].items():
        assert difference(found[0][length], row) < 0.06, length
    assert difference(rigs[0].cache.tensor.float(), rigs[1].cache.tensor.float()) < 0.03
    untouched = (rigs[1].cache.tensor == 0).all(dim=-1)
    assert torch.equal((rigs[0].cache.tensor == 0).all(dim=-1), untouched), "K and V of new tokens, and nothing else"


@pytest.fixture
def lacking():
    """Instructions that a processor lacks."""
    return "-mno-amx-tile", "-mno-amx-bf16", "-mno-amx-int8"


@pytest.fixture
def with_fewer_instructions(monkeypatch, tmp_path, lacking):
    """Kernels as a processor without these instructions has them."""
    monkeypatch.setattr(library, "FLAGS", [*library.FLAGS, *lacking])
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path))
    load_kernels.cache_clear()
    yield
    load_kernels.cache_clear()


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_processors_without_amx(quantize, folder_of, with_fewer_instructions):
    """Six rows at once, and one to five left over, times four blocks of outputs, and one to three left over."""
    folder = folder_of("qwen3")
    rigs = Rig(load(folder, quantize=quantize)), Rig(load(folder, attention="torch"), plain=True)
    for length in (1, 2, 3, 4, 5, 6, 7, 100):
        logits = []
        for rig in rigs:
            sequence, other = rig.sequence(random_prompt(length)), rig.sequence(random_prompt(length + 1))
            rig.step((other, length))
            logits.append(rig.step((sequence, length), (other, 1)).logits)
        assert difference(*logits) < (0.05 if quantize == "none" else 0.12)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_threads_do_not_change_a_bit(threads, folder_of):
    loaded = load(folder_of("qwen3"))
    results = []
    before = torch.get_num_threads()
    for number in (1, threads):
        torch.set_num_threads(number)
        try:
            rig = Rig(loaded)
            chunk, single = rig.sequence(random_prompt(100)), rig.sequence(random_prompt(60))
            rig.step((single, 59))
            results.append((rig.step((chunk, 100), (single, 1)).logits, rig.cache.tensor.clone()))
        finally:
            torch.set_num_threads(before)
    assert torch.equal(results[0][1], results[1][1])
    assert torch.equal(results[0][0], results[1][0])


def test_what_lies_in_hidden_places_does_not_matter_even_nan(folder_of):
    loaded = load(folder_of("mistral"))
    results = []
    for filling in (0.0, float("nan")):
        rig = Rig(loaded)
        rig.cache.tensor.fill_(filling)
        first, second = rig.sequence(random_prompt(69)), rig.sequence(random_prompt(21))
        rig.step((first, 40))
        rig.step((first, 28), (second, 20))
        results.append(rig.step((first, 1), (second, 1)).logits)
    assert torch.equal(*results)


def test_denormal_numbers_of_others_stay_what_they_are(folder_of):
    rig = Rig(load(folder_of("llama")))
    sequence = rig.sequence(random_prompt(41))
    rig.step((sequence, 40))
    rig.step((sequence, 1))
    assert (torch.full((100_000,), 1e-40) * 1.5 > 0).all()


def test_logits_of_whole_prompts(folder_of):
    loaded, plain = load(folder_of("llama")), load(folder_of("llama"), attention="torch")
    pieces = []
    for rig in (Rig(loaded), Rig(plain, plain=True)):
        sequence = rig.sequence(random_prompt(40), prompt_logprobs=True)
        [prompt] = rig.step((sequence, 40)).prompts
        pieces.append(prompt.logits)
    assert pieces[0].shape == (40, VOCAB_SIZE)
    assert difference(*pieces) < 0.05


def test_groups_of_layers_are_told_in_order_when_their_pages_hold_what_they_should(folder_of):
    rig, seen = Rig(load(folder_of("llama"))), []
    sequence = rig.sequence(random_prompt(20))
    rig.runner.run([ScheduledSequence(sequence, 20)], lambda *told: seen.append((*told, rig.cache.tensor.clone())))
    assert [(group, is_written) for group, is_written, _ in seen] == [(0, None), (1, None)]
    assert torch.equal(seen[0][2][:, 0], rig.cache.tensor[:, 0])
    assert not seen[0][2][:, 1].any()
    assert torch.equal(seen[1][2], rig.cache.tensor)


def test_fp32_is_never_fused(folder_of):
    assert load(folder_of("llama"), dtype="float32").fused is None


@pytest.mark.parametrize("vocab_size", [321, 328, 3])
def test_vocabularies_of_any_size(vocab_size, tmp_path):
    folder = make_tiny_model("llama", tmp_path, **SIZES, vocab_size=vocab_size)
    loaded, plain = load(folder), load(folder, attention="torch")
    assert loaded.fused is not None
    logits = []
    for rig in (Rig(loaded), Rig(plain, plain=True)):
        sequence = rig.sequence([1, 2, 0, 2])
        logits.append(rig.step((sequence, 4)).logits)
    assert logits[0].shape == (1, vocab_size)
    assert logits[0].is_contiguous()
    assert difference(*logits) < 0.05


class Changed(torch.nn.Module):
    """A part of a model that does a little more than what its name says."""

    def __init__(self, part, factor):
        super().__init__()
        self.part, self.factor = part, factor
        for name in (
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            "gate_proj",
            "up_proj",
            "down_proj",
            "layer_idx",
            "head_dim",
        ):
            if hasattr(part, name):
                setattr(self, name, getattr(part, name))

    def forward(self, *args, **keywords):
        result = self.part(*args, **keywords)
        return (result[0] * self.factor, *result[1:]) if isinstance(result, tuple) else result * self.factor


@pytest.mark.parametrize("part", ["mlp", "self_attn"])
def test_a_model_that_computes_something_else_under_the_same_names_is_not_fused(part, folder_of, caplog):
    from transformers import AutoModelForCausalLM

    from engine.loader import ATTENTION_NAME, adopt_model

    model = AutoModelForCausalLM.from_pretrained(
        folder_of("llama"), dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME
    )
    layer = model.model.layers[1]
    setattr(layer, part, Changed(getattr(layer, part), 1.5))
    with caplog.at_level("INFO"):
        assert adopt_model(model, 512, None).fused is None
    assert "of the fused model differ" in caplog.text


def test_layers_of_different_sizes_are_not_fused(folder_of, caplog):
    """The kernels' buffers have one size for all layers."""
    from transformers import AutoModelForCausalLM

    from engine.loader import ATTENTION_NAME, adopt_model

    model = AutoModelForCausalLM.from_pretrained(
        folder_of("llama"), dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME
    )
    mlp = model.model.layers[1].mlp
    for name, sizes in (("gate_proj", (128, 192)), ("up_proj", (128, 192)), ("down_proj", (192, 128))):
        setattr(mlp, name, torch.nn.Linear(*sizes, bias=False, dtype=torch.bfloat16))
    with caplog.at_level("INFO"):
        assert adopt_model(model, 512, None).fused is None
    assert "its layers differ in size" in caplog.text


def test_sizes_that_the_kernels_do_not_take_stay_in_torch(tmp_path):
    for number, options in enumerate(({"head_dim": 16}, {"intermediate_size": 100}, {"hidden_act": "relu"})):
        folder = make_tiny_model("llama", tmp_path / str(number), **(SIZES | options))
        loaded = load(folder)
        assert loaded.fused is None
        rig = Rig(loaded)
        assert rig.step((rig.sequence(random_prompt(20)), 20)).logits.isfinite().all()


def test_layers_of_a_fused_model_hold_no_second_copy_of_the_weights(folder_of):
    loaded = load(folder_of("llama"))
    assert (
        sum(p.numel() for p in loaded.model.parameters())
        == 2 * VOCAB_SIZE * SIZES["hidden_size"] + SIZES["hidden_size"]
    )


class RoundedLinear(torch.nn.Module):
    """What `--quantize int8` says: the weights of an output are rounded to 127 steps of the largest of them."""

    def __init__(self, linear):
        super().__init__()
        weight = linear.weight.detach().bfloat16().float()
        step = weight.abs().amax(-1, keepdim=True) / 127
        self.weight, self.bias = torch.where(step > 0, (weight / step).round() * step, 0.0), linear.bias

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight, self.bias)


@pytest.mark.skipif(not has_kernels() or not hasattr(load_kernels(), "kvferry_pack_int8"), reason="no VNNI")
class TestInt8:
    @pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "phi3"])
    def test_it_rounds_as_it_says_and_nothing_else(self, family, folder_of):
        folder = folder_of(family)
        rig = Rig(load(folder, quantize="int8"))
        reference = load_reference(folder)
        for name, part in list(reference.named_modules()):
            if isinstance(part, torch.nn.Linear):
                owner, _, last = name.rpartition(".")
                setattr(reference.get_submodule(owner), last, RoundedLinear(part))
        prompt = random_prompt(100)
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt])).logits[0].float()
        sequence = rig.sequence(prompt)
        rig.step((sequence, 60))
        rig.step((sequence, 39))
        assert difference(rig.step((sequence, 1)).logits[0], expected[-1]) < 0.02
        # The quantized model differs from the plain one by more than that, so the bound above means something.
        plain = load_reference(folder)
        with torch.inference_mode():
            assert difference(plain(torch.tensor([prompt])).logits[0, -1].float(), expected[-1]) > 0.01

    def test_weights_of_zero(self, tmp_path):
        folder = make_tiny_model("llama", tmp_path, **SIZES)
        weights = load_file(folder / "model.safetensors")
        for name in weights:
            if name.endswith(("up_proj.weight", "o_proj.weight")):
                weights[name].zero_()
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        rig = Rig(load(folder, quantize="int8"))
        assert rig.step((rig.sequence(random_prompt(20)), 20)).logits.isfinite().all()

    @pytest.mark.parametrize("lacking", [("-mno-avx512vnni", "-mno-amx-tile", "-mno-amx-bf16", "-mno-amx-int8")])
    def test_processors_without_vnni_refuse_it_and_run_bf16(self, lacking, folder_of, with_fewer_instructions):
        assert load(folder_of("llama")).fused is not None
        with pytest.raises(UnsupportedModelError, match="the compiled kernels are not there"):
            load(folder_of("llama"), quantize="int8")

    @pytest.mark.parametrize(
        ("family", "options", "words"),
        [
            ("qwen3_moe", {}, "can't be quantized"),
            ("llama", {"dtype": "float32"}, "only models in bfloat16 on a CPU"),
            ("llama", {"attention": "torch"}, "an attention backend was named"),
        ],
    )
    def test_what_can_not_be_quantized_is_refused(self, family, options, words, folder_of):
        with pytest.raises(UnsupportedModelError, match=words):
            load(folder_of(family), quantize="int8", **options)
