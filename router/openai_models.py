"""Parses the bodies of OpenAI-compatible requests and converts them to GenerateRequests.

null means "not given" everywhere. Lists have limits, and parsing stops at the first error, so that an invalid body
costs no more than a valid one. For fields that are not served see `openai_fields`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from protos import inference_pb2
from router.openai_fields import (
    CHAT_REFUSED,
    COMPLETION_REFUSED,
    HARMLESS,
    MESSAGE_HARMLESS,
    MESSAGE_REFUSED,
    PART_HARMLESS,
    STREAM_OPTIONS_HARMLESS,
    check_extras,
)
from router.validation import MAX_BIASES, MAX_MESSAGES, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS
from rpc.errors import InvalidArgument

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of max_tokens for completions."""
MAX_PROMPTS = 128
"""Prompts of one completions request."""
MAX_CALL_CHOICES = 256
"""Choices of one completions request: prompts times n."""
MAX_PARTS = 256
"""Text parts of one message."""
MAX_PROMPT_IDS = 2_000_000
"""Token ids of one prompt. The model's own limit is checked later."""

_STRICT = ConfigDict(extra="allow", strict=True)
# Long lists are checked item by item, up to the first invalid item.
_Ids = Annotated[list[int], Field(fail_fast=True, max_length=MAX_PROMPT_IDS)]
_Prompts = Annotated[list[str], Field(fail_fast=True, max_length=MAX_PROMPTS)]
_IdPrompts = Annotated[list[_Ids], Field(fail_fast=True, max_length=MAX_PROMPTS)]


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = _STRICT

    include_usage: bool | None = None


class TextPart(BaseModel):
    """A part of a message; only text is supported."""

    model_config = _STRICT

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One turn of a conversation."""

    model_config = _STRICT

    role: str
    content: str | Annotated[list[TextPart], Field(fail_fast=True, max_length=MAX_PARTS)] | None = None
    name: str | None = None

    def text(self, where: str) -> str:
        """The content as one text. Raises InvalidArgument naming the message if its content is not text."""
        check_extras(self.model_extra, MESSAGE_HARMLESS, MESSAGE_REFUSED, f"{where}.")
        if isinstance(self.content, str):
            return self.content
        if not self.content:
            what = "is missing" if self.content is None else "is an empty list"
            raise InvalidArgument(f"{where}.content", f"{what}; a message needs text", reason="invalid_value")
        for index, part in enumerate(self.content):
            check_extras(part.model_extra, PART_HARMLESS, {}, f"{where}.content[{index}].")
        return "".join(part.text for part in self.content)


class CommonBody(BaseModel):
    """Fields of both completions and chat completions. The second block is not OpenAI's, but common among servers."""

    model_config = _STRICT

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True, max_length=MAX_STOP_STRINGS)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[int, float], Field(max_length=MAX_BIASES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop_token_ids: Annotated[list[int], Field(fail_fast=True, max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    timeout: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] | None = None
    """Most seconds for queue, prefill, transfer and decode together, like a gRPC deadline."""

    @property
    def num_choices(self) -> int:
        """Choices per prompt."""
        return self.n or 1

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def requests(self) -> list[inference_pb2.GenerateRequest]:
        """One request per prompt. Raises InvalidArgument."""
        raise NotImplementedError

    def written_name(self, field: str, prompt_index: int) -> str:
        """The client's name of a field of GenerateRequest. prompt_index: the prompt that the field belongs to."""
        name = re.sub(r"^(sampling|stop)\.", "", field)
        if isinstance(self.stop, str):
            name = re.sub(r"^stop\[0\]", "stop", name)
        return re.sub(r"^logit_bias\[(\d+)\]", r"logit_bias.\1", name)

    def _check_served(self, refused: dict[str, tuple[Any, ...]]) -> None:
        """Raises InvalidArgument naming a field that is not served."""
        check_extras(self.model_extra, HARMLESS, refused)
        if self.stream_options is not None:
            check_extras(self.stream_options.model_extra, STREAM_OPTIONS_HARMLESS, {}, "stream_options.")

    def _to_request(self, max_tokens: int | None, num_logprobs: int | None) -> inference_pb2.GenerateRequest:
        """A request without its prompt. Raises InvalidArgument for numbers out of the range of their wire type."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        request = inference_pb2.GenerateRequest(
            model=self.model or "",
            request_id=self.request_id or "",
            return_token_ids=bool(self.return_token_ids),
            include_special_tokens=self.skip_special_tokens is False,
            cache_salt=self.cache_salt or "",
        )
        sampling, stop = request.sampling, request.stop
        stop.stop.extend(stops)
        stop.ignore_eos, stop.include_stop = bool(self.ignore_eos), bool(self.include_stop_str_in_output)
        if self.seed is not None:
            sampling.seed = self.seed % (1 << 64)
        for target, name, value in (
            (request, "num_logprobs", num_logprobs),
            (request, "priority", self.priority),
            (sampling, "temperature", self.temperature),
            (sampling, "top_p", self.top_p),
            (sampling, "top_k", self.top_k),
            (sampling, "min_p", self.min_p),
            (sampling, "repetition_penalty", self.repetition_penalty),
            (sampling, "presence_penalty", self.presence_penalty),
            (sampling, "frequency_penalty", self.frequency_penalty),
            (sampling, "n", self.n),
            (stop, "max_tokens", max_tokens),
            (stop, "min_tokens", self.min_tokens),
        ):
            if value is not None:
                try:
                    setattr(target, name, value)
                except ValueError as error:
                    raise InvalidArgument(name, f"is {value}, which is out of range") from error
        try:
            stop.stop_token_ids.extend(self.stop_token_ids or [])
        except ValueError as error:
            raise InvalidArgument("stop_token_ids", "has an id that is out of range") from error
        for token_id, bias in (self.logit_bias or {}).items():
            try:
                sampling.logit_bias[token_id] = bias
            except ValueError as error:
                raise InvalidArgument(f"logit_bias.{token_id}", "is out of range") from error
        return request


class CompletionBody(CommonBody):
    """`POST /v1/completions`."""

    prompt: str | _Ids | _Prompts | _IdPrompts
    logprobs: Annotated[int, Field(ge=0)] | None = None

    def _prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], str | list):
            return [part for part in self.prompt if isinstance(part, str | list)]
        return [[part for part in self.prompt if isinstance(part, int)]]

    def requests(self) -> list[inference_pb2.GenerateRequest]:
        """See `CommonBody.requests`."""
        best_of = (self.model_extra or {}).get("best_of")
        if best_of is None or best_of != self.num_choices or isinstance(best_of, bool):
            self._check_served(dict(COMPLETION_REFUSED))
        else:
            self._check_served({**COMPLETION_REFUSED, "best_of": (best_of,)})
        prompts = self._prompts()
        if len(prompts) * self.num_choices > MAX_CALL_CHOICES:
            raise InvalidArgument(
                "n", f"is {self.num_choices} for {len(prompts)} prompts; at most {MAX_CALL_CHOICES} choices are allowed"
            )
        if len(prompts) > 1 and self.request_id:
            raise InvalidArgument("request_id", "can't be set for several prompts")
        max_tokens = DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        common = self._to_request(max_tokens, self.logprobs)
        made = []
        for prompt_index, prompt in enumerate(prompts):
            request = inference_pb2.GenerateRequest()
            request.CopyFrom(common)
            if isinstance(prompt, str):
                request.text = prompt
            else:
                request.token_ids.SetInParent()
                try:
                    request.token_ids.ids.extend(prompt)
                except ValueError as error:
                    field = self.written_name("token_ids", prompt_index)
                    raise InvalidArgument(field, "has a token id that is out of range") from error
            made.append(request)
        return made

    def written_name(self, field: str, prompt_index: int) -> str:
        """See `CommonBody.written_name`."""
        if field == "num_logprobs":
            return "logprobs"
        if field == "stop.max_tokens" and self.max_tokens is None:
            field = "prompt"
        if re.match(r"(text|token_ids|prompt)\b", field):
            several = not isinstance(self.prompt, str) and self.prompt and isinstance(self.prompt[0], str | list)
            return re.sub(r"^(text|token_ids|prompt)", f"prompt[{prompt_index}]" if several else "prompt", field)
        return super().written_name(field, prompt_index)


class ChatBody(CommonBody):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(fail_fast=True, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None

    def requests(self) -> list[inference_pb2.GenerateRequest]:
        """See `CommonBody.requests`."""
        self._check_served(dict(CHAT_REFUSED))
        if self.top_logprobs and not self.logprobs:
            raise InvalidArgument("top_logprobs", "needs logprobs to be true")
        max_tokens = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        request = self._to_request(max_tokens, (self.top_logprobs or 0) if self.logprobs else None)
        request.chat.SetInParent()
        for index, message in enumerate(self.messages):
            text = message.text(f"messages[{index}]")
            request.chat.messages.add(role=message.role, content=text, name=message.name or "")
        return [request]

    def written_name(self, field: str, prompt_index: int) -> str:
        """See `CommonBody.written_name`."""
        if field == "num_logprobs":
            return "top_logprobs"
        if field == "stop.max_tokens":
            written = {"max_completion_tokens": self.max_completion_tokens, "max_tokens": self.max_tokens}
            return next((name for name, value in written.items() if value is not None), "messages")
        if field in ("chat", "prompt"):
            return "messages"
        return super().written_name(field.removeprefix("chat."), prompt_index)


_CODES = {
    "missing": "missing_required_parameter",
    "json_invalid": "invalid_json",
    "too_long": "array_above_max_length",
    "greater_than": "integer_below_min_value",
    "greater_than_equal": "integer_below_min_value",
    "less_than": "integer_above_max_value",
    "less_than_equal": "integer_above_max_value",
}
"""Type of pydantic's error to OpenAI's code; all other types are invalid_type."""
_UNION_MEMBER = re.compile(
    r"(list|dict|function|constrained|fail|nullable|model|StreamOptions|TextPart)\b.*\[.*|str|int"
)


def body_error(errors: list[Any], fields: frozenset[str]) -> InvalidArgument:
    """The error for an invalid body. Names the field as the client wrote it.

    fields: names of the body's fields. pydantic tries every type of a union, so there may be several errors. The error
    at the deepest location is the most useful.
    """

    def depth(error: Any) -> tuple[int, int]:
        path = _path(error["loc"], fields)
        return len(path), path[-1] if path and isinstance(path[-1], int) else 0

    first = max(errors, key=depth)
    if depth(first)[1] == 0:
        # The matching type of a union failed because the list is too long; the other types failed at once.
        first = next((error for error in errors if error["type"] == "too_long"), first)
    parts = _path(first["loc"], fields)
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).removeprefix(".")
    field = field.removesuffix(".[key]")
    return InvalidArgument(field or "body", str(first["msg"]), reason=_CODES.get(first["type"], "invalid_type"))


def _path(location: tuple[str | int, ...], fields: frozenset[str]) -> list[str | int]:
    """A location without pydantic's names of union members, which clients do not know."""
    return [part for part in location if isinstance(part, int) or part in fields or not _UNION_MEMBER.fullmatch(part)]
