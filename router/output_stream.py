"""From workers to one client's stream: tokens wait here until the client took what came before.

A slow client's tokens are merged, never reordered. How many may wait is the dispatcher's to say.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from protos import inference_pb2, worker_pb2
from rpc.errors import RequestError


@dataclass(frozen=True, slots=True)
class Position:
    """Log-probabilities at one position: the token that is there, then the likeliest ones, best first."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Tokens:
    """New tokens, in order."""

    token_ids: tuple[int, ...]
    finish_reason: inference_pb2.FinishReason.ValueType
    logprobs: tuple[Position, ...] = ()
    """One per token, or none at all."""
    prompt_logprobs: tuple[Position, ...] = ()
    """With the first tokens, if asked for."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Nothing more comes; `error` is None if the answer is complete."""

    error: RequestError | None


@dataclass(eq=False)
class OutputStream:
    """One writer, the dispatcher, and one reader, the client's call. Lives on the event loop."""

    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there is something to take. May be shared by streams that are read together."""
    _outputs: list[worker_pb2.TokenOutput] = field(default_factory=list)
    _ended: Ended | None = None
    num_waiting: int = 0
    """Tokens not yet taken."""

    def add(self, output: worker_pb2.TokenOutput) -> None:
        """The next tokens."""
        self._outputs.append(output)
        self.num_waiting += len(output.token_ids)
        self.news.set()

    def end(self, error: RequestError | None) -> None:
        """Nothing more comes. With an error what waits is dropped: the answer is of no use without its end."""
        if error is not None:
            self._outputs.clear()
            self.num_waiting = 0
        self._ended = Ended(error)
        self.news.set()

    def take(self) -> list[Tokens | Ended]:
        """What came since the last call: all tokens as one, and the end."""
        outputs, self._outputs, self.num_waiting = self._outputs, [], 0
        ended, self._ended = self._ended, None
        taken: list[Tokens | Ended] = []
        if outputs:
            tokens = Tokens(
                token_ids=tuple(token for output in outputs for token in output.token_ids),
                finish_reason=outputs[-1].finish_reason,
                logprobs=tuple(position for output in outputs for position in _positions(output.logprobs)),
                prompt_logprobs=tuple(p for output in outputs for p in _positions(output.prompt_logprobs)),
            )
            taken.append(tokens)
        if ended is not None:
            taken.append(ended)
        return taken


def _positions(logprobs: worker_pb2.Logprobs) -> list[Position]:
    width = 1 + logprobs.num_top
    ids, values = logprobs.token_ids, logprobs.logprobs
    return [
        Position(tuple(ids[start : start + width]), tuple(values[start : start + width]))
        for start in range(0, len(ids), width)
    ]
