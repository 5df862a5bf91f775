"""Gets pages back from a writer: asks it to close a ticket, until it answers or its process is known to be gone.

Time alone never frees a page: a frozen writer may wake up and write. Gone means that its address refuses
connections, or that another incarnation answers there; and only if the writer itself answered at that address before,
since an address that is right for the router may lead elsewhere from here. Bytes that a dead writer, or one whose write
failed, left in the network have to land before the pages are given away: such ends ask for a fence.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import grpc

from protos import kv_pb2, kv_pb2_grpc
from rpc.addresses import split_address
from rpc.channel import open_channel
from rpc.tls import TlsFiles
from worker_runtime.inbox import Inbox, WriterGone

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 5.0
CALL_SECONDS = 30.0
MEET_SECONDS = 3.0
"""Less than routers give a test of a pair."""


@dataclass(frozen=True)
class Writer:
    """Who may write to a ticket's pages."""

    agent_name: str
    incarnation_id: str
    address: str

    @property
    def worker_id(self) -> str:
        """Name of the worker, the same in all its incarnations."""
        return self.agent_name.rpartition("/")[0]


class TicketCloser:
    """Runs on the event loop; tells the engine thread through its inbox."""

    def __init__(self, loop: asyncio.AbstractEventLoop, inbox: Inbox, tls: TlsFiles | None = None) -> None:
        self._loop, self._inbox, self._tls = loop, inbox, tls
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._met: set[tuple[str, str]] = set()
        """(worker id, address): workers that answered, under their name, at their address."""

    def meet(self, writer: Writer, on_met: Callable[[str], None]) -> None:
        """Called on the engine thread: makes sure that a writer's address really leads to it, before it may write.

        on_met: called on the event loop; with nothing if the writer answered there, else with what is wrong.
        """
        self._loop.call_soon_threadsafe(self._run, self._meet(writer, on_met))

    def close(self, agent_name: str, request_id: str, attempt: int, writer: Writer) -> None:
        """Called on the engine thread. Ends in a WriterGone message, however long it takes."""
        request = kv_pb2.CloseTicketRequest(
            writer_incarnation_id=writer.incarnation_id, agent_name=agent_name, request_id=request_id, attempt=attempt
        )
        self._loop.call_soon_threadsafe(self._begin, (request_id, attempt), self._close(request, writer))

    def settled(self, request_id: str, attempt: int) -> None:
        """Called on the engine thread: the pages came back some other way. Harmless if nothing is asked any more."""
        self._loop.call_soon_threadsafe(self._end, (request_id, attempt))

    def _begin(self, key: tuple[str, int], work: Coroutine[Any, Any, None]) -> None:
        self._closing[key] = self._run(work)
        self._closing[key].add_done_callback(lambda _: self._closing.pop(key, None))

    def _end(self, key: tuple[str, int]) -> None:
        if (task := self._closing.get(key)) is not None:
            task.cancel()

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _meet(self, writer: Writer, on_met: Callable[[str], None]) -> None:
        """Asks for a ticket that does not exist: a harmless question that any writer answers."""
        where = f"{writer.worker_id} advertises {writer.address or 'no address'}"
        request = kv_pb2.CloseTicketRequest(writer_incarnation_id=writer.incarnation_id)
        try:
            response = await self._stub(writer).CloseTicket(request, timeout=MEET_SECONDS)
        except grpc.aio.AioRpcError as error:
            on_met(f"{where}, where it does not answer ({error.code().name}); set its --advertise-address")
            return
        if not self._note(writer, response) or response.incarnation_id != writer.incarnation_id:
            on_met(f"{where}, where {response.worker_id} answers; set its --advertise-address")
        else:
            on_met("")

    async def _close(self, request: kv_pb2.CloseTicketRequest, writer: Writer) -> None:
        pause = FIRST_PAUSE_SECONDS
        while True:
            verdict = await self._ask(request, writer)
            if verdict is not None:
                self._inbox.put(WriterGone(request.request_id, request.attempt, *verdict))
                return
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(pause * 2, LONGEST_PAUSE_SECONDS)

    async def _ask(self, request: kv_pb2.CloseTicketRequest, writer: Writer) -> tuple[str, bool] | None:
        """Why the ticket is closed for sure, and whether a fence is needed; None if that is not known yet."""
        try:
            response = await self._stub(writer).CloseTicket(request, timeout=CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            unavailable = error.code() is grpc.StatusCode.UNAVAILABLE
            is_known = (writer.worker_id, writer.address) in self._met
            if unavailable and is_known and await _refuses_connections(writer.address):
                return "the writer's process is gone", True
            log.warning(
                "a writer does not answer; its pages stay quarantined",
                extra={"request_id": request.request_id, "writer": writer.address, "status": error.code().name},
            )
            return None
        if not self._note(writer, response):
            # Somebody else has the address. If the writer was there before, its port is closed, so it is gone.
            is_known = (writer.worker_id, writer.address) in self._met
            return ("another worker has the writer's address", True) if is_known else None
        if response.incarnation_id == writer.incarnation_id:
            return "closed by the writer", response.needs_fence
        return "the writer was restarted", True

    def _note(self, writer: Writer, response: kv_pb2.CloseTicketResponse) -> bool:
        """Whether the worker meant by `writer` answered, in whatever incarnation."""
        if response.worker_id != writer.worker_id:
            return False
        self._met.add((writer.worker_id, writer.address))
        return True

    def _stub(self, writer: Writer) -> kv_pb2_grpc.PageTicketServiceAsyncStub:
        channel = self._channels.get(writer.address)
        if channel is None:
            channel = self._channels[writer.address] = open_channel(writer.address, self._tls)
        stub: kv_pb2_grpc.PageTicketServiceAsyncStub = kv_pb2_grpc.PageTicketServiceStub(channel)
        return stub


async def _refuses_connections(address: str) -> bool:
    """Whether nothing listens at an address: a proof that the process is gone, unlike silence."""
    try:
        host, port = split_address(address)
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, ValueError):
        return False
    verdicts = [await _refuses(str(target[0]), port) for _, _, _, _, target in found]
    return bool(verdicts) and all(verdicts)


async def _refuses(host: str, port: int) -> bool:
    try:
        _, stream = await asyncio.wait_for(asyncio.open_connection(host, port), timeout=2.0)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    stream.close()
    return False
