"""What a comparison says, in words: who wins, by how much, why, and on which side of break-even the load is."""

from __future__ import annotations

from statistics import mean

from benchmarks.compare import ArmResult, Comparison

LATE_SHARE = 0.02
"""Share of requests sent late from which on it is said."""
CLEAR = 1.05
"""A goodput ratio within this factor of 1 is called even, and so is one whose confidence intervals overlap."""


def ratio(comparison: Comparison) -> float | None:
    """Goodput of the best split over that of the best colocated arm; None if the latter has none, or one is missing."""
    one, two = comparison.best_colocated, comparison.best_two_tier
    return two.goodput / one.goodput if one and two and one.goodput else None


def verdict(comparison: Comparison) -> list[str]:
    """Sentences."""
    one, two = comparison.best_colocated, comparison.best_two_tier
    sentences = _of_tiers(one, two, comparison) if one and two else _of_servers(comparison)
    sentences += [_latencies(comparison), *_idle(comparison)]
    late = max(
        (run.summary["late_requests"] / run.summary["offered"] for r in comparison.arms for run in r.runs), default=0
    )
    if late > LATE_SHARE:
        sentences.append(f"The load generator fell behind in some run ({late:.0%} of its requests): trust it less.")
    limited = [run for result in comparison.arms for run in result.runs if run.generator_was_limit]
    if limited:
        worst = max(run.generator_lag_ms for run in limited)
        sentences.append(
            f"The load generator was the limit in {len(limited)} runs: it looked up to {worst:.0f} ms late (p99), and "
            "latencies of these runs are its own as much as the server's."
        )
    bounds = [result.name for result in comparison.arms if result.is_lower_bound]
    if bounds:
        sentences.append(f"No measured rate missed the target: the goodput of {_listed(bounds)} is a lower bound.")
    return sentences


def _demand(comparison: Comparison) -> str:
    slo = comparison.slo
    return f"TTFT {slo.ttft_ms:.0f} ms and TPOT {slo.tpot_ms:.0f} ms" if slo.ttft_ms and slo.tpot_ms else "the SLO"


def _of_tiers(one: ArmResult, two: ArmResult, comparison: Comparison) -> list[str]:
    share, demand = ratio(comparison), _demand(comparison)
    if share is None:
        return [f"{one.name}, the best baseline, met {demand} at no measured rate; {two.name} at {two.goodput:.2f}/s."]
    is_even = 1 / CLEAR < share < CLEAR or _overlap(one.interval, two.interval)
    numbers = f"{two.name} {two.goodput:.2f} requests/s, {one.name} {one.goodput:.2f}, a ratio of {share:.2f}"
    if is_even:
        return [
            f"For {comparison.describe}, at {demand}, neither wins for sure: {numbers}; the intervals nearly overlap.",
            "On which side of break-even this load is, this much data does not decide.",
        ]
    winner = two if share > 1 else one
    where = "on the side where splitting pays" if share > 1 else "on the side where it does not"
    return [f"For {comparison.describe}, at {demand}, {winner.name} wins: {numbers}.", f"This load is {where}."]


def _of_servers(comparison: Comparison) -> list[str]:
    ranked = sorted(comparison.arms, key=lambda arm: -arm.goodput)
    numbers = ", ".join(f"{arm.name} {arm.goodput:.2f}" for arm in ranked)
    first = f"For {comparison.describe}, at {_demand(comparison)}: goodput, requests/s: {numbers}."
    if len(ranked) < 2:
        return [first]
    if not ranked[1].goodput:
        who = f"Only {ranked[0].name}" if ranked[0].goodput else "None"
        return [first, f"{who} met the limits at any measured rate."]
    share = ranked[0].goodput / ranked[1].goodput
    is_even = share < CLEAR or _overlap(ranked[0].interval, ranked[1].interval)
    if is_even:
        return [first, f"{ranked[0].name} is not ahead for sure: the intervals (nearly) overlap."]
    return [first, f"{ranked[0].name} wins: {share:.2f} times the goodput of {ranked[1].name}."]


def _latencies(comparison: Comparison) -> str:
    """At one rate for all: at different ones a comparison flatters whoever does less."""
    rate = comparison.shared_rate
    if rate is None:
        none = [arm.name for arm in comparison.arms if not arm.has_attained]
        return f"Latencies are not compared: {_listed(none)} attained no measured rate."
    parts = []
    for arm in comparison.arms:
        numbers = arm.at(rate)
        keys = ("median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms")
        ttft, ttft99, itl, itl99 = ("-" if numbers[key] is None else f"{numbers[key]:.0f}" for key in keys)
        parts.append(f"{arm.name}: TTFT {ttft} and {ttft99}, ITL {itl} and {itl99}")
    return f"At {rate:.2f} requests/s, which every arm attains, p50 and p99 in ms: {'; '.join(parts)}."


def _idle(comparison: Comparison) -> list[str]:
    two, one, rate = comparison.best_two_tier, comparison.best_colocated, comparison.shared_rate
    if two is None or one is None or rate is None:
        return []
    idle, both = two.idle_at(rate), one.idle_at(rate)
    if not idle or not both:
        return []
    each = ", ".join(f"{name} {share:.0%}" for name, share in sorted(idle.items()))
    return [
        f"At that rate the split leaves idle: {each}; the colocated workers {mean(both.values()):.0%} on average. A "
        "tier that idles is capacity that the other can't use; a step that holds a prompt delays every answer in it."
    ]


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _overlap(one: tuple[float, float], two: tuple[float, float]) -> bool:
    return max(one[0], two[0]) <= min(one[1], two[1])
