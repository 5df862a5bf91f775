"""Brings requests to workers and their tokens back: the router's one queue, and what each worker event means."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque

from protos import worker_pb2
from router.metrics import RouterMetrics
from router.policy import choose_pair
from router.request import MAX_ATTEMPTS, Ended, Request, RequestState
from router.worker_pool import WorkerLink, WorkerPool
from rpc.errors import RequestError, Unavailable, error_for_code

log = logging.getLogger(__name__)


class Dispatcher:
    """Owns the queue and all running requests. Lives on the event loop; nothing here blocks."""

    def __init__(self, router_id: str, tokenizer_hash: str, worker_loss_seconds: float, metrics: RouterMetrics) -> None:
        self.pool = WorkerPool(router_id, tokenizer_hash, self._on_event, self._on_lost, self._bind_waiting)
        self._queue: deque[Request] = deque()
        self._running: dict[tuple[str, int], Request] = {}
        self._worker_loss_seconds, self._metrics = worker_loss_seconds, metrics

    @property
    def num_queued(self) -> int:
        """Requests that wait for a pair."""
        return len(self._queue)

    @property
    def num_running(self) -> int:
        """Requests bound to workers."""
        return len(self._running)

    def submit(self, request: Request) -> None:
        """Queues a request; its events tell how it goes. Raises Unavailable if no pair could serve it."""
        if not self.pool.ready_pairs():
            raise Unavailable(f"no pair of prefill and decode workers is ready: {self.pool.why_not_ready()}")
        request.stamp_now("queued")
        self._queue.append(request)
        self._bind_waiting()

    def cancel(self, request: Request) -> None:
        """Ends a request, wherever it is. Both legs are told at once. Harmless if it has ended."""
        if request.state is RequestState.FINISHED:
            return
        self._end_attempt(request)
        request.state = RequestState.FINISHED
        if request in self._queue:
            self._queue.remove(request)
        self._bind_waiting()

    def complete(self, request: Request) -> None:
        """The answer is whole, though no worker knows: the router found a stop string."""
        request.is_answered = True
        self._close_leg(request, "decode", abort=True)
        self._finish_if_over(request)

    def _bind_waiting(self) -> None:
        """Binds requests from the head of the queue while a pair has room."""
        pairs = self.pool.ready_pairs()
        while self._queue:
            request = self._queue[0]
            if not pairs:
                self._await_workers(request)
                break
            request.waits_for_workers_since = None
            pair = choose_pair(request, pairs)
            if pair is None:
                break
            self._queue.popleft()
            self._reserve(request, *pair)
        self._metrics.set_requests(queued=self.num_queued, running=self.num_running)

    def _await_workers(self, request: Request) -> None:
        """The last usable pair is gone: waits a while for another."""
        now = time.monotonic()
        if request.waits_for_workers_since is None:
            request.waits_for_workers_since = now
            asyncio.get_running_loop().call_later(self._worker_loss_seconds + 0.01, self._bind_waiting)
        elif now - request.waits_for_workers_since >= self._worker_loss_seconds:
            self._queue.popleft()
            self._finish(request, Unavailable(f"no worker is left: {self.pool.why_not_ready()}"))
            self._bind_waiting()

    def _reserve(self, request: Request, prefill: WorkerLink, decode: WorkerLink) -> None:
        assert prefill.info is not None
        request.state = RequestState.RESERVING
        request.prefill, request.decode = prefill, decode
        prefill.requests.add(request)
        decode.requests.add(request)
        self._running[request.wire_id, request.attempt] = request
        command = worker_pb2.ReserveCommand(
            request_id=request.wire_id,
            attempt=request.attempt,
            token_ids=request.token_ids,
            num_prompt_tokens=len(request.checked.prompt_token_ids),
            sampling=request.checked.sampling,
            stop=request.checked.stop,
            deadline_ms=request.remaining_ms(),
            writer_agent_name=prefill.agent_name,
            writer_incarnation_id=prefill.info.incarnation_id,
            writer_address=prefill.address,
        )
        decode.send(worker_pb2.SessionRequest(reserve=command))

    # events of workers

    def _on_event(self, link: WorkerLink, event: worker_pb2.SessionResponse) -> None:
        match event.WhichOneof("event"):
            case "step_output":
                for output in event.step_output.outputs:
                    if (request := self._find(link, output.request_id, output.attempt)) is not None:
                        self._on_output(request, link, output)
            case "reserved":
                request = self._find(link, event.reserved.request_id, event.reserved.attempt)
                if request is not None:
                    self._on_reserved(request, event.reserved)
            case "refused":
                request = self._find(link, event.refused.request_id, event.refused.attempt)
                if request is not None:
                    self._on_refused(request, link)
            case "transfer_finished":
                finished = event.transfer_finished
                request = self._find(link, finished.request_id, finished.attempt)
                if request is not None:
                    self._on_transfer_finished(request, finished)
            case "request_failed":
                failed = event.request_failed
                request = self._find(link, failed.request_id, failed.attempt)
                if request is not None:
                    self._on_failed(request, link, failed)

    def _find(self, link: WorkerLink, wire_id: str, attempt: int) -> Request | None:
        """The request an event is about, if that attempt still runs there."""
        request = self._running.get((wire_id, attempt))
        return request if request is not None and request in link.requests else None

    def _on_reserved(self, request: Request, event: worker_pb2.ReservedEvent) -> None:
        assert request.prefill is not None
        request.stamp(list(event.stamps))
        request.state = RequestState.RUNNING
        command = worker_pb2.PrefillCommand(
            request_id=request.wire_id,
            attempt=request.attempt,
            token_ids=request.token_ids,
            num_prompt_tokens=len(request.checked.prompt_token_ids),
            sampling=request.checked.sampling,
            stop=request.checked.stop,
            deadline_ms=request.remaining_ms(),
            ticket=event.ticket,
        )
        request.prefill.send(worker_pb2.SessionRequest(prefill=command))

    def _on_refused(self, request: Request, decode: WorkerLink) -> None:
        """No room there after all: back to the head of the queue until the worker reports a change."""
        decode.is_full = True
        self._unbind(request)
        request.state = RequestState.QUEUED
        self._queue.appendleft(request)
        self._bind_waiting()

    def _on_output(self, request: Request, link: WorkerLink, output: worker_pb2.TokenOutput) -> None:
        first = request.num_attempt_tokens == 0
        request.take_output(output)
        if output.finish_reason and link is request.decode:
            self._close_leg(request, "decode", abort=False)
        if request.is_answered:
            # The first token may have ended the answer: decode gets no pages and must not wait for them.
            self._close_leg(request, "decode", abort=True)
            self._finish_if_over(request)
        if first:
            self._bind_waiting()

    def _on_transfer_finished(self, request: Request, event: worker_pb2.TransferFinishedEvent) -> None:
        request.take_transfer(event.kv_transfer)
        self._close_leg(request, "prefill", abort=False)
        self._finish_if_over(request)
        self._bind_waiting()

    def _on_failed(self, request: Request, link: WorkerLink, failed: worker_pb2.RequestFailedEvent) -> None:
        self._close_leg(request, "prefill" if link is request.prefill else "decode", abort=False)
        error = error_for_code(failed.status_code, failed.message)
        if request.is_answered:
            self._finish_if_over(request)
        elif failed.retryable:
            self._metrics.retries.labels("leg_failed").inc()
            self._retry(request, error)
        else:
            self._finish(request, error)

    def _on_lost(self, link: WorkerLink) -> None:
        """A session broke: what ran there goes on elsewhere, from its next token."""
        lost = list(link.requests)
        log.warning("requests lose a worker", extra={"worker": link.address, "requests": len(lost)})
        tier = "prefill" if link.tier == worker_pb2.TIER_PREFILL else "decode"
        for request in lost:
            self._close_leg(request, tier, abort=False)
            if request.is_answered:
                self._finish_if_over(request)
            elif tier == "decode" or request.num_attempt_tokens < 2:
                self._metrics.retries.labels(f"{tier}_lost").inc()
                self._retry(request, Unavailable(f"{tier} worker {link.address} was lost"))
            # Else decode runs already, so it has every page and does not need its prefill worker any more.

    # ends

    def _retry(self, request: Request, error: RequestError) -> None:
        """Another attempt, ahead of new requests, unless there were too many."""
        self._end_attempt(request)
        if request.attempt + 1 >= MAX_ATTEMPTS:
            self._finish(request, error)
            return
        request.begin_attempt()
        log.info(
            "request goes on elsewhere",
            extra={
                "request_id": request.checked.request_id,
                "attempt": request.attempt,
                "next_token": len(request.output_token_ids),
                "reason": error.message,
            },
        )
        self._queue.appendleft(request)
        self._bind_waiting()

    def _finish_if_over(self, request: Request) -> None:
        """The answer is whole once its last token is known and both legs are closed: then the numbers are final."""
        if request.is_answered and request.prefill is None and request.decode is None:
            self._finish(request, None)

    def _finish(self, request: Request, error: RequestError | None) -> None:
        self._end_attempt(request)
        if request.state is not RequestState.FINISHED:
            request.state = RequestState.FINISHED
            request.events.put_nowait(Ended(error))

    def _end_attempt(self, request: Request) -> None:
        """Tells both legs that this attempt is over."""
        self._close_leg(request, "prefill", abort=True)
        self._close_leg(request, "decode", abort=True)
        self._running.pop((request.wire_id, request.attempt), None)

    def _unbind(self, request: Request) -> None:
        """Like `_end_attempt`, where no worker has anything of it."""
        self._close_leg(request, "prefill", abort=False)
        self._close_leg(request, "decode", abort=False)
        self._running.pop((request.wire_id, request.attempt), None)

    def _close_leg(self, request: Request, leg: str, abort: bool) -> None:
        link: WorkerLink | None = getattr(request, leg)
        if link is None:
            return
        setattr(request, leg, None)
        link.requests.discard(request)
        if abort:
            command = worker_pb2.AbortCommand(request_id=request.wire_id, attempt=request.attempt)
            link.send(worker_pb2.SessionRequest(abort=command))
