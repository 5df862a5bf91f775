"""A sequence: the tokens of one request and how far their KV is computed.

The counters are the truth. Everything else is derived from them, so nothing can disagree.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class SamplingParams:
    """How the next token of a sequence is chosen. Values are checked before they get here."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """1 is off."""
    top_k: int = 0
    """0 is off."""
    seed: int = 0
    """Unsigned 64-bit."""
    choice_index: int = 0
    """Which of a request's several answers this is."""

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, without chance."""
        return self.temperature < MIN_TEMPERATURE


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
    """Tokens whose K and V exist."""
    num_cached_tokens: int = 0
    """Of the computed ones, those found in the prefix cache."""
    cache_salt: str = ""
    """Sequences with different salts never share pages."""
    page_hashes: list[bytes] = field(default_factory=list)
    """Hashes of the full pages so far; the prefix cache's."""
    num_published_pages: int = 0
    """Pages the prefix cache was told about."""

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens known; also the index of the next one."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens known whose K and V are still missing."""
        return len(self.token_ids) - self.num_computed_tokens


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
