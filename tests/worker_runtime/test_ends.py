"""Every end of a request is counted once, at every tier: `kvferry_worker_requests_total`."""

from __future__ import annotations

import pytest

from protos import worker_pb2
from tests.colocated_service.test_loop import Rig as ColocatedRig
from tests.decode_service.test_loop import Rig as DecodeRig
from tests.prefill_service.test_loop import Rig as PrefillRig
from tests.scripted import make_ref, num_ended
from worker_runtime.inbox import Drain, SessionClosed
from worker_runtime.metrics import ENDS

ENDING = 7
"""The token that every model here samples."""


class Prefill:
    tier = "prefill"

    def __init__(self):
        self.rig = PrefillRig()

    def begin(self, max_tokens=5, stop_ids=(), **options):
        self.rig.submit("r", [1] * 20, max_tokens=max_tokens, stop_ids=stop_ids, **options)
        self.rig.turn()

    def run(self):
        self.rig.turn_until(self.rig.is_at_rest)
        self.rig.transfers.stop()


class Decode:
    tier = "decode"

    def __init__(self):
        self.rig = DecodeRig()

    def begin(self, max_tokens=5, stop_ids=(), **options):
        stop = worker_pb2.StopConfig(max_tokens=max_tokens, stop_token_ids=stop_ids)
        self.rig.reserve(stop=stop, **options)
        self.rig.complete()

    def run(self):
        for _ in range(12):
            self.rig.loop.turn()


class Colocated:
    tier = "colocated"

    def __init__(self):
        self.rig = ColocatedRig()

    def begin(self, max_tokens=5, stop_ids=(), **options):
        stop = worker_pb2.StopConfig(max_tokens=max_tokens, stop_token_ids=stop_ids)
        self.rig.generate(token_ids=[1] * 20, stop=stop, **options)
        self.rig.turn()

    def run(self):
        for _ in range(12):
            self.rig.loop.turn()


TIERS = [Prefill, Decode, Colocated]


def abort(worker, is_complete=False):
    worker.rig.command(abort=worker_pb2.AbortCommand(ref=make_ref(), is_complete=is_complete))


def runs_out_of_tokens(worker):
    worker.begin()


def finds_a_stop_token(worker):
    worker.begin(stop_ids=[ENDING])


def has_a_stop_string(worker):
    worker.begin(max_tokens=30)
    abort(worker, is_complete=True)


def is_aborted(worker):
    worker.begin(max_tokens=30)
    abort(worker)


def loses_its_router(worker):
    worker.begin(max_tokens=30)
    worker.rig.inbox.put(SessionClosed(1))


def fails_in_a_step(worker):
    worker.begin(max_tokens=30)
    worker.rig.runner.fail = True
    worker.rig.turn()
    worker.rig.runner.fail = False


def has_broken_logits(worker):
    worker.rig.runner.broken = {1}
    worker.begin(max_tokens=30)


def is_drained_to_its_end(worker):
    worker.begin()
    worker.rig.inbox.put(Drain(hand_over=False))


def is_handed_over(worker):
    worker.begin(max_tokens=30)
    worker.rig.inbox.put(Drain(hand_over=True))


def aborts_at_the_owner(worker):
    worker.begin()
    worker.rig.revoke("r", lambda needs_fence: None)


def loses_its_connection(worker):
    worker.begin()
    worker.rig.transport.disconnect("d/1")


def prefill_gives_up(worker):
    worker.rig.reserve()
    worker.rig.hear(closed=True, close_reason="no power")


def ended_with_its_first_token(worker):
    worker.rig.reserve()
    worker.rig.hear(closed=True, ended_with_first_token=True)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize(
    ("happens", "expected"),
    [
        (runs_out_of_tokens, "finished"),
        (finds_a_stop_token, "finished"),
        (has_a_stop_string, "finished"),
        (is_aborted, "aborted"),
        (loses_its_router, "aborted"),
        (fails_in_a_step, "failed"),
        (has_broken_logits, "failed"),
        (is_drained_to_its_end, "finished"),
        (is_handed_over, "requeued"),
    ],
)
def test_a_request_that_was_taken_ends_once(tier, happens, expected):
    check(tier, happens, {expected: 1})


@pytest.mark.parametrize(
    ("tier", "happens", "expected"),
    [
        (Prefill, aborts_at_the_owner, {"aborted": 1}),
        (Prefill, loses_its_connection, {"failed": 1}),
        (Decode, prefill_gives_up, {"failed": 1}),
        (Decode, ended_with_its_first_token, {"finished": 1}),
    ],
)
def test_an_end_that_only_one_tier_has(tier, happens, expected):
    check(tier, happens, expected)


def check(tier, happens, expected):
    worker = tier()
    happens(worker)
    worker.run()
    counted = {end: num_ended(worker.rig.metrics, worker.tier, end) for end in ENDS}
    assert {end: number for end, number in counted.items() if number} == expected
    owners = worker.rig.loop.page_owners()
    assert worker.rig.pool.check(owners.tables, owners.reads, owners.writes) == [], "pages add up afterwards"
    assert worker.rig.pool.counts().held == 0


def test_a_request_that_is_not_taken_is_refused():
    for invalid in ({"num_prompt_tokens": 0}, {"stop": worker_pb2.StopConfig(max_tokens=0)}):
        for tier in (DecodeRig, ColocatedRig):
            rig = tier()
            (rig.reserve if tier is DecodeRig else rig.generate)(**invalid)
            rig.turn()
            name = "decode" if tier is DecodeRig else "colocated"
            assert [num_ended(rig.metrics, name, end) for end in ENDS] == [0, 0, 0, 0, 0, 1]


def test_a_draining_worker_refuses():
    rig = DecodeRig()
    rig.reserve("old")
    rig.inbox.put(Drain(hand_over=False))
    rig.reserve("new")
    assert num_ended(rig.metrics, "decode", "refused") == 1
    prefill = PrefillRig()
    prefill.submit("old", [1] * 20)
    prefill.turn()
    prefill.inbox.put(Drain(hand_over=False))
    prefill.submit("new", [1] * 3)
    while prefill.loop.turn():
        pass
    assert num_ended(prefill.metrics, "prefill", "refused") == 1
    assert num_ended(prefill.metrics, "prefill", "finished") == 1
    prefill.transfers.stop()


@pytest.mark.parametrize("tier", [Prefill, Colocated])
def test_a_prompt_that_is_too_late_has_failed(tier):
    worker = tier()
    worker.begin(max_tokens=40)
    token_ids = [2] * 20
    if tier is Prefill:
        worker.rig.submit("late", token_ids, deadline_ms=1)
    else:
        worker.rig.generate("late", token_ids, deadline_ms=1)
    worker.rig.turn()
    worker.rig.clock.advance(1.0)
    worker.rig.turn()
    assert num_ended(worker.rig.metrics, worker.tier, "failed") == 1
    if tier is Prefill:
        worker.run()


def test_a_preempted_sequence_leaves_a_decode_worker_and_stays_at_a_colocated_one():
    decode = DecodeRig(num_pages=7)
    for _ in range(20):
        decode.loop.scheduler.lengths.learn(2, 20)
    for name in "abc":
        decode.reserve(name, token_ids=(ord(name) % 40,) * 7, max_tokens=20)
    for name in "abc":
        decode.complete(name, pages=2)
    for _ in range(3):
        decode.turn()
    assert num_ended(decode.metrics, "decode", "preempted") == 1
    colocated = ColocatedRig(num_pages=6, token_budget=20)
    for _ in range(20):
        colocated.loop.scheduler.decodes.lengths.learn(2, 12)
    for name in "abc":
        colocated.generate(name, token_ids=(ord(name) % 40,) * 7, max_tokens=12)
    colocated.turn(60)
    assert num_ended(colocated.metrics, "colocated", "preempted") == 0
    assert num_ended(colocated.metrics, "colocated", "finished") == 3
