"""Settings of a router."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from rpc.addresses import split_address
from rpc.config import ProcessConfig
from rpc.placeholders import MaybeNumber, MaybeSeconds

DeadlineAdmission = Literal["always", "predictive"]
Routing = Literal["cache_aware", "round_robin"]
MIN_SILENCE_SECONDS = 3.0
DNS_PREFIX = "dns:///"
"""Before a name whose addresses are all workers, as gRPC writes it."""


def split_addresses(addresses: Iterable[str]) -> list[str]:
    """Addresses of which each may be a comma list."""
    return [address.strip() for several in addresses for address in several.split(",") if address.strip()]


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """When a worker counts as lost."""

    worker_silence_seconds: float = 10.0
    """A worker that was not heard of for this long counts as lost (it says something every second): its requests go on
    elsewhere, and it is connected anew."""


@dataclass(frozen=True)
class RouterConfig(WatchOptions):
    """A router: takes prompts over gRPC and serves them with prefill and decode workers."""

    model: str
    """Folder of a prepared model (the router reads its tokenizer only), or what `kvferry models` lists."""
    prefill: tuple[str, ...] = ()
    """Prefill workers: host:port, comma lists of them, or dns:///name:port, whose addresses are looked up again and
    again, so that workers may come and go."""
    decode: tuple[str, ...] = ()
    """Decode workers, in the same forms."""
    colocated: tuple[str, ...] = ()
    """Workers that do both, in the same forms; such workers and pairs may serve side by side."""
    process: ProcessConfig = field(default_factory=ProcessConfig)
    served_model_name: str = ""
    """Name that clients use. Empty: the folder's name."""
    router_id: str = field(default_factory=lambda: f"{socket.gethostname()}:{os.getpid()}")
    """Name of this router in the workers' logs."""
    worker_loss_seconds: float = 30.0
    """A request that had workers and lost the last usable pair waits this long for another before it fails."""
    drain_seconds: float = 120.0
    """On SIGTERM nothing new is taken, and what runs may run for this long; a second SIGTERM ends it at once."""

    http_port: int = 0
    """Port of the OpenAI-compatible HTTP front, on the same host; 0 picks a free one."""
    http_keepalive_seconds: float = 75.0
    """How long an HTTP connection without a request stays open: longer than a proxy before it keeps it (often 60 s), or
    the proxy sends requests into connections that are closing."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may call the HTTP front from a browser, such as https://chat.example.com; * for all.
    None given: no page may."""
    max_queue_requests: int = 1024
    """Requests that may wait for workers; one more is refused with RESOURCE_EXHAUSTED."""
    max_queue_tokens: MaybeNumber = None
    """Prompt tokens that may wait for workers. Unset: no limit."""
    max_queue_seconds: MaybeSeconds = None
    """A request that no worker began within this time is refused with RESOURCE_EXHAUSTED. Unset: no limit but the
    client's deadline."""

    deadline_admission: DeadlineAdmission = "always"
    """predictive: a request whose first token can't come before its deadline, at the rate that workers report, is
    refused at once with RESOURCE_EXHAUSTED; always: it may wait and try."""
    routing: Routing = "cache_aware"
    """Choice among workers with room: cache_aware, where the first token comes soonest and pages are known;
    round_robin, each in its turn, for comparison."""
    tls_clients: Literal["any", "verified"] = "any"
    """With --tls-folder, who may call this router: anybody, or only clients with a certificate of the same CA."""
    http_tls: bool = True
    """With --tls-folder, the HTTP front speaks TLS too, with the same files and for the same clients. --no-http-tls:
    in the clear, for those behind a proxy that ends TLS."""
    otlp_endpoint: str = ""
    """Where traces of requests go: an OpenTelemetry collector's OTLP/gRPC address, such as http://collector:4317. Needs
    `pip install .[tracing]`; OTEL_* variables (sampler, resource, headers) are honoured. Empty: no traces."""
    max_unread_tokens: int = 8192
    """Tokens that may wait for a client that reads slowly, beside what the network holds; with one more its request
    is ended with RESOURCE_EXHAUSTED."""

    def __post_init__(self) -> None:
        for flag, addresses in (
            ("--prefill", self.prefill),
            ("--decode", self.decode),
            ("--colocated", self.colocated),
        ):
            for address in split_addresses(addresses):
                try:
                    split_address(address.removeprefix(DNS_PREFIX))
                except ValueError as error:
                    raise ValueError(f"{flag}: {error}, or dns:///name:port") from None
        if not self.http_keepalive_seconds > 0:
            raise ValueError(f"--http-keepalive-seconds is {self.http_keepalive_seconds:g}; it must be above 0")
        if not 0 <= self.http_port <= 65535:
            raise ValueError(f"--http-port is {self.http_port}; it must be between 0 and 65535")
        if self.tls_clients == "verified" and self.process.tls_folder is None:
            raise ValueError("--tls-clients verified needs --tls-folder: without TLS nobody can be told apart")
        if self.tls_clients == "verified" and not self.http_tls:
            raise ValueError("--tls-clients verified excludes --no-http-tls: HTTP would be open to anybody")
        if self.otlp_endpoint and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ValueError(f"--otlp-endpoint is {self.otlp_endpoint!r}; it must look like http://collector:4317")
        if self.max_queue_requests < 1:
            raise ValueError(f"--max-queue-requests is {self.max_queue_requests}; at least 1 is needed")
        for flag, limit in (
            ("--max-queue-tokens", self.max_queue_tokens),
            ("--max-queue-seconds", self.max_queue_seconds),
        ):
            if limit is not None and not limit > 0:
                raise ValueError(f"{flag} is {limit}; it must be above 0")
        if self.max_unread_tokens < 1:
            raise ValueError(f"--max-unread-tokens is {self.max_unread_tokens}; at least 1 is needed")
        if self.worker_silence_seconds < MIN_SILENCE_SECONDS:
            raise ValueError(
                f"--worker-silence-seconds is {self.worker_silence_seconds:g}; "
                f"at least {MIN_SILENCE_SECONDS:g} are needed, since workers speak once a second"
            )
        if self.drain_seconds < 0:
            raise ValueError(f"--drain-seconds is {self.drain_seconds:g}; it can't be negative")
        if self.worker_loss_seconds < 0:
            raise ValueError(f"--worker-loss-seconds is {self.worker_loss_seconds}; it can't be negative")
