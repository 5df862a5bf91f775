"""Pages leave quarantine on proof only: the writer's word, its successor's, or a known address that is dead."""

from __future__ import annotations

import asyncio
import random
import socket

import grpc
import pytest

from decode_service.ticket_revoker import (
    LONGEST_PAUSE_SECONDS,
    GrpcWriters,
    NoResponse,
    TicketRevoker,
    Writer,
    _refuses_connections,
)
from kv_transfer.request_ref import RequestRef
from prefill_service.servicer import PageTicketServicer
from protos import kv_pb2, kv_pb2_grpc
from tests.scripted import FakeClock, make_ref
from worker_runtime.inbox import Inbox, RevokeTicket, WriterGone

R = RequestRef("r", 0)
WRITER = Writer("p/1", "1", "p:1")
DEAD, SILENT = NoResponse("UNAVAILABLE", True), NoResponse("DEADLINE_EXCEEDED", False)


def response(worker_id="p", incarnation_id="1", needs_fence=False):
    return kv_pb2.RevokeTicketResponse(worker_id=worker_id, incarnation_id=incarnation_id, needs_fence=needs_fence)


class FakeWriters:
    """Nobody responds before a test says so."""

    def __init__(self):
        self.open = []

    def ask(self, writer, request, seconds, on_outcome):
        asked = FakeCall(self, request, on_outcome)
        self.open.append(asked)
        return asked

    def respond(self, outcome):
        self.open.pop(0).on_outcome(outcome)


class FakeCall:
    def __init__(self, writers, request, on_outcome):
        self.writers, self.request, self.on_outcome = writers, request, on_outcome

    def cancel(self):
        self.writers.open.remove(self)


class Rig:
    def __init__(self):
        self.inbox, self.writers, self.clock = Inbox(), FakeWriters(), FakeClock()
        self.revoker = TicketRevoker(self.inbox, self.writers, self.clock, random.Random(1))

    def was_met(self):
        """The writer has responded at its address before."""
        found = []
        self.revoker.check_address(WRITER, found.append)
        self.writers.respond(response())
        assert found == [""]

    def verdict(self, outcome):
        """What becomes of pages after an outcome; None: they stay quarantined."""
        self.revoker.revoke("owner", R, WRITER)
        self.writers.respond(outcome)
        messages = self.inbox.take(wait=False)
        return (messages[0].reason, messages[0].needs_fence) if messages else None


@pytest.mark.parametrize(
    ("was_met", "outcome", "verdict"),
    [
        (False, response(), ("closed by the writer", False)),
        (False, response(needs_fence=True), ("closed by the writer", True)),
        (False, response(incarnation_id="2"), ("the writer was restarted", True)),
        (False, response(worker_id="stranger"), None),
        (True, response(worker_id="stranger"), ("another worker has the writer's address", True)),
        (False, DEAD, None),
        (True, DEAD, ("the writer's process is gone", True)),
        (False, SILENT, None),
        (True, SILENT, None),
    ],
)
def test_only_proof_frees_pages(was_met, outcome, verdict):
    rig = Rig()
    if was_met:
        rig.was_met()
    assert rig.verdict(outcome) == verdict


def test_a_writer_is_asked_again_until_there_is_proof_with_growing_pauses():
    rig, pauses = Rig(), []
    rig.revoker.revoke("owner", R, WRITER)
    for _ in range(12):
        rig.writers.respond(SILENT)
        [timer] = rig.clock.later
        pauses.append(timer.due - rig.clock.now())
        rig.clock.advance(pauses[-1])
    assert pauses[0] < 0.1
    assert LONGEST_PAUSE_SECONDS / 2 <= pauses[-1] <= LONGEST_PAUSE_SECONDS * 1.5
    rig.writers.respond(response())
    assert rig.inbox.take(wait=False) == [WriterGone(R, "closed by the writer", False)]
    assert repr(rig.revoker) == "<TicketRevoker revoking nothing>"


@pytest.mark.parametrize("is_resting", [False, True])
def test_a_ticket_that_is_settled_otherwise_is_not_asked_for_any_more(is_resting):
    rig = Rig()
    rig.revoker.revoke("owner", R, WRITER)
    if is_resting:
        rig.writers.respond(SILENT)
    rig.revoker.settled(R)
    rig.clock.advance(60.0)
    assert (rig.writers.open, rig.clock.later, rig.inbox.take(wait=False)) == ([], [], [])
    rig.revoker.settled(R)


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (response(), ""),
        (response(incarnation_id="2"), "p advertises p:1, where p responds; set its --advertise-address"),
        (response(worker_id="q"), "p advertises p:1, where q responds; set its --advertise-address"),
        (SILENT, "where it does not respond (DEADLINE_EXCEEDED)"),
    ],
)
def test_a_writer_must_respond_at_its_address_before_it_may_write(outcome, words):
    rig, found = Rig(), []
    rig.revoker.check_address(WRITER, found.append)
    [asked] = rig.writers.open
    assert not asked.request.HasField("ref"), "a harmless question"
    rig.writers.respond(outcome)
    assert words in found[0]
    assert bool(found[0]) == bool(words)


class Server:
    """A prefill worker's gRPC service whose engine thread is the test."""

    def __init__(self):
        self.inbox, self.server = Inbox(), grpc.aio.server()
        servicer = PageTicketServicer(self.inbox, "p", "1")
        kv_pb2_grpc.add_PageTicketServiceServicer_to_server(servicer, self.server)
        self.writer = Writer("p/1", "1", f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}")


async def outcome_of(writer, request):
    outcome = asyncio.get_running_loop().create_future()
    writers = GrpcWriters()
    writers.ask(writer, request, 5.0, outcome.set_result)
    return writers, outcome


async def test_over_grpc_a_writer_responds_once_it_has_let_go():
    server = Server()
    await server.server.start()
    request = kv_pb2.RevokeTicketRequest(writer_incarnation_id="1", agent_name="owner", ref=make_ref())
    writers, outcome = await outcome_of(server.writer, request)
    while not (messages := server.inbox.take(wait=False)):
        await asyncio.sleep(0.005)
    assert isinstance(messages[0], RevokeTicket)
    assert not outcome.done()
    messages[0].on_revoked(True)
    assert (await outcome).needs_fence
    _, outcome = await outcome_of(server.writer, kv_pb2.RevokeTicketRequest(writer_incarnation_id="1"))
    assert (await outcome).worker_id == "p", "who is asked without a ticket responds at once"
    await server.server.stop(0)
    gone = asyncio.get_running_loop().create_future()
    writers.ask(server.writer, request, 5.0, gone.set_result)
    assert await gone == DEAD


async def test_dead_addresses_are_recognised_in_every_spelling():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    assert await _refuses_connections(f"127.0.0.1:{port}")
    assert await _refuses_connections(f"localhost:{port}")
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        assert not await _refuses_connections(f"127.0.0.1:{listening.getsockname()[1]}")
    assert not await _refuses_connections("no.such.host.invalid:1")
