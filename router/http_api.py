"""The OpenAI-compatible HTTP API. It runs in the router's process and uses the same Generator as the gRPC service.

``/v1/models``, ``/v1/completions``, ``/v1/chat/completions`` (server-sent events with ``stream``), ``/metrics``,
``/healthz`` (the process is alive), ``/readyz`` (a pair is ready; ``/health`` is the same, for load tools). If a client
disconnects, its request is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from protos import inference_pb2
from router.generation import Generator
from router.http_errors import error_of, error_response, http_error
from router.http_forms import ChatForm, CompletionForm, Form, event
from router.openai_models import ChatBody, CommonBody, CompletionBody, body_error
from router.validation import MAX_REQUEST_ID_CHARACTERS
from rpc.errors import DeadlineExceeded, Internal, InvalidArgument, NotFound, RequestError, Unavailable, quoted

log = logging.getLogger(__name__)

LARGEST_BODY_BYTES = 16 * 1024 * 1024
"""A prompt of a million token ids is about 7 MB of JSON."""
BYTES_TO_PARSE_AT_ONCE = 20_000
"""Bodies up to this size are parsed on the event loop."""
QUIET_SECONDS = 5.0
"""After this long without an event, a stream sends an empty line, so that proxies do not close the connection. A
comment would do too, but some clients join it with the next event and lose that."""
REQUEST_ID_HEADER = "x-request-id"
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
"""Tell proxies not to cache or buffer a stream."""
Result = TypeVar("Result")
Generated = tuple[int, inference_pb2.GenerateResponse]
"""(index of the prompt, response)."""
GeneratedResponses = AsyncGenerator[Generated, None]


class HttpApi:
    """The HTTP API of a router."""

    def __init__(
        self,
        generator: Generator,
        registry: CollectorRegistry,
        why_not_ready: Callable[[], str],
        count_end: Callable[[str], None],
        cors_origins: Sequence[str] = (),
    ) -> None:
        """why_not_ready: returns an empty text if a pair is ready. count_end: called with each request's gRPC status.

        cors_origins: origins of web pages that may call from a browser; "*": all. None given: no web page may.
        """
        self._generator, self._registry = generator, registry
        self._why_not_ready, self._count_end = why_not_ready, count_end
        self._started = int(time.time())
        self._running_ids: set[str] = set()
        """Ids of requests of this API. The generator registers an id a moment later."""
        self.app = Starlette(
            routes=[
                Route("/v1/models", self.models),
                Route("/v1/models/{model:path}", self.model),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/chat/completions", self.chat_completions, methods=["POST"]),
                Route("/metrics", self.metrics),
                Route("/healthz", self.healthz),
                Route("/readyz", self.readyz),
                Route("/health", self.readyz),
            ],
            middleware=[Middleware(_PlainPaths), *_cors(cors_origins)],
            exception_handlers={HTTPException: http_error},
        )

    # models, metrics, health

    def _model_object(self) -> dict[str, Any]:
        model = {"id": self._generator.model_name, "object": "model", "created": self._started, "owned_by": "kvferry"}
        try:
            return {**model, "max_model_len": self._generator.limits().longest_sequence}
        except Unavailable:
            return model  # no worker was connected yet

    async def models(self, request: Request) -> Response:
        """Lists the served model."""
        return JSONResponse({"object": "list", "data": [self._model_object()]})

    async def model(self, request: Request) -> Response:
        """Describes a model, or 404 if it is not served."""
        asked = request.path_params["model"]
        if asked != self._generator.model_name:
            return error_response(NotFound(f"model: {quoted(asked)} is not served here"))
        return JSONResponse(self._model_object())

    async def metrics(self, request: Request) -> Response:
        """Prometheus metrics."""
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    async def healthz(self, request: Request) -> Response:
        """The process is alive."""
        return PlainTextResponse("ok\n")

    async def readyz(self, request: Request) -> Response:
        """Whether a pair of workers is ready, and if not, why."""
        reason = self._why_not_ready()
        return PlainTextResponse(f"{reason}\n" if reason else "ok\n", 503 if reason else 200)

    # generation

    async def completions(self, request: Request) -> Response:
        """Completes prompts."""
        return await self._respond(request, CompletionBody, CompletionForm)

    async def chat_completions(self, request: Request) -> Response:
        """Generates the next turn of a conversation."""
        return await self._respond(request, ChatBody, ChatForm)

    async def _respond(self, request: Request, body_type: type[CommonBody], form_type: type[Form]) -> Response:
        request_id = f"{form_type.id_prefix}-{secrets.token_hex(12)}"
        try:
            request_id = _given_id(request) or request_id
            raw = await _read_body(request)
            if len(raw) > BYTES_TO_PARSE_AT_ONCE:
                # Parsing a long prompt is slow. On the event loop, this would delay other streams.
                body, asked = await asyncio.to_thread(_parse, raw, body_type)
            else:
                body, asked = _parse(raw, body_type)
            request_id = _checked_id("request_id", body.request_id or "") or request_id
        except RequestError as error:
            self._count_end(error.code.name)
            response = error_response(error)
        except ClientDisconnect:
            return Response(status_code=499)
        else:
            for index, one in enumerate(asked):
                one.request_id = request_id if len(asked) == 1 else _with_suffix(request_id, f"-{index}")
            form = form_type(request_id, self._generator.model_name, body.num_choices, body.wants_usage)
            limit = _TimeLimit(body.timeout)
            responses = self._generate(body, asked, request.headers, limit)
            if body.stream:
                response = _EventStream(responses, form, limit)
            else:
                response = await self._whole(request, responses, form, limit)
        response.headers[REQUEST_ID_HEADER] = request_id
        return response

    @contextlib.contextmanager
    def _named(self, request: inference_pb2.GenerateRequest, is_from_body: bool) -> Iterator[None]:
        """Keeps a request's id unique while the request runs.

        is_from_body: the id is from the body. A duplicate is then an error, which the generator raises. An id from a
        header may be a duplicate, because a proxy that retries sends the same header; such an id gets a suffix.
        """
        is_taken = request.request_id in self._running_ids or self._generator.is_running(request.request_id)
        if is_taken and not is_from_body:
            request.request_id = _with_suffix(request.request_id, f"-{secrets.token_hex(4)}")
        is_mine = request.request_id not in self._running_ids
        self._running_ids.add(request.request_id)
        try:
            yield
        finally:
            if is_mine:
                self._running_ids.discard(request.request_id)

    async def _whole(self, request: Request, responses: GeneratedResponses, form: Form, limit: _TimeLimit) -> Response:
        try:
            whole = await _unless_gone(request, _collect(responses, form, limit))
        except RequestError as error:
            return error_response(error)
        finally:
            await responses.aclose()
        return Response(status_code=499) if whole is None else JSONResponse(whole)

    async def _generate(
        self,
        body: CommonBody,
        requests: list[inference_pb2.GenerateRequest],
        headers: Mapping[str, str],
        limit: _TimeLimit,
    ) -> GeneratedResponses:
        """Responses of all prompts as they arrive. Counts the status of each request. Closing cancels all requests.
        To be read by one task. Raises RequestError."""
        prompts = [self._of_prompt(body, index, request, headers, limit) for index, request in enumerate(requests)]
        async with aclosing(prompts[0] if len(prompts) == 1 else _together(prompts)) as responses:
            async for response in responses:
                yield response

    async def _of_prompt(
        self,
        body: CommonBody,
        index: int,
        request: inference_pb2.GenerateRequest,
        headers: Mapping[str, str],
        limit: _TimeLimit,
    ) -> GeneratedResponses:
        """Responses of one prompt."""
        status = "CANCELLED"
        try:
            with self._named(request, is_from_body=bool(body.request_id)):
                async with aclosing(self._generator.generate(request, body.timeout, headers)) as responses:
                    async for response in responses:
                        yield index, response
            status = "OK"
        except InvalidArgument as error:
            status = error.code.name
            raise InvalidArgument(body.written_name(error.field, index), error.description, error.reason) from None
        except RequestError as error:
            status = error.code.name
            raise
        except Exception as error:
            log.exception("generate failed")
            status = "INTERNAL"
            raise Internal(f"an unexpected error in the router: {error}") from None
        finally:
            self._count_end("DEADLINE_EXCEEDED" if status == "CANCELLED" and limit.is_over() else status)


class _TimeLimit:
    """The time that a client gives its request."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._end = None if seconds is None else asyncio.get_running_loop().time() + seconds

    def is_over(self) -> bool:
        """Whether it has passed."""
        return self._end is not None and asyncio.get_running_loop().time() >= self._end

    @contextlib.asynccontextmanager
    async def applied(self) -> AsyncGenerator[None, None]:
        """Raises DeadlineExceeded once it has passed. Only around work of one task: a generator that yields to others
        must not be inside of it alone."""
        try:
            async with asyncio.timeout_at(self._end):
                yield
        except TimeoutError:
            raise DeadlineExceeded(f"the timeout of {self._seconds:g} s passed") from None


async def _together(sources: list[GeneratedResponses]) -> GeneratedResponses:
    """What several sources give, as it arrives. The first error ends all."""
    queue: asyncio.Queue[Generated | Exception | None] = asyncio.Queue(maxsize=64)

    async def pump(source: GeneratedResponses) -> None:
        last: Exception | None = None
        try:
            async with aclosing(source):
                async for item in source:
                    await queue.put(item)
        except Exception as error:
            last = error
        await queue.put(last)

    tasks = [asyncio.create_task(pump(source)) for source in sources]
    try:
        for _ in tasks:
            while (item := await queue.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _EventStream(StreamingResponse):
    """Server-sent events. The status waits for the first response, so that an error before it sets the status; after
    QUIET_SECONDS the stream begins all the same, and a later error is an event. A client that disconnects at any time
    cancels its request."""

    def __init__(self, responses: GeneratedResponses, form: Form, limit: _TimeLimit) -> None:
        super().__init__((), media_type="text/event-stream", headers=STREAM_HEADERS)
        self._responses, self._form, self._limit = responses, form, limit
        self._has_begun = False
        self._num_sent = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._send_all(scope, receive, send))
        keeper = asyncio.create_task(self._fill_silence(send))
        try:
            await _unless_gone(Request(scope, receive), work)
        finally:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
        if not self._has_begun:
            await Response(status_code=499)(scope, receive, send)

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self._limit.applied(), aclosing(self._responses):
                async for index, response in self._responses:
                    await self._send(send, self._form.event(index, response))
            if self._form.wants_usage:
                await self._send(send, event(self._form.usage_chunk()))
        except RequestError as error:
            if not self._has_begun:
                self._has_begun = True
                refusal = error_response(error)
                refusal.headers[REQUEST_ID_HEADER] = self.headers[REQUEST_ID_HEADER]
                await refusal(scope, receive, send)
                return
            await self._send(send, event(error_of(error)[1]))
        await self._send(send, "data: [DONE]\n\n")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, text: str) -> None:
        self._num_sent += 1
        if not self._has_begun:
            self._has_begun = True
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": text.encode(), "more_body": True})

    async def _fill_silence(self, send: Send) -> None:
        while True:
            num_sent = self._num_sent
            await asyncio.sleep(QUIET_SECONDS)
            if self._num_sent == num_sent:
                await self._send(send, "\n")


class _PlainPaths:
    """Removes trailing slashes from paths, because clients join base URL and path differently."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and len(scope["path"]) > 1:
            scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
        await self._app(scope, receive, send)


def _cors(origins: Sequence[str]) -> list[Middleware]:
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID_HEADER],
        )
    ]


def _given_id(request: Request) -> str:
    """The id in the request's header; empty: none. Raises InvalidArgument if the id is not valid."""
    return _checked_id(REQUEST_ID_HEADER, request.headers.get(REQUEST_ID_HEADER, ""))


def _checked_id(field: str, given: str) -> str:
    """The id. Raises InvalidArgument if it can't be a header of the response."""
    if given and not re.fullmatch(rf"[!-~]{{1,{MAX_REQUEST_ID_CHARACTERS}}}", given):
        raise InvalidArgument(
            field, f"must be 1 to {MAX_REQUEST_ID_CHARACTERS} visible ASCII characters without spaces"
        )
    return given


def _with_suffix(request_id: str, suffix: str) -> str:
    """An id with a suffix, truncated to the longest allowed id."""
    return request_id[: MAX_REQUEST_ID_CHARACTERS - len(suffix)] + suffix


async def _read_body(request: Request) -> bytes:
    """Reads the body. Raises InvalidArgument if the body is too large."""
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > LARGEST_BODY_BYTES:
            raise InvalidArgument("body", f"is larger than {LARGEST_BODY_BYTES} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


def _parse(raw: bytes, body_type: type[CommonBody]) -> tuple[CommonBody, list[inference_pb2.GenerateRequest]]:
    """Parses a body into one request per prompt. Raises InvalidArgument."""
    try:
        body = body_type.model_validate_json(raw)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        raise body_error(errors, frozenset(body_type.model_fields)) from None
    return body, body.requests()


async def _collect(responses: GeneratedResponses, form: Form, limit: _TimeLimit) -> dict[str, Any]:
    choices: dict[int, list[inference_pb2.GenerateResponse]] = {}
    async with limit.applied(), aclosing(responses):
        async for prompt_index, response in responses:
            form.note_usage(prompt_index, response)
            choices.setdefault(form.index_of(prompt_index, response), []).append(response)
    return form.whole(choices)


async def _unless_gone(request: Request, work: Awaitable[Result]) -> Result | None:
    """The result of `work`. If the client disconnects first, cancels the work and returns None."""
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(_until_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        for pending in (task, gone):
            if not pending.done():
                pending.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        if task.cancelled() or not task.done():
            await asyncio.gather(task, return_exceptions=True)


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
