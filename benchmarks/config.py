"""Settings of `kvferry bench`. Imports nothing slow, since the command line needs it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from engine.config import DTypeName
from engine.model_store import DEFAULT_MODEL
from rpc.placeholders import MaybeFile, MaybeFloat, MaybeMs, MaybeNumber

WorkloadKind = Literal["lognormal", "fixed", "uniform", "conversations", "azure", "mooncake", "sharegpt"]
Arrivals = Literal["poisson", "gamma", "fixed", "ramp", "trace", "closed"]


@dataclass(frozen=True)
class WorkloadOptions:
    """Prompts and output lengths of a load."""

    workload: WorkloadKind | None = None
    """Lengths: drawn (lognormal, uniform, fixed), turns of conversations, or a trace file."""
    trace: MaybeFile = None
    """File for azure (CSV with times and lengths, as Azure and BurstGPT publish them), mooncake (JSONL) or sharegpt
    (JSON or JSONL). Unset: the slice that comes with kvferry, if any."""
    prompt_tokens: float = 300
    """Mean prompt length, for drawn lengths; mean message length, for conversations."""
    output_tokens: float = 64
    """Mean output length, for drawn lengths."""
    spread: float = 0.5
    """lognormal: sigma; uniform: half the width as a share of the mean."""
    shared_prefix: int = 0
    """Length of the prefix that prompts share, for drawn lengths."""
    num_prefixes: int = 1
    """Number of different shared prefixes."""
    turns: int = 4
    """Turns of each conversation."""
    scale: float = 1.0
    """Factor for the lengths of a trace, to fit a model."""
    max_prompt_tokens: int = 1500
    """Longer prompts are cut."""
    max_output_tokens: int = 400
    """Longer outputs are cut."""


@dataclass(frozen=True)
class OpenAiOptions:
    """Requests to OpenAI-compatible servers."""

    model: str = ""
    """Model name to ask for."""
    openai_chat: bool = False
    """Use chat completions, for servers that have only those."""
    ignore_eos: bool = True
    """Exact output lengths: ask the server to ignore EOS, which not every server supports."""
    api_key: str = field(default_factory=lambda: os.environ.get("OPENAI_API_KEY", ""))
    """Sent as a bearer token. Unset: $OPENAI_API_KEY, if there is one."""


@dataclass(frozen=True)
class RunCommand(WorkloadOptions, OpenAiOptions):
    """Sends a load to a running endpoint and reports what the client measured."""

    address: str = "127.0.0.1:50051"
    """host:port of a kvferry router (gRPC)."""
    openai_url: str = ""
    """Measure this instead: base URL of any server with OpenAI's completions, for example http://127.0.0.1:8000/v1."""
    workload: WorkloadKind = "lognormal"
    """Lengths: drawn (lognormal, uniform, fixed), turns of conversations, or a trace file."""
    num_requests: int = 100
    """Requests to offer, warm-up not counted."""

    arrivals: Arrivals = "poisson"
    """Open loop: poisson, gamma, fixed, ramp or the trace's own times. closed: a fixed number in flight."""
    rate: float = 1.0
    """Requests per second, for open loops; inf: all at once."""
    end_rate: MaybeFloat = None
    """ramp: the rate at the end; unset: twice --rate."""
    burstiness: float = 1.0
    """gamma: shape of the gaps; below 1 is more bursty than poisson."""
    speed: float = 1.0
    """trace: factor by which arrivals are faster."""
    concurrency: int = 8
    """closed: requests in flight."""

    warmup: int = 4
    """Requests sent first and not measured; their prompts differ from all measured ones."""
    timeout: float = 300.0
    """Deadline of each request in seconds."""
    seed: int = 0
    """The same seed gives the same lengths and arrivals."""
    salt: MaybeNumber = None
    """Prompts of runs with different salts begin differently, so that no run hits pages that another run left in a
    server's cache. Unset: a random one, which the results name."""
    slo_ttft_ms: MaybeMs = None
    """Count requests whose first token came in time ..."""
    slo_tpot_ms: MaybeMs = None
    """... and whose time per output token stayed below this."""
    output: MaybeFile = None
    """Write all numbers as JSON here."""


@dataclass(frozen=True)
class ArmsCommand:
    """The arms of a comparison."""

    workers: int = 2
    """Workers in every arm; cores are shared equally among them."""
    splits: tuple[str, ...] = ("1:1",)
    """Two-tier arms, prefill:decode; each must add up to --workers."""
    token_budgets: tuple[int, ...] = (48, 256)
    """Colocated arms, one per token budget; the best counts. Small ones keep TPOT low, large ones TTFT."""
    max_num_sequences: int = 32
    """Most sequences at once on each worker, the same in all arms."""
    model: str = DEFAULT_MODEL
    """Name of a built-in model, folder, GGUF file or hub id."""
    dtype: DTypeName = "auto"
    """Element type, the same in all arms."""
    max_model_len: MaybeNumber = 2048
    """Longest sequence in tokens."""
    pages_per_worker: int = 2000
    """KV pages of each worker, the same in all arms."""
    seed: int = 0
    """The same seed gives the same loads."""


@dataclass(frozen=True)
class CompareCommand(WorkloadOptions, ArmsCommand):
    """Two tiers against colocated workers on this machine, matched, or servers that run already against each other;
    writes report.html, plots and JSON."""

    loads: tuple[str, ...] = ("long-prompts", "long-answers", "azure-conv")
    """Built-in loads: long-prompts, long-answers, mixed, azure-conv. --workload replaces them."""
    servers: tuple[str, ...] = ()
    """Servers that run already, in place of the arms: NAME=host:port for a kvferry router, NAME=http://host:port/v1 for
    anything with OpenAI's completions. A single server is measured at rising rates."""
    server_model: str = ""
    """Model name to ask OpenAI-compatible servers for."""
    openai_chat: bool = False
    """Use chat completions of OpenAI-compatible servers."""
    ignore_eos: bool = True
    """Exact output lengths: ask OpenAI-compatible servers to ignore EOS, which not all support."""
    api_key: str = field(default_factory=lambda: os.environ.get("OPENAI_API_KEY", ""))
    """Sent to OpenAI-compatible servers as a bearer token. Unset: $OPENAI_API_KEY, if there is one."""
    slo_ttft_ms: float = 4000.0
    """Time to first token that a request has to meet."""
    slo_tpot_ms: float = 80.0
    """Time per output token that it has to meet."""
    seconds: float = 15.0
    """Length of each measured run."""
    repeats: int = 3
    """Runs per rate, each with other prompts and arrivals; their counts are added up."""
    trials: int = 6
    """Measured rates per arm, at most."""
    first_rate: float = 1.0
    """Requests per second to begin with."""
    output: Path = Path("bench-compare")
    """Folder for report.html, PNG and JSON."""


@dataclass(frozen=True)
class MapCommand(ArmsCommand):
    """Where splitting pays: goodput ratio over prompt and output length; writes map.png and map.json."""

    prompt_tokens: tuple[int, ...] = (64, 256, 1024)
    """Prompt lengths."""
    output_tokens: tuple[int, ...] = (8, 32, 128)
    """Output lengths."""
    slo_factor: float = 4.0
    """Each cell's SLO: this factor times the latency of a lone request."""
    seconds: float = 8.0
    """Length of each measured run."""
    repeats: int = 1
    """Runs per rate."""
    trials: int = 5
    """Measured rates per arm and cell, at most."""
    output: Path = Path("bench-map")
    """Folder for map.png and map.json."""


@dataclass(frozen=True)
class BenchCommand:
    """Measures an endpoint, compares two tiers with colocated workers, or maps where splitting pays."""

    command: (
        Annotated[RunCommand, tyro.conf.subcommand("run")]
        | Annotated[CompareCommand, tyro.conf.subcommand("compare")]
        | Annotated[MapCommand, tyro.conf.subcommand("map")]
    ) = field(default_factory=RunCommand)
