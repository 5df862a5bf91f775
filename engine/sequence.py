"""A sequence: the tokens of one request, and how many of them have computed KV.

The fields of `Sequence` are the only state. Its properties are derived from the fields, so they can't disagree.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from engine.token_history import TokenHistory


@dataclass(frozen=True)
class LogitBias:
    """Values to add to the logits of some tokens; each token occurs once."""

    token_ids: array[int]
    """Type code "i"."""
    biases: array[float]
    """Type code "f", one per token."""


@dataclass(frozen=True)
class SamplingParams:
    """How the next token of a sequence is sampled. The values are validated already.

    Applied in this order: penalties, bias, min_tokens, temperature, top_k, top_p, min_p.
    """

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """1 is off."""
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    """0 is off."""
    repetition_penalty: float = 1.0
    """1 is off. Once per distinct token of prompt and output (Keskar et al. 2019, arXiv 1909.05858)."""
    presence_penalty: float = 0.0
    """0 is off. Once per distinct token of the output."""
    frequency_penalty: float = 0.0
    """0 is off. Per occurrence in the output."""
    logit_bias: LogitBias | None = None
    min_tokens: int = 0
    """`ending_token_ids` can't be sampled before this many output tokens."""
    ending_token_ids: tuple[int, ...] = ()
    seed: int = 0
    """Unsigned 64-bit."""
    choice_index: int = 0
    """Index of this choice, if the request asked for several."""
    num_logprobs: int | None = None
    """Alternatives per position with log-probabilities; None: no log-probabilities at all."""
    prompt_logprobs: bool = False
    """Log-probabilities of the prompt too. Every prompt token is computed, and its logits are kept."""

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, without randomness."""
        return self.temperature < MIN_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def has_filter(self) -> bool:
        """Whether top_k, top_p or min_p removes unlikely tokens."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


MIN_TEMPERATURE = 1e-5
"""Temperatures below this are greedy: a division by them could overflow, and would leave one token anyway."""


@dataclass(eq=False, slots=True)
class Sequence:
    """The tokens of one request, the pages of their KV, and how many have computed KV."""

    sequence_id: str
    token_ids: list[int]
    """Prompt, then output."""
    num_prompt_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    page_table: list[int] = field(default_factory=list)
    """Page ids in token order."""
    num_computed_tokens: int = 0
    """Tokens whose K and V are computed, or will be once the launched steps are done."""
    num_pending_tokens: int = 0
    """Sampled tokens, at most 1, that the host has not received from the device yet. A pending token is not in
    `token_ids`. The properties below count it as known, because the next step can be planned without its value."""
    num_cached_tokens: int = 0
    """Computed tokens that were found in the prefix cache."""
    cache_salt: str = ""
    """Sequences with different salts never share pages."""
    page_hashes: list[bytes] = field(default_factory=list)
    """Keys of the full pages so far; maintained by the prefix cache."""
    num_published_pages: int = 0
    """Pages that were added to the prefix cache or found equal to a cached page."""
    history: TokenHistory | None = None
    """Token counts for penalties; maintained by the sampler. None: not needed so far."""

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_output_tokens(self) -> int:
        """Known output tokens; also the index of the next output token."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens without computed K and V."""
        return self.num_tokens - self.num_computed_tokens


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One entry of a batch: a step computes the next `num_new_tokens` tokens of the sequence."""

    sequence: Sequence
    num_new_tokens: int

    @property
    def is_sampled(self) -> bool:
        """Whether this step reaches the last known token, so that the next token can be sampled."""
        return self.num_new_tokens == self.sequence.num_uncomputed_tokens


def num_pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold `num_tokens` tokens."""
    return -(-num_tokens // page_size)
