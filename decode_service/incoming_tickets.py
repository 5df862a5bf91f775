"""The tickets that this worker has given to writers, and the pages that are open to them.

    open ── notifications account for all pages, or the writer closed ──> terminal: the pages are closed to the writer
      └── revoke: quarantined ── the writer let go, or is gone, or sent everything after all ──> terminal

While a ticket is open or quarantined its writer may touch the pages, whoever holds them. Time alone never ends that.
"""

from __future__ import annotations

from dataclasses import dataclass

from decode_service.ticket_revoker import TicketRevoker, Writer
from engine.page_pool import PagePool
from kv_transfer.request_ref import RequestRef
from kv_transfer.tickets import IncomingTicket
from protos import kv_pb2
from rpc.clock import Clock


@dataclass(eq=False)
class _Entry:
    ticket: IncomingTicket
    writer: Writer
    quarantined_at: float | None = None


class IncomingTickets:
    """Lives on the engine thread."""

    def __init__(self, pool: PagePool, revoker: TicketRevoker, agent_name: str, clock: Clock) -> None:
        self._pool, self._revoker, self._agent_name, self._clock = pool, revoker, agent_name, clock
        self._entries: dict[RequestRef, _Entry] = {}

    def __bool__(self) -> bool:
        """Whether a writer may touch any page."""
        return bool(self._entries)

    def __contains__(self, ref: RequestRef) -> bool:
        return ref in self._entries

    def __repr__(self) -> str:
        num_quarantined = sum(entry.quarantined_at is not None for entry in self._entries.values())
        return f"<IncomingTickets {len(self._entries) - num_quarantined} open, {num_quarantined} quarantined>"

    def is_writable(self, ref: RequestRef, page_id: int) -> bool:
        """Whether the writer of a ticket may write a page."""
        return ref in self._entries and page_id in self._entries[ref].ticket.page_ids

    def is_quarantined(self, ref: RequestRef) -> bool:
        """Whether the pages of a ticket are in quarantine."""
        return ref in self._entries and self._entries[ref].quarantined_at is not None

    def open(self, ref: RequestRef, page_ids: list[int], writer: Writer) -> None:
        """Opens pages to a writer. They must be held."""
        self._pool.open_to_writer(page_ids)
        self._entries[ref] = _Entry(IncomingTicket(ref, page_ids, writer.agent_name), writer)

    def hear(self, sender: str, notification: kv_pb2.KvNotification) -> IncomingTicket | None:
        """Takes note of what a writer says. Returns its ticket, which is terminal now or not; None if the message told
        nothing new: a stranger, an old attempt or a repetition."""
        entry = self._entries.get(RequestRef.from_proto(notification.ref))
        if entry is None or entry.writer.agent_name != sender or not entry.ticket.accept(notification):
            return None
        if entry.ticket.is_terminal:
            self._close(entry)
        return entry.ticket

    def revoke(self, ref: RequestRef) -> bool:
        """Takes pages back from their writer: they are quarantined, and the writer is asked. False: there is no such
        ticket, so nobody can touch them."""
        entry = self._entries.get(ref)
        if entry is None:
            return False
        entry.quarantined_at = self._clock.now()
        self._revoker.revoke(self._agent_name, ref, entry.writer)
        return True

    def writer_gone(self, ref: RequestRef) -> None:
        """The writer of a quarantined ticket has let go. Harmless if its pages have left quarantine."""
        if self.is_quarantined(ref):
            self._close(self._entries[ref])

    def pages_open(self) -> list[list[int]]:
        """Pages that writers may touch, by ticket."""
        return [entry.ticket.page_ids for entry in self._entries.values()]

    def quarantine_age(self) -> float:
        """Seconds since the oldest pages went into quarantine. From any thread."""
        now = self._clock.now()
        times = [e.quarantined_at for e in list(self._entries.values()) if e.quarantined_at is not None]
        return now - min(times, default=now)

    def _close(self, entry: _Entry) -> None:
        del self._entries[entry.ticket.ref]
        self._pool.close_to_writer(entry.ticket.page_ids)
        if entry.quarantined_at is not None:
            self._revoker.settled(entry.ticket.ref)
