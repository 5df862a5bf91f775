"""How long outputs get: learned from outputs that have ended, so that admission leaves room for growth.

Outputs are told apart by their `max_tokens`, in classes of powers of two: what clients allow says a lot about what they
get. For an output of `n` tokens so far the forecast is a quantile of the lengths above `n` among the last ones of its
class. Until a class has been seen often enough, the forecast is `max_tokens` itself.

Which quantile is learned too. Each time memory runs out the quantile moves up; with each output that has ended it moves
down a little. So preemptions stay rare without memory standing idle.
"""

from __future__ import annotations

import bisect
from collections import defaultdict, deque

REMEMBERED = 256
"""Lengths kept per class."""
FEWEST = 8
"""Lengths of a class that must be known before they are believed."""
LOWEST_QUANTILE, HIGHEST_QUANTILE = 0.5, 0.99
STEP_UP, STEP_DOWN = 0.25, 0.005
"""Part of the way to the end of the range, per preemption and per output that has ended."""


class OutputLengths:
    """What is known about the lengths of outputs, in tokens."""

    def __init__(self) -> None:
        self._recent: defaultdict[int, deque[int]] = defaultdict(deque)
        self._sorted: defaultdict[int, list[int]] = defaultdict(list)
        self.quantile = (LOWEST_QUANTILE + HIGHEST_QUANTILE) / 2

    def learn(self, num_output_tokens: int, max_tokens: int) -> None:
        """An output has ended here, other than by preemption."""
        recent, ordered = self._recent[max_tokens.bit_length()], self._sorted[max_tokens.bit_length()]
        recent.append(num_output_tokens)
        bisect.insort(ordered, num_output_tokens)
        if len(recent) > REMEMBERED:
            ordered.pop(bisect.bisect_left(ordered, recent.popleft()))
        self.quantile += (LOWEST_QUANTILE - self.quantile) * STEP_DOWN

    def ran_out(self) -> None:
        """The forecasts were too low: memory ran out."""
        self.quantile += (HIGHEST_QUANTILE - self.quantile) * STEP_UP

    def forecast(self, num_output_tokens: int, max_tokens: int) -> int:
        """Length that an output of so many tokens so far will have; at most `max_tokens`."""
        ordered = self._sorted[max_tokens.bit_length()]
        start = bisect.bisect_right(ordered, num_output_tokens)
        if len(ordered) < FEWEST or start == len(ordered):
            return max_tokens
        return min(max_tokens, ordered[start + int((len(ordered) - start) * self.quantile)])
