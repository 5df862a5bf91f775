"""From Python values to the wire form of a request."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from protos import inference_pb2

Messages = Seq[Mapping[str, str]]
"""A conversation: mappings with "role" and "content", oldest first."""
Prompt = str | Seq[int] | Messages
"""Plain text, token ids, or a conversation."""


def make_request(
    prompt: Prompt,
    *,
    model: str = "",
    request_id: str = "",
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    presence_penalty: float | None = None,
    frequency_penalty: float | None = None,
    logit_bias: Mapping[int, float] | None = None,
    seed: int | None = None,
    n: int = 1,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    stop: Seq[str] = (),
    stop_token_ids: Seq[int] = (),
    ignore_eos: bool = False,
    include_stop: bool = False,
    include_special_tokens: bool = False,
    return_token_ids: bool = False,
    num_logprobs: int | None = None,
    echo_prompt_logprobs: bool = False,
    cache_salt: str = "",
    priority: int = 0,
) -> inference_pb2.GenerateRequest:
    """The wire form of a request. Unset values are left to the router.

    seed: any 64 bits, signed or not. Raises TypeError for a wrong prompt, ValueError for a number that does not fit.
    """
    if seed is not None and -(1 << 63) <= seed < 0:
        seed += 1 << 64
    sampling = inference_pb2.SamplingParams(
        temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty, frequency_penalty=frequency_penalty, logit_bias=logit_bias or {}, seed=seed,
        n=n,
    )  # fmt: skip
    stops = inference_pb2.StopConditions(
        max_tokens=max_tokens, min_tokens=min_tokens, stop=stop, stop_token_ids=stop_token_ids, ignore_eos=ignore_eos,
        include_stop=include_stop,
    )  # fmt: skip
    request = inference_pb2.GenerateRequest(
        model=model, request_id=request_id, return_token_ids=return_token_ids, num_logprobs=num_logprobs,
        echo_prompt_logprobs=echo_prompt_logprobs, include_special_tokens=include_special_tokens, cache_salt=cache_salt,
        priority=priority, sampling=sampling, stop=stops,
    )  # fmt: skip
    set_prompt(request, prompt)
    return request


def set_prompt(request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest, prompt: Prompt) -> None:
    """Writes a prompt of any kind into a request. Raises TypeError for any other value."""
    if isinstance(prompt, str):
        request.text = prompt
    elif all(isinstance(item, int) for item in prompt) and isinstance(request, inference_pb2.GenerateRequest):
        request.token_ids.ids.extend(prompt)  # type: ignore[arg-type]
        request.token_ids.SetInParent()
    elif all(isinstance(item, Mapping) for item in prompt):
        for message in prompt:
            assert isinstance(message, Mapping)
            if unknown := message.keys() - {"role", "content", "name"}:
                raise TypeError(f"a message has role, content and name; {', '.join(sorted(unknown))} is not served")
            request.chat.messages.add(role=message["role"], content=message["content"], name=message.get("name", ""))
    else:
        raise TypeError("a prompt is a string, a list of token ids, or a list of {'role': ..., 'content': ...}")
