"""The public gRPC services. Only this module turns errors into gRPC status."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc

from protos import inference_pb2, inference_pb2_grpc, worker_pb2
from router.dispatch import Dispatcher
from router.generation import Generator
from router.metrics import RouterMetrics
from router.tokenizer import Tokenizer
from router.validation import MIN_DETOKENIZE_IDS, ClusterLimits, check_model, check_token_ids, prompt_token_ids
from rpc.errors import Internal, InvalidArgument, RequestError

log = logging.getLogger(__name__)

SERVICE_NAME = "kvferry.v1.InferenceService"
ADMIN_SERVICE_NAME = "kvferry.v1.AdminService"
DEADLINE_SLACK_SECONDS = 0.01
"""gRPC uses another clock for deadlines, with a resolution of 1 ms."""
Context = grpc.aio.ServicerContext[Any, Any]


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """See `inference.proto`."""

    def __init__(
        self, generator: Generator, dispatcher: Dispatcher, tokenizer: Tokenizer, metrics: RouterMetrics
    ) -> None:
        self._generator, self._dispatcher, self._tokenizer = generator, dispatcher, tokenizer
        self._metrics = metrics

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Streams the completions of a request."""
        headers = {key: str(value) for key, value in context.invocation_metadata() or ()}
        seconds = context.time_remaining()
        deadline = math.inf if seconds is None else time.monotonic() + seconds
        responses = self._generator.generate(request, seconds, headers)
        status = "CANCELLED"
        try:
            async for response in responses:
                yield response
            status = "OK"
        except RequestError as error:
            status = error.code.name
            await error.abort(context)
        except asyncio.CancelledError:
            # gRPC cancels a call at its deadline.
            if time.monotonic() >= deadline - DEADLINE_SLACK_SECONDS:
                status = "DEADLINE_EXCEEDED"
            raise
        except Exception:
            status = "INTERNAL"
            log.exception("generate failed", extra={"request_id": request.request_id})
            await Internal("an unexpected error in the router; see its log").abort(context)
        finally:
            # Cancels the request on every worker if the client is gone.
            await responses.aclose()
            self._metrics.ended.labels(status).inc()

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        """Token ids of a text or chat."""
        try:
            check_model(request.model, self._generator.model_name)
            limits = self._generator.limits()
            ids = await self._generator.tokenizing(prompt_token_ids, request, self._tokenizer, limits, False)
        except RequestError as error:
            await error.abort(context)
        return inference_pb2.TokenizeResponse(token_ids=ids)

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        """Text of token ids."""
        try:
            check_model(request.model, self._generator.model_name)
            text = await self._generator.tokenizing(self._detokenize, request, self._generator.limits())
        except RequestError as error:
            await error.abort(context)
        return inference_pb2.DetokenizeResponse(text=text)

    def _detokenize(self, request: inference_pb2.DetokenizeRequest, limits: ClusterLimits) -> str:
        """Text of token ids. Raises InvalidArgument."""
        most = max(limits.longest_sequence, MIN_DETOKENIZE_IDS)
        if len(request.token_ids) > most:
            raise InvalidArgument("token_ids", f"has {len(request.token_ids)} ids; at most {most} are allowed")
        ids = list(request.token_ids)
        check_token_ids("token_ids", ids, limits.vocab_size)
        return self._tokenizer.decode(ids, request.include_special_tokens)

    async def GetModelInfo(
        self, request: inference_pb2.GetModelInfoRequest, context: Context
    ) -> inference_pb2.GetModelInfoResponse:
        """Describes the served model."""
        try:
            limits = self._generator.limits()
        except RequestError as error:
            await error.abort(context)
        infos = [link.info for link in self._dispatcher.pool.links if link.info is not None]
        return inference_pb2.GetModelInfoResponse(
            model=self._generator.model_name,
            vocab_size=limits.vocab_size,
            max_model_len=limits.longest_sequence,
            eos_token_ids=self._tokenizer.eos_token_ids,
            dtype=infos[0].fingerprint.dtype if infos else "",
            page_size=limits.page_size,
        )

    async def GetClusterStatus(
        self, request: inference_pb2.GetClusterStatusRequest, context: Context
    ) -> inference_pb2.GetClusterStatusResponse:
        """Describes the cluster as this router sees it."""
        pool = self._dispatcher.pool
        now = self._dispatcher.clock.now()
        workers = [
            inference_pb2.WorkerStatus(
                worker_id=link.info.worker_id if link.info else "",
                incarnation_id=link.info.incarnation_id if link.info else "",
                tier=worker_pb2.Tier.Name(link.tier).removeprefix("TIER_").lower(),
                address=link.address,
                state=link.state,
                reason=link.reason or link.pair_reason,
                total_pages=link.info.limits.num_pages if link.info else 0,
                free_pages=link.load.free_pages if link.info else 0,
                cached_pages=link.load.cached_pages,
                queued_tokens=link.load.queued_tokens + link.load.running_tokens,
                queued_seconds=link.load.queued_seconds,
                hit_rate=link.load.hit_rate,
                running_sequences=link.load.num_sequences,
                last_seen_ms=(now - (link.last_seen or now)) * 1e3,
            )
            for link in pool.links
        ]
        return inference_pb2.GetClusterStatusResponse(
            workers=workers,
            queued_requests=self._dispatcher.num_queued,
            running_requests=self._dispatcher.num_running,
            ready_pairs=len(pool.ready_pairs()),
        )


class AdminServicer(inference_pb2_grpc.AdminServiceServicer):
    """See `inference.proto`."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    async def FlushPrefixCache(
        self, request: inference_pb2.FlushPrefixCacheRequest, context: Context
    ) -> inference_pb2.FlushPrefixCacheResponse:
        """Empties the prefix cache of every worker."""
        return inference_pb2.FlushPrefixCacheResponse(num_workers=self._dispatcher.flush_prefix_caches())
