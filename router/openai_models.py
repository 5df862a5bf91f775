"""The bodies of OpenAI-compatible requests, and how they become a GenerateRequest.

Fields that would change the answer and are not served are refused by name; those that would not are ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from protos import inference_pb2
from rpc.errors import InvalidArgument

DEFAULT_COMPLETION_TOKENS = 16
"""What OpenAI's completions give if max_tokens is not set."""
REFUSED = ("tools", "functions", "best_of", "suffix", "echo", "audio", "prediction", "web_search_options")
"""Fields that change the answer and are not served."""


class StreamOptions(BaseModel):
    """How a stream ends."""

    include_usage: bool = False


class TextPart(BaseModel):
    """A part of a message; only text is served."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One turn of a conversation."""

    role: str
    content: str | list[TextPart] | None = None

    @property
    def text(self) -> str:
        """The content as one text."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class CommonBody(BaseModel):
    """What completions and chat completions share. The last block is not OpenAI's own, but common among servers."""

    model_config = ConfigDict(extra="allow")

    model: str = ""
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    n: Annotated[int, Field(ge=1)] = 1
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = Field(default=None, ge=0)
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    priority: int = 0
    cache_salt: str = ""
    request_id: str = ""
    return_token_ids: bool = False
    timeout: float | None = Field(default=None, gt=0, le=1e6, allow_inf_nan=False)
    """Seconds for queue, prefill, transfer and decode together, like a gRPC deadline."""

    def check_served(self) -> None:
        """Raises InvalidArgument naming a field that is not served."""
        for name in REFUSED:
            if (self.model_extra or {}).get(name):
                raise InvalidArgument(name, "is not served")
        asked = (self.model_extra or {}).get("response_format")
        if isinstance(asked, dict) and asked.get("type", "text") != "text":
            raise InvalidArgument("response_format", f"{asked.get('type')!r} is not served; only 'text' is")

    def to_request(self, max_tokens: int | None, num_logprobs: int | None) -> inference_pb2.GenerateRequest:
        """Everything but the prompt. Raises InvalidArgument for numbers that the wire has no room for."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        try:
            return inference_pb2.GenerateRequest(
                model=self.model,
                request_id=self.request_id,
                return_token_ids=self.return_token_ids,
                num_logprobs=num_logprobs,
                include_special_tokens=not self.skip_special_tokens,
                cache_salt=self.cache_salt,
                priority=self.priority,
                sampling=inference_pb2.SamplingParams(
                    temperature=self.temperature,
                    top_p=self.top_p,
                    top_k=self.top_k,
                    min_p=self.min_p,
                    repetition_penalty=self.repetition_penalty,
                    presence_penalty=self.presence_penalty,
                    frequency_penalty=self.frequency_penalty,
                    logit_bias=self.logit_bias or {},
                    seed=self.seed,
                    n=self.n,
                ),
                stop=inference_pb2.StopConditions(
                    max_tokens=max_tokens,
                    min_tokens=self.min_tokens,
                    stop=stops,
                    stop_token_ids=self.stop_token_ids or [],
                    ignore_eos=self.ignore_eos,
                    include_stop=self.include_stop_str_in_output,
                ),
            )
        except ValueError as error:
            raise InvalidArgument("body", f"a number is out of range: {error}") from error


class CompletionBody(CommonBody):
    """`POST /v1/completions`."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0)

    def _prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], str | list):
            return [part for part in self.prompt if isinstance(part, str | list)]
        return [[part for part in self.prompt if isinstance(part, int)]]

    def requests(self) -> list[inference_pb2.GenerateRequest]:
        """One per prompt. Raises InvalidArgument."""
        self.check_served()
        prompts = self._prompts()
        if len(prompts) > 1 and self.request_id:
            raise InvalidArgument("request_id", "can't name several prompts")
        max_tokens = DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        made = []
        for prompt in prompts:
            request = self.to_request(max_tokens, self.logprobs)
            if isinstance(prompt, str):
                request.text = prompt
            else:
                request.token_ids.SetInParent()
                try:
                    request.token_ids.ids.extend(prompt)
                except ValueError as error:
                    raise InvalidArgument("prompt", f"a token id is out of range: {error}") from error
            made.append(request)
        return made


class ChatBody(CommonBody):
    """`POST /v1/chat/completions`."""

    messages: list[Message]
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0)

    def requests(self) -> list[inference_pb2.GenerateRequest]:
        """The one request. Raises InvalidArgument."""
        self.check_served()
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidArgument("top_logprobs", "needs logprobs to be true")
        max_tokens = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        request = self.to_request(max_tokens, (self.top_logprobs or 0) if self.logprobs else None)
        request.chat.SetInParent()
        for message in self.messages:
            request.chat.messages.add(role=message.role, content=message.text)
        return [request]


def body_error(errors: list[Any]) -> InvalidArgument:
    """The error for a body that pydantic refused: names the first field."""
    first = errors[0]
    # Names of union members are pydantic's, not the client's.
    path = [str(part) for part in first["loc"] if not str(part).startswith(("list[", "str", "int", "function-"))]
    return InvalidArgument(".".join(path) or "body", first["msg"])
