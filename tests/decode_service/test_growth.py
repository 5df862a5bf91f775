"""Forecasts of answer lengths."""

from __future__ import annotations

import random

from decode_service.growth import FEWEST, HIGHEST_QUANTILE, LOWEST_QUANTILE, REMEMBERED, OutputLengths


def test_nothing_known_means_the_longest_answer():
    lengths = OutputLengths()
    for _ in range(FEWEST - 1):
        lengths.learn(5, 100)
    assert lengths.forecast(0, 100) == 100
    lengths.learn(5, 100)
    assert lengths.forecast(0, 100) == 5


def test_forecasts_are_for_answers_that_got_so_far_and_of_the_same_class():
    lengths = OutputLengths()
    for length in [10] * 30 + [90] * 10:
        lengths.learn(length, 100)
    assert lengths.forecast(0, 100) in (10, 90)
    assert lengths.forecast(10, 100) == 90
    assert lengths.forecast(95, 100) == 100, "longer than all that were seen"
    assert lengths.forecast(10, 80) == 80, "never more than is allowed"
    assert lengths.forecast(0, 1000) == 1000, "another class, of which nothing is known"


def test_old_lengths_are_forgotten():
    lengths = OutputLengths()
    for length in [500] * 50 + [10] * REMEMBERED:
        lengths.learn(length, 1000)
    assert lengths.forecast(0, 1000) == 10
    assert lengths.forecast(10, 1000) == 1000
    assert len(lengths._sorted[(1000).bit_length()]) == REMEMBERED


def test_running_out_raises_the_reserve_and_quiet_times_lower_it():
    lengths = OutputLengths()
    rng = random.Random(0)
    for _ in range(200):
        lengths.learn(rng.randint(1, 100), 100)
    before = lengths.forecast(0, 100)
    for _ in range(10):
        lengths.ran_out()
    raised = lengths.forecast(0, 100)
    assert before < raised
    assert lengths.quantile <= HIGHEST_QUANTILE
    for _ in range(2000):
        lengths.learn(rng.randint(1, 100), 100)
    assert lengths.forecast(0, 100) < raised
    assert lengths.quantile >= LOWEST_QUANTILE
