"""Settings of a router."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field

from rpc.config import ProcessConfig


@dataclass(frozen=True)
class RouterConfig:
    """A router: takes prompts over gRPC and serves them with prefill and decode workers."""

    model: str
    """Folder of a prepared model (the router reads its tokenizer only), or what `kvferry models` lists."""
    prefill: tuple[str, ...] = ()
    """host:port of each prefill worker."""
    decode: tuple[str, ...] = ()
    """host:port of each decode worker."""
    colocated: tuple[str, ...] = ()
    """host:port of each worker that does both; such workers and pairs may serve side by side."""
    process: ProcessConfig = field(default_factory=ProcessConfig)
    served_model_name: str = ""
    """Name that clients use. Empty: the folder's name."""
    router_id: str = field(default_factory=lambda: f"{socket.gethostname()}:{os.getpid()}")
    """Name of this router in the workers' logs."""
    worker_loss_seconds: float = 30.0
    """A request that had workers and lost the last usable pair waits this long for another before it fails."""

    max_queue_requests: int = 1024
    """Requests that may wait for workers; one more is refused with RESOURCE_EXHAUSTED."""

    max_unread_tokens: int = 8192
    """Tokens that may wait for a client that reads slowly, beside what the network holds; with one more its request
    is ended with RESOURCE_EXHAUSTED."""

    def __post_init__(self) -> None:
        for flag, addresses in (
            ("--prefill", self.prefill),
            ("--decode", self.decode),
            ("--colocated", self.colocated),
        ):
            for address in addresses:
                host, _, port = address.rpartition(":")
                if not host or not port.isdigit() or not 1 <= int(port) <= 65535:
                    raise ValueError(f"{flag} has {address!r}; it must look like host:port")
        if self.max_queue_requests < 1:
            raise ValueError(f"--max-queue-requests is {self.max_queue_requests}; at least 1 is needed")
        if self.max_unread_tokens < 1:
            raise ValueError(f"--max-unread-tokens is {self.max_unread_tokens}; at least 1 is needed")
        if self.worker_loss_seconds < 0:
            raise ValueError(f"--worker-loss-seconds is {self.worker_loss_seconds}; it can't be negative")
