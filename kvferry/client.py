"""The Python client: plain and async, streaming iterators, typed results, errors as exceptions. No torch in here.

with Client("127.0.0.1:50051") as client:
    stream = client.generate("Once upon a time", max_tokens=50)
    for piece in stream:
        print(piece.text, end="")
    print(stream.result().usage.completion_tokens)
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from protos import inference_pb2, inference_pb2_grpc
from rpc.channel import CHANNEL_OPTIONS, open_channel

Messages = Seq[Mapping[str, str]]
"""A conversation: mappings with "role" and "content", oldest first."""
Prompt = str | Seq[int] | Messages
"""Plain text, token ids, or a conversation."""


class KvferryError(Exception):
    """A call failed. Carries the gRPC status."""

    def __init__(self, code: grpc.StatusCode, message: str, field_name: str = "") -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        """The gRPC status code."""
        self.message = message
        """Why, in words."""
        self.field = field_name
        """The request's field that is wrong, for INVALID_ARGUMENT."""


@dataclass(frozen=True)
class Piece:
    """New text of an answer, as it comes."""

    text: str
    token_ids: tuple[int, ...]


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


@dataclass
class _Collector:
    """Joins pieces to a result."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    result: Result | None = None

    def add(self, response: inference_pb2.GenerateResponse) -> Piece:
        self.text.append(response.text)
        self.token_ids += response.token_ids
        if response.finish_reason:
            self.result = self._finish(response)
        return Piece(response.text, tuple(response.token_ids))

    def _finish(self, last: inference_pb2.GenerateResponse) -> Result:
        moved = last.kv_transfer
        return Result(
            request_id=last.request_id,
            text="".join(self.text),
            token_ids=tuple(self.token_ids),
            finish_reason=inference_pb2.FinishReason.Name(last.finish_reason).removeprefix("FINISH_REASON_").lower(),
            stop_reason=last.stop_reason,
            usage=Usage(last.usage.prompt_tokens, last.usage.cached_tokens, last.usage.completion_tokens),
            timings_ms={
                name.name.removesuffix("_ms"): getattr(last.timings, name.name)
                for name in last.timings.DESCRIPTOR.fields
            },
            kv_transfer=KvTransfer(
                moved.bytes,
                moved.transport,
                moved.gb_per_s,
                moved.bytes_while_computing,
                moved.num_chunks,
                moved.decode_computed_prompt_tokens,
            ),
            seed=last.seed,
        )

    def take_result(self) -> Result:
        if self.result is None:
            raise KvferryError(grpc.StatusCode.INTERNAL, "the stream ended before the answer did")
        return self.result


class GenerationStream:
    """Iterates over pieces of an answer."""

    def __init__(self, call: Any) -> None:
        self._call, self._collector = call, _Collector()

    def __iter__(self) -> Iterator[Piece]:
        try:
            for response in self._call:
                piece = self._collector.add(response)
                if piece.text or piece.token_ids:
                    yield piece
        except grpc.RpcError as error:
            raise to_error(error) from None

    def cancel(self) -> None:
        """Ends the request on every worker."""
        self._call.cancel()

    def result(self) -> Result:
        """The whole answer; reads the rest of the stream first."""
        for _ in self:
            pass
        return self._collector.take_result()


class AsyncGenerationStream:
    """Iterates over pieces of an answer."""

    def __init__(self, call: Any) -> None:
        self._call, self._collector = call, _Collector()

    async def __aiter__(self) -> AsyncIterator[Piece]:
        try:
            async for response in self._call:
                piece = self._collector.add(response)
                if piece.text or piece.token_ids:
                    yield piece
        except grpc.RpcError as error:
            raise to_error(error) from None

    def cancel(self) -> None:
        """Ends the request on every worker."""
        self._call.cancel()

    async def result(self) -> Result:
        """The whole answer; reads the rest of the stream first."""
        async for _ in self:
            pass
        return self._collector.take_result()


def to_error(error: grpc.RpcError) -> KvferryError:
    """The exception for a failed call."""
    field_name = ""
    status = rpc_status.from_call(error) if not isinstance(error, grpc.aio.AioRpcError) else _aio_status(error)
    for detail in status.details if status is not None else ():
        if detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad = error_details_pb2.BadRequest()
            detail.Unpack(bad)
            field_name = bad.field_violations[0].field if bad.field_violations else ""
    call: Any = error
    return KvferryError(call.code(), call.details() or "", field_name)


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
    seed: int | None = None,
    max_tokens: int | None = None,
    stop: Seq[str] = (),
    stop_token_ids: Seq[int] = (),
    ignore_eos: bool = False,
    include_stop: bool = False,
    return_token_ids: bool = False,
    cache_salt: str = "",
    priority: int = 0,
) -> inference_pb2.GenerateRequest:
    """The wire form of a request. Unset values are left to the router. Raises TypeError for a wrong prompt."""
    request = inference_pb2.GenerateRequest(
        model=model,
        request_id=request_id,
        return_token_ids=return_token_ids,
        cache_salt=cache_salt,
        priority=priority,
    )
    _set_prompt(request, prompt)
    sampling: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    for name, value in sampling.items():
        if value is not None:
            setattr(request.sampling, name, value)
    if max_tokens is not None:
        request.stop.max_tokens = max_tokens
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
            request.chat.messages.add(role=message["role"], content=message["content"])  # type: ignore[index]
    else:
        raise TypeError("a prompt is a string, a list of token ids, or a list of {'role': ..., 'content': ...}")


class Client:
    """A connection to a router."""

    def __init__(self, address: str) -> None:
        """address: host:port of the router."""
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
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

    def generate(self, prompt: Prompt, *, timeout: float | None = None, **options: Any) -> GenerationStream:
        """Starts an answer; see `make_request` for the options.

        timeout: seconds for queue, prefill, transfer and decode together; None: no deadline.
        Iterating raises KvferryError.
        """
        return GenerationStream(self._stub.Generate(make_request(prompt, **options), timeout=timeout))

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

    def __init__(self, address: str) -> None:
        """address: host:port of the router."""
        self._channel = open_channel(address)
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

    def generate(self, prompt: Prompt, *, timeout: float | None = None, **options: Any) -> AsyncGenerationStream:
        """See `Client.generate`."""
        return AsyncGenerationStream(self._stub.Generate(make_request(prompt, **options), timeout=timeout))

    async def cluster_status(self) -> inference_pb2.GetClusterStatusResponse:
        """See `Client.cluster_status`."""
        try:
            return await self._stub.GetClusterStatus(inference_pb2.GetClusterStatusRequest())
        except grpc.RpcError as error:
            raise to_error(error) from None
