"""What a comparison says, in words: who wins, by how much, why, and on which side of break-even the load is."""

from __future__ import annotations

from statistics import mean

from benchmarks.compare import ArmResult, Comparison, Run

LATE_SHARE = 0.02
"""Share of requests sent late from which on it is said."""
CLEAR = 1.05
"""A goodput ratio within this factor of 1 is called even, and so is one whose confidence intervals overlap."""


def ratio(comparison: Comparison) -> float | None:
    """Goodput of the best split over that of the best colocated arm; None if the latter has none."""
    base = comparison.best_colocated.goodput
    return comparison.best_two_tier.goodput / base if base else None


def verdict(comparison: Comparison) -> list[str]:
    """Sentences."""
    one, two = comparison.best_colocated, comparison.best_two_tier
    share = ratio(comparison)
    is_even = share is not None and (1 / CLEAR < share < CLEAR or _overlap(one.interval, two.interval))
    sentences = [_outcome(one, two, share, is_even, comparison), _why(one, two)]
    if share is not None:
        where = "on the side where splitting pays" if share > 1 else "on the side where it does not"
        sentences.append(
            "On which side of break-even this load is, this much data does not decide."
            if is_even
            else f"This load is {where}."
        )
    late = max(
        (run.summary["late_requests"] / run.summary["offered"] for r in comparison.arms for run in r.runs), default=0
    )
    if late > LATE_SHARE:
        sentences.append(f"The load generator fell behind in some run ({late:.0%} of its requests): trust it less.")
    if any(result.is_lower_bound for result in (one, two)):
        sentences.append("A search ended before any rate missed the target: such a goodput is a lower bound.")
    return sentences


def _outcome(one: ArmResult, two: ArmResult, share: float | None, is_even: bool, comparison: Comparison) -> str:
    slo = comparison.slo
    demand = f"TTFT {slo.ttft_ms:.0f} ms and TPOT {slo.tpot_ms:.0f} ms" if slo.ttft_ms and slo.tpot_ms else "the SLO"
    if share is None:
        return f"{one.name}, the best baseline, met {demand} at no measured rate; {two.name} at {two.goodput:.2f}/s."
    numbers = f"{two.name} {two.goodput:.2f} requests/s, {one.name} {one.goodput:.2f}, a ratio of {share:.2f}"
    if is_even:
        return (
            f"For {comparison.describe}, at {demand}, neither wins for sure: {numbers}; the intervals (nearly) overlap."
        )
    winner = two if share > 1 else one
    return f"For {comparison.describe}, at {demand}, {winner.name} wins: {numbers}."


def _why(one: ArmResult, two: ArmResult) -> str:
    """From the runs nearest to each arm's goodput."""
    colocated, split = _nearest(one), _nearest(two)
    idle = ", ".join(f"{name} {1 - busy:.0%}" for name, busy in sorted(split.busy.items()))
    tail = ""
    gaps = [run.summary["p99_itl_ms"] for run in (colocated, split)]
    if all(gap is not None for gap in gaps):
        tail = f" p99 ITL there: {gaps[0]:.0f} ms colocated, {gaps[1]:.0f} ms split."
    both = f"{1 - mean(colocated.busy.values()):.0%}"
    return (
        f"Near its goodput the split leaves idle: {idle}; the colocated workers {both} on average. A tier that idles "
        f"is capacity that the other can't use; a step that holds a prompt delays every answer in it.{tail}"
    )


def _nearest(result: ArmResult) -> Run:
    return min(result.runs, key=lambda run: abs(run.rate - result.goodput))


def _overlap(one: tuple[float, float], two: tuple[float, float]) -> bool:
    return max(one[0], two[0]) <= min(one[1], two[1])
