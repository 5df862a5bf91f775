"""Pairs are ready after test pages came as they were sent; workers that drain, fail or fall silent get nothing new."""

from __future__ import annotations

import asyncio

import pytest

from protos import worker_pb2 as wpb
from protos import worker_pb2_grpc
from router import worker_pool
from router.request import RequestState
from router.worker_pool import WorkerPool
from rpc.server import RpcServer
from tests.router.rig import Rig, make_link


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(worker_pool, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(worker_pool, "PROBE_SECONDS", 0.1)


class PairRig(Rig):
    """Open links whose pairs are not ready yet."""

    def __init__(self, **options):
        super().__init__(**options)
        self.pool = self.dispatcher.pool
        for link in self.prefill:
            link.ready_peers.clear()

    def connect(self):
        for prefill in self.prefill:
            for decode in self.decode:
                self.pool._connect_pair(prefill, decode)

    async def asked(self, prefill):
        """The next test that a prefill worker is asked for."""
        return (await asyncio.wait_for(prefill.commands.get(), 2)).connect_peer

    def probed(self, prefill, decode, probe_id, equal=True, reason=""):
        event = wpb.ProbedEvent(writer_agent_name=prefill.agent_name, probe_id=probe_id, equal=equal, reason=reason)
        self.pool._on_probed(decode, event)


async def test_a_pair_is_ready_when_its_test_pages_came():
    rig = PairRig()
    rig.connect()
    asked = await rig.asked(rig.prefill[0])
    rig.probed(rig.prefill[0], rig.decode[0], "another router's")
    await asyncio.sleep(0)
    assert rig.pool.ready_pairs() == []
    rig.probed(rig.prefill[0], rig.decode[0], asked.probe_id)
    await asyncio.sleep(0.01)
    assert rig.pool.ready_pairs() == [(rig.prefill[0], rig.decode[0])]


@pytest.mark.parametrize("what", ["changed pages", "silence", "a transport error", "an address"])
async def test_a_test_that_fails_is_done_again_and_told_in_words(what):
    rig = PairRig()
    prefill, decode = rig.prefill[0], rig.decode[0]
    rig.connect()
    first = await rig.asked(prefill)
    if what == "changed pages":
        rig.probed(prefill, decode, first.probe_id, equal=False)
    elif what == "an address":
        rig.probed(prefill, decode, first.probe_id, reason="it does not answer at p:1")
    elif what == "a transport error":
        rig.pool._on_peer(prefill, wpb.PeerEvent(agent_name=decode.agent_name, reason="no route"))
    second = await rig.asked(prefill)
    assert second.probe_id != first.probe_id
    words = {"changed pages": "as they were sent", "silence": "within 0.1 s", "a transport error": "no route"}
    words["an address"] = "it does not answer at p:1"
    assert words[what] in rig.pool.why_not_ready()
    rig.probed(prefill, decode, second.probe_id)
    await asyncio.sleep(0.01)
    assert len(rig.pool.ready_pairs()) == 1
    assert prefill.reason == ""


async def test_tests_towards_one_decode_worker_do_not_come_across_each_other():
    rig = PairRig(prefill=2)
    rig.connect()
    first = await rig.asked(rig.prefill[0])
    await asyncio.sleep(0.01)
    assert rig.prefill[1].commands.empty()
    rig.probed(rig.prefill[0], rig.decode[0], first.probe_id)
    rig.probed(rig.prefill[1], rig.decode[0], (await rig.asked(rig.prefill[1])).probe_id)
    await asyncio.sleep(0.01)
    assert len(rig.pool.ready_pairs()) == 2


async def test_a_session_that_blips_while_a_test_waits_for_another_loses_no_pair():
    rig = PairRig(prefill=2)
    rig.connect()
    await rig.asked(rig.prefill[0])  # its test runs, that of the other one waits
    decode, info = rig.decode[0], rig.decode[0].info
    rig.pool._close_link(decode)
    await asyncio.sleep(0)
    decode.info = wpb.WorkerInfo()
    decode.info.CopyFrom(info)  # the same incarnation, connected again
    rig.connect()
    for _ in range(20):
        await asyncio.sleep(0.02)
        for prefill in rig.prefill:
            for command in rig.sent(prefill):
                if command.HasField("connect_peer"):
                    rig.probed(prefill, decode, command.connect_peer.probe_id)
    assert len(rig.pool.ready_pairs()) == 2


async def test_a_pair_that_breaks_is_tested_again():
    """Casebook C095, C113: not for ever, and only that pair."""
    rig = PairRig(decode=2)
    for link in rig.prefill:
        link.ready_peers = {d.agent_name for d in rig.decode}
    rig.pool._on_peer(rig.prefill[0], wpb.PeerEvent(agent_name=rig.decode[0].agent_name, reason="cut"))
    assert rig.pool.ready_pairs() == [(rig.prefill[0], rig.decode[1])]
    asked = await rig.asked(rig.prefill[0])
    rig.probed(rig.prefill[0], rig.decode[0], asked.probe_id)
    await asyncio.sleep(0.01)
    assert len(rig.pool.ready_pairs()) == 2


async def test_a_worker_of_another_tier_at_an_address_is_refused():
    """Casebook C148: somebody else took the address."""
    rig = PairRig()
    stranger = make_link(wpb.TIER_PREFILL, "p9", tokenizer="hash").info
    with pytest.raises(Exception, match="it is a prefill worker, expected was decode"):
        rig.pool._open_link(rig.decode[0], stranger)


def state(rig, link, value, **fields):
    rig.dispatcher.pool._on_state(link, wpb.WorkerStateEvent(state=value, **fields))


async def test_a_draining_worker_keeps_what_it_has_and_gets_nothing_new():
    rig = Rig(decode=2)
    running = rig.submit()
    rig.reserved(running, running.decode)
    draining = running.decode
    state(rig, draining, wpb.WORKER_STATE_DRAINING, reason="it was told to end")
    assert running.state is RequestState.RUNNING
    others = [rig.submit(num_tokens=5) for _ in range(4)]
    assert all(r.decode is not draining for r in others)
    assert draining.state == "draining"


async def test_requests_of_a_stuck_worker_go_on_elsewhere_and_it_may_recover():
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


class Frozen(worker_pb2_grpc.WorkerServiceServicer):
    """Says who it is, then nothing: no heartbeat, no end."""

    async def Session(self, request_iterator, context):
        yield wpb.SessionResponse(info=make_link(wpb.TIER_DECODE, "d", tokenizer="hash").info)
        await asyncio.sleep(60)


async def test_a_worker_that_falls_silent_is_lost(monkeypatch):
    """Casebook C141: a frozen process keeps its connection open."""
    monkeypatch.setattr(worker_pool, "SILENCE_LOOK_SECONDS", 0.02)
    server = RpcServer("127.0.0.1", 0, ["kvferry.v1.WorkerService"])
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(Frozen(), server.server)
    await server.start()
    lost = asyncio.Event()
    pool = WorkerPool("r", "hash", lambda *_: None, lambda link: lost.set(), lambda: None, silence_seconds=0.3)
    link = pool.add(server.address, wpb.TIER_DECODE)
    await asyncio.wait_for(lost.wait(), 5)
    assert link.state == "lost"
    assert link.reason == "nothing was heard of it for 0.3 s"
    await pool.close()
    await server.server.stop(0)
