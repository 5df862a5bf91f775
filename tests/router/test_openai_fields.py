"""Every field of OpenAI's API and of the usual extras: served, harmless, or refused by name. None is ignored."""

from __future__ import annotations

import json
import typing
from pathlib import Path

import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from pydantic import ValidationError

from router.openai_fields import CHAT_REFUSED, COMPLETION_REFUSED, HARMLESS, MESSAGE_HARMLESS, MESSAGE_REFUSED
from router.openai_models import ChatBody, CompletionBody, Message, body_error
from rpc.errors import InvalidArgument

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"prompt": "hi"}
EXTRAS = (
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
    "grammar",
    "bad_words",
    "allowed_token_ids",
    "tool_choice",
    "response_format",
    "continue_final_message",
    "add_generation_prompt",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "reasoning_effort",
    "use_beam_search",
    "length_penalty",
    "prompt_logprobs",
    "truncate_prompt_tokens",
    "regex",
    "ebnf",
    "json_schema",
    "lora_path",
    "typical_p",
    "mirostat",
    "repeat_penalty",
    "num_ctx",
    "options",
    "thinking",
    "enable_thinking",
    "max_new_tokens",
)
"""Of vLLM, SGLang, llama.cpp, Ollama and others: fields that change the answer."""


def ask(body, **fields):
    """Reads a body as the front does. Raises InvalidArgument."""
    body_type = ChatBody if "messages" in body else CompletionBody
    try:
        return body_type.model_validate_json(json.dumps(body | fields)).requests()
    except ValidationError as error:
        raise body_error(error.errors(), frozenset(body_type.model_fields)) from None


def fields_of(parameters):
    return set(typing.get_type_hints(parameters))


@pytest.mark.parametrize(
    ("body_type", "parameters", "refused"),
    [
        (ChatBody, chat_params.CompletionCreateParamsStreaming, CHAT_REFUSED),
        (CompletionBody, completion_params.CompletionCreateParamsStreaming, COMPLETION_REFUSED),
    ],
)
def test_each_field_of_openai_has_one_place(body_type, parameters, refused):
    served = set(body_type.model_fields)
    asked = fields_of(parameters)
    assert len(asked) > 15
    assert asked <= served | set(HARMLESS) | set(refused), "OpenAI has fields that nobody has thought about"
    assert not served & set(HARMLESS)
    assert not served & set(refused)
    assert not set(HARMLESS) & set(refused)
    assert not set(MESSAGE_HARMLESS) & set(MESSAGE_REFUSED)
    assert not set(Message.model_fields) & {*MESSAGE_HARMLESS, *MESSAGE_REFUSED}


@pytest.mark.parametrize("name", sorted({*CHAT_REFUSED, *EXTRAS}))
@pytest.mark.parametrize("value", ["some", {"a": 1}, [1], 7, True])
def test_fields_that_change_an_answer_are_refused_by_name(name, value):
    for body, refused in ((CHAT, CHAT_REFUSED), (COMPLETION, COMPLETION_REFUSED)):
        if name in body or name in CompletionBody.model_fields or value in refused.get(name, ()):
            continue
        with pytest.raises(InvalidArgument, match=f"^{name}: is not served") as error:
            ask(body, **{name: value})
        assert error.value.reason == "unsupported_parameter"


@pytest.mark.parametrize("name", sorted({*CHAT_REFUSED, *HARMLESS, *ChatBody.model_fields} - {"messages"}))
def test_null_is_not_given(name):
    assert ask(CHAT, **{name: None}) == ask(CHAT)
    if name != "prompt":
        assert ask(COMPLETION, **{name: None}) == ask(COMPLETION)


@pytest.mark.parametrize("name", sorted(HARMLESS))
def test_harmless_fields_change_nothing(name):
    for value in ("some", {"a": 1}, [1], 7, True):
        assert ask(CHAT, **{name: value}) == ask(CHAT)
        assert ask(COMPLETION, **{name: value}) == ask(COMPLETION)


def test_values_that_ask_for_what_is_done_anyway_pass():
    for body, refused in ((CHAT, CHAT_REFUSED), (COMPLETION, COMPLETION_REFUSED)):
        for name, values in refused.items():
            for value in values:
                assert ask(body, **{name: value}) == ask(body), (name, value)
    assert ask(COMPLETION, best_of=3, n=3) == ask(COMPLETION, n=3)
    with pytest.raises(InvalidArgument, match="best_of"):
        ask(COMPLETION, best_of=3, n=2)
    with pytest.raises(InvalidArgument, match="best_of"):
        ask(COMPLETION, best_of=True)
    assert ask(CHAT, top_logprobs=0) == ask(CHAT)


def test_a_name_in_no_table_is_refused():
    """max_token, without its s, would give an answer of another length."""
    with pytest.raises(InvalidArgument, match=r"^max_token: is not known") as error:
        ask(CHAT, max_token=3)
    assert error.value.reason == "unknown_parameter"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}, "messages[1].tool_calls"),
        ({"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}, "messages[1].tool_calls"),
        ({"role": "tool", "content": "x", "tool_call_id": "1"}, "messages[1].tool_call_id"),
        ({"role": "assistant", "content": "x", "reasoning_content": "hm"}, "messages[1].reasoning_content"),
        ({"role": "assistant", "content": None}, "messages[1].content"),
        ({"role": "assistant"}, "messages[1].content"),
        ({"role": "user", "content": []}, "messages[1].content"),
        ({"role": "user", "content": 3}, "messages[1].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[1].content[0].type"),
        ({"role": "user", "content": [{"type": "text", "text": "x", "zoom": 1}]}, "messages[1].content[0].zoom"),
        ({"content": "x"}, "messages[1].role"),
        ({"role": "user", "content": "x", "colour": 1}, "messages[1].colour"),
        (None, "messages[1]"),
    ],
)
def test_messages_lose_nothing_in_silence(message, field):
    with pytest.raises(InvalidArgument) as error:
        ask({"messages": [*CHAT["messages"], message]})
    assert error.value.field == field


def test_an_answer_may_be_sent_back_as_the_client_library_has_it():
    from openai.types.chat import ChatCompletionMessage

    answer = ChatCompletionMessage(role="assistant", content="hello").model_dump()
    assert "tool_calls" in answer
    [request] = ask({"messages": [*CHAT["messages"], answer]})
    assert [(m.role, m.content) for m in request.chat.messages] == [("user", "hi"), ("assistant", "hello")]


@pytest.mark.parametrize(
    ("fields", "field", "reason"),
    [
        ({"n": 0}, "n", "integer_below_min_value"),
        ({"n": "1"}, "n", "invalid_type"),
        ({"n": True}, "n", "invalid_type"),
        ({"stream": 1}, "stream", "invalid_type"),
        ({"temperature": "warm"}, "temperature", "invalid_type"),
        ({"stop": [1]}, "stop[0]", "invalid_type"),
        ({"stop": ["a"] * 65}, "stop", "array_above_max_length"),
        ({"stop_token_ids": [1, "a"]}, "stop_token_ids[1]", "invalid_type"),
        ({"stop_token_ids": [1] * 65}, "stop_token_ids", "array_above_max_length"),
        ({"stop_token_ids": [2**40]}, "stop_token_ids", "invalid_value"),
        ({"logit_bias": {"a": 1}}, "logit_bias.a", "invalid_type"),
        ({"logit_bias": {"5": "x"}}, "logit_bias.5", "invalid_type"),
        ({"logit_bias": {str(2**40): 1}}, f"logit_bias.{2**40}", "invalid_value"),
        ({"logit_bias": {str(n): 1 for n in range(1025)}}, "logit_bias", "array_above_max_length"),
        ({"seed": 2**64}, "seed", "integer_above_max_value"),
        ({"seed": -(2**63) - 1}, "seed", "integer_below_min_value"),
        ({"top_k": 2**40}, "top_k", "invalid_value"),
        ({"stream_options": {"include_usage": 3}}, "stream_options.include_usage", "invalid_type"),
        ({"stream_options": {"other": 3}}, "stream_options.other", "unknown_parameter"),
        ({"prompt": [1, "a"]}, "prompt[1]", "invalid_type"),
        ({"prompt": [True]}, "prompt[0]", "invalid_type"),
        ({"prompt": [[1, 2], [1, "a"]]}, "prompt[1][1]", "invalid_type"),
        ({"prompt": ["x"] * 129}, "prompt", "array_above_max_length"),
        ({"prompt": ["x"] * 128, "n": 3}, "n", "invalid_value"),
        ({"prompt": [2**40]}, "prompt", "invalid_value"),
        ({"logprobs": False}, "logprobs", "invalid_type"),
    ],
)
def test_what_is_wrong_is_named_as_the_client_wrote_it(fields, field, reason):
    with pytest.raises(InvalidArgument) as error:
        ask(COMPLETION, **fields)
    assert (error.value.field, error.value.reason) == (field, reason)


def test_seeds_may_be_any_64_bits():
    assert ask(COMPLETION, seed=-1)[0].sampling.seed == 2**64 - 1
    assert ask(COMPLETION, seed=-(2**63))[0].sampling.seed == 2**63
    assert ask(COMPLETION, seed=2**64 - 1)[0].sampling.seed == 2**64 - 1


@pytest.mark.parametrize(
    ("wire", "body", "written"),
    [
        ("sampling.top_p", CHAT, "top_p"),
        ("sampling.logit_bias[7]", CHAT, "logit_bias.7"),
        ("stop.max_tokens", CHAT | {"max_tokens": 1}, "max_tokens"),
        ("stop.max_tokens", CHAT | {"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
        ("stop.stop[0]", COMPLETION | {"stop": "a"}, "stop"),
        ("stop.stop[0]", COMPLETION | {"stop": ["a"]}, "stop[0]"),
        ("num_logprobs", CHAT, "top_logprobs"),
        ("num_logprobs", COMPLETION, "logprobs"),
        ("chat.messages[3].role", CHAT, "messages[3].role"),
        ("chat.messages", CHAT, "messages"),
        ("chat", CHAT, "messages"),
        ("prompt", CHAT, "messages"),
        ("prompt", COMPLETION, "prompt"),
        ("text", COMPLETION, "prompt"),
        ("token_ids[4]", {"prompt": [1]}, "prompt[4]"),
        ("token_ids[4]", {"prompt": [[1], [2]]}, "prompt[1][4]"),
        ("text", {"prompt": ["a", "b"]}, "prompt[1]"),
        ("stop.max_tokens", COMPLETION, "prompt"),
        ("stop.max_tokens", COMPLETION | {"max_tokens": 4}, "max_tokens"),
        ("cache_salt", COMPLETION, "cache_salt"),
    ],
)
def test_fields_of_the_wire_are_told_as_the_client_wrote_them(wire, body, written):
    body_type = ChatBody if "messages" in body else CompletionBody
    assert body_type.model_validate_json(json.dumps(body)).written_name(wire, prompt_index=1) == written


def test_reading_stops_at_the_first_error():
    """1.5 MB of nulls made two million errors and a gigabyte of them."""
    body = b'{"prompt": [' + b",".join([b"null"] * 300_000) + b"]}"
    with pytest.raises(ValidationError) as error:
        CompletionBody.model_validate_json(body)
    assert error.value.error_count() < 10
    messages = b'{"messages": [' + b",".join([b"null"] * 4000) + b"]}"
    with pytest.raises(ValidationError) as error:
        ChatBody.model_validate_json(messages)
    assert error.value.error_count() < 10


def test_the_documentation_names_every_field():
    text = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    served = {*ChatBody.model_fields, *CompletionBody.model_fields}
    for name in {*served, *HARMLESS, *CHAT_REFUSED, *COMPLETION_REFUSED, *MESSAGE_HARMLESS, *MESSAGE_REFUSED}:
        assert f"`{name}`" in text, name
    for why in HARMLESS.values():
        assert why in text
