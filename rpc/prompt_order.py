"""The order of prompts: the same in the router's queue and in the schedulers of workers.

Always by priority first. Then requests that a worker had before go ahead of new ones. Then:

* ``fcfs``: in order of arrival.
* ``bounded_slowdown``: by virtual deadline. The virtual deadline of a prompt is the number of prompt tokens that had
  arrived before it, plus SLOWDOWN times its own length. Short prompts overtake long ones, and every prompt is done
  before ``work ahead at its arrival + (SLOWDOWN + 2) * its length`` further tokens have been computed. For: whoever is
  served before it has an earlier deadline, so either came before it (the work ahead), or began to wait within SLOWDOWN
  times its length of arriving work; the last of those, which may overshoot, is shorter than the prompt itself. All this
  in prompt tokens, at equal priority and while pages suffice.
"""

from __future__ import annotations

import itertools
from typing import Literal, NamedTuple

PromptOrder = Literal["fcfs", "bounded_slowdown"]

SLOWDOWN: dict[PromptOrder, int] = {"fcfs": 0, "bounded_slowdown": 4}
"""How many times its own length a prompt may be kept waiting in favour of shorter ones."""


class Order(NamedTuple):
    """When it is a prompt's turn: smaller goes first."""

    negative_priority: int
    is_new: bool
    """Requests that a worker had before go ahead of new ones."""
    virtual_deadline: int
    """0 in order of arrival."""
    arrival: int


class Arrivals:
    """Gives prompts their order as they arrive."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._num_tokens = 0

    def order(self, num_tokens: int, priority: int, slowdown: int, is_new: bool = True) -> Order:
        """The order of a prompt of `num_tokens` tokens that arrives now. slowdown: 0 is order of arrival."""
        virtual_deadline = self._num_tokens + slowdown * num_tokens if slowdown else 0
        self._num_tokens += num_tokens
        return Order(-priority, is_new, virtual_deadline, next(self._numbers))
