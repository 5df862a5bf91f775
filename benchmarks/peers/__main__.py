"""`make bench-peers`: kvferry, vLLM for CPU and llama.cpp under the same load, on the same cores, in turns.

One server runs at a time, on all usable cores. In each round every arm is started, gets each load once from `vllm bench
serve`, and is stopped. Rounds have different prompts and arrivals, arms of a round the same. No server caches prefixes.
The first time, the peers are installed into the cache, which takes minutes.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.metrics import Slo
from benchmarks.micro.bench_generator import ITL_MS, TTFT_MS, known_server
from benchmarks.peers import environments
from benchmarks.peers.generator import Load, Run, offer, parse_load
from benchmarks.peers.processes import PeerFailed
from benchmarks.peers.results import (
    MEASURES,
    ArmResult,
    cells,
    generator_verdict,
    together,
    unequal_tokens,
)
from benchmarks.peers.servers import GGUF_OF, ArmName, Server, Setting, label, preloaded, running, usable_cores
from engine.model_store import DEFAULT_MODEL, ModelUnavailable, resolve_model


@dataclass(frozen=True)
class Options:
    """kvferry, vLLM for CPU and llama.cpp under the same load, on the same cores, in turns."""

    arms: tuple[ArmName, ...] = ("vllm", "llama-bf16", "llama-q4", "split", "colocated-each", "colocated")
    """Servers. Ratios are to vllm, or to the first arm if vllm is not measured. split: 1 prefill and 1 decode worker.
    colocated-each: a colocated worker per core. colocated: one with all cores."""
    loads: tuple[str, ...] = ("512/64@1", "128/128@3")
    """Loads: prompt tokens/output tokens@requests per second."""
    rounds: int = 3
    """Turns of each arm. An interval needs 2."""
    num_prompts: int = 40
    """Requests of each load in a round."""
    ttft_ms: float = 2000.0
    """Limit for the time to first token, for goodput."""
    tpot_ms: float = 100.0
    """Limit for the time per output token, for goodput."""
    seed: int = 0
    """The same seed gives the same prompts and arrivals."""
    output: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("bench-peers")
    """Folder for all results as JSON, and logs."""

    def __post_init__(self) -> None:
        if not self.arms or len(set(self.arms)) < len(self.arms):
            raise ValueError("--arms must be some arms, each once")
        if self.rounds < 1 or self.num_prompts < 1:
            raise ValueError("--rounds and --num-prompts must be at least 1")
        if not self.parsed_loads:
            raise ValueError("--loads must be at least one load")

    @property
    def parsed_loads(self) -> list[Load]:
        """The loads. Raises ValueError."""
        return [parse_load(text) for text in self.loads]

    @property
    def baseline(self) -> ArmName:
        """The arm to which ratios are."""
        return "vllm" if "vllm" in self.arms else self.arms[0]

    @property
    def max_model_len(self) -> int:
        """Room for the longest request, and for a prompt that tokenizes to more tokens than were drawn."""
        longest = max(load.prompt_tokens + load.output_tokens for load in self.parsed_loads)
        return -(-longest * 5 // 4 // 256) * 256

    @property
    def slo(self) -> Slo:
        """The limits."""
        return Slo(self.ttft_ms, self.tpot_ms)


def measure(
    options: Options, setting: Setting, console: Console
) -> tuple[dict[tuple[ArmName, Load], list[Run]], dict[str, Run]]:
    """Runs of each arm and load, one per round, and the generator's runs against a server of known times, by load."""

    def run(server: Server, load: Load, seed: int, name: str) -> Run:
        file = options.output / f"{name}-{load.prompt_tokens}-{load.output_tokens}-{load.rate:g}.json"
        return offer(server, setting, load, options.num_prompts, seed, options.slo, file)

    with known_server() as url:
        console.print("the load generator against a server of known times")
        known = {str(load): run(Server(url), load, options.seed, "known") for load in options.parsed_loads}
    runs: dict[tuple[ArmName, Load], list[Run]] = {}
    for number in range(options.rounds):
        for arm in options.arms:
            console.print(f"round {number + 1} of {options.rounds}: {label(arm, len(usable_cores()))}")
            name = f"{arm}-{number}"
            with running(arm, setting, name) as server:
                for load in options.parsed_loads:
                    runs.setdefault((arm, load), []).append(run(server, load, options.seed + number, name))
    return runs, known


def report(
    options: Options,
    setting: Setting,
    runs: dict[tuple[ArmName, Load], list[Run]],
    known: dict[str, Run],
    console: Console,
) -> None:
    """Prints the table and what belongs to it, and writes all of it as JSON."""
    cores = len(usable_cores())
    table = Table(
        "load", "arm", *(title for title, _ in MEASURES.values()), "met both limits", "cores busy",
        title=f"{DEFAULT_MODEL}; {options.rounds} round(s) of {options.num_prompts} requests; limits: TTFT "
        f"{options.ttft_ms:g} ms, TPOT {options.tpot_ms:g} ms; x: ratio to {label(options.baseline, cores)} "
        "[95 % interval over rounds]",
    )  # fmt: skip
    busiest, sentences, written = 0.0, [], []
    for load in options.parsed_loads:
        results: dict[str, ArmResult] = {}
        for arm in options.arms:
            result = results[label(arm, cores)] = together(runs[arm, load], runs[options.baseline, load], options.slo)
            table.add_row(str(load), label(arm, cores), *cells(result))
            busiest = max(busiest, result.generator_cores)
            written.append({"load": asdict(load), "arm": arm, "label": label(arm, cores), **asdict(result)})
        table.add_section()
        sentences += unequal_tokens(results, load)
    sentences += generator_verdict(known, TTFT_MS, ITL_MS, busiest)
    machine = {"machine": f"{_cpu_name()}, {cores} usable cores", "versions": _versions(setting)}
    console.print(table)
    for sentence in [*sentences, machine["machine"], machine["versions"]]:
        console.print(sentence, highlight=False)
    content = {"options": asdict(options), **machine, "results": written, "notes": sentences}
    (options.output / "results.json").write_text(json.dumps(content, indent=1, default=str))
    console.print(f"all results: {options.output / 'results.json'}", highlight=False)


def _versions(setting: Setting) -> str:
    found = [f"kvferry {importlib.metadata.version('kvferry')} with torch {importlib.metadata.version('torch')}"]
    libraries = " and ".join(Path(library).name for library in preloaded(setting.vllm)) or "nothing"
    torch = f"torch {setting.vllm.version('torch')}"
    found.append(f"{environments.VLLM} with {torch}, {libraries} preloaded, as server and load generator")
    if setting.llama_cpp is not None:
        kernels = "" if setting.llama_cpp.repacks else ", without repacked weights (no AMX): those kernels crash here"
        found.append(f"{environments.LLAMA_CPP}, compiled for this processor{kernels}")
    return "; ".join([*found, f"Python {platform.python_version()}"])


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    """Measures and prints. All processes end with it."""
    options = tyro.cli(Options)
    console = Console(width=180)
    signal.signal(signal.SIGTERM, _stop)
    try:
        options.output.mkdir(parents=True, exist_ok=True)
        setting = Setting(
            model=resolve_model(DEFAULT_MODEL),
            max_model_len=options.max_model_len,
            logs=options.output,
            vllm=environments.vllm(console.print),
            llama_cpp=environments.llama_cpp(console.print) if set(options.arms) & set(GGUF_OF) else None,
        )
        runs, known = measure(options, setting, console)
        report(options, setting, runs, known, console)
    except (PeerFailed, ModelUnavailable, OSError) as error:
        print(f"bench-peers: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bench-peers: stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
