"""OpenAI-compatible HTTP beside gRPC, in the same process: it calls the same request machine, not gRPC through itself.

``/v1/models``, ``/v1/completions``, ``/v1/chat/completions`` (server-sent events with ``stream``), ``/metrics``,
``/healthz`` (the process lives), ``/readyz`` (a pair is ready; ``/health``, where load tools look, is the same). A
client that goes away cancels its request.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import secrets
import socket
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

import grpc
import uvicorn
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from protos import inference_pb2
from router.generation import Generator
from router.openai_models import ChatBody, CompletionBody, body_error
from rpc.errors import DeadlineExceeded, Internal, InvalidArgument, RequestError
from rpc.server import PortInUse
from rpc.tls import HttpsContext

log = logging.getLogger(__name__)

LARGEST_BODY_BYTES = 64 * 1024 * 1024
BYTES_TO_PARSE_AT_ONCE = 20_000
"""Bodies up to this size are read on the event loop."""
STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: (400, "invalid_request_error"),
    grpc.StatusCode.NOT_FOUND: (404, "not_found_error"),
    grpc.StatusCode.ALREADY_EXISTS: (409, "conflict_error"),
    grpc.StatusCode.DEADLINE_EXCEEDED: (408, "timeout_error"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (429, "overloaded_error"),
    grpc.StatusCode.CANCELLED: (499, "cancelled_error"),
    grpc.StatusCode.UNAVAILABLE: (503, "unavailable_error"),
}
"""gRPC status to HTTP status and OpenAI's kind of error; all others are 500, server_error."""
FINISH = {inference_pb2.FINISH_REASON_STOP: "stop", inference_pb2.FINISH_REASON_LENGTH: "length"}

Result = TypeVar("Result")
Responses = AsyncIterator[tuple[int, inference_pb2.GenerateResponse]]
"""(index of the prompt, response)."""


class HttpApi:
    """The HTTP front of a router."""

    def __init__(
        self,
        generator: Generator,
        registry: CollectorRegistry,
        why_not_ready: Callable[[], str],
        count_end: Callable[[str], None],
    ) -> None:
        """why_not_ready: empty if a pair is ready. count_end: told the gRPC status name of each ended request."""
        self._generator, self._registry = generator, registry
        self._why_not_ready, self._count_end = why_not_ready, count_end
        self._started = int(time.time())
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
            ]
        )

    # small answers

    def _model_object(self) -> dict[str, Any]:
        return {"id": self._generator.model_name, "object": "model", "created": self._started, "owned_by": "kvferry"}

    async def models(self, request: Request) -> Response:
        """The one served model."""
        return JSONResponse({"object": "list", "data": [self._model_object()]})

    async def model(self, request: Request) -> Response:
        """Whether a model is served."""
        asked = request.path_params["model"]
        if asked != self._generator.model_name:
            body = error_body(f"model: {asked!r} is not served here", "not_found_error", "model")
            return JSONResponse(body, 404)
        return JSONResponse(self._model_object())

    async def metrics(self, request: Request) -> Response:
        """Prometheus."""
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    async def healthz(self, request: Request) -> Response:
        """The process lives."""
        return PlainTextResponse("ok\n")

    async def readyz(self, request: Request) -> Response:
        """Whether a pair of workers is ready, and if not, why."""
        reason = self._why_not_ready()
        return PlainTextResponse(f"{reason}\n" if reason else "ok\n", 503 if reason else 200)

    # generation

    async def completions(self, request: Request) -> Response:
        """Text from a prompt."""
        return await self._answer(request, CompletionBody, _Completion())

    async def chat_completions(self, request: Request) -> Response:
        """The next turn of a conversation."""
        return await self._answer(request, ChatBody, _Chat())

    async def _answer(
        self, request: Request, body_type: type[CompletionBody] | type[ChatBody], form: _Form
    ) -> Response:
        try:
            raw = await _read_body(request)
            if len(raw) > BYTES_TO_PARSE_AT_ONCE:
                # Long prompts take long to read; other streams must not wait for that.
                body, asked = await asyncio.to_thread(_parse, raw, body_type)
            else:
                body, asked = _parse(raw, body_type)
        except RequestError as error:
            self._count_end(error.code.name)
            return error_response(error)
        except ClientDisconnect:
            return Response(status_code=499)
        form.begin(self._generator.model_name, body.n, body.stream_options)
        responses = self._generate(asked, body.timeout, request.headers)
        try:
            # The first response decides the status code: what can be refused is refused before anything is sent.
            first = await _unless_gone(request, anext(responses, None))
        except RequestError as error:
            await responses.aclose()
            return error_response(error)
        if first is None:
            await responses.aclose()
            return Response(status_code=499)
        if body.stream:
            return StreamingResponse(self._stream(first, responses, form), media_type="text/event-stream")
        try:
            whole = await _unless_gone(request, _collect(first, responses, form))
        except RequestError as error:
            return error_response(error)
        finally:
            await responses.aclose()
        return Response(status_code=499) if whole is None else JSONResponse(whole)

    async def _generate(
        self, requests: list[inference_pb2.GenerateRequest], timeout: float | None, headers: Mapping[str, str]
    ) -> AsyncGenerator[tuple[int, inference_pb2.GenerateResponse], None]:
        """Responses of all prompts as they come. Counts how each request ended; closing it cancels them all."""
        queue: asyncio.Queue[tuple[int, inference_pb2.GenerateResponse | Exception | None]] = asyncio.Queue(maxsize=64)

        async def pump(place: int, request: inference_pb2.GenerateRequest) -> None:
            status: str = "CANCELLED"
            last: Exception | None = None
            try:
                async with (
                    asyncio.timeout(timeout),
                    aclosing(self._generator.generate(request, timeout, headers)) as responses,
                ):
                    async for response in responses:
                        await queue.put((place, response))
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
            await queue.put((place, last))

        tasks = [asyncio.create_task(pump(place, request)) for place, request in enumerate(requests)]
        try:
            for _ in range(len(tasks)):
                while (item := await queue.get())[1] is not None:
                    if isinstance(item[1], Exception):
                        raise item[1]
                    yield item[0], item[1]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _stream(
        self,
        first: tuple[int, inference_pb2.GenerateResponse],
        responses: AsyncGenerator[tuple[int, inference_pb2.GenerateResponse], None],
        form: _Form,
    ) -> AsyncIterator[str]:
        async with aclosing(responses):
            try:
                for chunk in form.chunks(*first):
                    yield _event(chunk)
                async for place, response in responses:
                    for chunk in form.chunks(place, response):
                        yield _event(chunk)
                if form.wants_usage:
                    yield _event(form.usage_chunk())
            except RequestError as error:
                # The status line is long gone: the error is an event.
                yield _event(error_body(error.message, _kind(error)[1], _field(error)))
            yield "data: [DONE]\n\n"


class _Form:
    """Turns responses into the objects of one endpoint."""

    object_name = ""
    chunk_name = ""
    id_prefix = ""

    def begin(self, model: str, num_answers: int, options: Any) -> None:
        """For one request."""
        self.wants_usage = bool(options and options.include_usage)
        self._num_answers = num_answers
        self._common = {"id": f"{self.id_prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._begun: set[int] = set()
        self._prompt_tokens: dict[int, int] = {}
        self._cached_tokens: dict[int, int] = {}
        self._completion_tokens = 0
        self._text_lengths: Counter[int] = Counter()

    def chunks(self, place: int, response: inference_pb2.GenerateResponse) -> Iterator[dict[str, Any]]:
        """What a stream says of a response."""
        index = self.index_of(place, response)
        is_first = index not in self._begun
        self._begun.add(index)
        self.note_usage(place, response)
        finish = FINISH.get(response.finish_reason)
        choice = {"index": index, **self.delta(response, is_first), "finish_reason": finish}
        if response.token_ids:
            choice["token_ids"] = list(response.token_ids)
        if response.logprobs:
            choice["logprobs"] = self.logprobs(response, self._text_lengths[index])
        self._text_lengths[index] += len(response.text)
        if finish and response.stop_reason:
            choice["stop_reason"] = response.stop_reason
        usage = {"usage": None} if self.wants_usage else {}
        yield {**self._common, "object": self.chunk_name, "choices": [choice], **usage}

    def note_usage(self, place: int, response: inference_pb2.GenerateResponse) -> None:
        """Counts the tokens of an ended answer; each prompt once."""
        if response.finish_reason:
            self._prompt_tokens[place] = response.usage.prompt_tokens
            self._completion_tokens += response.usage.completion_tokens
            if response.index == 0:  # the others find what the first has computed
                self._cached_tokens[place] = response.usage.cached_tokens

    def usage(self) -> dict[str, Any]:
        """Tokens of all prompts and answers."""
        prompt = sum(self._prompt_tokens.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._completion_tokens,
            "total_tokens": prompt + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached_tokens.values())},
        }

    def usage_chunk(self) -> dict[str, Any]:
        """The last event of a stream that asked for it."""
        return {**self._common, "object": self.chunk_name, "choices": [], "usage": self.usage()}

    def whole(self, answers: dict[int, list[inference_pb2.GenerateResponse]]) -> dict[str, Any]:
        """The answer that is not streamed. answers: responses by index."""
        choices = []
        for index, responses in sorted(answers.items()):
            joined = inference_pb2.GenerateResponse()
            for response in responses:
                joined.text += response.text
                joined.token_ids.extend(response.token_ids)
                joined.logprobs.extend(response.logprobs)
            finish = FINISH.get(responses[-1].finish_reason)
            choice: dict[str, Any] = {"index": index, **self.message(joined), "finish_reason": finish, "logprobs": None}
            if joined.token_ids:
                choice["token_ids"] = list(joined.token_ids)
            if joined.logprobs:
                choice["logprobs"] = self.logprobs(joined, 0)
            if responses[-1].stop_reason:
                choice["stop_reason"] = responses[-1].stop_reason
            choices.append(choice)
        return {**self._common, "object": self.object_name, "choices": choices, "usage": self.usage()}

    def index_of(self, place: int, response: inference_pb2.GenerateResponse) -> int:
        """Which choice a response belongs to."""
        return place * self._num_answers + response.index

    def delta(self, response: inference_pb2.GenerateResponse, is_first: bool) -> dict[str, Any]:
        """New text, in a stream."""
        raise NotImplementedError

    def message(self, joined: inference_pb2.GenerateResponse) -> dict[str, Any]:
        """The whole text."""
        raise NotImplementedError

    def logprobs(self, response: inference_pb2.GenerateResponse, text_before: int) -> dict[str, Any]:
        """Log-probabilities in the endpoint's shape. text_before: characters of the answer sent before."""
        raise NotImplementedError


class _Completion(_Form):
    object_name = chunk_name = "text_completion"
    id_prefix = "cmpl"

    def delta(self, response: inference_pb2.GenerateResponse, is_first: bool) -> dict[str, Any]:
        return {"text": response.text, "logprobs": None}

    def message(self, joined: inference_pb2.GenerateResponse) -> dict[str, Any]:
        return {"text": joined.text}

    def logprobs(self, response: inference_pb2.GenerateResponse, text_before: int) -> dict[str, Any]:
        tokens = [_readable(entry.chosen) for entry in response.logprobs]
        return {
            "tokens": tokens,
            "token_logprobs": [entry.chosen.logprob for entry in response.logprobs],
            "top_logprobs": [{_readable(top): top.logprob for top in entry.top} for entry in response.logprobs],
            "text_offset": list(itertools.accumulate([text_before, *(len(token) for token in tokens[:-1])])),
        }


class _Chat(_Form):
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def delta(self, response: inference_pb2.GenerateResponse, is_first: bool) -> dict[str, Any]:
        role = {"role": "assistant"} if is_first else {}
        return {"delta": {**role, "content": response.text} if response.text or is_first else {}, "logprobs": None}

    def message(self, joined: inference_pb2.GenerateResponse) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": joined.text, "refusal": None}}

    def logprobs(self, response: inference_pb2.GenerateResponse, text_before: int) -> dict[str, Any]:
        def entry(token: inference_pb2.TokenLogprob) -> dict[str, Any]:
            return {"token": _readable(token), "logprob": token.logprob, "bytes": list(token.token_bytes)}

        content = [
            {**entry(position.chosen), "top_logprobs": [entry(top) for top in position.top]}
            for position in response.logprobs
        ]
        return {"content": content, "refusal": None}


def _readable(token: inference_pb2.TokenLogprob) -> str:
    return token.token_bytes.decode("utf-8", "replace")


async def _read_body(request: Request) -> bytes:
    """Raises InvalidArgument if it is too large."""
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > LARGEST_BODY_BYTES:
            raise InvalidArgument("body", f"is larger than {LARGEST_BODY_BYTES} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


def _parse(
    raw: bytes, body_type: type[CompletionBody] | type[ChatBody]
) -> tuple[CompletionBody | ChatBody, list[inference_pb2.GenerateRequest]]:
    """Raises InvalidArgument."""
    try:
        body = body_type.model_validate_json(raw)
    except ValidationError as error:
        raise body_error(error.errors()) from error
    return body, body.requests()


async def _collect(
    first: tuple[int, inference_pb2.GenerateResponse], responses: Responses, form: _Form
) -> dict[str, Any]:
    answers: dict[int, list[inference_pb2.GenerateResponse]] = {}

    def add(place: int, response: inference_pb2.GenerateResponse) -> None:
        form.note_usage(place, response)
        answers.setdefault(form.index_of(place, response), []).append(response)

    add(*first)
    async for item in responses:
        add(*item)
    return form.whole(answers)


async def _unless_gone(request: Request, work: Awaitable[Result]) -> Result | None:
    """The result of some work; None, and the work is cancelled, if the client goes away first."""
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


def error_body(message: str, kind: str, field: str | None) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    return {"error": {"message": message, "type": kind, "param": field, "code": None}}


def _kind(error: RequestError) -> tuple[int, str]:
    return STATUS.get(error.code, (500, "server_error"))


def _field(error: RequestError) -> str | None:
    return error.field if isinstance(error, InvalidArgument) else None


def error_response(error: RequestError) -> Response:
    """An error as an answer."""
    status, kind = _kind(error)
    headers = {"retry-after": "1"} if status in (429, 503) else None
    return JSONResponse(error_body(error.message, kind, _field(error)), status, headers)


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"


class HttpServer:
    """Runs the app on the current event loop."""

    def __init__(
        self, app: Starlette, host: str, port: int, drain_seconds: float = 2.0, tls: HttpsContext | None = None
    ) -> None:
        """Binds the port; 0 picks a free one. Raises PortInUse. drain_seconds: for what runs when it is stopped."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # With the protocol named: only then asyncio sets TCP_NODELAY, without which tokens wait 40 ms for each other.
        self._socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host.strip("[]"), port))
        except OSError as error:
            self._socket.close()
            raise PortInUse(f"--http-port is {port}, which can't be used on {host}: {error}") from error
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            app,
            log_config=None,
            lifespan="off",
            access_log=False,
            timeout_graceful_shutdown=max(1, round(drain_seconds)),
        )
        self._tls = tls
        if tls is not None:
            config.load()
            config.ssl = tls.context
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to serve."""
        self._task = asyncio.get_running_loop().create_task(self._server.serve(sockets=[self._socket]))

    @property
    def scheme(self) -> str:
        """http or https."""
        return "http" if self._tls is None else "https"

    def renew_certificate(self) -> None:
        """Takes up files that changed."""
        if self._tls is not None:
            self._tls.renew()

    async def stop(self) -> None:
        """Takes nothing new, lets what runs end in its time, and ends."""
        self._server.should_exit = True
        if self._task is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._task


class _Server(uvicorn.Server):
    """Leaves signals to the process, which has other things to end too."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield
