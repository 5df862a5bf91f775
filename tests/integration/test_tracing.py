"""Traces of requests, sent to a collector: real router and workers, a collector that keeps what it gets."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import time
from concurrent import futures

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from kvferry.client import Client, KvferryError
from protos import inference_pb2, inference_pb2_grpc
from router.tracing import CLOSE_SECONDS
from tests.integration.support import wait_for

CALLER, CALLERS_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{CALLER}-{CALLERS_SPAN}-01"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """What `docker run otel/opentelemetry-collector` would get."""

    def __init__(self):
        self.spans, self.resources = [], []
        self.server = grpc.server(futures.ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self.server)
        self.endpoint = f"http://127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def Export(self, request, context):
        for of_resource in request.resource_spans:
            self.resources.append({a.key: a.value.string_value for a in of_resource.resource.attributes})
            for scope in of_resource.scope_spans:
                self.spans += scope.spans
        return trace_service_pb2.ExportTraceServiceResponse()

    def trace(self, **attributes):
        """(root span, its stages by name) of the one request with these attributes, once it is there."""
        found = []

        def is_there():
            roots = [span for span in self.spans if span.name.startswith("generate ")]
            found[:] = [r for r in roots if attributes.items() <= values(r).items()]
            return bool(found)

        wait_for(is_there, what=f"a trace with {attributes}")
        [root] = found
        return root, {span.name: span for span in self.spans if span.parent_span_id == root.span_id}


def values(span):
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


@pytest.fixture(scope="module")
def traced(shared_cluster):
    """(collector, router that sends to it); spans go out at once."""
    collector = Collector()
    os.environ["OTEL_BSP_SCHEDULE_DELAY"] = "50"
    try:
        router = shared_cluster.cluster.start_another_router("--otlp-endpoint", collector.endpoint)
    finally:
        del os.environ["OTEL_BSP_SCHEDULE_DELAY"]
    yield collector, router
    router.popen.terminate()
    assert router.popen.wait(10) == 0
    shared_cluster.cluster.forget(router)
    collector.server.stop(None)


def test_stages_become_spans_that_add_up(traced):
    collector, router = traced
    with Client(router.address) as client:
        started = time.time_ns()
        result = client.generate([5, 6, 7] * 60, max_tokens=6, ignore_eos=True, request_id="t1").result()
        ended = time.time_ns()
    root, stages = collector.trace(**{"kvferry.request_id": "t1"})
    assert started <= root.start_time_unix_nano < root.end_time_unix_nano <= ended
    told = values(root)
    assert told["gen_ai.usage.input_tokens"] == 180
    assert told["gen_ai.usage.output_tokens"] == 6
    assert told["kvferry.kv_transfer.bytes"] == result.kv_transfer.bytes > 0
    assert told["kvferry.retries"] == 0
    assert stages.keys() == {
        "queue", "wait for prefill", "prefill", "transfer after prefill", "wait for decode", "decode",
    }  # fmt: skip
    assert values(stages["prefill"])["kvferry.worker"] == "prefill-0"
    assert values(stages["decode"])["kvferry.worker"] == "decode-0"
    in_order = sorted(stages.values(), key=lambda span: span.start_time_unix_nano)
    slack = 1e6  # two clocks of one machine, read one after the other
    for earlier, later in itertools.pairwise(in_order):
        assert earlier.end_time_unix_nano <= later.start_time_unix_nano + slack
    assert in_order[0].start_time_unix_nano >= root.start_time_unix_nano - slack
    assert in_order[-1].end_time_unix_nano <= root.end_time_unix_nano + slack
    seconds = sum(s.end_time_unix_nano - s.start_time_unix_nano for s in in_order) / 1e9
    assert 0.8 < seconds / result.timings_ms["finished"] * 1e3 <= 1.01
    assert collector.resources[0]["service.name"] == "kvferry-router"


def test_a_request_is_part_of_its_callers_trace(traced):
    collector, router = traced
    request = inference_pb2.GenerateRequest(
        request_id="t2", token_ids=inference_pb2.TokenIds(ids=[5, 6]), stop=inference_pb2.StopConditions(max_tokens=1)
    )
    with grpc.insecure_channel(router.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        list(stub.Generate(request, metadata=[("traceparent", TRACEPARENT)], timeout=30))
    root, stages = collector.trace(**{"kvferry.request_id": "t2"})
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (CALLER, CALLERS_SPAN)
    assert {span.trace_id.hex() for span in stages.values()} == {CALLER}
    assert "decode" not in stages, "the first token ended it"


def test_http_requests_have_traces_too(traced):
    collector, router = traced
    body = {"model": router.info["model"], "prompt": "abc", "max_tokens": 3, "temperature": 0}
    url = f"{router.info['http']}/v1/completions"
    assert httpx.post(url, json=body, headers={"Traceparent": TRACEPARENT}, timeout=30).status_code == 200
    root, _ = collector.trace(**{"gen_ai.request.max_tokens": 3})
    assert root.trace_id.hex() == CALLER


def test_refused_and_cancelled_requests_say_why(traced):
    collector, router = traced
    with Client(router.address) as client:
        with pytest.raises(KvferryError):
            client.generate([5], max_tokens=10**9).result()
        root, stages = collector.trace(**{"error.type": "INVALID_ARGUMENT"})
        assert "max_tokens" in root.status.message
        assert stages == {}
        stream = client.generate([5, 6, 7], max_tokens=500, ignore_eos=True, request_id="t3")
        next(iter(stream))
        stream.cancel()
    root, stages = collector.trace(**{"error.type": "CANCELLED"})
    assert values(root)["kvferry.request_id"] == "t3"
    assert "prefill" in stages


def test_a_collector_that_does_not_answer_costs_nothing(shared_cluster):
    """It takes connections and says nothing: requests are served, and the router ends in its time."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        router = shared_cluster.cluster.start_another_router("--otlp-endpoint", endpoint)
        with Client(router.address) as client:
            assert client.generate([5, 6, 7], max_tokens=4, ignore_eos=True).result().usage.completion_tokens == 4
        started = time.monotonic()
        os.kill(router.pid, signal.SIGTERM)
        assert router.popen.wait(30) == 0
        assert time.monotonic() - started < CLOSE_SECONDS + 6, "its exporter alone would wait for 10 seconds"
    shared_cluster.cluster.forget(router)
