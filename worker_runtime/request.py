"""One request at a worker: its sequence, when it ends, and what its router is still to hear."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from engine.logprobs import TokenLogprobs, logprobs_at
from engine.model_runner import PromptLogits
from engine.sampler import SampledToken
from engine.sequence import LogitBias, SamplingParams, Sequence
from kv_transfer.request_ref import RequestRef
from protos import inference_pb2, worker_pb2
from worker_runtime.stamps import Stamps


class StopRule:
    """Ends a sequence by token: EOS and stop ids, or the most output tokens."""

    def __init__(self, config: worker_pb2.StopConfig) -> None:
        self.max_tokens = config.max_tokens
        self._stop_token_ids = frozenset(config.stop_token_ids)

    def finish_reason(self, sequence: Sequence) -> inference_pb2.FinishReason.ValueType:
        """Whether the sequence ends with its last token, and why. UNSPECIFIED: it does not end."""
        if sequence.token_ids[-1] in self._stop_token_ids:
            return inference_pb2.FINISH_REASON_STOP
        if sequence.num_output_tokens >= self.max_tokens:
            return inference_pb2.FINISH_REASON_LENGTH
        return inference_pb2.FINISH_REASON_UNSPECIFIED


@dataclass(eq=False)
class WorkerRequest:
    """A request that a worker has taken: what it knows beside the sequence, which holds tokens and counters."""

    session_id: int
    """Whose it is."""
    ref: RequestRef
    sequence: Sequence
    stop: StopRule
    stamps: Stamps
    deadline: float | None
    """On the worker's clock; None: none."""
    priority: int
    was_preempted: bool
    num_chunks: int = 0
    """Chunks in which this worker has computed the prompt so far."""
    num_computed_prompt_tokens: int = 0
    is_first_output: bool = True
    is_sending: bool = False
    """Everything is computed; its last pages are on their way to another worker."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the prompt tokens after the first, so far; if asked for."""

    def __post_init__(self) -> None:
        self._ref_message = self.ref.to_proto()  # made once, for it goes out with every token

    @classmethod
    def from_spec(
        cls, session_id: int, ref: RequestRef, spec: worker_pb2.SequenceSpec, now: Callable[[], float]
    ) -> WorkerRequest:
        """The request of a command that `check_spec` has found right."""
        sequence = Sequence(
            sequence_id=str(ref),
            token_ids=list(spec.token_ids),
            num_prompt_tokens=spec.num_prompt_tokens,
            sampling=_sampling_params(spec.sampling, spec.stop),
            cache_salt=spec.cache_salt,
        )
        deadline = now() + spec.deadline_ms / 1e3 if spec.deadline_ms else None
        return cls(
            session_id, ref, sequence, StopRule(spec.stop), Stamps(now), deadline, spec.priority, spec.was_preempted
        )

    def __repr__(self) -> str:
        sequence = self.sequence
        return (
            f"<{self.ref}: {sequence.num_prompt_tokens} prompt, {sequence.num_output_tokens} output, "
            f"{sequence.num_computed_tokens} computed tokens>"
        )

    @property
    def is_resumed(self) -> bool:
        """A router requeued it after an earlier attempt, so it goes ahead of new requests here as it did there."""
        return self.ref.attempt > 0

    @property
    def output_token_ids(self) -> list[int]:
        """Every output token that the host knows."""
        return self.sequence.token_ids[self.sequence.num_prompt_tokens :]

    def begin_chunk(self, num_new_tokens: int) -> None:
        """A step that computes a chunk of the prompt is about to run."""
        self.stamps.reach(worker_pb2.STAGE_PREFILL_STARTED)
        self.num_chunks += 1
        self.num_computed_prompt_tokens += num_new_tokens

    def begin_decode(self, num_new_tokens: int) -> None:
        """A step that computes the next output token is about to run."""
        self.stamps.reach(worker_pb2.STAGE_DECODE_STARTED)
        if self.sequence.num_computed_tokens < self.sequence.num_prompt_tokens:
            self.num_computed_prompt_tokens += num_new_tokens

    def take_prompt_logits(self, prompt: PromptLogits) -> None:
        """Log-probabilities of the prompt tokens that follow those computed in a step.

        The logits behind each token tell the probability of the next. Those behind the last token are of the output.
        """
        sequence, start = prompt.sequence, prompt.start
        following = sequence.token_ids[start + 1 : min(start + len(prompt.logits) + 1, sequence.num_prompt_tokens)]
        found = logprobs_at(prompt.logits[: len(following)], following, sequence.sampling.num_logprobs or 0)
        # By index, since a prompt that gave its pages back is computed again.
        self.prompt_logprobs[start:] = found

    def append(self, token_id: int, token: SampledToken) -> worker_pb2.TokenOutput:
        """The sequence's next token, which may end it (see `finish_reason`). Returns what the router is to hear."""
        sequence = self.sequence
        sequence.token_ids.append(token_id)
        if self.num_chunks:
            self.stamps.reach(worker_pb2.STAGE_PREFILL_FINISHED)
        finish_reason = self.stop.finish_reason(sequence)
        if finish_reason:
            self.stamps.reach(worker_pb2.STAGE_FINISHED)
        output = worker_pb2.TokenOutput(
            ref=self._ref_message,
            first_index=sequence.num_output_tokens - 1,
            token_ids=[token_id],
            finish_reason=finish_reason,
            stamps=self.stamps.take(),
            num_computed_prompt_tokens=self.num_computed_prompt_tokens if finish_reason else 0,
        )
        if token.logprobs is not None:
            output.logprobs.CopyFrom(_logprobs_message([token.logprobs]))
        if self.is_first_output and self.num_chunks:
            output.num_cached_tokens, output.num_chunks = sequence.num_cached_tokens, self.num_chunks
            if sequence.sampling.prompt_logprobs:
                output.prompt_logprobs.CopyFrom(_logprobs_message(self.prompt_logprobs))
        self.is_first_output = False
        return output


def check_spec(spec: worker_pb2.SequenceSpec, vocab_size: int) -> str | None:
    """Why tokens, sampling and stops of a command can't be computed, or None.

    The router has checked them already. This second look makes sure that nothing reaches the engine loop that could
    raise there.
    """
    token_ids, num_prompt_tokens, config = spec.token_ids, spec.num_prompt_tokens, spec.sampling
    if not 1 <= num_prompt_tokens <= len(token_ids):
        return f"num_prompt_tokens is {num_prompt_tokens} of {len(token_ids)} token ids; a prompt needs at least 1"
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        return f"token ids must be in [0, {vocab_size}); found {min(token_ids)} to {max(token_ids)}"
    if len(config.bias_token_ids) != len(config.biases):
        return f"{len(config.bias_token_ids)} tokens have {len(config.biases)} biases"
    for name, ids in (("bias_token_ids", config.bias_token_ids), ("stop_token_ids", spec.stop.stop_token_ids)):
        if any(not 0 <= token < vocab_size for token in ids):
            return f"{name} must be in [0, {vocab_size})"
    if len(set(config.bias_token_ids)) != len(config.bias_token_ids):
        return "a token has two biases"
    if spec.stop.max_tokens < 1:
        return f"max_tokens is {spec.stop.max_tokens}; it must be at least 1"
    if not (config.temperature >= 0 and 0 < config.top_p <= 1 and 0 <= config.min_p <= 1):
        return f"temperature {config.temperature}, top_p {config.top_p} or min_p {config.min_p} is out of range"
    if not config.repetition_penalty > 0:
        return f"repetition_penalty is {config.repetition_penalty}; it must be above 0"
    penalties = (config.repetition_penalty, config.presence_penalty, config.frequency_penalty)
    numbers = (config.temperature, *penalties, *config.biases)
    if not all(map(math.isfinite, numbers)):
        return "temperature, penalties and biases must be finite"
    return None


def _sampling_params(config: worker_pb2.SamplingConfig, stop: worker_pb2.StopConfig) -> SamplingParams:
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


def _logprobs_message(positions: Seq[TokenLogprobs]) -> worker_pb2.Logprobs:
    """The wire form of log-probabilities with equally many alternatives at each position."""
    return worker_pb2.Logprobs(
        num_top=len(positions[0].token_ids) - 1 if positions else 0,
        token_ids=[token for position in positions for token in position.token_ids],
        logprobs=[value for position in positions for value in position.logprobs],
    )
