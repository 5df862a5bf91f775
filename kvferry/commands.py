"""The commands and their options. Imports neither torch nor gRPC."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tyro.conf import Positional

from engine.config import ModelOptions
from engine.model_store import DEFAULT_MODEL
from local_cluster.config import AddressOptions, ClusterConfig, OutputOptions, SchedulingOptions, WorkerOptions
from rpc.placeholders import MaybeFile, MaybeFloat, MaybeNumber, MaybeSeconds, MaybeText

DEFAULT_ADDRESS = "127.0.0.1:50051"


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
        """All settings as one. Raises ValueError for settings that exclude each other."""
        groups = (self.serving, self.workers, self.scheduling, self.addresses, self.output)
        return ClusterConfig(**{name: value for group in groups for name, value in vars(group).items()})


@dataclass(frozen=True, kw_only=True)
class RouterConnection:
    """Address of the router, and TLS."""

    address: str = DEFAULT_ADDRESS
    """host:port of the router."""
    tls_ca: MaybeFile = None
    """PEM file of the CA of the router's certificate. Any --tls option turns TLS on; with all unset the connection
    is plaintext."""
    tls_name: MaybeText = None
    """Name that the router's certificate must be valid for. Certificates of kvferry's processes are valid for
    "kvferry". Unset: the host of the address."""
    tls_cert: MaybeFile = None
    """PEM file of the client's certificate, for routers with --tls-clients verified."""
    tls_key: MaybeFile = None
    """PEM file of the key of the client's certificate."""

    def __post_init__(self) -> None:
        if self.address.startswith(("http://", "https://")):
            raise ValueError(f"--address is {self.address}; it must be host:port of gRPC, such as {DEFAULT_ADDRESS}")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key belong together")


@dataclass(frozen=True)
class GenerateCommand(RouterConnection):
    """Sends a prompt to a running router and streams the output."""

    prompt: Positional[str] = "-"
    """The prompt. Unset or "-": read from standard input."""
    chat: bool = True
    """Send the prompt as a user message through the model's chat template. --no-chat sends it as plain text."""
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
    """Above 1: tokens that are in the prompt or output become less likely."""
    presence_penalty: MaybeFloat = None
    """Above 0: tokens that are in the output become less likely."""
    frequency_penalty: MaybeFloat = None
    """Above 0: tokens become less likely with each occurrence in the output."""
    seed: MaybeNumber = None
    """The same seed gives the same output."""
    n: int = 1
    """Number of completions, printed one after another."""
    num_logprobs: MaybeNumber = None
    """With --json: log-probabilities of the sampled tokens and of this many likeliest tokens."""
    min_tokens: MaybeNumber = None
    """Least output tokens."""
    stop: tuple[str, ...] = ()
    """The output ends at any of these strings."""
    timeout: MaybeSeconds = None
    """Deadline in seconds for queue, prefill, transfer and decode together."""
    json: bool = False
    """Print text, token ids, usage, timings and KV bytes as JSON at the end, instead of streaming."""


@dataclass(frozen=True)
class ChatCommand(RouterConnection):
    """Chats with the model of a running router; /help lists the commands, Ctrl-D ends."""

    system: str = ""
    """System message of the conversation."""
    max_tokens: int = 512
    """Most output tokens of each turn."""
    temperature: float = 0.7
    """0 is greedy."""
    top_p: MaybeFloat = 0.9
    """Keep the smallest set of tokens whose probability reaches this."""
    seed: MaybeNumber = None
    """The same seed gives the same output."""


@dataclass(frozen=True)
class StatusCommand(RouterConnection):
    """Shows the workers of a running router."""


@dataclass(frozen=True)
class ModelsCommand:
    """Lists prepared models, or prepares one."""

    action: Positional[Literal["list", "prepare"]] = "list"
    """List the prepared models, or prepare one."""
    model: Positional[str] = DEFAULT_MODEL
    """The model to prepare: name of a built-in model, a GGUF file, a hub id."""


@dataclass(frozen=True)
class DemoCommand:
    """Starts a cluster, sends one long prompt, shows the time of each stage, and stops the cluster."""

    model: str = DEFAULT_MODEL
    """Name of a built-in model, folder, GGUF file or hub id."""
    max_tokens: int = 120
    """Most output tokens."""
