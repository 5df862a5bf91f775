"""From a request's tokens to the client's stream: text, stop strings, usage. Any front (gRPC, HTTP) uses this."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator

from protos import inference_pb2
from router.dispatch import Dispatcher
from router.metrics import RouterMetrics
from router.request import Ended, Request, Tokens
from router.tokenizer import IncrementalDetokenizer, StopStrings, Tokenizer
from router.validation import ClusterLimits, check_request
from rpc.errors import AlreadyExists, Unavailable

log = logging.getLogger(__name__)

BYTES_TO_CHECK_AT_ONCE = 20_000
"""Requests up to this size are checked on the event loop: a millisecond or two."""


class Generator:
    """Serves generate requests with a dispatcher."""

    def __init__(self, dispatcher: Dispatcher, tokenizer: Tokenizer, model_name: str, metrics: RouterMetrics) -> None:
        self._dispatcher, self._tokenizer, self.model_name = dispatcher, tokenizer, model_name
        self._metrics = metrics
        self._limits: ClusterLimits | None = None
        self._running_ids: set[str] = set()

    def limits(self) -> ClusterLimits:
        """What workers can take; the last known if none is there. Raises Unavailable if none ever was."""
        self._limits = self._dispatcher.pool.limits() or self._limits
        if self._limits is None:
            raise Unavailable(
                f"no pair of prefill and decode workers is ready: {self._dispatcher.pool.why_not_ready()}"
            )
        return self._limits

    async def generate(
        self, request: inference_pb2.GenerateRequest, deadline_seconds: float | None
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Streams the answer. Raises RequestError. Closing the iterator cancels the request everywhere.

        deadline_seconds: time left to the client's deadline; None: no deadline.
        """
        limits = self.limits()
        if request.ByteSize() > BYTES_TO_CHECK_AT_ONCE:
            # Tokenizing a long text takes long; other streams must not wait for it.
            checked = await asyncio.to_thread(check_request, request, self._tokenizer, self.model_name, limits)
        else:
            checked = check_request(request, self._tokenizer, self.model_name, limits)
        if checked.request_id in self._running_ids:
            raise AlreadyExists(f"request_id: {checked.request_id!r} is running already")
        deadline = None if deadline_seconds is None else time.monotonic() + deadline_seconds
        running = Request(checked, deadline)
        self._dispatcher.submit(running)
        self._running_ids.add(checked.request_id)
        self._metrics.prompt_tokens.inc(len(checked.prompt_token_ids))
        try:
            async for response in self._stream(running):
                yield response
        finally:
            log.info(
                "request ended",
                extra={
                    "request_id": checked.request_id,
                    "answered": running.is_answered,
                    "prompt_tokens": len(checked.prompt_token_ids),
                    "output_tokens": len(running.output_token_ids),
                    "attempts": running.attempt + 1,
                    "ms": round((time.monotonic() - running.received) * 1e3),
                },
            )
            self._running_ids.discard(checked.request_id)
            self._dispatcher.cancel(running)

    async def _stream(self, request: Request) -> AsyncIterator[inference_pb2.GenerateResponse]:
        checked = request.checked
        detokenizer = IncrementalDetokenizer(self._tokenizer)
        stops = StopStrings(checked.stop_strings, checked.include_stop)
        last = inference_pb2.GenerateResponse(request_id=checked.request_id)
        num_tokens = 0
        while True:
            event = await request.events.get()
            if isinstance(event, Ended):
                break
            if last.finish_reason:
                continue  # tokens after a stop string
            response = inference_pb2.GenerateResponse(request_id=checked.request_id)
            response.text = self._add_text(event, request, detokenizer, stops, last)
            if checked.return_token_ids:
                response.token_ids.extend(event.token_ids)
            num_tokens += len(event.token_ids)
            self._metrics.output_tokens.inc(len(event.token_ids))
            if num_tokens == len(event.token_ids):
                self._metrics.ttft_seconds.observe(time.monotonic() - request.received)
            if stops.matched is not None:
                request.stamp_now("finished")
                self._dispatcher.complete(request)
            if response.text or response.token_ids:
                yield response
        if event.error is not None:
            raise event.error
        self._metrics.e2e_seconds.observe(time.monotonic() - request.received)
        last.usage.prompt_tokens = len(checked.prompt_token_ids)
        last.usage.cached_tokens = request.num_cached_tokens
        last.usage.completion_tokens = num_tokens
        last.timings.CopyFrom(request.timings)
        last.kv_transfer.CopyFrom(request.kv_transfer)
        last.seed = checked.sampling.seed
        yield last

    def _add_text(
        self,
        tokens: Tokens,
        request: Request,
        detokenizer: IncrementalDetokenizer,
        stops: StopStrings,
        last: inference_pb2.GenerateResponse,
    ) -> str:
        """The text these tokens make visible. Notes in `last` why the answer ends, if it does."""
        # The ending token of an EOS or stop id is counted but is not text.
        ended_by_token = tokens.finish_reason == inference_pb2.FINISH_REASON_STOP
        ending = tokens.token_ids[-1]
        visible = tokens.token_ids[:-1] if ended_by_token and not request.checked.include_stop else tokens.token_ids
        text = detokenizer.add(visible)
        if tokens.finish_reason:
            text += detokenizer.finish()
        shown = stops.add(text)
        if stops.matched is not None:
            last.finish_reason, last.stop_reason = inference_pb2.FINISH_REASON_STOP, stops.matched
        elif tokens.finish_reason:
            shown += stops.finish()
            last.finish_reason = tokens.finish_reason
            if ended_by_token and ending not in request.checked.eos_token_ids:
                last.stop_reason = str(ending)
        return shown
