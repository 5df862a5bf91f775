"""Servers under load: a kvferry router over gRPC, or any server with OpenAI's completions over HTTP."""

from __future__ import annotations

import asyncio
import json
import time
from types import TracebackType
from typing import Any, Protocol, Self

import aiohttp

from benchmarks.records import RequestRecord
from benchmarks.workload import HIGHEST_TOKEN, LoadRequest, as_text, fitted
from router_client.clients import AsyncClient
from router_client.errors import KvferryError


class Target(Protocol):
    """A server under load. An async context manager."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def send(self, request: LoadRequest, record: RequestRecord) -> None:
        """Sends a request and fills in `record`. Never raises for a server's failure."""
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
            self._vocab_size = HIGHEST_TOKEN  # each request will fail with the reason
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
            if not record.output_tokens:
                record.status = "empty output"
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
        api_key: str = "",
    ) -> None:
        """base_url: for example http://127.0.0.1:8000/v1. ignore_eos: send that field, which not every server supports.

        api_key: sent as a bearer token, if given.
        """
        self._base_url, self._model, self._timeout = base_url.rstrip("/"), model, timeout
        self._ignore_eos, self._chat = ignore_eos, chat
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def __aenter__(self) -> Self:
        self._client = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None), headers=self._headers
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close()

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
        url = f"{self._base_url}/{'chat/completions' if self._chat else 'completions'}"
        record.sent = time.perf_counter()
        record.counts_messages = True
        reader = _EventReader(record)
        try:
            async with asyncio.timeout(self._timeout), self._client.post(url, json=body) as response:
                if response.status != 200:
                    record.error = (await response.read()).decode("utf-8", "replace")[:500]
                    record.status = f"HTTP {response.status}"
                    return
                buffer = b""
                # Events end with an empty line. Lines end with \n only: texts may hold other separators, raw.
                async for block in response.content.iter_any():
                    now = time.perf_counter()
                    *events, buffer = (buffer + block).replace(b"\r\n", b"\n").split(b"\n\n")
                    for event in events:
                        reader.read(event, now)
                reader.read(buffer, time.perf_counter())
        except (aiohttp.ClientError, ValueError, TimeoutError, OSError) as error:
            record.status, record.error = type(error).__name__, str(error)
        else:
            reader.end()
        finally:
            record.ended = time.perf_counter()


class _EventReader:
    """Reads the events of one response."""

    def __init__(self, record: RequestRecord) -> None:
        self._record = record
        self._usage: dict[str, Any] = {}
        self._is_whole = False

    def read(self, event: bytes, now: float) -> None:
        """One event, or the text between two. Raises ValueError for data that is not a JSON object."""
        for line in event.split(b"\n"):
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                self._is_whole = True
                continue
            content = json.loads(data)
            if not isinstance(content, dict):
                raise ValueError(f"an event is no JSON object: {data[:80]!r}")
            self._usage = content.get("usage") or self._usage
            if content.get("error"):
                self._record.status, self._record.error = "HTTP 200 with an error", str(content["error"])[:500]
            choices = content.get("choices") or ()
            self._is_whole |= any(choice.get("finish_reason") for choice in choices)
            if any(_has_token(choice) for choice in choices):
                self._record.token_times.append(now)

    def end(self) -> None:
        """The response has ended."""
        record, usage = self._record, self._usage
        if record.status:
            return
        record.status = "OK" if self._is_whole else "cut off"
        record.prompt_tokens = int(usage.get("prompt_tokens") or 0)
        completion = usage.get("completion_tokens")
        record.output_tokens = len(record.token_times) if completion is None else int(completion)
        record.cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        record.counts_messages = record.output_tokens != len(record.token_times)
        if record.status == "OK" and not record.output_tokens:
            record.status = "empty output"


_TEXTS = ("content", "reasoning_content", "reasoning", "refusal")


def _has_token(choice: dict[str, Any]) -> bool:
    """Whether an event has generated output: text of any kind, or a piece of a tool call. A first event with
    only a role, or with fields that are null or empty, did not."""
    delta = choice.get("delta") or {}
    return bool(choice.get("text") or delta.get("tool_calls") or any(delta.get(name) for name in _TEXTS))
