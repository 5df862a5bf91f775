"""The load generator against servers made for it: what counts as a token, when, and what counts as a failure."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import asynccontextmanager

import grpc
import pytest

from benchmarks.driver import MOST_CPU_SHARE, MOST_LAG_MS, closed_loop, duration_of, open_loop, watched
from benchmarks.metrics import Slo, summarise
from benchmarks.records import RequestRecord
from benchmarks.targets import GrpcTarget, OpenAiTarget
from benchmarks.workload import LoadRequest
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc

REQUEST = LoadRequest((300, 301, 302), 4, 0.0)


@asynccontextmanager
async def http_server(*events, status=200):
    """Answers every POST with server-sent events; events may be dicts or pauses in seconds."""
    seen = []

    async def handle(reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        lines = head.lower().split("\r\n")
        length = next(int(line.split(":")[1]) for line in lines if line.startswith("content-length"))
        seen.append(json.loads(await reader.readexactly(length)))
        writer.write(f"HTTP/1.1 {status} X\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n".encode())
        for event in events:
            if isinstance(event, float):
                await writer.drain()
                await asyncio.sleep(event)
            else:
                writer.write(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", seen


async def send_http(*events, timeout=10.0, **options):
    async with http_server(*events, **options) as (url, seen), OpenAiTarget(url, "m", timeout) as target:
        record = RequestRecord(0.0)
        await target.send(REQUEST, record)
        return record, seen


def text(value):
    return {"choices": [{"text": value}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}


async def test_an_openai_server_is_measured_by_its_messages_and_its_usage():
    record, seen = await send_http(text("a"), text(" b"), USAGE, "[DONE]")
    assert (record.status, record.prompt_tokens, record.output_tokens) == ("OK", 3, 2)
    assert len(record.token_times) == 2
    assert not record.counts_messages
    assert seen[0]["stream_options"] == {"include_usage": True}
    assert (seen[0]["max_tokens"], len(seen[0]["prompt"].split())) == (4, 3)


async def test_a_first_message_without_a_token_is_not_the_first_token():
    """Casebook C159: role only at once, the token 200 ms later."""
    role = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
    record, _ = await send_http(role, 0.2, {"choices": [{"delta": {"content": "x"}}]}, USAGE, "[DONE]")
    assert record.ttft >= 0.2
    assert len(record.token_times) == 1


async def test_any_kind_of_generated_text_counts_as_the_first_token():
    """Casebook C166: a server may send reasoning first."""
    record, _ = await send_http({"choices": [{"delta": {"reasoning_content": "hm"}}]}, 0.3, text("x"), USAGE, "[DONE]")
    assert record.ttft < 0.3
    assert len(record.token_times) == 2


async def test_several_tokens_in_a_message_are_seen_by_the_usage():
    """Casebook C161."""
    usage = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 8}}
    record, _ = await send_http(text("abcd"), 0.05, text("efgh"), usage, "[DONE]")
    assert record.output_tokens == 8
    assert record.counts_messages, "gaps are per message, and the report says so"
    assert record.tpot == pytest.approx((record.token_times[1] - record.token_times[0]) / 7)


async def test_refusals_and_errors_in_the_stream_are_failures():
    """Casebook C168."""
    refused, _ = await send_http({"error": "full"}, status=503)
    assert (refused.status, refused.is_ok) == ("HTTP 503", False)
    broken, _ = await send_http(text("a"), {"error": {"message": "out of pages"}})
    assert broken.status == "HTTP 200 with an error"
    cut, _ = await send_http(text("a"))
    assert cut.status == "cut off"
    slow, _ = await send_http(text("a"), 3.0, timeout=0.2)
    assert slow.status == "TimeoutError"
    async with OpenAiTarget("http://127.0.0.1:9/v1", "m", 2.0) as target:
        gone = RequestRecord(0.0)
        await target.send(REQUEST, gone)
    assert gone.status == "ClientConnectorError"
    assert summarise([refused, broken, gone], 1.0)["completed"] == 0


class FakeRouter(inference_pb2_grpc.InferenceServiceServicer):
    """Four tokens per message; every third request is refused."""

    def __init__(self):
        self.num_requests = 0

    async def Generate(self, request, context):
        self.num_requests += 1
        if self.num_requests % 3 == 0:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
        yield pb.GenerateResponse(request_id="r")
        for _ in range(2):
            await asyncio.sleep(0.02)
            yield pb.GenerateResponse(request_id="r", token_ids=[1, 2, 3, 4])
        last = pb.GenerateResponse(request_id="r", finish_reason=pb.FINISH_REASON_LENGTH)
        last.usage.prompt_tokens, last.usage.completion_tokens = 3, 8
        yield last


@asynccontextmanager
async def fake_router():
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(FakeRouter(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with GrpcTarget(f"127.0.0.1:{port}", 10.0) as target:
        yield target
    await server.stop(0)


async def test_grpc_tokens_are_counted_each_and_refusals_by_status():
    """Casebook C161, C168."""
    async with fake_router() as target:
        ended = []
        records = await closed_loop(target, [REQUEST] * 9, 1, lambda: ended.append(1))
    assert len(ended) == 9
    summary = summarise(records, duration_of(records))
    assert summary["statuses"] == {"OK": 6, "RESOURCE_EXHAUSTED": 3}
    assert summary["total_output_tokens"] == 48
    assert all(len(r.token_times) == 8 for r in records if r.is_ok)
    assert all(r.ttft >= 0.02 for r in records if r.is_ok)


async def test_an_open_loop_keeps_its_times_whatever_the_server_does():
    async with fake_router() as target:
        requests = [LoadRequest((300,), 4, 0.03 * n) for n in range(10)]
        records = await open_loop(target, requests, lambda: None)
    starts = sorted(record.sent for record in records)
    # The server takes 40 ms for each: a closed loop would be slower.
    assert starts[-1] - starts[0] == pytest.approx(0.27, abs=0.05)
    assert all(record.lag < 0.05 for record in records)
    with pytest.raises(ValueError, match="arrival time"):
        await open_loop(target, [LoadRequest((300,), 4)], lambda: None)
    with pytest.raises(ValueError, match="--concurrency"):
        await closed_loop(target, requests, 0, lambda: None)


async def test_fields_that_are_null_or_empty_are_no_tokens():
    """First chunks of vLLM, of OpenAI, and of servers with reasoning."""
    role = {"role": "assistant", "content": "", "refusal": None, "reasoning_content": None}
    record, _ = await send_http(
        {"choices": [{"delta": role}]}, {"choices": None}, {"choices": [{"delta": {}}]}, {"choices": [{"delta": None}]},
        0.05, {"choices": [{"delta": {"content": "a"}}]}, {"choices": [{"delta": {}, "finish_reason": "stop"}]},
    )  # fmt: skip
    assert record.status == "OK"
    assert len(record.token_times) == 1
    assert record.ttft > 0.04


async def test_raw_separators_in_a_text_do_not_end_an_event():
    record, _ = await send_http(
        text("a\u2028b\u0085c"), text("d"), {"choices": [{"text": "", "finish_reason": "stop"}]}
    )
    assert (record.status, len(record.token_times)) == ("OK", 2)


async def test_an_answer_in_one_event_has_no_tpot_and_meets_no_limit_for_it():
    last = {"choices": [{"text": "a b c", "finish_reason": "stop"}], "usage": {"completion_tokens": 3}}
    record, _ = await send_http(last)
    assert (record.status, record.output_tokens, record.tpot) == ("OK", 3, None)
    assert not Slo(1000, 1000).is_met(record)
    assert Slo(1000, None).is_met(record)


async def test_an_empty_answer_is_no_success():
    record, _ = await send_http({"choices": [{"text": "", "finish_reason": "stop"}]})
    assert (record.status, record.is_ok) == ("empty output", False)
    numbers = summarise([record], 1.0)
    assert (numbers["completed"], numbers["left_out_of_ttft"], numbers["left_out_of_tpot"]) == (0, 1, 1)


async def test_comments_and_cached_tokens_are_read():
    usage = {"completion_tokens": 1, "prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}
    record, _ = await send_http(text("a"), {"choices": [{"text": "", "finish_reason": "stop"}], "usage": usage})
    assert (record.prompt_tokens, record.cached_tokens) == (9, 4)


async def test_an_api_key_is_sent_as_a_bearer_token():
    heads = []

    async def handle(reader, writer):
        heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
        writer.write(b"HTTP/1.1 401 X\r\ncontent-length: 2\r\nconnection: close\r\n\r\nno")
        writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        async with OpenAiTarget(url, "m", 5.0, api_key="secret") as target:
            record = RequestRecord(0.0)
            await target.send(REQUEST, record)
    assert record.status == "HTTP 401"
    assert "authorization: bearer secret" in heads[0].lower()


async def test_a_generator_that_is_held_up_says_so():
    async with watched() as generator:
        for _ in range(6):
            await asyncio.sleep(0.02)
            time.sleep(0.06)  # noqa: ASYNC251  # as if events took that long to read
    assert generator.p99_lag_ms > MOST_LAG_MS
    assert generator.is_limit
    async with watched() as generator:
        await asyncio.sleep(0.1)
    assert generator.cpu_share < MOST_CPU_SHARE
