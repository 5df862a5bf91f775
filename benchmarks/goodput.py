"""Goodput: the highest offered rate at which attainment stays at or above a target. Found by bisection; pure.

The search doubles or halves its rate until one rate attains the target and a higher one does not, then halves the ratio
between them. The answer is where a straight line between those two crosses the target.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.metrics import wilson_interval

LOWEST_RATE = 1e-3


@dataclass(frozen=True)
class Trial:
    """One measured rate."""

    rate: float
    met: int
    offered: int

    def __add__(self, other: Trial) -> Trial:
        """The same rate, measured once more."""
        return Trial(self.rate, self.met + other.met, self.offered + other.offered)

    @property
    def attainment(self) -> float:
        """Share of offered requests that met every SLO."""
        return self.met / self.offered if self.offered else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """95 % confidence interval of the attainment."""
        return wilson_interval(self.met, self.offered)


class GoodputSearch:
    """Says which rate to try next."""

    def __init__(self, first_rate: float, max_trials: int, target: float = 0.9, tolerance: float = 1.1) -> None:
        """tolerance: the search ends when the rates that attain and miss the target are as near as this ratio."""
        self.trials: list[Trial] = []
        self._first_rate, self._max_trials, self._target, self._tolerance = first_rate, max_trials, target, tolerance

    @property
    def attained(self) -> Trial | None:
        """The highest rate below every rate that missed, if it attained the target."""
        missed = self.missed
        below = [t for t in self.trials if self._is_attained(t) and (missed is None or t.rate < missed.rate)]
        return max(below, key=lambda t: t.rate, default=None)

    @property
    def missed(self) -> Trial | None:
        """The lowest rate that missed the target."""
        return min((t for t in self.trials if not self._is_attained(t)), key=lambda t: t.rate, default=None)

    def next_rate(self) -> float | None:
        """The rate to measure now; None: the search is over."""
        if not self.trials:
            return self._first_rate
        low, high = self.attained, self.missed
        if len(self.trials) >= self._max_trials:
            return None
        if high is None:
            return max(t.rate for t in self.trials) * 2
        if low is None:
            return high.rate / 2 if high.rate > LOWEST_RATE else None
        if high.rate / low.rate <= self._tolerance:
            return None
        return float((low.rate * high.rate) ** 0.5)

    def add(self, trial: Trial) -> None:
        """A rate was measured."""
        self.trials.append(trial)

    @property
    def goodput(self) -> float:
        """Requests per second; 0 if no measured rate attained the target. A lower bound if none missed it."""
        low, high = self.attained, self.missed
        if low is None:
            return 0.0
        if high is None:
            return low.rate
        share = (low.attainment - self._target) / (low.attainment - high.attainment)
        return low.rate + share * (high.rate - low.rate)

    def interval(self, seed: int = 0, draws: int = 2000) -> tuple[float, float]:
        """95 % confidence interval of the goodput, by parametric bootstrap: counts drawn anew for each measured rate.

        Rates that were not measured are not in it, so it can't be narrower than the search was fine.
        """
        random = np.random.default_rng(seed)
        found = []
        for _ in range(draws):
            drawn = GoodputSearch(self._first_rate, self._max_trials, self._target, self._tolerance)
            for trial in self.trials:
                # Agresti-Coull: a share of 0 or 1 among few does not mean that it is so always.
                share = (trial.met + 2) / (trial.offered + 4)
                drawn.add(Trial(trial.rate, int(random.binomial(trial.offered, share)), trial.offered))
            found.append(drawn.goodput)
        low, high = np.percentile(found, [2.5, 97.5]) if found else (0.0, 0.0)
        return float(low), float(high)

    def _is_attained(self, trial: Trial) -> bool:
        return trial.attainment >= self._target
