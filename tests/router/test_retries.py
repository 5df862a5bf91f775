"""What a cause means for a request, when it is given up, and how long it pauses."""

from __future__ import annotations

import random

import pytest

from protos import worker_pb2 as wpb
from router.retries import (
    CONSEQUENCES,
    FIRST_REST_SECONDS,
    LONGEST_REST_SECONDS,
    MAX_FRUITLESS_ATTEMPTS,
    NOT_NOW,
    UNKNOWN,
    Retries,
)
from rpc.errors import DeadlineExceeded, Internal, Refused, Unavailable

LOSS_SECONDS = 5.0
MOST = MAX_FRUITLESS_ATTEMPTS


@pytest.mark.parametrize(
    ("cause", "error", "limit", "counted_as"),
    [
        (wpb.CAUSE_NO_PAGES, Unavailable, "none", "preempted"),
        (wpb.CAUSE_DRAINING, Unavailable, "none", "draining"),
        (wpb.CAUSE_STEP_FAILED, Internal, "attempts", "leg_failed"),
        (wpb.CAUSE_TRANSFER_FAILED, Unavailable, "time", "leg_failed"),
        (wpb.CAUSE_NOT_FINITE, Internal, None, "leg_failed"),
        (wpb.CAUSE_DEADLINE, DeadlineExceeded, None, "leg_failed"),
        (wpb.CAUSE_INVALID, Refused, None, "leg_failed"),
        (wpb.CAUSE_UNSPECIFIED, Internal, "attempts", "leg_failed"),
    ],
)
def test_consequences(cause, error, limit, counted_as):
    consequence = CONSEQUENCES.get(cause, UNKNOWN)
    assert (consequence.error, consequence.limit, consequence.counted_as) == (error, limit, counted_as)


def test_every_cause_of_the_protocol_has_a_consequence_or_is_no_fault():
    causes = set(wpb.Cause.values()) - {wpb.CAUSE_UNSPECIFIED}
    assert causes - NOT_NOW <= set(CONSEQUENCES)


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        ([], False),
        ([("attempts", 0.0)] * (MOST - 1), False),
        ([("attempts", 0.0)] * MOST, True),
        ([("none", 0.0)] * (2 * MOST), False),
        ([("time", 0.0)] * (2 * MOST), False),  # many, but within no time
        ([("time", 0.0), ("time", 100.0)], False),  # long, but few
        ([("time", 0.0)] * (MOST - 1) + [("time", LOSS_SECONDS)], True),
        ([("time", 0.0)] * (MOST - 1) + [("time", LOSS_SECONDS - 0.1)], False),
        ([("attempts", 0.0)] * (MOST - 1) + [("time", 100.0)] * (MOST - 1), False),  # each kind counts by itself
    ],
)
def test_when_a_request_is_given_up(failures, expected):
    retries = Retries()
    for limit, now in failures:
        retries.failed(limit, now)
    assert retries.is_hopeless(LOSS_SECONDS) is expected
    retries.brought_token()
    assert not retries.is_hopeless(LOSS_SECONDS)


def test_pauses_double_up_to_a_limit_and_a_token_ends_them():
    retries, rng = Retries(), random.Random(1)
    pauses = [retries.begin("attempts", rng) for _ in range(12)]
    assert pauses[0] == 0.0
    for number, pause in enumerate(pauses[1:]):
        middle = min(FIRST_REST_SECONDS * 2**number, LONGEST_REST_SECONDS)
        assert 0.5 * middle <= pause <= 1.5 * middle
    retries.brought_token()
    assert (retries.number, retries.begin("attempts", rng)) == (0, 0.0)


def test_requests_that_failed_together_do_not_come_back_together():
    pauses = set()
    for seed in range(10):
        retries, rng = Retries(number=5), random.Random(seed)
        pauses.add(retries.begin("time", rng))
    assert len(pauses) == 10


def test_without_a_fault_there_is_no_pause():
    retries = Retries()
    assert [retries.begin("none", random.Random(1)) for _ in range(3)] == [0.0] * 3
    assert retries.number == 3
