"""`kvferry bench run`: one load on one endpoint, measured at the client."""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.config import RunCommand
from benchmarks.driver import GeneratorLoad, closed_loop, duration_of, open_loop, watched
from benchmarks.loads import make_requests, timed
from benchmarks.metrics import Slo, summarise
from benchmarks.output import check_writable
from benchmarks.records import RequestRecord
from benchmarks.targets import GrpcTarget, OpenAiTarget, Target
from benchmarks.workload import LoadRequest, salted

MAIN_NUMBERS = (
    "offered",
    "completed",
    "failed",
    "statuses",
    "duration",
    "request_throughput",
    "output_throughput",
    "total_input_tokens",
    "total_output_tokens",
    "cached_share",
    "total_kv_bytes",
    "slo_attainment",
    "request_goodput",
)
WARMUP_SEED = 1_000_003
"""Apart from any seed of a measured load, so that no measured prompt was seen before."""


def _target(command: RunCommand) -> Target:
    if command.openai_url:
        return OpenAiTarget(
            command.openai_url,
            command.model,
            command.timeout,
            command.ignore_eos,
            command.openai_chat,
            command.api_key,
        )
    return GrpcTarget(command.address, command.timeout)


def run(command: RunCommand, console: Console) -> int:
    """Returns the exit code: 0, 1 if any request failed, 2 if all did. Raises ValueError or OSError."""
    salt = secrets.randbits(31) if command.salt is None else command.salt
    requests = salted(timed(command, make_requests(command, command.num_requests, command.seed)), salt)
    if not requests:
        raise ValueError("the workload has no requests")
    if command.output is not None:
        check_writable(command.output)
    warmup = salted(make_requests(command, command.warmup, WARMUP_SEED), salt + 1) if command.warmup else []
    records, generator = asyncio.run(_offer(command, requests, warmup, console))
    slo = Slo(command.slo_ttft_ms, command.slo_tpot_ms) if command.slo_ttft_ms or command.slo_tpot_ms else None
    summary = summarise(records, duration_of(records), slo)
    is_infinite = math.isinf(command.rate)
    described: dict[str, Any] = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": "openai" if command.openai_url else "kvferry",
        "base_url": command.openai_url or command.address,
        "model_id": command.model,
        "num_prompts": len(requests),
        "request_rate": None if command.arrivals in ("closed", "trace") else "inf" if is_infinite else command.rate,
        "burstiness": command.burstiness if command.arrivals == "gamma" else None,
        "max_concurrency": command.concurrency if command.arrivals == "closed" else None,
        "seed": command.seed,
        "salt": salt,
        "generator_p99_lag_ms": generator.p99_lag_ms,
        "generator_cpu_share": generator.cpu_share,
        "generator_was_limit": generator.is_limit,
    } | summary
    if command.output is not None:
        _write(command.output, json.dumps(described, indent=1, allow_nan=False))
    console.print(summary_table(described))
    if generator.is_limit:
        console.print(
            f"The load generator was the limit: its event loop woke up {generator.p99_lag_ms:.0f} ms late (p99) "
            f"and it used {generator.cpu_share:.0%} of a core. The latencies include its own lag.",
            highlight=False,
        )
    for record in [r for r in records if not r.is_ok][:3]:
        console.print(f"failed: {record.status}: {record.error}", markup=False)
    if not summary["completed"]:
        return 2
    return 1 if summary["failed"] else 0


def _write(path: Path, content: str) -> None:
    """Writes the results, or prints them if the path can't be written."""
    try:
        path.write_text(content)
    except OSError as error:
        print(content)
        print(f"kvferry: error: --output {path} can't be written: {error}; the results are above", file=sys.stderr)


async def _offer(
    command: RunCommand, requests: Sequence[LoadRequest], warmup: Sequence[LoadRequest], console: Console
) -> tuple[list[RequestRecord], GeneratorLoad]:
    async with _target(command) as target:
        await closed_loop(target, warmup, max(1, len(warmup)), lambda: None)
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("requests", total=len(requests))

            def advance() -> None:
                progress.advance(task)
                done = int(progress.tasks[0].completed)
                if not console.is_terminal and (done % max(1, len(requests) // 10) == 0 or done == len(requests)):
                    print(f"kvferry: {done} of {len(requests)} requests ended", file=sys.stderr, flush=True)

            async with watched() as generator:
                if command.arrivals == "closed":
                    records = await closed_loop(target, requests, command.concurrency, advance)
                else:
                    records = await open_loop(target, requests, advance)
            return records, generator


def summary_table(summary: dict[str, Any]) -> Table:
    """The numbers that people look at first."""

    def shown(value: object) -> str:
        return "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)

    table = Table("what", "value", title="what the client saw")
    for key in MAIN_NUMBERS:
        if key in summary:
            table.add_row(key, shown(summary[key]))
    for name in ("ttft", "tpot", "itl", "e2el"):
        values = [summary[f"{which}_{name}_ms"] for which in ("mean", "p50", "p90", "p95", "p99")]
        left_out = summary.get(f"left_out_of_{name}")
        note = f" ({left_out} requests have none)" if left_out else ""
        table.add_row(f"{name} ms: mean, p50, p90, p95, p99", ", ".join(map(shown, values)) + note)
    if summary["late_requests"]:
        table.add_row(
            "the generator fell behind", f"{summary['late_requests']} requests, {shown(summary['max_lag_ms'])} ms"
        )
    if summary["itl_counts_messages"]:
        table.add_row("itl", "per message: the server does not say how many tokens a message has")
    return table
