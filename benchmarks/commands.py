"""What `kvferry bench run`, `compare` and `map` do."""

from __future__ import annotations

import secrets
import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.arms import Arm, make_arms
from benchmarks.config import ArmsCommand, BenchCommand, CompareCommand, MapCommand, RunCommand
from benchmarks.loads import chosen_loads
from benchmarks.metrics import Slo
from benchmarks.output import check_writable
from benchmarks.run import run
from engine.model_store import ModelUnavailable
from local_cluster.process import StartFailed
from router_client.errors import KvferryError

if TYPE_CHECKING:
    from benchmarks.compare import Comparison


def run_command(command: BenchCommand) -> int:
    """Returns the exit code: 0, 1 if any request failed, 2 if nothing could be measured."""
    console = Console()
    try:
        match command.command:
            case RunCommand():
                return run(command.command, console)
            case CompareCommand():
                return _compare(command.command, console)
            case MapCommand():
                return _map(command.command, console)
    except (ValueError, OSError, StartFailed, ModelUnavailable, KvferryError) as error:
        print(f"kvferry: error: {error}", file=sys.stderr)
        return 2


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


def _compare(command: CompareCommand, console: Console) -> int:
    from benchmarks.arms_under_test import running_arms, running_servers
    from benchmarks.compare import CompareSettings, compare
    from benchmarks.report import write_report

    loads = chosen_loads(command)
    check_writable(command.output / "report.html")
    arms = [] if command.servers else _arms(command)
    settings = CompareSettings(
        Slo(command.slo_ttft_ms, command.slo_tpot_ms), command.seconds, command.repeats, command.trials,
        command.first_rate, command.seed, secrets.randbits(31),
    )  # fmt: skip
    comparisons = []
    with Progress(console=console, transient=True) as progress:
        # An upper bound, since a search may end earlier.
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

    check_writable(command.output / "map.json")
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
