"""The prefill worker's loop: receive, schedule, run, deliver.

The life of a request here:

1. *waiting*    PrefillCommand came with a page ticket of a decode worker.
2. *running*    its chunks are computed; pages that are finished are written to the decode worker meanwhile.
3. *sending*    the last chunk is done and the first token chosen; the last pages are on their way.
4. *ended*      every write is terminal. Our pages are free, the router knows what was moved.

An abort, a failed write or a lost router ends any state: nothing more is computed or started, and once the open
writes have ended the decode worker is told that its pages are closed to us.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc

from engine.model_runner import StepLogits, StepRunner
from engine.sampler import sample
from engine.sequence import Sequence, num_pages_for
from kv_transfer.base import Notification
from kv_transfer.tickets import OutgoingTicket
from kv_transfer.transfer_thread import PageWrite, PeerConnected, PeerFailed, WriteEnded
from prefill_service.scheduler import PrefillScheduler, PrefillStep
from protos import inference_pb2, kv_pb2, worker_pb2
from worker.inbox import CloseTicket, InboxMessage, SessionClosed, SessionCommand, Stop
from worker.process import WorkerParts
from worker.request import StopRule, check_token_ids, sampling_params
from worker.stamps import Stamps

log = logging.getLogger(__name__)

MAX_TOMBSTONES = 10_000
"""Closed tickets remembered, so that a late command can't use one."""

# A ticket is named by its owner too: request ids are chosen by clients, and several routers may share a worker.
RequestKey = tuple[str, str, int]
"""(owner's agent name, request id, attempt)"""


@dataclass(eq=False)
class _Request:
    """One prompt and its way to the decode worker."""

    session_id: int
    sequence: Sequence
    ticket: OutgoingTicket
    stop: StopRule
    stamps: Stamps = field(default_factory=Stamps)
    lease_end: float | None = None
    num_chunks: int = 0
    computed_at: float | None = None
    """When the last chunk was done."""
    bytes_sent: int = 0
    bytes_while_computing: int = 0
    busy_seconds: float = 0.0
    busy_until: float = 0.0
    close_reason: str | None = None
    """Why the ticket is closed early; None while it is not."""
    waiters: list[Callable[[], None]] = field(default_factory=list)

    @property
    def key(self) -> RequestKey:
        return (self.ticket.agent_name, *self.ticket.key)


class PrefillWorker:
    """Owns scheduler, page pool and requests; only its thread touches them."""

    def __init__(
        self, parts: WorkerParts, runner: StepRunner, token_budget: int, max_num_sequences: int, vocab_size: int
    ) -> None:
        self._parts, self._runner, self._vocab_size = parts, runner, vocab_size
        self._scheduler = PrefillScheduler(parts.pool, parts.page_size, token_budget, max_num_sequences)
        self._requests: dict[RequestKey, _Request] = {}
        self._by_sequence: dict[str, _Request] = {}
        self._tombstones: OrderedDict[RequestKey, None] = OrderedDict()
        self._peer_sessions: dict[str, set[int]] = {}
        self._last_load: worker_pb2.LoadReport | None = None

    def run(self) -> None:
        """Runs until a Stop message."""
        step: PrefillStep | None = None
        while self._receive(wait=step is None):
            step = self._scheduler.schedule()
            if step is not None:
                self._run_and_deliver(step)
            self._report_load()
            self._parts.sessions.flush()

    def _run_and_deliver(self, step: PrefillStep) -> None:
        started = time.monotonic()
        for entry in step.batch:
            self._by_sequence[entry.sequence.sequence_id].stamps.reach(worker_pb2.STAGE_PREFILL_STARTED)
        try:
            logits = self._runner.run(step.batch)
            self._deliver(step, logits)
        except Exception as error:
            log.exception("a prefill step failed")
            for entry in step.batch:
                request = self._by_sequence.get(entry.sequence.sequence_id)
                if request is not None:
                    self._fail(request, grpc.StatusCode.INTERNAL, f"the prefill step failed: {error}", retryable=False)
        self._parts.metrics.step_seconds.observe(time.monotonic() - started)
        self._parts.metrics.prompt_tokens.inc(step.num_tokens)

    # receive

    def _receive(self, wait: bool) -> bool:
        """Handles what arrived. False: stop."""
        for message in self._parts.inbox.take(wait):
            if isinstance(message, Stop):
                return False
            self._handle(message)
        return True

    def _handle(self, message: InboxMessage) -> None:
        match message:
            case SessionCommand(session_id, request):
                self._handle_command(session_id, request)
            case SessionClosed(session_id):
                for orphan in [r for r in self._requests.values() if r.session_id == session_id]:
                    self._end_early(orphan, "its router is gone")
                    self._parts.metrics.count_end("aborted")
            case WriteEnded():
                self._on_write_ended(message)
            case PeerConnected(agent_name):
                self._tell_peer_state(agent_name, True, "")
            case PeerFailed(agent_name, reason):
                self._on_peer_failed(agent_name, reason)
            case CloseTicket(asked, done):
                self._close_ticket(asked, done)
            case Notification():
                # Nobody writes to a prefill worker.
                self._parts.metrics.ignored_notifications.inc()

    def _handle_command(self, session_id: int, request: worker_pb2.SessionRequest) -> None:
        match request.WhichOneof("command"):
            case "prefill":
                self._submit(session_id, request.prefill)
            case "abort":
                for found in self._find(request.abort, session_id):
                    self._end_early(found, "aborted by the router")
                    self._parts.metrics.count_end("aborted")
            case "connect_peer":
                agent_name = request.connect_peer.endpoint.agent_name
                self._peer_sessions.setdefault(agent_name, set()).add(session_id)
                self._parts.transfers.connect(request.connect_peer.endpoint)
            case "forget_peer":
                agent_name = request.forget_peer.agent_name
                self._on_peer_failed(agent_name, "the router says it is gone")
                self._parts.transfers.disconnect(agent_name)
            case other:
                log.warning("ignored a command that is not for a prefill worker", extra={"command": other})

    def _find(self, abort: worker_pb2.AbortCommand, session_id: int) -> list[_Request]:
        key = (abort.request_id, abort.attempt)
        return [r for r in self._requests.values() if r.ticket.key == key and r.session_id == session_id]

    def _submit(self, session_id: int, command: worker_pb2.PrefillCommand) -> None:
        ticket = OutgoingTicket(command.ticket)
        sequence = Sequence(
            sequence_id=f"{command.ticket.agent_name}/{command.request_id}#{command.attempt}",
            token_ids=list(command.token_ids),
            num_prompt_tokens=command.num_prompt_tokens,
            sampling=sampling_params(command.sampling),
        )
        request = _Request(session_id, sequence, ticket, StopRule(command.stop))
        if command.ticket.lease_ms:
            request.lease_end = time.monotonic() + command.ticket.lease_ms / 1e3
        refusal = self._refusal(request, command)
        if refusal is not None:
            self._send_failure(request, grpc.StatusCode.INVALID_ARGUMENT, refusal, retryable=False)
            return
        self._requests[request.key] = request
        self._by_sequence[sequence.sequence_id] = request
        self._scheduler.add(sequence)

    def _refusal(self, request: _Request, command: worker_pb2.PrefillCommand) -> str | None:
        """Why a command can't be taken, or None."""
        if request.key in self._tombstones or request.key in self._requests:
            return f"the ticket of request {command.request_id}, attempt {command.attempt}, was used or closed before"
        num_pages = num_pages_for(request.sequence.num_tokens, self._parts.page_size)
        if request.ticket.first_page_index + len(request.ticket.page_ids) != num_pages:
            return f"the ticket has {len(request.ticket.page_ids)} pages, the prompt needs {num_pages}"
        if not self._scheduler.can_ever_fit(request.sequence.num_tokens):
            return f"the prompt needs {num_pages} pages, the prefill worker has {self._parts.pool.num_pages}"
        return check_token_ids(command.token_ids, command.num_prompt_tokens, self._vocab_size)

    # deliver

    def _deliver(self, step: PrefillStep, logits: StepLogits) -> None:
        """Sends finished pages, and the first tokens of finished prompts."""
        tokens: dict[str, int | None] = {}
        if logits.logits is not None:
            sampled = [entry.sequence for entry in logits.scheduled]
            chosen = sample(logits.logits, sampled)
            tokens = {sequence.sequence_id: token for sequence, token in zip(sampled, chosen, strict=True)}
        self._scheduler.update(step)
        for entry in step.batch:
            request = self._by_sequence[entry.sequence.sequence_id]
            request.num_chunks += 1
            if entry.sequence.sequence_id in tokens:
                self._finish_prompt(request, tokens[entry.sequence.sequence_id])
            else:
                self._send_pages(request, entry.sequence.num_computed_tokens // self._parts.page_size)

    def _finish_prompt(self, request: _Request, token: int | None) -> None:
        if token is None:
            self._fail(request, grpc.StatusCode.INTERNAL, "the model's logits are not finite", retryable=False)
            return
        sequence = request.sequence
        num_pages = num_pages_for(sequence.num_computed_tokens, self._parts.page_size)
        request.stamps.reach(worker_pb2.STAGE_PREFILL_FINISHED)
        request.computed_at = time.monotonic()
        sequence.token_ids.append(token)
        finish_reason = request.stop.finish_reason(sequence)
        if finish_reason:
            request.stamps.reach(worker_pb2.STAGE_FINISHED)
        output = worker_pb2.TokenOutput(
            request_id=request.ticket.request_id,
            attempt=request.ticket.attempt,
            first_index=sequence.num_output_tokens - 1,
            token_ids=[token],
            finish_reason=finish_reason,
            stamps=request.stamps.take(),
            num_cached_tokens=sequence.num_cached_tokens,
        )
        event = worker_pb2.SessionResponse(step_output=worker_pb2.StepOutput(outputs=[output]))
        self._parts.sessions.add(request.session_id, event)
        # The first token is worth a message of its own: the client waits for it.
        self._parts.sessions.flush()
        self._parts.metrics.output_tokens.inc()
        self._parts.metrics.count_end("finished")
        if finish_reason:
            request.close_reason = "the answer ended with the first token"
            request.ticket.stop()
        else:
            self._send_pages(request, num_pages, first_token=token)
        self._scheduler.release(sequence)
        self._end_if_terminal(request)

    def _send_pages(self, request: _Request, num_finished_pages: int, first_token: int | None = None) -> None:
        if request.lease_end is not None and time.monotonic() > request.lease_end:
            self._fail(request, grpc.StatusCode.DEADLINE_EXCEEDED, "the page ticket's lease ended", retryable=False)
            return
        write = request.ticket.next_write(num_finished_pages, first_token)
        if write is None:
            return
        first = request.ticket.first_page_index + write.first_page
        local_pages = tuple(request.sequence.page_table[first : first + write.num_pages])
        self._parts.pool.pin(local_pages)
        self._parts.transfers.write(
            PageWrite(
                tag=request,
                agent_name=request.ticket.agent_name,
                local_pages=local_pages,
                remote_pages=request.ticket.page_ids[write.first_page : write.first_page + write.num_pages],
                payload=write.payload,
            )
        )

    def _on_write_ended(self, ended: WriteEnded) -> None:
        request = ended.write.tag
        assert isinstance(request, _Request)
        self._parts.pool.unpin(ended.write.local_pages)
        request.ticket.write_ended()
        if ended.ok:
            num_bytes = len(ended.write.local_pages) * self._parts.page_bytes
            request.bytes_sent += num_bytes
            if request.computed_at is None or ended.ended <= request.computed_at:
                request.bytes_while_computing += num_bytes
            request.busy_seconds += max(0.0, ended.ended - max(ended.started, request.busy_until))
            request.busy_until = ended.ended
            self._parts.metrics.kv_bytes.inc(num_bytes)
        else:
            self._parts.metrics.kv_write_failures.inc()
            self._fail(request, grpc.StatusCode.UNAVAILABLE, ended.reason, retryable=True)
        self._end_if_terminal(request)

    # ends

    def _fail(self, request: _Request, code: grpc.StatusCode, message: str, retryable: bool) -> None:
        """Ends a request and tells the router why."""
        if request.close_reason is None:
            self._send_failure(request, code, message, retryable)
            self._parts.metrics.count_end("failed")
        self._end_early(request, message)

    def _end_early(self, request: _Request, reason: str) -> None:
        """Starts nothing more for a request. Its pages stay pinned while writes are open."""
        request.close_reason = request.close_reason or reason
        request.ticket.stop()
        self._scheduler.abort(request.sequence)
        self._end_if_terminal(request)

    def _end_if_terminal(self, request: _Request) -> None:
        """The last act of every request: once nothing is open, both other parties hear of it."""
        if not request.ticket.is_terminal or self._requests.pop(request.key, None) is None:
            return
        del self._by_sequence[request.sequence.sequence_id]
        if request.close_reason is not None:
            payload = request.ticket.closed_message(request.close_reason)
            self._parts.transfers.notify(request.ticket.agent_name, payload)
        for done in request.waiters:
            done()
        moved = inference_pb2.KvTransfer(
            bytes=request.bytes_sent,
            transport=self._parts.transport_name,
            gb_per_s=request.bytes_sent / request.busy_seconds / 1e9 if request.busy_seconds > 0 else 0.0,
            bytes_while_computing=request.bytes_while_computing,
            num_chunks=request.num_chunks,
        )
        event = worker_pb2.TransferFinishedEvent(
            request_id=request.ticket.request_id, attempt=request.ticket.attempt, kv_transfer=moved
        )
        self._parts.sessions.add(request.session_id, worker_pb2.SessionResponse(transfer_finished=event))

    def _send_failure(self, request: _Request, code: grpc.StatusCode, message: str, retryable: bool) -> None:
        failure = worker_pb2.RequestFailedEvent(
            request_id=request.ticket.request_id,
            attempt=request.ticket.attempt,
            status_code=code.value[0],
            message=message,
            retryable=retryable,
        )
        self._parts.sessions.add(request.session_id, worker_pb2.SessionResponse(request_failed=failure))

    def _close_ticket(self, asked: kv_pb2.CloseTicketRequest, done: Callable[[], None]) -> None:
        """An owner wants its pages back: answer once we are sure not to touch them."""
        key = (asked.agent_name, asked.request_id, asked.attempt)
        self._tombstones[key] = None
        while len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)
        request = self._requests.get(key)
        if request is None:
            done()
            return
        request.waiters.append(done)
        self._end_early(request, "closed by its owner")

    # peers and load

    def _on_peer_failed(self, agent_name: str, reason: str) -> None:
        """A writer drops every ticket for a peer after one transport error."""
        for request in [r for r in self._requests.values() if r.ticket.agent_name == agent_name]:
            self._fail(request, grpc.StatusCode.UNAVAILABLE, reason, retryable=True)
        self._tell_peer_state(agent_name, False, reason)

    def _tell_peer_state(self, agent_name: str, ready: bool, reason: str) -> None:
        event = worker_pb2.PeerEvent(agent_name=agent_name, ready=ready, reason=reason)
        open_sessions = set(self._parts.sessions.all_ids())
        for session_id in self._peer_sessions.get(agent_name, set()) & open_sessions:
            self._parts.sessions.add(session_id, worker_pb2.SessionResponse(peer=event))

    def _report_load(self) -> None:
        scheduler, counts = self._scheduler, self._parts.pool.counts()
        sending = len(self._requests) - scheduler.num_waiting - scheduler.num_running
        self._parts.metrics.set_sequences(waiting=scheduler.num_waiting, running=scheduler.num_running, sending=sending)
        load = worker_pb2.LoadReport(
            free_pages=counts.free,
            queued_tokens=scheduler.queued_tokens,
            num_sequences=scheduler.num_waiting + scheduler.num_running,
        )
        if load != self._last_load:
            self._last_load = load
            for session_id in self._parts.sessions.all_ids():
                self._parts.sessions.add(session_id, worker_pb2.SessionResponse(load=load))
