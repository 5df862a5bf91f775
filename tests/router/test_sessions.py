"""Connections to workers: real gRPC on loopback, names that are looked up, workers that fall silent or are too old."""

from __future__ import annotations

import asyncio
import random

import pytest

from kv_transfer.layout import PROTOCOL_VERSION
from protos import worker_pb2 as wpb
from protos import worker_pb2_grpc
from router import name_watch, sessions
from router.name_watch import NameWatch
from router.sessions import WorkerSessions
from router.worker_pool import WorkerPool
from rpc.clock import SystemClock
from rpc.server import RpcServer
from tests.router.rig import make_link
from tests.scripted import FakeClock
from worker_runtime.health import Health
from worker_runtime.inbox import Inbox
from worker_runtime.session import Sessions, SessionServicer

pytestmark = pytest.mark.asyncio


class Rig:
    """A pool with real connections."""

    def __init__(self, **options):
        clock, rng = SystemClock(asyncio.get_running_loop()), random.Random()
        self.lost = asyncio.Event()
        self.pool = WorkerPool("hash", clock, rng, None, lambda link: self.lost.set(), lambda: None)
        self.sessions = WorkerSessions(self.pool, "r", clock, rng, **options)


async def serve(servicer):
    server = RpcServer("127.0.0.1", 0, ["kvferry.v1.WorkerService"])
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server.server)
    await server.start()
    return server


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


class Frozen(worker_pb2_grpc.WorkerServiceServicer):
    """Says who it is, then nothing: no heartbeat, no end."""

    async def Session(self, request_iterator, context):
        yield wpb.SessionResponse(info=make_link(wpb.TIER_DECODE, "d", tokenizer="hash").info)
        await asyncio.sleep(60)


async def test_a_worker_that_falls_silent_is_lost(monkeypatch):
    """Casebook C141: a frozen process keeps its connection open."""
    monkeypatch.setattr(sessions, "SILENCE_LOOK_SECONDS", 0.02)
    server = await serve(Frozen())
    rig = Rig(silence_seconds=0.3)
    link = rig.sessions.add(server.address, wpb.TIER_DECODE)
    await asyncio.wait_for(rig.lost.wait(), 5)
    assert (link.state, link.reason) == ("lost", "nothing was heard of it for 0.3 s")
    await rig.sessions.close()
    await server.server.stop(0)


async def test_a_worker_and_a_router_of_different_protocols_say_so_with_both_versions(monkeypatch):
    clock, inbox = FakeClock(), Inbox()
    info = make_link(wpb.TIER_DECODE, "d", tokenizer="hash").info
    server = await serve(SessionServicer(info, inbox, Sessions(clock, inbox), Health(clock, lambda: None)))
    monkeypatch.setattr(sessions, "PROTOCOL_VERSION", PROTOCOL_VERSION - 1)
    rig = Rig()
    link = rig.sessions.add(server.address, wpb.TIER_DECODE)
    await until(lambda: link.reason)
    words = f"protocol_version: router has {PROTOCOL_VERSION - 1}, worker has {PROTOCOL_VERSION}"
    assert words in link.reason
    await rig.sessions.close()
    await server.server.stop(0)


class Names:
    """A name server."""

    def __init__(self, monkeypatch):
        self.addresses, self.added, self.removed = [], [], []
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", self.getaddrinfo)
        monkeypatch.setattr(name_watch, "RESOLVE_SECONDS", 0.001)

    async def getaddrinfo(self, name, port, **_):
        assert (name, port) == ("decode.svc", 7002)
        if not self.addresses:
            raise OSError("no such name")
        return [(2, 1, 6, "", (address, port)) for address in self.addresses]


async def test_a_name_is_looked_up_again_and_again(monkeypatch):
    names = Names(monkeypatch)
    watch = NameWatch("decode.svc:7002", names.added.append, names.removed.append)
    task = asyncio.create_task(watch.run())
    await until(lambda: watch.problem == "no such name")
    names.addresses[:] = ["10.0.0.2", "10.0.0.1"]
    await until(lambda: not watch.problem)
    assert names.added == ["10.0.0.1:7002", "10.0.0.2:7002"]
    names.addresses[:] = ["10.0.0.2", "10.0.0.3"]
    await until(lambda: names.removed)
    assert (names.added[2:], names.removed) == (["10.0.0.3:7002"], ["10.0.0.1:7002"])
    names.addresses.clear()
    await until(lambda: watch.problem)
    assert names.removed == ["10.0.0.1:7002"], "a name server that is away takes nobody along"
    task.cancel()


async def test_workers_come_and_go_with_their_name(monkeypatch):
    """Casebook C148, C150: workers that vanish from a name are forgotten once their session ends."""
    names, rig, open_sessions = Names(monkeypatch), Rig(), {}

    async def session(self, link):
        open_sessions[link.address] = asyncio.Event()
        await open_sessions[link.address].wait()

    monkeypatch.setattr(WorkerSessions, "_run", session)
    names.addresses[:] = ["10.0.0.1", "10.0.0.2"]
    rig.sessions.watch("decode.svc:7002", wpb.TIER_DECODE)
    await until(lambda: len(open_sessions) == 2)
    names.addresses[:] = ["10.0.0.2"]
    await until(lambda: not all(link.is_listed for link in rig.pool.links))
    assert len(rig.pool.links) == 2, "the first is still connected, so it stays"
    names.addresses[:] = ["10.0.0.1", "10.0.0.2"]
    await until(lambda: all(link.is_listed for link in rig.pool.links))
    assert len(rig.pool.links) == 2, "one that was away from the name for a moment is not a second worker"
    names.addresses[:] = ["10.0.0.2"]
    await until(lambda: not all(link.is_listed for link in rig.pool.links))
    open_sessions["10.0.0.1:7002"].set()
    await until(lambda: [link.address for link in rig.pool.links] == ["10.0.0.2:7002"])
    await rig.sessions.close()
