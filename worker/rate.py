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

    def add(self, num_tokens: int, seconds: float) -> None:
        """A step computed `num_tokens` in `seconds`."""
        if seconds <= 0:
            return
        rate = num_tokens / seconds
        if self.tokens_per_second is None:
            self.tokens_per_second, self.step_seconds = rate, seconds
        else:
            self.tokens_per_second += SMOOTHING * (rate - self.tokens_per_second)
            self.step_seconds += SMOOTHING * (seconds - self.step_seconds)

    def seconds_for(self, num_tokens: int) -> float:
        """Time for so many prompt tokens; 0 until the rate is known."""
        return num_tokens / self.tokens_per_second if self.tokens_per_second else 0.0
