"""The measured rate of computing prompts."""

from __future__ import annotations

import pytest

from worker_runtime.rate import SMOOTHING, Rate


def measured(*steps):
    rate = Rate()
    for step in steps:
        rate.add(*step)
    return rate


@pytest.mark.parametrize(
    ("steps", "tokens_per_second", "step_seconds"),
    [
        ([], None, 0.0),
        ([(100, 0.5)], 200.0, 0.5),
        ([(100, 0.5), (100, 0.25)], 200.0 + SMOOTHING * 200.0, 0.5 - SMOOTHING * 0.25),
        ([(100, 0.0)], None, 0.0),  # no time passed
        ([(100, 0.5, False)], None, 0.0),  # launched only
        ([(100, 0.1, False), (100, 0.4)], 400.0, 0.25),  # a launched step counts with the next one that is waited for
        ([(10, 0.5, True, 64)], None, 0.0),  # too few tokens
        ([(64, 0.5, True, 64)], 128.0, 0.5),
        ([(100, 0.5), (10, 0.5, True, 64)], 200.0, 0.5),
        ([(10, 0.5, True, 64), (100, 0.5)], 200.0, 0.5),  # tokens of a step that says little are forgotten
    ],
)
def test_rate_and_step_time(steps, tokens_per_second, step_seconds):
    rate = measured(*steps)
    assert rate.tokens_per_second == (tokens_per_second and pytest.approx(tokens_per_second))
    assert rate.step_seconds == pytest.approx(step_seconds)


@pytest.mark.parametrize(("steps", "expected"), [([], 0.0), ([(100, 0.5)], 1.5)])
def test_seconds_for(steps, expected):
    assert measured(*steps).seconds_for(300) == expected


def test_it_approaches_a_new_rate():
    rate = measured((100, 1.0), *[(100, 0.1)] * 30)
    assert rate.tokens_per_second == pytest.approx(1000, rel=0.01)
    assert rate.step_seconds == pytest.approx(0.1, rel=0.02)
