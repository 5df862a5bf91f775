"""`make bench-policy`: one long prompt, then twenty short ones, under both orders, from one run.

Real clusters of three processes each, one after the other. Times are at the client.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from dataclasses import dataclass
from typing import get_args

import tyro
from rich.console import Console
from rich.table import Table

from engine.config import DTypeName
from engine.model_store import DEFAULT_MODEL
from local_cluster.cluster import LocalCluster
from local_cluster.config import ClusterConfig
from router_client.clients import AsyncClient
from rpc.prompt_order import PromptOrder


@dataclass(frozen=True)
class Outcome:
    """Seconds from sending to the first token."""

    long: float
    short: list[float]


async def _ttft(client: AsyncClient, prompt: list[int]) -> float:
    started = time.perf_counter()
    stream = client.generate(prompt, max_tokens=1, temperature=0.0, ignore_eos=True, return_token_ids=True)
    await anext(aiter(stream))
    elapsed = time.perf_counter() - started
    await stream.result()
    return elapsed


async def _load(address: str, long_tokens: int, num_short: int, short_tokens: int) -> Outcome:
    rng = random.Random(0)

    def prompt(length: int) -> list[int]:
        return rng.choices(range(10, 40000), k=length)

    async with AsyncClient(address) as client:
        await _ttft(client, prompt(short_tokens))  # warm-up, not measured
        long = asyncio.create_task(_ttft(client, prompt(long_tokens)))
        await asyncio.sleep(0.2)  # the long one is being computed when the short ones come
        short = await asyncio.gather(*(_ttft(client, prompt(short_tokens)) for _ in range(num_short)))
        return Outcome(await long, list(short))


def main(
    model: str = DEFAULT_MODEL,
    dtype: DTypeName = "auto",
    long_tokens: int = 6000,
    short_tokens: int = 50,
    num_short: int = 20,
    token_budget: int = 512,
) -> None:
    """Compares the orders of the prefill tier."""
    console = Console()
    table = Table(
        title=f"one prompt of {long_tokens} tokens, then {num_short} of {short_tokens}; budget {token_budget}"
    )
    for column in ("order", "short: TTFT p50 s", "p95 s", "max s", "long: TTFT s"):
        table.add_column(column, justify="right")
    outcomes: dict[str, Outcome] = {}
    for order in get_args(PromptOrder):
        console.print(f"running {order} ...")
        config = ClusterConfig(
            model=model, dtype=dtype, token_budget=token_budget, prompt_order=order, port=0, log_level="error"
        )
        with LocalCluster(config) as cluster:
            outcome = asyncio.run(_load(cluster.address, long_tokens, num_short, short_tokens))
        outcomes[order] = outcome
        p95 = statistics.quantiles(outcome.short, n=20)[-1]
        figures = (statistics.median(outcome.short), p95, max(outcome.short), outcome.long)
        table.add_row(order, *(f"{seconds:.2f}" for seconds in figures))
    console.print(table)
    fcfs, bounded = outcomes["fcfs"], outcomes["bounded_slowdown"]
    short_ratio = statistics.median(bounded.short) / statistics.median(fcfs.short)
    console.print(f"bounded_slowdown / fcfs: short p50 {short_ratio:.2f}, long {bounded.long / fcfs.long:.2f}")


if __name__ == "__main__":
    tyro.cli(main)
