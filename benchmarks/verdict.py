"""What a comparison says, in words: who wins, by how much, why, and on which side of break-even the load is."""

from __future__ import annotations

from statistics import mean

from benchmarks.compare import ArmResult, Comparison, Run

CLEAR = 1.1
"""A goodput ratio within this factor of 1 is called even."""


def ratio(comparison: Comparison) -> float | None:
    """Goodput of the best split over that of the best colocated arm; None if the latter has none."""
    base = comparison.best_colocated.goodput
    return comparison.best_two_tier.goodput / base if base else None


def verdict(comparison: Comparison) -> list[str]:
    """Sentences."""
    one, two = comparison.best_colocated, comparison.best_two_tier
    share = ratio(comparison)
    sentences = [_winner(one, two, share, comparison)]
    overlap = _overlap(one.goodputs, two.goodputs)
    if overlap:
        sentences.append("The repeats of the two overlap, so the difference is within the noise of this machine.")
    sentences.append(_why(one, two))
    if share is not None:
        side = "even" if overlap or 1 / CLEAR < share < CLEAR else ("split" if share > 1 else "colocated")
        where = {
            "even": "at break-even: choose by operations, not by speed",
            "split": "on the side where splitting pays",
            "colocated": "on the side where it does not",
        }[side]
        sentences.append(f"This load is {where}.")
    return sentences


def _winner(one: ArmResult, two: ArmResult, share: float | None, comparison: Comparison) -> str:
    slo = comparison.slo
    demand = f"TTFT {slo.ttft_ms:.0f} ms and TPOT {slo.tpot_ms:.0f} ms" if slo.ttft_ms and slo.tpot_ms else "the SLO"
    if share is None:
        return (
            f"The best colocated arm ({one.name}) met {demand} at no measured rate; {two.name} at {two.goodput:.2f}/s."
        )
    winner, loser, factor = (two, one, share) if share >= 1 else (one, two, 1 / share if share else float("inf"))
    return (
        f"For {comparison.describe}, at {demand}, {winner.name} wins: {winner.goodput:.2f} against "
        f"{loser.goodput:.2f} requests/s of {loser.name}, {factor:.2f} times as much."
    )


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


def _overlap(one: list[float], two: list[float]) -> bool:
    return bool(one and two) and max(min(one), min(two)) <= min(max(one), max(two))
