"""The decode worker's loop: receive, schedule, run, deliver.

The life of a request here:

1. *reserved*   ReserveCommand came, pages are set aside and open to one writer, the router has the ticket.
2. *receiving*  notifications account for pages; the last brings the first token.
3. *running*    every page is here; one token per step. No prompt token is ever computed here.
4. *released*   it ended. Pages that the writer may still touch are quarantined until it let go for sure; the others
                stay as cache, and a request that begins alike gets no pages sent that are here already.

A running request may be handed back instead (*preempted*): its pages were needed by older ones.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

import grpc
from google.protobuf.message import DecodeError

from decode_service.config import DecodeConfig
from decode_service.scheduler import DecodeScheduler, DecodeStep
from decode_service.ticket_closer import TicketCloser, Writer
from engine.model_runner import StepLogits, StepRunner
from engine.prefix_cache import PrefixCache
from engine.sampler import Choice
from engine.sequence import Sequence
from kv_transfer.base import Notification
from kv_transfer.tickets import IncomingTicket, TicketKey
from kv_transfer.transfer_thread import Fenced
from protos import kv_pb2, worker_pb2
from worker_runtime.answering_loop import AnsweringLoop
from worker_runtime.engine_loop import PageOwners
from worker_runtime.inbox import (
    InboxMessage,
    QuarantineTimeout,
    SessionClosed,
    SessionCommand,
    SessionOpened,
    TicketOverdue,
    WriterGone,
    WriterMet,
)
from worker_runtime.load_reporter import LoadReporter
from worker_runtime.parts import WorkerParts
from worker_runtime.request import StopRule, check_command, failure_event, logprobs_message, sampling_params
from worker_runtime.stamps import Stamps

log = logging.getLogger(__name__)

OVERDUE_SECONDS = 2.0
"""A notification that is later than this after the writer's last write is lost. It travels with the data."""


@dataclass(eq=False)
class _Request:
    """One sequence and where its pages come from."""

    session_id: int
    sequence: Sequence
    ticket: IncomingTicket
    writer: Writer
    stop: StopRule
    was_preempted: bool
    stamps: Stamps = field(default_factory=Stamps)
    num_computed_prompt_tokens: int = 0


class DecodeLoop(AnsweringLoop[DecodeStep, _Request]):
    """Owns scheduler, page pool and requests; only its thread touches them."""

    def __init__(self, parts: WorkerParts, runner: StepRunner, closer: TicketCloser, config: DecodeConfig) -> None:
        super().__init__(parts, runner, config.overlap)
        self._closer, self._vocab_size = closer, parts.vocab_size
        self._cache = PrefixCache(parts.pool, parts.page_size, config.prefix_cache)
        self._reporter = LoadReporter(parts.sessions, self._cache)
        self._scheduler = DecodeScheduler(
            parts.pool, self._cache, parts.page_size, config.max_num_sequences, config.decode_admission
        )
        self._prompt_tokens = self._hit_tokens = 0
        self._requests: dict[TicketKey, _Request] = {}
        self._quarantined: dict[TicketKey, IncomingTicket] = {}
        self._quarantined_since: dict[TicketKey, float] = {}
        self._quarantine_timeout = config.quarantine_timeout
        parts.metrics.quarantine_age.set_function(self._quarantine_age)

    def _plan(self) -> DecodeStep | None:
        step = self._scheduler.schedule(find_pages=self._deliver_under_way)
        for sequence in step.preempted if step is not None else ():
            self._hand_back(self._by_sequence[sequence.sequence_id])
        return step

    def _has_open_work(self) -> bool:
        return bool(self._requests or self._quarantined or self._has_step_under_way())

    def _hand_over(self) -> None:
        self._deliver_under_way()
        for request in list(self._requests.values()):
            self._hand_back(request, is_draining=True)

    def _page_owners(self) -> PageOwners:
        receiving = [r.ticket for r in self._requests.values() if not r.ticket.is_terminal]
        return PageOwners(
            tables=[r.sequence.page_table for r in self._requests.values()],
            writes=[ticket.page_ids for ticket in [*receiving, *self._quarantined.values()]],
        )

    def _begin(self, step: DecodeStep) -> None:
        for entry in step.batch:
            request = self._by_sequence[entry.sequence.sequence_id]
            request.stamps.reach(worker_pb2.STAGE_DECODE_STARTED)
            if entry.sequence.num_computed_tokens < entry.sequence.num_prompt_tokens:
                request.num_computed_prompt_tokens += entry.num_new_tokens

    def _advance(self, step: DecodeStep, logits: StepLogits) -> None:
        self._scheduler.update(step)

    def _note_time(self, step: DecodeStep, seconds: float, is_over: bool) -> None:
        self._parts.metrics.step_seconds.observe(seconds)

    # receive

    def _receive(self, wait: bool) -> bool:
        if not super()._receive(wait):
            return False
        receiving = any(not r.ticket.is_terminal for r in self._requests.values())
        # Bytes for quarantined pages must arrive before the pages are given away, so progress is driven for them too.
        self._parts.transfers.expect(receiving or bool(self._quarantined))
        return True

    def _handle(self, message: InboxMessage) -> None:
        match message:
            case SessionOpened(session_id):
                self._reporter.tell_newcomer(session_id)
            case SessionCommand(session_id, request):
                self._handle_command(session_id, request)
            case SessionClosed(session_id):
                for orphan in [r for r in self._requests.values() if r.session_id == session_id]:
                    self._release(orphan)
                    self._parts.metrics.count_end("aborted")
            case Notification(sender, payload):
                self._on_notification(sender, payload)
            case WriterGone(request_id, attempt, reason, needs_fence):
                if needs_fence:
                    self._parts.transfers.fence((request_id, attempt))
                else:
                    self._on_writer_gone((request_id, attempt), reason)
            case Fenced(tag):
                assert isinstance(tag, tuple)
                self._on_writer_gone(tag, "the writer is gone, and so are its bytes")
            case WriterMet(agent_name, probe_id, reason):
                self._tell_probed(agent_name, probe_id, equal=True, reason=reason)
            case TicketOverdue(request_id, attempt):
                self._on_ticket_overdue((request_id, attempt))
            case QuarantineTimeout(request_id, attempt):
                reason = "--quarantine-timeout passed; if its writer lives, it may still write"
                if (request_id, attempt) in self._quarantined:
                    log.error("pages taken back unsafely", extra={"request_id": request_id, "reason": reason})
                self._on_writer_gone((request_id, attempt), reason)

    def _handle_command(self, session_id: int, request: worker_pb2.SessionRequest) -> None:
        match request.WhichOneof("command"):
            case "reserve":
                self._reserve(session_id, request.reserve)
            case "abort":
                found = self._requests.get((request.abort.request_id, request.abort.attempt))
                if found is not None and found.session_id == session_id:
                    if request.abort.is_complete:
                        self._scheduler.finish(found.sequence)
                    self._release(found)
                    self._parts.metrics.count_end("aborted")
            case "transfer_done":
                done = request.transfer_done
                receiving = self._requests.get((done.request_id, done.attempt))
                if receiving is not None and not receiving.ticket.is_terminal:
                    self._parts.deliver_later(OVERDUE_SECONDS, TicketOverdue(done.request_id, done.attempt))
            case "flush_cache":
                self._cache.flush()
            case other:
                log.warning("ignored a command that is not for a decode worker", extra={"command": other})

    def _reserve(self, session_id: int, command: worker_pb2.ReserveCommand) -> None:
        key = (command.request_id, command.attempt)
        sequence = Sequence(
            sequence_id=f"{command.request_id}#{command.attempt}",
            token_ids=list(command.token_ids),
            num_prompt_tokens=command.num_prompt_tokens,
            sampling=sampling_params(command.sampling, command.stop),
            cache_salt=command.cache_salt,
        )
        max_num_tokens = command.num_prompt_tokens + command.stop.max_tokens
        if self._is_draining:
            # It crossed the news on its way; the router has heard it by now.
            self._refuse(session_id, key, "draining")
            return
        refusal = check_command(command, self._vocab_size)
        if key in self._requests or key in self._quarantined:
            refusal = f"request {command.request_id}, attempt {command.attempt}, is known already"
        elif not self._scheduler.can_ever_fit(max_num_tokens):
            refusal = (
                f"prompt and answer need {self._scheduler.pages_needed(max_num_tokens)} pages, "
                f"the decode worker has {self._parts.pool.num_pages}"
            )
        if refusal is not None:
            self._send_failure(session_id, key, grpc.StatusCode.INVALID_ARGUMENT, refusal, retryable=False)
            return
        shortage = self._scheduler.reserve(sequence, command.stop.max_tokens, command.was_preempted)
        if shortage is not None:
            self._refuse(session_id, key, shortage)
            return
        num_cached_pages = sequence.num_cached_tokens // self._parts.page_size
        self._prompt_tokens += sequence.num_tokens
        self._hit_tokens += sequence.num_cached_tokens
        self._parts.metrics.cached_tokens.inc(sequence.num_cached_tokens)
        ticket = IncomingTicket(*key, sequence.page_table[num_cached_pages:], command.writer_agent_name)
        self._parts.pool.open_to_writer(ticket.page_ids)
        writer = Writer(command.writer_agent_name, command.writer_incarnation_id, command.writer_address)
        request = _Request(session_id, sequence, ticket, writer, StopRule(command.stop), command.was_preempted)
        self._requests[key] = request
        self._by_sequence[sequence.sequence_id] = request
        request.stamps.reach(worker_pb2.STAGE_RESERVED)
        reserved = worker_pb2.ReservedEvent(
            request_id=key[0],
            attempt=key[1],
            ticket=kv_pb2.PageTicket(
                request_id=key[0],
                attempt=key[1],
                agent_name=self._parts.agent_name,
                page_ids=ticket.page_ids,
                first_page_index=num_cached_pages,
                lease_ms=command.deadline_ms,
            ),
            stamps=request.stamps.take(),
            num_cached_tokens=sequence.num_cached_tokens,
        )
        self._parts.sessions.add(session_id, worker_pb2.SessionResponse(reserved=reserved))

    def _refuse(self, session_id: int, key: TicketKey, short_of: str) -> None:
        refused = worker_pb2.RefusedEvent(request_id=key[0], attempt=key[1], short_of=short_of)
        self._parts.sessions.add(session_id, worker_pb2.SessionResponse(refused=refused))

    def _on_notification(self, sender: str, payload: bytes) -> None:
        try:
            notification = kv_pb2.KvNotification.FromString(payload)
        except DecodeError:
            self._parts.metrics.ignored_notifications.inc()
            return
        if notification.HasField("probe"):
            self._on_probe(sender, notification.probe)
            return
        key = (notification.request_id, notification.attempt)
        request = self._requests.get(key)
        ticket = request.ticket if request is not None else self._quarantined.get(key)
        if ticket is None or ticket.writer_agent_name != sender or not ticket.accept(notification):
            self._parts.metrics.ignored_notifications.inc()
            return
        if not ticket.is_terminal:
            return
        self._parts.pool.close_to_writer(ticket.page_ids)
        if request is None:
            del self._quarantined[key], self._quarantined_since[key]
            self._closer.settled(*key)
        elif ticket.is_complete:
            self._start(request)
        elif ticket.answer_ended:
            self._release(request)
            self._parts.metrics.count_end("finished")
        else:
            self._fail(request, grpc.StatusCode.UNAVAILABLE, f"prefill gave up: {ticket.close_reason}", retryable=True)

    def _on_probe(self, sender: str, probe: kv_pb2.Probe) -> None:
        """Test pages came: are they what was sent? If so, their writer has to answer at its address too."""
        if not probe.sha256:
            return  # the first write of a test is for its time only
        pages = self._parts.probe_pages
        equal = pages.digest() == probe.sha256
        pages.clear()
        if not equal:
            self._tell_probed(sender, probe.probe_id, equal=False)
            return
        writer = Writer(sender, sender.rpartition("/")[2], probe.writer_address)
        inbox, probe_id = self._parts.inbox, probe.probe_id
        self._closer.meet(writer, lambda reason: inbox.put(WriterMet(sender, probe_id, reason)))

    def _tell_probed(self, agent_name: str, probe_id: str, equal: bool, reason: str = "") -> None:
        """All routers hear how a test ended; the one that asked for it knows its name."""
        probed = worker_pb2.ProbedEvent(writer_agent_name=agent_name, probe_id=probe_id, equal=equal, reason=reason)
        for session_id in self._parts.sessions.all_ids():
            self._parts.sessions.add(session_id, worker_pb2.SessionResponse(probed=probed))

    def _start(self, request: _Request) -> None:
        """All KV is here: decoding goes on from the first token."""
        sequence = request.sequence
        assert request.ticket.first_token is not None
        request.stamps.reach(worker_pb2.STAGE_TRANSFER_FINISHED)
        sequence.num_computed_tokens = sequence.num_tokens
        self._scheduler.start(sequence)
        sequence.token_ids.append(request.ticket.first_token)

    # deliver

    def _append_token(self, request: _Request, token: int, choice: Choice) -> worker_pb2.TokenOutput:
        sequence = request.sequence
        sequence.token_ids.append(token)
        self._parts.metrics.output_tokens.inc()
        finish_reason = request.stop.finish_reason(sequence)
        if finish_reason:
            request.stamps.reach(worker_pb2.STAGE_FINISHED)
        output = worker_pb2.TokenOutput(
            request_id=request.ticket.key[0],
            attempt=request.ticket.key[1],
            first_index=sequence.num_output_tokens - 1,
            token_ids=[token],
            finish_reason=finish_reason,
            stamps=request.stamps.take(),
        )
        if choice.logprobs is not None:
            output.logprobs.CopyFrom(logprobs_message([choice.logprobs]))
        if finish_reason:
            output.num_computed_prompt_tokens = request.num_computed_prompt_tokens
            self._scheduler.finish(sequence)
            self._release(request)
            self._parts.metrics.count_end("finished")
        return output

    # ends

    def _hand_back(self, request: _Request, is_draining: bool = False) -> None:
        """Its pages were needed, or this worker ends: the router resumes it, ahead of new requests."""
        sequence, key = request.sequence, request.ticket.key
        log.info("request handed back", extra={"request_id": key[0], "output_tokens": sequence.num_output_tokens})
        if not is_draining:
            self._parts.metrics.count_preemption(is_repeated=request.was_preempted)
        event = worker_pb2.PreemptedEvent(
            request_id=key[0],
            attempt=key[1],
            output_token_ids=sequence.token_ids[sequence.num_prompt_tokens :],
            is_draining=is_draining,
        )
        self._parts.sessions.add(request.session_id, worker_pb2.SessionResponse(preempted=event))
        self._release(request)

    def _fail(self, request: _Request, code: grpc.StatusCode, message: str, retryable: bool) -> None:
        """Ends a request and tells the router why."""
        self._send_failure(request.session_id, request.ticket.key, code, message, retryable)
        self._release(request)
        self._parts.metrics.count_end("failed")

    def _release(self, request: _Request) -> None:
        """Forgets a request. If its writer may still write, the pages wait in quarantine and the writer is asked."""
        del self._requests[request.ticket.key]
        del self._by_sequence[request.sequence.sequence_id]
        self._scheduler.release(request.sequence)
        if not request.ticket.is_terminal:
            self._quarantined[request.ticket.key] = request.ticket
            self._quarantined_since[request.ticket.key] = time.monotonic()
            if self._quarantine_timeout is not None:
                self._parts.deliver_later(self._quarantine_timeout, QuarantineTimeout(*request.ticket.key))
            self._closer.close(self._parts.agent_name, *request.ticket.key, request.writer)

    def _on_ticket_overdue(self, key: TicketKey) -> None:
        """The writer has sent everything, its word of it is lost: rather computed again than waited for."""
        request = self._requests.get(key)
        if request is not None and not request.ticket.is_terminal:
            reason = "prefill has sent all pages, but its notification did not come"
            self._fail(request, grpc.StatusCode.UNAVAILABLE, reason, retryable=True)

    def _on_writer_gone(self, key: TicketKey, reason: str) -> None:
        ticket = self._quarantined.pop(key, None)
        if ticket is not None:
            del self._quarantined_since[key]
            self._closer.settled(*key)
            self._parts.pool.close_to_writer(ticket.page_ids)
            log.debug("pages left quarantine", extra={"request_id": key[0], "attempt": key[1], "reason": reason})

    def _send_failure(
        self, session_id: int, key: TicketKey, code: grpc.StatusCode, message: str, retryable: bool
    ) -> None:
        log.warning("request failed", extra={"request_id": key[0], "attempt": key[1], "reason": message})
        event = failure_event(*key, code, message, retryable)
        self._parts.sessions.add(session_id, event)

    def _quarantine_age(self) -> float:
        """Seconds since the oldest pages went into quarantine. Called by whichever thread serves metrics."""
        now = time.monotonic()
        return now - min(list(self._quarantined_since.values()), default=now)

    def _report_load(self) -> None:
        scheduler, counts = self._scheduler, self._parts.pool.counts()
        self._parts.metrics.set_sequences(
            receiving=scheduler.num_sequences - scheduler.num_running, running=scheduler.num_running
        )
        load = worker_pb2.LoadReport(
            free_pages=counts.free,
            cached_pages=counts.cached,
            held_pages=counts.held,
            promised_pages=scheduler.expected_growth_pages,
            num_sequences=scheduler.num_sequences,
            quarantined_pages=counts.quarantined,
            hit_rate=self._hit_tokens / self._prompt_tokens if self._prompt_tokens else 0.0,
        )
        self._parts.metrics.expected_growth_pages.set(load.promised_pages)
        self._reporter.report(load)
