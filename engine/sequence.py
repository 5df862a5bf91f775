"""A sequence: the tokens of one request and how far their KV is computed.

The counters are the truth. Everything else is derived from them, so nothing can disagree.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from engine.token_history import TokenHistory


@dataclass(frozen=True)
class LogitBias:
    """What is added to the logits of some tokens; no token is named twice."""

    token_ids: array[int]
    """Type code "i"."""
    biases: array[float]
    """Type code "f", one per token."""


@dataclass(frozen=True)
class SamplingParams:
    """How the next token of a sequence is chosen. Values are checked before they get here.

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
    """`ending_token_ids` can't be chosen before this many output tokens."""
    ending_token_ids: tuple[int, ...] = ()
    seed: int = 0
    """Unsigned 64-bit."""
    choice_index: int = 0
    """Which of a request's several answers this is."""
    num_logprobs: int | None = None
    """Alternatives per position to give log-probabilities of; None: no log-probabilities at all."""
    prompt_logprobs: bool = False
    """Log-probabilities of the prompt too: every prompt token is computed, and logits of all of them are wanted."""

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, without chance."""
        return self.temperature < MIN_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """Whether tokens seen before count."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def has_filter(self) -> bool:
        """Whether unlikely tokens are left out."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


MIN_TEMPERATURE = 1e-5
"""Below this a temperature is greedy: dividing by it would leave one token anyway, and overflow on the way."""


@dataclass(eq=False, slots=True)
class Sequence:
    """The tokens of one request, the pages that hold their KV, and how far that is computed."""

    sequence_id: str
    token_ids: list[int]
    """Prompt, then output."""
    num_prompt_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    page_table: list[int] = field(default_factory=list)
    """Page ids in token order."""
    num_computed_tokens: int = 0
    """Tokens whose K and V exist, or will once the device has done what was launched."""
    num_pending_tokens: int = 0
    """Output tokens, 1 at most, that a device chooses or has chosen and that the host does not know yet. They are not
    in `token_ids`, and count as known in everything below: the next step can be planned, and the device has them."""
    num_cached_tokens: int = 0
    """Of the computed ones, those found in the prefix cache."""
    cache_salt: str = ""
    """Sequences with different salts never share pages."""
    page_hashes: list[bytes] = field(default_factory=list)
    """Hashes of the full pages so far; the prefix cache's."""
    num_published_pages: int = 0
    """Pages the prefix cache was told about."""
    history: TokenHistory | None = None
    """The sampler's, if there are penalties."""

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and output."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_output_tokens(self) -> int:
        """Output tokens known; also the index of the next one."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens known whose K and V are still missing."""
        return self.num_tokens - self.num_computed_tokens


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One entry of a batch: the next `num_new_tokens` tokens of a sequence are to be computed."""

    sequence: Sequence
    num_new_tokens: int

    @property
    def is_sampled(self) -> bool:
        """Whether this step reaches the last known token, so that the next one can be chosen."""
        return self.num_new_tokens == self.sequence.num_uncomputed_tokens


def num_pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold `num_tokens` tokens."""
    return -(-num_tokens // page_size)
