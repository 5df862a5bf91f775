"""TLS of a client."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from rpc.channel import CLIENT_OPTIONS


@dataclass(frozen=True)
class ClientTls:
    """TLS settings of a client for a router, or for a proxy in front of the router."""

    ca: Path | None = None
    """PEM file of the CA that signed the router's certificate. None: those that this machine trusts."""
    certificate: Path | None = None
    """PEM file of the client's own certificate, for routers with `--tls-clients verified`."""
    key: Path | None = None
    """PEM file of its key."""
    server_name: str | None = None
    """Name that the router's certificate has to be valid for. None: the host of the address. Certificates of kvferry's
    own processes are valid for the name kvferry."""

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises OSError if a file can't be read."""
        files = (path.read_bytes() if path is not None else None for path in (self.ca, self.key, self.certificate))
        return grpc.ssl_channel_credentials(*files)

    def options(self) -> list[tuple[str, Any]]:
        """Of the channel."""
        named = [("grpc.ssl_target_name_override", self.server_name)] if self.server_name is not None else []
        return [*CLIENT_OPTIONS, *named]
