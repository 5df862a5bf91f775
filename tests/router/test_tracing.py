"""Spans of requests, with scripted workers and times: every attempt, every stage, and where it failed."""

from __future__ import annotations

from types import SimpleNamespace

import grpc
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from protos import worker_pb2 as wpb
from router.config import RouterConfig
from router.tracing import Tracing, error_type
from rpc.config import ConfigError
from rpc.errors import DeadlineExceeded, Unavailable
from tests.router.rig import Rig

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Traced:
    """One request with a trace; stages are reached by hand."""

    def __init__(self, headers=(), **options):
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.rig = Rig(**options)
        self.clock = self.rig.clock
        tracing = Tracing(provider, "m", self.clock.now, lambda: int((1_700_000_000 + self.clock.now()) * 1e9))
        self.trace = tracing.begin(dict(headers))
        self.start = self.clock.now()
        self.request = self.rig.submit()
        self.answer = SimpleNamespace(request=self.request, index=0, num_tokens=0)

    def reach(self, seconds, *stages):
        """Time passes, then these stages are told of."""
        self.clock.advance(seconds)
        self.request.stamp([wpb.StageStamp(stage=wpb.Stage.Value(f"STAGE_{stage.upper()}")) for stage in stages])

    def end(self, error=None):
        self.trace.end([self.answer], error)
        *stages, root = self.exporter.get_finished_spans()
        return root, stages

    def times(self, stages):
        """(name, begin, end) in seconds since the request came."""
        root = self.exporter.get_finished_spans()[-1]
        return [
            (s.name, *(round((moment - root.start_time) / 1e9, 3) for moment in (s.start_time, s.end_time)))
            for s in stages
        ]


def serve(traced):
    """Up to the first decode step."""
    traced.reach(0.5, "reserved")
    traced.reach(0.1, "prefill_started")
    traced.reach(1.0, "prefill_finished")
    traced.reach(0.2, "transfer_finished")
    traced.reach(0.1, "decode_started")


async def test_stages_become_spans():
    traced = Traced()
    serve(traced)
    traced.reach(2.0, "finished")
    traced.clock.advance(0.1)
    root, stages = traced.end()
    assert traced.times(stages) == [
        ("queue", 0, 0.5), ("wait for prefill", 0.5, 0.6), ("prefill", 0.6, 1.6), ("transfer after prefill", 1.6, 1.8),
        ("wait for decode", 1.8, 1.9), ("decode", 1.9, 3.9),
    ]  # fmt: skip
    assert round((root.end_time - root.start_time) / 1e9, 3) == 4.0
    workers = {s.name: s.attributes["kvferry.worker"] for s in stages if "kvferry.worker" in s.attributes}
    assert workers == {"prefill": "p0", "decode": "d0"}
    assert {s.context.trace_id for s in stages} == {root.context.trace_id}
    assert all(s.status.is_ok or s.status.status_code.name == "UNSET" for s in (root, *stages))


async def test_every_attempt_has_its_own_spans():
    traced = Traced(decode=2)
    serve(traced)
    traced.clock.advance(3.0)
    traced.rig.lose(traced.request.decode)
    traced.reach(0.3, "reserved")
    traced.reach(0.1, "prefill_started")
    traced.reach(0.4, "prefill_finished", "finished")
    root, stages = traced.end()
    first, second = ([s for s in stages if s.attributes["kvferry.attempt"] == number] for number in (0, 1))
    assert traced.times(first)[-1] == ("decode", 1.9, 4.9)
    assert not first[-1].status.is_ok
    assert first[-1].status.description
    assert traced.times(second) == [("queue", 4.9, 5.2), ("wait for prefill", 5.2, 5.3), ("prefill", 5.3, 5.7)]
    assert root.attributes["kvferry.retries"] == 1


async def test_what_failed_shows_where_it_was():
    traced = Traced()
    traced.clock.advance(7.0)
    root, stages = traced.end(DeadlineExceeded("the deadline passed"))
    assert traced.times(stages) == [("queue", 0, 7)]
    for span in (root, *stages):
        assert (span.attributes["error.type"], span.status.description) == ("DEADLINE_EXCEEDED", "the deadline passed")


async def test_one_worker_for_both_phases_reserves_nothing():
    traced = Traced()
    traced.reach(0.3, "prefill_started")
    traced.reach(0.2, "prefill_finished")
    traced.reach(0.1, "decode_started")
    traced.reach(0.4, "finished")
    _, stages = traced.end()
    assert [name for name, *_ in traced.times(stages)] == ["queue", "prefill", "wait for decode", "decode"]


async def test_stages_that_came_late_are_put_in_order():
    traced = Traced()
    traced.reach(0.5, "reserved")
    traced.reach(1.0, "transfer_finished", "decode_started")
    traced.reach(0.2, "prefill_started", "prefill_finished", "finished")  # their message was on its way for longer
    _, stages = traced.end()
    assert traced.times(stages) == [
        ("queue", 0, 0.5), ("wait for prefill", 0.5, 1.5), ("prefill", 1.5, 1.5), ("transfer after prefill", 1.5, 1.5),
        ("wait for decode", 1.5, 1.5), ("decode", 1.5, 1.7),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("headers", "is_part"),
    [
        ({"traceparent": TRACEPARENT}, True),
        ({"traceparent": TRACEPARENT, "tracestate": "a=1,b=2"}, True),
        ({"traceparent": TRACEPARENT, "tracestate": "a" + " " * 60_000 + "a"}, True),
        ({"traceparent": "00-what-ever"}, False),
        ({"traceparent": TRACEPARENT + "x" * 60_000}, False),
        ({"traceparent": ""}, False),
        ({}, False),
    ],
)
async def test_callers_headers_are_not_trusted(headers, is_part, monkeypatch, caplog):
    root, _ = Traced(headers).end()
    assert (root.parent is not None and f"{root.parent.span_id:x}" == "b7ad6b7169203331") == is_part
    assert all(len(str(value)) < 1000 for value in root.context.trace_state.values())


async def test_a_request_does_not_fail_with_its_trace(monkeypatch, caplog):
    traced = Traced()
    del traced.answer.num_tokens
    traced.trace.end([traced.answer], None)
    assert "a trace could not be recorded" in caplog.text


def test_a_router_without_the_packages_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(ConfigError, match="opentelemetry-exporter-otlp-proto-grpc"):
        Tracing.to_collector("http://127.0.0.1:9", "r", "m")


def test_the_environment_has_the_last_word(monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.instance.id=pod7")
    tracing = Tracing.to_collector("http://127.0.0.1:9", "r", "m")
    told = tracing._provider.resource.attributes
    assert (told["service.name"], told["service.instance.id"]) == ("mine", "pod7")
    tracing.close()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "abc")
    with pytest.raises(ConfigError, match="OTEL_"):
        Tracing.to_collector("http://127.0.0.1:9", "r", "m")


def test_addresses_that_are_none_are_refused():
    with pytest.raises(ValueError, match="--otlp-endpoint"):
        RouterConfig(model="m", otlp_endpoint="collector:4317")


def test_error_types_are_what_clients_get():
    assert error_type(Unavailable("x")) == grpc.StatusCode.UNAVAILABLE.name
    assert error_type(KeyError("x")) == "INTERNAL"
