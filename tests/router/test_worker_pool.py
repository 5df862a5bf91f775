"""Pairs are ready after test pages came as they were sent; workers that drain or fail get nothing new."""

from __future__ import annotations

import random

import pytest

from protos import worker_pb2 as wpb
from router.pairing import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, TEST_SECONDS
from router.request import RequestState
from router.worker_link import WorkerLink
from router.worker_pool import WorkerPool, WorkerRefused
from tests.router.rig import Rig, make_link
from tests.scripted import FakeClock


class PairRig:
    """Workers that have just connected."""

    def __init__(self, prefill=1, decode=1):
        self.clock = FakeClock()
        self.changes = 0
        self.pool = WorkerPool("hash", self.clock, random.Random(1), None, lambda link: None, self.change)
        self.prefill = [self.connect(wpb.TIER_PREFILL, f"p{i}") for i in range(prefill)]
        self.decode = [self.connect(wpb.TIER_DECODE, f"d{i}") for i in range(decode)]

    def change(self):
        self.changes += 1

    def connect(self, tier, name):
        link = self.pool.add(f"{name}:1", tier)
        self.open(link)
        return link

    def open(self, link):
        info = make_link(link.tier, link.address.split(":")[0], tokenizer="hash").info
        self.pool.receive(link, wpb.SessionResponse(info=info))

    def asked(self, prefill):
        """The tests that a prefill worker was asked for since the last call."""
        commands = []
        while not prefill.commands.empty():
            commands.append(prefill.commands.get_nowait())
        return [command.connect_peer for command in commands if command.HasField("connect_peer")]

    def tested(self, prefill, decode, test_id, equal=True, reason=""):
        event = wpb.PairTestedEvent(writer_agent_name=prefill.agent_name, test_id=test_id, equal=equal, reason=reason)
        self.pool.receive(decode, wpb.SessionResponse(pair_tested=event))

    def peer_failed(self, prefill, decode, reason):
        event = wpb.PeerEvent(agent_name=decode.agent_name, reason=reason)
        self.pool.receive(prefill, wpb.SessionResponse(peer=event))


def test_a_pair_is_ready_when_its_test_pages_came():
    rig = PairRig()
    [p], [d] = rig.prefill, rig.decode
    [asked] = rig.asked(p)
    rig.tested(p, d, "another router's")
    assert rig.pool.ready_pairs() == []
    changes = rig.changes
    rig.tested(p, d, asked.test_id)
    assert rig.pool.ready_pairs() == [(p, d)]
    assert rig.changes == changes + 1
    rig.tested(p, d, asked.test_id, equal=False)
    assert rig.pool.ready_pairs() == [(p, d)], "the same test can't fail afterwards"


@pytest.mark.parametrize("what", ["changed pages", "silence", "a transport error", "an address"])
def test_a_test_that_fails_is_done_again_and_told_in_words(what):
    rig = PairRig()
    [p], [d] = rig.prefill, rig.decode
    [first] = rig.asked(p)
    words = {
        "changed pages": "as they were sent", "silence": f"within {TEST_SECONDS:.1f} s",
        "a transport error": "no route", "an address": "it does not respond at p:1",
    }  # fmt: skip
    match what:
        case "changed pages":
            rig.tested(p, d, first.test_id, equal=False)
        case "an address":
            rig.tested(p, d, first.test_id, reason="it does not respond at p:1")
        case "a transport error":
            rig.peer_failed(p, d, "no route")
        case "silence":
            rig.clock.advance(TEST_SECONDS)
    assert rig.asked(p) == [], "not at once"
    assert words[what] in rig.pool.why_not_ready()
    rig.clock.advance(1.5 * FIRST_PAUSE_SECONDS)
    [second] = rig.asked(p)
    assert second.test_id != first.test_id
    rig.tested(p, d, first.test_id)
    assert rig.pool.ready_pairs() == []
    rig.tested(p, d, second.test_id)
    assert rig.pool.ready_pairs() == [(p, d)]
    assert p.pair_reason == ""


def test_pauses_between_tests_grow_to_a_limit():
    rig = PairRig()
    [p], [d] = rig.prefill, rig.decode
    for _ in range(8):
        [asked] = rig.asked(p)
        rig.tested(p, d, asked.test_id, equal=False)
        [timer] = rig.clock.later
        pause = timer.due - rig.clock.now()
        rig.clock.advance(pause)
    assert 0.5 * LONGEST_PAUSE_SECONDS <= pause <= 1.5 * LONGEST_PAUSE_SECONDS


def test_a_busy_prefill_worker_has_more_time():
    rig = PairRig()
    [p] = rig.prefill
    rig.asked(p)
    rig.pool.receive(p, wpb.SessionResponse(load=wpb.LoadReport(step_ms=2000)))
    rig.clock.advance(TEST_SECONDS + 1.5 * FIRST_PAUSE_SECONDS)
    assert len(rig.asked(p)) == 1, "the test that ran had the time of an idle worker"
    rig.clock.advance(TEST_SECONDS + 7.9)
    assert rig.asked(p) == []


def test_tests_towards_one_decode_worker_do_not_come_across_each_other():
    rig = PairRig(prefill=2)
    first, second = rig.prefill
    [d] = rig.decode
    [asked] = rig.asked(first)
    assert rig.asked(second) == []
    rig.tested(first, d, asked.test_id)
    [asked] = rig.asked(second)
    rig.tested(second, d, asked.test_id)
    assert len(rig.pool.ready_pairs()) == 2


@pytest.mark.parametrize("who", ["decode", "the prefill worker under test", "the prefill worker that waits"])
def test_a_session_that_blips_while_pairs_are_tested_loses_no_pair(who):
    rig = PairRig(prefill=2)
    [d] = rig.decode
    blips = {"decode": d, "the prefill worker under test": rig.prefill[0]}.get(who, rig.prefill[1])
    stale = rig.asked(rig.prefill[0])
    rig.pool.close(blips)
    rig.open(blips)  # the same incarnation, connected again
    for _ in range(20):
        rig.clock.advance(0.1)
        for prefill in rig.prefill:
            for asked in rig.asked(prefill):
                rig.tested(prefill, d, asked.test_id)
    if len(rig.pool.ready_pairs()) < 2:  # the test that ran when the other session broke
        rig.tested(rig.prefill[0], d, stale[0].test_id)
        for asked in rig.asked(rig.prefill[1]):
            rig.tested(rig.prefill[1], d, asked.test_id)
    assert len(rig.pool.ready_pairs()) == 2


def test_a_pair_that_breaks_is_tested_again():
    """Casebook C095, C113: not for ever, and only that pair."""
    rig = PairRig(decode=2)
    [p] = rig.prefill
    for asked in rig.asked(p):
        decode = next(d for d in rig.decode if d.agent_name == asked.endpoint.agent_name)
        rig.tested(p, decode, asked.test_id)
    assert len(rig.pool.ready_pairs()) == 2
    rig.peer_failed(p, rig.decode[0], "cut")
    assert rig.pool.ready_pairs() == [(p, rig.decode[1])]
    [asked] = rig.asked(p)
    rig.tested(p, rig.decode[0], asked.test_id)
    assert len(rig.pool.ready_pairs()) == 2


def test_a_decode_worker_that_is_gone_is_forgotten_by_all_prefill_workers():
    rig = PairRig(prefill=2)
    agent_name = rig.decode[0].agent_name
    rig.pool.close(rig.decode[0])
    for prefill in rig.prefill:
        commands = []
        while not prefill.commands.empty():
            commands.append(prefill.commands.get_nowait())
        kinds = [command.WhichOneof("command") for command in commands]
        assert kinds[-1] == "forget_peer", "and no test is begun towards it"
        assert commands[-1].forget_peer.agent_name == agent_name
        assert kinds.count("connect_peer") == (1 if prefill is rig.prefill[0] else 0)
    assert rig.clock.later == [], "no test is waited for"


def test_workers_whose_pages_differ_are_not_paired():
    rig = PairRig(decode=0)
    link = rig.pool.add("d0:1", wpb.TIER_DECODE)
    info = make_link(wpb.TIER_DECODE, "d0", tokenizer="hash").info
    info.fingerprint.page_size = 32
    rig.pool.receive(link, wpb.SessionResponse(info=info))
    assert rig.asked(rig.prefill[0]) == []
    assert "not paired: prefill and decode differ in page_size" in rig.pool.why_not_ready()


@pytest.mark.parametrize(
    ("tier", "tokenizer", "words"),
    [
        (wpb.TIER_PREFILL, "hash", "it is a prefill worker, expected was decode"),
        (wpb.TIER_DECODE, "other", "its tokenizer differs from the router's"),
    ],
)
def test_a_worker_that_must_not_be_used_is_refused(tier, tokenizer, words):
    """Casebook C148: somebody else took the address."""
    rig = PairRig(decode=0)
    link = rig.pool.add("d0:1", wpb.TIER_DECODE)
    with pytest.raises(WorkerRefused, match=words):
        rig.pool.receive(link, wpb.SessionResponse(info=make_link(tier, "x", tokenizer=tokenizer).info))


def test_a_links_state_says_what_became_of_its_session():
    link = WorkerLink("d0:1", wpb.TIER_DECODE)
    link.lost("UNAVAILABLE: connection refused")
    assert link.state == "connecting", "what was never there is not lost"
    link.opened(make_link(wpb.TIER_DECODE, "d0").info)
    assert repr(link) == "<decode worker d0: ready, 0 legs>"
    link.lost("the worker ended the session")
    assert (link.state, link.reason) == ("lost", "the worker ended the session")
    link.closed()
    link.lost("UNAVAILABLE: connection refused")
    assert link.state == "connecting", "it is waited for again"


def state(rig, link, value, **fields):
    rig.event(link, state=wpb.WorkerStateEvent(state=value, **fields))


def test_a_draining_worker_keeps_what_it_has_and_gets_nothing_new():
    rig = Rig(decode=2)
    running = rig.submit()
    rig.reserved(running, running.decode)
    draining = running.decode
    state(rig, draining, wpb.WORKER_STATE_DRAINING, reason="it was told to end")
    assert running.state is RequestState.RUNNING
    others = [rig.submit(num_tokens=5) for _ in range(4)]
    assert all(r.decode is not draining for r in others)
    assert draining.state == "draining"


def test_requests_of_a_stuck_worker_continue_elsewhere_and_it_may_recover():
    rig = Rig(decode=2)
    request = rig.submit()
    stuck = request.decode
    rig.reserved(request, stuck)
    rig.tokens(request, rig.prefill[0], 0, 11)
    state(rig, stuck, wpb.WORKER_STATE_FAULTY, reason="the engine has stood for 60 s", is_stuck=True)
    assert request.attempt == 1
    assert request.decode is not stuck
    assert "abort" in rig.kinds(stuck), "when it wakes up, it must not go on with it"
    rig.submit(num_tokens=5)
    state(rig, stuck, wpb.WORKER_STATE_READY)
    assert any(stuck in pair for pair in rig.dispatcher.pool.ready_pairs())
