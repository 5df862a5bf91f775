"""The order of the router's queue, and its counts."""

from __future__ import annotations

import random

import pytest

from protos import worker_pb2 as wpb
from router.request import Request
from router.request_queue import RequestQueue
from router.validation import CheckedRequest


def make_request(name, num_tokens=10, priority=0):
    checked = CheckedRequest(
        name, (5,) * num_tokens, wpb.SamplingConfig(), wpb.StopConfig(), (), False, frozenset(), False, "", priority
    )
    return Request(checked, None, lambda: 0.0, random.Random(1))


def fill(*prompts, slowdown=0):
    """A queue, and its requests by name. prompts: (name, tokens, priority) in order of arrival."""
    queue, requests = RequestQueue(), {}
    for name, num_tokens, priority in prompts:
        requests[name] = make_request(name, num_tokens, priority)
        queue.admit(requests[name], slowdown)
    return queue, requests


def names(queue):
    return "".join(request.checked.request_id for request in queue.in_order())


@pytest.mark.parametrize(
    ("slowdown", "prompts", "expected"),
    [
        (0, [("a", 10, 0), ("b", 1, 0), ("c", 10, 0)], "abc"),
        (0, [("a", 10, 0), ("b", 10, 1), ("c", 10, -1), ("d", 10, 1)], "bdac"),
        (4, [("a", 100, 0), ("b", 10, 0)], "ba"),  # deadlines 400 and 100 + 40
        (4, [("a", 10, 0), ("b", 10, 0)], "ab"),
        (4, [("a", 20, 0), ("b", 100, 0), ("c", 10, 0)], "acb"),  # deadlines 80, 420 and 160
        (4, [("a", 100, 1), ("b", 10, 0)], "ab"),  # priority goes first
    ],
)
def test_order(slowdown, prompts, expected):
    assert names(fill(*prompts, slowdown=slowdown)[0]) == expected


def test_a_long_prompt_is_overtaken_by_a_bounded_number_of_tokens():
    long = make_request("a", 100)
    queue = RequestQueue()
    queue.admit(long, 4)
    for _ in range(100):
        queue.admit(make_request("b", 10), 4)
    # Its deadline is 400; those with an earlier one arrived within 400 - 40 tokens.
    assert queue.in_order().index(long) == 26


@pytest.mark.parametrize("slowdown", [0, 4])
def test_a_request_that_comes_back_goes_ahead_of_new_ones_but_not_of_a_higher_priority(slowdown):
    queue, requests = fill(("a", 100, 0), ("b", 1, 0), ("c", 1, 1), slowdown=slowdown)
    back = requests["a"]
    queue.remove(back)
    back.order = back.order._replace(is_new=False)
    queue.put_back(back)
    assert names(queue) == "cab"


def test_counts():
    queue, requests = fill(("a", 100, 0), ("b", 20, 0))
    assert (len(queue), queue.num_tokens) == (2, 120)
    requests["b"].output_token_ids = [7, 7]  # only the prompt counts
    queue.remove(requests["b"])
    assert (len(queue), queue.num_tokens) == (1, 100)
    assert requests["b"] not in queue
    assert requests["a"] in queue
    queue.put_back(requests["b"])
    assert (len(queue), queue.num_tokens) == (2, 120)


def test_in_order_is_a_copy():
    queue, requests = fill(("a", 10, 0), ("b", 10, 0))
    for request in queue.in_order():
        queue.remove(request)
    assert len(queue) == queue.num_tokens == 0
    assert requests["a"] not in queue
