"""Brings requests to workers and their tokens back: the router's one queue, and what each worker event means.

Every way into the dispatcher ends in one pump of the queue (`_pump`), which binds requests as long as workers have
room. Clock and random source are arguments.
"""

from __future__ import annotations

import asyncio
import logging
import random

from kv_transfer.request_ref import RequestRef
from protos import kv_pb2, worker_pb2
from router.binding import bind
from router.config import RouterConfig
from router.metrics import RouterMetrics, WaitsFor
from router.policy import (
    can_serve,
    choose_pair,
    decode_room,
)
from router.queue_room import QueueRoom
from router.request import Request, RequestState
from router.request_queue import RequestQueue
from router.retries import CONSEQUENCES, NOT_NOW, UNKNOWN, RetryLimit
from router.worker_link import Leg, WorkerLink, tier_name
from router.worker_pool import Pair, WorkerPool
from rpc.clock import Clock, Timer
from rpc.errors import Cancelled, Internal, RequestError, ResourceExhausted, Unavailable

log = logging.getLogger(__name__)

LAST_NUMBERS_SECONDS = 1.0
"""How long the end of a complete output may wait for what was moved for it."""
RECHECK_SECONDS = 1.0
"""Requests that no present pair could serve are looked at again after this long, or sooner."""


class Dispatcher:
    """Owns the queue and all running requests. Lives on the event loop; nothing here blocks."""

    def __init__(
        self, config: RouterConfig, tokenizer_hash: str, metrics: RouterMetrics, clock: Clock, rng: random.Random
    ) -> None:
        self.clock, self.rng = clock, rng
        self.pool = WorkerPool(tokenizer_hash, clock, rng, self._on_event, self._on_lost, self._pump)
        self._config, self._metrics = config, metrics
        self._queue = RequestQueue()
        self.room = QueueRoom(config, self._queue)
        self._running: dict[RequestRef, Request] = {}
        self._recheck: Timer | None = None
        self._num_bound = 0
        # A router that was just started is like one that has just lost its workers: they may come soon.
        self._num_pairs, self._lost_pairs_at = 0, clock.now()
        self._pairs_changed: asyncio.Future[None] | None = None
        self._resting: dict[Request, Timer] = {}
        """Requests that wait a moment before another attempt."""

    def __repr__(self) -> str:
        return f"<Dispatcher {self._queue!r}, {len(self._resting)} rest, {len(self._running)} run>"

    @property
    def num_queued(self) -> int:
        """Requests that wait for a pair."""
        return len(self._queue) + len(self._resting)

    @property
    def num_running(self) -> int:
        """Requests bound to workers."""
        return len(self._running)

    @property
    def waiting(self) -> list[Request]:
        """Requests that wait for a pair, in order."""
        return self._queue.in_order()

    def check_room(self, num_requests: int, num_tokens: int, deadline_seconds: float | None = None) -> None:
        """Raises Unavailable if no pair is ready and none was a while ago, ResourceExhausted as `QueueRoom.check`.

        num_tokens: of each request's prompt. deadline_seconds: time left to the client's deadline.
        """
        pairs = self._ready_pairs()
        if not pairs and not self.may_get_pairs():
            raise Unavailable(f"no pair of prefill and decode workers is ready: {self.pool.why_not_ready()}")
        self.room.check(num_requests, num_tokens, deadline_seconds, pairs)

    def pairs_changed(self) -> asyncio.Future[None]:
        """Is done when the number of ready pairs changes next. Not to be cancelled: others may wait for it too."""
        if self._pairs_changed is None:
            self._pairs_changed = asyncio.get_running_loop().create_future()
        return self._pairs_changed

    def may_get_pairs(self) -> bool:
        """While no pair is ready: whether it is worth while to wait for one."""
        waited = self.clock.now() - self._lost_pairs_at
        return self.pool.can_have_pairs() and waited < self._config.worker_loss_seconds

    # what clients want

    def submit(self, request: Request, may_expire: bool = True) -> None:
        """Queues a request; its output tells how it goes.

        may_expire: `--max-queue-seconds` is for it; not for further completions of a request that has begun.
        """
        request.may_expire = may_expire
        request.stamp_now("queued")
        self._queue.admit(request, self.pool.slowdown())
        self._pump()
        seconds = self._config.max_queue_seconds
        if may_expire and seconds is not None and request.state is RequestState.QUEUED:
            self.clock.call_later(seconds, self._end_waiting, request, seconds)

    def cancel(self, request: Request) -> None:
        """Ends a request in any state. All legs are told at once. Harmless if it has ended."""
        if request.state is not RequestState.FINISHED:
            self._finish(request, Cancelled("cancelled by the client"))
            self._pump()

    def complete(self, request: Request) -> None:
        """The output is complete, though no worker knows: the router found a stop string."""
        request.is_answered = True
        if request.state is RequestState.RUNNING:
            self._end_answered(request, is_complete=True)
        else:
            # Between two attempts nothing of the request runs, so no event would ever end it.
            self._finish(request, None)
        self._pump()

    def flush_prefix_caches(self) -> int:
        """Makes every worker forget its prefix cache. Returns how many were told."""
        links = [link for link in self.pool.links if link.is_open]
        for link in links:
            link.send(worker_pb2.SessionRequest(flush_cache=worker_pb2.FlushCacheCommand()))
        return len(links)

    def _end_waiting(self, request: Request, seconds: float) -> None:
        """A request has waited too long for its first worker. A request that has begun is never ended for waiting."""
        if request in self._queue and request.attempt == 0:
            self._finish(request, ResourceExhausted(f"no worker was free within {seconds:g} s"))
            self._pump()

    # binding

    def _ready_pairs(self) -> list[Pair]:
        """The pairs of the pool. Also notes when the last pair is lost: another one may come soon."""
        pairs = self.pool.ready_pairs()
        if len(pairs) != self._num_pairs:
            if not pairs:
                self._lost_pairs_at = self.clock.now()
            self._num_pairs = len(pairs)
            if self._pairs_changed is not None:
                self._pairs_changed.set_result(None)
                self._pairs_changed = None
        return pairs

    def _pump(self) -> None:
        """Binds requests in the queue's order, until one has to wait for room."""
        pairs = self._ready_pairs()
        waits_for: WaitsFor = "workers"
        waiting_tokens = self._queue.num_tokens
        for request in self._queue.in_order():
            fitting = [pair for pair in pairs if can_serve(request, pair)]
            if not fitting:
                # Waiting for room does not help this request, so the requests behind it need not wait.
                self._await_workers(request)
                continue
            request.unservable_since = None
            pair = choose_pair(request, fitting, self.rng, self._config.routing)
            if pair is None:
                # The requests behind this one wait for the same. But only as many of them wait for prefill as decode
                # has room for: with more prefill workers the others would still wait.
                room = decode_room(fitting)
                waits_for, waiting_tokens = ("prefill", room) if room else ("decode", self._queue.num_tokens)
                break
            self._queue.remove(request)
            try:
                self._num_bound += 1
                bind(request, pair, self._num_bound)
                self._running[request.ref] = request
            except Exception as error:
                # A defect of ours must cost this request, not the session of a worker whose event brought us here.
                log.exception("binding failed", extra={"request_id": request.checked.request_id})
                self._finish(request, Internal(f"an unexpected error in the router: {error}"))
        # Requests that were bound just now wait no more.
        self._metrics.set_queue(waits_for, min(waiting_tokens, self._queue.num_tokens))
        self._metrics.set_requests(queued=self.num_queued, running=self.num_running)

    def _await_workers(self, request: Request) -> None:
        """The last pair that could serve a request is gone: the request waits a stated time for another pair."""
        now, limit = self.clock.now(), self._config.worker_loss_seconds
        if request.unservable_since is None:
            request.unservable_since = now
        if now - request.unservable_since >= limit:
            self._finish(request, Unavailable(f"no worker that could serve it is left: {self.pool.why_not_ready()}"))
        elif self._recheck is None:
            self._recheck = self.clock.call_later(min(limit, RECHECK_SECONDS) + 0.01, self._recheck_waiting)

    def _recheck_waiting(self) -> None:
        self._recheck = None
        self._pump()

    # events of workers

    def _on_event(self, link: WorkerLink, event: worker_pb2.SessionResponse) -> None:
        match event.WhichOneof("event"):
            case "step_output":
                # Of each step for each router: the queue need not be looked at for tokens that change nothing there.
                changes = [self._on_output(link, output) for output in event.step_output.outputs]
                if not any(changes):
                    return
            case "reserved":
                if found := self._find(link, event.reserved.ref):
                    self._on_reserved(*found, event.reserved)
            case "refused":
                if found := self._find(link, event.refused.ref):
                    self._on_refused(*found, event.refused)
            case "transfer_finished":
                if found := self._find(link, event.transfer_finished.ref):
                    self._on_transfer_finished(*found, event.transfer_finished)
            case "request_ended":
                if found := self._find(link, event.request_ended.ref):
                    self._on_ended(*found, event.request_ended)
        self._pump()

    def _find(self, link: WorkerLink, ref: kv_pb2.RequestRef) -> tuple[Request, Leg] | None:
        """The request that an event is about and its leg, if that attempt still runs there."""
        request = self._running.get(RequestRef.from_proto(ref))
        leg = request.leg_at(link) if request is not None else None
        return (request, leg) if request is not None and leg is not None else None

    def _on_reserved(self, request: Request, leg: Leg, event: worker_pb2.ReservedEvent) -> None:
        leg.is_reserving = False
        request.stamp(list(event.stamps))
        request.state = RequestState.RUNNING
        if not request.output_token_ids:
            request.kv_transfer.decode_cached_tokens = event.num_cached_tokens
        command = worker_pb2.PrefillCommand(ref=request.ref.to_proto(), spec=request.spec(), ticket=event.ticket)
        for prompt_leg in [leg for leg in request.legs if leg.computes_prompt]:
            prompt_leg.link.send_prompt(prompt_leg, worker_pb2.SessionRequest(prefill=command))

    def _on_refused(self, request: Request, leg: Leg, event: worker_pb2.RefusedEvent) -> None:
        if not (leg.is_reserving and event.cause in NOT_NOW):
            self._on_leg_ended(request, leg, event.cause, event.message or "the worker is draining")
            return
        # No room there after all: the request waits in the queue until the worker reports a change.
        leg.link.no_room()
        self._forget_attempt(request, abort=False)
        request.state = RequestState.QUEUED
        self._queue.put_back(request)
        seconds = self._config.max_queue_seconds
        if request.may_expire and seconds is not None and self.clock.now() - request.received >= seconds:
            self._end_waiting(request, seconds)

    def _on_output(self, link: WorkerLink, output: worker_pb2.TokenOutput) -> bool:
        """Returns whether a request in the queue might be bound now that could not be bound before."""
        found = self._find(link, output.ref)
        if found is None or found[0].is_answered:  # a stop string ended it, and this event crossed the abort
            return False
        request, leg = found
        is_first = request.num_attempt_tokens == 0
        request.take_output(output, leg)
        if output.finish_reason and leg.generates:
            self._close(request, leg)
        if request.is_answered:
            # The first token may have ended the output: decode gets no pages and must not wait for them.
            self._end_answered(request)
        elif request.output.num_waiting > self._config.max_unread_tokens:
            self._metrics.slow_readers.inc()
            self._finish(request, ResourceExhausted(self._too_slow(request)))
        return is_first or request.state is RequestState.FINISHED

    def _too_slow(self, request: Request) -> str:
        return (
            f"the client reads too slowly: {request.output.num_waiting} tokens wait for it, "
            f"{self._config.max_unread_tokens} may"
        )

    def _on_transfer_finished(self, request: Request, leg: Leg, event: worker_pb2.TransferFinishedEvent) -> None:
        request.take_transfer(event.kv_transfer)
        self._close(request, leg)
        if request.decode is not None and not request.is_answered:
            done = worker_pb2.TransferDoneCommand(ref=request.ref.to_proto())
            request.decode.send(worker_pb2.SessionRequest(transfer_done=done))
        self._finish_if_over(request)

    def _on_ended(self, request: Request, leg: Leg, event: worker_pb2.RequestEndedEvent) -> None:
        if leg.generates and not request.is_answered:
            request.was_preempted |= event.cause == worker_pb2.CAUSE_NO_PAGES
            request.take_unsent(event.output_token_ids)
        self._on_leg_ended(request, leg, event.cause, event.message)

    def _on_leg_ended(self, request: Request, leg: Leg, cause: worker_pb2.Cause.ValueType, message: str) -> None:
        """A worker refused or ended a request: the request continues elsewhere, if the cause allows that."""
        self._close(request, leg)
        consequence = CONSEQUENCES.get(cause, UNKNOWN)
        error = consequence.error(message)
        if request.is_answered:
            self._finish_if_over(request)
        elif consequence.limit is None:
            self._finish(request, error)
        else:
            self._metrics.retries.labels(consequence.counted_as).inc()
            self._retry(request, error, consequence.limit)

    def _on_lost(self, link: WorkerLink) -> None:
        """A session broke, or nothing moves there: its requests continue elsewhere, from their next token."""
        legs = list(link.legs.values())
        log.warning("requests lose a worker", extra={"worker": link.address, "requests": len(legs)})
        for leg in legs:
            request, tier = self._running[leg.ref], "decode" if leg.generates else "prefill"
            self._close(request, leg, abort=link.is_open)
            if request.is_answered:
                self._finish_if_over(request)
            elif leg.generates or request.num_attempt_tokens < 2:
                self._metrics.retries.labels(f"{tier}_lost").inc()
                error = Unavailable(f"{tier_name(link.tier)} worker {link.address} was lost")
                self._retry(request, error, "attempts")
            # Else decode has every page, since it has brought a token, and does not need the prefill worker any more.
        self._pump()

    # ends

    def _retry(self, request: Request, error: RequestError, limit: RetryLimit) -> None:
        """Another attempt, ahead of newer requests, unless too many in a row brought no token; see `router.retries`."""
        self._forget_attempt(request)
        if request.num_attempt_tokens == 0:
            request.retries.failed(limit, self.clock.now())
        if request.retries.is_hopeless(self._config.worker_loss_seconds):
            self._finish(request, error)
            return
        request.begin_attempt(error.message)
        about = {
            "request_id": request.checked.request_id,
            "attempt": request.attempt,
            "next_token": len(request.output_token_ids),
            "reason": error.message,
        }
        log.info("request continues elsewhere", extra=about)
        pause = request.retries.begin(limit, self.rng)
        if pause:
            self._resting[request] = self.clock.call_later(pause, self._end_rest, request)
        else:
            self._queue.put_back(request)

    def _end_rest(self, request: Request) -> None:
        del self._resting[request]
        self._queue.put_back(request)
        self._pump()

    def _end_answered(self, request: Request, is_complete: bool = False) -> None:
        """The output is complete. is_complete: the workers do not know that."""
        for leg in [leg for leg in request.legs if leg.generates]:
            self._close(request, leg, abort=True, is_complete=is_complete)
        self._finish_if_over(request)
        if request.state is not RequestState.FINISHED:
            # The prefill worker has only numbers left to tell. If the worker can't, nobody waits for them.
            self.clock.call_later(LAST_NUMBERS_SECONDS, self._finish_answered, request)

    def _finish_if_over(self, request: Request) -> None:
        """The output is complete once its last token is known and all legs are closed: then the numbers are final."""
        if request.is_answered and not request.legs:
            self._finish(request, None)

    def _finish_answered(self, request: Request) -> None:
        if request.state is not RequestState.FINISHED:
            self._finish(request, None)
            self._pump()

    def _finish(self, request: Request, error: RequestError | None) -> None:
        self._forget_attempt(request)
        if (rest := self._resting.pop(request, None)) is not None:
            rest.cancel()
        if request in self._queue:
            self._queue.remove(request)
        if request.state is not RequestState.FINISHED:
            request.state = RequestState.FINISHED
            request.output.end(error)

    def _forget_attempt(self, request: Request, abort: bool = True) -> None:
        """This attempt is over. abort: workers may have something of it, so they are told."""
        for leg in list(request.legs):
            self._close(request, leg, abort)
        self._running.pop(request.ref, None)

    @staticmethod
    def _close(request: Request, leg: Leg, abort: bool = False, is_complete: bool = False) -> None:
        """A leg is over. abort: the worker does not know yet."""
        request.legs.remove(leg)
        leg.link.release(leg)
        if abort:
            command = worker_pb2.AbortCommand(ref=leg.ref.to_proto(), is_complete=is_complete)
            leg.link.send(worker_pb2.SessionRequest(abort=command))
