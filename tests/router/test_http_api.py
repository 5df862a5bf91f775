"""The HTTP front over a scripted generator: ids, streams that wait, origins, names of tokens."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from prometheus_client import CollectorRegistry

from protos import inference_pb2 as pb
from router import http_api
from router.http_api import HttpApi
from router.http_forms import CompletionForm
from router.validation import ClusterLimits
from rpc.errors import RequestError, ResourceExhausted

LIMITS = ClusterLimits(64, 320, 8, 100, 100)


class ScriptedGenerator:
    """Answers every request with a script of responses, errors to raise, and numbers of seconds to wait."""

    model_name = "tiny"

    def __init__(self, *script):
        self.script, self.asked, self.closed = script, [], 0

    def limits(self):
        return LIMITS

    def is_running(self, request_id):
        return request_id == "taken"

    async def generate(self, request, timeout, headers):
        self.asked.append(request)
        try:
            for entry in self.script:
                if isinstance(entry, RequestError):
                    raise entry
                if isinstance(entry, float):
                    await asyncio.sleep(entry)
                else:
                    yield pb.GenerateResponse(**entry)
        finally:
            self.closed += 1


LAST = {"text": "b", "finish_reason": pb.FINISH_REASON_LENGTH, "usage": pb.Usage(completion_tokens=2)}


def front(generator, **options):
    api = HttpApi(generator, CollectorRegistry(), lambda: "", lambda status: None, **options)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=api.app), base_url="http://x")


async def post(generator, body=None, headers=None, **options):
    async with front(generator, **options) as client:
        return await client.post("/v1/completions", json={"prompt": "x"} | (body or {}), headers=headers or {})


async def test_a_stream_that_waits_sends_empty_lines(monkeypatch):
    monkeypatch.setattr(http_api, "QUIET_SECONDS", 0.02)
    generator = ScriptedGenerator(0.15, {"text": "a"}, 0.15, LAST)
    answer = await post(generator, {"stream": True})
    begin, between, end = answer.text.partition("data: ")[0], answer.text.split("\n\n", 1)[1], answer.text[-14:]
    assert begin.strip() == "" and begin.count("\n") >= 2
    assert between.partition("data: ")[0].count("\n") >= 2
    assert end == "data: [DONE]\n\n"
    assert generator.closed == 1


def events_read_line_by_line(text):
    """As httpx-sse and OpenAI's clients read: an empty line ends an event, if there is one."""
    events, data = [], []
    for line in text.split("\n"):
        if line.startswith("data: "):
            data.append(line.removeprefix("data: "))
        elif not line and data:
            events.append("\n".join(data))
            data = []
    return events


def events_read_piece_by_piece(pieces):
    """As `vllm bench serve` reads: it strips every piece that arrives, and the end of a comment with it."""
    events, left = [], ""
    for piece in pieces:
        if not (stripped := piece.strip()):
            continue
        *whole, left = (left + stripped).split("\n\n")
        if left.startswith("data: "):
            whole, left = [*whole, left], ""
        events += [event.removeprefix("data: ") for event in whole if event.startswith("data: ")]
    return events


async def test_every_reader_finds_all_events_of_a_stream_that_waited(monkeypatch):
    monkeypatch.setattr(http_api, "QUIET_SECONDS", 0.02)
    pieces = []

    async def keeping(scope, receive, send):
        async def keep(message):
            if message["type"] == "http.response.body":
                pieces.append(message.get("body", b"").decode())
            await send(message)

        await api.app(scope, receive, keep)

    generator = ScriptedGenerator(0.1, {"text": "a"}, 0.1, LAST)
    api = HttpApi(generator, CollectorRegistry(), lambda: "", lambda status: None)
    transport = httpx.ASGITransport(app=keeping)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        answer = await client.post("/v1/completions", json={"prompt": "x", "stream": True})
    expected = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert [json.loads(event)["choices"][0]["text"] for event in expected[:-1]] == ["a", "b"]
    assert events_read_line_by_line(answer.text) == expected
    assert events_read_piece_by_piece(pieces) == expected


async def test_an_error_after_an_empty_line_is_an_event(monkeypatch):
    monkeypatch.setattr(http_api, "QUIET_SECONDS", 0.02)
    answer = await post(ScriptedGenerator(0.1, ResourceExhausted("full")), {"stream": True})
    assert answer.status_code == 200
    [event] = [line for line in answer.text.splitlines() if "error" in line]
    assert json.loads(event.removeprefix("data: "))["error"]["code"] == "rate_limit_exceeded"


async def test_an_error_before_anything_was_sent_is_a_status():
    answer = await post(ScriptedGenerator(ResourceExhausted("full")), {"stream": True})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")


async def test_ids_come_from_the_body_else_the_header_else_are_made():
    generator = ScriptedGenerator(LAST)
    for body, headers, expected in (
        ({"request_id": "b"}, {"x-request-id": "h"}, "b"),
        ({}, {"x-request-id": "h"}, "h"),
        ({"prompt": ["x", "y"]}, {"x-request-id": "h"}, "h"),
    ):
        answer = await post(generator, body, headers)
        assert (answer.json()["id"], answer.headers["x-request-id"]) == (expected, expected)
    assert [request.request_id for request in generator.asked] == ["b", "h", "h-0", "h-1"]
    answer = await post(generator)
    assert answer.json()["id"] == generator.asked[-1].request_id
    answer = await post(generator, {}, {"x-request-id": "taken"})
    assert answer.json()["id"] == "taken"
    assert generator.asked[-1].request_id.startswith("taken-")


@pytest.mark.parametrize("given", ["a b", "x" * 129, "\xe9"])
async def test_a_header_that_is_no_id_is_refused(given):
    answer = await post(ScriptedGenerator(LAST), {}, {b"x-request-id": given.encode("latin-1")})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-request-id")
    assert answer.headers["x-request-id"].startswith("cmpl-")


@pytest.mark.parametrize("given", ["\u4e2d", "a\r\nb", "x" * 129, "a b"])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_id_of_the_body_that_can_be_no_header_is_refused_before_anything_starts(given, stream):
    generator = ScriptedGenerator(LAST)
    answer = await post(generator, {"request_id": given, "stream": stream})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "request_id")
    assert not generator.asked


async def test_ids_that_the_front_makes_are_no_longer_than_ids_may_be():
    generator = ScriptedGenerator(LAST)
    longest = "x" * 128
    await post(generator, {"prompt": ["a", "b"]}, {"x-request-id": longest})
    assert [request.request_id for request in generator.asked] == [f"{'x' * 126}-0", f"{'x' * 126}-1"]
    generator.is_running = lambda request_id: True
    await post(generator, {}, {"x-request-id": longest})
    assert len(generator.asked[-1].request_id) == 128


async def test_errors_carry_the_id_too():
    for body in ({"n": 0}, {"tools": [1]}):
        answer = await post(ScriptedGenerator(LAST), body, {"x-request-id": "h"})
        assert (answer.status_code, answer.headers["x-request-id"]) == (400, "h")
    answer = await post(ScriptedGenerator(ResourceExhausted("full")), {}, {"x-request-id": "h"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (429, "h")


async def test_origins_that_are_named_may_call_from_a_browser():
    headers = {"origin": "https://chat.example", "access-control-request-method": "POST"}
    async with front(ScriptedGenerator(LAST), cors_origins=("https://chat.example",)) as client:
        asked = await client.options("/v1/completions", headers=headers)
        assert asked.headers["access-control-allow-origin"] == "https://chat.example"
        other = await client.options("/v1/completions", headers=headers | {"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers
        answer = await client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
        assert answer.headers["access-control-expose-headers"] == "x-request-id"


async def test_the_longest_length_that_can_be_had_is_published():
    async with front(ScriptedGenerator()) as client:
        [model] = (await client.get("/v1/models")).json()["data"]
    assert model["max_model_len"] == LIMITS.longest_sequence


def test_tokens_that_share_a_text_keep_their_own_numbers():
    """Bytes that are no characters all look alike as text; so do a special token and its letters."""

    def token(token_id, logprob, raw):
        return pb.TokenLogprob(token_id=token_id, logprob=logprob, token_bytes=raw)

    top = [token(1, -0.1, b"a"), token(2, -0.2, b"\xf0"), token(3, -0.3, b"\xf1"), token(4, -0.4, b"a")]
    response = pb.GenerateResponse(logprobs=[pb.PositionLogprobs(chosen=token(2, -0.2, b"\xf0"), top=top)])
    form = CompletionForm("id", "m", 1, False)
    found = form.logprobs(response, 0)
    [values] = found["top_logprobs"]
    assert {name: round(value, 3) for name, value in values.items()} == {
        "a": -0.1, "bytes:\\xf0": -0.2, "bytes:\\xf1": -0.3, "token_id:4": -0.4,
    }  # fmt: skip
    assert found["tokens"] == ["bytes:\\xf0"]
    assert found["tokens"][0] in values


async def call(app, body, send):
    """A request whose client stays, and takes what it gets with `send`."""
    raw = json.dumps({"prompt": "x"} | body).encode()
    messages = [{"type": "http.request", "body": raw, "more_body": False}]

    async def receive():
        return messages.pop() if messages else await asyncio.Event().wait()

    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"",
        "headers": [(b"content-type", b"application/json")], "http_version": "1.1", "scheme": "http",
        "server": ("x", 80), "client": ("y", 1), "root_path": "",
    }  # fmt: skip
    await app(scope, receive, send)


@pytest.mark.parametrize("num_prompts", [1, 3])
@pytest.mark.parametrize(("pause", "is_stream"), [(0.0, True), (0.3, True), (0.0, False)])
async def test_the_timeout_counts_once_wherever_the_time_went(num_prompts, pause, is_stream):
    """pause: of a client that reads slowly, so that its time passes while the router writes."""
    ended, sent = [], []
    script = [{"text": "a"}] * 3 + ([] if pause else [10.0])
    generator = ScriptedGenerator(*script, *[{"text": "b"}] * 100)
    api = HttpApi(generator, CollectorRegistry(), lambda: "", ended.append)

    async def send(message):
        sent.append(message)
        if b'"a"' in message.get("body", b""):
            await asyncio.sleep(pause)

    await call(api.app, {"prompt": ["x"] * num_prompts, "stream": is_stream, "timeout": 0.2}, send)
    assert ended == ["DEADLINE_EXCEEDED"] * num_prompts
    assert generator.closed == num_prompts
    text = b"".join(message.get("body", b"") for message in sent).decode()
    assert text.count("the timeout of 0.2 s passed") == 1
    assert sent[0]["status"] == (200 if is_stream else 408)
    assert not is_stream or text.endswith("data: [DONE]\n\n")


async def test_a_client_that_leaves_cancels_all_prompts():
    ended = []
    generator = ScriptedGenerator({"text": "a"}, 10.0)
    api = HttpApi(generator, CollectorRegistry(), lambda: "", ended.append)
    for is_stream in (True, False):
        messages = [{"type": "http.disconnect"}, {"type": "http.request", "body": b"", "more_body": False}]

        async def receive(messages=messages, is_stream=is_stream):
            if len(messages) == 2:
                body = json.dumps({"prompt": ["x", "y"], "stream": is_stream}).encode()
                return messages.pop() | {"body": body}
            await asyncio.sleep(0.1)
            return messages[0]

        async def send(message):
            pass

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
        await api.app(scope, receive, send)
    assert ended == ["CANCELLED"] * 4
    assert generator.closed == 4
