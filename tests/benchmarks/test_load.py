"""Arrivals, workloads, goodput search and arms: what is offered is what was asked for, the same for everybody."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.arms import Arm, NotMatched, check_matched, make_arms, standard_loads
from benchmarks.arrivals import arrival_times, scaled_to_rate
from benchmarks.config import RunCommand
from benchmarks.goodput import GoodputSearch, Trial, crossing, falling
from benchmarks.loads import all_loads, make_requests, timed
from benchmarks.run import WARMUP_SEED
from benchmarks.workload import (
    SALT_TOKENS,
    Lengths,
    LoadRequest,
    as_text,
    conversations,
    salted,
    scaled,
    synthetic,
)
from local_cluster.config import ClusterConfig


@pytest.mark.parametrize(("kind", "burstiness", "cv"), [("poisson", 1, 1.0), ("gamma", 0.25, 2.0), ("fixed", 1, 0.0)])
def test_arrivals_have_the_rate_and_the_burstiness(kind, burstiness, cv):
    times = arrival_times(kind, 20.0, 20_000, 3, burstiness)
    gaps = np.diff(times)
    assert times[0] == 0
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, abs=0.1)
    assert arrival_times(kind, 20.0, 100, 3, burstiness) == arrival_times(kind, 20.0, 100, 3, burstiness)


def test_a_ramp_goes_from_one_rate_to_the_other():
    times = arrival_times("ramp", 10.0, 10_000, 1, end_rate=40.0)
    gaps = np.diff(times)
    assert 1 / gaps[:1000].mean() == pytest.approx(11.5, rel=0.15)
    assert 1 / gaps[-1000:].mean() == pytest.approx(38.5, rel=0.15)


@pytest.mark.parametrize(("options", "flag"), [({"rate": 0.0}, "--rate"), ({"burstiness": -1.0}, "--burstiness")])
def test_rates_that_make_no_sense_are_refused(options, flag):
    with pytest.raises(ValueError, match=flag):
        arrival_times("gamma", **({"rate": 1.0, "count": 5, "seed": 0} | options))
    with pytest.raises(ValueError, match="--speed"):
        list(scaled_to_rate([0.0], 0.0))


def test_lengths_and_gaps_of_one_seed_are_independent():
    lengths = [len(r.prompt) for r in synthetic(3000, Lengths("uniform", 200, 0.5), Lengths("fixed", 1), 7)]
    gaps = np.diff(arrival_times("poisson", 1.0, 3001, 7))
    assert abs(np.corrcoef(lengths, gaps)[0, 1]) < 0.06
    with pytest.raises(ValueError, match="--end-rate"):
        arrival_times("ramp", 1.0, 5, 0, end_rate=0.0)


def test_scaling_keeps_what_was_shared_and_the_limits():
    requests = synthetic(10, Lengths("fixed", 100), Lengths("fixed", 50), 1, shared_prefix=60)
    smaller = scaled(requests, 0.5, 70, 20)
    assert {len(r.prompt) for r in smaller} == {70}
    assert {r.max_tokens for r in smaller} == {20}
    assert len({r.prompt[:60] for r in smaller}) == 1


@pytest.mark.parametrize("kind", ["fixed", "uniform", "lognormal"])
def test_drawn_lengths_have_their_mean(kind):
    lengths = Lengths(kind, 200, 0.4).draw(np.random.default_rng(0), 5000)
    assert np.mean(lengths) == pytest.approx(200, rel=0.05)
    assert min(lengths) >= 1


def test_turns_begin_with_the_turns_before():
    requests = conversations(12, 3, Lengths("fixed", 10), Lengths("fixed", 5), 0)
    first, second, third = requests[0], requests[4], requests[8]
    assert (len(first.prompt), len(second.prompt), len(third.prompt)) == (10, 25, 40)
    assert second.prompt[:10] == first.prompt
    assert third.prompt[:25] == second.prompt


def test_texts_of_equal_beginnings_begin_alike():
    one, two = as_text((300, 301, 302)), as_text((300, 301, 999))
    assert one.split()[:2] == two.split()[:2]
    assert len(one.split()) == 3


@pytest.mark.parametrize("workload", ["lognormal", "fixed", "uniform", "conversations", "azure", "mooncake"])
def test_the_same_seed_gives_the_same_load_and_warm_up_shares_no_prompt(workload):
    """Casebook C165."""
    command = RunCommand(workload=workload, num_requests=20)
    measured = make_requests(command, 20, command.seed)
    assert measured == make_requests(command, 20, command.seed)
    warm = make_requests(command, 20, WARMUP_SEED)
    assert not {r.prompt[:8] for r in measured} & {r.prompt[:8] for r in warm}


def test_a_salt_changes_beginnings_and_nothing_else():
    """Two runs with one seed measured the prefix cache."""
    load = synthetic(6, Lengths("uniform", 100, 0.5), Lengths("fixed", 5), 3, shared_prefix=40)
    one, other = salted(load, 1), salted(load, 2)
    assert [(len(r.prompt), r.max_tokens) for r in one] == [(len(r.prompt), r.max_tokens) for r in load]
    assert salted(load, 1) == one
    assert len({r.prompt[:40] for r in one}) == 1
    assert not {r.prompt[:16] for r in one} & {r.prompt[:16] for r in other}
    assert [r.prompt[SALT_TOKENS:] for r in one] == [r.prompt[SALT_TOKENS:] for r in load]
    assert [len(r.prompt) for r in salted([LoadRequest((5,), 1)], 1)] == [1]


def test_an_infinite_rate_is_all_at_once():
    assert arrival_times("poisson", math.inf, 4, 0) == [0.0] * 4
    assert arrival_times("gamma", math.inf, 4, 0, 0.5) == [0.0] * 4
    with pytest.raises(ValueError, match="a ramp needs a rate"):
        arrival_times("ramp", math.inf, 4, 0)
    with pytest.raises(ValueError, match="--rate is nan"):
        arrival_times("poisson", math.nan, 4, 0)


def test_a_workload_without_times_can_not_keep_them():
    with pytest.raises(ValueError, match="--arrivals trace: the workload lognormal has no times"):
        timed(RunCommand(arrivals="trace"), make_requests(RunCommand(), 3, 0))
    with pytest.raises(ValueError, match="give --trace"):
        make_requests(RunCommand(workload="sharegpt"), 3, 0)


def search(capacity, first=1.0, max_trials=12, target=0.9):
    """A search over a server that attains everything up to `capacity` and falls off behind it."""
    found = GoodputSearch(first, max_trials, target)
    while (rate := found.next_rate()) is not None:
        attainment = 1.0 if rate <= capacity else max(0.0, 1.0 - (rate - capacity) / capacity)
        found.add(Trial(rate, round(1000 * attainment), 1000))
    return found


@pytest.mark.parametrize("capacity", [0.3, 1.0, 3.7, 40.0])
def test_the_search_finds_what_a_server_can_do(capacity):
    found = search(capacity)
    assert found.goodput == pytest.approx(1.1 * capacity, rel=0.1)  # where attainment is 90 %
    assert found.attained.rate <= found.goodput <= found.missed.rate


def test_a_search_that_is_cut_short_gives_a_lower_bound_and_one_that_never_attains_nothing():
    assert search(1e9, max_trials=3).goodput == 4.0
    assert search(1e9, max_trials=3).missed is None
    hopeless = GoodputSearch(1.0, 3)
    while (rate := hopeless.next_rate()) is not None:
        hopeless.add(Trial(rate, 0, 10))
    assert hopeless.goodput == 0.0


def test_the_interval_holds_the_goodput_and_shrinks_with_more_requests():
    def measured(offered):
        found = GoodputSearch(1.0, 9)
        for rate, share in ((1.0, 1.0), (2.0, 0.6), (1.4, 0.95), (1.7, 0.85)):
            found.add(Trial(rate, round(share * offered), offered))
        return found.goodput, found.interval()

    (goodput, wide), (_, narrow) = measured(40), measured(4000)
    assert 0 < wide[0] <= goodput <= wide[1]
    assert narrow[1] - narrow[0] < (wide[1] - wide[0]) / 3
    assert Trial(1.0, 3, 4) + Trial(1.0, 1, 4) == Trial(1.0, 4, 8)


def test_shares_are_smoothed_to_fall():
    assert falling([(10, 10), (8, 10), (9, 10), (2, 10)]) == pytest.approx([1.0, 0.85, 0.85, 0.2])
    assert falling([(1, 10), (10, 10)]) == pytest.approx([0.55, 0.55])
    assert falling([]) == []
    assert crossing([(1.0, 10, 10), (2.0, 8, 10)], 0.9) == pytest.approx(1.5)
    assert crossing([(1.0, 5, 10)], 0.9) == pytest.approx(0.2)
    assert crossing([(1.0, 0, 10)], 0.9) == crossing([], 0.9) == 0.0


def test_a_lucky_rate_above_one_that_missed_does_not_count():
    found = GoodputSearch(1.0, 9)
    for rate, met in ((1.0, 10), (2.0, 5), (4.0, 10)):
        found.add(Trial(rate, met, 10))
    assert (found.attained.rate, found.missed.rate) == (1.0, 2.0)
    # And an unlucky one below one that attained does not either, if all counts together attain it.
    found = GoodputSearch(1.0, 9)
    for rate, met in ((1.0, 88), (2.0, 99)):
        found.add(Trial(rate, met, 100))
    assert (found.attained.rate, found.missed, found.goodput, found.next_rate()) == (2.0, None, 2.0, 4.0)


def test_the_arms_of_a_comparison_are_matched():
    """Reads the plan: cores, pages, model, dtype, page size, lengths; and the load is the same for each."""
    arms = make_arms(2, [(1, 1)], [128, 512], pages_per_worker=1000)
    assert [a.name for a in arms] == ["2 colocated, budget 128", "2 colocated, budget 512", "1 prefill + 1 decode"]
    assert {a.cores for a in arms} == {arms[0].cores}
    assert {a.pages for a in arms} == {2000}
    for name in ("model", "dtype", "page_size", "max_model_len", "prefix_cache", "max_num_sequences"):
        assert len({getattr(a.cluster, name) for a in arms}) == 1
    assert [(a.cluster.num_prefill, a.cluster.num_decode, a.cluster.num_colocated) for a in arms] == [
        (0, 0, 2), (0, 0, 2), (1, 1, 0),
    ]  # fmt: skip
    for load in all_loads().values():
        one, other = load.requests(3.0, 5.0, 7), load.requests(3.0, 5.0, 7)
        assert one == other
        assert len(one) == 15
        assert all(len(r.prompt) + r.max_tokens <= 2048 for r in load.requests(20.0, 20.0, 1))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtype": "float32"}, "dtype: a has auto, b has float32"),
        ({"num_pages": 999}, "pages: a has 2000 in all, b has 1998"),
        ({"page_size": 32}, "page_size: a has 16, b has 32"),
    ],
)
def test_arms_that_are_not_matched_are_refused_with_both_values(changes, words):
    common = {"num_pages": 1000, "prefill": 1, "decode": 1}
    arms = [Arm("a", ClusterConfig(**common)), Arm("b", ClusterConfig(**(common | changes)))]
    with pytest.raises(NotMatched, match=words):
        check_matched(arms)


def test_a_split_that_needs_more_workers_is_refused():
    with pytest.raises(NotMatched, match=r"cores: .* has \d+ in all, .* has \d+"):
        make_arms(2, [(2, 1)], [512], pages_per_worker=1000)


def test_standard_loads_are_what_they_say():
    loads = standard_loads()
    lengths = [len(r.prompt) for r in loads["long-prompts"].make(500, 0)]
    assert np.mean(lengths) == pytest.approx(1000, rel=0.1)
