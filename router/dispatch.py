"""Brings requests to workers and their tokens back: the router's one queue, and what each worker event means."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from typing import Literal

from protos import worker_pb2
from router.config import RouterConfig
from router.metrics import RouterMetrics, WaitsFor
from router.policy import (
    Pair,
    can_serve,
    choose_pair,
    decode_room,
    model_hashes,
    seconds_to_first_token,
    uncached_tokens,
)
from router.request import MAX_FRUITLESS_ATTEMPTS, Request, RequestState
from router.request_queue import RequestQueue
from router.worker_pool import WorkerLink, WorkerPool
from rpc.errors import Cancelled, Internal, RequestError, ResourceExhausted, Unavailable, error_for_code
from rpc.tls import tls_files

log = logging.getLogger(__name__)

RetryLimit = Literal["count", "time"]
LAST_NUMBERS_SECONDS = 1.0
"""How long the end of a whole answer may wait for what was moved for it."""
FIRST_REST_SECONDS = 0.05
LONGEST_REST_SECONDS = 2.0
"""Pauses before further attempts but the first since the last token; each is drawn from around twice the one before."""


class Dispatcher:
    """Owns the queue and all running requests. Lives on the event loop; nothing here blocks."""

    def __init__(self, config: RouterConfig, tokenizer_hash: str, metrics: RouterMetrics) -> None:
        self.pool = WorkerPool(
            config.router_id,
            tokenizer_hash,
            self._on_event,
            self._on_lost,
            self._bind_waiting,
            config.worker_silence_seconds,
            tls_files(config.process),
        )
        self._config, self._metrics = config, metrics
        self._queue = RequestQueue()
        self._running: dict[tuple[str, int], Request] = {}
        self._recheck: asyncio.TimerHandle | None = None
        self._num_bound = 0
        # A router that was just started is like one that has just lost its workers: they may come soon.
        self._had_pairs, self._lost_pairs_at = False, time.monotonic()
        self._resting: set[Request] = set()
        """Requests that wait a moment before another attempt."""
        self._num_announced = self._announced_tokens = 0

    @property
    def num_queued(self) -> int:
        """Requests that wait for a pair."""
        return len(self._queue) + len(self._resting)

    @property
    def num_running(self) -> int:
        """Requests bound to workers."""
        return len(self._running)

    def check_room(self, num_requests: int, num_tokens: int, deadline_seconds: float | None = None) -> None:
        """Raises Unavailable if no pair is there and none was a while ago, ResourceExhausted if the queue has no room
        or there is no time.

        num_tokens: of each request's prompt. deadline_seconds: time left to the client's deadline.
        """
        pairs = self._ready_pairs()
        if not pairs and not self.may_get_pairs():
            raise Unavailable(f"no pair of prefill and decode workers is ready: {self.pool.why_not_ready()}")
        waiting = len(self._queue) + self._num_announced
        if waiting + num_requests > self._config.max_queue_requests:
            raise ResourceExhausted(
                f"the queue is full: {waiting} requests wait, {self._config.max_queue_requests} may"
            )

        most = self._config.max_queue_tokens
        # One prompt may wait however long it is: it can't be made shorter by trying again.
        waiting_tokens = self._queue.num_tokens + self._announced_tokens
        if most is not None and waiting and waiting_tokens + num_requests * num_tokens > most:
            raise ResourceExhausted(
                f"the queue is full: {waiting_tokens} prompt tokens wait, {most} may; "
                f"this request has {num_requests * num_tokens}"
            )

        if self._config.deadline_admission == "predictive" and deadline_seconds is not None:
            needed = seconds_to_first_token(num_tokens, self._queue.num_tokens, pairs)
            if needed is not None and needed > deadline_seconds:
                raise ResourceExhausted(
                    f"the first token would take {needed:.1f} s at the measured rate, "
                    f"the deadline leaves {deadline_seconds:.1f} s"
                )

    def announce(self, num_requests: int, num_tokens: int) -> None:
        """These requests have a place in the queue but are not there yet; negative: they came, or won't come.

        num_tokens: of each request's prompt.
        """
        self._num_announced += num_requests
        self._announced_tokens += num_requests * num_tokens

    def submit(self, request: Request, may_expire: bool = True) -> None:
        """Queues a request; its output tells how it goes.

        may_expire: `--max-queue-seconds` is for it; not for further answers of a request that has begun.
        """
        request.may_expire, request.submitted = may_expire, time.monotonic()
        request.stamp_now("queued")
        self._queue.admit(request, self.pool.slowdown())
        self._bind_waiting()
        seconds = self._config.max_queue_seconds
        if may_expire and seconds is not None and request.state is RequestState.QUEUED:
            asyncio.get_running_loop().call_later(seconds, self._end_waiting, request, seconds)

    def _end_waiting(self, request: Request, seconds: float) -> None:
        """It waited for its first worker for too long. One that was begun before is never ended for waiting."""
        if request in self._queue and request.attempt == 0:
            self._finish(request, ResourceExhausted(f"no worker was free within {seconds:g} s"))
            self._bind_waiting()

    def cancel(self, request: Request) -> None:
        """Ends a request, wherever it is. Both legs are told at once. Harmless if it has ended."""
        if request.state is not RequestState.FINISHED:
            self._finish(request, Cancelled("cancelled by the client"))
            self._bind_waiting()

    def flush_prefix_caches(self) -> int:
        """Makes every worker forget its prefix cache. Returns how many were told."""
        links = [link for link in self.pool.links if link.is_open]
        for link in links:
            link.send(worker_pb2.SessionRequest(flush_cache=worker_pb2.FlushCacheCommand()))
        return len(links)

    def complete(self, request: Request) -> None:
        """The answer is whole, though no worker knows: the router found a stop string."""
        request.is_answered = True
        if request.state is RequestState.RUNNING:
            self._close_leg(request, "decode", abort=True, is_complete=True)
            self._finish_if_over(request)
        else:
            # Between two attempts: nothing of it runs, so no event would ever end it.
            self._finish(request, None)

    def may_get_pairs(self) -> bool:
        """While no pair is ready: whether it is worth while to wait for one."""
        waited = time.monotonic() - self._lost_pairs_at
        return self.pool.can_have_pairs() and waited < self._config.worker_loss_seconds

    def _ready_pairs(self) -> list[Pair]:
        """Those of the pool. Also notes when the last one is lost: another may come soon."""
        pairs = self.pool.ready_pairs()
        if self._had_pairs and not pairs:
            self._lost_pairs_at = time.monotonic()
        self._had_pairs = bool(pairs)
        return pairs

    def _bind_waiting(self) -> None:
        """Binds requests in the queue's order, until one has to wait for room."""
        pairs = self._ready_pairs()
        waits_for: WaitsFor = "workers"
        waiting_tokens = self._queue.num_tokens
        for request in self._queue.in_order():
            fitting = [pair for pair in pairs if can_serve(request, pair)]
            if not fitting:
                # Not now, and not by waiting for room: those behind it need not wait for it.
                self._await_workers(request)
                continue
            request.unservable_since = None
            pair = choose_pair(request, fitting, self._config.routing)
            if pair is None:
                # Whatever the first one waits for, those behind it wait for too; but for prefill only as many as decode
                # has room for: with more prefill workers the others would wait all the same.
                room = decode_room(fitting)
                waits_for, waiting_tokens = ("prefill", room) if room else ("decode", self._queue.num_tokens)
                break
            self._queue.remove(request)
            try:
                self._reserve(request, *pair)
            except Exception as error:
                # A defect of ours must cost this request, not the session of a worker whose event brought us here.
                log.exception("binding failed", extra={"request_id": request.checked.request_id})
                self._finish(request, Internal(f"an unexpected error in the router: {error}"))
        # Those that were bound just now wait no more.
        self._metrics.set_queue(waits_for, min(waiting_tokens, self._queue.num_tokens))
        self._metrics.set_requests(queued=self.num_queued, running=self.num_running)

    def _await_workers(self, request: Request) -> None:
        """The last pair that could serve it is gone: it waits a stated time for another."""
        now, limit = time.monotonic(), self._config.worker_loss_seconds
        if request.unservable_since is None:
            request.unservable_since = now
        if now - request.unservable_since >= limit:
            self._finish(request, Unavailable(f"no worker that could serve it is left: {self.pool.why_not_ready()}"))
        elif self._recheck is None:
            self._recheck = asyncio.get_running_loop().call_later(min(limit, 1.0) + 0.01, self._recheck_waiting)

    def _recheck_waiting(self) -> None:
        self._recheck = None
        self._bind_waiting()

    def _reserve(self, request: Request, prefill: WorkerLink, decode: WorkerLink) -> None:
        assert prefill.info is not None and decode.info is not None
        request.state = RequestState.RESERVING
        request.prefill, request.decode = prefill, decode
        request.attempts[-1].workers = prefill.info.worker_id, decode.info.worker_id
        self._num_bound += 1
        prefill.last_bound = decode.last_bound = self._num_bound
        request.model_hashes = model_hashes(prefill)
        request.num_bound_tokens = uncached_tokens(prefill, request)
        if prefill is decode:
            self._generate(request, decode)
            return
        prefill.requests[request] = decode.requests[request] = None
        self._running[request.wire_id, request.attempt] = request
        command = worker_pb2.ReserveCommand(
            request_id=request.wire_id,
            attempt=request.attempt,
            token_ids=request.token_ids,
            num_prompt_tokens=len(request.checked.prompt_token_ids),
            sampling=request.sampling,
            stop=request.checked.stop,
            deadline_ms=request.remaining_ms(),
            writer_agent_name=prefill.agent_name,
            writer_incarnation_id=prefill.info.incarnation_id,
            writer_address=prefill.info.address,
            cache_salt=request.checked.cache_salt,
            was_preempted=request.was_preempted,
        )
        decode.send(worker_pb2.SessionRequest(reserve=command))

    def _generate(self, request: Request, worker: WorkerLink) -> None:
        """A colocated worker does both phases: one leg, which counts as the decode leg."""
        request.state = RequestState.RUNNING
        request.prefill = None
        worker.requests[request] = None
        self._running[request.wire_id, request.attempt] = request
        command = worker_pb2.GenerateCommand(
            request_id=request.wire_id,
            attempt=request.attempt,
            token_ids=request.token_ids,
            num_prompt_tokens=len(request.checked.prompt_token_ids),
            sampling=request.sampling,
            stop=request.checked.stop,
            deadline_ms=request.remaining_ms(),
            cache_salt=request.checked.cache_salt,
            priority=request.checked.priority,
        )
        self._send_prompt(request, worker, worker_pb2.SessionRequest(generate=command))

    @staticmethod
    def _send_prompt(request: Request, worker: WorkerLink, command: worker_pb2.SessionRequest) -> None:
        worker.num_prompts_sent += 1
        request.prompt_number = worker.num_prompts_sent
        worker.send(command)

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
            case "preempted":
                request = self._find(link, event.preempted.request_id, event.preempted.attempt)
                if request is not None:
                    self._on_preempted(request, event.preempted)
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
        if not request.output_token_ids:
            request.kv_transfer.decode_cached_tokens = event.num_cached_tokens
        command = worker_pb2.PrefillCommand(
            request_id=request.wire_id,
            attempt=request.attempt,
            token_ids=request.token_ids,
            num_prompt_tokens=len(request.checked.prompt_token_ids),
            sampling=request.sampling,
            stop=request.checked.stop,
            deadline_ms=request.remaining_ms(),
            ticket=event.ticket,
            cache_salt=request.checked.cache_salt,
            priority=request.checked.priority,
        )
        self._send_prompt(request, request.prefill, worker_pb2.SessionRequest(prefill=command))

    def _on_refused(self, request: Request, decode: WorkerLink) -> None:
        """No room there after all: back to its place in the queue until the worker reports a change."""
        decode.is_full = True
        self._unbind(request)
        request.state = RequestState.QUEUED
        self._queue.put_back(request)
        seconds = self._config.max_queue_seconds
        if request.may_expire and seconds is not None and time.monotonic() - request.submitted >= seconds:
            self._end_waiting(request, seconds)
        self._bind_waiting()

    def _on_output(self, request: Request, link: WorkerLink, output: worker_pb2.TokenOutput) -> None:
        if request.is_answered:
            return  # by a stop string: the router told the workers, and this crossed it
        first = request.num_attempt_tokens == 0
        request.take_output(output)
        if output.finish_reason and link is request.decode:
            self._close_leg(request, "decode", abort=False)
        if request.is_answered:
            # The first token may have ended the answer: decode gets no pages and must not wait for them.
            self._close_leg(request, "decode", abort=True)
            self._finish_if_over(request)
            if request.state is not RequestState.FINISHED:
                # Its prefill worker has only numbers left to tell; if it can't, nobody waits for those.
                asyncio.get_running_loop().call_later(LAST_NUMBERS_SECONDS, self._finish_answered, request)
        elif request.output.num_waiting > self._config.max_unread_tokens:
            self._metrics.slow_readers.inc()
            self._finish(request, ResourceExhausted(self._too_slow(request)))
        if first or request.state is RequestState.FINISHED:
            self._bind_waiting()

    def _too_slow(self, request: Request) -> str:
        return (
            f"the client reads too slowly: {request.output.num_waiting} tokens wait for it, "
            f"{self._config.max_unread_tokens} may"
        )

    def _on_preempted(self, request: Request, event: worker_pb2.PreemptedEvent) -> None:
        """Its worker ran out of pages, or ends: it goes on from its next token, ahead of new requests."""
        self._close_leg(request, "decode", abort=False)
        request.take_preempted(event.output_token_ids, counts=not event.is_draining)
        self._metrics.retries.labels("draining" if event.is_draining else "preempted").inc()
        reason = "its decode worker is draining" if event.is_draining else "its decode worker ran out of pages"
        self._retry(request, Unavailable(reason), limit=None)

    def _on_transfer_finished(self, request: Request, event: worker_pb2.TransferFinishedEvent) -> None:
        request.take_transfer(event.kv_transfer)
        had_two_legs = request.prefill is not None
        self._close_leg(request, "prefill", abort=False)
        if had_two_legs and request.decode is not None and not request.is_answered:
            done = worker_pb2.TransferDoneCommand(request_id=request.wire_id, attempt=request.attempt)
            request.decode.send(worker_pb2.SessionRequest(transfer_done=done))
        self._finish_if_over(request)
        self._bind_waiting()

    def _on_failed(self, request: Request, link: WorkerLink, failed: worker_pb2.RequestFailedEvent) -> None:
        leg = "prefill" if link is request.prefill else "decode"
        self._close_leg(request, leg, abort=False)
        error = error_for_code(failed.status_code, failed.message)
        if request.is_answered:
            self._finish_if_over(request)
        elif failed.retryable:
            self._metrics.retries.labels("draining" if failed.is_draining else "leg_failed").inc()
            # A connection that fails says nothing about the request; a step that fails may be its fault.
            kind: RetryLimit = "time" if isinstance(error, Unavailable) else "count"
            self._retry(request, error, limit=None if failed.is_draining else kind)
        else:
            self._finish(request, error)

    def _on_lost(self, link: WorkerLink) -> None:
        """A session broke, or nothing moves there: what ran there goes on elsewhere, from its next token."""
        lost = list(link.requests)
        log.warning("requests lose a worker", extra={"worker": link.address, "requests": len(lost)})
        # The only leg of a colocated worker is the decode leg.
        tier = "prefill" if link.tier == worker_pb2.TIER_PREFILL else "decode"
        for request in lost:
            self._close_leg(request, tier, abort=link.is_open)
            if request.is_answered:
                self._finish_if_over(request)
            elif tier == "decode" or request.num_attempt_tokens < 2:
                self._metrics.retries.labels(f"{tier}_lost").inc()
                self._retry(request, Unavailable(f"{tier} worker {link.address} was lost"))
            # Else decode runs already, so it has every page and does not need its prefill worker any more.

    # ends

    def _retry(self, request: Request, error: RequestError, limit: RetryLimit | None = "count") -> None:
        """Another attempt, ahead of newer requests, unless too many in a row brought no token.

        limit: how this one counts, if it brought none. "count": it may be the request's own fault, which must not take
        one worker after the other down. "time": a connection failed; it is given up if as many did for as long as a
        lost worker is waited for. None: nothing failed.
        """
        self._end_attempt(request)
        brought_tokens = request.num_attempt_tokens > 0
        if brought_tokens:
            request.failures.clear()
        elif limit is not None:
            request.failures.append((limit, time.monotonic()))
        if self._is_hopeless(request):
            self._finish(request, error)
            return
        request.begin_attempt(error.message)
        log.info(
            "request goes on elsewhere",
            extra={
                "request_id": request.checked.request_id,
                "attempt": request.attempt,
                "next_token": len(request.output_token_ids),
                "reason": error.message,
            },
        )
        request.num_retries += 1
        if brought_tokens or limit is None or request.num_retries == 1:
            self._queue.put_back(request)
            self._bind_waiting()
            return
        # Not at once again: whatever fails may need a moment, and all that met it must not come back together.
        pause = min(FIRST_REST_SECONDS * 2 ** (request.num_retries - 2), LONGEST_REST_SECONDS)
        self._resting.add(request)
        asyncio.get_running_loop().call_later(pause * random.uniform(0.5, 1.5), self._end_rest, request)

    def _is_hopeless(self, request: Request) -> bool:
        by_count = sum(limit == "count" for limit, _ in request.failures)
        at = [moment for limit, moment in request.failures if limit == "time"]
        was_long = len(at) >= MAX_FRUITLESS_ATTEMPTS and at[-1] - at[0] >= self._config.worker_loss_seconds
        return by_count >= MAX_FRUITLESS_ATTEMPTS or was_long

    def _end_rest(self, request: Request) -> None:
        if request in self._resting:
            self._resting.discard(request)
            self._queue.put_back(request)
            self._bind_waiting()

    def _finish_if_over(self, request: Request) -> None:
        """The answer is whole once its last token is known and both legs are closed: then the numbers are final."""
        if request.is_answered and request.prefill is None and request.decode is None:
            self._finish(request, None)

    def _finish_answered(self, request: Request) -> None:
        if request.state is not RequestState.FINISHED:
            self._finish(request, None)

    def _finish(self, request: Request, error: RequestError | None) -> None:
        self._end_attempt(request)
        self._resting.discard(request)
        if request in self._queue:
            self._queue.remove(request)
        if request.state is not RequestState.FINISHED:
            request.state = RequestState.FINISHED
            request.output.end(error)

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

    def _close_leg(self, request: Request, leg: str, abort: bool, is_complete: bool = False) -> None:
        link: WorkerLink | None = getattr(request, leg)
        if link is None:
            return
        setattr(request, leg, None)
        link.requests.pop(request, None)
        if abort:
            command = worker_pb2.AbortCommand(
                request_id=request.wire_id, attempt=request.attempt, is_complete=is_complete
            )
            link.send(worker_pb2.SessionRequest(abort=command))
