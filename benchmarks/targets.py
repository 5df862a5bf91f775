"""What a load can be sent to: a kvferry router over gRPC, or any server that speaks OpenAI's completions over HTTP."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Protocol, Self

import httpx

from benchmarks.records import RequestRecord
from benchmarks.workload import HIGHEST_TOKEN, LoadRequest, as_text, fitted
from kvferry.client import AsyncClient, KvferryError


class Target(Protocol):
    """A server under load. An async context manager."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def send(self, request: LoadRequest, record: RequestRecord) -> None:
        """Sends a request and notes in `record` what came. Never raises for what the server does."""
        ...


class GrpcTarget:
    """A kvferry router."""

    def __init__(self, address: str, timeout: float | None = None) -> None:
        """address: host:port. timeout: deadline of each request in seconds."""
        self._address, self._timeout = address, timeout

    async def __aenter__(self) -> Self:
        self._client = AsyncClient(self._address)
        try:
            self._vocab_size = (await self._client.model_info()).vocab_size
        except KvferryError:
            self._vocab_size = HIGHEST_TOKEN  # each request will tell what is wrong
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()

    async def send(self, request: LoadRequest, record: RequestRecord) -> None:
        """See `Target.send`."""
        stream = self._client.generate(
            fitted(request.prompt, self._vocab_size),
            max_tokens=request.max_tokens,
            temperature=0.0,
            ignore_eos=True,
            return_token_ids=True,
            timeout=self._timeout,
        )
        record.sent = time.perf_counter()
        try:
            async for piece in stream:
                record.token_times += [time.perf_counter()] * len(piece.token_ids)
            result = await stream.result()
        except KvferryError as error:
            record.status, record.error = error.code.name, error.message
        else:
            record.status = "OK"
            record.token_ids = result.token_ids
            record.prompt_tokens, record.output_tokens = result.usage.prompt_tokens, result.usage.completion_tokens
            record.cached_tokens, record.kv_bytes = result.usage.cached_tokens, result.kv_transfer.bytes
        record.ended = time.perf_counter()


class OpenAiTarget:
    """A server with `POST {base_url}/completions`, or chat completions, and streaming (server-sent events)."""

    def __init__(
        self,
        base_url: str,
        model: str,
        timeout: float | None = None,
        ignore_eos: bool = True,
        chat: bool = False,
    ) -> None:
        """base_url: for example http://127.0.0.1:8000/v1. ignore_eos: send that field, which not every server knows."""
        self._base_url, self._model, self._timeout = base_url.rstrip("/"), model, timeout
        self._ignore_eos, self._chat = ignore_eos, chat

    async def __aenter__(self) -> Self:
        self._stack = AsyncExitStack()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = await self._stack.enter_async_context(httpx.AsyncClient(limits=limits, timeout=None))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def send(self, request: LoadRequest, record: RequestRecord) -> None:
        """See `Target.send`."""
        body: dict[str, object] = {
            "model": self._model,
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        text = as_text(request.prompt)
        body |= {"messages": [{"role": "user", "content": text}]} if self._chat else {"prompt": text}
        if self._ignore_eos:
            body["ignore_eos"] = True
        path = "chat/completions" if self._chat else "completions"
        record.sent = time.perf_counter()
        record.counts_messages = True
        usage: dict[str, object] = {}
        is_whole = False
        try:
            async with (
                asyncio.timeout(self._timeout),
                self._client.stream("POST", f"{self._base_url}/{path}", json=body) as response,
            ):
                if response.status_code != 200:
                    record.error = (await response.aread()).decode("utf-8", "replace")[:500]
                    record.status = f"HTTP {response.status_code}"
                    return
                async for line in response.aiter_lines():
                    if not line.startswith("data:"):
                        continue
                    if line.endswith("[DONE]"):
                        is_whole = True
                        continue
                    event = json.loads(line.removeprefix("data:"))
                    usage = event.get("usage") or usage
                    if "error" in event:
                        record.status, record.error = "HTTP 200 with an error", str(event["error"])[:500]
                        return
                    is_whole |= any(choice.get("finish_reason") for choice in event.get("choices", ()))
                    if any(_has_token(choice) for choice in event.get("choices", ())):
                        record.token_times.append(time.perf_counter())
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, TimeoutError) as error:
            record.status, record.error = type(error).__name__, str(error)
        else:
            record.status = "OK" if is_whole else "cut off"
            record.prompt_tokens = int(str(usage.get("prompt_tokens", 0)))
            record.output_tokens = int(str(usage.get("completion_tokens", len(record.token_times))))
            record.counts_messages = record.output_tokens != len(record.token_times)
        finally:
            record.ended = time.perf_counter()


def _has_token(choice: dict[str, object]) -> bool:
    """Whether an event brought anything generated: text of any kind. A first event with only a role did not."""
    delta = choice.get("delta")
    texts = [choice.get("text"), *(delta.values() if isinstance(delta, dict) else ())]
    if isinstance(delta, dict) and set(delta) <= {"role", "content"} and not delta.get("content"):
        return False
    return any(isinstance(text, str) and text for text in texts)
