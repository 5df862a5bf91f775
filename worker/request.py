"""What a worker reads out of a command, the same in both tiers."""

from __future__ import annotations

from collections.abc import Iterable

from engine.sequence import SamplingParams, Sequence
from protos import inference_pb2, worker_pb2


def sampling_params(config: worker_pb2.SamplingConfig) -> SamplingParams:
    """The engine's form. The router checked and completed the values."""
    return SamplingParams(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        seed=config.seed,
        choice_index=config.choice_index,
    )


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


def check_token_ids(token_ids: Iterable[int], num_prompt_tokens: int, vocab_size: int) -> str | None:
    """Why these tokens can't be computed, or None.

    A second look after the router's: no input reaches the engine loop unchecked.
    """
    ids = list(token_ids)
    if not ids or not 1 <= num_prompt_tokens <= len(ids):
        return f"num_prompt_tokens is {num_prompt_tokens} of {len(ids)} token ids; a prompt needs at least 1"
    if min(ids) < 0 or max(ids) >= vocab_size:
        return f"token ids must be in [0, {vocab_size}); found {min(ids)} to {max(ids)}"
    return None
