"""What `kvferry bench run`, `compare` and `map` do."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.arms import Arm, Load, make_arms, standard_loads
from benchmarks.arrivals import arrival_times, scaled_to_rate
from benchmarks.config import ArmsCommand, BenchCommand, CompareCommand, MapCommand, RunCommand
from benchmarks.driver import closed_loop, duration_of, open_loop
from benchmarks.metrics import Slo, summarise
from benchmarks.records import RequestRecord
from benchmarks.targets import GrpcTarget, OpenAiTarget, Target
from benchmarks.workload import (
    Lengths,
    LoadRequest,
    conversations,
    from_azure_csv,
    from_mooncake_jsonl,
    from_sharegpt_jsonl,
    scaled,
    synthetic,
    with_arrivals,
)
from engine.model_store import ModelUnavailable
from kvferry.client import KvferryError
from kvferry.local import StartFailed

TRACES = Path(__file__).parent / "traces"
SLICES = {"azure": TRACES / "azure_conv_2023_slice.csv", "mooncake": TRACES / "mooncake_conversation_slice.jsonl"}
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
    "total_kv_bytes",
    "slo_attainment",
    "request_goodput",
)
WARMUP_SEED = 1_000_003
"""Apart from any seed of a measured load, so that no measured prompt was seen before."""


def run_command(command: BenchCommand) -> int:
    """Returns the exit code: 0, 1 if any request failed, 2 if nothing could be measured."""
    console = Console()
    try:
        match command.command:
            case RunCommand():
                return _run(command.command, console)
            case CompareCommand():
                return _compare(command.command, console)
            case MapCommand():
                return _map(command.command, console)
    except (ValueError, OSError, StartFailed, ModelUnavailable, KvferryError) as error:
        print(f"kvferry: error: {error}", file=sys.stderr)
        return 2


# run


def make_requests(command: RunCommand, count: int, seed: int) -> list[LoadRequest]:
    """Requests with the arrival times of the workload, if it has any. Raises ValueError or OSError."""
    prompt = Lengths("fixed", command.prompt_tokens)
    output = Lengths("fixed", command.output_tokens)
    match command.workload:
        case "fixed" | "uniform" | "lognormal":
            prompt = Lengths(command.workload, command.prompt_tokens, command.spread)
            output = Lengths(command.workload, command.output_tokens, command.spread)
            requests = synthetic(count, prompt, output, seed, command.shared_prefix, command.num_prefixes)
        case "conversations":
            requests = conversations(count, command.turns, prompt, output, seed)
        case "azure" | "mooncake" | "sharegpt":
            path = command.trace or SLICES.get(command.workload)
            if path is None:
                raise ValueError("--workload sharegpt needs a file: give --trace")
            read = {"azure": from_azure_csv, "mooncake": from_mooncake_jsonl, "sharegpt": from_sharegpt_jsonl}
            requests = read[command.workload](path, count, seed)
    return scaled(requests, command.scale, command.max_prompt_tokens, command.max_output_tokens)


def _timed(command: RunCommand, requests: list[LoadRequest]) -> list[LoadRequest]:
    """Each request with its arrival time."""
    if command.arrivals == "closed":
        if command.concurrency < 1:
            raise ValueError(f"--concurrency is {command.concurrency}; it must be at least 1")
        return requests
    if command.arrivals == "trace":
        times = [request.arrival for request in requests]
        if any(time is None for time in times):
            raise ValueError(f"--arrivals trace: the workload {command.workload} has no times of its own")
        return with_arrivals(requests, scaled_to_rate([t for t in times if t is not None], command.speed))
    times_drawn = arrival_times(
        command.arrivals, command.rate, len(requests), command.seed, command.burstiness, command.end_rate
    )
    return with_arrivals(requests, times_drawn)


def _target(command: RunCommand) -> Target:
    if command.openai_url:
        return OpenAiTarget(command.openai_url, command.model, command.timeout, command.ignore_eos, command.openai_chat)
    return GrpcTarget(command.address, command.timeout)


def _run(command: RunCommand, console: Console) -> int:
    requests = _timed(command, make_requests(command, command.num_requests, command.seed))
    if not requests:
        raise ValueError("the workload has no requests")
    warmup = make_requests(command, command.warmup, WARMUP_SEED) if command.warmup else []
    records = asyncio.run(_offer(command, requests, warmup, console))
    slo = Slo(command.slo_ttft_ms, command.slo_tpot_ms) if command.slo_ttft_ms or command.slo_tpot_ms else None
    summary = summarise(records, duration_of(records), slo)
    described: dict[str, Any] = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": "openai" if command.openai_url else "kvferry",
        "base_url": command.openai_url or command.address,
        "model_id": command.model,
        "num_prompts": len(requests),
        "request_rate": None if command.arrivals in ("closed", "trace") else command.rate,
        "burstiness": command.burstiness if command.arrivals == "gamma" else None,
        "max_concurrency": command.concurrency if command.arrivals == "closed" else None,
    } | summary
    if command.output is not None:
        command.output.write_text(json.dumps(described, indent=1, allow_nan=False))
    console.print(summary_table(described))
    for record in [r for r in records if not r.is_ok][:3]:
        console.print(f"failed: {record.status}: {record.error}", markup=False)
    if not summary["completed"]:
        return 2
    return 1 if summary["failed"] else 0


async def _offer(
    command: RunCommand, requests: Sequence[LoadRequest], warmup: Sequence[LoadRequest], console: Console
) -> list[RequestRecord]:
    async with _target(command) as target:
        await closed_loop(target, warmup, max(1, len(warmup)), lambda: None)
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("requests", total=len(requests))
            if command.arrivals == "closed":
                return await closed_loop(target, requests, command.concurrency, lambda: progress.advance(task))
            return await open_loop(target, requests, lambda: progress.advance(task))


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
        table.add_row(f"{name} ms: mean, p50, p90, p95, p99", ", ".join(map(shown, values)))
    if summary["late_requests"]:
        table.add_row(
            "the generator fell behind", f"{summary['late_requests']} requests, {shown(summary['max_lag_ms'])} ms"
        )
    if summary["itl_counts_messages"]:
        table.add_row("itl", "per message: the server does not say how many tokens a message has")
    return table


# compare and map


def _arms(command: ArmsCommand) -> list[Arm]:
    splits = []
    for text in command.splits:
        prefill, _, decode = text.partition(":")
        if not (prefill.isdigit() and decode.isdigit() and int(prefill) >= 1 and int(decode) >= 1):
            raise ValueError(f"--splits has {text!r}; it must look like 1:1")
        splits.append((int(prefill), int(decode)))
    return make_arms(
        command.workers,
        splits,
        list(command.token_budgets),
        command.pages_per_worker,
        command.model,
        command.dtype,
        command.max_model_len,
        command.max_num_sequences,
    )


def all_loads() -> dict[str, Load]:
    """The standard loads, and the Azure conversation trace scaled down."""

    def azure(count: int, seed: int) -> list[LoadRequest]:
        requests = from_azure_csv(SLICES["azure"], 10_000, seed)
        # Every run takes another piece of the trace; lengths are halved to fit small models.
        start = (seed * 137) % max(1, len(requests) - count)
        piece = (requests[start:] + requests)[:count]
        return scaled(piece, 0.5, 1500, 200)

    trace = Load(
        "azure-conv",
        "prompts and answers of the Azure conversation trace at half their lengths, Poisson arrivals",
        azure,
    )
    return standard_loads() | {trace.name: trace}


def _compare(command: CompareCommand, console: Console) -> int:
    from benchmarks.compare import CompareSettings, compare, running_arms
    from benchmarks.report import write_report
    from benchmarks.verdict import verdict

    known = all_loads()
    unknown = [name for name in command.loads if name not in known]
    if unknown:
        raise ValueError(f"--loads has {unknown[0]!r}; there are {', '.join(known)}")
    slo = Slo(command.slo_ttft_ms, command.slo_tpot_ms)
    settings = CompareSettings(slo, command.seconds, command.repeats, command.trials, command.first_rate, command.seed)
    comparisons = []
    with Progress(console=console, transient=True) as progress:
        arms = _arms(command)
        # An upper bound: a search may end earlier.
        total = len(command.loads) * (len(arms) * (command.repeats * command.trials + 1)) + len(arms)
        task = progress.add_task("starting", total=total)

        def say(what: str) -> None:
            progress.update(task, description=what, advance=1)

        with running_arms(arms, say) as running:
            for name in command.loads:
                comparisons.append(compare(running, known[name], settings, say))
                write_report(comparisons, command.output)
    page = command.output / "report.html"
    for comparison in comparisons:
        table = Table("arm", "goodput requests/s", "95 % interval", title=f"{comparison.load}: {comparison.describe}")
        for arm in comparison.arms:
            table.add_row(arm.name, f"{arm.goodput:.2f}", f"{arm.interval[0]:.2f} to {arm.interval[1]:.2f}")
        console.print(table)
        for sentence in verdict(comparison):
            console.print(sentence, highlight=False)
        console.print(f"equal tokens on all arms: {comparison.equal_outputs:.0%} of the probes", highlight=False)
    console.print(f"report: {page}", highlight=False)
    two_tier = [arm.name for arm in arms if arm.is_two_tier]
    still = [c.load for c in comparisons if not all(c.kv_bytes_moved[name] for name in two_tier)]
    if still:
        print(f"kvferry: error: no KV moved in {', '.join(still)}; these numbers mean nothing", file=sys.stderr)
        return 1
    return 0


def _map(command: MapCommand, console: Console) -> int:
    from benchmarks.breakeven import measure_map, write_map
    from benchmarks.compare import CompareSettings, running_arms

    settings = CompareSettings(Slo(), command.seconds, command.repeats, command.trials, 1.0, command.seed)
    arms = _arms(command)
    num_cells = len(command.prompt_tokens) * len(command.output_tokens)
    with Progress(console=console, transient=True) as progress:
        total = num_cells * len(arms) * (command.repeats * command.trials + 1) + len(arms)
        task = progress.add_task("starting", total=total)

        def say(what: str) -> None:
            progress.update(task, description=what, advance=1)

        with running_arms(arms, say) as running:
            cells = measure_map(
                running, list(command.prompt_tokens), list(command.output_tokens), settings, command.slo_factor, say
            )
    picture = write_map(cells, command.output)
    table = Table("prompt", "output", "colocated req/s", "split req/s", "ratio", title="goodput")
    for cell in cells:
        ratio = "" if cell.goodput_ratio is None else f"{cell.goodput_ratio:.2f}"
        table.add_row(str(cell.prompt_tokens), str(cell.output_tokens), f"{cell.colocated_goodput:.2f}",
                      f"{cell.two_tier_goodput:.2f}", ratio)  # fmt: skip
    console.print(table)
    console.print(f"map: {picture}", highlight=False)
    return 0
