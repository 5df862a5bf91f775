"""Lets owners of pages end their tickets here; see `kv.proto: PageTicketService`."""

from __future__ import annotations

import asyncio

import grpc

from protos import kv_pb2, kv_pb2_grpc
from worker_runtime.inbox import CloseTicket, Inbox

SERVICE_NAME = "kvferry.v1.PageTicketService"


class PageTicketServicer(kv_pb2_grpc.PageTicketServiceServicer):
    """Hands the question to the engine thread and waits for its answer."""

    def __init__(self, inbox: Inbox, worker_id: str, incarnation_id: str) -> None:
        self._inbox, self._worker_id, self._incarnation_id = inbox, worker_id, incarnation_id

    async def CloseTicket(
        self,
        request: kv_pb2.CloseTicketRequest,
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]
    ) -> kv_pb2.CloseTicketResponse:
        """Answers when this process will not touch the ticket's pages any more."""
        response = kv_pb2.CloseTicketResponse(worker_id=self._worker_id, incarnation_id=self._incarnation_id)
        if request.writer_incarnation_id != self._incarnation_id or not request.request_id:
            return response  # without a request it is only asked who is here
        loop = asyncio.get_running_loop()
        closed: asyncio.Future[bool] = loop.create_future()

        def done(needs_fence: bool) -> None:
            loop.call_soon_threadsafe(_settle, closed, needs_fence)

        self._inbox.put(CloseTicket(request, done))
        response.needs_fence = await closed
        return response


def _settle(closed: asyncio.Future[bool], needs_fence: bool) -> None:
    if not closed.done():  # the caller may be gone
        closed.set_result(needs_fence)
