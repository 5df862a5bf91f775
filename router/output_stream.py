"""Buffers output tokens between workers and one client's stream.

Tokens that wait for a slow client are merged, never reordered. The dispatcher limits how many tokens may wait.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from protos import inference_pb2, worker_pb2
from rpc.errors import RequestError


@dataclass(frozen=True, slots=True)
class Position:
    """Log-probabilities at one position: of the token at that position, then of the likeliest tokens, best first."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Tokens:
    """New output tokens, in order."""

    token_ids: tuple[int, ...]
    finish_reason: inference_pb2.FinishReason.ValueType
    logprobs: tuple[Position, ...] = ()
    """One per token, or none at all."""
    prompt_logprobs: tuple[Position, ...] = ()
    """With the first tokens, if requested."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of the output. `error` is None if the output is complete."""

    error: RequestError | None


@dataclass(eq=False)
class OutputStream:
    """Output of one request. The dispatcher writes and the client's call reads, both on the event loop."""

    has_output: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when `take` would return something. Streams that are read together share one event."""
    _outputs: list[worker_pb2.TokenOutput] = field(default_factory=list)
    _ended: Ended | None = None
    num_waiting: int = 0
    """Tokens in the buffer."""

    def add(self, output: worker_pb2.TokenOutput) -> None:
        """Adds the next tokens."""
        self._outputs.append(output)
        self.num_waiting += len(output.token_ids)
        self.has_output.set()

    def end(self, error: RequestError | None) -> None:
        """Ends the output. With an error, waiting tokens are dropped: an output without its end is of no use."""
        if error is not None:
            self._outputs.clear()
            self.num_waiting = 0
        self._ended = Ended(error)
        self.has_output.set()

    def take(self) -> list[Tokens | Ended]:
        """Output since the last call: all tokens merged, and the end."""
        outputs, self._outputs, self.num_waiting = self._outputs, [], 0
        ended, self._ended = self._ended, None
        taken: list[Tokens | Ended] = []
        if outputs:
            taken.append(_merged(outputs))
        if ended is not None:
            taken.append(ended)
        return taken


def _merged(outputs: list[worker_pb2.TokenOutput]) -> Tokens:
    """All tokens in one. For each token of each stream, so nothing is looked at that is not there."""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Position, ...] = ()
    prompt_logprobs: tuple[Position, ...] = ()
    for output in outputs:
        token_ids += tuple(output.token_ids)
        if output.HasField("logprobs"):
            logprobs += tuple(_positions(output.logprobs))
        if output.HasField("prompt_logprobs"):
            prompt_logprobs += tuple(_positions(output.prompt_logprobs))
    return Tokens(token_ids, outputs[-1].finish_reason, logprobs, prompt_logprobs)


def _positions(logprobs: worker_pb2.Logprobs) -> list[Position]:
    width = 1 + logprobs.num_top
    ids, values = logprobs.token_ids, logprobs.logprobs
    return [
        Position(tuple(ids[start : start + width]), tuple(values[start : start + width]))
        for start in range(0, len(ids), width)
    ]
