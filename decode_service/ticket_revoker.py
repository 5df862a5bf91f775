"""Takes pages back from a writer: asks it to let go of a ticket, until it responds or its process is known to be gone.

Time alone never frees a page: a frozen writer may wake up and write. A writer is gone if another incarnation of it
responds at its address. A refused connection, or a response of another worker, counts only if the writer itself has
responded at that address before, since an address that is right for the router may lead elsewhere from here. Bytes that
a dead writer, or one whose write failed, left in the network must land before the pages are given away: such ends ask
for a fence.

`TicketRevoker` decides. Clock, random source and the way to writers are arguments; `GrpcWriters` is that way in a
process.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import grpc

from kv_transfer.request_ref import RequestRef
from protos import kv_pb2, kv_pb2_grpc
from rpc.addresses import split_address
from rpc.channel import open_channel
from rpc.clock import Clock, Timer
from rpc.tls import TlsFiles
from worker_runtime.inbox import Inbox, WriterGone

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 5.0
CALL_SECONDS = 30.0
CHECK_SECONDS = 3.0
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


class NoResponse(NamedTuple):
    """A writer was asked and nobody responded."""

    status: str
    refuses_connections: bool
    """Nothing listens at the address: a proof that the process is gone, unlike silence."""


Outcome = kv_pb2.RevokeTicketResponse | NoResponse


class Writers(Protocol):
    """The way to writers."""

    def ask(
        self,
        writer: Writer,
        request: kv_pb2.RevokeTicketRequest,
        seconds: float,
        on_outcome: Callable[[Outcome], None],
    ) -> Timer:
        """Sends a request to a writer's address and waits for the response for some seconds at most.

        Called on the event loop, as `on_outcome` is. Can be cancelled.
        """
        ...


class TicketRevoker:
    """Called on the engine thread, runs on the event loop, and tells the engine thread through its inbox."""

    def __init__(self, inbox: Inbox, writers: Writers, clock: Clock, rng: random.Random) -> None:
        self._inbox, self._writers, self._clock, self._rng = inbox, writers, clock, rng
        self._revoking: dict[RequestRef, Timer] = {}
        """By ticket: the request that is open, or the pause before the next one."""
        self._responded: set[tuple[str, str]] = set()
        """(worker id, address): workers that have responded, under their name, at their address."""

    def __repr__(self) -> str:
        return f"<TicketRevoker revoking {', '.join(map(str, self._revoking)) or 'nothing'}>"

    def check_address(self, writer: Writer, on_checked: Callable[[str], None]) -> None:
        """Makes sure that a writer's address really leads to it, before it may write.

        on_checked: called on the event loop; with nothing if the writer has responded, else with what is wrong.
        """
        self._clock.call_soon_threadsafe(self._check_address, writer, on_checked)

    def revoke(self, agent_name: str, ref: RequestRef, writer: Writer) -> None:
        """Takes a ticket back. Ends in a WriterGone message, however long it takes. agent_name: the owner's."""
        request = kv_pb2.RevokeTicketRequest(
            writer_incarnation_id=writer.incarnation_id, agent_name=agent_name, ref=ref.to_proto()
        )
        self._clock.call_soon_threadsafe(self._ask, ref, request, writer, FIRST_PAUSE_SECONDS)

    def settled(self, ref: RequestRef) -> None:
        """The pages came back some other way. Harmless if nothing is asked any more."""
        self._clock.call_soon_threadsafe(self._settle, ref)

    def _check_address(self, writer: Writer, on_checked: Callable[[str], None]) -> None:
        # A request without a ticket is harmless, and any writer responds to it.
        request = kv_pb2.RevokeTicketRequest(writer_incarnation_id=writer.incarnation_id)
        where = f"{writer.worker_id} advertises {writer.address or 'no address'}"

        def on_outcome(outcome: Outcome) -> None:
            if isinstance(outcome, NoResponse):
                on_checked(f"{where}, where it does not respond ({outcome.status}); set its --advertise-address")
            elif not self._note(writer, outcome) or outcome.incarnation_id != writer.incarnation_id:
                on_checked(f"{where}, where {outcome.worker_id} responds; set its --advertise-address")
            else:
                on_checked("")

        self._writers.ask(writer, request, CHECK_SECONDS, on_outcome)

    def _ask(self, ref: RequestRef, request: kv_pb2.RevokeTicketRequest, writer: Writer, pause: float) -> None:
        def on_outcome(outcome: Outcome) -> None:
            if ref not in self._revoking:
                return
            verdict = self._verdict(ref, writer, outcome)
            if verdict is not None:
                del self._revoking[ref]
                self._inbox.put(verdict)
                return
            seconds, next_pause = pause * self._rng.uniform(0.5, 1.5), min(pause * 2, LONGEST_PAUSE_SECONDS)
            self._revoking[ref] = self._clock.call_later(seconds, self._ask, ref, request, writer, next_pause)

        self._revoking[ref] = self._writers.ask(writer, request, CALL_SECONDS, on_outcome)

    def _settle(self, ref: RequestRef) -> None:
        if (open_request := self._revoking.pop(ref, None)) is not None:
            open_request.cancel()

    def _verdict(self, ref: RequestRef, writer: Writer, outcome: Outcome) -> WriterGone | None:
        """Why the writer will not touch the pages any more; None if that is not known yet."""
        has_responded = (writer.worker_id, writer.address) in self._responded
        if isinstance(outcome, NoResponse):
            if outcome.refuses_connections and has_responded:
                return WriterGone(ref, "the writer's process is gone", needs_fence=True)
            about = {"request_id": ref.request_id, "writer": writer.address, "status": outcome.status}
            log.warning("a writer does not respond; its pages stay quarantined", extra=about)
            return None
        if not self._note(writer, outcome):
            # Another worker has the address. If the writer was there before, its port is closed, so it is gone.
            return WriterGone(ref, "another worker has the writer's address", True) if has_responded else None
        if outcome.incarnation_id != writer.incarnation_id:
            return WriterGone(ref, "the writer was restarted", needs_fence=True)
        return WriterGone(ref, "closed by the writer", outcome.needs_fence)

    def _note(self, writer: Writer, response: kv_pb2.RevokeTicketResponse) -> bool:
        """Whether the worker meant by `writer` responded, in whatever incarnation."""
        if response.worker_id != writer.worker_id:
            return False
        self._responded.add((writer.worker_id, writer.address))
        return True


class _Task:
    """A task as a `Timer`."""

    def __init__(self, task: asyncio.Task[None]) -> None:
        self._task = task

    def cancel(self) -> None:
        self._task.cancel()


class GrpcWriters:
    """See `Writers`: over gRPC."""

    def __init__(self, tls: TlsFiles | None = None) -> None:
        self._tls = tls
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def ask(
        self,
        writer: Writer,
        request: kv_pb2.RevokeTicketRequest,
        seconds: float,
        on_outcome: Callable[[Outcome], None],
    ) -> Timer:
        """See `Writers.ask`."""
        task = asyncio.get_running_loop().create_task(self._ask(writer, request, seconds, on_outcome))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return _Task(task)

    async def _ask(
        self,
        writer: Writer,
        request: kv_pb2.RevokeTicketRequest,
        seconds: float,
        on_outcome: Callable[[Outcome], None],
    ) -> None:
        try:
            outcome: Outcome = await self._stub(writer).RevokeTicket(request, timeout=seconds)
        except grpc.aio.AioRpcError as error:
            # Only who wants pages back needs a proof that the process is gone.
            wants_proof = request.HasField("ref") and error.code() is grpc.StatusCode.UNAVAILABLE
            outcome = NoResponse(error.code().name, wants_proof and await _refuses_connections(writer.address))
        on_outcome(outcome)

    def _stub(self, writer: Writer) -> kv_pb2_grpc.PageTicketServiceAsyncStub:
        channel = self._channels.get(writer.address)
        if channel is None:
            channel = self._channels[writer.address] = open_channel(writer.address, self._tls)
        stub: kv_pb2_grpc.PageTicketServiceAsyncStub = kv_pb2_grpc.PageTicketServiceStub(channel)
        return stub


async def _refuses_connections(address: str) -> bool:
    """Whether nothing listens at an address."""
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
