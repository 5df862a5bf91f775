"""From a request to the responses for its client. Any front (gRPC, HTTP) uses this."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any, TypeVar

from protos import inference_pb2
from router.answer import Answer
from router.dispatch import Dispatcher
from router.metrics import RouterMetrics
from router.output_stream import OutputStream
from router.request import Request
from router.tokenizer import Tokenizer
from router.tracing import NO_HEADERS, RequestTrace, Tracing
from router.validation import CheckedRequest, ClusterLimits, check_request
from rpc.errors import AlreadyExists, Cancelled, DeadlineExceeded, Unavailable, quoted

log = logging.getLogger(__name__)

Result = TypeVar("Result")
FIRST_LIMITS_LOOK_SECONDS = 0.5
TOKENIZER_THREADS = 2
BYTES_TO_CHECK_AT_ONCE = 20_000
"""Requests up to this size are checked on the event loop: a millisecond or two."""


class Generator:
    """Serves generate requests with a dispatcher."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        tokenizer: Tokenizer,
        model_name: str,
        metrics: RouterMetrics,
        tracing: Tracing | None = None,
    ) -> None:
        self._dispatcher, self._tokenizer, self.model_name = dispatcher, tokenizer, model_name
        self._metrics, self._tracing = metrics, tracing
        self._limits: ClusterLimits | None = None
        self._running_ids: set[str] = set()
        self._tokenizer_threads = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="tokenizer")

    def is_running(self, request_id: str) -> bool:
        """Whether a request of this id runs."""
        return request_id in self._running_ids

    async def tokenizing(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Runs what may take long beside the event loop. If the caller is cancelled before its turn, it never runs."""
        return await asyncio.get_running_loop().run_in_executor(self._tokenizer_threads, function, *arguments)

    def limits(self) -> ClusterLimits:
        """What workers can take; the last known if none is there. Raises Unavailable if none ever was."""
        self._limits = self._dispatcher.pool.limits() or self._limits
        if self._limits is None:
            raise Unavailable(
                f"no pair of prefill and decode workers is ready: {self._dispatcher.pool.why_not_ready()}"
            )
        return self._limits

    async def _first_limits(self) -> ClusterLimits:
        """As `limits`, but a router that was just started waits for its first workers."""
        dispatcher = self._dispatcher
        while self._limits is None and dispatcher.may_get_pairs() and not dispatcher.pool.limits():
            await asyncio.wait({dispatcher.pairs_changed()}, timeout=FIRST_LIMITS_LOOK_SECONDS)
        return self.limits()

    def generate(
        self,
        request: inference_pb2.GenerateRequest,
        deadline_seconds: float | None,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Streams the answers. Raises RequestError. Closing the iterator cancels the request everywhere.

        deadline_seconds: time left to the client's deadline; None: no deadline.
        headers: what came with the request, names in lower case; a `traceparent` is whose part its trace is.
        """
        if self._tracing is None:
            return self._generate(request, deadline_seconds, [])
        return self._traced(self._tracing.begin(headers), request, deadline_seconds)

    async def _traced(
        self, trace: RequestTrace, request: inference_pb2.GenerateRequest, deadline_seconds: float | None
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        answers: list[Answer] = []
        error: Exception | None = None
        deadline = math.inf if deadline_seconds is None else self._dispatcher.clock.now() + deadline_seconds
        try:
            async with aclosing(self._generate(request, deadline_seconds, answers)) as responses:
                async for response in responses:
                    yield response
        except Exception as caught:
            error = caught
            raise
        except BaseException:  # cancelled from outside
            is_late = self._dispatcher.clock.now() >= deadline
            error = DeadlineExceeded("the deadline passed") if is_late else Cancelled("it was cancelled")
            raise
        finally:
            trace.end(answers, error)

    async def _generate(
        self, request: inference_pb2.GenerateRequest, deadline_seconds: float | None, answers: list[Answer]
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """See `generate`. answers: takes them, once the request is accepted."""
        limits = await self._first_limits()
        if request.ByteSize() > BYTES_TO_CHECK_AT_ONCE:
            # Tokenizing a long text takes long; other streams must not wait for it.
            checked = await self.tokenizing(check_request, request, self._tokenizer, self.model_name, limits)
        else:
            checked = check_request(request, self._tokenizer, self.model_name, limits)
        if checked.request_id in self._running_ids:
            raise AlreadyExists(f"request_id: {quoted(checked.request_id)} is running already")
        self._dispatcher.check_room(checked.num_answers, len(checked.prompt_token_ids), deadline_seconds)
        deadline = None if deadline_seconds is None else self._dispatcher.clock.now() + deadline_seconds
        news, clock, rng = asyncio.Event(), self._dispatcher.clock, self._dispatcher.rng
        answers += [
            Answer(Request(checked.answer(index), deadline, clock.now, rng, OutputStream(news)), index, self._tokenizer)
            for index in range(checked.num_answers)
        ]
        self._running_ids.add(checked.request_id)
        self._metrics.prompt_tokens.inc(len(checked.prompt_token_ids))
        try:
            self._dispatcher.submit(answers[0].request)
            async with aclosing(self._read(answers, news)) as responses:
                async for response in responses:
                    yield response
        finally:
            self._running_ids.discard(checked.request_id)
            for answer in answers:
                self._dispatcher.cancel(answer.request)
            _log_end(checked, answers)

    async def _read(
        self, answers: list[Answer], news: asyncio.Event
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Responses of all answers as they come, until each has ended."""
        first, siblings = answers[0], answers[1:]
        open_answers = list(answers)
        num_tokens = len(first.request.checked.prompt_token_ids)
        self._dispatcher.room.announce(len(siblings), num_tokens)
        try:
            while open_answers:
                await news.wait()
                news.clear()
                for answer in open_answers:
                    for response in self._take(answer):
                        yield response
                if siblings and (first.num_tokens > 1 or first.is_over):
                    # The others come when the first one decodes: then that pair has the prompt's pages in its caches.
                    self._dispatcher.room.announce(-len(siblings), num_tokens)
                    for sibling in siblings:
                        self._dispatcher.submit(sibling.request, may_expire=False)
                    siblings = []
                open_answers = [answer for answer in open_answers if not answer.is_over]
        finally:
            self._dispatcher.room.announce(-len(siblings), num_tokens)

    def _take(self, answer: Answer) -> list[inference_pb2.GenerateResponse]:
        """What there is of one answer. Raises the RequestError that ended it."""
        num_tokens, was_stopped, request = answer.num_tokens, answer.is_stopped, answer.request
        responses = answer.take()
        self._metrics.output_tokens.inc(answer.num_tokens - num_tokens)
        if answer.num_tokens and not num_tokens:
            self._metrics.ttft_seconds.observe(self._dispatcher.clock.now() - request.received)
        if answer.is_stopped and not was_stopped:
            request.stamp_now("finished")
            self._dispatcher.complete(request)
            responses = answer.take_end(responses)
        if answer.is_over:
            self._metrics.e2e_seconds.observe(self._dispatcher.clock.now() - request.received)
        return responses


def _log_end(checked: CheckedRequest, answers: list[Answer]) -> None:
    log.info(
        "request ended",
        extra={
            "request_id": checked.request_id,
            "answered": all(answer.request.is_answered for answer in answers),
            "prompt_tokens": len(checked.prompt_token_ids),
            "output_tokens": sum(len(answer.request.output_token_ids) for answer in answers),
            "retries": sum(answer.request.attempt for answer in answers),
            "ms": round((answers[0].request.now() - answers[0].request.received) * 1e3),
        },
    )
