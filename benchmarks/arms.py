"""The arms of a comparison, and the proof that they are matched: same cores, pages, model, prompts, arrivals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.arrivals import arrival_times
from benchmarks.workload import Lengths, LoadRequest, scaled, synthetic, with_arrivals
from engine.config import DTypeName
from engine.model_store import DEFAULT_MODEL
from local_cluster.config import ClusterConfig
from local_cluster.process import share_of_cores

MakeRequests = Callable[[int, int], list[LoadRequest]]
"""(count, seed) to requests without arrival times."""


@dataclass(frozen=True)
class Arm:
    """One way to use the machine."""

    name: str
    cluster: ClusterConfig

    @property
    def is_two_tier(self) -> bool:
        """Whether prompts and answers are computed by different workers."""
        return self.cluster.num_colocated == 0

    @property
    def cores(self) -> int:
        """Cores of all workers together; router and load generator take what is left, the same in every arm."""
        number = self.cluster.num_workers
        return sum(share_of_cores(place, number)[1] for place in range(number))

    @property
    def pages(self) -> int:
        """KV pages of all workers together."""
        assert isinstance(self.cluster.num_pages, int)
        return self.cluster.num_pages * self.cluster.num_workers


@dataclass(frozen=True)
class Load:
    """A kind of traffic, by name."""

    name: str
    describe: str
    make: MakeRequests

    def requests(self, rate: float, seconds: float, seed: int) -> list[LoadRequest]:
        """What is offered for `seconds` at `rate`: depends on these numbers only, so every arm gets the same."""
        count = max(1, round(rate * seconds))
        return with_arrivals(self.make(count, seed), arrival_times("poisson", rate, count, seed))


class NotMatched(ValueError):
    """Two arms differ in something that a comparison has to keep equal."""


MATCHED = ("model", "dtype", "page_size", "max_model_len", "max_num_sequences", "prefix_cache", "decode_prefix_cache")


def check_matched(arms: list[Arm]) -> None:
    """Raises NotMatched naming what differs, with both values."""
    first = arms[0]
    for arm in arms[1:]:
        for name in MATCHED:
            one, other = getattr(first.cluster, name), getattr(arm.cluster, name)
            if one != other:
                raise NotMatched(f"{name}: {first.name} has {one}, {arm.name} has {other}")
        for name in ("cores", "pages"):
            one, other = getattr(first, name), getattr(arm, name)
            if one != other:
                raise NotMatched(f"{name}: {first.name} has {one} in all, {arm.name} has {other}")


def make_arms(
    num_workers: int,
    splits: list[tuple[int, int]],
    token_budgets: list[int],
    pages_per_worker: int,
    model: str = DEFAULT_MODEL,
    dtype: DTypeName = "auto",
    max_model_len: int | None = None,
    max_num_sequences: int = 32,
) -> list[Arm]:
    """Colocated arms, one per token budget, and one two-tier arm per split (prefill, decode). Raises NotMatched."""
    common = ClusterConfig(
        model=model,
        dtype=dtype,
        num_pages=pages_per_worker,
        max_model_len=max_model_len,
        max_num_sequences=max_num_sequences,
        port=0,
    )
    arms = [
        Arm(
            f"{num_workers} colocated, budget {budget}",
            replace(common, prefill=0, decode=0, colocated=num_workers, token_budget=budget),
        )
        for budget in token_budgets
    ]
    arms += [
        Arm(f"{prefill} prefill + {decode} decode", replace(common, prefill=prefill, decode=decode))
        for prefill, decode in splits
    ]
    check_matched(arms)
    return arms


def standard_loads() -> dict[str, Load]:
    """Loads made of drawn lengths."""

    def drawn(prompt: Lengths, output: Lengths) -> MakeRequests:
        return lambda count, seed: scaled(synthetic(count, prompt, output, seed), 1.0, 1800, 240)

    return {
        load.name: load
        for load in (
            Load(
                "long-prompts",
                "prompts of about 1,000 tokens, answers of 16",
                drawn(Lengths("lognormal", 1000, 0.3), Lengths("fixed", 16)),
            ),
            Load(
                "long-answers",
                "prompts of about 64 tokens, answers of 128",
                drawn(Lengths("lognormal", 64, 0.3), Lengths("fixed", 128)),
            ),
            Load(
                "mixed",
                "prompts of about 300 tokens (some very long), answers of about 64",
                drawn(Lengths("lognormal", 300, 0.8), Lengths("lognormal", 64, 0.5)),
            ),
        )
    }
