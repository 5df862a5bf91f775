"""The order of prompts: the router's queue and each worker's scheduler make keys by the same rule.

Prompts are ordered by priority first. Next, requeued requests go before new ones. Then:

* ``fcfs``: in order of arrival.
* ``bounded_slowdown``: by virtual deadline: the number of prompt tokens that arrived before this prompt, plus SLOWDOWN
  times its own length L. Short prompts overtake long ones, but a prompt is done before ``work ahead at its arrival
  + (SLOWDOWN + 2) * L`` further tokens are computed. Proof: a prompt that goes first has an earlier virtual deadline.
  So it arrived before (the work ahead), or while the next SLOWDOWN * L tokens arrived. The last of the latter may
  exceed this sum, but is shorter than L. All in prompt tokens, at equal priority and with enough pages.
"""

from __future__ import annotations

import itertools
from typing import Literal, NamedTuple

PromptOrder = Literal["fcfs", "bounded_slowdown"]

SLOWDOWN: dict[PromptOrder, int] = {"fcfs": 0, "bounded_slowdown": 4}
"""Factor of a prompt's length up to which shorter prompts may delay it."""


class Order(NamedTuple):
    """Sort key of a prompt: smaller goes first."""

    negative_priority: int
    is_new: bool
    """False for requeued requests, which go before new ones."""
    virtual_deadline: int
    """0 with fcfs."""
    arrival: int


class Arrivals:
    """Makes the sort keys of arriving prompts."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._num_tokens = 0

    def order(self, num_tokens: int, priority: int, slowdown: int, is_new: bool = True) -> Order:
        """The sort key of a prompt of `num_tokens` tokens that arrives now. slowdown: 0 for fcfs."""
        virtual_deadline = self._num_tokens + slowdown * num_tokens if slowdown else 0
        self._num_tokens += num_tokens
        return Order(-priority, is_new, virtual_deadline, next(self._numbers))
