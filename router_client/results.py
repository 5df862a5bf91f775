"""What a generation returns: pieces while it runs, and its result."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenLogprob:
    """The probability of a token, as the model sees it: before temperature, penalties, bias and filters."""

    token_id: int
    logprob: float
    """Natural logarithm; at least -10000."""
    token_bytes: bytes
    """May be part of a character."""


@dataclass(frozen=True)
class PositionLogprobs:
    """Log-probabilities at one position."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]
    """The likeliest tokens, best first."""


@dataclass(frozen=True)
class Piece:
    """New text of a completion."""

    text: str
    token_ids: tuple[int, ...]
    index: int = 0
    """Which of the n completions."""
    logprobs: tuple[PositionLogprobs, ...] = ()


@dataclass(frozen=True)
class Usage:
    """Tokens of a request."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class KvTransfer:
    """How the KV pages were transferred."""

    bytes: int
    transport: str
    gb_per_s: float
    bytes_while_computing: int
    """Bytes that were already written when the last chunk was computed."""
    num_chunks: int
    decode_computed_prompt_tokens: int
    decode_cached_tokens: int
    """Prompt tokens whose pages the decode worker already had in its prefix cache."""


@dataclass(frozen=True)
class Result:
    """A finished completion."""

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
    """Which of the n completions."""
    logprobs: tuple[PositionLogprobs, ...] = ()
    """One per token, if asked for with num_logprobs."""
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    """One per prompt token after the first, if asked for with echo_prompt_logprobs."""
