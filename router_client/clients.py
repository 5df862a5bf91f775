"""Connections to a router: plain and async."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from types import TracebackType
from typing import Any, Self

import grpc

from protos import inference_pb2, inference_pb2_grpc
from router_client.errors import to_error
from router_client.requests import Messages, Prompt, make_request, set_prompt
from router_client.streams import AsyncGenerationStream, GenerationStream
from router_client.tls import ClientTls
from rpc.channel import CLIENT_OPTIONS


class Client:
    """A connection to a router."""

    def __init__(self, address: str, tls: ClientTls | None = None) -> None:
        """address: host:port of the router. tls: None means plaintext."""
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
        """Starts a generation; see `make_request` for the options.

        timeout: seconds for queue, prefill, transfer and decode together; None: no deadline.
        wait_for_ready: wait until the deadline for a router that can't be reached, for example while it restarts.
        Iterating raises KvferryError.
        """
        request = make_request(prompt, **options)
        call = self._stub.Generate(request, timeout=timeout, wait_for_ready=wait_for_ready)
        return GenerationStream(call, options.get("n", 1))

    def tokenize(self, prompt: str | Messages) -> list[int]:
        """Token ids of text or a conversation. Raises KvferryError."""
        request = inference_pb2.TokenizeRequest()
        set_prompt(request, prompt)
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
        """address: host:port of the router. tls: None means plaintext."""
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
