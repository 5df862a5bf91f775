"""What a decode worker does besides the engine loop: it receives the pages of prompts and generates.

The life of a request here:

1. *reserved*   ReserveCommand came, pages are set aside and open to one writer, the router has the ticket.
2. *receiving*  notifications account for pages; the last one brings the first token.
3. *running*    every page has arrived; one token per step. No prompt token is ever computed here.
4. *ended*      pages that the writer may still touch are quarantined until it has let go for sure. The other pages
                stay cached: a request that begins with the same tokens is not sent them again.

If older sequences need its pages, a request is preempted and goes back to its router.
"""

from __future__ import annotations

import logging

from google.protobuf.message import DecodeError

from decode_service.config import DecodeConfig
from decode_service.incoming_tickets import IncomingTickets
from decode_service.scheduler import DecodeScheduler
from decode_service.ticket_revoker import TicketRevoker, Writer
from engine.model_runner import StepRunner
from engine.prefix_cache import PrefixCache
from kv_transfer.base import Notification
from kv_transfer.request_ref import RequestRef
from kv_transfer.tickets import IncomingTicket
from kv_transfer.transfer_thread import Fenced
from protos import kv_pb2, worker_pb2
from worker_runtime.engine_loop import EngineLoop
from worker_runtime.inbox import InboxMessage, QuarantineTimeout, TicketOverdue, WriterChecked, WriterGone
from worker_runtime.parts import WorkerParts
from worker_runtime.request import WorkerRequest
from worker_runtime.request_table import FINISHED, Refusal, RequestTable, ended_by
from worker_runtime.tier_hooks import PageOwners, TierHooks

log = logging.getLogger(__name__)

OVERDUE_SECONDS = 2.0
"""A notification travels with its data. One that is later than this after the writer's last write is lost."""
SHORTAGES = {"pages": worker_pb2.CAUSE_NO_PAGES, "sequences": worker_pb2.CAUSE_NO_SEQUENCES}


class DecodeLoop(TierHooks):
    """A decode worker's engine loop and what belongs to this tier. `run` and `turn` are the loop's."""

    def __init__(self, parts: WorkerParts, runner: StepRunner, revoker: TicketRevoker, config: DecodeConfig) -> None:
        self._parts, self._revoker, self._quarantine_timeout = parts, revoker, config.quarantine_timeout
        cache = PrefixCache(parts.pool, parts.page_size, config.prefix_cache)
        self.scheduler = DecodeScheduler(
            parts.pool, cache, parts.page_size, config.max_num_sequences, config.decode_admission
        )
        self.requests = RequestTable(parts, self.scheduler, self._revoke)
        self.tickets = IncomingTickets(parts.pool, revoker, parts.agent_name, parts.clock)
        self._loop = EngineLoop(parts, runner, cache, self.scheduler, self.requests, self, config.overlap)
        self.run, self.turn = self._loop.run, self._loop.turn
        parts.metrics.quarantine_age.set_function(self.tickets.quarantine_age)

    def __repr__(self) -> str:
        return f"<DecodeLoop {self._loop!r} {self.tickets!r}>"

    @property
    def is_busy(self) -> bool:
        """See `EngineLoop.is_busy`."""
        return self._loop.is_busy

    # messages

    def handle(self, message: InboxMessage) -> None:
        """See `TierHooks.handle`."""
        match message:
            case Notification(sender, payload):
                self._on_notification(sender, payload)
            case WriterGone(ref, reason, needs_fence):
                if needs_fence:
                    self._parts.transfers.fence(ref)
                else:
                    self._on_writer_gone(ref, reason)
            case Fenced(tag):
                assert isinstance(tag, RequestRef)
                self._on_writer_gone(tag, "the writer is gone, and so are its bytes")
            case WriterChecked(agent_name, test_id, reason):
                self._tell_pair_tested(agent_name, test_id, equal=True, reason=reason)
            case TicketOverdue(ref):
                self._on_ticket_overdue(ref)
            case QuarantineTimeout(ref):
                reason = "--quarantine-timeout passed; if its writer lives, it may still write"
                if self.tickets.is_quarantined(ref):
                    log.error("pages taken back unsafely", extra={"request_id": ref.request_id, "reason": reason})
                self._on_writer_gone(ref, reason)
        self._parts.transfers.expect(bool(self.tickets))

    def handle_command(self, session_id: int, request: worker_pb2.SessionRequest) -> bool:
        """See `TierHooks.handle_command`."""
        match request.WhichOneof("command"):
            case "reserve":
                self._reserve(session_id, request.reserve)
            case "transfer_done":
                ref = RequestRef.from_proto(request.transfer_done.ref)
                if ref in self.tickets:
                    self._parts.deliver_later(OVERDUE_SECONDS, TicketOverdue(ref))
            case _:
                return False
        return True

    def _reserve(self, session_id: int, command: worker_pb2.ReserveCommand) -> None:
        request = self.requests.admit(session_id, command.ref, command.spec, self._enqueue)
        if request is None:
            return
        sequence = request.sequence
        num_cached_pages = sequence.num_cached_tokens // self._parts.page_size
        self._loop.note_cached(sequence)
        page_ids = sequence.page_table[num_cached_pages:]
        writer = Writer(command.writer.agent_name, command.writer.incarnation_id, command.writer.address)
        self.tickets.open(request.ref, page_ids, writer)
        request.stamps.reach(worker_pb2.STAGE_RESERVED)
        reserved = worker_pb2.ReservedEvent(
            ref=command.ref,
            ticket=kv_pb2.PageTicket(
                ref=command.ref,
                agent_name=self._parts.agent_name,
                page_ids=page_ids,
                first_page_index=num_cached_pages,
                lease_ms=command.spec.deadline_ms,
            ),
            stamps=request.stamps.take(),
            num_cached_tokens=sequence.num_cached_tokens,
        )
        self._parts.sessions.add(session_id, worker_pb2.SessionResponse(reserved=reserved))

    def _enqueue(self, request: WorkerRequest) -> Refusal | None:
        ref, max_tokens = request.ref, request.stop.max_tokens
        max_num_tokens = request.sequence.num_prompt_tokens + max_tokens
        if ref in self.tickets:
            message = f"request {ref.request_id}, attempt {ref.attempt}, is known already"
            return Refusal(worker_pb2.CAUSE_INVALID, message)
        if not self.scheduler.can_ever_fit(max_num_tokens):
            needed, total = self.scheduler.pages_needed(max_num_tokens), self._parts.pool.num_pages
            message = f"prompt and output need {needed} pages, the decode worker has {total}"
            return Refusal(worker_pb2.CAUSE_INVALID, message)
        shortage = self.scheduler.reserve(request.sequence, max_tokens, request.was_preempted)
        return Refusal(SHORTAGES[shortage]) if shortage is not None else None

    def _on_notification(self, sender: str, payload: bytes) -> None:
        try:
            notification = kv_pb2.KvNotification.FromString(payload)
        except DecodeError:
            self._parts.metrics.ignored_notifications.inc()
            return
        if notification.HasField("pair_test"):
            self._on_test_pages(sender, notification.pair_test)
            return
        ticket = self.tickets.hear(sender, notification)
        if ticket is None:
            self._parts.metrics.ignored_notifications.inc()
            return
        request = self.requests.get(ticket.ref)
        if request is not None and ticket.is_terminal:
            self._on_ticket_terminal(request, ticket)

    def _on_ticket_terminal(self, request: WorkerRequest, ticket: IncomingTicket) -> None:
        """Every page has arrived, or the writer writes no more of them."""
        if ticket.is_complete:
            assert ticket.first_token is not None
            self._start(request, ticket.first_token)
        elif ticket.ended_with_first_token:
            self.requests.end(request, FINISHED)
        else:
            reason = f"prefill gave up: {ticket.close_reason}"
            self.requests.end(request, ended_by(worker_pb2.CAUSE_TRANSFER_FAILED, reason))

    def _start(self, request: WorkerRequest, first_token: int) -> None:
        """All KV is here: the output is continued behind its first token, which the prefill worker has sampled."""
        sequence = request.sequence
        request.stamps.reach(worker_pb2.STAGE_TRANSFER_FINISHED)
        sequence.num_computed_tokens = sequence.num_tokens
        self.scheduler.start(sequence)
        sequence.token_ids.append(first_token)

    def _on_test_pages(self, sender: str, test: kv_pb2.PairTest) -> None:
        """Test pages arrived. If they are as they were sent, their writer must also respond at its address."""
        if not test.sha256:
            return  # the first write of a test is for its latency only
        pages = self._parts.test_pages
        equal = pages.digest() == test.sha256
        pages.clear()
        if not equal:
            self._tell_pair_tested(sender, test.test_id, equal=False)
            return
        writer = Writer(sender, sender.rpartition("/")[2], test.writer_address)
        inbox, test_id = self._parts.inbox, test.test_id
        self._revoker.check_address(writer, lambda reason: inbox.put(WriterChecked(sender, test_id, reason)))

    def _tell_pair_tested(self, agent_name: str, test_id: str, equal: bool, reason: str = "") -> None:
        """All routers hear how a test ended; the one that asked for it knows its name."""
        tested = worker_pb2.PairTestedEvent(writer_agent_name=agent_name, test_id=test_id, equal=equal, reason=reason)
        for session_id in self._parts.sessions.all_ids():
            self._parts.sessions.add(session_id, worker_pb2.SessionResponse(pair_tested=tested))

    def preempt(self, request: WorkerRequest) -> None:
        """See `TierHooks.preempt`. The router resumes the request, ahead of new requests."""
        self._parts.metrics.count_preemption(is_repeated=request.was_preempted)
        reason = "the decode worker ran out of pages"
        self.requests.end(request, ended_by(worker_pb2.CAUSE_NO_PAGES, reason))

    # ends

    def _revoke(self, request: WorkerRequest, reason: str) -> None:
        """A request has ended. If its writer may still write, the pages wait in quarantine and the writer is asked."""
        if self.tickets.revoke(request.ref) and self._quarantine_timeout is not None:
            self._parts.deliver_later(self._quarantine_timeout, QuarantineTimeout(request.ref))

    def _on_ticket_overdue(self, ref: RequestRef) -> None:
        """The writer has sent everything and its notification is lost: the request is retried, not waited for."""
        request = self.requests.get(ref)
        if request is not None and ref in self.tickets:
            reason = "prefill has sent all pages, but its notification did not come"
            self.requests.end(request, ended_by(worker_pb2.CAUSE_TRANSFER_FAILED, reason))

    def _on_writer_gone(self, ref: RequestRef, reason: str) -> None:
        if self.tickets.is_quarantined(ref):
            about = {"request_id": ref.request_id, "attempt": ref.attempt, "reason": reason}
            log.debug("pages left quarantine", extra=about)
            self.tickets.writer_gone(ref)

    def has_open_transfers(self) -> bool:
        """See `TierHooks.has_open_transfers`."""
        return bool(self.tickets)

    def page_owners(self) -> PageOwners:
        """See `TierHooks.page_owners`."""
        return PageOwners(
            tables=[request.sequence.page_table for request in self.requests], writes=self.tickets.pages_open()
        )
