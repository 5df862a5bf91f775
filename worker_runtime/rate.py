"""How fast this worker computes prompts, learned from its own steps."""

from __future__ import annotations

SMOOTHING = 0.2
"""Share of the newest step in the averages."""


class Rate:
    """Smoothed rate and step time. Pure: durations are given."""

    def __init__(self) -> None:
        self.tokens_per_second: float | None = None
        """None until a step was seen."""
        self.step_seconds = 0.0
        self._tokens = self._steps = 0
        self._seconds = 0.0

    def add(self, num_tokens: int, seconds: float, is_over: bool = True, least_tokens: int = 0) -> None:
        """A step computed `num_tokens` in `seconds`.

        is_over: its end was waited for; a step that was only launched counts together with the next ones.
        least_tokens: steps with fewer say little, since most of their time goes to reading weights.
        """
        self._tokens, self._seconds, self._steps = self._tokens + num_tokens, self._seconds + seconds, self._steps + 1
        if not is_over:
            return
        tokens, total, steps = self._tokens, self._seconds, self._steps
        self._tokens, self._seconds, self._steps = 0, 0.0, 0
        if total <= 0 or tokens < least_tokens * steps:
            return
        rate, step_seconds = tokens / total, total / steps
        if self.tokens_per_second is None:
            self.tokens_per_second, self.step_seconds = rate, step_seconds
        else:
            self.tokens_per_second += SMOOTHING * (rate - self.tokens_per_second)
            self.step_seconds += SMOOTHING * (step_seconds - self.step_seconds)

    def seconds_for(self, num_tokens: int) -> float:
        """Time for so many prompt tokens; 0 until the rate is known."""
        return num_tokens / self.tokens_per_second if self.tokens_per_second else 0.0
