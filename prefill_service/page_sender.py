"""Sends the pages of prompts to decode workers, ticket by ticket.

    open ── pages are written as they are finished ──> everything posted ── all writes ended ──> ended
      └── stop: nothing more is started ────────────────────────────────── all writes ended ──> ended, owner is told

A page of ours that an open write reads is pinned. `PageSender` acts on nothing but tickets and pages: whatever ends a
transfer is returned, and the loop acts on it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from engine.device import IsWritten
from engine.page_pool import PagePool
from kv_transfer.request_ref import RequestRef
from kv_transfer.tickets import OutgoingTicket
from kv_transfer.transfer_thread import PageWrite, TransferThread, WriteEnded
from protos import inference_pb2, kv_pb2
from rpc.clock import Clock

MAX_TOMBSTONES = 10_000
"""Ended tickets remembered, so that a late command can't use one."""

TicketId = tuple[str, RequestRef]
"""(owner's agent name, request). Several decode workers may have a ticket for the same request."""
OnRevoked = Callable[[bool], None]
"""Told once a revoked ticket's pages will not be touched any more; True if bytes of a failed write may be in the
network."""


@dataclass(eq=False)
class PageTransfer:
    """The pages of one request on their way to a decode worker."""

    session_id: int
    """Whose it is."""
    ticket: OutgoingTicket
    lease_end: float | None
    """On the worker's clock: nothing more may be started after it. None: no lease."""
    early_writes: tuple[PageWrite, ...] = ()
    """Layer groups of the last pages that were sent before the last layers were computed."""
    computed_at: float | None = None
    """When the last chunk was done."""
    num_bytes: int = 0
    num_bytes_while_computing: int = 0
    busy_seconds: float = 0.0
    busy_until: float = 0.0
    close_reason: str | None = None
    """Why the ticket is revoked; None while it is not."""
    ended_with_first_token: bool = False
    is_connection_down: bool = False
    """The connection over which a write failed has been taken down since."""
    waiters: list[OnRevoked] = field(default_factory=list)

    @property
    def ticket_id(self) -> TicketId:
        """Names the ticket at this worker."""
        return (self.ticket.agent_name, self.ticket.ref)

    def is_lease_over(self, now: float) -> bool:
        """Whether nothing more may be started on the ticket."""
        return self.lease_end is not None and now > self.lease_end

    def note_written(self, num_bytes: int, started: float, ended: float) -> None:
        """A write has ended well."""
        self.num_bytes += num_bytes
        if self.computed_at is None or ended <= self.computed_at:
            self.num_bytes_while_computing += num_bytes
        self.busy_seconds += max(0.0, ended - max(started, self.busy_until))
        self.busy_until = ended

    def moved(self, transport_name: str) -> inference_pb2.KvTransfer:
        """What was moved, as it is reported."""
        return inference_pb2.KvTransfer(
            bytes=self.num_bytes,
            transport=transport_name,
            gb_per_s=self.num_bytes / self.busy_seconds / 1e9 if self.busy_seconds > 0 else 0.0,
            bytes_while_computing=self.num_bytes_while_computing,
        )


class PageSender:
    """All tickets that this worker may write to. Lives on the engine thread."""

    def __init__(
        self, pool: PagePool, transfers: TransferThread, page_bytes: int, num_layer_groups: int, clock: Clock
    ) -> None:
        self._pool, self._transfers, self._clock = pool, transfers, clock
        self._page_bytes, self._num_layer_groups = page_bytes, num_layer_groups
        self._open: dict[TicketId, PageTransfer] = {}
        self._open_writes: set[PageWrite] = set()
        self._tombstones: OrderedDict[TicketId, bool] = OrderedDict()
        """Ended tickets, and whether one of their writes has failed."""
        self._unsure: dict[str, dict[TicketId, list[OnRevoked]]] = {}
        """By peer: ended tickets with a failed write whose connection is not down yet, and who waits for that."""

    def __repr__(self) -> str:
        return f"<PageSender {len(self._open)} open tickets, {len(self._open_writes)} open writes>"

    def __bool__(self) -> bool:
        """Whether a ticket or a write is open."""
        return bool(self._open or self._open_writes)

    def is_sending_to(self, agent_name: str) -> bool:
        """Whether a ticket of a decode worker is open."""
        return any(owner == agent_name for owner, _ in self._open)

    def transfers_to(self, agent_name: str) -> list[PageTransfer]:
        """Open transfers to a decode worker."""
        return [transfer for (owner, _), transfer in self._open.items() if owner == agent_name]

    def pages_read(self) -> Iterable[Iterable[int]]:
        """Our pages that open writes read."""
        return [write.local_pages for write in self._open_writes]

    def open(self, session_id: int, message: kv_pb2.PageTicket) -> PageTransfer | None:
        """Begins to use a ticket. None: it was used or revoked before."""
        lease_end = self._clock.now() + message.lease_ms / 1e3 if message.lease_ms else None
        transfer = PageTransfer(session_id, OutgoingTicket(message), lease_end)
        if transfer.ticket_id in self._tombstones or transfer.ticket_id in self._open:
            return None
        self._open[transfer.ticket_id] = transfer
        return transfer

    def send(
        self,
        transfer: PageTransfer,
        page_table: list[int],
        num_finished_pages: int,
        is_written: IsWritten | None = None,
        first_token: int | None = None,
    ) -> None:
        """Writes the pages that were finished since the last call. The first token goes with the last pages."""
        write = transfer.ticket.next_write(num_finished_pages, first_token)
        if write is None:
            return
        indices = range(write.first_page, write.first_page + write.num_pages)
        group = self._num_layer_groups - 1 if transfer.early_writes else None
        self._post(transfer, page_table, indices, write.payload, group, is_written, transfer.early_writes)

    def send_layer_group(
        self, transfer: PageTransfer, page_table: list[int], layer_group: int, is_written: IsWritten | None
    ) -> None:
        """Writes one layer group, but not the last one, of all pages that are not sent yet."""
        indices = transfer.ticket.next_early_write()
        transfer.early_writes += (self._post(transfer, page_table, indices, b"", layer_group, is_written),)

    def write_ended(self, message: WriteEnded) -> PageTransfer | None:
        """A write is terminal. Returns its transfer if that has ended with it."""
        self._open_writes.discard(message.write)
        transfer = message.write.tag
        assert isinstance(transfer, PageTransfer)
        self._pool.unpin(message.write.local_pages)
        transfer.ticket.write_ended(message.ok)
        if message.ok:
            transfer.note_written(self.num_bytes(message.write), message.started, message.ended)
        else:
            transfer.is_connection_down = False  # the transfer thread tells when it is
        return self._end_if_terminal(transfer)

    def num_bytes(self, write: PageWrite) -> int:
        """Bytes that a write moves."""
        num_bytes = len(write.local_pages) * self._page_bytes
        return num_bytes if write.layer_group is None else num_bytes // self._num_layer_groups

    def stop(self, transfer: PageTransfer, reason: str, ended_with_first_token: bool = False) -> PageTransfer | None:
        """Starts nothing more on a ticket. Returns the transfer if it has ended with this; else it ends with its last
        open write. Its owner hears of it then. Harmless if the transfer has ended."""
        transfer.close_reason = transfer.close_reason or reason
        transfer.ended_with_first_token |= ended_with_first_token
        transfer.ticket.stop()
        return self._end_if_terminal(transfer)

    def revoked_by_owner(self, asked: kv_pb2.RevokeTicketRequest, on_revoked: OnRevoked) -> PageTransfer | None:
        """The owner wants its pages back. on_revoked: called once they will not be touched any more.

        Returns the transfer to stop, if it is open.
        """
        ticket_id = (asked.agent_name, RequestRef.from_proto(asked.ref))
        transfer = self._open.get(ticket_id)
        has_failed_write = self._bury(ticket_id, has_failed_write=False)
        unsure = self._unsure.get(asked.agent_name, {})
        if ticket_id in unsure:
            unsure[ticket_id].append(on_revoked)
        elif transfer is None:
            on_revoked(has_failed_write)
        else:
            transfer.waiters.append(on_revoked)
        return transfer

    def peer_disconnected(self, agent_name: str) -> None:
        """The connection to a decode worker is down: nothing that failed on it can be sent any more."""
        for transfer in self.transfers_to(agent_name):
            if transfer.ticket.has_failed_write:
                transfer.is_connection_down = True
        for waiters in self._unsure.pop(agent_name, {}).values():
            _call(waiters, True)

    def _post(
        self,
        transfer: PageTransfer,
        page_table: list[int],
        indices: range,
        payload: bytes,
        layer_group: int | None,
        is_written: IsWritten | None,
        after: tuple[PageWrite, ...] = (),
    ) -> PageWrite:
        """Posts a write of the pages at some indices of the ticket. They stay pinned until the write has ended."""
        ticket = transfer.ticket
        first = ticket.first_page_index + indices.start
        local_pages = tuple(page_table[first : first + len(indices)])
        self._pool.pin(local_pages)
        remote_pages = ticket.page_ids[indices.start : indices.stop]
        write = PageWrite(
            transfer, ticket.agent_name, local_pages, remote_pages, payload, layer_group, is_written, after
        )
        self._open_writes.add(write)
        self._transfers.write(write)
        return write

    def _end_if_terminal(self, transfer: PageTransfer) -> PageTransfer | None:
        """The end of every transfer: nothing is open, and nothing more will be started."""
        ticket = transfer.ticket
        if not ticket.is_terminal or self._open.pop(transfer.ticket_id, None) is None:
            return None
        if not ticket.has_failed_write:
            if transfer.close_reason is not None:
                payload = ticket.closed_message(transfer.close_reason, transfer.ended_with_first_token)
                self._transfers.notify(ticket.agent_name, payload)
            _call(transfer.waiters, False)
            return transfer
        # What became of the bytes of the failed write is not known until its connection is down.
        self._bury(transfer.ticket_id, has_failed_write=True)
        if transfer.is_connection_down:
            _call(transfer.waiters, True)
        else:
            self._unsure.setdefault(ticket.agent_name, {})[transfer.ticket_id] = transfer.waiters
        return transfer

    def _bury(self, ticket_id: TicketId, has_failed_write: bool) -> bool:
        """Remembers that a ticket has ended. Returns whether one of its writes is known to have failed."""
        self._tombstones[ticket_id] = has_failed_write or self._tombstones.get(ticket_id, False)
        self._tombstones.move_to_end(ticket_id)
        while len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)
        return self._tombstones[ticket_id]


def _call(waiters: Iterable[OnRevoked], needs_fence: bool) -> None:
    for on_revoked in waiters:
        on_revoked(needs_fence)
