"""The `kvferry` command. Parsing loads neither torch nor gRPC servers; each command imports what it needs."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import tyro
from rich.console import Console
from rich.table import Table
from tyro.conf import Positional

from benchmarks.config import BenchCommand
from colocated_service.config import ColocatedConfig
from decode_service.config import DecodeConfig
from engine.config import ModelOptions
from engine.model_store import DEFAULT_MODEL
from kvferry.cluster_config import (
    AddressOptions,
    ClusterConfig,
    OutputOptions,
    SchedulingOptions,
    WorkerOptions,
)
from prefill_service.config import PrefillConfig
from router.config import RouterConfig
from rpc.placeholders import MaybeFile, MaybeFloat, MaybeNumber, MaybeSeconds, MaybeText
from rpc.process import run_process
from worker_runtime.config import WorkerConfig

if TYPE_CHECKING:
    from kvferry.client import Client

Worker = TypeVar("Worker", bound=WorkerConfig)

DESCRIPTION = """Serves a large language model: prefill workers compute prompts, decode workers generate the tokens.

`kvferry up` starts everything on this machine; then ask with `kvferry generate "..."`, talk with `kvferry chat`, look
with `kvferry status`. `kvferry demo` shows it once. The processes by themselves: router, prefill, decode, colocated."""
DEFAULT_ADDRESS = "127.0.0.1:50051"
RESTART_PAUSE_SECONDS = 2.0
"""Before a worker that could not be started again is tried once more."""


@dataclass(frozen=True)
class UpCommand:
    """Starts a router and its workers on this machine: prefill and decode workers, colocated ones, or both kinds."""

    serving: ModelOptions = field(default_factory=lambda: ModelOptions(DEFAULT_MODEL))
    workers: WorkerOptions = field(default_factory=WorkerOptions)
    scheduling: SchedulingOptions = field(default_factory=SchedulingOptions)
    addresses: AddressOptions = field(default_factory=AddressOptions)
    output: OutputOptions = field(default_factory=OutputOptions)

    def __post_init__(self) -> None:
        self.cluster()

    def cluster(self) -> ClusterConfig:
        """All settings as one. Raises ValueError for those that do not go together."""
        groups = (self.serving, self.workers, self.scheduling, self.addresses, self.output)
        return ClusterConfig(**{name: value for group in groups for name, value in vars(group).items()})


@dataclass(frozen=True, kw_only=True)
class RouterConnection:
    """Where the router is, and how it is spoken to."""

    address: str = DEFAULT_ADDRESS
    """host:port of the router."""
    tls_ca: MaybeFile = None
    """PEM file of the CA of the router's certificate. Any of these makes it TLS; all unset: in the clear."""
    tls_name: MaybeText = None
    """Name that the certificate has to be valid for; those of kvferry's processes are for "kvferry". Unset: the host
    of the address."""
    tls_cert: MaybeFile = None
    """PEM file of a certificate of one's own, for routers with --tls-clients verified."""
    tls_key: MaybeFile = None
    """PEM file of its key."""

    def __post_init__(self) -> None:
        if self.address.startswith(("http://", "https://")):
            raise ValueError(f"--address is {self.address}; it must be host:port of gRPC, such as {DEFAULT_ADDRESS}")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key belong together")


@dataclass(frozen=True)
class GenerateCommand(RouterConnection):
    """Sends a prompt to a running router and streams the answer."""

    prompt: Positional[str] = "-"
    """The prompt; "-", or nothing, reads standard input."""
    chat: bool = True
    """Send it as a user's message through the model's chat template; --no-chat sends plain text."""
    max_tokens: MaybeNumber = 256
    """Most output tokens."""
    temperature: float = 0.0
    """0 is greedy."""
    top_p: MaybeFloat = None
    """Keep the smallest set of tokens whose probability reaches this."""
    top_k: MaybeNumber = None
    """Keep the k likeliest tokens."""
    min_p: MaybeFloat = None
    """Keep tokens at least this fraction as likely as the likeliest."""
    repetition_penalty: MaybeFloat = None
    """Above 1 makes tokens that prompt or answer have less likely."""
    presence_penalty: MaybeFloat = None
    """Above 0 makes tokens that the answer has less likely."""
    frequency_penalty: MaybeFloat = None
    """Above 0 makes tokens less likely with each time the answer has them."""
    seed: MaybeNumber = None
    """Same seed, same answer."""
    n: int = 1
    """Number of answers; printed one after the other."""
    num_logprobs: MaybeNumber = None
    """With --json: log-probabilities of the tokens, and of so many likeliest ones."""
    min_tokens: MaybeNumber = None
    """Tokens before the answer may end."""
    stop: tuple[str, ...] = ()
    """End when the text contains one of these."""
    timeout: MaybeSeconds = None
    """Seconds for queue, prefill, transfer and decode together."""
    json: bool = False
    """Print text, token ids, usage, timings and KV bytes as JSON at the end instead of streaming."""


@dataclass(frozen=True)
class ChatCommand(RouterConnection):
    """Talks to a running router; /help shows what there is, Ctrl-D ends."""

    system: str = ""
    """A system message to begin with."""
    max_tokens: int = 512
    """Most tokens of each answer."""
    temperature: float = 0.7
    """0 is greedy."""
    top_p: MaybeFloat = 0.9
    """Keep the smallest set of tokens whose probability reaches this."""
    seed: MaybeNumber = None
    """Same seed, same answers."""


@dataclass(frozen=True)
class StatusCommand(RouterConnection):
    """Shows the workers of a running router."""


@dataclass(frozen=True)
class ModelsCommand:
    """Lists prepared models, or prepares one."""

    action: Positional[Literal["list", "prepare"]] = "list"
    """What to do."""
    model: Positional[str] = DEFAULT_MODEL
    """What to prepare: name of a built-in model, a GGUF file, a hub id."""


@dataclass(frozen=True)
class DemoCommand:
    """Starts a cluster, asks it about a long text, shows where the time went, and stops it."""

    model: str = DEFAULT_MODEL
    """Name of a built-in model, folder, GGUF file or hub id."""
    max_tokens: int = 120
    """Most output tokens."""


def main() -> None:
    """Entry point of the command."""
    commands: dict[str, Callable[..., Any]] = {
        "up": UpCommand,
        "generate": GenerateCommand,
        "chat": ChatCommand,
        "status": StatusCommand,
        "models": ModelsCommand,
        "demo": DemoCommand,
        "router": RouterConfig,
        "prefill": PrefillConfig,
        "decode": DecodeConfig,
        "colocated": ColocatedConfig,
        "bench": BenchCommand,
    }
    if sys.argv[1:] in (["--version"], ["-V"]):
        print(f"kvferry {importlib.metadata.version('kvferry')}")
        return
    try:
        command = tyro.extras.subcommand_cli_from_dict(
            commands,
            prog="kvferry",
            description=DESCRIPTION,
            config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
        )
    except ValueError as error:
        _exit_with(f"{error}")
    match command:
        case RouterConfig():
            name = command.served_model_name or Path(command.model).name
            command = dataclasses.replace(
                command, model=_folder_of(command.model, with_weights=False), served_model_name=name
            )
            import router.__main__ as router_process

            run_process(lambda: router_process.serve(command), router_process.EXPECTED_ERRORS)
        case PrefillConfig():
            command = _with_model_folder(command)
            import prefill_service.__main__ as prefill_process

            run_process(lambda: prefill_process.serve(command), prefill_process.EXPECTED_ERRORS)
        case DecodeConfig():
            command = _with_model_folder(command)
            import decode_service.__main__ as decode_process

            run_process(lambda: decode_process.serve(command), decode_process.EXPECTED_ERRORS)
        case ColocatedConfig():
            command = _with_model_folder(command)
            import colocated_service.__main__ as colocated_process

            run_process(lambda: colocated_process.serve(command), colocated_process.EXPECTED_ERRORS)
        case BenchCommand():
            try:
                from benchmarks.commands import run_command
            except ModuleNotFoundError as error:
                _exit_with(f"benchmarks need {error.name}, which is not installed: pip install '.[bench]'")
            sys.exit(run_command(command))
        case UpCommand():
            sys.exit(_up(command.cluster()))
        case GenerateCommand():
            sys.exit(_generate(command))
        case ChatCommand():
            sys.exit(_chat(command))
        case StatusCommand():
            sys.exit(_status(command))
        case ModelsCommand():
            sys.exit(_models(command))
        case DemoCommand():
            from kvferry.demo import run_demo

            sys.exit(run_demo(command.model, command.max_tokens))


def _exit_with(message: str) -> None:
    print(f"kvferry: error: {message}", file=sys.stderr)
    sys.exit(2)


def _folder_of(model: str, with_weights: bool = True) -> str:
    from engine.model_store import ModelUnavailable, resolve_model

    try:
        return str(resolve_model(model, with_weights))
    except ModelUnavailable as error:
        _exit_with(str(error))
        raise


def _with_model_folder(config: Worker) -> Worker:
    """The same settings with the model's folder. Before anything heavy is imported, so that a typo is told at once."""
    engine = dataclasses.replace(config.engine, model=_folder_of(config.engine.model))
    return dataclasses.replace(config, engine=engine)


def _up(config: ClusterConfig) -> int:
    from engine.model_store import ModelUnavailable
    from kvferry.local import LocalCluster, StartFailed

    stop = threading.Event()
    cluster = LocalCluster(config)

    def on_signal(*_: object) -> None:
        if stop.is_set():
            cluster.kill()  # it was said twice
        stop.set()

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, on_signal)
    code, said = 0, ""
    kinds = (("prefill", config.num_prefill), ("decode", config.num_decode), ("colocated", config.num_colocated))
    workers = " and ".join(f"{number} {kind}" for kind, number in kinds if number)
    print(f"kvferry: starting a router and {workers} worker(s) for {config.model}", file=sys.stderr, flush=True)
    try:
        cluster.start(stop.is_set)
        http = cluster.find("router").info["http"]
        print(f"kvferry: ready on {cluster.address} and {http}/v1; Ctrl-C ends it", file=sys.stderr, flush=True)
        while not stop.wait(0.2):
            if (dead := cluster.dead()) is None:
                continue
            said = f"{dead.name} ended with code {dead.popen.returncode}"
            if dead.name == "router":
                code = 1
                break
            print(f"kvferry: {said}; starting it again", file=sys.stderr, flush=True)
            try:
                cluster.restart_worker(dead, stop.is_set)
            except StartFailed as error:
                # Whatever it is may be over the next time; the rest goes on meanwhile.
                print(f"kvferry: {error}", file=sys.stderr, flush=True)
                stop.wait(RESTART_PAUSE_SECONDS)
            said = ""
    except (StartFailed, ModelUnavailable) as error:
        if not stop.is_set():
            code, said = 2, str(error)
    finally:
        cluster.stop()
    if said:
        # Last, so that it is not buried under the log of processes that end.
        print(f"kvferry: error: {said}", file=sys.stderr)
    return code


def _failed(error: Exception, address: str) -> int:
    """Says what went wrong, and what to do if nothing listens. Returns the exit code."""
    message = str(error)
    if "Trying to connect an http1.x server" in message:
        message = f"UNAVAILABLE: {address} speaks HTTP; give the gRPC port as --address (50051 with `kvferry up`)"
    if message.startswith("UNAVAILABLE: failed to connect") and "refused" in message:
        message = f"UNAVAILABLE: no router answers at {address}; start one with `kvferry up`, or give --address"
    print(f"kvferry: error: {message}", file=sys.stderr)
    return 1


def _connect(command: GenerateCommand | ChatCommand | StatusCommand) -> Client:
    from kvferry.client import Client, ClientTls

    files = (command.tls_ca, command.tls_cert, command.tls_key)
    tls = ClientTls(*files, server_name=command.tls_name) if any((*files, command.tls_name)) else None
    return Client(command.address, tls)


def _generate(command: GenerateCommand) -> int:
    from kvferry.client import KvferryError

    text = command.prompt
    if text == "-":
        if sys.stdin.isatty():
            print("kvferry: type the prompt; Ctrl-D on a line of its own ends it", file=sys.stderr)
        # The newline that `echo` adds is no part of a question, and small models do not take it well.
        text = sys.stdin.buffer.read().decode("utf-8", "replace").rstrip("\r\n")
    try:
        with _connect(command) as client:
            stream = client.generate(
                [{"role": "user", "content": text}] if command.chat else text,
                timeout=command.timeout,
                max_tokens=command.max_tokens,
                temperature=command.temperature,
                top_p=command.top_p,
                top_k=command.top_k,
                min_p=command.min_p,
                repetition_penalty=command.repetition_penalty,
                presence_penalty=command.presence_penalty,
                frequency_penalty=command.frequency_penalty,
                seed=command.seed,
                n=command.n,
                num_logprobs=command.num_logprobs,
                min_tokens=command.min_tokens,
                stop=command.stop,
                return_token_ids=command.json,
            )
            if not command.json and command.n == 1:
                for piece in stream:
                    print(piece.text, end="", flush=True)
                print()
            results = stream.results()
    except (KvferryError, ValueError, OSError) as error:
        # OSError: the CA's file. ValueError: a number that the wire has no room for.
        return _failed(error, command.address)
    except KeyboardInterrupt:
        return 130
    if command.json:
        answers = [dataclasses.asdict(result) for result in results]
        shown = answers[0] if command.n == 1 else answers
        # A token's bytes need not be characters; JSON has only those.
        print(json.dumps(shown, ensure_ascii=False, indent=2, default=lambda raw: raw.decode("utf-8", "replace")))
    elif command.n > 1:
        for result in results:
            print(f"[{result.index}] {result.text}")
    return 0


def _chat(command: ChatCommand) -> int:
    from kvferry.chat import Conversation, run_chat

    options = {
        "max_tokens": command.max_tokens,
        "temperature": command.temperature,
        "top_p": command.top_p,
        "seed": command.seed,
    }
    with _connect(command) as client:
        return run_chat(client, Conversation(command.system), options)


def _status(command: StatusCommand) -> int:
    from kvferry.client import KvferryError

    try:
        with _connect(command) as client:
            status = client.cluster_status()
    except (KvferryError, OSError) as error:
        return _failed(error, command.address)
    print(f"{status.ready_pairs} ready pairs, {status.queued_requests} queued, {status.running_requests} running")
    table = Table(box=None, pad_edge=False)
    for column in ("worker", "tier", "address", "state", "pages", "queued", "runs", "hits", "seen"):
        table.add_column(column, no_wrap=True)
    for worker in status.workers:
        table.add_row(
            worker.worker_id or "?",
            worker.tier,
            worker.address,
            worker.state,
            f"{worker.free_pages}+{worker.cached_pages}/{worker.total_pages}",
            f"{worker.queued_seconds:.1f} s",
            str(worker.running_sequences),
            f"{worker.hit_rate:.0%}",
            f"{worker.last_seen_ms / 1e3:.1f} s",
        )
    # As wide as it needs to be where nobody looks at it: in a pipe.
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    for worker in status.workers:
        if worker.reason:
            print(f"{worker.worker_id or worker.address}: {worker.reason}")
    print("pages: free + cached / all; queued: time for prompts sent there; hits: prompt tokens found in its cache")
    return 0


def _models(command: ModelsCommand) -> int:
    from engine.model_store import BUILT_IN, prepared_models

    if command.action == "prepare":
        print(_folder_of(command.model))
        return 0
    table = Table("model", "state", "MB", "folder")
    prepared = prepared_models()
    for name, folder, size in prepared:
        table.add_row(name, "prepared", f"{size / 1e6:.0f}", str(folder))
    for name in BUILT_IN.keys() - {name for name, _, _ in prepared}:
        table.add_row(name, "not prepared yet", "", "")
    Console().print(table)
    return 0
