"""Traces of requests for OpenTelemetry: the stages of a request, and the workers that computed it.

One trace per request, or one span in the caller's trace if the caller sent a W3C `traceparent` (gRPC metadata, HTTP
header). Workers do not create spans: they report times of stages, which the router turns into spans of every attempt
when a request ends. The span in which a request or an attempt failed has the reason.
Attributes follow the conventions for generative AI (https://opentelemetry.io/docs/specs/semconv/gen-ai/); our own begin
with `kvferry.`. The `OTEL_*` variables configure the SDK's sampling and resource.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from router.completion import Completion
from rpc.config import ConfigError
from rpc.errors import RequestError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

log = logging.getLogger(__name__)

NO_HEADERS: Mapping[str, str] = {}
CLOSE_SECONDS = 2.0
"""Longest time to send the last spans at shutdown, in case the collector is unreachable."""
IN_STAGE = {
    "queued": "queue",
    "reserved": "wait for prefill",
    "prefill_started": "prefill",
    "prefill_finished": "transfer after prefill",
    "transfer_finished": "wait for decode",
    "decode_started": "decode",
}
"""Stage to name of the span that begins at this stage."""
MOST_TRACEPARENT, MOST_TRACESTATE = 128, 512
"""Most characters: of the specified format, and of what the specification asks everybody to propagate."""


class Tracing:
    """Creates traces."""

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
        """Sends traces to an OTLP collector over gRPC. Raises ConfigError if OpenTelemetry packages are missing."""
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
            # Attributes from the environment override ours.
            ours = Resource.create({"service.name": "kvferry-router", "service.instance.id": router_id})
            provider = TracerProvider(resource=ours.merge(OTELResourceDetector().detect()))
            provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"--otlp-endpoint {endpoint}, or an OTEL_* variable: {error}") from error
        # This logger warns of every invalid tracestate, and clients may send any.
        logging.getLogger("opentelemetry.trace").setLevel(logging.ERROR)
        return cls(provider, model)

    def begin(self, headers: Mapping[str, str]) -> RequestTrace:
        """Begins the trace of a new request. headers: gRPC metadata or HTTP headers, names in lower case."""
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
        """Sends the last spans, for at most CLOSE_SECONDS."""
        closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)


class RequestTrace:
    """The trace of one request."""

    def __init__(self, tracer: Tracer, root: Span, now: Callable[[], float], clock_origin: int) -> None:
        """clock_origin: nanoseconds since 1970 at which `now` was 0; converts stage times to wall time."""
        self._tracer, self._root, self._now, self._origin = tracer, root, now, clock_origin

    def end(self, completions: Seq[Completion], error: Exception | None) -> None:
        """Ends the trace. error: why the request failed, if it did. completions: empty if the request was refused.

        Raises nothing, because a failed trace must not fail the request.
        """
        now = self._now()
        try:
            if self._root.is_recording():
                self._describe(completions, now, error)
            self._root.end(self._at(now))
        except Exception:
            log.exception("a trace could not be recorded")

    def _describe(self, completions: Seq[Completion], now: float, error: Exception | None) -> None:
        for completion in completions:
            self._add_stages(completion, now, error)
        if completions:
            self._root.set_attributes(_attributes(completions))
        if error is not None:
            _set_error(self._root, str(error), error_type(error))

    def _at(self, moment: float) -> int:
        return self._origin + int(moment * 1e9)

    def _add_stages(self, completion: Completion, now: float, error: Exception | None) -> None:
        from opentelemetry.trace import set_span_in_context

        parent = set_span_in_context(self._root)
        for number, attempt in enumerate(completion.request.attempts):
            for (stage, begin), after in itertools.zip_longest(moments := attempt.moments(), moments[1:]):
                if (name := _span_name(stage, after)) is None:
                    continue
                end = after[1] if after is not None else attempt.ended or now
                span = self._tracer.start_span(name, parent, start_time=self._at(begin))
                span.set_attributes({"kvferry.choice": completion.index, "kvferry.attempt": number})
                prefill_worker, decode_worker = attempt.workers
                if worker := {"prefill": prefill_worker, "decode": decode_worker}.get(name):
                    span.set_attribute("kvferry.worker", worker)
                if after is None:  # the attempt's last stage
                    if attempt.ended is not None:
                        _set_error(span, attempt.why)
                    elif error is not None:
                        _set_error(span, str(error), error_type(error))
                span.end(self._at(end))


def _span_name(stage: str, after: tuple[str, float] | None) -> str | None:
    """Name of the span between two stages; None: there is none."""
    if stage == "prefill_finished" and after is not None and after[0] != "transfer_finished":
        # One worker does prefill and decode, or the first token ended the output.
        return "wait for decode" if after[0] == "decode_started" else None
    return IN_STAGE.get(stage)


def _attributes(completions: Seq[Completion]) -> dict[str, str | int | float]:
    first, requests = completions[0].request, [completion.request for completion in completions]
    return {
        "kvferry.request_id": first.checked.request_id,
        "gen_ai.request.max_tokens": first.checked.stop.max_tokens,
        "gen_ai.usage.input_tokens": len(first.checked.prompt_token_ids),
        "gen_ai.usage.output_tokens": sum(completion.num_tokens for completion in completions),
        "kvferry.cached_tokens": first.num_cached_tokens,
        "kvferry.retries": sum(len(request.attempts) - 1 for request in requests),
        "kvferry.kv_transfer.bytes": sum(request.kv_transfer.bytes for request in requests),
        "kvferry.kv_transfer.transport": first.kv_transfer.transport,
    }


def error_type(error: Exception) -> str:
    """Name of the gRPC status that the client gets."""
    return error.code.name if isinstance(error, RequestError) else "INTERNAL"


def _set_error(span: Span, message: str, kind: str = "") -> None:
    from opentelemetry.trace import Status, StatusCode

    if kind:
        span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR, message))
