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

from engine.device import IsWritten
from engine.model_runner import OnLayerGroup, PromptLogits, StepLogits, StepRunner
from engine.prefix_cache import PrefixCache
from engine.sampler import Choice, TokenLogprobs, sample
from engine.sequence import Sequence, num_pages_for
from kv_transfer.base import Notification
from kv_transfer.tickets import OutgoingTicket
from kv_transfer.transfer_thread import PageWrite, PeerConnected, PeerDisconnected, PeerFailed, WriteEnded
from prefill_service.config import PrefillConfig
from prefill_service.scheduler import PrefillScheduler, PrefillStep
from protos import inference_pb2, kv_pb2, worker_pb2
from worker_runtime.engine_loop import EngineLoop, PageOwners
from worker_runtime.inbox import CloseTicket, InboxMessage, SessionClosed, SessionCommand, SessionOpened
from worker_runtime.load_reporter import LoadReporter
from worker_runtime.parts import WorkerParts
from worker_runtime.process import MAX_FAILED_STEPS
from worker_runtime.rate import Rate
from worker_runtime.request import (
    StopRule,
    check_command,
    failure_event,
    logprobs_message,
    prompt_logprobs,
    sampling_params,
)
from worker_runtime.stamps import Stamps

log = logging.getLogger(__name__)

MIN_GROUPED_BYTES = 2 << 20
"""Last pages with less than this are sent whole: a write has a cost of its own."""
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
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the prompt tokens after the first, so far; if asked for."""
    computed_at: float | None = None
    """When the last chunk was done."""
    early_writes: tuple[PageWrite, ...] = ()
    """Layer groups of the last pages that were sent before the last layers were computed."""
    bytes_sent: int = 0
    bytes_while_computing: int = 0
    busy_seconds: float = 0.0
    busy_until: float = 0.0
    close_reason: str | None = None
    """Why the ticket is closed early; None while it is not."""
    answer_ended: bool = False
    """The first token ended the answer."""
    is_connection_down: bool = False
    """The connection over which a write failed was taken down since."""
    waiters: list[Callable[[bool], None]] = field(default_factory=list)
    """To be told whether the pages are closed to us for sure."""

    @property
    def key(self) -> RequestKey:
        return (self.ticket.agent_name, *self.ticket.key)

    @property
    def is_lease_over(self) -> bool:
        """Whether nothing more may be started on the ticket."""
        return self.lease_end is not None and time.monotonic() > self.lease_end


@dataclass(eq=False)
class _Probe:
    """Test pages on their way to a peer, for one router."""

    session_id: int
    probe_id: str
    agent_name: str
    first_remote_page: int
    page_us: float | None = None
    """Time of the first write, of one page; the second one has all pages."""


class PrefillLoop(EngineLoop):
    """Owns scheduler, page pool and requests; only its thread touches them."""

    def __init__(self, parts: WorkerParts, runner: StepRunner, config: PrefillConfig) -> None:
        super().__init__(parts)
        self._runner, self._vocab_size = runner, parts.vocab_size
        self._probe_digest = parts.probe_pages.digest()
        self._open_writes: set[PageWrite] = set()
        self._is_written: IsWritten | None = None
        """Of the last step: pages of all steps are written once it says so."""
        self._connecting: dict[str, list[_Probe]] = {}
        """Test pages to send to peers once they are connected."""
        self._cache = PrefixCache(parts.pool, parts.page_size, config.prefix_cache)
        self._reporter = LoadReporter(parts.sessions, self._cache)
        self._scheduler = PrefillScheduler(
            parts.pool, self._cache, parts.page_size, config.token_budget, config.max_num_sequences, config.prompt_order
        )
        self._rate, self._token_budget = Rate(), config.token_budget
        self._prompt_tokens = self._hit_tokens = 0
        self._requests: dict[RequestKey, _Request] = {}
        self._by_sequence: dict[str, _Request] = {}
        self._tombstones: OrderedDict[RequestKey, bool] = OrderedDict()
        """Closed tickets, and whether one of their writes failed."""
        self._unsure: dict[str, dict[RequestKey, list[Callable[[bool], None]]]] = {}
        """By peer: tickets with a failed write whose connection is not taken down yet, and who waits for that."""
        self._peer_sessions: dict[str, set[int]] = {}
        """Which routers want which peer connected."""
        self._failed_steps = 0

    def _step(self) -> bool:
        step = self._scheduler.schedule(time.monotonic(), self._rate.tokens_per_second)
        if step is not None:
            self._drop_expired(step)
            self._run_and_deliver(step)
        return step is not None

    def _has_open_work(self) -> bool:
        return bool(self._requests or self._open_writes)

    def _hand_over(self) -> None:
        for request in list(self._requests.values()):
            if request.computed_at is None:
                self._fail(request, grpc.StatusCode.UNAVAILABLE, "the prefill worker ends", retryable=True)

    def _page_owners(self) -> PageOwners:
        return PageOwners(
            tables=[r.sequence.page_table for r in self._requests.values()],
            reads=[write.local_pages for write in self._open_writes if isinstance(write.tag, _Request)],
        )

    def _drop_expired(self, step: PrefillStep) -> None:
        for sequence in step.expired:
            request = self._by_sequence[sequence.sequence_id]
            reason = "the deadline passed, or can't be met any more, before the prompt was computed"
            self._fail(request, grpc.StatusCode.DEADLINE_EXCEEDED, reason, retryable=False)

    def _run_and_deliver(self, step: PrefillStep) -> None:
        if not step.batch:
            return
        started, is_over = time.monotonic(), True
        for entry in step.batch:
            self._begin_chunk(self._by_sequence[entry.sequence.sequence_id])
        try:
            logits = self._runner.run(step.batch, self._layer_group_sender(step))
            self._is_written = logits.is_written
            is_over = logits.is_written is None or logits.logits is not None  # tokens were waited for
            self._deliver(step, logits)
            self._failed_steps = 0
        except Exception as error:
            log.exception("a prefill step failed")
            self._runner.settle()  # what was launched may still write to pages that are freed now
            for entry in step.batch:
                request = self._by_sequence.get(entry.sequence.sequence_id)
                if request is not None:
                    self._fail(request, grpc.StatusCode.INTERNAL, f"the prefill step failed: {error}", retryable=True)
            self._failed_steps += 1
            if self._failed_steps >= MAX_FAILED_STEPS:
                # Broken for good: a dead worker's requests go on elsewhere, a broken one would attract more of them.
                self._parts.sessions.flush()
                raise
        seconds = time.monotonic() - started
        self._rate.add(step.num_tokens, seconds, is_over, self._token_budget // 2)
        self._parts.metrics.step_seconds.observe(seconds)
        self._parts.metrics.prompt_tokens.inc(step.num_tokens)

    def _begin_chunk(self, request: _Request) -> None:
        """On the first chunk: pages found in the cache are sent while it is computed."""
        sequence = request.sequence
        request.stamps.reach(worker_pb2.STAGE_PREFILL_STARTED)
        if request.num_chunks == 0:
            self._prompt_tokens += sequence.num_tokens
            self._hit_tokens += sequence.num_cached_tokens
            self._parts.metrics.cached_tokens.inc(sequence.num_cached_tokens)
            if not request.is_lease_over:  # if it is, the end of this chunk tells; the step is planned already
                self._post_pages(request, sequence.num_cached_tokens // self._parts.page_size)

    def _layer_group_sender(self, step: PrefillStep) -> OnLayerGroup | None:
        """Sends the last pages of prompts that end with this step layer by layer, but for the last layers, which go
        with the first token. None if there are none, or too few to be worth it.

        Pages of earlier chunks travel while later chunks are computed; those of the last chunk have nothing else to
        travel behind than its own later layers.
        """
        if self._parts.num_layer_groups == 1:
            return None
        page_bytes = self._parts.page_bytes
        grouped = [
            request
            for request in (self._by_sequence[e.sequence.sequence_id] for e in step.batch if e.is_sampled)
            if len(request.ticket.unsent_pages) * page_bytes >= MIN_GROUPED_BYTES and not request.ticket.is_stopped
        ]
        if not grouped:
            return None

        def send(group: int, is_written: IsWritten | None) -> None:
            if group < self._parts.num_layer_groups - 1:
                for request in grouped:
                    self._send_layer_group(request, group, is_written)

        return send

    def _send_layer_group(self, request: _Request, group: int, is_written: IsWritten | None) -> None:
        if request.is_lease_over:
            return  # the end of this chunk tells
        places = request.ticket.next_early_write()
        write = self._page_write(request, places, b"", layer_group=group, is_written=is_written)
        request.early_writes += (write,)
        self._post(write)

    # receive

    def _handle(self, message: InboxMessage) -> None:
        match message:
            case SessionOpened(session_id):
                self._reporter.tell_newcomer(session_id)
            case SessionCommand(session_id, request):
                self._handle_command(session_id, request)
            case SessionClosed(session_id):
                self._reporter.session_closed(session_id)
                for orphan in [r for r in self._requests.values() if r.session_id == session_id]:
                    self._end_early(orphan, "its router is gone")
                    self._parts.metrics.count_end("aborted")
                for agent_name in list(self._peer_sessions):
                    self._forget_peer(session_id, agent_name)
            case WriteEnded():
                self._on_write_ended(message)
            case PeerConnected(agent_name):
                self._send_probes(agent_name)
            case PeerFailed(agent_name, reason):
                self._on_peer_failed(agent_name, reason)
            case PeerDisconnected(agent_name):
                self._on_peer_disconnected(agent_name)
            case CloseTicket(asked, done):
                self._close_ticket(asked, done)
            case Notification():
                # Nobody writes to a prefill worker.
                self._parts.metrics.ignored_notifications.inc()

    def _handle_command(self, session_id: int, request: worker_pb2.SessionRequest) -> None:
        match request.WhichOneof("command"):
            case "prefill":
                self._reporter.prompt_received(session_id)
                self._submit(session_id, request.prefill)
            case "abort":
                for found in self._find(request.abort, session_id):
                    self._end_early(found, "aborted by the router")
                    self._parts.metrics.count_end("aborted")
            case "connect_peer":
                self._connect_peer(session_id, request.connect_peer)
            case "flush_cache":
                self._cache.flush()
            case "forget_peer":
                self._forget_peer(session_id, request.forget_peer.agent_name)
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
            sampling=sampling_params(command.sampling, command.stop),
            cache_salt=command.cache_salt,
        )
        request = _Request(session_id, sequence, ticket, StopRule(command.stop))
        if self._is_draining:
            # It crossed the news on its way; the router has heard it by now.
            self._send_failure(request, grpc.StatusCode.UNAVAILABLE, "the prefill worker is draining", retryable=True)
            return
        if command.ticket.lease_ms:
            request.lease_end = time.monotonic() + command.ticket.lease_ms / 1e3
        if request.key in self._tombstones or request.key in self._requests:
            # Its owner took the pages back while the command was on its way.
            reason = f"the ticket of request {command.request_id}, attempt {command.attempt}, was used or closed before"
            self._send_failure(request, grpc.StatusCode.UNAVAILABLE, reason, retryable=True)
            return
        refusal = self._refusal(request, command)
        if refusal is not None:
            self._send_failure(request, grpc.StatusCode.INVALID_ARGUMENT, refusal, retryable=False)
            return
        self._requests[request.key] = request
        self._by_sequence[sequence.sequence_id] = request
        deadline = time.monotonic() + command.deadline_ms / 1e3 if command.deadline_ms else None
        self._scheduler.add(sequence, command.priority, deadline)

    def _refusal(self, request: _Request, command: worker_pb2.PrefillCommand) -> str | None:
        """Why a command can't be taken, or None."""
        num_pages = num_pages_for(request.sequence.num_tokens, self._parts.page_size)
        if request.ticket.first_page_index + len(request.ticket.page_ids) != num_pages:
            return f"the ticket has {len(request.ticket.page_ids)} pages, the prompt needs {num_pages}"
        if not self._scheduler.can_ever_fit(request.sequence.num_tokens):
            return f"the prompt needs {num_pages} pages, the prefill worker has {self._parts.pool.num_pages}"
        return check_command(command, self._vocab_size)

    # deliver

    def _deliver(self, step: PrefillStep, logits: StepLogits) -> None:
        """Sends finished pages, and the first tokens of finished prompts."""
        choices: dict[str, Choice] = {}
        if logits.logits is not None:
            sampled = [entry.sequence for entry in logits.scheduled]
            chosen = sample(logits.logits, sampled).choices()
            choices = {sequence.sequence_id: choice for sequence, choice in zip(sampled, chosen, strict=True)}
        for prompt in logits.prompts:
            self._take_prompt_logits(prompt)
        self._scheduler.update(step)
        for entry in step.batch:
            request = self._by_sequence[entry.sequence.sequence_id]
            request.num_chunks += 1
            if entry.sequence.sequence_id in choices:
                self._finish_prompt(request, choices[entry.sequence.sequence_id])
            else:
                self._send_pages(request, entry.sequence.num_computed_tokens // self._parts.page_size)

    def _take_prompt_logits(self, prompt: PromptLogits) -> None:
        # At its place, since a prompt that gave its pages back is computed again.
        of_prompt = self._by_sequence[prompt.sequence.sequence_id].prompt_logprobs
        of_prompt[prompt.start :] = prompt_logprobs(prompt)

    def _finish_prompt(self, request: _Request, choice: Choice) -> None:
        token = choice.token_id
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
        if choice.logprobs is not None:
            output.logprobs.CopyFrom(logprobs_message([choice.logprobs]))
        if sequence.sampling.prompt_logprobs:
            output.prompt_logprobs.CopyFrom(logprobs_message(request.prompt_logprobs))
        event = worker_pb2.SessionResponse(step_output=worker_pb2.StepOutput(outputs=[output]))
        self._parts.sessions.add(request.session_id, event)
        # The first token is worth a message of its own: the client waits for it.
        self._parts.sessions.flush()
        self._parts.metrics.output_tokens.inc()
        self._parts.metrics.count_end("finished")
        if finish_reason:
            request.close_reason = "the answer ended with the first token"
            request.answer_ended = True
            request.ticket.stop()
        else:
            self._send_pages(request, num_pages, first_token=token)
        self._scheduler.release(sequence)
        self._end_if_terminal(request)

    def _send_pages(self, request: _Request, num_finished_pages: int, first_token: int | None = None) -> None:
        if request.is_lease_over:
            self._fail(request, grpc.StatusCode.DEADLINE_EXCEEDED, "the page ticket's lease ended", retryable=False)
        else:
            self._post_pages(request, num_finished_pages, first_token)

    def _post_pages(self, request: _Request, num_finished_pages: int, first_token: int | None = None) -> None:
        write = request.ticket.next_write(num_finished_pages, first_token)
        if write is None:
            return
        early = request.early_writes
        places = range(write.first_page, write.first_page + write.num_pages)
        group = self._parts.num_layer_groups - 1 if early else None
        self._post(self._page_write(request, places, write.payload, group, is_written=self._is_written, after=early))

    def _page_write(
        self,
        request: _Request,
        places: range,
        payload: bytes,
        layer_group: int | None,
        is_written: IsWritten | None,
        after: tuple[PageWrite, ...] = (),
    ) -> PageWrite:
        """A write of the pages at some places of the ticket; they stay ours until it has ended."""
        first = request.ticket.first_page_index + places.start
        local_pages = tuple(request.sequence.page_table[first : first + len(places)])
        self._parts.pool.pin(local_pages)
        remote_pages = request.ticket.page_ids[places.start : places.stop]
        return PageWrite(
            request, request.ticket.agent_name, local_pages, remote_pages, payload, layer_group, is_written, after
        )

    def _post(self, write: PageWrite) -> None:
        self._open_writes.add(write)
        self._parts.transfers.write(write)

    def _on_write_ended(self, ended: WriteEnded) -> None:
        self._open_writes.discard(ended.write)
        request = ended.write.tag
        if isinstance(request, _Probe):
            self._on_probe_written(request, ended)
            return
        assert isinstance(request, _Request)
        self._parts.pool.unpin(ended.write.local_pages)
        request.ticket.write_ended(ended.ok)
        if ended.ok:
            num_bytes = len(ended.write.local_pages) * self._parts.page_bytes
            if ended.write.layer_group is not None:
                num_bytes //= self._parts.num_layer_groups
            request.bytes_sent += num_bytes
            if request.computed_at is None or ended.ended <= request.computed_at:
                request.bytes_while_computing += num_bytes
            request.busy_seconds += max(0.0, ended.ended - max(ended.started, request.busy_until))
            request.busy_until = ended.ended
            self._parts.metrics.kv_bytes.inc(num_bytes)
        else:
            request.is_connection_down = False  # that it will be is told later
            self._parts.metrics.kv_write_failures.inc()
            self._on_peer_failed(ended.write.agent_name, ended.reason)
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
        if request.ticket.has_failed_write:
            # What became of its bytes is not known until its connection is taken down.
            self._bury(request.key, has_failed_write=True)
            if request.is_connection_down:
                for done in request.waiters:
                    done(True)
            else:
                self._unsure.setdefault(request.ticket.agent_name, {})[request.key] = request.waiters
        else:
            if request.close_reason is not None:
                payload = request.ticket.closed_message(request.close_reason, request.answer_ended)
                self._parts.transfers.notify(request.ticket.agent_name, payload)
            for done in request.waiters:
                done(False)
        self._disconnect_if_unused(request.ticket.agent_name)
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
        log.warning(
            "request failed",
            extra={"request_id": request.ticket.request_id, "attempt": request.ticket.attempt, "reason": message},
        )
        is_draining = retryable and self._is_draining
        event = failure_event(*request.ticket.key, code, message, retryable, is_draining)
        self._parts.sessions.add(request.session_id, event)

    def _close_ticket(self, asked: kv_pb2.CloseTicketRequest, done: Callable[[bool], None]) -> None:
        """An owner wants its pages back: answer once we are sure not to touch them."""
        key = (asked.agent_name, asked.request_id, asked.attempt)
        has_failed_write = self._bury(key, has_failed_write=False)
        request, unsure = self._requests.get(key), self._unsure.get(asked.agent_name, {})
        if key in unsure:
            unsure[key].append(done)
            return
        if request is None:
            done(has_failed_write)
            return
        request.waiters.append(done)
        self._end_early(request, "closed by its owner")

    def _on_peer_disconnected(self, agent_name: str) -> None:
        """Nothing that failed on the way to a peer can be sent any more."""
        for request in self._requests.values():
            if request.ticket.agent_name == agent_name and request.ticket.has_failed_write:
                request.is_connection_down = True
        for waiters in self._unsure.pop(agent_name, {}).values():
            for done in waiters:
                done(True)

    def _bury(self, key: RequestKey, has_failed_write: bool) -> bool:
        """Remembers a ticket as closed. Returns whether one of its writes is known to have failed."""
        self._tombstones[key] = has_failed_write or self._tombstones.get(key, False)
        self._tombstones.move_to_end(key)
        while len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)
        return self._tombstones[key]

    # peers and load

    def _connect_peer(self, session_id: int, command: worker_pb2.ConnectPeerCommand) -> None:
        """Gets ready to write to a peer, and then sends it test pages: its routers hear from it whether they came."""
        agent_name = command.endpoint.agent_name
        self._peer_sessions.setdefault(agent_name, set()).add(session_id)
        probe = _Probe(session_id, command.probe_id, agent_name, command.endpoint.num_pages)
        self._connecting.setdefault(agent_name, []).append(probe)
        self._parts.transfers.connect(command.endpoint)

    def _send_probes(self, agent_name: str) -> None:
        for probe in self._connecting.pop(agent_name, []):
            self._send_probe(probe, num_pages=1, sha256=b"")

    def _send_probe(self, probe: _Probe, num_pages: int, sha256: bytes) -> None:
        told = kv_pb2.Probe(probe_id=probe.probe_id, sha256=sha256, writer_address=self._parts.address)
        message = kv_pb2.KvNotification(probe=told)
        write = PageWrite(
            tag=probe,
            agent_name=probe.agent_name,
            local_pages=self._parts.probe_pages.page_ids[:num_pages],
            remote_pages=tuple(range(probe.first_remote_page, probe.first_remote_page + num_pages)),
            payload=message.SerializeToString(),
        )
        self._post(write)

    def _on_probe_written(self, probe: _Probe, ended: WriteEnded) -> None:
        if not ended.ok:
            self._on_peer_failed(probe.agent_name, ended.reason)
        elif probe.page_us is None:
            probe.page_us = (ended.ended - ended.started) * 1e6
            self._send_probe(probe, len(self._parts.probe_pages.page_ids), self._probe_digest)
        else:
            num_bytes = len(ended.write.local_pages) * self._parts.page_bytes
            event = worker_pb2.PeerEvent(
                agent_name=probe.agent_name,
                ready=True,
                probe_id=probe.probe_id,
                page_us=probe.page_us,
                gb_per_s=num_bytes / max(ended.ended - ended.started, 1e-9) / 1e9,
            )
            self._parts.sessions.add(probe.session_id, worker_pb2.SessionResponse(peer=event))

    def _forget_peer(self, session_id: int, agent_name: str) -> None:
        """One router does not want a peer any more; others may. Its own requests it aborts itself."""
        self._peer_sessions.get(agent_name, set()).discard(session_id)
        self._disconnect_if_unused(agent_name)

    def _disconnect_if_unused(self, agent_name: str) -> None:
        """Lets go of a peer that no router wants, once the last message to it is on its way."""
        if self._peer_sessions.get(agent_name) == set() and not any(
            request.ticket.agent_name == agent_name for request in self._requests.values()
        ):
            del self._peer_sessions[agent_name]
            self._connecting.pop(agent_name, None)
            self._parts.transfers.disconnect(agent_name)

    def _on_peer_failed(self, agent_name: str, reason: str) -> None:
        """A writer drops every ticket for a peer after one transport error."""
        self._connecting.pop(agent_name, None)
        # Routers hear of the peer first, so that they do not bind a failed request to the same pair again.
        event = worker_pb2.PeerEvent(agent_name=agent_name, ready=False, reason=reason)
        for session_id in self._peer_sessions.get(agent_name, set()) & set(self._parts.sessions.all_ids()):
            self._parts.sessions.add(session_id, worker_pb2.SessionResponse(peer=event))
        for request in [r for r in self._requests.values() if r.ticket.agent_name == agent_name]:
            self._fail(request, grpc.StatusCode.UNAVAILABLE, reason, retryable=True)

    def _report_load(self) -> None:
        scheduler, counts = self._scheduler, self._parts.pool.counts()
        sending = len(self._requests) - scheduler.num_waiting - scheduler.num_running
        self._parts.metrics.set_sequences(waiting=scheduler.num_waiting, running=scheduler.num_running, sending=sending)
        load = worker_pb2.LoadReport(
            free_pages=counts.free,
            cached_pages=counts.cached,
            held_pages=counts.held,
            pinned_pages=counts.pinned,
            queued_tokens=scheduler.queued_tokens,
            running_tokens=scheduler.running_tokens,
            queued_seconds=self._rate.seconds_for(scheduler.queued_tokens + scheduler.running_tokens),
            num_sequences=scheduler.num_waiting + scheduler.num_running,
            step_ms=self._rate.step_seconds * 1e3,
            tokens_per_second=self._rate.tokens_per_second or 0.0,
            hit_rate=self._hit_tokens / self._prompt_tokens if self._prompt_tokens else 0.0,
        )
        self._parts.metrics.queued_seconds.set(load.queued_seconds)
        self._parts.metrics.tokens_per_second.set(load.tokens_per_second)
        self._parts.metrics.set_refusals(scheduler.refusals)
        self._parts.metrics.prompt_restarts.set(scheduler.num_restarts)
        self._reporter.report(load)
