"""Which pair serves a request: each function of the policy by itself, on links whose state is set by hand."""

from __future__ import annotations

import dataclasses
import random

import pytest

from kv_transfer.request_ref import RequestRef
from protos import worker_pb2 as wpb
from router import policy
from router.request import Request
from router.validation import CheckedRequest
from router.worker_link import Leg
from router.worker_pool import Pair
from rpc.prompt_order import Order
from tests.router.rig import make_link

KEYS = tuple(bytes([n]) * 16 for n in range(3))


def make_request(num_tokens=20, max_tokens=10, **checked):
    stop = wpb.StopConfig(max_tokens=max_tokens)
    base = CheckedRequest("r", (5,) * num_tokens, wpb.SamplingConfig(), stop, (), False, frozenset(), False, "", 0)
    return Request(dataclasses.replace(base, **checked), None, lambda: 0.0, random.Random(1))


def make_pair(**load):
    """An idle prefill worker and a decode worker with this load."""
    pair = Pair(make_link(wpb.TIER_PREFILL, "p"), make_link(wpb.TIER_DECODE, "d"))
    for name, value in load.items():
        setattr(pair.decode.load, name, value)
    return pair


def bind(link, num_tokens=20, number=1, computes_prompt=True, generates=False, arrival=0, **leg):
    """A leg of another request, all of whose tokens are uncached."""
    order = Order(0, True, 0, arrival)
    bound = Leg(link, RequestRef(f"leg-{len(link.legs)}", 0), order, computes_prompt, generates, num_tokens, num_tokens)
    link.bind(dataclasses.replace(bound, **leg), number)


class TestCanServe:
    @pytest.mark.parametrize(
        ("num_tokens", "max_tokens", "vocab_size", "decode_pages", "expected"),
        [
            (20, 10, 100, 400, True),
            (20, 10, 101, 400, False),  # a token id that the model does not have
            (64, 36, 100, 400, True),  # 100 tokens, the model's limit
            (64, 37, 100, 400, False),
            (65, 10, 100, 400, False),  # 5 pages at prefill, which has 4
            (20, 77, 100, 6, True),  # 97 tokens in 6 pages of 16: the KV of the last token is never computed
            (20, 78, 100, 6, False),
        ],
    )
    def test_limits(self, num_tokens, max_tokens, vocab_size, decode_pages, expected):
        pair = make_pair()
        pair.prefill.info.limits.MergeFrom(wpb.WorkerLimits(num_pages=4, max_model_len=100, vocab_size=100))
        pair.decode.info.limits.num_pages = decode_pages
        assert policy.can_serve(make_request(num_tokens, max_tokens, vocab_size=vocab_size), pair) is expected

    def test_output_of_one_model_is_not_continued_by_another(self):
        pair, request = make_pair(), make_request()
        request.model_hashes = ("config", "other weights", "none")
        pair.prefill.info.fingerprint.model_config_hash = "config"
        pair.prefill.info.fingerprint.weights_hash = "weights"
        pair.prefill.info.fingerprint.quantization = "none"
        assert policy.can_serve(request, pair)
        request.output_token_ids = [7]
        assert not policy.can_serve(request, pair)
        request.model_hashes = ("config", "weights", "int8")
        assert not policy.can_serve(request, pair)
        request.model_hashes = ("config", "weights", "none")
        assert policy.can_serve(request, pair)


@pytest.mark.parametrize(
    ("page_keys", "page_size", "cached", "expected"),
    [
        (KEYS, 16, KEYS, 48),
        (KEYS, 16, KEYS[:2], 32),
        (KEYS, 16, KEYS[1:], 0),  # only pages from the beginning count
        (KEYS, 16, (), 0),
        (KEYS, 32, KEYS, 0),  # keys of pages of another size
        ((), 16, KEYS, 0),
    ],
)
def test_cached_tokens(page_keys, page_size, cached, expected):
    link, request = make_link(wpb.TIER_PREFILL, "p"), make_request(52, page_keys=page_keys, page_size=page_size)
    link.cached_pages = set(cached)
    assert policy.cached_tokens(link, request) == expected
    assert policy.uncached_tokens(link, request) == 52 - expected
    link.closed()
    assert policy.cached_tokens(link, request) == 0


def test_the_last_token_of_a_prompt_is_never_cached():
    link = make_link(wpb.TIER_PREFILL, "p")
    link.cached_pages = set(KEYS)
    assert policy.uncached_tokens(link, make_request(48, page_keys=KEYS, page_size=16)) == 1


@pytest.mark.parametrize(
    ("leg", "expected"),
    [
        ({}, 35),  # not sent yet
        ({"prompt_number": 3}, 35),  # sent after the load report was made
        ({"prompt_number": 2}, 15),  # in the load report
        ({"has_token": True}, 15),
        ({"num_uncached_tokens": 4}, 19),
    ],
)
def test_pending_tokens_are_the_reported_ones_and_those_not_reported_yet(leg, expected):
    link = make_link(wpb.TIER_PREFILL, "p")
    link.reported(wpb.LoadReport(queued_tokens=10, running_tokens=5, num_prompts_received=2))
    bind(link, 20, **leg)
    assert policy.pending_tokens(link) == expected


@pytest.mark.parametrize(
    ("slowdown", "expected"),
    [
        (0, 1000 + 20 + 30),  # in order of arrival: whatever the worker has
        (4, 20),  # only legs whose order is before the request's
    ],
)
def test_work_before(slowdown, expected):
    link, request = make_link(wpb.TIER_PREFILL, "p"), make_request()
    link.info.limits.slowdown = slowdown
    link.load.queued_tokens = 1000
    request.order = Order(0, True, 0, 5)
    bind(link, 20, arrival=4)
    bind(link, 30, arrival=6)
    bind(link, 40, arrival=3, has_token=True)
    assert policy.work_before(link, request) == expected


class TestFilter:
    """Workers with a token budget of 64, and 2 sequences at most."""

    @pytest.mark.parametrize(
        ("legs", "expected"),
        [
            ([], True),
            ([{"num_tokens": 63}], True),
            ([{"num_tokens": 64}], False),  # a step of work
            ([{}, {}], False),  # no sequence left
            ([{}, {"has_token": True}], True),  # its prompt is computed
            ([{}, {"has_token": True, "generates": True}], False),  # a colocated worker still generates
        ],
    )
    def test_prefill(self, legs, expected):
        pair, request = make_pair(), make_request()
        pair.prefill.info.limits.max_num_sequences = 2
        for leg in legs:
            bind(pair.prefill, **leg)
        assert policy.filter_pairs(request, [pair]) == ([pair] if expected else [])

    def test_a_decode_worker_that_refused_is_left_out_until_it_reports(self):
        pairs = full, free = [make_pair(), make_pair()]
        full.decode.no_room()
        assert policy.filter_pairs(make_request(), pairs) == [free]
        full.decode.reported(wpb.LoadReport())
        assert policy.filter_pairs(make_request(), pairs) == pairs


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        ({"free_pages": 10}, 160),
        ({"free_pages": 10, "cached_pages": 5}, 240),
        ({"free_pages": 10, "expected_growth_pages": 4}, 96),
        ({"free_pages": 1, "expected_growth_pages": 4}, 16),  # it refused nothing, so a page at least
        ({"free_pages": 10, "num_sequences": 63}, 160),
        ({"free_pages": 10, "num_sequences": 64}, 0),
    ],
)
def test_decode_room(load, expected):
    pair = make_pair(**load)
    other_prefill = pair._replace(prefill=make_link(wpb.TIER_PREFILL, "q"))
    assert policy.decode_room([pair, other_prefill]) == expected, "a worker of two pairs counts once"
    pair.decode.no_room()
    assert policy.decode_room([pair]) == 0


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        ({"free_pages": 400}, 0.0),
        ({"free_pages": 100}, 0.75),
        ({"free_pages": 100, "cached_pages": 100}, 0.5),
        ({"free_pages": 100, "cached_pages": 100, "expected_growth_pages": 100}, 0.75),
    ],
)
def test_pages_taken(load, expected):
    assert policy.pages_taken(make_pair(**load).decode) == expected


class TestScore:
    def test_tokens_to_compute_before_the_first_token(self):
        pair = make_pair()
        pair.prefill.load.queued_tokens = 100
        pair.prefill.cached_pages = set(KEYS)
        [(rank, scored)] = policy.score(make_request(52, page_keys=KEYS, page_size=16), [pair])
        assert (rank, scored) == ((104, 0.0), pair)

    @pytest.mark.parametrize(
        ("legs", "cached", "expected"),
        [
            ([], (), 0.5),
            ([{"num_tokens": 65, "is_reserving": True}], (), 0.5 + 5 / 400),  # 5 pages that no report has yet
            ([{"num_tokens": 65}], (), 0.5),
            ([], KEYS[:2], 0.5 - 2 / 400),
        ],
    )
    def test_share_of_pages_at_decode(self, legs, cached, expected):
        pair = make_pair(free_pages=200)
        pair.decode.cached_pages = set(cached)
        for leg in legs:
            bind(pair.decode, computes_prompt=False, generates=True, **leg)
        [(rank, _)] = policy.score(make_request(52, page_keys=KEYS, page_size=16), [pair])
        assert rank == (52, pytest.approx(expected))

    def test_round_robin_is_by_the_last_binding(self):
        pair = make_pair(free_pages=1)
        bind(pair.prefill, 500, number=3)
        bind(pair.decode, number=7)
        assert policy.score_turns([pair]) == [((3, 7), pair)]


def test_pick_is_one_of_the_best_and_each_of_them_at_times():
    pairs = [make_pair() for _ in range(3)]
    scored = [((1, 0.5), pairs[0]), ((2, 0.1), pairs[1]), ((1, 0.5), pairs[2])]
    rng = random.Random(1)
    picked = [policy.pick(scored, rng) for _ in range(50)]
    assert all(pair in (pairs[0], pairs[2]) for pair in picked)
    assert pairs[0] in picked
    assert pairs[2] in picked
    assert policy.pick([], rng) is None


@pytest.mark.parametrize(("routing", "expected"), [("cache_aware", 1), ("round_robin", 0)])
def test_choose_pair(routing, expected):
    pairs = [make_pair(), make_pair()]
    pairs[0].prefill.load.queued_tokens = 30
    bind(pairs[1].prefill, 1)
    chosen = policy.choose_pair(make_request(), pairs, random.Random(1), routing)
    assert chosen is pairs[expected]
    for pair in pairs:
        pair.decode.no_room()
    assert policy.choose_pair(make_request(), pairs, random.Random(1), routing) is None


@pytest.mark.parametrize(
    ("rates", "pending", "queued", "expected"),
    [
        ((0, 0), 0, 0, None),
        ((100, 0), 0, 0, 1.0),  # one worker computes the prompt of 100 tokens
        ((100, 300), 0, 0, 100 / 300),
        ((100, 300), 0, 400, 400 / 400 + 100 / 300),  # all workers share the work before it
        ((100, 300), 200, 200, 400 / 400 + 100 / 300),
    ],
)
def test_seconds_to_first_token(rates, pending, queued, expected):
    pairs = [make_pair() for _ in rates]
    for pair, rate in zip(pairs, rates, strict=True):
        pair.prefill.load.tokens_per_second = rate
    pairs[0].prefill.load.running_tokens = pending
    pairs.append(pairs[0]._replace(decode=pairs[1].decode))  # a prefill worker of two pairs counts once
    assert policy.seconds_to_first_token(100, queued, pairs) == (expected and pytest.approx(expected))
