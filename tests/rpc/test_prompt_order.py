"""The order of prompts, shared by routers and workers."""

from __future__ import annotations

import pytest

from rpc.prompt_order import SLOWDOWN, Arrivals, Order


def test_fcfs_is_no_slowdown():
    assert SLOWDOWN["fcfs"] == 0
    assert SLOWDOWN["bounded_slowdown"] > 0


@pytest.mark.parametrize(
    ("slowdown", "deadlines"),
    [
        (0, [0, 0, 0]),
        (1, [10, 10 + 5, 15 + 20]),  # tokens that arrived before, and once its own length
        (4, [40, 10 + 20, 15 + 80]),
    ],
)
def test_virtual_deadlines(slowdown, deadlines):
    arrivals = Arrivals()
    orders = [arrivals.order(num_tokens, 0, slowdown) for num_tokens in (10, 5, 20)]
    assert [order.virtual_deadline for order in orders] == deadlines
    assert [order.arrival for order in orders] == [0, 1, 2]


def test_tokens_count_as_arrived_whatever_the_slowdown_was():
    arrivals = Arrivals()
    arrivals.order(10, 0, slowdown=0)
    assert arrivals.order(5, 0, slowdown=4).virtual_deadline == 10 + 4 * 5


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"priority": 1, "is_new": True}, {"priority": 0, "is_new": False}),
        ({"is_new": False}, {"is_new": True}),
        ({"num_tokens": 1}, {"num_tokens": 2}),
        ({"priority": 0}, {"priority": -1}),
    ],
)
def test_what_goes_first(first, second):
    """Priority, then requests that a worker had before, then the virtual deadline; whoever arrived earlier."""

    def order(arrivals, num_tokens=10, priority=0, is_new=True):
        return arrivals.order(num_tokens, priority, 4, is_new)

    one, other = Arrivals(), Arrivals()
    assert order(one, **first) < order(one, **second)
    later, earlier = order(other, **second), order(other, **first)
    assert ("num_tokens" in first) or earlier < later


def test_equal_prompts_go_in_order_of_arrival():
    assert Order(0, True, 0, 1) < Order(0, True, 0, 2)
    arrivals = Arrivals()
    assert arrivals.order(10, 0, 0) < arrivals.order(1, 0, 0)
