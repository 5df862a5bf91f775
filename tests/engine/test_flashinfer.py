"""The FlashInfer backend without a GPU: what it tells the kernels, read by a reference, is what torch computes."""

import random

import pytest
import torch

from engine.attention import flashinfer
from engine.attention.base import AttentionOptions
from engine.attention.choice import choose_attention
from engine.attention.torch_paged import TorchPagedAttention
from engine.config import EngineConfig
from engine.cuda_graphs import GraphSizes, graph_sizes
from engine.errors import ModelLoadError
from engine.kv_cache import KvCache, KvShape
from engine.loader import load_model
from engine.sequence import ScheduledSequence, Sequence, num_pages_for
from tests.engine import reference_flashinfer

HEAD_DIM = 8
PLAIN = AttentionOptions(HEAD_DIM**-0.5)
OPTIONS = {
    "plain": (PLAIN,),
    "window": (AttentionOptions(0.3, sliding_window=5),),
    "window of one token": (AttentionOptions(0.3, sliding_window=1),),
    "soft cap": (AttentionOptions(0.3, softcap=2.0),),
    "layers in turn": (AttentionOptions(0.3, 7, 2.0), AttentionOptions(0.3, None, 2.0)),
}


class Step:
    """A random step over a cache whose unseen places are NaN, beside the same one for the oracle."""

    def __init__(self, rng, lengths, options, page_size=4, num_kv_heads=2, group=3):
        self.options, self.num_query_heads = options, num_kv_heads * group
        shape = KvShape(3, num_kv_heads, HEAD_DIM)
        needed = [num_pages_for(computed + new, page_size) for computed, new in lengths]
        ids = list(range(sum(needed) + 2))
        rng.shuffle(ids)
        self.cache = KvCache(len(ids), page_size, shape, torch.float32)
        self.cache.tensor.fill_(float("nan"))
        self.batch = []
        for index, (computed, new) in enumerate(lengths):
            table, ids = ids[: needed[index]], ids[needed[index] :]
            for place in range(computed):
                page = self.cache.tensor[table[place // page_size], :, :, :, place % page_size]
                page.copy_(torch.randn(page.shape))
            tokens = [0] * (computed + new)
            sequence = Sequence(str(index), tokens, len(tokens), page_table=table, num_computed_tokens=computed)
            self.batch.append(ScheduledSequence(sequence, new))
        self.oracle = KvCache(self.cache.num_pages, page_size, shape, torch.float32)
        self.oracle.tensor.copy_(self.cache.tensor)
        self.backend = flashinfer.FlashInferAttention(self.cache, self.num_query_heads, options, reference_flashinfer)
        num_tokens = sum(new for _, new in lengths)
        self.layers = [
            [torch.randn(num_tokens, heads, HEAD_DIM) for heads in (self.num_query_heads, num_kv_heads, num_kv_heads)]
            for _ in range(shape.num_layers)
        ]

    def check(self, plan):
        oracle = TorchPagedAttention(self.oracle).plan(self.batch)
        for layer, tensors in enumerate(self.layers):
            options = self.options[layer % len(self.options)]
            found = plan.attend(layer, *tensors, options)
            torch.testing.assert_close(found, oracle.attend(layer, *tensors, options), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(self.cache.tensor, self.oracle.tensor, rtol=0, atol=0, equal_nan=True)


@pytest.fixture(autouse=True)
def _small_workspace(monkeypatch):
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 1 << 10)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("kind", ["steps", "chunks", "mixed, steps first", "mixed"])
def test_what_is_planned_means_what_plain_torch_computes(kind, options):
    torch.manual_seed(1)
    rng = random.Random(f"{kind}{options}")
    for page_size in (4, 1, 7):
        places = [0, page_size - 1, page_size, page_size + 1, 13]
        lengths = []
        for _ in range(5):
            new = 1 if kind == "steps" or (kind != "chunks" and rng.random() < 0.5) else rng.randint(2, 9)
            lengths.append((rng.choice(places), new))
        if kind == "mixed, steps first":
            lengths.sort(key=lambda pair: pair[1] > 1)
        step = Step(rng, lengths, options, page_size)
        step.check(step.backend.plan(step.batch))


def test_what_is_warmed_up_is_what_steps_use():
    step = Step(random.Random(3), [(5, 1)], OPTIONS["layers in turn"], page_size=1)
    backend = flashinfer.FlashInferAttention(step.cache, 6, OPTIONS["layers in turn"], reference_flashinfer)
    backend.warm_up()
    wrappers = [*backend.chunk_wrappers.values(), *backend.decode_wrappers.values()]
    assert [(wrapper.plans, wrapper.runs) for wrapper in wrappers] == [(1, 1)] * 4


def test_pages_that_are_missing_are_noticed_before_a_kernel_runs():
    sequence = Sequence("short", [0] * 9, 9, page_table=[0, 1])
    with pytest.raises(AssertionError, match="short lacks pages"):
        flashinfer.lay_out([ScheduledSequence(sequence, 9)], 4)


def test_a_plan_waits_until_the_last_one_is_on_the_device(monkeypatch):
    """FlashInfer copies plans from memory of the host that its next plan overwrites."""
    log = []

    class DeviceEvent:
        def __init__(self):
            log.append("planned")

        def wait(self):
            log.append("waited")

    monkeypatch.setattr(flashinfer, "DeviceEvent", DeviceEvent)
    step = Step(random.Random(3), [(5, 1), (2, 3)], (PLAIN,))
    step.backend.device = torch.device("cuda")
    monkeypatch.setattr(flashinfer, "to_device", lambda values, device: values)
    for _ in range(2):
        step.backend.plan(step.batch)
    assert log == ["planned", "waited", "planned"]


def test_heads_need_not_be_grouped():
    step = Step(random.Random(3), [(5, 1), (0, 4), (3, 1)], (PLAIN,), group=1)
    step.check(step.backend.plan(step.batch))


def test_a_step_is_planned_once_per_kind_of_layer():
    options = OPTIONS["layers in turn"]
    step = Step(random.Random(4), [(5, 1), (9, 1)], options)
    step.check(step.backend.plan(step.batch))
    assert [step.backend.decode_wrappers[kind].plans for kind in options] == [1, 1]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("tokens_each", [1, 6])
def test_a_recorded_plan_reads_each_step_from_the_same_tensors(options, tokens_each):
    torch.manual_seed(2)
    first = Step(random.Random(5), [(5, tokens_each), (0, tokens_each), (8, tokens_each)], options)
    recorded = flashinfer.RecordedPlan(first.backend, 3, tokens_each, torch.zeros(64, dtype=torch.int32))
    addresses = [tensor.data_ptr() for tensor in vars(recorded).values() if isinstance(tensor, torch.Tensor)]
    assert len(addresses) == 5
    for seed in (6, 7):
        step = Step(random.Random(seed), [(seed, tokens_each), (3, tokens_each), (12, tokens_each)], options)
        recorded._backend = step.backend  # another cache, the same wrappers and tensors, as in a graph
        recorded.update(step.batch)
        step.check(recorded)
    assert addresses == [tensor.data_ptr() for tensor in vars(recorded).values() if isinstance(tensor, torch.Tensor)]


def test_padding_with_a_copy_of_a_sequence_changes_nothing():
    step = Step(random.Random(8), [(5, 1), (3, 1)], (PLAIN,))
    recorded = flashinfer.RecordedPlan(step.backend, 4, 1, torch.zeros(64, dtype=torch.int32))
    recorded.update([*step.batch, step.batch[1], step.batch[1]])
    padded = [[torch.cat([t, t[1:], t[1:]]) for t in tensors] for tensors in step.layers]
    oracle = TorchPagedAttention(step.oracle).plan(step.batch)
    for layer, tensors in enumerate(padded):
        expected = oracle.attend(layer, *step.layers[layer], PLAIN)
        torch.testing.assert_close(recorded.attend(layer, *tensors, PLAIN)[:2], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(step.cache.tensor, step.oracle.tensor, rtol=0, atol=0, equal_nan=True)


def test_a_batch_is_padded_to_the_next_recorded_size():
    sizes = GraphSizes((8, 1, 2, 4))
    assert [sizes.decode_size_for(n) for n in (1, 2, 3, 4, 5, 8, 9)] == [1, 2, 4, 4, 8, 8, None]


@pytest.mark.parametrize(
    ("most_decoded", "token_budget", "expected"),
    [
        (64, 0, GraphSizes((1, 2, 64), 0)),  # decode: no batch is larger
        (300, 0, GraphSizes((1, 2, 256), 0)),
        (2, 0, GraphSizes((1, 2), 0)),
        (0, 512, GraphSizes((), 512)),  # prefill
        (0, 4096, GraphSizes((), 0)),  # computed for longer than it takes to launch
        (0, 600, GraphSizes((), 0)),  # no sequence is as long
        (256, 0, GraphSizes((1, 2, 256), 0)),
        (64, 512, GraphSizes((1, 2, 64), 512)),  # colocated
    ],
)
def test_a_worker_records_what_occurs(most_decoded, token_budget, expected):
    assert graph_sizes((1, 2, 256), most_decoded, token_budget, 600) == expected
    assert graph_sizes((), most_decoded, token_budget, 600) == GraphSizes()


def test_a_machine_without_a_gpu_says_so_when_it_is_asked_for(tiny_model):
    loaded = load_model(EngineConfig(model=str(tiny_model("llama")), dtype="float32", device="cpu"))
    cache = KvCache(4, 8, loaded.kv_shape, loaded.dtype)
    with pytest.raises(ModelLoadError, match="--attention flashinfer: it runs on CUDA devices only"):
        choose_attention(loaded, cache, "flashinfer")
    assert isinstance(choose_attention(loaded, cache, "auto"), TorchPagedAttention)
    assert isinstance(choose_attention(loaded, cache, "torch"), TorchPagedAttention)
    if not torch.cuda.is_available():
        with pytest.raises(ModelLoadError, match="--device cuda: torch sees no GPU here"):
            load_model(EngineConfig(model=str(tiny_model("llama")), device="cuda"))
    with pytest.raises(ModelLoadError, match="--device tpu"):
        load_model(EngineConfig(model=str(tiny_model("llama")), device="tpu"))


@pytest.mark.parametrize(
    ("dtype", "head_dim", "reason"),
    [(torch.float32, 64, "no kernels for float32"), (torch.bfloat16, 80, "no kernels for heads of 80 elements")],
)
def test_what_flashinfer_lacks_is_named(dtype, head_dim, reason):
    class OnGpu:
        device, dtype_ = torch.device("cuda"), dtype
        shape = KvShape(1, 1, head_dim)

        @property
        def tensor(self):
            return self

    on_gpu = OnGpu()
    on_gpu.dtype = dtype
    assert reason in flashinfer.why_not(on_gpu)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_fraction": 0}, "--memory-fraction is 0"),
        ({"memory_fraction": 1.5}, "--memory-fraction is 1.5"),
        ({"cuda_graph_sizes": (4, 0)}, "--cuda-graph-sizes"),
    ],
)
def test_bad_settings_are_refused_in_words(options, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(model="m", **options)
