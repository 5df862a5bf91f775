"""Generates the responses to a request. Used by the gRPC and the HTTP API."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any, TypeVar

from protos import inference_pb2
from router.completion import Completion
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
FIRST_LIMITS_POLL_SECONDS = 0.5
TOKENIZER_THREADS = 2
BYTES_TO_CHECK_AT_ONCE = 20_000
"""Requests up to this size are validated on the event loop, which takes at most 2 ms."""


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
        """Whether a request with this id is running."""
        return request_id in self._running_ids

    async def tokenizing(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Runs a slow function in a tokenizer thread. If the caller is cancelled before, the function never runs."""
        return await asyncio.get_running_loop().run_in_executor(self._tokenizer_threads, function, *arguments)

    def limits(self) -> ClusterLimits:
        """Limits of the workers; the last known ones if none is connected. Raises Unavailable if none ever was."""
        self._limits = self._dispatcher.pool.limits() or self._limits
        if self._limits is None:
            raise Unavailable(
                f"no pair of prefill and decode workers is ready: {self._dispatcher.pool.why_not_ready()}"
            )
        return self._limits

    async def _first_limits(self) -> ClusterLimits:
        """Like `limits`, but a router that was just started waits for its first workers."""
        dispatcher = self._dispatcher
        while self._limits is None and dispatcher.may_get_pairs() and not dispatcher.pool.limits():
            await asyncio.wait({dispatcher.pairs_changed()}, timeout=FIRST_LIMITS_POLL_SECONDS)
        return self.limits()

    def generate(
        self,
        request: inference_pb2.GenerateRequest,
        deadline_seconds: float | None,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Streams the responses. Raises RequestError. Closing the iterator cancels the request on all workers.

        deadline_seconds: time left to the client's deadline; None: no deadline.
        headers: headers of the request, names in lower case. A `traceparent` is the parent of the request's trace.
        """
        if self._tracing is None:
            return self._generate(request, deadline_seconds, [])
        return self._traced(self._tracing.begin(headers), request, deadline_seconds)

    async def _traced(
        self, trace: RequestTrace, request: inference_pb2.GenerateRequest, deadline_seconds: float | None
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        completions: list[Completion] = []
        error: Exception | None = None
        deadline = math.inf if deadline_seconds is None else self._dispatcher.clock.now() + deadline_seconds
        try:
            async with aclosing(self._generate(request, deadline_seconds, completions)) as responses:
                async for response in responses:
                    yield response
        except Exception as caught:
            error = caught
            raise
        except BaseException:  # cancelled from outside
            is_late = self._dispatcher.clock.now() >= deadline
            error = DeadlineExceeded("the deadline passed") if is_late else Cancelled("the request was cancelled")
            raise
        finally:
            trace.end(completions, error)

    async def _generate(
        self, request: inference_pb2.GenerateRequest, deadline_seconds: float | None, completions: list[Completion]
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """See `generate`. completions: filled once the request is accepted."""
        limits = await self._first_limits()
        if request.ByteSize() > BYTES_TO_CHECK_AT_ONCE:
            # Tokenizing a long text is slow. On the event loop, this would delay other streams.
            checked = await self.tokenizing(check_request, request, self._tokenizer, self.model_name, limits)
        else:
            checked = check_request(request, self._tokenizer, self.model_name, limits)
        if checked.request_id in self._running_ids:
            raise AlreadyExists(f"request_id: {quoted(checked.request_id)} is already running")
        self._dispatcher.check_room(checked.num_completions, len(checked.prompt_token_ids), deadline_seconds)
        deadline = None if deadline_seconds is None else self._dispatcher.clock.now() + deadline_seconds
        has_output, clock, rng = asyncio.Event(), self._dispatcher.clock, self._dispatcher.rng
        for index in range(checked.num_completions):
            part = Request(checked.completion(index), deadline, clock.now, rng, OutputStream(has_output))
            completions.append(Completion(part, index, self._tokenizer))
        self._running_ids.add(checked.request_id)
        self._metrics.prompt_tokens.inc(len(checked.prompt_token_ids))
        try:
            self._dispatcher.submit(completions[0].request)
            async with aclosing(self._read(completions, has_output)) as responses:
                async for response in responses:
                    yield response
        finally:
            self._running_ids.discard(checked.request_id)
            for completion in completions:
                self._dispatcher.cancel(completion.request)
            _log_end(checked, completions)

    async def _read(
        self, completions: list[Completion], has_output: asyncio.Event
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Responses of all completions as they arrive, until each has ended."""
        first, siblings = completions[0], completions[1:]
        running = list(completions)
        num_tokens = len(first.request.checked.prompt_token_ids)
        self._dispatcher.room.announce(len(siblings), num_tokens)
        try:
            while running:
                await has_output.wait()
                has_output.clear()
                is_one_over = False
                for completion in running:
                    for response in self._take(completion):
                        yield response
                    is_one_over = is_one_over or completion.is_over
                if siblings and (first.num_tokens > 1 or first.is_over):
                    # Start the others once the first one decodes: its pair then has the prompt's pages cached.
                    self._dispatcher.room.announce(-len(siblings), num_tokens)
                    for sibling in siblings:
                        self._dispatcher.submit(sibling.request, may_expire=False)
                    siblings = []
                if is_one_over:
                    running = [completion for completion in running if not completion.is_over]
        finally:
            self._dispatcher.room.announce(-len(siblings), num_tokens)

    def _take(self, completion: Completion) -> list[inference_pb2.GenerateResponse]:
        """New responses of one completion. Raises the RequestError that ended its request."""
        num_tokens, was_stopped, request = completion.num_tokens, completion.is_stopped, completion.request
        responses = completion.take()
        if completion.num_tokens > num_tokens:
            self._metrics.output_tokens.inc(completion.num_tokens - num_tokens)
        if completion.num_tokens and not num_tokens:
            self._metrics.ttft_seconds.observe(self._dispatcher.clock.now() - request.received)
        if completion.is_stopped and not was_stopped:
            request.stamp_now("finished")
            self._dispatcher.complete(request)
            responses = completion.take_end(responses)
        if completion.is_over:
            self._metrics.e2e_seconds.observe(self._dispatcher.clock.now() - request.received)
        return responses


def _log_end(checked: CheckedRequest, completions: list[Completion]) -> None:
    log.info(
        "request ended",
        extra={
            "request_id": checked.request_id,
            "completed": all(completion.request.is_answered for completion in completions),
            "prompt_tokens": len(checked.prompt_token_ids),
            "output_tokens": sum(len(completion.request.output_token_ids) for completion in completions),
            "retries": sum(completion.request.attempt for completion in completions),
            "ms": round((completions[0].request.now() - completions[0].request.received) * 1e3),
        },
    )
