"""What a worker reads out of a command, the same in both tiers."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence as Seq

import grpc

from engine.model_runner import PromptLogits
from engine.sampler import TokenLogprobs, logprobs_at
from engine.sequence import LogitBias, SamplingParams, Sequence
from protos import inference_pb2, worker_pb2


def sampling_params(config: worker_pb2.SamplingConfig, stop: worker_pb2.StopConfig) -> SamplingParams:
    """The engine's form. The router checked and completed the values."""
    bias = LogitBias(array("i", config.bias_token_ids), array("f", config.biases)) if config.bias_token_ids else None
    return SamplingParams(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        repetition_penalty=config.repetition_penalty,
        presence_penalty=config.presence_penalty,
        frequency_penalty=config.frequency_penalty,
        logit_bias=bias,
        min_tokens=stop.min_tokens,
        ending_token_ids=tuple(stop.stop_token_ids),
        seed=config.seed,
        choice_index=config.choice_index,
        num_logprobs=config.num_logprobs if config.HasField("num_logprobs") else None,
        prompt_logprobs=config.prompt_logprobs,
    )


def logprobs_message(positions: Seq[TokenLogprobs]) -> worker_pb2.Logprobs:
    """The wire form of log-probabilities with equally many alternatives at each position."""
    return worker_pb2.Logprobs(
        num_top=len(positions[0].token_ids) - 1 if positions else 0,
        token_ids=[token for position in positions for token in position.token_ids],
        logprobs=[value for position in positions for value in position.logprobs],
    )


def prompt_logprobs(prompt: PromptLogits) -> list[TokenLogprobs]:
    """Log-probabilities of the prompt tokens that follow those computed in a step.

    The logits behind each token tell the probability of the next; those behind the last one are of the output.
    """
    sequence, start = prompt.sequence, prompt.start
    following = sequence.token_ids[start + 1 : min(start + len(prompt.logits) + 1, sequence.num_prompt_tokens)]
    return logprobs_at(prompt.logits[: len(following)], following, sequence.sampling.num_logprobs or 0)


def failure_event(
    request_id: str, attempt: int, code: grpc.StatusCode, message: str, retryable: bool, is_draining: bool = False
) -> worker_pb2.SessionResponse:
    """What a router hears of a request that ended without its answer."""
    failure = worker_pb2.RequestFailedEvent(
        request_id=request_id,
        attempt=attempt,
        status_code=code.value[0],
        message=message,
        retryable=retryable,
        is_draining=is_draining,
    )
    return worker_pb2.SessionResponse(request_failed=failure)


class StopRule:
    """Ends a sequence by token: EOS and stop ids, or the most output tokens."""

    def __init__(self, config: worker_pb2.StopConfig) -> None:
        self.max_tokens = config.max_tokens
        self._stop_token_ids = frozenset(config.stop_token_ids)

    def finish_reason(self, sequence: Sequence) -> inference_pb2.FinishReason.ValueType:
        """Whether the sequence ends with its last token, and why; UNSPECIFIED: it goes on."""
        if sequence.token_ids[-1] in self._stop_token_ids:
            return inference_pb2.FINISH_REASON_STOP
        if sequence.num_output_tokens >= self.max_tokens:
            return inference_pb2.FINISH_REASON_LENGTH
        return inference_pb2.FINISH_REASON_UNSPECIFIED


def check_command(
    command: worker_pb2.ReserveCommand | worker_pb2.PrefillCommand | worker_pb2.GenerateCommand, vocab_size: int
) -> str | None:
    """Why a command's tokens, sampling and stops can't be computed, or None.

    A second look after the router's: nothing that could raise in the engine loop reaches it.
    """
    token_ids, num_prompt_tokens, config = command.token_ids, command.num_prompt_tokens, command.sampling
    if not 1 <= num_prompt_tokens <= len(token_ids):
        return f"num_prompt_tokens is {num_prompt_tokens} of {len(token_ids)} token ids; a prompt needs at least 1"
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        return f"token ids must be in [0, {vocab_size}); found {min(token_ids)} to {max(token_ids)}"
    if len(config.bias_token_ids) != len(config.biases):
        return f"{len(config.bias_token_ids)} tokens have {len(config.biases)} biases"
    for name, ids in (("bias_token_ids", config.bias_token_ids), ("stop_token_ids", command.stop.stop_token_ids)):
        if any(not 0 <= token < vocab_size for token in ids):
            return f"{name} must be in [0, {vocab_size})"
    if len(set(config.bias_token_ids)) != len(config.bias_token_ids):
        return "a token has two biases"
    if command.stop.max_tokens < 1:
        return f"max_tokens is {command.stop.max_tokens}; it must be at least 1"
    if not (config.temperature >= 0 and 0 < config.top_p <= 1 and 0 <= config.min_p <= 1):
        return f"temperature {config.temperature}, top_p {config.top_p} or min_p {config.min_p} is out of range"
    if not config.repetition_penalty > 0:
        return f"repetition_penalty is {config.repetition_penalty}; it must be above 0"
    numbers = (config.temperature, config.presence_penalty, config.frequency_penalty, *config.biases)
    if not all(map(math.isfinite, numbers)):
        return "temperature, penalties and biases must be finite"
    return None
