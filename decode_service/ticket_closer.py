"""Gets pages back from a writer: asks it to close a ticket, until it answers or its process is known to be gone.

Time alone never frees a page: a frozen writer may wake up and write. Gone means that its address refuses
connections, or that another incarnation answers there.
"""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass

import grpc

from protos import kv_pb2, kv_pb2_grpc
from rpc.channel import open_channel
from worker.inbox import Inbox, WriterGone

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 5.0
CALL_SECONDS = 30.0


@dataclass(frozen=True)
class Writer:
    """Who may write to a ticket's pages."""

    agent_name: str
    incarnation_id: str
    address: str


class TicketCloser:
    """Runs on the event loop; tells the engine thread through its inbox."""

    def __init__(self, loop: asyncio.AbstractEventLoop, inbox: Inbox) -> None:
        self._loop, self._inbox = loop, inbox
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def close(self, agent_name: str, request_id: str, attempt: int, writer: Writer) -> None:
        """Called on the engine thread. Ends in a WriterGone message, however long it takes."""
        request = kv_pb2.CloseTicketRequest(
            writer_incarnation_id=writer.incarnation_id, agent_name=agent_name, request_id=request_id, attempt=attempt
        )
        self._loop.call_soon_threadsafe(self._start, request, writer)

    def _start(self, request: kv_pb2.CloseTicketRequest, writer: Writer) -> None:
        task = self._loop.create_task(self._close(request, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _close(self, request: kv_pb2.CloseTicketRequest, writer: Writer) -> None:
        pause = FIRST_PAUSE_SECONDS
        while True:
            reason = await self._ask(request, writer)
            if reason is not None:
                self._inbox.put(WriterGone(request.request_id, request.attempt, reason))
                return
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(pause * 2, LONGEST_PAUSE_SECONDS)

    async def _ask(self, request: kv_pb2.CloseTicketRequest, writer: Writer) -> str | None:
        """Why the ticket is closed for sure, or None if that is not known yet."""
        channel = self._channels.setdefault(writer.address, open_channel(writer.address))
        stub: kv_pb2_grpc.PageTicketServiceAsyncStub = kv_pb2_grpc.PageTicketServiceStub(channel)
        try:
            response = await stub.CloseTicket(request, timeout=CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE and await _refuses_connections(writer.address):
                return "the writer's process is gone"
            log.warning(
                "a writer does not answer; its pages stay quarantined",
                extra={"request_id": request.request_id, "writer": writer.address, "status": error.code().name},
            )
            return None
        if response.incarnation_id != writer.incarnation_id:
            return "the writer was restarted"
        return "closed by the writer"


async def _refuses_connections(address: str) -> bool:
    """Whether nothing listens at an address: a proof that the process is gone, unlike silence."""
    host, _, port = address.rpartition(":")
    try:
        _, stream = await asyncio.wait_for(asyncio.open_connection(host, int(port)), timeout=2.0)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    stream.close()
    return False
