"""`kvferry demo`: starts a cluster, sends one long prompt, and shows the time of each stage."""

from __future__ import annotations

import importlib.resources
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from engine.model_store import ModelUnavailable
from kvferry.client import Client, KvferryError, Result
from local_cluster.cluster import LocalCluster
from local_cluster.config import ClusterConfig
from local_cluster.process import StartFailed

QUESTION = "\n\nWhat is the name of the island?"
STAGES = (
    ("queued", "in the router's queue"),
    ("reserved", "pages set aside by the decode worker"),
    ("prefill_started", "first chunk started"),
    ("prefill_finished", "last chunk computed, first token sampled"),
    ("first_token", "first token sent to the client"),
    ("transfer_finished", "every KV page written to the decode worker"),
    ("decode_started", "first decode step started"),
    ("finished", "last token sampled"),
)


def run_demo(model: str, max_tokens: int) -> int:
    """Returns the exit code."""
    console = Console()
    text = importlib.resources.files("kvferry").joinpath("data/harbour_log.txt").read_text()
    with tempfile.TemporaryDirectory(prefix="kvferry-demo-") as logs:
        config = ClusterConfig(model=model, max_model_len=4096, port=0, log_dir=Path(logs))
        try:
            console.print(f"starting a router, a prefill worker and a decode worker for {model} ...")
            with LocalCluster(config) as cluster, Client(cluster.address) as client:
                for process in cluster.processes:
                    console.print(f"  {process.name}: pid {process.pid}, {process.address}")
                prompt = [{"role": "user", "content": text + QUESTION}]
                console.print(f"\n[bold]{text[:120].strip()} ...[/bold]{QUESTION}\n", highlight=False)
                stream = client.generate(prompt, temperature=0.0, max_tokens=max_tokens)
                for piece in stream:
                    print(piece.text, end="", flush=True)
                print("\n")
                result = stream.result()
        except (StartFailed, ModelUnavailable, KvferryError) as error:
            print(f"kvferry: error: {error}", file=sys.stderr)
            return 2
    console.print(_stage_table(result))
    console.print(_transfer_table(result))
    return 0


def _stage_table(result: Result) -> Table:
    table = Table("stage", "reached at ms", "after ms", title="one request")
    before = 0.0
    for name, meaning in STAGES:
        at = result.timings_ms[name]
        table.add_row(f"{name}: {meaning}", f"{at:.1f}", f"{at - before:+.1f}")
        before = at
    return table


def _transfer_table(result: Result) -> Table:
    moved = result.kv_transfer
    table = Table("what", "value", title="KV transfer")
    share = moved.bytes_while_computing / moved.bytes if moved.bytes else 0.0
    for what, value in (
        ("prompt tokens", f"{result.usage.prompt_tokens}"),
        ("chunks", f"{moved.num_chunks}"),
        ("prompt tokens computed by decode", f"{moved.decode_computed_prompt_tokens}"),
        ("output tokens", f"{result.usage.completion_tokens}, ended by {result.finish_reason}"),
        ("KV bytes moved", f"{moved.bytes:,}"),
        ("transport", moved.transport),
        ("while a write was open", f"{moved.gb_per_s:.2f} GB/s"),
        ("sent while still computing", f"{share:.0%}"),
    ):
        table.add_row(what, value)
    return table
