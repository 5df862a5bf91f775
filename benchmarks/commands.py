"""What `kvferry bench run`, `compare` and `map` do."""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.arms import Arm, Load, make_arms, standard_loads
from benchmarks.arrivals import arrival_times, scaled_to_rate
from benchmarks.config import ArmsCommand, BenchCommand, CompareCommand, MapCommand, RunCommand, WorkloadOptions
from benchmarks.driver import GeneratorLoad, closed_loop, duration_of, open_loop, watched
from benchmarks.metrics import Slo, summarise
from benchmarks.records import RequestRecord
from benchmarks.targets import GrpcTarget, OpenAiTarget, Target
from benchmarks.trace_files import read_csv, read_mooncake, read_sharegpt
from benchmarks.workload import (
    Lengths,
    LoadRequest,
    conversations,
    salted,
    scaled,
    synthetic,
    with_arrivals,
)
from engine.model_store import ModelUnavailable
from kvferry.client import KvferryError
from kvferry.local import StartFailed

if TYPE_CHECKING:
    from benchmarks.compare import Comparison

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
    "cached_share",
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


def make_requests(command: WorkloadOptions, count: int, seed: int) -> list[LoadRequest]:
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
            read = {"azure": read_csv, "mooncake": read_mooncake, "sharegpt": read_sharegpt}
            requests = read[command.workload](path, count, seed)
        case None:
            raise ValueError("--workload is not given")
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
        return OpenAiTarget(
            command.openai_url,
            command.model,
            command.timeout,
            command.ignore_eos,
            command.openai_chat,
            command.api_key,
        )
    return GrpcTarget(command.address, command.timeout)


def _run(command: RunCommand, console: Console) -> int:
    salt = secrets.randbits(31) if command.salt is None else command.salt
    requests = salted(_timed(command, make_requests(command, command.num_requests, command.seed)), salt)
    if not requests:
        raise ValueError("the workload has no requests")
    if command.output is not None:
        _check_writable(command.output)
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
            f"The load generator was the limit: it looked {generator.p99_lag_ms:.0f} ms late (p99) and used "
            f"{generator.cpu_share:.0%} of a core. These times are its own as much as the server's.",
            highlight=False,
        )
    for record in [r for r in records if not r.is_ok][:3]:
        console.print(f"failed: {record.status}: {record.error}", markup=False)
    if not summary["completed"]:
        return 2
    return 1 if summary["failed"] else 0


def _check_writable(path: Path) -> None:
    """Before a run, not after it. Raises ValueError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a"):
            pass
    except OSError as error:
        raise ValueError(f"--output {path} can't be written: {error.strerror}") from error


def _write(path: Path, content: str) -> None:
    """What was measured is not lost, whatever became of the path meanwhile."""
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
        requests = read_csv(SLICES["azure"], 10_000, seed)
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


def _chosen_loads(command: CompareCommand) -> list[Load]:
    """Raises ValueError for a name that there is not, or a trace that can't be read."""
    if command.workload is not None:
        what = f"{command.workload}{f' ({command.trace.name})' if command.trace else ''}"
        if command.workload in ("fixed", "uniform", "lognormal", "conversations"):
            what += f", prompts of about {command.prompt_tokens:g} tokens, answers of {command.output_tokens:g}"
        make_requests(command, 1, 0)

        def own(count: int, seed: int) -> list[LoadRequest]:
            requests = make_requests(command, max(count, 1), seed)
            # A trace that is shorter than a run begins again.
            return [requests[place % len(requests)] for place in range(count)]

        return [Load("own", f"{what}, Poisson arrivals", own)]
    known = all_loads()
    unknown = [name for name in command.loads if name not in known]
    if unknown:
        raise ValueError(f"--loads has {unknown[0]!r}; there are {', '.join(known)}")
    return [known[name] for name in command.loads]


def _compare(command: CompareCommand, console: Console) -> int:
    from benchmarks.arms_under_test import running_arms, running_servers
    from benchmarks.compare import CompareSettings, compare
    from benchmarks.report import write_report

    loads = _chosen_loads(command)
    _check_writable(command.output / "report.html")
    arms = [] if command.servers else _arms(command)
    settings = CompareSettings(
        Slo(command.slo_ttft_ms, command.slo_tpot_ms), command.seconds, command.repeats, command.trials,
        command.first_rate, command.seed, secrets.randbits(31),
    )  # fmt: skip
    comparisons = []
    with Progress(console=console, transient=True) as progress:
        # An upper bound: a search may end earlier.
        num_arms = len(arms) or len(command.servers)
        total = len(loads) * (num_arms * (command.repeats * (command.trials + 1) + 1)) + num_arms
        task = progress.add_task("starting", total=total)

        def say(what: str) -> None:
            progress.update(task, description=what, advance=1)
            if not console.is_terminal:
                print(f"kvferry: {what}", file=sys.stderr, flush=True)

        measured = (
            running_servers(
                command.servers, command.server_model, command.ignore_eos, command.openai_chat, command.api_key
            )
            if command.servers
            else running_arms(arms, say)
        )
        with measured as running:
            for load in loads:
                comparison = compare(running, load, settings, say)
                comparison.machine["served"] = _served(command, arms, running[0].dtype)
                comparisons.append(comparison)
                write_report(comparisons, command.output)
    _show(comparisons, console)
    console.print(f"report: {command.output / 'report.html'}", highlight=False)
    two_tier = [arm.name for arm in arms if arm.is_two_tier]
    still = [c.load for c in comparisons if not all(c.kv_bytes_moved[name] for name in two_tier)]
    if still:
        print(f"kvferry: error: no KV moved in {', '.join(still)}; these numbers mean nothing", file=sys.stderr)
        return 1
    return 0


def _served(command: CompareCommand, arms: list[Arm], dtype: str) -> dict[str, str]:
    """What the arms ran, for the report."""
    if not arms:
        return {"servers": ", ".join(command.servers)}
    first = arms[0]
    cluster = first.cluster
    return {
        "model": f"{command.model}, weights and pages in {dtype}, at most {command.max_model_len} tokens",
        "pages": f"{first.pages} of {cluster.page_size} tokens in every arm",
        "workers": f"{command.workers} in every arm, {first.cores} cores together, at most "
        f"{command.max_num_sequences} sequences each",
    }


def _show(comparisons: list[Comparison], console: Console) -> None:
    from benchmarks.verdict import verdict

    for comparison in comparisons:
        table = Table("arm", "goodput requests/s", "95 % interval", title=f"{comparison.load}: {comparison.describe}")
        for arm in comparison.arms:
            table.add_row(arm.name, f"{arm.goodput:.2f}", f"{arm.interval[0]:.2f} to {arm.interval[1]:.2f}")
        console.print(table)
        for sentence in verdict(comparison):
            console.print(sentence, highlight=False)
        if comparison.equal_outputs is not None:
            console.print(f"equal tokens on all arms: {comparison.equal_outputs:.0%} of the probes", highlight=False)


def _map(command: MapCommand, console: Console) -> int:
    from benchmarks.arms_under_test import running_arms
    from benchmarks.breakeven import measure_map, write_map
    from benchmarks.compare import CompareSettings

    _check_writable(command.output / "map.json")
    salt = secrets.randbits(31)
    settings = CompareSettings(Slo(), command.seconds, command.repeats, command.trials, 1.0, command.seed, salt)
    arms = _arms(command)
    num_cells = len(command.prompt_tokens) * len(command.output_tokens)
    with Progress(console=console, transient=True) as progress:
        total = num_cells * len(arms) * (command.repeats * command.trials + 1) + len(arms)
        task = progress.add_task("starting", total=total)

        def say(what: str) -> None:
            progress.update(task, description=what, advance=1)
            if not console.is_terminal:
                print(f"kvferry: {what}", file=sys.stderr, flush=True)

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
