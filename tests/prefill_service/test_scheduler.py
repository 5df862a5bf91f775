"""The prefill scheduler alone: budgets, order, chunks, pages."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.page_pool import PagePool
from engine.sequence import Sequence, num_pages_for
from prefill_service.config import PrefillConfig
from prefill_service.scheduler import PrefillScheduler

PAGE_SIZE = 4


def make_scheduler(num_pages=100, token_budget=10, max_num_sequences=8):
    return PrefillScheduler(PagePool(num_pages), PAGE_SIZE, token_budget, max_num_sequences)


def make_sequence(num_tokens, name="a"):
    return Sequence(name, [1] * num_tokens, num_tokens)


def chunks(step):
    return [(e.sequence.sequence_id, e.num_new_tokens, e.is_sampled) for e in step.batch] if step else []


def run(scheduler):
    step = scheduler.schedule()
    planned = chunks(step)
    if step:
        scheduler.update(step)
    return planned


def test_a_long_prompt_runs_as_chunks_and_only_the_last_is_sampled():
    scheduler = make_scheduler()
    sequence = make_sequence(21)
    scheduler.add(sequence)
    steps = []
    while step := scheduler.schedule():
        steps.append(chunks(step))
        scheduler.update(step)
    assert steps == [[("a", 10, False)], [("a", 10, False)], [("a", 1, True)]]
    assert len(sequence.page_table) == num_pages_for(21, PAGE_SIZE)


def test_the_rest_of_the_budget_goes_to_the_next_prompts():
    """Casebook C061: the tail of one prompt does not run alone while others wait."""
    scheduler = make_scheduler()
    for name, length in (("a", 12), ("b", 3), ("c", 20)):
        scheduler.add(make_sequence(length, name))
    assert run(scheduler) == [("a", 10, False)]
    assert run(scheduler) == [("a", 2, True), ("b", 3, True), ("c", 5, False)]


def test_an_unfinished_prompt_goes_first():
    scheduler = make_scheduler()
    scheduler.add(make_sequence(15, "long"))
    run(scheduler)
    scheduler.add(make_sequence(2, "short"))
    assert run(scheduler) == [("long", 5, True), ("short", 2, True)]


def test_a_prompt_is_admitted_only_with_pages_for_all_of_it():
    """Casebook C068: no admission because the first chunk fits."""
    scheduler = make_scheduler(num_pages=5)
    held = make_sequence(12, "held")
    scheduler.add(held)
    run(scheduler)
    scheduler.add(make_sequence(12, "waits"))
    assert run(scheduler) == [("held", 2, True)]
    assert run(scheduler) == []
    scheduler.release(held)
    assert run(scheduler) == [("waits", 10, False)]


def test_at_most_so_many_prompts_are_begun():
    scheduler = make_scheduler(token_budget=100, max_num_sequences=2)
    for name in "abc":
        scheduler.add(make_sequence(2, name))
    assert [name for name, *_ in run(scheduler)] == ["a", "b"]


def test_aborted_prompts_give_everything_back():
    scheduler = make_scheduler(num_pages=10)
    running, waiting = make_sequence(15, "running"), make_sequence(30, "waiting")
    scheduler.add(running)
    run(scheduler)
    scheduler.add(waiting)
    for sequence in (running, waiting, running):
        scheduler.abort(sequence)
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.queued_tokens) == (0, 0, 0)
    assert repr(scheduler._pool) == "<PagePool 10 free, 0 held>"


def test_what_can_never_fit_is_known_at_once():
    scheduler = make_scheduler(num_pages=3)
    assert scheduler.can_ever_fit(12)
    assert not scheduler.can_ever_fit(13)


def test_a_budget_of_nothing_is_refused():
    from engine.config import EngineConfig

    with pytest.raises(ValueError, match="--token-budget is 0"):
        PrefillConfig(engine=EngineConfig(model="m"), token_budget=0)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 12),
    st.integers(3, 12),
    st.lists(st.one_of(st.integers(1, 12), st.just("abort"), st.just("release")), max_size=60),
)
def test_budgets_hold_tokens_are_computed_once_and_all_prompts_end(token_budget, num_pages, actions):
    scheduler = make_scheduler(num_pages, token_budget, max_num_sequences=3)
    alive, finished, computed = [], [], {}
    for number, action in enumerate(actions):
        if action == "abort" and alive:
            scheduler.abort(alive.pop(0))
        elif action == "release" and finished:
            scheduler.release(finished.pop(0))
        elif isinstance(action, int):
            sequence = make_sequence(action, str(number))
            alive.append(sequence)
            scheduler.add(sequence)
        step = scheduler.schedule()
        if step:
            assert 0 < step.num_tokens <= token_budget
            for entry in step.batch:
                computed[entry.sequence.sequence_id] = (
                    computed.get(entry.sequence.sequence_id, 0) + entry.num_new_tokens
                )
                assert len(entry.sequence.page_table) == num_pages_for(entry.sequence.num_tokens, PAGE_SIZE)
            scheduler.update(step)
        done = [s for s in alive if s.num_uncomputed_tokens == 0]
        finished += done
        alive = [s for s in alive if s not in done]
        assert scheduler._pool.counts().total == num_pages
    for _ in range(2000):
        if not alive and not finished:
            break
        for sequence in finished:
            assert computed[sequence.sequence_id] == sequence.num_tokens
            scheduler.release(sequence)
        finished = []
        for sequence in [s for s in alive if not scheduler.can_ever_fit(s.num_tokens)]:
            scheduler.abort(sequence)
            alive.remove(sequence)
        if step := scheduler.schedule():
            for entry in step.batch:
                computed[entry.sequence.sequence_id] = (
                    computed.get(entry.sequence.sequence_id, 0) + entry.num_new_tokens
                )
            scheduler.update(step)
        finished = [s for s in alive if s.num_uncomputed_tokens == 0]
        alive = [s for s in alive if s not in finished]
    assert not alive
    assert scheduler._pool.num_free == num_pages
