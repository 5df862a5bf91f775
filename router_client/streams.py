"""Streams of generated output."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from protos import inference_pb2
from router_client.errors import KvferryError, to_error
from router_client.results import KvTransfer, Piece, PositionLogprobs, Result, TokenLogprob, Usage


@dataclass
class _Completion:
    """What one completion has received so far."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    result: Result | None = None


class _Collector:
    """Joins the pieces of each completion to its result."""

    def __init__(self, num_completions: int) -> None:
        self._completions = [_Completion() for _ in range(max(num_completions, 1))]

    def add(self, response: inference_pb2.GenerateResponse) -> Piece:
        completion = self._completions[response.index]
        logprobs = _read_logprobs(response.logprobs)
        completion.text.append(response.text)
        completion.token_ids += response.token_ids
        completion.logprobs += logprobs
        if response.prompt_logprobs:
            completion.prompt_logprobs = _read_logprobs(response.prompt_logprobs)
        if response.finish_reason:
            completion.result = self._finish(completion, response)
        return Piece(response.text, tuple(response.token_ids), response.index, logprobs)

    def _finish(self, completion: _Completion, last: inference_pb2.GenerateResponse) -> Result:
        moved = last.kv_transfer
        return Result(
            request_id=last.request_id,
            text="".join(completion.text),
            token_ids=tuple(completion.token_ids),
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
            logprobs=tuple(completion.logprobs),
            prompt_logprobs=completion.prompt_logprobs,
        )

    def take_results(self) -> list[Result]:
        results = [completion.result for completion in self._completions]
        found = [result for result in results if result is not None]
        if len(found) < len(results):
            raise KvferryError(grpc.StatusCode.INTERNAL, "the stream ended before its output was complete")
        return found


def _read_logprobs(positions: Iterable[inference_pb2.PositionLogprobs]) -> tuple[PositionLogprobs, ...]:
    def read(entry: inference_pb2.TokenLogprob) -> TokenLogprob:
        return TokenLogprob(entry.token_id, entry.logprob, entry.token_bytes)

    return tuple(PositionLogprobs(read(p.chosen), tuple(map(read, p.top))) for p in positions)


class GenerationStream:
    """Iterates over the pieces of one completion, or of several."""

    def __init__(self, call: Any, num_completions: int = 1) -> None:
        self._call, self._collector = call, _Collector(num_completions)

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
        """The first completion. Reads the rest of the stream first."""
        return self.results()[0]

    def results(self) -> list[Result]:
        """All n completions. Reads the rest of the stream first."""
        for _ in self:
            pass
        return self._collector.take_results()


class AsyncGenerationStream:
    """Iterates over the pieces of one completion, or of several."""

    def __init__(self, call: Any, num_completions: int = 1) -> None:
        self._call, self._collector = call, _Collector(num_completions)

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
        """The first completion. Reads the rest of the stream first."""
        return (await self.results())[0]

    async def results(self) -> list[Result]:
        """All n completions. Reads the rest of the stream first."""
        async for _ in self:
            pass
        return self._collector.take_results()
