"""Lets owners of pages end their tickets here; see `kv.proto: PageTicketService`."""

from __future__ import annotations

import asyncio

import grpc

from protos import kv_pb2, kv_pb2_grpc
from worker.inbox import CloseTicket, Inbox

SERVICE_NAME = "kvferry.v1.PageTicketService"


class PageTicketServicer(kv_pb2_grpc.PageTicketServiceServicer):
    """Hands the question to the engine thread and waits for its answer."""

    def __init__(self, inbox: Inbox, incarnation_id: str) -> None:
        self._inbox, self._incarnation_id = inbox, incarnation_id

    async def CloseTicket(
        self,
        request: kv_pb2.CloseTicketRequest,
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]
    ) -> kv_pb2.CloseTicketResponse:
        """Answers when this process will not touch the ticket's pages any more."""
        response = kv_pb2.CloseTicketResponse(incarnation_id=self._incarnation_id)
        if request.writer_incarnation_id != self._incarnation_id:
            return response
        closed = asyncio.Event()
        loop = asyncio.get_running_loop()

        def done() -> None:
            loop.call_soon_threadsafe(closed.set)

        self._inbox.put(CloseTicket(request, done))
        await closed.wait()
        return response
