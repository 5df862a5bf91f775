"""The Python client: plain and async, streaming iterators, typed results, errors as exceptions. No torch in here.

with Client("127.0.0.1:50051") as client:
    stream = client.generate("Once upon a time", max_tokens=50)
    for piece in stream:
        print(piece.text, end="")
    print(stream.result().usage.completion_tokens)
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from protos import inference_pb2, inference_pb2_grpc
from rpc.channel import CLIENT_OPTIONS

Messages = Seq[Mapping[str, str]]
"""A conversation: mappings with "role" and "content", oldest first."""
Prompt = str | Seq[int] | Messages
"""Plain text, token ids, or a conversation."""


class KvferryError(Exception):
    """A call failed. Carries the gRPC status."""

    def __init__(
        self, code: grpc.StatusCode, message: str, field_name: str = "", retry_seconds: float | None = None
    ) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        """The gRPC status code."""
        self.message = message
        """Why, in words."""
        self.field = field_name
        """The request's field that is wrong, for INVALID_ARGUMENT."""
        self.retry_seconds = retry_seconds
        """When to try again, for RESOURCE_EXHAUSTED."""


@dataclass(frozen=True)
class TokenLogprob:
    """The probability of a token, as the model sees it: before temperature, penalties, bias and filters."""

    token_id: int
    logprob: float
    """Natural logarithm; at least -10000."""
    token_bytes: bytes
    """Need not be whole characters."""


@dataclass(frozen=True)
class PositionLogprobs:
    """Log-probabilities at one position."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]
    """The likeliest tokens, best first."""


@dataclass(frozen=True)
class Piece:
    """New text of an answer, as it comes."""

    text: str
    token_ids: tuple[int, ...]
    index: int = 0
    """Which of the n answers."""
    logprobs: tuple[PositionLogprobs, ...] = ()


@dataclass(frozen=True)
class Usage:
    """Tokens of a request."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class KvTransfer:
    """How the KV pages travelled."""

    bytes: int
    transport: str
    gb_per_s: float
    bytes_while_computing: int
    """Of the bytes, those already written when the last chunk finished computing."""
    num_chunks: int
    decode_computed_prompt_tokens: int
    decode_cached_tokens: int
    """Prompt tokens whose pages the decode worker had already."""


@dataclass(frozen=True)
class Result:
    """A whole answer."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    """Empty unless asked for with return_token_ids."""
    finish_reason: str
    """"stop" or "length"."""
    stop_reason: str
    """The stop string or token id that ended it; empty for end of sequence and length."""
    usage: Usage
    timings_ms: dict[str, float]
    """Stage to milliseconds after the router got the request."""
    kv_transfer: KvTransfer
    seed: int
    index: int = 0
    """Which of the n answers."""
    logprobs: tuple[PositionLogprobs, ...] = ()
    """One per token, if asked for with num_logprobs."""
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    """One per prompt token after the first, if asked for with echo_prompt_logprobs."""


@dataclass
class _Answer:
    """What came of one answer."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    result: Result | None = None


class _Collector:
    """Joins pieces to results."""

    def __init__(self, num_answers: int) -> None:
        self._answers = [_Answer() for _ in range(max(num_answers, 1))]

    def add(self, response: inference_pb2.GenerateResponse) -> Piece:
        answer = self._answers[response.index]
        logprobs = _read_logprobs(response.logprobs)
        answer.text.append(response.text)
        answer.token_ids += response.token_ids
        answer.logprobs += logprobs
        if response.prompt_logprobs:
            answer.prompt_logprobs = _read_logprobs(response.prompt_logprobs)
        if response.finish_reason:
            answer.result = self._finish(answer, response)
        return Piece(response.text, tuple(response.token_ids), response.index, logprobs)

    def _finish(self, answer: _Answer, last: inference_pb2.GenerateResponse) -> Result:
        moved = last.kv_transfer
        return Result(
            request_id=last.request_id,
            text="".join(answer.text),
            token_ids=tuple(answer.token_ids),
            finish_reason=inference_pb2.FinishReason.Name(last.finish_reason).removeprefix("FINISH_REASON_").lower(),
            stop_reason=last.stop_reason,
            usage=Usage(last.usage.prompt_tokens, last.usage.cached_tokens, last.usage.completion_tokens),
            timings_ms={
                name.name.removesuffix("_ms"): getattr(last.timings, name.name)
                for name in last.timings.DESCRIPTOR.fields
            },
            kv_transfer=KvTransfer(**{name.name: getattr(moved, name.name) for name in moved.DESCRIPTOR.fields}),
            seed=last.seed,
            index=last.index,
            logprobs=tuple(answer.logprobs),
            prompt_logprobs=answer.prompt_logprobs,
        )

    def take_results(self) -> list[Result]:
        results = [answer.result for answer in self._answers]
        found = [result for result in results if result is not None]
        if len(found) < len(results):
            raise KvferryError(grpc.StatusCode.INTERNAL, "the stream ended before the answer did")
        return found


def _read_logprobs(positions: Iterable[inference_pb2.PositionLogprobs]) -> tuple[PositionLogprobs, ...]:
    def read(entry: inference_pb2.TokenLogprob) -> TokenLogprob:
        return TokenLogprob(entry.token_id, entry.logprob, entry.token_bytes)

    return tuple(PositionLogprobs(read(p.chosen), tuple(map(read, p.top))) for p in positions)


class GenerationStream:
    """Iterates over pieces of an answer, or of several."""

    def __init__(self, call: Any, num_answers: int = 1) -> None:
        self._call, self._collector = call, _Collector(num_answers)

    def __iter__(self) -> Iterator[Piece]:
        try:
            for response in self._call:
                piece = self._collector.add(response)
                if piece.text or piece.token_ids or piece.logprobs:
                    yield piece
        except grpc.RpcError as error:
            raise to_error(error) from None

    def cancel(self) -> None:
        """Ends the request on every worker."""
        self._call.cancel()

    def result(self) -> Result:
        """The whole answer, the first if there are several; reads the rest of the stream before."""
        return self.results()[0]

    def results(self) -> list[Result]:
        """All n answers; reads the rest of the stream before."""
        for _ in self:
            pass
        return self._collector.take_results()


class AsyncGenerationStream:
    """Iterates over pieces of an answer, or of several."""

    def __init__(self, call: Any, num_answers: int = 1) -> None:
        self._call, self._collector = call, _Collector(num_answers)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        try:
            async for response in self._call:
                piece = self._collector.add(response)
                if piece.text or piece.token_ids or piece.logprobs:
                    yield piece
        except grpc.RpcError as error:
            raise to_error(error) from None

    def cancel(self) -> None:
        """Ends the request on every worker."""
        self._call.cancel()

    async def result(self) -> Result:
        """The whole answer, the first if there are several; reads the rest of the stream before."""
        return (await self.results())[0]

    async def results(self) -> list[Result]:
        """All n answers; reads the rest of the stream before."""
        async for _ in self:
            pass
        return self._collector.take_results()


def to_error(error: grpc.RpcError) -> KvferryError:
    """The exception for a failed call."""
    field_name, retry_seconds = "", None
    status = rpc_status.from_call(error) if not isinstance(error, grpc.aio.AioRpcError) else _aio_status(error)
    for detail in status.details if status is not None else ():
        if detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad = error_details_pb2.BadRequest()
            detail.Unpack(bad)
            field_name = bad.field_violations[0].field if bad.field_violations else ""
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            info = error_details_pb2.RetryInfo()
            detail.Unpack(info)
            retry_seconds = info.retry_delay.ToMilliseconds() / 1e3
    call: Any = error
    return KvferryError(call.code(), call.details() or "", field_name, retry_seconds)


def _aio_status(error: grpc.aio.AioRpcError) -> Any:
    from google.rpc import status_pb2

    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            return status_pb2.Status.FromString(value)
    return None


def make_request(
    prompt: Prompt,
    *,
    model: str = "",
    request_id: str = "",
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    presence_penalty: float | None = None,
    frequency_penalty: float | None = None,
    logit_bias: Mapping[int, float] | None = None,
    seed: int | None = None,
    n: int = 1,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    stop: Seq[str] = (),
    stop_token_ids: Seq[int] = (),
    ignore_eos: bool = False,
    include_stop: bool = False,
    include_special_tokens: bool = False,
    return_token_ids: bool = False,
    num_logprobs: int | None = None,
    echo_prompt_logprobs: bool = False,
    cache_salt: str = "",
    priority: int = 0,
) -> inference_pb2.GenerateRequest:
    """The wire form of a request. Unset values are left to the router.

    seed: any 64 bits, signed or not. Raises TypeError for a wrong prompt, ValueError for a number that does not fit.
    """
    if seed is not None and -(1 << 63) <= seed < 0:
        seed += 1 << 64
    request = inference_pb2.GenerateRequest(
        model=model,
        request_id=request_id,
        return_token_ids=return_token_ids,
        num_logprobs=num_logprobs,
        echo_prompt_logprobs=echo_prompt_logprobs,
        include_special_tokens=include_special_tokens,
        cache_salt=cache_salt,
        priority=priority,
        sampling=inference_pb2.SamplingParams(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=logit_bias or {},
            seed=seed,
            n=n,
        ),
        stop=inference_pb2.StopConditions(max_tokens=max_tokens, min_tokens=min_tokens),
    )
    _set_prompt(request, prompt)
    request.stop.stop.extend(stop)
    request.stop.stop_token_ids.extend(stop_token_ids)
    request.stop.ignore_eos, request.stop.include_stop = ignore_eos, include_stop
    return request


def _set_prompt(request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text = prompt
    elif all(isinstance(item, int) for item in prompt) and isinstance(request, inference_pb2.GenerateRequest):
        request.token_ids.ids.extend(prompt)  # type: ignore[arg-type]
        request.token_ids.SetInParent()
    elif all(isinstance(item, Mapping) for item in prompt):
        for message in prompt:
            assert isinstance(message, Mapping)
            if unknown := message.keys() - {"role", "content", "name"}:
                raise TypeError(f"a message has role, content and name; {', '.join(sorted(unknown))} is not served")
            request.chat.messages.add(role=message["role"], content=message["content"], name=message.get("name", ""))
    else:
        raise TypeError("a prompt is a string, a list of token ids, or a list of {'role': ..., 'content': ...}")


@dataclass(frozen=True)
class ClientTls:
    """How a client speaks TLS with a router, or with a proxy before it."""

    ca: Path | None = None
    """PEM file of the CA that signed the router's certificate. None: those that this machine trusts."""
    certificate: Path | None = None
    """PEM file of the client's own certificate, for routers with `--tls-clients verified`."""
    key: Path | None = None
    """PEM file of its key."""
    server_name: str | None = None
    """Name that the router's certificate has to be valid for. None: the host of the address. Certificates of kvferry's
    own processes are valid for the name kvferry."""

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises OSError if a file can't be read."""
        files = (path.read_bytes() if path is not None else None for path in (self.ca, self.key, self.certificate))
        return grpc.ssl_channel_credentials(*files)

    def options(self) -> list[tuple[str, Any]]:
        """Of the channel."""
        named = [("grpc.ssl_target_name_override", self.server_name)] if self.server_name is not None else []
        return [*CLIENT_OPTIONS, *named]


class Client:
    """A connection to a router."""

    def __init__(self, address: str, tls: ClientTls | None = None) -> None:
        """address: host:port of the router. tls: None: in the clear."""
        self._channel = (
            grpc.insecure_channel(address, options=CLIENT_OPTIONS)
            if tls is None
            else grpc.secure_channel(address, tls.credentials(), options=tls.options())
        )
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._admin = inference_pb2_grpc.AdminServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection; running streams are cancelled."""
        self._channel.close()

    def generate(
        self, prompt: Prompt, *, timeout: float | None = None, wait_for_ready: bool = False, **options: Any
    ) -> GenerationStream:
        """Starts an answer; see `make_request` for the options.

        timeout: seconds for queue, prefill, transfer and decode together; None: no deadline.
        wait_for_ready: if the router can't be reached (it is being started again, say), wait for it until the deadline
        instead of failing at once.
        Iterating raises KvferryError.
        """
        request = make_request(prompt, **options)
        call = self._stub.Generate(request, timeout=timeout, wait_for_ready=wait_for_ready)
        return GenerationStream(call, options.get("n", 1))

    def tokenize(self, prompt: str | Messages) -> list[int]:
        """Token ids of text or a conversation. Raises KvferryError."""
        request = inference_pb2.TokenizeRequest()
        _set_prompt(request, prompt)
        return list(self._call(self._stub.Tokenize, request).token_ids)

    def detokenize(self, token_ids: Seq[int]) -> str:
        """Text of token ids. Raises KvferryError."""
        text: str = self._call(self._stub.Detokenize, inference_pb2.DetokenizeRequest(token_ids=token_ids)).text
        return text

    def model_info(self) -> inference_pb2.GetModelInfoResponse:
        """The served model. Raises KvferryError."""
        info: inference_pb2.GetModelInfoResponse = self._call(
            self._stub.GetModelInfo, inference_pb2.GetModelInfoRequest()
        )
        return info

    def cluster_status(self) -> inference_pb2.GetClusterStatusResponse:
        """Tiers, workers, queue and pages. Raises KvferryError."""
        status: inference_pb2.GetClusterStatusResponse = self._call(
            self._stub.GetClusterStatus, inference_pb2.GetClusterStatusRequest()
        )
        return status

    def flush_prefix_cache(self) -> None:
        """Makes every worker forget its prefix cache, for benchmarks. Raises KvferryError."""
        self._call(self._admin.FlushPrefixCache, inference_pb2.FlushPrefixCacheRequest())

    def _call(self, method: Any, request: Any) -> Any:
        try:
            return method(request)
        except grpc.RpcError as error:
            raise to_error(error) from None


class AsyncClient:
    """A connection to a router, for asyncio."""

    def __init__(self, address: str, tls: ClientTls | None = None) -> None:
        """address: host:port of the router. tls: None: in the clear."""
        self._channel = (
            grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
            if tls is None
            else grpc.aio.secure_channel(address, tls.credentials(), options=tls.options())
        )
        self._stub: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(
            self._channel
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connection; running streams are cancelled."""
        await self._channel.close()

    def generate(
        self, prompt: Prompt, *, timeout: float | None = None, wait_for_ready: bool = False, **options: Any
    ) -> AsyncGenerationStream:
        """See `Client.generate`."""
        request = make_request(prompt, **options)
        call = self._stub.Generate(request, timeout=timeout, wait_for_ready=wait_for_ready)
        return AsyncGenerationStream(call, options.get("n", 1))

    async def model_info(self) -> inference_pb2.GetModelInfoResponse:
        """See `Client.model_info`."""
        try:
            return await self._stub.GetModelInfo(inference_pb2.GetModelInfoRequest())
        except grpc.RpcError as error:
            raise to_error(error) from None

    async def cluster_status(self) -> inference_pb2.GetClusterStatusResponse:
        """See `Client.cluster_status`."""
        try:
            return await self._stub.GetClusterStatus(inference_pb2.GetClusterStatusRequest())
        except grpc.RpcError as error:
            raise to_error(error) from None
