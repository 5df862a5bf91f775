"""The one door into a worker's engine thread: everything that happens outside comes in as a message."""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass

from kv_transfer.request_ref import RequestRef
from kv_transfer.transfer_thread import TransferEvent
from protos import kv_pb2, worker_pb2


@dataclass(frozen=True)
class SessionCommand:
    """A router sent a command."""

    session_id: int
    request: worker_pb2.SessionRequest


@dataclass(frozen=True)
class SessionOpened:
    """A router connected: it is to be told how things stand, not only what changes from now on."""

    session_id: int


@dataclass(frozen=True)
class SessionClosed:
    """A router's session ended: nobody waits for its requests any more."""

    session_id: int


@dataclass(frozen=True)
class RevokeTicket:
    """A decode worker takes its pages back from this worker.

    `on_revoked` is to be called once nothing is open and nothing can be sent any more. It is called with True if a
    write failed, so that some of its bytes may still be in the network.
    """

    request: kv_pb2.RevokeTicketRequest
    on_revoked: Callable[[bool], None]


@dataclass(frozen=True)
class WriterGone:
    """The writer of a ticket let go of it, or its process is gone."""

    ref: RequestRef
    reason: str
    needs_fence: bool = False
    """Bytes of a broken connection may still be in the network."""


@dataclass(frozen=True)
class WriterChecked:
    """It was checked whether the writer of test pages responds at the address that it advertises."""

    agent_name: str
    test_id: str
    reason: str
    """Empty: it does. Else what is wrong."""


@dataclass(frozen=True)
class TicketOverdue:
    """A writer has sent everything of a ticket some time ago, so its notification must have come by now."""

    ref: RequestRef


@dataclass(frozen=True)
class QuarantineTimeout:
    """Pages have been in quarantine for as long as the operator wants to wait."""

    ref: RequestRef


@dataclass(frozen=True)
class Drain:
    """Take nothing new, and end the loop when all is done."""

    hand_over: bool
    """Requeue what runs: give it back to the routers instead of running it to its end."""


@dataclass(frozen=True)
class Stop:
    """End the loop at once."""


InboxMessage = (
    SessionOpened
    | SessionCommand
    | SessionClosed
    | RevokeTicket
    | WriterGone
    | WriterChecked
    | TicketOverdue
    | QuarantineTimeout
    | Drain
    | Stop
    | TransferEvent
)


class Inbox:
    """Messages for the engine thread, in order of arrival."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[InboxMessage] = queue.SimpleQueue()

    def put(self, message: InboxMessage) -> None:
        """Adds a message, from any thread."""
        self._queue.put(message)

    def take(self, wait: bool) -> list[InboxMessage]:
        """All messages there are; with `wait`, at least one."""
        messages: list[InboxMessage] = []
        try:
            if wait:
                messages.append(self._queue.get())
            while True:
                messages.append(self._queue.get_nowait())
        except queue.Empty:
            return messages
