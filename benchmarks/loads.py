"""From options of the command line to loads: requests and arrival times."""

from __future__ import annotations

from pathlib import Path

from benchmarks.arms import Load, standard_loads
from benchmarks.arrivals import arrival_times, scaled_to_rate
from benchmarks.config import CompareCommand, RunCommand, WorkloadOptions
from benchmarks.trace_files import read_csv, read_mooncake, read_sharegpt
from benchmarks.workload import Lengths, LoadRequest, conversations, scaled, synthetic, with_arrivals

TRACES = Path(__file__).parent / "traces"
SLICES = {"azure": TRACES / "azure_conv_2023_slice.csv", "mooncake": TRACES / "mooncake_conversation_slice.jsonl"}


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


def timed(command: RunCommand, requests: list[LoadRequest]) -> list[LoadRequest]:
    """Each request with its arrival time. Raises ValueError for options that exclude each other."""
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


def chosen_loads(command: CompareCommand) -> list[Load]:
    """Raises ValueError for an unknown name, or a trace that can't be read."""
    if command.workload is not None:
        what = f"{command.workload}{f' ({command.trace.name})' if command.trace else ''}"
        if command.workload in ("fixed", "uniform", "lognormal", "conversations"):
            what += f", prompts of about {command.prompt_tokens:g} tokens, answers of {command.output_tokens:g}"
        make_requests(command, 1, 0)

        def own(count: int, seed: int) -> list[LoadRequest]:
            requests = make_requests(command, max(count, 1), seed)
            # A trace that is shorter than a run begins again.
            return [requests[index % len(requests)] for index in range(count)]

        return [Load("own", f"{what}, Poisson arrivals", own)]
    known = all_loads()
    unknown = [name for name in command.loads if name not in known]
    if unknown:
        raise ValueError(f"--loads has {unknown[0]!r}; there are {', '.join(known)}")
    return [known[name] for name in command.loads]
