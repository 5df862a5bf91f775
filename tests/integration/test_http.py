"""The OpenAI-compatible front: the official client, curl, and plain HTTP, against a real cluster."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time

import httpx
import openai
import pytest

from tests.integration.support import wait_for

CHAT = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def url(cluster):
    return cluster.cluster.find("router").info["http"]


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture
def model(cluster):
    return cluster.client.model_info().model


def test_chat_is_the_answer_of_grpc(client, model, cluster):
    expected = cluster.client.generate(CHAT, temperature=0.0, max_tokens=40).result()
    answer = client.chat.completions.create(model=model, messages=CHAT, temperature=0, max_completion_tokens=40)
    [choice] = answer.choices
    assert choice.message.content == expected.text
    assert (choice.message.role, choice.finish_reason) == ("assistant", "stop")
    assert answer.usage.prompt_tokens == expected.usage.prompt_tokens
    assert answer.usage.completion_tokens == expected.usage.completion_tokens
    assert (answer.object, answer.model) == ("chat.completion", model)


def test_chat_streams_with_role_text_finish_and_usage(client, model, cluster):
    expected = cluster.client.generate(CHAT, temperature=0.0, max_tokens=40).result()
    chunks = list(
        client.chat.completions.create(
            model=model, messages=CHAT, temperature=0, max_tokens=40, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected.text
    assert len([c for c in chunks if c.choices and c.choices[0].delta.content]) > 3
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage.completion_tokens == expected.usage.completion_tokens
    assert all(c.usage is None for c in chunks[:-1])
    assert len({c.id for c in chunks}) == 1


def test_completions_from_text_and_ids_with_seed_stop_and_n(client, model, cluster):
    options = {"model": model, "max_tokens": 12, "seed": 7, "temperature": 0.8}
    ids = cluster.client.tokenize("Once upon a time")
    by_text = client.completions.create(prompt="Once upon a time", **options)
    by_ids = client.completions.create(prompt=ids, **options)
    assert by_text.choices[0].text == by_ids.choices[0].text
    assert by_text.choices[0].finish_reason == "length"
    several = client.completions.create(prompt=ids, n=3, **options)
    assert [c.index for c in several.choices] == [0, 1, 2]
    assert len({c.text for c in several.choices}) == 3
    assert several.choices[0].text == by_ids.choices[0].text
    assert several.usage.completion_tokens == 36
    assert several.usage.prompt_tokens == len(ids)
    word = by_text.choices[0].text[4:7]
    stopped = client.completions.create(prompt=ids, stop=[word], **options)
    assert stopped.choices[0].text == by_text.choices[0].text[: by_text.choices[0].text.find(word)]
    assert stopped.choices[0].finish_reason == "stop"


def test_several_prompts_in_one_request(client, model, cluster):
    prompts = ["One, two,", "A, B,", "red, green,"]
    lone = [client.completions.create(model=model, prompt=p, temperature=0, max_tokens=6).choices[0].text
            for p in prompts]  # fmt: skip
    together = client.completions.create(model=model, prompt=prompts, temperature=0, max_tokens=6)
    assert [c.text for c in together.choices] == lone
    assert together.usage.completion_tokens == 18
    streamed = ["", "", ""]
    for chunk in client.completions.create(model=model, prompt=prompts, temperature=0, max_tokens=6, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == lone


def test_logprobs_in_both_shapes(client, model):
    chat = client.chat.completions.create(
        model=model, messages=CHAT, temperature=0, max_tokens=4, logprobs=True, top_logprobs=3
    )
    content = chat.choices[0].logprobs.content
    assert len(content) == 4
    assert all(len(entry.top_logprobs) == 3 and entry.logprob <= 0 for entry in content)
    assert "".join(bytes(entry.bytes).decode() for entry in content) == chat.choices[0].message.content
    text = client.completions.create(model=model, prompt="One, two,", temperature=0, max_tokens=4, logprobs=2)
    logprobs = text.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 4
    assert "".join(logprobs.tokens) == text.choices[0].text
    assert logprobs.text_offset[0] == 0


def test_models_health_and_metrics(client, url, model, cluster):
    assert [m.id for m in client.models.list()] == [model]
    assert client.models.retrieve(model).max_model_len == cluster.client.model_info().max_model_len
    assert client.models.retrieve(model).id == model
    assert httpx.get(f"{url}/healthz").status_code == httpx.get(f"{url}/readyz").status_code == 200
    assert "kvferry_requests_total" in httpx.get(f"{url}/metrics").text


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "words"),
    [
        ("chat/completions", {"messages": CHAT, "model": "gpt-9"}, 404, "model", "'gpt-9' is not served here"),
        ("chat/completions", {"messages": []}, 400, "messages", "at least 1 message"),
        ("chat/completions", {"messages": CHAT, "temperature": -1}, 400, "temperature", "at least 0"),
        ("chat/completions", {"messages": CHAT, "n": 0}, 400, "n", "greater than or equal to 1"),
        ("chat/completions", {"messages": CHAT, "tools": [{}]}, 400, "tools", "not served"),
        ("chat/completions", {"messages": CHAT, "response_format": {"type": "json_object"}}, 400, "response_format",
         "is not served"),
        ("chat/completions", {"messages": CHAT, "top_logprobs": 2}, 400, "top_logprobs", "needs logprobs"),
        ("chat/completions", {}, 400, "messages", "Field required"),
        ("completions", {"prompt": ""}, 400, "prompt", "is empty"),
        ("completions", {"prompt": [-1]}, 400, "prompt[0]", "is -1"),
        ("completions", {"prompt": [2**40]}, 400, "prompt", "out of range"),
        ("completions", {"prompt": "x", "timeout": 1e17}, 400, "timeout", "less than or equal to 1000000"),
        ("completions", {"prompt": ["x", [5]]}, 400, "prompt[1]", "valid string"),
        ("completions", {"prompt": [[5], [5, -1]]}, 400, "prompt[1][1]", "is -1"),
        ("completions", {"prompt": "x", "max_tokens": 10**6}, 400, "max_tokens", "maximum context length is"),
        ("completions", {"prompt": "x " * 10**6}, 400, "prompt", "maximum context length is"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x " * 10**6}]}, 400, "messages",
         "maximum context length is"),
        ("completions", {"prompt": "x", "logprobs": 50}, 400, "logprobs", "[0, 20]"),
    ],
)  # fmt: skip
def test_errors_have_openais_shape_and_the_right_status(path, body, status, param, words, url):
    answer = httpx.post(f"{url}/v1/{path}", json=body, timeout=30)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert words in error["message"]
    assert error["param"] == param
    assert error["type"]
    assert error["code"]
    if "maximum context length" in words:
        assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'"x"', b"\xff\xfe"])
def test_bodies_that_are_no_json_are_the_clients_error(raw, url):
    assert httpx.post(f"{url}/v1/completions", content=raw).status_code == 400


def test_other_methods_and_paths(url):
    for method, path, status, code in (
        ("GET", "/v1/completions", 405, "method_not_supported"),
        ("GET", "/nowhere", 404, "unknown_url"),
        ("GET", "/v1/models/gpt-9", 404, "model_not_found"),
    ):
        answer = httpx.request(method, f"{url}{path}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert httpx.get(f"{url}/v1/models/").status_code == 200
    assert httpx.post(f"{url}/v1/completions/", json={"prompt": "x", "max_tokens": 1}).status_code == 200


def test_the_openai_client_raises_its_own_errors(client, model):
    with pytest.raises(openai.BadRequestError, match=r"top_p"):
        client.completions.create(model=model, prompt="x", top_p=3)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-9", prompt="x")


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_cancels_its_request(stream, url, cluster):
    async def give_up():
        body = {"prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True, "stream": stream}
        async with httpx.AsyncClient(timeout=30) as client:
            if stream:
                async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
                    await anext(response.aiter_lines())
            else:
                with pytest.raises(httpx.ReadTimeout):
                    await client.post(f"{url}/v1/completions", json=body, timeout=1.0)

    def cancelled():
        return cluster.metrics("router").get("kvferry_requests_total,CANCELLED", 0.0)

    before = cancelled()
    asyncio.run(give_up())
    cluster.settle(2.0)
    assert cancelled() == before + 1


def test_a_timeout_is_a_408_and_frees_the_workers(url, cluster):
    answer = httpx.post(
        f"{url}/v1/completions", json={"prompt": [5] * 300, "max_tokens": 200, "ignore_eos": True, "timeout": 0.5},
        timeout=30,
    )  # fmt: skip
    assert (answer.status_code, answer.json()["error"]["type"]) == (408, "timeout_error")
    cluster.settle(2.0)


def test_curl_gets_events_one_by_one(url):
    body = json.dumps({"prompt": "One, two,", "max_tokens": 8, "temperature": 0, "stream": True})
    command = ["curl", "-sN", f"{url}/v1/completions", "-H", "content-type: application/json", "-d", body]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        times = [time.monotonic() for line in process.stdout if line.startswith("data:")]
    assert len(times) == 8 + 1  # tokens, the last one with the reason, and [DONE]
    assert times[-1] - times[0] > 0.02


def test_http_and_grpc_are_counted_together(client, model, cluster):
    before = cluster.metrics("router")["kvferry_requests_total,OK"]
    client.completions.create(model=model, prompt="x", max_tokens=2)
    cluster.greedy([5], 2)
    assert cluster.metrics("router")["kvferry_requests_total,OK"] == before + 2


def test_bench_drives_it_as_it_would_any_openai_server(url, model, tmp_path):
    """The tool that measures other systems, unchanged."""
    output = tmp_path / "run.json"
    command = [
        sys.executable, "-m", "kvferry", "bench", "run", "--openai-url", f"{url}/v1", "--model", model,
        "--num-requests", "6", "--rate", "10", "--prompt-tokens", "30", "--output-tokens", "5", "--spread", "0.1",
        "--warmup", "1", "--output", str(output),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr + done.stdout
    summary = json.loads(output.read_text())
    assert (summary["backend"], summary["completed"]) == ("openai", 6)
    assert 20 <= summary["total_output_tokens"] <= 40
    assert summary["mean_ttft_ms"] > 0
    assert summary["mean_tpot_ms"] > 0


@pytest.mark.parametrize("stream", [False, True])
def test_one_id_in_header_answer_and_log(stream, url, cluster):
    body = {"prompt": "x", "max_tokens": 2, "stream": stream}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers={"X-Request-Id": f"mine-{stream}"})
    assert answer.headers["x-request-id"] == f"mine-{stream}"
    assert f'"id":"mine-{stream}"' in answer.text
    log = cluster.config.log_dir / "router.log"  # forwarded line by line, so a little later
    wait_for(lambda: f"request_id=mine-{stream}" in log.read_text(), what="the request's id in the log")
    made = httpx.post(f"{url}/v1/completions", json=body).headers["x-request-id"]
    assert made.startswith("cmpl-")
    assert httpx.post(f"{url}/v1/completions", json=body, headers={"X-Request-Id": "a b"}).status_code == 400


def test_an_id_that_a_proxy_sends_twice_is_no_conflict(url):
    async def both():
        body = {"prompt": [5, 6], "max_tokens": 30, "ignore_eos": True}
        async with httpx.AsyncClient(timeout=60) as client:
            calls = [client.post(f"{url}/v1/completions", json=body, headers={"X-Request-Id": "same"}) for _ in "ab"]
            return await asyncio.gather(*calls)

    assert [answer.status_code for answer in asyncio.run(both())] == [200, 200]


def test_proxies_are_told_to_keep_nothing_back(url):
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 1, "stream": True})
    assert (answer.headers["cache-control"], answer.headers["x-accel-buffering"]) == ("no-cache", "no")


def test_headers_of_32_kib_pass(url):
    answer = httpx.get(f"{url}/v1/models", headers={"cookie": "c" * 32_000})
    assert answer.status_code == 200


def half_closed(url, body):
    """Everything that comes back after the client has closed its sending side."""
    host, port = url.removeprefix("http://").split(":")
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(head.encode() + raw)
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_closed_only_its_sending_side_gets_its_answer(stream, url):
    came = half_closed(url, {"prompt": [5, 6], "max_tokens": 40, "ignore_eos": True, "stream": stream})
    assert b"HTTP/1.1 200 OK" in came
    assert b'"finish_reason":"length"' in came


def test_several_answers_at_once_are_bounded(url):
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": ["x"] * 129})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


def test_a_page_of_another_origin_is_not_served(url):
    """Unless --cors-origins names it."""
    headers = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    answer = httpx.options(f"{url}/v1/chat/completions", headers=headers)
    assert "access-control-allow-origin" not in answer.headers
