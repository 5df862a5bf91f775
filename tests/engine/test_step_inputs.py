"""What the model is given: known tokens, and those that only the device has."""

import pytest
import torch

from engine.prefix_cache import hash_full_pages
from engine.sampler import sample
from engine.sequence import ScheduledSequence, Sequence
from engine.step_inputs import step_inputs

CPU = torch.device("cpu")


def chosen(tokens):
    """As if a step had chosen these, by sequence id."""
    logits = torch.nn.functional.one_hot(torch.tensor(list(tokens.values())), 50).float()
    greedy = [Sequence(name, [1], 1) for name in tokens]
    for sequence in greedy:
        object.__setattr__(sequence.sampling, "temperature", 0.0)
    return sample(logits, greedy)


def test_pending_tokens_are_those_that_the_step_before_chose():
    waiting = Sequence("a", [5, 6, 7], 2, num_computed_tokens=3, num_pending_tokens=1)
    known = Sequence("b", [8, 9], 2, num_computed_tokens=1)
    resumed = Sequence("c", [10, 11, 12], 3, num_computed_tokens=1, num_pending_tokens=1)
    batch = [ScheduledSequence(waiting, 1), ScheduledSequence(known, 1), ScheduledSequence(resumed, 3)]
    assert [entry.is_sampled for entry in batch] == [True] * 3
    token_ids, positions = step_inputs(batch, chosen({"c": 42, "x": 1, "a": 33}), CPU)
    assert token_ids.tolist() == [[33, 9, 11, 12, 42]]
    assert positions.tolist() == [[3, 1, 1, 2, 3]]


def test_a_chunk_that_does_not_reach_the_pending_token_needs_no_step_before():
    sequence = Sequence("a", [5, 6, 7], 3, num_pending_tokens=1)
    entry = ScheduledSequence(sequence, 3)
    assert not entry.is_sampled
    token_ids, _ = step_inputs([entry], None, CPU)
    assert token_ids.tolist() == [[5, 6, 7]]


def test_a_pending_token_that_nobody_chose_is_a_fault():
    sequence = Sequence("a", [5], 1, num_computed_tokens=1, num_pending_tokens=1)
    with pytest.raises(AssertionError):
        step_inputs([ScheduledSequence(sequence, 1)], None, CPU)


def test_nothing_is_asked_of_the_device():
    """A meta tensor has no values: whatever would wait for one raises."""
    meta = torch.device("meta")
    previous = sample(torch.empty(1, 50, device=meta), [Sequence("a", [1], 1)])
    sequence = Sequence("a", [5], 1, num_computed_tokens=1, num_pending_tokens=1)
    token_ids, positions = step_inputs([ScheduledSequence(sequence, 1)], previous, meta)
    assert token_ids.shape == positions.shape == (1, 1)


def test_a_page_with_a_pending_token_has_no_key_yet():
    sequence = Sequence("a", [1] * 7, 4, num_computed_tokens=7, num_pending_tokens=1)
    assert sequence.num_tokens == 8
    assert len(hash_full_pages(sequence, 4)) == 1
    sequence.token_ids.append(2)
    sequence.num_pending_tokens = 0
    assert len(hash_full_pages(sequence, 4)) == 2
