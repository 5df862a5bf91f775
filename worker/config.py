"""Settings that both tiers' workers share. No torch in here."""

from __future__ import annotations

import socket
import uuid
from dataclasses import dataclass, field

from engine.config import EngineConfig
from rpc.config import ProcessConfig


@dataclass(frozen=True)
class WorkerConfig:
    """What any worker needs."""

    engine: EngineConfig
    process: ProcessConfig = field(default_factory=ProcessConfig)
    worker_id: str = ""
    """Name of this worker, stable over restarts. Empty: host name and port."""
    advertise_address: str = ""
    """host:port at which other workers reach this one. Empty: where it listens; needed with --host 0.0.0.0."""
    max_num_sequences: int = 64
    """Most sequences at once."""

    def __post_init__(self) -> None:
        if self.process.host in ("0.0.0.0", "::", "[::]") and not self.advertise_address:
            raise ValueError(
                f"--host is {self.process.host}, which others can't connect to; "
                "give --advertise-address HOST:PORT as they reach this worker"
            )
        if self.max_num_sequences < 1:
            raise ValueError(f"--max-num-sequences is {self.max_num_sequences}; at least 1 is needed")


def default_worker_id(port: int) -> str:
    """Host name and port."""
    return f"{socket.gethostname()}:{port}"


def new_incarnation_id() -> str:
    """An id that no other start of any process has."""
    return uuid.uuid4().hex
