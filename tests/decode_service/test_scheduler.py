"""The decode scheduler alone: promises are kept, nobody runs out of pages half-way."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from decode_service.scheduler import DecodeScheduler
from engine.page_pool import PagePool
from engine.sequence import Sequence

PAGE_SIZE = 4


def make_scheduler(num_pages=20, max_num_sequences=4):
    return DecodeScheduler(PagePool(num_pages), PAGE_SIZE, max_num_sequences)


def make_sequence(num_tokens, name="a"):
    return Sequence(name, [1] * num_tokens, num_tokens)


def start(scheduler, sequence):
    sequence.num_computed_tokens = sequence.num_tokens
    sequence.token_ids.append(1)
    scheduler.start(sequence)


def test_prompt_pages_are_taken_at_once_and_the_rest_is_promised():
    scheduler = make_scheduler()
    sequence = make_sequence(9)
    assert scheduler.reserve(sequence, 9 + 20) is None
    assert len(sequence.page_table) == 3
    assert scheduler.promised_pages == 7 - 3


def test_the_last_token_needs_no_page():
    scheduler = make_scheduler(num_pages=2)
    assert scheduler.can_ever_fit(9)
    assert not scheduler.can_ever_fit(10)
    assert scheduler.reserve(make_sequence(8), 9) is None


def test_promises_count_against_new_ones():
    scheduler = make_scheduler(num_pages=10)
    assert scheduler.reserve(make_sequence(4, "a"), 33) is None
    assert scheduler.reserve(make_sequence(4, "b"), 13) == "pages"
    assert scheduler.reserve(make_sequence(4, "b"), 9) is None


def test_a_full_house_says_what_is_short():
    scheduler = make_scheduler(max_num_sequences=1)
    scheduler.reserve(make_sequence(4, "a"), 5)
    assert scheduler.reserve(make_sequence(4, "b"), 5) == "sequences"


def test_only_started_sequences_run():
    scheduler = make_scheduler()
    a, b = make_sequence(4, "a"), make_sequence(5, "b")
    scheduler.reserve(a, 10)
    scheduler.reserve(b, 10)
    assert scheduler.schedule() is None
    start(scheduler, b)
    step = scheduler.schedule()
    assert [(e.sequence.sequence_id, e.num_new_tokens, e.is_sampled) for e in step.batch] == [("b", 1, True)]


def test_release_is_harmless_twice():
    scheduler = make_scheduler()
    a = make_sequence(4)
    scheduler.reserve(a, 10)
    scheduler.release(a)
    scheduler.release(a)
    assert scheduler.num_sequences == scheduler.promised_pages == 0
    assert repr(scheduler._pool) == "<PagePool 20 free, 0 held>"


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 30), st.sampled_from("rsx")), max_size=50))
def test_no_admitted_sequence_ever_lacks_a_page(actions):
    """Random admissions, starts, ends; every running sequence can always be scheduled up to its longest answer."""
    scheduler = make_scheduler(num_pages=12, max_num_sequences=5)
    reserved, running = [], []
    for number, (num_tokens, max_tokens, action) in enumerate(actions):
        if action == "r":
            sequence = make_sequence(num_tokens, str(number))
            fits = scheduler.can_ever_fit(num_tokens + max_tokens)
            if fits and scheduler.reserve(sequence, num_tokens + max_tokens) is None:
                reserved.append((sequence, max_tokens))
        elif action == "s" and reserved:
            sequence, max_tokens = reserved.pop(0)
            start(scheduler, sequence)
            running.append((sequence, max_tokens))
        elif action == "x" and running:
            scheduler.release(running.pop(0)[0])
        for sequence, max_tokens in list(running):
            if sequence.num_output_tokens >= max_tokens:
                scheduler.release(sequence)
                running.remove((sequence, max_tokens))
        if step := scheduler.schedule():
            for entry in step.batch:
                assert len(entry.sequence.page_table) * PAGE_SIZE >= entry.sequence.num_tokens
                entry.sequence.token_ids.append(1)
            scheduler.update(step)
        assert scheduler._pool.counts().total == 12
    for sequence, _ in reserved + running:
        scheduler.release(sequence)
    assert scheduler._pool.num_free == 12
