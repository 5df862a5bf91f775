"""Recorded steps without a GPU: what a replay reads and writes is what a step that is not recorded does.

A graph is stood in for by one that calls the recorded function again. All it knows are the tensors that were there when
it was recorded, as with a real one.
"""

import random

import pytest
import torch

from engine.attention.flashinfer import FlashInferAttention
from engine.attention.torch_paged import TorchPagedAttention
from engine.config import EngineConfig
from engine.cuda_graphs import GraphSizes, StepGraphs
from engine.kv_cache import KvCache
from engine.loader import load_model
from engine.model_runner import ModelRunner
from engine.sampler import sample
from engine.sequence import SamplingParams, ScheduledSequence, Sequence
from tests.engine import reference_flashinfer

PAGE_SIZE, CHUNK = 4, 6
GREEDY = SamplingParams(temperature=0.0)


class Replayed:
    """In place of a CUDA graph."""

    def __init__(self, forward):
        self.forward, self.output, self.num_replays = forward, forward(), 0

    def replay(self):
        self.num_replays += 1
        output = self.forward()
        if output is not None:
            self.output.copy_(output)


class Recorded(StepGraphs):
    def _capture(self, forward):
        graph = Replayed(forward)
        return graph, graph.output

    @property
    def num_replays(self):
        recordings = [*self._decode.values(), *([self._chunk] if self._chunk else [])]
        return sum(recording.graph.num_replays for recording in recordings)


class Both:
    """The same sequences in two caches: computed by recorded steps, and by plain torch."""

    def __init__(self, loaded, lengths):
        shape, num_pages = loaded.kv_shape, 40
        caches = [KvCache(num_pages, PAGE_SIZE, shape, torch.float32) for _ in range(2)]
        backend = FlashInferAttention(caches[0], loaded.num_query_heads, loaded.attention_options, reference_flashinfer)
        recorded, plain = (
            ModelRunner(loaded, cache, attention)
            for cache, attention in zip(caches, (backend, TorchPagedAttention(caches[1])), strict=True)
        )
        with torch.inference_mode():
            self.graphs = recorded._graphs = Recorded(loaded.model, backend, GraphSizes((1, 4), CHUNK), 64)
        self.runners = (recorded, plain)
        rng = random.Random(3)
        pages = rng.sample(range(1, num_pages), num_pages - 1)
        self.sequences = []
        for name, length in enumerate(lengths):
            tokens = [rng.randrange(5, 250) for _ in range(length)]
            table = [pages.pop() for _ in range(-(-(length + 12) // PAGE_SIZE))]
            self.sequences.append(Sequence(str(name), tokens, length, GREEDY, table))

    def run(self, batch, previous=(None, None)):
        """Logits of both ways."""
        found = [runner.run(batch, previous=last) for runner, last in zip(self.runners, previous, strict=True)]
        for entry in batch:
            entry.sequence.num_computed_tokens += entry.num_new_tokens
        return [of_runner.logits for of_runner in found]


@pytest.fixture(scope="module")
def loaded(tiny_model):
    return load_model(EngineConfig(model=str(tiny_model("llama")), dtype="float32", device="cpu"))


@pytest.mark.parametrize(("num_sequences", "replays"), [(1, 1), (3, 1), (4, 1), (5, 0)])
def test_steps_launched_ahead_are_those_of_plain_torch(loaded, num_sequences, replays):
    """Padded or not, recorded or too many: with tokens that only the device has, and with known ones."""
    both = Both(loaded, [3 + 2 * n for n in range(num_sequences)])
    previous = (None, None)
    logits = both.run([ScheduledSequence(s, s.num_tokens) for s in both.sequences])
    for step in range(4):
        assert torch.allclose(*logits, atol=1e-4)
        previous = [sample(of_runner.clone(), both.sequences) for of_runner in logits]
        tokens = [choice.token_id for choice in previous[0].wait()]
        for sequence, token in zip(both.sequences, tokens, strict=True):
            if step == 2:  # one step that was waited for
                sequence.token_ids.append(token)
            else:
                sequence.num_pending_tokens = 1
        done = both.graphs.num_replays
        order = list(reversed(both.sequences))  # rows are found by name
        logits = [of.flip(0) for of in both.run([ScheduledSequence(s, 1) for s in order], previous)]
        assert both.graphs.num_replays - done == replays
        for sequence, token in zip(both.sequences, tokens, strict=True):
            if sequence.num_pending_tokens:
                sequence.token_ids.append(token)
                sequence.num_pending_tokens = 0


def test_a_recorded_chunk_is_that_of_plain_torch(loaded):
    both = Both(loaded, [2 * CHUNK + 3])
    [sequence] = both.sequences
    for _ in range(2):
        both.run([ScheduledSequence(sequence, CHUNK)])
    assert both.graphs.num_replays == 2
    assert torch.allclose(*both.run([ScheduledSequence(sequence, 3)]), atol=1e-4)
    assert both.graphs.num_replays == 2, "the last chunk is sampled, and was not recorded"
