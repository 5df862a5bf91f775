"""State of the two ends of a page ticket, without clock, thread or socket.

    owner (decode)                          writer (prefill)
    open ── pages arrive, in any order      open ── next_write() as pages are finished
     │        all pages and first token      │        write_ended() for each write
     ├──────> complete                       ├──────> finished: all pages are written
     └─ closed by the writer                 └─ stop(): starts no more writes; terminal once open writes have ended

Neither end relies on order: the owner counts pages, the writer counts open writes.
"""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.request_ref import RequestRef
from protos import kv_pb2


class IncomingTicket:
    """A ticket as its owner sees it: which pages have arrived."""

    def __init__(self, ref: RequestRef, page_ids: list[int], writer_agent_name: str) -> None:
        self.ref = ref
        self.page_ids = page_ids
        self.writer_agent_name = writer_agent_name
        self.first_token: int | None = None
        self.is_closed = False
        self.close_reason = ""
        self.ended_with_first_token = False
        self._missing = set(range(len(page_ids)))

    @property
    def is_complete(self) -> bool:
        """Whether every page has arrived and the first token is known, so that decode may start."""
        return not self._missing and self.first_token is not None

    @property
    def is_terminal(self) -> bool:
        """Whether the writer will not write to the pages any more."""
        return self.is_closed or self.is_complete

    def accept(self, notification: kv_pb2.KvNotification) -> bool:
        """Records a notification of the writer. False if it changes nothing: a duplicate, out of range, or too late."""
        first, count = notification.first_page, notification.num_pages
        if first + count > len(self.page_ids) or self.is_terminal:
            return False
        is_new = not self._missing.isdisjoint(range(first, first + count))
        self._missing.difference_update(range(first, first + count))
        if notification.HasField("first_token") and self.first_token is None:
            self.first_token = notification.first_token.token_id
            is_new = True
        if notification.closed:
            self.is_closed, self.close_reason = True, notification.close_reason
            self.ended_with_first_token = notification.ended_with_first_token
            is_new = True
        return is_new


@dataclass(frozen=True)
class TicketWrite:
    """The next pages to send: indices in the ticket, and the notification that follows the pages."""

    first_page: int
    num_pages: int
    payload: bytes


class OutgoingTicket:
    """A ticket as its writer sees it: which pages were sent, and how many writes are open."""

    def __init__(self, ticket: kv_pb2.PageTicket) -> None:
        self.ref = RequestRef.from_proto(ticket.ref)
        self.agent_name = ticket.agent_name
        self.page_ids = tuple(ticket.page_ids)
        self.first_page_index = ticket.first_page_index
        self.num_posted = 0
        self.is_first_token_posted = False
        self.num_open_writes = 0
        self.is_stopped = False
        self.has_failed_write = False
        """Bytes of a failed write may still arrive, so the owner can't be notified of the close at once."""

    @property
    def is_terminal(self) -> bool:
        """Whether no write is open and none will be started."""
        return self.num_open_writes == 0 and (self.is_stopped or self.is_first_token_posted)

    def next_write(self, num_finished_pages: int, first_token: int | None = None) -> TicketWrite | None:
        """The write to start now that the first `num_finished_pages` pages of the prompt are final.

        None if there is nothing to send. The first token is sent with the last pages.
        """
        if self.is_stopped:
            return None
        end = min(max(num_finished_pages - self.first_page_index, self.num_posted), len(self.page_ids))
        first, count = self.num_posted, end - self.num_posted
        if count == 0 and first_token is None:
            return None
        message = kv_pb2.KvNotification(ref=self.ref.to_proto(), first_page=first, num_pages=count)
        if first_token is not None:
            message.first_token.token_id = first_token
            self.is_first_token_posted = True
        self.num_posted = end
        self.num_open_writes += 1
        return TicketWrite(first, count, message.SerializeToString())

    @property
    def unsent_pages(self) -> range:
        """Indices of the pages that no `next_write` has covered yet."""
        return range(self.num_posted, len(self.page_ids))

    def next_early_write(self) -> range:
        """Starts a write of some layers of all unsent pages, and returns the indices of these pages. The owner is not
        notified: a later `next_write` completes the pages and notifies the owner."""
        self.num_open_writes += 1
        return self.unsent_pages

    def write_ended(self, ok: bool = True) -> None:
        """Records that a write of `next_write` or `next_early_write` is terminal."""
        self.num_open_writes -= 1
        self.has_failed_write |= not ok

    def stop(self) -> None:
        """Starts no more writes for this ticket."""
        self.is_stopped = True

    def closed_message(self, reason: str, ended_with_first_token: bool) -> bytes:
        """The notification that lets the owner reuse the pages. Send once terminal, and not after a failed write."""
        return kv_pb2.KvNotification(
            ref=self.ref.to_proto(),
            closed=True,
            close_reason=reason,
            ended_with_first_token=ended_with_first_token,
        ).SerializeToString()
