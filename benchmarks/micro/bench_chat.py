"""`make bench-chat`: a conversation of several turns with and without decode's prefix cache.

Two clusters, equal but for that cache, get the same turns alternately, so that both see the same machine. Each turn
is the whole conversation so far and a new message; prefill's prefix cache is on in both.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

from engine.model_store import DEFAULT_MODEL
from local_cluster.cluster import LocalCluster
from local_cluster.config import ClusterConfig
from router_client.clients import Client
from router_client.results import Result

MESSAGE = "Tell me more about the ships that passed the point in the year after the great storm. " * 8


def ask(client: Client, prompt: list[int], max_tokens: int) -> tuple[Result, float]:
    """The output and its time to first token in milliseconds, at the client."""
    started = time.perf_counter()
    stream = client.generate(prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True, return_token_ids=True)
    next(iter(stream))
    ttft = (time.perf_counter() - started) * 1e3
    return stream.result(), ttft


def main(model: str = DEFAULT_MODEL, turns: int = 6, max_tokens: int = 60, repeats: int = 3) -> None:
    """Runs the conversation `repeats` times on both clusters; the table shows the last run's bytes and median TTFT."""
    console = Console()
    arms = {"with": True, "without": False}
    ttft: dict[tuple[str, int], list[float]] = {}
    results: dict[tuple[str, int], Result] = {}
    with tempfile.TemporaryDirectory() as logs, ExitStack() as stack:
        clients = {}
        for name, decode_prefix_cache in arms.items():
            config = ClusterConfig(
                model=model, decode_prefix_cache=decode_prefix_cache, port=0, log_dir=Path(logs) / name
            )
            clients[name] = stack.enter_context(Client(stack.enter_context(LocalCluster(config)).address))
        message = clients["with"].tokenize(MESSAGE)
        for client in clients.values():
            ask(client, message[:20], 4)
        for _ in track(range(repeats), "conversations", console=console, transient=True):
            talk: list[int] = []
            for client in clients.values():
                client.flush_prefix_cache()
            for turn in range(turns):
                talk += message
                for name, client in clients.items():
                    results[name, turn], milliseconds = ask(client, talk, max_tokens)
                    ttft.setdefault((name, turn), []).append(milliseconds)
                # In bf16 the two may differ: KV of the output is computed by decode in one, by prefill in the other.
                talk += results["with", turn].token_ids
    table = Table(title=f"{turns} turns, {max_tokens} tokens each; MB moved and TTFT, median of {repeats}")
    for column in ("turn", "prompt tokens", "already at decode", "MB with", "MB without", "TTFT ms with", "without"):
        table.add_column(column, justify="right")
    for turn in range(turns):
        kept, sent = results["with", turn], results["without", turn]
        medians = [sorted(ttft[name, turn])[repeats // 2] for name in arms]
        table.add_row(
            str(turn + 1),
            str(kept.usage.prompt_tokens),
            str(kept.kv_transfer.decode_cached_tokens),
            f"{kept.kv_transfer.bytes / 1e6:.2f}",
            f"{sent.kv_transfer.bytes / 1e6:.2f}",
            *(f"{median:.0f}" for median in medians),
        )
    console.print(table)
    moved = [sum(results[name, turn].kv_transfer.bytes for turn in range(turns)) for name in arms]
    console.print(
        f"all turns: {moved[0] / 1e6:.1f} MB with, {moved[1] / 1e6:.1f} MB without: 1/{moved[1] / moved[0]:.1f}"
    )


if __name__ == "__main__":
    tyro.cli(main)
