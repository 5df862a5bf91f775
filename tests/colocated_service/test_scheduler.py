"""Both phases over one pool: budgets, order, pages, computing again in place."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colocated_service.config import ColocatedConfig
from colocated_service.scheduler import ColocatedScheduler
from decode_service.growth import FEWEST
from engine.config import EngineConfig
from engine.page_pool import PagePool
from engine.prefix_cache import PrefixCache
from engine.sequence import Sequence

PAGE_SIZE = 4
_unique = iter(range(10, 10**9))


def make_scheduler(num_pages=60, token_budget=10, max_num_sequences=6, policy="mixed", cache=True):
    pool = PagePool(num_pages)
    scheduler = ColocatedScheduler(
        pool, PrefixCache(pool, PAGE_SIZE, cache), PAGE_SIZE, token_budget, max_num_sequences, policy
    )
    scheduler.pool = pool
    return scheduler


def make_sequence(num_tokens, name="a"):
    """Tokens that no other sequence has."""
    return Sequence(name, [next(_unique) for _ in range(num_tokens)], num_tokens)


def step(scheduler):
    """One step as the worker does it: ([(answer, 1)], [(prompt, tokens)], [preempted])."""
    plan = scheduler.schedule()
    if plan is None:
        return [], [], []
    for entry in plan.batch:
        sequence = entry.sequence
        assert len(sequence.page_table) * PAGE_SIZE >= sequence.num_computed_tokens + entry.num_new_tokens
    sampled = [entry.sequence for entry in plan.batch if entry.is_sampled]
    scheduler.update(plan)
    for sequence in sampled:
        sequence.token_ids.append(next(_unique))
    return (
        [entry.sequence.sequence_id for entry in plan.answers],
        [(entry.sequence.sequence_id, entry.num_new_tokens) for entry in plan.prompts],
        [sequence.sequence_id for sequence in plan.preempted],
    )


def test_a_step_gives_answers_a_token_each_and_the_rest_of_the_budget_to_prompts():
    """Casebook C071: a long prompt never stalls an answer, and it always goes on."""
    scheduler = make_scheduler()
    scheduler.add(make_sequence(4, "a"), 50)
    scheduler.add(make_sequence(5, "b"), 50)
    assert step(scheduler) == ([], [("a", 4), ("b", 5)], [])
    scheduler.add(make_sequence(30, "long"), 5)
    for expected in (8, 8, 8, 6):
        assert step(scheduler) == (["a", "b"], [("long", expected)], [])
    assert step(scheduler) == (["a", "b", "long"], [], [])


def test_prefill_first_computes_prompts_before_answers_go_on():
    scheduler = make_scheduler(policy="prefill_first")
    scheduler.add(make_sequence(4, "a"), 50)
    step(scheduler)
    scheduler.add(make_sequence(25, "long"), 5)
    for expected in (10, 10, 5):
        assert step(scheduler) == ([], [("long", expected)], [])
    assert step(scheduler) == (["a", "long"], [], [])


def test_places_for_sequences_are_shared_by_both_phases():
    scheduler = make_scheduler(max_num_sequences=2)
    for name in "abc":
        scheduler.add(make_sequence(3, name), 9)
    assert [name for name, _ in step(scheduler)[1]] == ["a", "b"]
    assert step(scheduler) == (["a", "b"], [], [])
    scheduler.finish(scheduler._known["a"].sequence)
    assert step(scheduler) == (["b"], [("c", 3)], [])


def teach(scheduler, length, max_tokens):
    for _ in range(FEWEST):
        scheduler.answers.lengths.learn(length, max_tokens)


def test_an_answer_without_a_page_waits_as_a_prompt_and_is_computed_again_in_place():
    scheduler = make_scheduler(num_pages=5, token_budget=20)
    teach(scheduler, 2, 30)
    a, b = make_sequence(7, "a"), make_sequence(7, "b")
    scheduler.add(a, 30)
    scheduler.add(b, 30)
    step(scheduler)
    step(scheduler)
    assert step(scheduler) == (["a"], [], ["b"])
    tokens = list(b.token_ids)
    assert step(scheduler) == (["a"], [], []), "b waits for pages"
    scheduler.abort(a)
    answers, [(name, num_tokens)], preempted = step(scheduler)
    assert (answers, name, preempted) == ([], "b", [])
    assert num_tokens == len(tokens) - b.num_cached_tokens, "from what is still in the cache"
    assert b.token_ids[: len(tokens)] == tokens
    assert b.num_prompt_tokens == 7
    scheduler.abort(b)
    assert scheduler.pool.num_available == 5


def test_half_done_prompts_give_pages_back_before_an_answer_has_to():
    scheduler = make_scheduler(num_pages=6, token_budget=6, max_num_sequences=4, cache=False)
    teach(scheduler, 2, 30)
    a = make_sequence(4, "a")
    scheduler.add(a, 30)
    step(scheduler)
    scheduler.add(make_sequence(15, "half"), 3)
    for _ in range(3):
        answers, _, preempted = step(scheduler)
        assert (answers, preempted) == (["a"], [])
    for _ in range(12):
        answers, _, preempted = step(scheduler)
        assert (answers, preempted) == (["a"], [])
    assert scheduler.prompts.num_restarts > 0


def test_a_resumed_answer_goes_ahead_of_new_prompts():
    scheduler = make_scheduler(num_pages=5, token_budget=8, max_num_sequences=3)
    teach(scheduler, 2, 30)
    for name in "ab":
        scheduler.add(make_sequence(7, name), 30)
    step(scheduler)
    step(scheduler)
    scheduler.add(make_sequence(4, "new"), 2)
    order = []
    for _ in range(30):
        plan = scheduler.schedule()
        waiting = [p.sequence.sequence_id for p in scheduler.prompts._in_order()]
        if plan is not None and plan.preempted:
            order = waiting
            break
        scheduler.update(plan)
        for entry in plan.batch:
            if entry.sequence.num_uncomputed_tokens == 0:
                entry.sequence.token_ids.append(next(_unique))
    assert order[:2] == ["b", "new"]


@pytest.mark.parametrize(("budget", "sequences", "words"), [(0, 8, "at least 1 token"), (8, 8, "must be larger")])
def test_settings_that_can_not_work_are_refused(budget, sequences, words):
    with pytest.raises(ValueError, match=words):
        ColocatedConfig(EngineConfig(model="m"), token_budget=budget, max_num_sequences=sequences)
    ColocatedConfig(EngineConfig(model="m"), token_budget=8, max_num_sequences=8, step_policy="prefill_first")


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(["mixed", "prefill_first"]),
    st.booleans(),
    st.integers(7, 30),
    st.lists(st.tuples(st.integers(1, 24), st.integers(1, 20), st.integers(0, 4)), min_size=1, max_size=20),
)
def test_everyone_gets_a_whole_answer_and_pages_add_up(policy, cache, token_budget, requests):
    """Random arrivals on a small pool: no starvation, no lost page, no token twice."""
    scheduler = make_scheduler(12, token_budget, 6, policy, cache)
    waiting = list(requests)
    open_ = {}
    for turn in range(3000):
        if waiting and turn % (waiting[0][2] + 1) == 0:
            num_tokens, max_tokens, _ = waiting.pop(0)
            sequence = make_sequence(num_tokens, str(turn))
            if scheduler.can_ever_fit(num_tokens + max_tokens):
                scheduler.add(sequence, max_tokens)
                open_[sequence.sequence_id] = (sequence, max_tokens)
        step(scheduler)
        for sequence, max_tokens in list(open_.values()):
            assert sequence.num_output_tokens <= max_tokens
            if sequence.num_output_tokens == max_tokens:
                scheduler.finish(sequence)
                del open_[sequence.sequence_id]
        counts = scheduler.pool.counts()
        assert counts.total == 12
        if not waiting and not open_:
            break
    assert not open_, f"still waiting after {turn} steps"
    assert scheduler.pool.num_available == 12
