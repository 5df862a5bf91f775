"""Settings that the workers of all tiers share. No torch in here."""

from __future__ import annotations

import socket
import uuid
from dataclasses import dataclass, field
from typing import Literal

from engine.config import EngineConfig
from rpc.addresses import ANY_HOSTS, bare_host, split_address
from rpc.config import ProcessConfig

DrainMode = Literal["finish", "handover"]
Overlap = Literal["auto", "on", "off"]


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """How much a worker does at once."""

    max_num_sequences: int = 64
    """Most sequences at once on a worker."""


@dataclass(frozen=True, kw_only=True)
class OverlapOptions:
    """How workers that generate tokens take their steps."""

    overlap: Overlap = "auto"
    """Async scheduling, at decode and colocated workers: schedule and launch a step while the step before it is
    computed. auto: on a GPU."""


@dataclass(frozen=True)
class WorkerConfig(BatchOptions):
    """What any worker needs."""

    engine: EngineConfig
    process: ProcessConfig = field(default_factory=ProcessConfig)
    worker_id: str = ""
    """Name of this worker, stable over restarts. Empty: host name and port."""
    advertise_address: str = ""
    """host:port at which other workers reach this one. Empty: where it listens; needed with --host 0.0.0.0 or ::."""
    drain: DrainMode = "finish"
    """On SIGTERM. finish: requests that have begun run to their end. handover: they are requeued, and continue on other
    workers. Transfers end well in both."""
    drain_seconds: float = 120.0
    """With finish: requests that still run after this time are requeued. A second SIGTERM ends the process at once."""
    wedge_seconds: float = 60.0
    """If the engine thread or the transfer thread stands still for longer than this while it has work, the worker is
    not ready, and its requests continue elsewhere. Must be longer than any step takes."""
    require_rdma: bool = False
    """Move pages over RDMA (or within the machine) and never over TCP; without an RDMA device the worker ends."""

    def __post_init__(self) -> None:
        if self.advertise_address:
            try:
                split_address(self.advertise_address)
            except ValueError as error:
                raise ValueError(f"--advertise-address: {error}") from None
        if bare_host(self.process.host) in ANY_HOSTS and not self.advertise_address:
            raise ValueError(
                f"--host is {self.process.host}, which others can't connect to; "
                "give --advertise-address HOST:PORT as they reach this worker"
            )
        if self.max_num_sequences < 1:
            raise ValueError(f"--max-num-sequences is {self.max_num_sequences}; at least 1 is needed")
        if self.drain_seconds < 0:
            raise ValueError(f"--drain-seconds is {self.drain_seconds:g}; it can't be negative")
        if self.wedge_seconds <= 0:
            raise ValueError(f"--wedge-seconds is {self.wedge_seconds:g}; it must be above 0")


def default_worker_id(port: int) -> str:
    """Host name and port."""
    return f"{socket.gethostname()}:{port}"


def new_incarnation_id() -> str:
    """An id that no other start of any process has."""
    return uuid.uuid4().hex
