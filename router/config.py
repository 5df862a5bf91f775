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
"""gRPC's prefix of a name whose DNS addresses are all workers."""


def split_addresses(addresses: Iterable[str]) -> list[str]:
    """Splits addresses, each of which may be a comma-separated list."""
    return [address.strip() for several in addresses for address in several.split(",") if address.strip()]


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """When a worker counts as lost."""

    worker_silence_seconds: float = 10.0
    """A worker counts as lost after this long without a message; workers send one every second. Its requests continue
    on other workers, and the router reconnects."""


@dataclass(frozen=True)
class RouterConfig(WatchOptions):
    """A router: accepts prompts over gRPC and HTTP and serves them with prefill and decode workers."""

    model: str
    """Folder of a prepared model (the router reads its tokenizer only), or a name that `kvferry models` lists."""
    prefill: tuple[str, ...] = ()
    """Prefill workers: host:port, a comma-separated list, or dns:///name:port. A DNS name is resolved periodically, so
    workers can be added and removed."""
    decode: tuple[str, ...] = ()
    """Decode workers, in the same forms."""
    colocated: tuple[str, ...] = ()
    """Workers that do both, in the same forms. Colocated workers and pairs can be combined."""
    process: ProcessConfig = field(default_factory=ProcessConfig)
    served_model_name: str = ""
    """Name that clients use. Empty: the folder's name."""
    router_id: str = field(default_factory=lambda: f"{socket.gethostname()}:{os.getpid()}")
    """Name of this router in the workers' logs."""
    worker_loss_seconds: float = 30.0
    """If a running request loses the last usable pair, it waits this many seconds for another pair, then fails."""
    drain_seconds: float = 120.0
    """After SIGTERM the router rejects new requests, and running requests have this long to end. A second SIGTERM exits
    at once."""

    http_port: int = 0
    """Port of the OpenAI-compatible HTTP API, on the same host; 0 picks a free one."""
    http_keepalive_seconds: float = 75.0
    """How long an idle HTTP connection stays open. Must be longer than a proxy in front keeps connections (often 60 s),
    or the proxy sends requests on connections that are closing."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may call the HTTP API from a browser, such as https://chat.example.com; * for all.
    None given: no web page may."""
    max_queue_requests: int = 1024
    """Most requests in the queue; more are refused with RESOURCE_EXHAUSTED."""
    max_queue_tokens: MaybeNumber = None
    """Most prompt tokens in the queue. Unset: no limit."""
    max_queue_seconds: MaybeSeconds = None
    """Longest time in the queue, in seconds; after that a request is refused with RESOURCE_EXHAUSTED. Unset: no limit
    except the client's deadline."""

    deadline_admission: DeadlineAdmission = "always"
    """predictive: a request is refused at once with RESOURCE_EXHAUSTED if, at the rate that workers report, its first
    token would miss the deadline. always: every request is accepted."""
    routing: Routing = "cache_aware"
    """How workers are selected. cache_aware: workers with the shortest expected time to first token and cached pages;
    round_robin: each worker in turn, for comparison."""
    tls_clients: Literal["any", "verified"] = "any"
    """With --tls-folder, who may call this router: any client, or only clients with a certificate of the same CA."""
    http_tls: bool = True
    """With --tls-folder, the HTTP API uses TLS too, with the same files and the same --tls-clients. --no-http-tls:
    plain HTTP, for use behind a proxy that terminates TLS."""
    otlp_endpoint: str = ""
    """OTLP/gRPC address of an OpenTelemetry collector for traces, such as http://collector:4317. Needs
    `pip install .[tracing]`. OTEL_* variables (sampler, resource, headers) apply. Empty: no traces."""
    max_unread_tokens: int = 8192
    """Most tokens that may wait in the router for a slow client; with more, its request ends with
    RESOURCE_EXHAUSTED."""

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
            raise ValueError("--tls-clients verified needs --tls-folder: without TLS, clients can't be verified")
        if self.tls_clients == "verified" and not self.http_tls:
            raise ValueError("--tls-clients verified excludes --no-http-tls: plain HTTP would be open to any client")
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
                f"at least {MIN_SILENCE_SECONDS:g} are needed, since workers send a message once a second"
            )
        if self.drain_seconds < 0:
            raise ValueError(f"--drain-seconds is {self.drain_seconds:g}; it can't be negative")
        if self.worker_loss_seconds < 0:
            raise ValueError(f"--worker-loss-seconds is {self.worker_loss_seconds}; it can't be negative")
