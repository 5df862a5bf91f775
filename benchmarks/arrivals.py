"""When requests are sent: arrival times in seconds from the start."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import numpy as np

ArrivalKind = Literal["poisson", "gamma", "fixed", "ramp"]


def arrival_times(
    kind: ArrivalKind,
    rate: float,
    count: int,
    seed: int,
    burstiness: float = 1.0,
    end_rate: float | None = None,
) -> list[float]:
    """`count` arrival times at `rate` requests per second on average; inf: all at once.

    poisson: independent arrivals. gamma: gaps of a gamma distribution with shape `burstiness`; below 1 more bursty than
    Poisson, above more regular. fixed: equal gaps. ramp: Poisson with a rate that goes linearly to `end_rate`.
    Raises ValueError naming what is wrong.
    """
    if not rate > 0:
        raise ValueError(f"--rate is {rate}; it must be above 0")
    if kind == "ramp" and not math.isfinite(rate):
        raise ValueError("--rate is inf; a ramp needs a rate to begin with")
    if not burstiness > 0:
        raise ValueError(f"--burstiness is {burstiness}; it must be above 0")
    if end_rate is not None and not end_rate > 0:
        raise ValueError(f"--end-rate is {end_rate}; it must be above 0")
    # A separate random stream: lengths are drawn with the same seed, and must not correlate with the gaps.
    random = np.random.default_rng((seed, 1))
    match kind:
        case "fixed":
            gaps = np.full(count, 1 / rate)
        case "gamma":
            gaps = random.gamma(burstiness, 1 / (rate * burstiness), count)
        case "poisson":
            gaps = random.exponential(1 / rate, count)
        case "ramp":
            last = end_rate if end_rate is not None else 2 * rate
            gaps = random.exponential(1.0, count) / np.linspace(rate, last, count)
    return list(map(float, np.cumsum(gaps) - gaps[0])) if count else []


def scaled_to_rate(times: list[float], speed: float) -> Iterator[float]:
    """A trace's times from its first on, `speed` times as fast."""
    if not speed > 0:
        raise ValueError(f"--speed is {speed}; it must be above 0")
    start = times[0] if times else 0.0
    return ((time - start) / speed for time in times)
