"""The decode scheduler alone: who is let in, who grows, who is handed back, what stays as cache."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_service.growth import FEWEST
from decode_service.scheduler import DecodeScheduler
from engine.page_pool import PagePool
from engine.prefix_cache import PrefixCache
from engine.sequence import Sequence

PAGE_SIZE = 4


def make_scheduler(num_pages=20, max_num_sequences=4, admission="learned", cache=False):
    pool = PagePool(num_pages)
    return DecodeScheduler(pool, PrefixCache(pool, PAGE_SIZE, cache), PAGE_SIZE, max_num_sequences, admission)


def make_sequence(num_tokens, name="a", token=None):
    token = hash(name) % 1000 if token is None else token
    return Sequence(name, [token] * num_tokens, num_tokens)


def start(scheduler, sequence):
    sequence.num_computed_tokens = sequence.num_tokens
    scheduler.start(sequence)
    sequence.token_ids.append(1)


def step(scheduler):
    """One step; the ids that got a token, and those handed back."""
    plan = scheduler.schedule()
    if plan is None:
        return [], []
    for entry in plan.decodes:
        assert len(entry.sequence.page_table) * PAGE_SIZE >= entry.sequence.num_tokens
        entry.sequence.token_ids.append(1)
    scheduler.update(plan)
    return [e.sequence.sequence_id for e in plan.decodes], [s.sequence_id for s in plan.preempted]


def teach(scheduler, *lengths, max_tokens):
    for length in lengths:
        for _ in range(FEWEST):
            scheduler.lengths.learn(length, max_tokens)


def test_prompt_pages_are_taken_at_once_and_growth_is_expected():
    scheduler = make_scheduler()
    sequence = make_sequence(9)
    assert scheduler.reserve(sequence, 20) is None
    assert len(sequence.page_table) == 3
    assert scheduler.expected_growth_pages == 7 - 3


def test_the_last_token_needs_no_page():
    scheduler = make_scheduler(num_pages=2)
    assert scheduler.can_ever_fit(9)
    assert not scheduler.can_ever_fit(10)
    assert scheduler.reserve(make_sequence(8), 1) is None


@pytest.mark.parametrize("admission", ["learned", "full"])
def test_while_nothing_is_known_the_longest_answers_count(admission):
    scheduler = make_scheduler(num_pages=10, admission=admission)
    assert scheduler.reserve(make_sequence(4, "a"), 29) is None
    assert scheduler.reserve(make_sequence(4, "b"), 29) == "pages"
    assert scheduler.reserve(make_sequence(4, "b"), 5) is None


def test_what_answers_turn_out_to_be_lets_more_in():
    full, learned = make_scheduler(num_pages=12, admission="full"), make_scheduler(num_pages=12)
    for scheduler in (full, learned):
        teach(scheduler, 4, max_tokens=32)
    admitted = [
        sum(scheduler.reserve(make_sequence(4, str(n)), 32) is None for n in range(4)) for scheduler in (full, learned)
    ]
    assert admitted == [1, 4]


def test_pages_of_answers_that_end_early_count_for_those_that_go_on():
    """The peak, not the sum: 4 prompts of 2 pages, of which 3 end after a token and one grows by 6 pages."""
    scheduler = make_scheduler(num_pages=10)
    teach(scheduler, 1, max_tokens=8)
    teach(scheduler, 24, max_tokens=32)
    for name in "abc":
        assert scheduler.reserve(make_sequence(8, name), 8) is None
    assert scheduler.reserve(make_sequence(8, "long"), 32) is None
    assert scheduler.expected_growth_pages > scheduler.pool.num_available


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
    plan = scheduler.schedule()
    assert [(e.sequence.sequence_id, e.num_new_tokens, e.is_sampled) for e in plan.decodes] == [("b", 1, True)]


def test_release_is_harmless_twice():
    scheduler = make_scheduler()
    a = make_sequence(4)
    scheduler.reserve(a, 10)
    scheduler.abort(a)
    scheduler.abort(a)
    assert scheduler.num_sequences == scheduler.expected_growth_pages == 0
    assert repr(scheduler.pool) == "<PagePool 20 free, 0 held>"


def crowd(scheduler, names, num_tokens=7, max_tokens=30, preempted=()):
    """Sequences that were let in because answers used to be short."""
    teach(scheduler, 2, max_tokens=max_tokens)
    sequences = [make_sequence(num_tokens, name) for name in names]
    for sequence in sequences:
        assert scheduler.reserve(sequence, max_tokens, sequence.sequence_id in preempted) is None
        start(scheduler, sequence)
    return sequences


def test_when_pages_run_out_the_youngest_is_handed_back_and_the_others_go_on():
    scheduler = make_scheduler(num_pages=7)
    crowd(scheduler, "abc")
    assert step(scheduler) == (["a", "b", "c"], [])
    ran, handed_back = step(scheduler)  # a takes the last page, b needs one
    assert (ran, handed_back) == (["a", "b"], ["c"])
    assert scheduler.pool.counts().total == 7
    for _ in range(3):
        assert step(scheduler) == (["a", "b"], [])


def test_one_that_was_handed_back_before_is_not_the_next_victim():
    scheduler = make_scheduler(num_pages=7)
    crowd(scheduler, "abc", preempted="c")
    step(scheduler)
    assert step(scheduler) == (["c", "a"], ["b"])


def test_the_youngest_itself_goes_if_it_is_the_one_that_lacks_a_page():
    scheduler = make_scheduler(num_pages=5)
    a, _ = crowd(scheduler, "ab")
    a.token_ids.pop()
    a.num_computed_tokens -= 1
    step(scheduler)
    assert step(scheduler) == (["a", "b"], [])
    assert step(scheduler) == (["a"], ["b"])


def test_a_reservation_goes_before_an_older_one_waits_for_a_foreign_prompt():
    scheduler = make_scheduler(num_pages=4)
    [a] = crowd(scheduler, "a")
    reserved = [make_sequence(4, "b"), make_sequence(4, "c")]
    for sequence in reserved:
        assert scheduler.reserve(sequence, 1) is None
    scheduler.pool.open_to_writer(reserved[1].page_table)
    pages = list(reserved[1].page_table)
    step(scheduler)
    assert step(scheduler) == ([], ["c"]), "the youngest gives its reservation back"
    assert scheduler.schedule() is None, "its pages are on their way: b is spared"
    scheduler.pool.close_to_writer(pages)
    assert step(scheduler) == (["a"], [])
    assert len(a.page_table) == 3


def test_victims_without_pages_of_their_own_are_spared():
    """b shares all pages of a: handing it back for c, which is older, would free nothing."""
    scheduler = make_scheduler(num_pages=4, cache=True)
    teach(scheduler, 2, max_tokens=8)
    a, c, b = make_sequence(8, "a", token=5), make_sequence(4, "c", token=6), make_sequence(8, "b", token=5)
    assert scheduler.reserve(a, 8) is None
    start(scheduler, a)
    assert scheduler.reserve(c, 1) is scheduler.reserve(b, 1) is None
    start(scheduler, c)
    start(scheduler, b)
    assert repr(scheduler.pool) == "<PagePool 1 free, 3 held>"
    assert step(scheduler) == (["a", "b"], ["c"])


def test_shared_pages_do_not_count_as_given_back():
    """Six answers of one long prompt: 5 pages in common, 8 more for each."""
    scheduler = make_scheduler(num_pages=45, max_num_sequences=20, cache=True)
    teach(scheduler, 32, max_tokens=32)
    admitted = 0
    for number in range(20):
        sequence = make_sequence(20, str(number), token=5)
        if scheduler.reserve(sequence, 32) is not None:
            break
        start(scheduler, sequence)
        admitted += 1
    assert admitted == 5
    while scheduler.num_running:
        assert step(scheduler)[1] == []
        for sequence in [a.sequence for a in scheduler._admitted.values()]:
            if sequence.num_output_tokens >= 32:
                scheduler.finish(sequence)


def test_with_full_admission_nobody_is_ever_handed_back():
    scheduler = make_scheduler(num_pages=9, admission="full", max_num_sequences=9)
    teach(scheduler, 1, max_tokens=13)
    for name in "abcdef":
        sequence = make_sequence(7, name)
        if scheduler.reserve(sequence, 13) is None:
            start(scheduler, sequence)
    assert scheduler.num_running == 1
    for _ in range(12):
        assert step(scheduler)[1] == []


def test_forecasts_that_were_too_low_raise_the_reserve():
    scheduler = make_scheduler(num_pages=7)
    before = scheduler.lengths.quantile
    crowd(scheduler, "abc")
    step(scheduler)
    step(scheduler)
    assert scheduler.lengths.quantile > before


def test_a_follow_up_takes_the_pages_that_are_here():
    scheduler = make_scheduler(cache=True)
    first = make_sequence(9, token=5)
    scheduler.reserve(first, 10)
    start(scheduler, first)
    for _ in range(4):
        step(scheduler)
    scheduler.finish(first)
    assert repr(scheduler.pool) == "<PagePool 17 free, 0 held, 3 cached>"
    turn = Sequence("b", [*first.token_ids, 8, 9], len(first.token_ids) + 2)
    assert scheduler.reserve(turn, 10) is None
    assert (turn.num_cached_tokens, len(turn.page_table)) == (12, 4)
    assert repr(scheduler.pool) == "<PagePool 16 free, 4 held>"
    scheduler.abort(turn)
    assert repr(scheduler.pool) == "<PagePool 17 free, 0 held, 3 cached>"


def test_a_wholly_known_prompt_needs_no_page_but_partly_filled_ones_are_never_shared():
    scheduler = make_scheduler(cache=True)
    first = make_sequence(8, token=5)
    scheduler.reserve(first, 10)
    start(scheduler, first)
    again, longer = make_sequence(8, "b", token=5), make_sequence(11, "c", token=5)
    scheduler.reserve(again, 10)
    scheduler.reserve(longer, 10)
    assert again.page_table == first.page_table
    assert longer.page_table[:2] == first.page_table
    assert (again.num_cached_tokens, longer.num_cached_tokens) == (8, 8)
    start(scheduler, again)
    step(scheduler)
    assert again.page_table[2] != first.page_table[2], "each writes its answer into pages of its own"


def test_pages_still_being_filled_or_of_other_salts_are_not_found():
    scheduler = make_scheduler(cache=True)
    first = make_sequence(8, token=5)
    scheduler.reserve(first, 10)
    second = make_sequence(8, "b", token=5)
    scheduler.reserve(second, 10)
    assert second.num_cached_tokens == 0
    start(scheduler, first)
    salted = Sequence("c", [5] * 8, 8, cache_salt="other")
    scheduler.reserve(salted, 10)
    assert salted.num_cached_tokens == 0


def test_a_refused_reservation_leaves_no_trace():
    scheduler = make_scheduler(num_pages=4, cache=True)
    first = make_sequence(8, token=5)
    scheduler.reserve(first, 1)
    start(scheduler, first)
    scheduler.finish(first)
    before = repr(scheduler.pool)
    big = make_sequence(20, "b", token=5)
    assert scheduler.reserve(big, 5) == "pages"
    assert repr(scheduler.pool) == before
    assert big.page_table == []


def test_cached_pages_make_way_for_growth():
    scheduler = make_scheduler(num_pages=4, cache=True)
    first = make_sequence(8, token=5)
    scheduler.reserve(first, 1)
    start(scheduler, first)
    scheduler.finish(first)
    other = make_sequence(15, "b", token=6)
    assert scheduler.reserve(other, 2) is None
    assert repr(scheduler.pool) == "<PagePool 0 free, 4 held>"


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["learned", "full"]),
    st.booleans(),
    st.lists(
        st.tuples(st.integers(1, 20), st.integers(1, 30), st.sampled_from("rrsxf"), st.integers(0, 2)), max_size=60
    ),
)
def test_churn_keeps_every_promise(admission, cache, actions):
    """Random admissions, starts, ends: pages add up, each running sequence has its pages, full never hands back."""
    scheduler = make_scheduler(num_pages=12, max_num_sequences=5, admission=admission, cache=cache)
    rng = random.Random(len(actions))
    reserved, running = [], []
    for number, (num_tokens, max_tokens, action, family) in enumerate(actions):
        if action == "r":
            sequence = make_sequence(num_tokens, str(number), token=family)
            fits = scheduler.can_ever_fit(num_tokens + max_tokens)
            if fits and scheduler.reserve(sequence, max_tokens, rng.random() < 0.2) is None:
                reserved.append((sequence, max_tokens))
        elif action == "s" and reserved:
            sequence, max_tokens = reserved.pop(0)
            start(scheduler, sequence)
            running.append((sequence, max_tokens))
        elif action == "x" and running:
            scheduler.abort(running.pop(0)[0])
        for sequence, max_tokens in list(running):
            if sequence.num_output_tokens >= max_tokens:
                scheduler.finish(sequence)
                running.remove((sequence, max_tokens))
        ran, handed_back = step(scheduler)
        if admission == "full":
            assert not handed_back
            assert len(ran) == len(running)
        running = [(s, m) for s, m in running if s.sequence_id not in handed_back]
        assert running or not handed_back, "someone goes on"
        assert scheduler.pool.counts().total == 12
        held = {page for s, _ in running + reserved for page in s.page_table}
        assert scheduler.pool.counts().held == len(held)
    for sequence, _ in reserved + running:
        scheduler.abort(sequence)
    assert scheduler.pool.num_available == 12
