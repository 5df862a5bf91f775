"""Traces of requests for OpenTelemetry: what a request waited for and who computed it.

One trace per request, or one span in the caller's trace if it sent a W3C `traceparent` (gRPC metadata, HTTP header).
Workers know nothing of traces: the stages they stamp come to the router anyway, and become spans when a request ends,
those of every attempt. The span in which a request or an attempt failed says why.
Attributes follow the conventions for generative AI (https://opentelemetry.io/docs/specs/semconv/gen-ai/); ours begin
with `kvferry.`. Sampling and resource are the SDK's, by its `OTEL_*` variables.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from router.answer import Answer
from rpc.config import ConfigError
from rpc.errors import RequestError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

log = logging.getLogger(__name__)

NO_HEADERS: Mapping[str, str] = {}
CLOSE_SECONDS = 2.0
"""Most time for the last spans when the router ends; a collector that is gone must not hold it."""
IN_STAGE = {
    "queued": "queue",
    "reserved": "wait for prefill",
    "prefill_started": "prefill",
    "prefill_finished": "transfer after prefill",
    "transfer_finished": "wait for decode",
    "decode_started": "decode",
}
"""What a request does once it has reached a stage: names of spans."""
MOST_TRACEPARENT, MOST_TRACESTATE = 128, 512
"""Characters: the specification's format, and what it says that everybody should carry."""


class Tracing:
    """Makes traces."""

    def __init__(
        self,
        provider: TracerProvider,
        model: str,
        now: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """now: the clock of requests' stages, in seconds. wall_ns: nanoseconds since 1970."""
        self._provider, self._model, self._now, self._wall_ns = provider, model, now, wall_ns
        self._tracer = provider.get_tracer("kvferry")

    @classmethod
    def to_collector(cls, endpoint: str, router_id: str, model: str) -> Tracing:
        """Sends to an OTLP collector over gRPC. Raises ConfigError if the packages for it are not installed."""
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(
                "--otlp-endpoint needs the packages opentelemetry-sdk and opentelemetry-exporter-otlp-proto-grpc "
                f"(pip install '.[tracing]'): {error}"
            ) from error
        try:
            # What the environment says goes before what we would say.
            ours = Resource.create({"service.name": "kvferry-router", "service.instance.id": router_id})
            provider = TracerProvider(resource=ours.merge(OTELResourceDetector().detect()))
            provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"--otlp-endpoint {endpoint}, or a variable OTEL_*: {error}") from error
        # It warns of every tracestate that it can't read, and clients may send what they like.
        logging.getLogger("opentelemetry.trace").setLevel(logging.ERROR)
        return cls(provider, model)

    def begin(self, headers: Mapping[str, str]) -> RequestTrace:
        """A request came. headers: its gRPC metadata or HTTP headers, names in lower case."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {
            name: headers[name]
            for name, most in (("traceparent", MOST_TRACEPARENT), ("tracestate", MOST_TRACESTATE))
            if 0 < len(headers.get(name, "")) <= most
        }
        wall_ns = self._wall_ns()
        root = self._tracer.start_span(
            f"generate {self._model}",
            TraceContextTextMapPropagator().extract(carrier),
            SpanKind.SERVER,
            {"gen_ai.operation.name": "text_completion", "gen_ai.request.model": self._model},
            start_time=wall_ns,
        )
        return RequestTrace(self._tracer, root, self._now, wall_ns - int(self._now() * 1e9))

    def close(self) -> None:
        """Sends what is left, if the collector takes it in time."""
        closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)


class RequestTrace:
    """The trace of one request."""

    def __init__(self, tracer: Tracer, root: Span, now: Callable[[], float], clock_origin: int) -> None:
        """clock_origin: nanoseconds since 1970 at which `now` was 0, so that all times are of one clock."""
        self._tracer, self._root, self._now, self._origin = tracer, root, now, clock_origin

    def end(self, answers: Seq[Answer], error: Exception | None) -> None:
        """It is over, with this error if it did not come to its end; answers: none if it was refused.

        Raises nothing: a request does not fail with its trace.
        """
        now = self._now()
        try:
            if self._root.is_recording():
                self._describe(answers, now, error)
            self._root.end(self._at(now))
        except Exception:
            log.exception("a trace is lost")

    def _describe(self, answers: Seq[Answer], now: float, error: Exception | None) -> None:
        for answer in answers:
            self._add_stages(answer, now, error)
        if answers:
            self._root.set_attributes(_attributes(answers))
        if error is not None:
            _set_error(self._root, str(error), error_type(error))

    def _at(self, moment: float) -> int:
        return self._origin + int(moment * 1e9)

    def _add_stages(self, answer: Answer, now: float, error: Exception | None) -> None:
        from opentelemetry.trace import set_span_in_context

        parent = set_span_in_context(self._root)
        for number, attempt in enumerate(answer.request.attempts):
            for (stage, begin), after in itertools.zip_longest(moments := attempt.moments(), moments[1:]):
                if (name := _span_name(stage, after)) is None:
                    continue
                end = after[1] if after is not None else attempt.ended or now
                span = self._tracer.start_span(name, parent, start_time=self._at(begin))
                span.set_attributes({"kvferry.choice": answer.index, "kvferry.attempt": number})
                prefill_worker, decode_worker = attempt.workers
                if worker := {"prefill": prefill_worker, "decode": decode_worker}.get(name):
                    span.set_attribute("kvferry.worker", worker)
                if after is None:  # it did not get further
                    if attempt.ended is not None:
                        _set_error(span, attempt.why)
                    elif error is not None:
                        _set_error(span, str(error), error_type(error))
                span.end(self._at(end))


def _span_name(stage: str, after: tuple[str, float] | None) -> str | None:
    """What a request did between two stages; None if that was nothing."""
    if stage == "prefill_finished" and after is not None and after[0] != "transfer_finished":
        # One worker does both phases, or the first token ended the answer.
        return "wait for decode" if after[0] == "decode_started" else None
    return IN_STAGE.get(stage)


def _attributes(answers: Seq[Answer]) -> dict[str, str | int | float]:
    first, requests = answers[0].request, [answer.request for answer in answers]
    return {
        "kvferry.request_id": first.checked.request_id,
        "gen_ai.request.max_tokens": first.checked.stop.max_tokens,
        "gen_ai.usage.input_tokens": len(first.checked.prompt_token_ids),
        "gen_ai.usage.output_tokens": sum(answer.num_tokens for answer in answers),
        "kvferry.cached_tokens": first.num_cached_tokens,
        "kvferry.retries": sum(len(request.attempts) - 1 for request in requests),
        "kvferry.kv_transfer.bytes": sum(request.kv_transfer.bytes for request in requests),
        "kvferry.kv_transfer.transport": first.kv_transfer.transport,
    }


def error_type(error: Exception) -> str:
    """The gRPC status that its client gets."""
    return error.code.name if isinstance(error, RequestError) else "INTERNAL"


def _set_error(span: Span, message: str, kind: str = "") -> None:
    from opentelemetry.trace import Status, StatusCode

    if kind:
        span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR, message))
