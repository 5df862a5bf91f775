"""What can be said on the command line, and what each command is for. Nothing heavy in here."""

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
