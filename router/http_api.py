"""The OpenAI-compatible HTTP API. It runs in the router's process and uses the same Generator as the gRPC service.

``/v1/models``, ``/v1/completions``, ``/v1/chat/completions`` (server-sent events with ``stream``), ``/metrics``,
``/healthz`` (the process is alive), ``/readyz`` (a pair is ready; ``/health`` is the same, for load tools). If a client
disconnects, its request is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
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
from router.http_forms import ChatForm, CompletionForm, Form
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
Pending = asyncio.Future[Generated | None]


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
            responses = self._generate(body, asked, request.headers)
            respond = self._streamed if body.stream else self._whole
            response = await respond(request, responses, form)
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

    async def _whole(self, request: Request, responses: GeneratedResponses, form: Form) -> Response:
        try:
            whole = await _unless_gone(request, _collect(responses, form))
        except RequestError as error:
            return error_response(error)
        finally:
            await responses.aclose()
        return Response(status_code=499) if whole is None else JSONResponse(whole)

    async def _streamed(self, request: Request, responses: GeneratedResponses, form: Form) -> Response:
        """Waits for the first response, so that an error sets the HTTP status. After QUIET_SECONDS the stream begins
        without a response, with empty lines; a later error is an event of the stream."""
        first = asyncio.ensure_future(anext(responses, None))
        try:
            await _unless_gone(request, asyncio.wait({first}, timeout=QUIET_SECONDS))
            if first.done():
                first.result()
        except RequestError as error:
            await responses.aclose()
            return error_response(error)
        except asyncio.CancelledError:
            first.cancel()
            raise
        if first.done() or not await request.is_disconnected():
            return _EventStream(self._events(first, responses, form), first, responses)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await responses.aclose()
        return Response(status_code=499)

    async def _generate(
        self, body: CommonBody, requests: list[inference_pb2.GenerateRequest], headers: Mapping[str, str]
    ) -> GeneratedResponses:
        """Responses of all prompts as they arrive. Counts the status of each request. Closing cancels all requests."""
        timeout = body.timeout
        queue: asyncio.Queue[tuple[int, inference_pb2.GenerateResponse | Exception | None]] = asyncio.Queue(maxsize=64)

        async def pump(index: int, request: inference_pb2.GenerateRequest) -> None:
            status: str = "CANCELLED"
            last: Exception | None = None
            try:
                with self._named(request, is_from_body=bool(body.request_id)):
                    async with (
                        asyncio.timeout(timeout),
                        aclosing(self._generator.generate(request, timeout, headers)) as responses,
                    ):
                        async for response in responses:
                            await queue.put((index, response))
                status = "OK"
            except TimeoutError:
                status, last = "DEADLINE_EXCEEDED", DeadlineExceeded(f"the timeout of {timeout:g} s passed")
            except RequestError as error:
                status, last = error.code.name, error
            except Exception as error:
                log.exception("generate failed")
                status, last = "INTERNAL", Internal(f"an unexpected error in the router: {error}")
            finally:
                self._count_end(status)
            await queue.put((index, last))

        tasks = [asyncio.create_task(pump(index, request)) for index, request in enumerate(requests)]
        try:
            for _ in range(len(tasks)):
                while (item := await queue.get())[1] is not None:
                    if isinstance(item[1], InvalidArgument):
                        field = body.written_name(item[1].field, item[0])
                        raise InvalidArgument(field, item[1].description, item[1].reason)
                    if isinstance(item[1], Exception):
                        raise item[1]
                    yield item[0], item[1]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _events(self, first: Pending, responses: GeneratedResponses, form: Form) -> AsyncGenerator[str, None]:
        """Server-sent events of a stream. first: the first response, possibly not there yet."""
        pending: Pending = first
        try:
            while True:
                while not (await asyncio.wait({pending}, timeout=QUIET_SECONDS))[0]:
                    yield "\n"
                if (item := pending.result()) is None:
                    break
                for chunk in form.chunks(*item):
                    yield _event(chunk)
                pending = asyncio.ensure_future(anext(responses, None))
            if form.wants_usage:
                yield _event(form.usage_chunk())
        except RequestError as error:
            # The HTTP status was sent already, so the error is an event.
            yield _event(error_of(error)[1])
        finally:
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
        yield "data: [DONE]\n\n"


class _EventStream(StreamingResponse):
    """A stream that cancels the request if the client disconnects at any time."""

    def __init__(self, events: AsyncGenerator[str, None], first: Pending, responses: GeneratedResponses) -> None:
        super().__init__(events, media_type="text/event-stream", headers=STREAM_HEADERS)
        self._events, self._first, self._responses = events, first, responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()
            self._first.cancel()
            await asyncio.gather(self._first, return_exceptions=True)
            await self._responses.aclose()


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


async def _collect(responses: GeneratedResponses, form: Form) -> dict[str, Any]:
    choices: dict[int, list[inference_pb2.GenerateResponse]] = {}
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


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"
