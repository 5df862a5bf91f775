"""Traces of requests for OpenTelemetry: what a request waited for and who computed it.

One trace per request, or one span in the caller's trace if it sent a W3C `traceparent` (gRPC metadata, HTTP header).
Workers know nothing of traces: the stages they stamp come to the router anyway, and become spans when a request ends.
Attributes follow the conventions for generative AI (https://opentelemetry.io/docs/specs/semconv/gen-ai/); ours begin
with `kvferry.`. Sampling and resource are the SDK's, by its `OTEL_*` variables.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from protos import inference_pb2
from router.answer import Answer
from rpc.config import ConfigError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

NO_HEADERS: Mapping[str, str] = {}
CLOSE_SECONDS = 2.0
"""Most time for the last spans when the router ends; a collector that is gone must not hold it."""
STAGES = (
    ("queue", "queued", "reserved"),
    ("wait for prefill", "reserved", "prefill_started"),
    ("prefill", "prefill_started", "prefill_finished"),
    ("transfer after prefill", "prefill_finished", "transfer_finished"),
    ("wait for decode", "transfer_finished", "decode_started"),
    ("decode", "decode_started", "finished"),
)
"""Name of a span, and the stages at which it begins and ends."""


class Tracing:
    """Makes traces."""

    def __init__(self, provider: TracerProvider, model: str) -> None:
        self._provider, self._model = provider, model
        self._tracer = provider.get_tracer("kvferry")

    @classmethod
    def to_collector(cls, endpoint: str, router_id: str, model: str) -> Tracing:
        """Sends to an OTLP collector over gRPC. Raises ConfigError if the packages for it are not installed."""
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(f"--otlp-endpoint needs packages: pip install 'kvferry[tracing]' ({error})") from error
        resource = Resource.create({"service.name": "kvferry-router", "service.instance.id": router_id})
        provider = TracerProvider(resource=resource)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        return cls(provider, model)

    def begin(self, headers: Mapping[str, str]) -> RequestTrace:
        """A request came. headers: its gRPC metadata or HTTP headers, names in lower case."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract(headers)
        root = self._tracer.start_span(
            f"generate {self._model}",
            parent,
            SpanKind.SERVER,
            {"gen_ai.operation.name": "text_completion", "gen_ai.request.model": self._model},
        )
        return RequestTrace(self, root)

    def close(self) -> None:
        """Sends what is left, if the collector takes it in time."""
        closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)

    def start_stage(self, name: str, parent: Context, start_ns: int) -> Span:
        """A span of the past."""
        return self._tracer.start_span(name, parent, start_time=start_ns)


class RequestTrace:
    """The trace of one request."""

    def __init__(self, tracing: Tracing, root: Span) -> None:
        self._tracing, self._root = tracing, root

    def end(self, answers: list[Answer], error: BaseException | None) -> None:
        """It is over, with this error if it did not come to its end; answers: none if it was refused."""
        root = self._root
        if root.is_recording():
            if answers:
                self._describe(answers)
            if error is not None:
                self._set_error(error)
        root.end()

    def _describe(self, answers: list[Answer]) -> None:
        from opentelemetry.trace import set_span_in_context

        first, requests = answers[0].request, [answer.request for answer in answers]
        attributes: dict[str, str | int | float] = {
            "kvferry.request_id": first.checked.request_id,
            "gen_ai.request.max_tokens": first.checked.stop.max_tokens,
            "gen_ai.usage.input_tokens": len(first.checked.prompt_token_ids),
            "gen_ai.usage.output_tokens": sum(answer.num_tokens for answer in answers),
            "kvferry.cached_tokens": first.num_cached_tokens,
            "kvferry.attempts": sum(request.attempt + 1 for request in requests),
            "kvferry.kv_transfer.bytes": sum(request.kv_transfer.bytes for request in requests),
            "kvferry.kv_transfer.transport": first.kv_transfer.transport,
        }
        self._root.set_attributes(attributes)
        parent = set_span_in_context(self._root)
        origin = time.time_ns() - time.monotonic_ns()  # of the clock that requests are stamped by
        for answer in answers:
            request = answer.request
            started = origin + int(request.received * 1e9)
            timings = request.ordered_timings()
            for name, begins, ends in STAGES:
                span = _between(timings, begins, ends)
                if span is None:
                    continue
                stage = self._tracing.start_stage(name, parent, started + int(span[0] * 1e6))
                stage.set_attribute("kvferry.choice", answer.index)
                if worker := {"prefill": request.prefill_worker, "decode": request.decode_worker}.get(name):
                    stage.set_attribute("kvferry.worker", worker)
                stage.end(started + int(span[1] * 1e6))

    def _set_error(self, error: BaseException) -> None:
        from opentelemetry.trace import Status, StatusCode

        code = getattr(error, "code", None)
        self._root.set_attribute("error.type", code.name if code is not None else type(error).__name__)
        self._root.set_status(Status(StatusCode.ERROR, str(error)))


def _between(timings: inference_pb2.Timings, begins: str, ends: str) -> tuple[float, float] | None:
    """Milliseconds after the request came at which a part of it began and ended; None if it was not reached.

    A part that has no end yet, or that ended in one step, is left out.
    """
    start, end = getattr(timings, f"{begins}_ms"), getattr(timings, f"{ends}_ms")
    return (start, end) if end > start > 0 or (begins == "queued" and end > 0) else None
