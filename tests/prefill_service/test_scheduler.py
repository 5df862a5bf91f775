"""The prefill scheduler alone: budgets, order, chunks, pages, prefix cache, deadlines."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.page_pool import PagePool
from engine.prefix_cache import PrefixCache
from engine.sequence import Sequence, num_pages_for
from prefill_service.config import PrefillConfig
from prefill_service.scheduler import PrefillScheduler
from rpc.prompt_order import SLOWDOWN
from worker_runtime.step import StepLimits

PAGE_SIZE = 4
_unique = iter(range(10, 10**9))


def make_scheduler(num_pages=100, token_budget=10, max_num_sequences=8, policy="fcfs", cache=True):
    pool = PagePool(num_pages)
    return PrefillScheduler(
        pool, PrefixCache(pool, PAGE_SIZE, cache), PAGE_SIZE, token_budget, max_num_sequences, policy
    )


def make_sequence(num_tokens, name="a", token_ids=None, salt=""):
    """Tokens that no other sequence has, unless given."""
    token_ids = token_ids or [next(_unique) for _ in range(num_tokens)]
    return Sequence(name, list(token_ids), len(token_ids), cache_salt=salt)


def chunks(step):
    return [(e.sequence.sequence_id, e.num_new_tokens, e.is_sampled) for e in step.batch] if step else []


def run(scheduler, **options):
    step = scheduler.schedule(StepLimits(**options))
    planned = chunks(step)
    if step:
        scheduler.update(step)
    return planned


def run_all(scheduler):
    steps = []
    while planned := run(scheduler):
        steps.append(planned)
    return steps


class TestChunks:
    def test_a_long_prompt_runs_as_chunks_and_only_the_last_is_sampled(self):
        scheduler = make_scheduler()
        sequence = make_sequence(21)
        scheduler.add(sequence)
        assert run_all(scheduler) == [[("a", 10, False)], [("a", 10, False)], [("a", 1, True)]]
        assert len(sequence.page_table) == num_pages_for(21, PAGE_SIZE)

    def test_pages_are_taken_chunk_by_chunk_but_promised_at_admission(self):
        scheduler = make_scheduler(num_pages=8)
        long = make_sequence(21, "long")
        scheduler.add(long)
        assert run(scheduler) == [("long", 10, False)]
        assert len(long.page_table) == 3
        scheduler.add(make_sequence(12, "waits"))
        assert run(scheduler) == [("long", 10, False)]
        assert run(scheduler) == [("long", 1, True)]
        assert scheduler.refusals["pages"] > 0
        scheduler.finish(long)
        assert run(scheduler) == [("waits", 10, False)]

    def test_the_rest_of_the_budget_goes_to_the_next_prompts(self):
        """Casebook C061: the tail of one prompt does not run alone while others wait."""
        scheduler = make_scheduler()
        for name, length in (("a", 12), ("b", 3), ("c", 20)):
            scheduler.add(make_sequence(length, name))
        assert run(scheduler) == [("a", 10, False)]
        assert run(scheduler) == [("a", 2, True), ("b", 3, True), ("c", 5, False)]

    def test_an_unfinished_prompt_goes_first(self):
        scheduler = make_scheduler()
        scheduler.add(make_sequence(15, "long"))
        run(scheduler)
        scheduler.add(make_sequence(2, "short"))
        assert run(scheduler) == [("long", 5, True), ("short", 2, True)]

    def test_at_most_so_many_prompts_are_begun(self):
        scheduler = make_scheduler(token_budget=100, max_num_sequences=2)
        sequences = [make_sequence(120, name) for name in "abc"]
        for sequence in sequences:
            scheduler.add(sequence)
        assert [name for name, *_ in run(scheduler)] == ["a"]
        assert [name for name, *_ in run(scheduler)] == ["a", "b"]
        assert [name for name, *_ in run(scheduler)] == ["b", "c"]

    def test_a_chunk_shrinks_to_the_pages_there_are(self):
        """Pages that were promised went to others (a colocated worker's decoding)."""
        scheduler = make_scheduler(num_pages=10, token_budget=40)
        scheduler.add(make_sequence(30))
        assert run(scheduler, reserved_pages=0) == [("a", 30, True)]
        scheduler = make_scheduler(num_pages=10, token_budget=8)
        scheduler.add(make_sequence(30))
        assert run(scheduler) == [("a", 8, False)]
        assert run(scheduler, reserved_pages=7) == [("a", 4, False)]
        assert run(scheduler, reserved_pages=7) == []
        assert scheduler.refusals["chunk_pages"] > 0
        assert run(scheduler) == [("a", 8, False)]

    def test_half_done_prompts_do_not_block_each_other_for_ever(self):
        scheduler = make_scheduler(num_pages=12, token_budget=40)
        first, second = make_sequence(24, "first"), make_sequence(20, "second")
        scheduler.add(first)
        scheduler.add(second)
        assert run(scheduler, reserved_pages=0) == [("first", 24, True), ("second", 16, False)]
        third = make_sequence(4, "third")
        scheduler.add(third)
        # Somebody else takes what is left, so the half-done one can't go on ...
        assert run(scheduler, reserved_pages=2) == []
        scheduler.finish(first)
        # ... until pages come back.
        assert run(scheduler) == [("second", 4, True), ("third", 4, True)]


class TestAdmission:
    def test_aborted_prompts_give_everything_back(self):
        scheduler = make_scheduler(num_pages=10, cache=False)
        running, waiting = make_sequence(15, "running"), make_sequence(30, "waiting")
        scheduler.add(running)
        run(scheduler)
        scheduler.add(waiting)
        for sequence in (running, waiting, running):
            scheduler.abort(sequence)
        assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)
        assert (scheduler.queued_tokens, scheduler.running_tokens) == (0, 0)
        assert repr(scheduler.pool) == "<PagePool 10 free, 0 held>"

    def test_what_can_never_fit_is_known_at_once(self):
        scheduler = make_scheduler(num_pages=3)
        assert scheduler.can_ever_fit(12)
        assert not scheduler.can_ever_fit(13)

    def test_small_prompts_pass_a_large_one_that_lacks_pages_but_only_its_own_length_of_them(self):
        """Casebook C067."""
        scheduler = make_scheduler(num_pages=10, token_budget=100, cache=False)
        held = make_sequence(8, "held")
        scheduler.add(held)
        run(scheduler)
        scheduler.add(make_sequence(40, "large"))
        passed = 0
        for number in range(30):
            small = make_sequence(4, f"small{number}")
            scheduler.add(small)
            if run(scheduler):
                passed += 4
                scheduler.finish(small)
        assert 36 <= passed <= 44
        scheduler.finish(held)
        assert run(scheduler)[0] == ("large", 40, True)

    def test_locking_may_turn_a_fit_into_not_now(self):
        scheduler = make_scheduler(num_pages=4, token_budget=100)
        tokens = list(range(12))
        first = make_sequence(12, "first", tokens)
        scheduler.add(first)
        run(scheduler)
        scheduler.finish(first)
        assert scheduler.pool.counts().cached == 3
        # 16 new pages would be too many anyway; 2 matched + 2 more fit, but not beside 1 reserved page.
        scheduler.add(make_sequence(0, "again", [*tokens[:8], 90, 91, 92, 93, 94]))
        assert run(scheduler, reserved_pages=1) == []
        assert scheduler.refusals["pages_after_lock"] == 1
        assert scheduler.pool.counts().cached == 3
        assert run(scheduler) == [("again", 5, True)]

    def test_bad_settings_are_refused(self):
        """Casebook C062."""
        for value in (0, -1):
            with pytest.raises(ValueError, match=f"--token-budget is {value}"):
                PrefillConfig(engine=EngineConfig(model="m"), token_budget=value)


class TestDeadlines:
    def test_an_expired_prompt_leaves_the_queue_without_costing_a_token(self):
        scheduler = make_scheduler()
        scheduler.add(make_sequence(5, "late"), deadline=10.0)
        step = scheduler.schedule(StepLimits(now=10.0))
        assert [s.sequence_id for s in step.expired] == ["late"]
        assert step.prompts == ()
        assert scheduler.num_waiting == 0

    def test_a_deadline_that_can_not_be_met_any_more_is_given_up_early(self):
        scheduler = make_scheduler(token_budget=100)
        scheduler.add(make_sequence(50, "hopeless"), deadline=10.0)
        scheduler.add(make_sequence(20, "possible"), deadline=10.0)
        step = scheduler.schedule(StepLimits(now=6.0, tokens_per_second=10.0))
        assert [s.sequence_id for s in step.expired] == ["hopeless"]
        assert chunks(step) == [("possible", 20, True)]

    def test_a_running_prompt_stops_at_the_next_chunk(self):
        scheduler = make_scheduler(cache=False)
        scheduler.add(make_sequence(30), deadline=5.0)
        assert run(scheduler, now=1.0) == [("a", 10, False)]
        step = scheduler.schedule(StepLimits(now=6.0))
        assert [s.sequence_id for s in step.expired] == ["a"]
        assert scheduler.pool.num_free == 100


class TestOrder:
    def test_priority_goes_first(self):
        scheduler = make_scheduler(token_budget=4)
        for name, priority in (("a", 0), ("b", 3), ("c", 0)):
            scheduler.add(make_sequence(4, name), priority=priority)
        assert [name for step in run_all(scheduler) for name, *_ in step] == ["b", "a", "c"]

    def test_short_prompts_do_not_wait_behind_a_long_one_with_bounded_slowdown(self):
        finished = {}
        for policy in ("fcfs", "bounded_slowdown"):
            scheduler = make_scheduler(num_pages=400, policy=policy)
            scheduler.add(make_sequence(200, "long"))
            run(scheduler)
            for number in range(5):
                scheduler.add(make_sequence(5, f"short{number}"))
            finished[policy] = [name for step in run_all(scheduler) for name, _, last in step if last]
        assert finished["fcfs"][0] == "long"
        assert finished["bounded_slowdown"][-1] == "long"

    def test_many_short_prompts_can_not_starve_a_long_one(self):
        scheduler = make_scheduler(num_pages=4000, policy="bounded_slowdown")
        scheduler.add(make_sequence(50, "long"))
        computed = 0
        for number in range(1000):
            # One and a half steps' work arrives per step: without ageing the long one would never go on.
            for part in range(3):
                scheduler.add(make_sequence(5, f"s{number}.{part}"))
            planned = run(scheduler)
            computed += sum(n for _, n, _ in planned)
            if ("long", True) in [(name, last) for name, _, last in planned]:
                break
        assert computed <= (SLOWDOWN["bounded_slowdown"] + 2) * 50 + 50

    @settings(max_examples=100, deadline=None)
    @given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3)), min_size=1, max_size=60), st.integers(1, 20))
    def test_the_stated_bound_holds_for_every_prompt(self, arrivals, token_budget):
        """Computed tokens between a prompt's arrival and its last chunk <= work ahead + (SLOWDOWN + 2) * own length."""
        scheduler = make_scheduler(10_000, token_budget, 10_000, "bounded_slowdown", cache=False)
        clock, bound = 0, {}

        def step():
            nonlocal clock
            planned = run(scheduler)
            for name, tokens, last in planned:
                clock += tokens
                if last:
                    assert clock <= bound[name], f"{name} is too late"
            return planned

        for number, (length, steps) in enumerate(arrivals):
            ahead = scheduler.queued_tokens + scheduler.running_tokens
            scheduler.add(make_sequence(length, str(number)))
            # A step in progress is work ahead too: one budget.
            bound[str(number)] = clock + ahead + (SLOWDOWN["bounded_slowdown"] + 2) * length + token_budget
            for _ in range(steps):
                step()
        while step():
            pass
        assert scheduler.num_waiting == scheduler.num_running == 0


class TestPrefixCache:
    def run_prompt(self, scheduler, tokens, salt=""):
        sequence = make_sequence(0, f"p{next(_unique)}", tokens, salt)
        scheduler.add(sequence)
        computed = sum(n for step in run_all(scheduler) for _, n, _ in step)
        scheduler.finish(sequence)
        return sequence.num_cached_tokens, computed

    @pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 16])
    def test_the_second_run_computes_only_the_rest_and_always_the_last_token(self, length):
        """Casebook C049."""
        scheduler, tokens = make_scheduler(), list(range(length))
        assert self.run_prompt(scheduler, tokens) == (0, length)
        cached = (length - 1) // PAGE_SIZE * PAGE_SIZE
        assert self.run_prompt(scheduler, tokens) == (cached, length - cached)

    def test_extensions_hit_what_was_computed(self):
        """Casebook C081."""
        scheduler = make_scheduler()
        four, eight = list(range(4 * PAGE_SIZE)), list(range(8 * PAGE_SIZE))
        hits = [self.run_prompt(scheduler, tokens)[0] for tokens in (four, four, eight, eight)]
        assert hits == [0, 3 * PAGE_SIZE, 4 * PAGE_SIZE, 7 * PAGE_SIZE]

    def test_partial_pages_are_never_shared(self):
        """Casebook C078: prefixes that are no multiple of the page size."""
        scheduler = make_scheduler()
        x = list(range(6))
        self.run_prompt(scheduler, [*x, 50, 51, 52])
        assert self.run_prompt(scheduler, [*x, 60, 61, 62])[0] == 4
        assert self.run_prompt(scheduler, [*x, 50, 51, 70, 71, 72])[0] == 8

    def test_salts_share_nothing(self):
        """Casebook C074."""
        scheduler, tokens = make_scheduler(), list(range(20))
        assert [self.run_prompt(scheduler, tokens, salt)[0] for salt in ("s1", "s2", "", "s1")] == [0, 0, 0, 16]

    def test_pages_in_use_are_never_evicted(self):
        """Casebook C075."""
        scheduler = make_scheduler(num_pages=8, token_budget=100)
        shared = list(range(16))
        holder = make_sequence(0, "holder", [*shared, 99])
        scheduler.add(holder)
        run(scheduler)
        for _ in range(20):
            self.run_prompt(scheduler, [next(_unique) for _ in range(12)])
        user = make_sequence(0, "user", [*shared, 98])
        scheduler.add(user)
        run(scheduler)
        assert user.num_cached_tokens == 16
        assert user.page_table[:4] == holder.page_table[:4]

    def test_the_least_recently_used_goes_first_and_leaves_before_roots(self):
        scheduler = make_scheduler(num_pages=9, token_budget=100)
        a, b = list(range(100, 117)), list(range(200, 217))
        self.run_prompt(scheduler, a)
        self.run_prompt(scheduler, b)
        self.run_prompt(scheduler, a)
        self.run_prompt(scheduler, [next(_unique) for _ in range(12)])
        assert self.run_prompt(scheduler, a)[0] == 16
        scheduler = make_scheduler(num_pages=5, token_budget=100)
        self.run_prompt(scheduler, a)
        self.run_prompt(scheduler, [next(_unique) for _ in range(8)])
        assert self.run_prompt(scheduler, a)[0] == 12

    def test_an_aborted_prompt_leaves_only_what_was_wholly_computed(self):
        scheduler = make_scheduler()
        tokens = list(range(30))
        sequence = make_sequence(0, "aborted", tokens)
        scheduler.add(sequence)
        run(scheduler)
        scheduler.abort(sequence)
        assert self.run_prompt(scheduler, tokens)[0] == 8

    def test_random_prompts_hit_nothing(self):
        """Casebook C079, with prompts that start over for lack of pages."""
        scheduler = make_scheduler(num_pages=20)
        assert sum(self.run_prompt(scheduler, [next(_unique) for _ in range(17)])[0] for _ in range(30)) == 0

    def test_flush_and_events_tell_the_same_story(self):
        scheduler = make_scheduler(num_pages=6, token_budget=100)
        cache = scheduler._cache
        known = set()
        for length in (12, 20, 8, 24):
            self.run_prompt(scheduler, [next(_unique) for _ in range(length)])
            events = cache.take_events()
            known |= set(events.added)
            known -= set(events.evicted)
            assert known == set(cache._page_of)
        # Evicted and learned again, learned and evicted, between two looks: the last state is told, once.
        prompt = [next(_unique) for _ in range(12)]
        self.run_prompt(scheduler, prompt)
        self.run_prompt(scheduler, [next(_unique) for _ in range(24)])
        self.run_prompt(scheduler, prompt)
        events = cache.take_events()
        assert not set(events.added) & set(events.evicted)
        for order in (0, 1):
            told = set(known)
            for kind in ((events.added, events.evicted), (events.evicted, events.added))[order]:
                told = told | set(kind) if kind is events.added else told - set(kind)
            assert told == set(cache.keys())
        known = set(cache.keys())
        cache.flush()
        assert set(cache.take_events().evicted) == known
        assert len(cache) == 0
        assert repr(scheduler.pool) == "<PagePool 6 free, 0 held>"

    def test_off_means_off(self):
        scheduler, tokens = make_scheduler(cache=False), list(range(20))
        self.run_prompt(scheduler, tokens)
        assert self.run_prompt(scheduler, tokens) == (0, 20)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_everything_holds_under_random_load(data):
    """Budgets, page conservation, each token computed once except where cached, and everybody ends."""
    token_budget, num_pages = data.draw(st.integers(1, 12)), data.draw(st.integers(3, 14))
    policy = data.draw(st.sampled_from(["fcfs", "bounded_slowdown"]))
    scheduler = make_scheduler(num_pages, token_budget, 3, policy)
    rng = random.Random(data.draw(st.integers(0, 10**6)))
    alive, finished, computed = [], [], {}

    def step(reserved_pages=0):
        planned = scheduler.schedule(StepLimits(reserved_pages=reserved_pages))
        if planned is not None:
            assert 0 < planned.num_prompt_tokens <= token_budget
            assert len({e.sequence.sequence_id for e in planned.batch}) == len(planned.batch)
            for entry in planned.batch:
                sequence = entry.sequence
                end = sequence.num_computed_tokens + entry.num_new_tokens
                assert num_pages_for(end, PAGE_SIZE) == len(sequence.page_table)
                name = sequence.sequence_id
                if sequence.num_computed_tokens == sequence.num_cached_tokens:
                    computed[name] = 0  # begins, or begins anew after giving its pages back
                computed[name] += entry.num_new_tokens
            scheduler.update(planned)
        for sequence in [s for s in alive if s.num_uncomputed_tokens == 0]:
            assert computed[sequence.sequence_id] == sequence.num_tokens - sequence.num_cached_tokens
            assert sequence.num_cached_tokens < sequence.num_tokens
            alive.remove(sequence)
            finished.append(sequence)
        counts = scheduler.pool.counts()
        assert counts.total == num_pages
        return planned

    for number in range(data.draw(st.integers(1, 40))):
        action = rng.random()
        if action < 0.5:
            # Few different tokens, so that prefixes are shared.
            tokens = [rng.randint(0, 1) for _ in range(rng.randint(1, num_pages * PAGE_SIZE))]
            sequence = make_sequence(0, str(number), tokens)
            alive.append(sequence)
            scheduler.add(sequence, priority=rng.choice((0, 0, 0, 1)))
        elif action < 0.6 and alive:
            scheduler.abort(alive.pop(rng.randrange(len(alive))))
        elif action < 0.8 and finished:
            scheduler.finish(finished.pop(rng.randrange(len(finished))))
        step(reserved_pages=rng.choice((0, 0, rng.randint(0, num_pages))))
    for _ in range(5000):
        while finished:
            scheduler.finish(finished.pop())
        if not alive:
            break
        assert step() is not None, "prompts are left, pages are free, and nothing moves"
    assert not alive
    assert scheduler.pool.num_available == num_pages
    assert not any(scheduler.pool._holders)
