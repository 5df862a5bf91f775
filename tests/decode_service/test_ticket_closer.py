"""Pages leave quarantine on proof only: the writer's word, its successor's, or a known address that is dead."""

from __future__ import annotations

import asyncio
import socket

import grpc
import pytest

from decode_service import ticket_closer
from decode_service.ticket_closer import TicketCloser, Writer
from prefill_service.servicer import PageTicketServicer
from protos import kv_pb2_grpc
from worker_runtime.inbox import CloseTicket, Inbox, WriterGone

pytestmark = pytest.mark.asyncio


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(ticket_closer, "LONGEST_PAUSE_SECONDS", 0.05)


class FakeWriter:
    """A real gRPC server whose engine thread is the test."""

    def __init__(self, worker_id="p", incarnation_id="1"):
        self.inbox = Inbox()
        self.server = grpc.aio.server()
        kv_pb2_grpc.add_PageTicketServiceServicer_to_server(
            PageTicketServicer(self.inbox, worker_id, incarnation_id), self.server
        )
        self.port = 0

    async def start(self, port=0):
        self.port = self.server.add_insecure_port(f"127.0.0.1:{port}")
        await self.server.start()
        return self

    async def answer(self, needs_fence=False):
        """Answers the next question, as the engine thread would."""
        while not (asked := self.inbox.take(wait=False)):
            await asyncio.sleep(0.005)
        assert isinstance(asked[0], CloseTicket)
        asked[0].done(needs_fence)


def make_closer():
    inbox = Inbox()
    return TicketCloser(asyncio.get_running_loop(), inbox), inbox


async def verdict(inbox, seconds=5.0):
    """The reason for which pages were freed, or None if they were not in time."""
    for _ in range(int(seconds / 0.01)):
        if messages := inbox.take(wait=False):
            assert isinstance(messages[0], WriterGone)
            return messages[0].reason, messages[0].needs_fence
        await asyncio.sleep(0.01)
    return None


async def met(closer, writer):
    """What comes of looking for a writer at its address."""
    told = asyncio.get_running_loop().create_future()
    closer.meet(writer, told.set_result)
    return await asyncio.wait_for(told, 10)


def writer_at(port, incarnation_id="1", worker_id="p"):
    return Writer(f"{worker_id}/{incarnation_id}", incarnation_id, f"127.0.0.1:{port}")


async def test_the_writers_word_is_enough():
    fake = await FakeWriter().start()
    closer, inbox = make_closer()
    closer.close("owner", "r", 0, writer_at(fake.port))
    await fake.answer()
    assert await verdict(inbox) == ("closed by the writer", False)
    await fake.server.stop(0)


async def test_after_a_failed_write_bytes_in_the_network_are_waited_for():
    fake = await FakeWriter().start()
    closer, inbox = make_closer()
    closer.close("owner", "r", 0, writer_at(fake.port))
    await fake.answer(needs_fence=True)
    assert await verdict(inbox) == ("closed by the writer", True)
    await fake.server.stop(0)


async def test_a_successor_under_the_same_name_proves_the_writer_gone():
    fake = await FakeWriter(incarnation_id="2").start()
    closer, inbox = make_closer()
    closer.close("owner", "r", 0, writer_at(fake.port, "1"))
    assert await verdict(inbox) == ("the writer was restarted", True)
    await fake.server.stop(0)


async def test_a_stranger_at_the_address_proves_nothing():
    """The address is right for somebody else: pages must stay quarantined."""
    fake = await FakeWriter(worker_id="stranger", incarnation_id="9").start()
    closer, inbox = make_closer()
    closer.close("owner", "r", 0, writer_at(fake.port))
    assert await verdict(inbox, 0.3) is None
    await fake.server.stop(0)


async def test_a_stranger_at_an_address_where_the_writer_was_proves_it_gone():
    fake = await FakeWriter().start()
    closer, inbox = make_closer()
    assert await met(closer, writer_at(fake.port)) == ""
    await fake.server.stop(0)
    stranger = await FakeWriter(worker_id="stranger", incarnation_id="9").start(fake.port)
    closer.close("owner", "r", 0, writer_at(fake.port))
    assert await verdict(inbox) == ("another worker has the writer's address", True)
    await stranger.server.stop(0)


async def test_a_ticket_that_is_settled_otherwise_is_not_asked_for_any_more():
    fake = await FakeWriter(worker_id="stranger", incarnation_id="9").start()
    closer, inbox = make_closer()
    closer.close("owner", "r", 0, writer_at(fake.port))
    await asyncio.sleep(0.05)
    assert closer._closing
    closer.settled("r", 0)
    await asyncio.sleep(0.05)
    assert not closer._closing
    assert inbox.take(wait=False) == []
    await fake.server.stop(0)


async def test_a_refused_connection_proves_it_only_where_the_writer_answered_before():
    fake = await FakeWriter().start()
    closer, inbox = make_closer()
    assert await met(closer, writer_at(fake.port)) == ""
    await fake.server.stop(0)
    closer.close("owner", "r", 0, writer_at(fake.port))
    assert await verdict(inbox) == ("the writer's process is gone", True)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    closer.close("owner", "r", 1, writer_at(port, worker_id="never-met"))
    assert await verdict(inbox, 0.3) is None


async def test_dead_addresses_are_recognised_in_every_spelling():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    assert await ticket_closer._refuses_connections(f"127.0.0.1:{port}")
    assert await ticket_closer._refuses_connections(f"localhost:{port}")
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        assert not await ticket_closer._refuses_connections(f"127.0.0.1:{listening.getsockname()[1]}")
    assert not await ticket_closer._refuses_connections("no.such.host.invalid:1")


async def test_a_writer_is_looked_for_at_its_address_before_it_may_write():
    fake = await FakeWriter().start()
    closer, _ = make_closer()
    assert await met(closer, writer_at(fake.port)) == ""
    assert "where p answers" in await met(closer, writer_at(fake.port, incarnation_id="2"))
    stranger = f"q advertises 127.0.0.1:{fake.port}, where p answers; set its --advertise-address"
    assert await met(closer, writer_at(fake.port, worker_id="q")) == stranger
    await fake.server.stop(0)
    assert "where it does not answer (UNAVAILABLE)" in await met(closer, writer_at(fake.port))
    assert "advertises no address, where it does not answer" in await met(closer, Writer("p/1", "1", ""))
