"""Converts responses to the objects of OpenAI's two endpoints: whole objects and chunks of a stream."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from protos import inference_pb2

FINISH = {inference_pb2.FINISH_REASON_STOP: "stop", inference_pb2.FINISH_REASON_LENGTH: "length"}


CHOICE = "\n choice"
"""Stands for a choice. No id or name has it: they have no line ends."""
to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def event(content: dict[str, Any]) -> str:
    """A server-sent event."""
    return f"data: {to_json(content)}\n\n"


class Form:
    """Converts the responses of one request to the objects of one endpoint."""

    object_name = ""
    chunk_name = ""
    id_prefix = ""

    def __init__(self, request_id: str, model: str, num_choices: int, wants_usage: bool) -> None:
        self.wants_usage = wants_usage
        self._num_choices = num_choices
        self._common = {"id": request_id, "created": int(time.time()), "model": model}
        self._begun: set[int] = set()
        self._prompt_tokens: dict[int, int] = {}
        self._cached_tokens: dict[int, int] = {}
        self._completion_tokens = 0
        self._text_lengths: Counter[int] = Counter()
        # All events of a stream but the last are alike around their choice.
        usage = {"usage": None} if wants_usage else {}
        around = event({**self._common, "object": self.chunk_name, "choices": [CHOICE], **usage})
        self._before_choice, _, self._after_choice = around.partition(to_json(CHOICE))

    def event(self, prompt_index: int, response: inference_pb2.GenerateResponse) -> str:
        """The event of a stream for a response."""
        index = self.index_of(prompt_index, response)
        is_first = index not in self._begun
        if is_first:
            self._begun.add(index)
        choice = {"index": index, **self.delta(response, is_first), "finish_reason": None}
        if response.finish_reason:
            self.note_usage(prompt_index, response)
            choice["finish_reason"] = FINISH.get(response.finish_reason)
            if response.stop_reason:
                choice["stop_reason"] = response.stop_reason
        if response.token_ids:
            choice["token_ids"] = list(response.token_ids)
        if response.logprobs:
            choice["logprobs"] = self.logprobs(response, self._text_lengths[index])
        self._text_lengths[index] += len(response.text)
        return f"{self._before_choice}{to_json(choice)}{self._after_choice}"

    def note_usage(self, prompt_index: int, response: inference_pb2.GenerateResponse) -> None:
        """Counts the tokens of a choice that has ended. A prompt counts once."""
        if response.finish_reason:
            self._prompt_tokens[prompt_index] = response.usage.prompt_tokens
            self._completion_tokens += response.usage.completion_tokens
            if response.index == 0:  # the other choices always find the pages of the first
                self._cached_tokens[prompt_index] = response.usage.cached_tokens

    def usage(self) -> dict[str, Any]:
        """Tokens of all prompts and choices."""
        prompt = sum(self._prompt_tokens.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._completion_tokens,
            "total_tokens": prompt + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached_tokens.values())},
        }

    def usage_chunk(self) -> dict[str, Any]:
        """The last chunk of a stream with include_usage."""
        return {**self._common, "object": self.chunk_name, "choices": [], "usage": self.usage()}

    def whole(self, responses_of: dict[int, list[inference_pb2.GenerateResponse]]) -> dict[str, Any]:
        """The object that is not streamed. responses_of: responses by index of the choice."""
        choices = []
        for index, responses in sorted(responses_of.items()):
            joined = inference_pb2.GenerateResponse()
            for response in responses:
                joined.text += response.text
                joined.token_ids.extend(response.token_ids)
                joined.logprobs.extend(response.logprobs)
            finish = FINISH.get(responses[-1].finish_reason)
            choice: dict[str, Any] = {"index": index, **self.message(joined), "finish_reason": finish, "logprobs": None}
            if joined.token_ids:
                choice["token_ids"] = list(joined.token_ids)
            if joined.logprobs:
                choice["logprobs"] = self.logprobs(joined, 0)
            if responses[-1].stop_reason:
                choice["stop_reason"] = responses[-1].stop_reason
            choices.append(choice)
        return {**self._common, "object": self.object_name, "choices": choices, "usage": self.usage()}

    def index_of(self, prompt_index: int, response: inference_pb2.GenerateResponse) -> int:
        """Index of the choice that a response belongs to."""
        return prompt_index * self._num_choices + response.index

    def delta(self, response: inference_pb2.GenerateResponse, is_first: bool) -> dict[str, Any]:
        """New text in a chunk."""
        raise NotImplementedError

    def message(self, joined: inference_pb2.GenerateResponse) -> dict[str, Any]:
        """The whole text."""
        raise NotImplementedError

    def logprobs(self, response: inference_pb2.GenerateResponse, text_before: int) -> dict[str, Any]:
        """Log-probabilities in the endpoint's format. text_before: characters of the choice that were sent before."""
        raise NotImplementedError


class CompletionForm(Form):
    object_name = chunk_name = "text_completion"
    id_prefix = "cmpl"

    def delta(self, response: inference_pb2.GenerateResponse, is_first: bool) -> dict[str, Any]:
        return {"text": response.text, "logprobs": None}

    def message(self, joined: inference_pb2.GenerateResponse) -> dict[str, Any]:
        return {"text": joined.text}

    def logprobs(self, response: inference_pb2.GenerateResponse, text_before: int) -> dict[str, Any]:
        texts = [_readable(entry.chosen) for entry in response.logprobs]
        return {
            "tokens": [_name(entry.chosen) for entry in response.logprobs],
            "token_logprobs": [entry.chosen.logprob for entry in response.logprobs],
            "top_logprobs": [_by_name(entry.top) for entry in response.logprobs],
            "text_offset": list(itertools.accumulate([text_before, *(len(text) for text in texts[:-1])])),
        }


class ChatForm(Form):
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def delta(self, response: inference_pb2.GenerateResponse, is_first: bool) -> dict[str, Any]:
        role = {"role": "assistant"} if is_first else {}
        return {"delta": {**role, "content": response.text} if response.text or is_first else {}, "logprobs": None}

    def message(self, joined: inference_pb2.GenerateResponse) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": joined.text, "refusal": None}}

    def logprobs(self, response: inference_pb2.GenerateResponse, text_before: int) -> dict[str, Any]:
        def entry(token: inference_pb2.TokenLogprob) -> dict[str, Any]:
            return {"token": _readable(token), "logprob": token.logprob, "bytes": list(token.token_bytes)}

        content = [
            {**entry(position.chosen), "top_logprobs": [entry(top) for top in position.top]}
            for position in response.logprobs
        ]
        return {"content": content, "refusal": None}


def _readable(token: inference_pb2.TokenLogprob) -> str:
    return token.token_bytes.decode("utf-8", "replace")


def _name(token: inference_pb2.TokenLogprob) -> str:
    """A token's text; if its bytes are not valid UTF-8, the bytes in OpenAI's notation."""
    try:
        return token.token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.token_bytes)


def _by_name(tokens: Iterable[inference_pb2.TokenLogprob]) -> dict[str, float]:
    """Log-probabilities by name. If tokens have the same name, the likeliest gets it; the others are named by id."""
    named: dict[str, float] = {}
    for token in tokens:
        name = _name(token)
        named[name if name not in named else f"token_id:{token.token_id}"] = token.logprob
    return named
