"""Goodput: the highest offered rate at which attainment stays at or above a target. Found by bisection; pure.

The search doubles or halves its rate until one rate attains the target and a higher one does not, then halves the ratio
between them. The result comes from all measured rates: attainment can only fall as the rate rises, so the counts are
smoothed to fall (isotonic regression), and the result is where a straight line between them crosses the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import isotonic_regression

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
        """The highest rate that attained the target, all counts considered."""
        return max((t for t, share in self._smoothed() if share >= self._target), key=lambda t: t.rate, default=None)

    @property
    def missed(self) -> Trial | None:
        """The lowest rate that missed the target, all counts considered."""
        return min((t for t, share in self._smoothed() if share < self._target), key=lambda t: t.rate, default=None)

    def _smoothed(self) -> list[tuple[Trial, float]]:
        """Trials, lowest rate first, with their smoothed attainment."""
        trials = sorted(self.trials, key=lambda t: t.rate)
        return list(zip(trials, falling([(t.met, t.offered) for t in trials]), strict=True))

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
        """Requests per second. A lower bound if no measured rate missed the target."""
        counts = sorted((t.rate, t.met, t.offered) for t in self.trials)
        return crossing(counts, self._target)

    def interval(self, seed: int = 0, draws: int = 2000) -> tuple[float, float]:
        """95 % confidence interval of the goodput, by parametric bootstrap: counts drawn anew for each measured rate.

        Rates that were not measured are not in it, so it can't be narrower than the search was fine.
        """
        random = np.random.default_rng(seed)
        trials = sorted(self.trials, key=lambda t: t.rate)
        found = []
        for _ in range(draws):
            # Jeffreys' prior: a share of 0 or 1 among few does not mean that it is so always.
            shares = [random.beta(t.met + 0.5, t.offered - t.met + 0.5) for t in trials]
            drawn = [(t.rate, share * t.offered, t.offered) for t, share in zip(trials, shares, strict=True)]
            found.append(crossing(drawn, self._target))
        low, high = np.percentile(found, [2.5, 97.5]) if found else (0.0, 0.0)
        return float(low), float(high)


def crossing(counts: Sequence[tuple[float, float, float]], target: float) -> float:
    """The rate at which the share crosses the target; without load it is 1. counts: (rate, met, offered), lowest first.

    0 if nothing was measured, or if the share is 0 at every rate.
    """
    rates, shares = [rate for rate, _, _ in counts], falling([(met, offered) for _, met, offered in counts])
    attained = [index for index, share in enumerate(shares) if share >= target]
    if not attained:
        return rates[0] * (1 - target) / (1 - shares[0]) if shares and shares[0] > 0 else 0.0
    last = attained[-1]
    if last + 1 == len(rates):
        return rates[last]
    part = (shares[last] - target) / (shares[last] - shares[last + 1])
    return rates[last] + part * (rates[last + 1] - rates[last])


def falling(counts: Sequence[tuple[float, float]]) -> list[float]:
    """Shares met/offered, smoothed so that they never rise (isotonic regression, weighted by what was offered)."""
    if not counts:
        return []
    shares = [met / offered for met, offered in counts]
    weights = [offered for _, offered in counts]
    return [float(share) for share in isotonic_regression(shares, weights=weights, increasing=False).x]
