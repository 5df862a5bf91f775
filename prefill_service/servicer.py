"""Lets owners of pages take them back from this worker; see `kv.proto: PageTicketService`."""

from __future__ import annotations

import asyncio

import grpc

from protos import kv_pb2, kv_pb2_grpc
from worker_runtime.inbox import Inbox, RevokeTicket

SERVICE_NAME = "kvferry.v1.PageTicketService"


class PageTicketServicer(kv_pb2_grpc.PageTicketServiceServicer):
    """Hands the request to the engine thread and waits until it is done."""

    def __init__(self, inbox: Inbox, worker_id: str, incarnation_id: str) -> None:
        self._inbox, self._worker_id, self._incarnation_id = inbox, worker_id, incarnation_id

    async def RevokeTicket(
        self,
        request: kv_pb2.RevokeTicketRequest,
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]
    ) -> kv_pb2.RevokeTicketResponse:
        """Responds when this process will not touch the ticket's pages any more."""
        response = kv_pb2.RevokeTicketResponse(worker_id=self._worker_id, incarnation_id=self._incarnation_id)
        if request.writer_incarnation_id != self._incarnation_id or not request.HasField("ref"):
            return response  # without a ticket the caller only asks who listens here
        loop = asyncio.get_running_loop()
        revoked: asyncio.Future[bool] = loop.create_future()

        def on_revoked(needs_fence: bool) -> None:
            loop.call_soon_threadsafe(_settle, revoked, needs_fence)

        self._inbox.put(RevokeTicket(request, on_revoked))
        response.needs_fence = await revoked
        return response


def _settle(revoked: asyncio.Future[bool], needs_fence: bool) -> None:
    if not revoked.done():  # the caller may be gone
        revoked.set_result(needs_fence)
