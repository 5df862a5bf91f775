"""Validates every field of a request before the request is queued. Errors name the field and the limit."""

from __future__ import annotations

import dataclasses
import math
import secrets
import struct
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TypeVar

from engine.page_keys import page_keys
from protos import inference_pb2, worker_pb2
from router.tokenizer import CONTEXT_LENGTH_EXCEEDED, Tokenizer, Turn, too_long
from rpc.errors import InvalidArgument, NotFound, quoted

MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 4096
"""Of all stop strings of a request together, because they are searched after each token."""
MAX_MESSAGES = 4096
MAX_STOP_TOKEN_IDS = 64
MAX_REQUEST_ID_CHARACTERS = 128
MAX_CACHE_SALT_CHARACTERS = 256
MAX_PRIORITY = 1000
MAX_COMPLETIONS = 32
MAX_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 65_536
"""Values (tokens and alternatives) of one prompt: they are sent in one message."""
MAX_TOKENIZE_CHARACTERS = 1 << 20
"""Of one Tokenize call, whose text may be longer than a prompt."""
MIN_DETOKENIZE_IDS = 1 << 16
"""A Detokenize call may have this many ids, or as many as the longest sequence if that is more."""
MAX_BIASES = 1024
MAX_BIAS = 100.0


@dataclass(frozen=True)
class ClusterLimits:
    """Limits of the connected workers. Known once a worker of each tier was connected."""

    max_model_len: int
    vocab_size: int
    page_size: int
    prefill_pages: int
    decode_pages: int

    @property
    def longest_sequence(self) -> int:
        """Most tokens of prompt and output together: the model's limit, or the capacity of the smaller pool plus 1,
        because the last token's KV is never computed. The prefill pool has to hold the output too: if a decode worker
        is lost, prefill computes the KV of prompt and output again."""
        return min(self.max_model_len, min(self.prefill_pages, self.decode_pages) * self.page_size + 1)

    def pool_words(self) -> str:
        """Explanation for error messages if a pool, not the model, is the limit; else empty."""
        if self.longest_sequence == self.max_model_len:
            return ""
        pages, tier = min((self.decode_pages, "decode"), (self.prefill_pages, "prefill"))
        return f" (the capacity of the {tier} worker's pool: {pages} pages of {self.page_size} tokens)"


@dataclass(frozen=True)
class CheckedRequest:
    """A validated request with all defaults filled in."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: worker_pb2.SamplingConfig
    stop: worker_pb2.StopConfig
    stop_strings: tuple[str, ...]
    include_stop: bool
    eos_token_ids: frozenset[int]
    return_token_ids: bool
    cache_salt: str
    priority: int
    num_completions: int = 1
    include_special_tokens: bool = False
    page_size: int = 0
    """Page size of `page_keys`, in tokens."""
    page_keys: tuple[bytes, ...] = ()
    """Keys of the prompt's full pages, to find workers that have these pages cached."""
    vocab_size: int = 0
    """All token ids of the request are below this."""

    def completion(self, index: int) -> CheckedRequest:
        """The request for one of its completions. The first completion has the log-probabilities of the prompt."""
        sampling = worker_pb2.SamplingConfig()
        sampling.CopyFrom(self.sampling)
        sampling.choice_index, sampling.prompt_logprobs = index, self.sampling.prompt_logprobs and index == 0
        return dataclasses.replace(self, sampling=sampling)


def check_request(
    request: inference_pb2.GenerateRequest, tokenizer: Tokenizer, model_name: str, limits: ClusterLimits
) -> CheckedRequest:
    """Validates a request. Raises InvalidArgument naming the field, or NotFound for the model."""
    check_model(request.model, model_name)
    if len(request.request_id) > MAX_REQUEST_ID_CHARACTERS:
        raise InvalidArgument(
            "request_id", f"has {len(request.request_id)} characters; at most {MAX_REQUEST_ID_CHARACTERS} are allowed"
        )
    if len(request.cache_salt) > MAX_CACHE_SALT_CHARACTERS:
        raise InvalidArgument(
            "cache_salt", f"has {len(request.cache_salt)} characters; at most {MAX_CACHE_SALT_CHARACTERS} are allowed"
        )
    if abs(request.priority) > MAX_PRIORITY:
        raise InvalidArgument("priority", f"is {request.priority}; it must be in [-{MAX_PRIORITY}, {MAX_PRIORITY}]")
    prompt = prompt_token_ids(request, tokenizer, limits)
    stop = _check_stop(request.stop, tokenizer, len(prompt), limits)
    num_prompt_logprobs = len(prompt) * (1 + request.num_logprobs)
    if request.echo_prompt_logprobs and num_prompt_logprobs > MAX_PROMPT_LOGPROBS:
        raise InvalidArgument(
            "echo_prompt_logprobs",
            f"makes {num_prompt_logprobs} values of {len(prompt)} prompt tokens with {request.num_logprobs} "
            f"alternatives; at most {MAX_PROMPT_LOGPROBS} are allowed",
        )
    return CheckedRequest(
        request_id=request.request_id or f"req-{secrets.token_hex(8)}",
        prompt_token_ids=tuple(prompt),
        sampling=_check_sampling(request, limits.vocab_size),
        stop=stop,
        stop_strings=tuple(filter(None, request.stop.stop)),
        include_stop=request.stop.include_stop,
        eos_token_ids=frozenset(() if request.stop.ignore_eos else tokenizer.eos_token_ids),
        return_token_ids=request.return_token_ids,
        cache_salt=request.cache_salt,
        priority=request.priority,
        num_completions=_in_range("sampling.n", request.sampling.n or 1, 1, MAX_COMPLETIONS),
        include_special_tokens=request.include_special_tokens,
        page_size=limits.page_size,
        page_keys=page_keys(prompt, limits.page_size, request.cache_salt),
        vocab_size=limits.vocab_size,
    )


def check_model(asked: str, served: str) -> None:
    """Raises NotFound if the request names another model."""
    if asked and asked != served:
        raise NotFound(f"model: {quoted(asked)} is not served here; this router serves {served!r}")


def prompt_token_ids(
    request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest,
    tokenizer: Tokenizer,
    limits: ClusterLimits,
    must_fit: bool = True,
) -> list[int]:
    """The prompt as token ids. A text that is far too long is rejected by its number of characters or by the tokens of
    a prefix, so that it costs no more than a text that fits.

    must_fit: whether the prompt has to leave room for an output.
    Raises InvalidArgument.
    """
    kind = request.WhichOneof("prompt")
    longest = limits.longest_sequence - 1 if must_fit else None
    if not must_fit:
        sizes = (len(turn.role) + len(turn.content) + len(turn.name) for turn in request.chat.messages)
        num_characters = len(request.text) + sum(sizes)
        if num_characters > MAX_TOKENIZE_CHARACTERS:
            what = f"has {num_characters} characters; at most {MAX_TOKENIZE_CHARACTERS} are tokenized at once"
            raise InvalidArgument(kind or "prompt", what, reason="string_above_max_length")
    if kind is None:
        raise InvalidArgument("prompt", "is missing; set text, token_ids or chat", reason="missing_required_parameter")
    if kind == "text":
        if not request.text:
            raise InvalidArgument("text", "is empty; a prompt needs at least 1 token")
        ids = tokenizer.encode(request.text, longest, limits.longest_sequence)
    elif kind == "chat":
        messages = request.chat.messages
        if not messages:
            raise InvalidArgument("chat.messages", "is empty; a conversation needs at least 1 message")
        if len(messages) > MAX_MESSAGES:
            raise InvalidArgument("chat.messages", f"has {len(messages)} messages; at most {MAX_MESSAGES} are allowed")
        for index, message in enumerate(messages):
            if not message.role:
                raise InvalidArgument(f"chat.messages[{index}].role", "is empty")
        turns = [Turn(message.role, message.content, message.name) for message in messages]
        ids = tokenizer.encode_chat(turns, longest, limits.longest_sequence)
    else:
        assert isinstance(request, inference_pb2.GenerateRequest)
        if longest is not None and len(request.token_ids.ids) > longest:
            raise too_long(len(request.token_ids.ids), limits.longest_sequence, limits.pool_words())
        ids = list(request.token_ids.ids)
        check_token_ids("token_ids", ids, limits.vocab_size)
    if not ids:
        raise InvalidArgument(kind, "has no tokens; a prompt needs at least 1")
    if max(ids) >= limits.vocab_size:
        # A tokenizer may know more tokens than the model has embeddings for.
        raise InvalidArgument(kind, f"has the token {max(ids)}, but the model has only {limits.vocab_size} tokens")
    if longest is not None and len(ids) > longest:
        raise too_long(len(ids), limits.longest_sequence, limits.pool_words())
    return ids


def check_token_ids(field: str, ids: Seq[int], vocab_size: int) -> None:
    """Raises InvalidArgument naming the first id outside the vocabulary."""
    for index, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            raise InvalidArgument(f"{field}[{index}]", f"is {token_id}; token ids must be in [0, {vocab_size})")


Number = TypeVar("Number", int, float)


def _in_range(field: str, value: Number, low: Number, high: Number) -> Number:
    """The value. Raises InvalidArgument if it is not in [low, high], or NaN.

    The wire has 32-bit floats, so the bounds are rounded to 32 bits too: 0.01 is then in [0.01, 10].
    """
    if not _as_float32(low) <= value <= _as_float32(high):
        raise InvalidArgument(field, f"is {value:.7g}; it must be in [{low}, {high}]")
    return value


def _as_float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


def _check_sampling(request: inference_pb2.GenerateRequest, vocab_size: int) -> worker_pb2.SamplingConfig:
    sampling = request.sampling
    temperature = sampling.temperature if sampling.HasField("temperature") else 1.0
    if not (math.isfinite(temperature) and temperature >= 0):
        raise InvalidArgument("sampling.temperature", f"is {temperature:.7g}; it must be at least 0 and finite")
    top_p = sampling.top_p if sampling.HasField("top_p") else 1.0
    if not 0 < top_p <= 1:
        raise InvalidArgument("sampling.top_p", f"is {top_p:.7g}; it must be in (0, 1]")
    if sampling.top_k < -1:
        raise InvalidArgument("sampling.top_k", f"is {sampling.top_k}; it must be at least 1, or 0 or -1 for off")
    repetition_penalty = sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0
    biases = _check_bias(sampling.logit_bias, vocab_size)
    config = worker_pb2.SamplingConfig(
        temperature=temperature,
        top_p=top_p,
        top_k=sampling.top_k if 0 < sampling.top_k < vocab_size else 0,
        min_p=_in_range("sampling.min_p", sampling.min_p, 0.0, 1.0),
        repetition_penalty=_in_range("sampling.repetition_penalty", repetition_penalty, 0.01, 10.0),
        presence_penalty=_in_range("sampling.presence_penalty", sampling.presence_penalty, -2.0, 2.0),
        frequency_penalty=_in_range("sampling.frequency_penalty", sampling.frequency_penalty, -2.0, 2.0),
        bias_token_ids=biases.keys(),
        biases=biases.values(),
        seed=sampling.seed if sampling.HasField("seed") else secrets.randbits(63),
        prompt_logprobs=request.echo_prompt_logprobs,
    )
    if request.HasField("num_logprobs"):
        config.num_logprobs = _in_range("num_logprobs", request.num_logprobs, 0, MAX_LOGPROBS)
    return config


def _check_bias(logit_bias: Mapping[int, float], vocab_size: int) -> dict[int, float]:
    """The biases in order of token ids, so that equal requests have equal bytes."""
    if len(logit_bias) > MAX_BIASES:
        raise InvalidArgument("sampling.logit_bias", f"has {len(logit_bias)} tokens; at most {MAX_BIASES} are allowed")
    for token_id in sorted(logit_bias):
        field = f"sampling.logit_bias[{token_id}]"
        if not 0 <= token_id < vocab_size:
            raise InvalidArgument(field, f"is no token; token ids must be in [0, {vocab_size})")
        _in_range(field, logit_bias[token_id], -MAX_BIAS, MAX_BIAS)
    return {token_id: logit_bias[token_id] for token_id in sorted(logit_bias)}


def _check_stop(
    stop: inference_pb2.StopConditions, tokenizer: Tokenizer, num_prompt_tokens: int, limits: ClusterLimits
) -> worker_pb2.StopConfig:
    if len(stop.stop) > MAX_STOP_STRINGS:
        raise InvalidArgument("stop.stop", f"has {len(stop.stop)} strings; at most {MAX_STOP_STRINGS} are allowed")
    num_characters = sum(map(len, stop.stop))
    if num_characters > MAX_STOP_CHARACTERS:
        raise InvalidArgument(
            "stop.stop", f"has {num_characters} characters altogether; at most {MAX_STOP_CHARACTERS} are allowed"
        )
    if len(stop.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidArgument(
            "stop.stop_token_ids", f"has {len(stop.stop_token_ids)} ids; at most {MAX_STOP_TOKEN_IDS} are allowed"
        )
    check_token_ids("stop.stop_token_ids", stop.stop_token_ids, limits.vocab_size)
    stop_token_ids = set(stop.stop_token_ids)
    if not stop.ignore_eos:
        # A config may have end-of-sequence ids outside the vocabulary.
        stop_token_ids.update(token for token in tokenizer.eos_token_ids if token < limits.vocab_size)
    max_tokens = _check_length(stop, num_prompt_tokens, limits)
    if stop.min_tokens > max_tokens:
        raise InvalidArgument("stop.min_tokens", f"is {stop.min_tokens}; it must be at most max_tokens, {max_tokens}")
    if stop.min_tokens and len(stop_token_ids) >= limits.vocab_size:
        raise InvalidArgument("stop.min_tokens", f"is {stop.min_tokens}, but every token ends the output")
    return worker_pb2.StopConfig(
        max_tokens=max_tokens, stop_token_ids=sorted(stop_token_ids), min_tokens=stop.min_tokens
    )


def _check_length(stop: inference_pb2.StopConditions, num_prompt_tokens: int, limits: ClusterLimits) -> int:
    """The maximum number of output tokens. Raises InvalidArgument."""
    longest = limits.longest_sequence
    if not stop.HasField("max_tokens"):
        return longest - num_prompt_tokens
    if stop.max_tokens == 0:
        raise InvalidArgument("stop.max_tokens", "is 0; it must be at least 1")
    if num_prompt_tokens + stop.max_tokens > longest:
        raise InvalidArgument(
            "stop.max_tokens",
            f"is {stop.max_tokens}; with a prompt of {num_prompt_tokens} tokens at most {longest - num_prompt_tokens} "
            f"are left: this model's maximum context length is {longest} tokens{limits.pool_words()}",
            reason=CONTEXT_LENGTH_EXCEEDED,
        )
    return stop.max_tokens
