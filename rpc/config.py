"""Settings of every kvferry process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rpc.placeholders import MaybeFile, MaybeFolder, MaybeNumber, MaybePort, MaybeText

LogLevel = Literal["debug", "info", "warning", "error"]


class ConfigError(ValueError):
    """A setting can't be used on this machine. The message names the setting and what to change."""


@dataclass(frozen=True)
class ProcessConfig:
    """Addresses, files, logs and cores of a process."""

    host: str = "127.0.0.1"
    """Address to listen on. For access from other machines use 0.0.0.0 (IPv4), or :: (IPv6 and IPv4)."""
    port: int = 0
    """gRPC port; 0 picks a free one."""
    metrics_port: int = 0
    """HTTP port of /metrics; 0 picks a free one."""
    tls_folder: MaybeFolder = None
    """Folder with tls.crt, tls.key and ca.crt: enables TLS for gRPC, mutual TLS between kvferry processes. Certificates
    must be valid for the name kvferry. KV transfer over UCX and metrics are not encrypted."""
    health_port: MaybePort = None
    """A second gRPC port without TLS that serves only health checks, for probes. Unset: none; 0 picks a free one."""
    ready_file: MaybeFile = None
    """File to write as JSON (address, metrics address, pid) once the process is ready."""
    log_level: LogLevel = "info"
    """Least severe messages to log."""
    cpus: MaybeText = None
    """Cores this process may use, for example 0,2-3. Unset: all."""
    lifeline_fd: MaybeNumber = None
    """Read end of a pipe; the process exits when the write end is closed. For `kvferry up`."""

    def __post_init__(self) -> None:
        ports = (("--port", self.port), ("--metrics-port", self.metrics_port), ("--health-port", self.health_port or 0))
        for name, port in ports:
            if not 0 <= port <= 65535:
                raise ValueError(f"{name} is {port}; it must be between 0 and 65535")
        self.cpu_set()

    def cpu_set(self) -> set[int] | None:
        """The cores of `--cpus`. Raises ValueError if they can't be read."""
        if self.cpus is None:
            return None
        chosen: set[int] = set()
        try:
            for part in self.cpus.split(","):
                low, _, high = part.partition("-")
                chosen |= set(range(int(low), int(high or low) + 1))
        except ValueError:
            raise ValueError(f"--cpus is {self.cpus!r}; it must look like 0,2-3") from None
        return chosen
