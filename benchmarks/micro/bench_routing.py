"""`make bench-routing`: cache-aware routing against round robin.

Two routers share the same workers, 2 of each tier, in one run; caches are emptied before each round. Loads:

* *one prefix*: users whose prompts begin with the same tokens, each with a question of its own;
* *own prefixes*: as many users, each with a long prefix of their own (a conversation, a document), in turns.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import tyro
from rich.console import Console
from rich.table import Table

from engine.model_store import DEFAULT_MODEL
from local_cluster.cluster import LocalCluster
from local_cluster.config import ClusterConfig
from router.config import Routing
from router_client.clients import AsyncClient, Client

QUESTION_TOKENS = 40
LOADS = ("one prefix", "own prefixes")


@dataclass
class Outcome:
    """Results of a load with one routing."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Found in the prefix cache of the prefill worker."""
    decode_cached_tokens: int = 0
    """Not transferred, since the decode worker had their pages."""
    ttft_ms: list[float] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that need not be computed."""
        return self.cached_tokens / self.prompt_tokens


async def _ask(client: AsyncClient, prompt: list[int], outcome: Outcome) -> None:
    started = time.perf_counter()
    stream = client.generate(prompt, max_tokens=8, temperature=0.0, ignore_eos=True, return_token_ids=True)
    await anext(aiter(stream))
    outcome.ttft_ms.append((time.perf_counter() - started) * 1e3)
    result = await stream.result()
    outcome.prompt_tokens += result.usage.prompt_tokens
    outcome.cached_tokens += result.usage.cached_tokens
    outcome.decode_cached_tokens += result.kv_transfer.decode_cached_tokens


def make_prompts(load: str, users: int, turns: int, prefix_tokens: int, ids: range, seed: int) -> list[list[list[int]]]:
    """[turns][users]: prompts of a load; users come in another order each turn."""
    rng = random.Random(seed)
    own = [rng.choices(ids, k=prefix_tokens) for _ in range(users)]
    prefixes = own[:1] * users if load == "one prefix" else own
    rounds = [[prefix + rng.choices(ids, k=QUESTION_TOKENS) for prefix in prefixes] for _ in range(turns)]
    for prompts in rounds:
        rng.shuffle(prompts)
    return rounds


async def run_load(address: str, rounds: Iterable[list[list[int]]], gap_seconds: float) -> Outcome:
    """Sends each round's prompts, `gap_seconds` apart, and waits for them before the next round."""
    outcome = Outcome()
    async with AsyncClient(address) as client:
        for prompts in rounds:
            tasks = []
            for prompt in prompts:
                tasks.append(asyncio.create_task(_ask(client, prompt, outcome)))
                await asyncio.sleep(gap_seconds)
            await asyncio.gather(*tasks)
    return outcome


def compare(
    cluster: LocalCluster, load: str, users: int, turns: int, prefix_tokens: int, ids: range, gap_seconds: float
) -> dict[str, Outcome]:
    """{routing: outcome} of one load: the cluster's router is cache-aware, a second router uses round robin."""
    by_turns = cluster.start_another_router("--routing", "round_robin")
    routers = {"cache_aware": cluster.address, "round_robin": by_turns.address}
    assert set(routers) == set(get_args(Routing))
    rounds = make_prompts(load, users, turns, prefix_tokens, ids, seed=len(load))
    outcomes = {}
    try:
        for routing, address in routers.items():
            with Client(address) as client:
                client.flush_prefix_cache()
            outcomes[routing] = asyncio.run(run_load(address, rounds, gap_seconds))
    finally:
        by_turns.popen.terminate()
        by_turns.popen.wait()
        cluster.forget(by_turns)
    return outcomes


def main(
    model: str = DEFAULT_MODEL,
    users: int = 8,
    turns: int = 4,
    prefix_tokens: int = 2000,
    num_pages: int = 900,
    gap_seconds: float = 0.3,
) -> None:
    """Compares both routings. num_pages: of each worker; 900 pages of 16 tokens hold 7 such prefixes."""
    console = Console()
    table = Table(
        title=f"{users} users, {turns} turns, prefixes of {prefix_tokens} tokens; 2 prefill + 2 decode workers"
    )
    for column in ("load", "routing", "hit rate", "not sent", "TTFT p50 ms", "mean ms"):
        table.add_column(column, justify="right")
    with tempfile.TemporaryDirectory() as logs:
        config = ClusterConfig(model=model, prefill=2, decode=2, num_pages=num_pages, port=0, log_dir=Path(logs))
        with LocalCluster(config) as cluster:
            for load in LOADS:
                console.print(f"running {load} ...")
                outcomes = compare(cluster, load, users, turns, prefix_tokens, range(10, 40000), gap_seconds)
                for routing, outcome in outcomes.items():
                    table.add_row(
                        load,
                        routing,
                        f"{outcome.hit_rate:.2f}",
                        f"{outcome.decode_cached_tokens / outcome.prompt_tokens:.2f}",
                        f"{statistics.median(outcome.ttft_ms):.0f}",
                        f"{statistics.mean(outcome.ttft_ms):.0f}",
                    )
    console.print(table)


if __name__ == "__main__":
    tyro.cli(main)
