"""What the runner tells while a step is computed, and how far it runs ahead of a device."""

import pytest
import torch

from engine import forward, memory, model_runner, step_inputs
from engine.attention.torch_paged import TorchPagedAttention
from engine.config import EngineConfig
from engine.errors import ModelLoadError
from engine.kv_cache import KvCache, KvShape, page_bytes
from engine.loader import load_model
from engine.model_runner import ModelRunner
from engine.sequence import ScheduledSequence, Sequence


@pytest.fixture
def loaded(tiny_model):
    return load_model(EngineConfig(model=str(tiny_model("llama")), dtype="float32", device="cpu"))


def test_a_group_of_layers_is_told_when_its_pages_hold_what_they_should(loaded):
    cache = KvCache(3, 8, loaded.kv_shape, loaded.dtype)
    runner = ModelRunner(loaded, cache, TorchPagedAttention(cache))
    assert cache.num_layer_groups == 2
    sequence = Sequence("s", list(range(5, 25)), 20, page_table=[2, 0, 1])
    seen = []
    logits = runner.run([ScheduledSequence(sequence, 20)], lambda *told: seen.append((*told, cache.tensor.clone())))
    assert logits.is_written is None
    assert [(group, is_written) for group, is_written, _ in seen] == [(0, None), (1, None)]
    first, last = seen[0][2], seen[1][2]
    assert torch.equal(first[:3, 0], cache.tensor[:3, 0])
    assert not first[:3, 1].any()
    assert torch.equal(last, cache.tensor)


@pytest.mark.parametrize(("num_layers", "groups"), [(30, 3), (32, 4), (26, 2), (61, 1), (1, 1), (2, 2), (36, 4)])
def test_groups_of_layers_are_equal(num_layers, groups):
    assert KvCache(1, 1, KvShape(num_layers, 1, 1), torch.float32).num_layer_groups == groups


class RecordedDevice:
    """Stands in for events of a device that computes when it is told to."""

    def __init__(self, monkeypatch):
        self.log = []
        device = self

        class DeviceEvent:
            def __init__(self):
                self.number = sum(entry.startswith("launched") for entry in device.log)
                device.log.append(f"launched {self.number}")

            def is_done(self):
                return False

            def wait(self):
                device.log.append(f"waited for {self.number}")

        for module in (model_runner, forward):
            monkeypatch.setattr(module, "DeviceEvent", DeviceEvent)

    def runs(self, runner):
        """Has a runner take its steps for steps of a device."""
        runner._device = runner._forward._device = torch.device("cuda")


def test_a_device_is_given_the_next_step_before_the_last_is_waited_for(loaded, monkeypatch):
    device = RecordedDevice(monkeypatch)
    cache = KvCache(3, 8, loaded.kv_shape, loaded.dtype)
    runner = ModelRunner(loaded, cache, TorchPagedAttention(cache))
    compute = type(loaded.model).forward

    def logged(*arguments, **options):
        device.log.append("computing")
        return compute(*arguments, **options)

    monkeypatch.setattr(type(loaded.model), "forward", logged)
    for module in (model_runner, step_inputs):
        monkeypatch.setattr(module, "to_device", lambda values, device: values)
    device.runs(runner)
    for _ in range(3):
        sequence = Sequence("s", [5, 6, 7], 3, page_table=[0])
        assert runner.run([ScheduledSequence(sequence, 3)]).is_written() is False
    assert device.log == [
        *("computing", "launched 0"),
        *("computing", "launched 1", "waited for 0"),
        *("computing", "launched 2", "waited for 1"),
    ]


def test_groups_of_a_device_are_told_after_their_layers_were_launched(loaded, monkeypatch):
    device = RecordedDevice(monkeypatch)
    cache = KvCache(3, 8, loaded.kv_shape, loaded.dtype)
    backend = TorchPagedAttention(cache)
    runner = ModelRunner(loaded, cache, backend)
    plan_of = backend.plan

    class LoggedPlan:
        def __init__(self, batch):
            self.plan = plan_of(batch)

        def attend(self, layer, *arguments):
            device.log.append(f"layer {layer}")
            return self.plan.attend(layer, *arguments)

    monkeypatch.setattr(backend, "plan", LoggedPlan)
    for module in (model_runner, step_inputs):
        monkeypatch.setattr(module, "to_device", lambda values, device: values)
    device.runs(runner)
    told = []
    sequence = Sequence("s", [5, 6, 7], 3, page_table=[0])
    runner.run([ScheduledSequence(sequence, 3)], lambda group, is_written: told.append((group, is_written())))
    assert device.log == ["layer 0", "launched 0", "layer 1", "launched 1", "launched 2"]
    assert told == [(0, False), (1, False)]


class TestPagesThatFit:
    """Arithmetic of `--num-pages auto` on a GPU of 10 GB."""

    @pytest.fixture(autouse=True)
    def _gpu(self, monkeypatch):
        self.free = 9_000_000_000
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (self.free, 10_000_000_000))
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1_000_000_000)
        monkeypatch.setattr(memory, "_measure_step", lambda *_: 500_000_000)

    def fit(self, loaded, **options):
        config = EngineConfig(model="m", cuda_graph_sizes=(1, 2), **options)
        return memory.pages_that_fit(loaded, config, 512, 8) * page_bytes(loaded.kv_shape, 16, loaded.dtype)

    def test_pages_get_what_weights_and_the_largest_step_leave(self, loaded):
        graphs, unseen = 2 * memory.GRAPH_BYTES + (1 + 2) * loaded.vocab_size * 4, memory.UNSEEN_BYTES
        expected = 8_000_000_000 - 1_000_000_000 - 500_000_000 - graphs - unseen
        assert 0 <= expected - self.fit(loaded, memory_fraction=0.8) < page_bytes(loaded.kv_shape, 16, loaded.dtype)

    def test_what_others_have_taken_is_left_alone(self, loaded):
        self.free = 2_000_000_000
        assert self.fit(loaded, memory_fraction=0.8) <= 1_500_000_000

    def test_a_fraction_that_is_too_small_is_named_with_what_takes_the_rest(self, loaded):
        with pytest.raises(ModelLoadError, match=r"--memory-fraction 0.2 of 10.0 GB .* weights take 1.0 GB"):
            self.fit(loaded, memory_fraction=0.2)
