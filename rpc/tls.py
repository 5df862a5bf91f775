"""Mutual TLS between kvferry's own processes, and for clients of a router.

A folder holds `tls.crt`, `tls.key` and `ca.crt`, as cert-manager writes them into a Secret. Workers are reached by
addresses that change, so certificates do not name those: each has to be valid for the name TLS_NAME, and whoever has
one that the CA signed is one of us. Files that are renewed are read again: by servers at the next handshake, by
channels when they are opened.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import grpc

from rpc.config import ConfigError, ProcessConfig

TLS_NAME = "kvferry"

NAME_OPTION = ("grpc.ssl_target_name_override", TLS_NAME)


@dataclass(frozen=True)
class TlsFiles:
    """Certificate, key and CA of a process."""

    folder: Path

    def read(self) -> tuple[bytes, bytes, bytes]:
        """(certificate chain, private key, CA), PEM. Raises ConfigError if one can't be read."""
        try:
            certificate, key, ca = ((self.folder / name).read_bytes() for name in ("tls.crt", "tls.key", "ca.crt"))
        except OSError as error:
            raise ConfigError(f"--tls-folder {self.folder}: {error.strerror}: {error.filename}") from error
        for name, content in (("tls.crt", certificate), ("tls.key", key), ("ca.crt", ca)):
            if b"-----BEGIN" not in content:
                raise ConfigError(f"--tls-folder {self.folder}: {name} is not a PEM file")
        return certificate, key, ca

    def server_credentials(self, verify_clients: bool) -> grpc.ServerCredentials:
        """For a server; verify_clients: only those with a certificate of our CA may call. Raises ConfigError."""
        seen = self._changed_at()
        # gRPC takes None for "as before"; its types do not know.
        unchanged = cast(grpc.ServerCertificateConfiguration, None)

        def configuration() -> grpc.ServerCertificateConfiguration:
            certificate, key, ca = self.read()
            return grpc.ssl_server_certificate_configuration([(key, certificate)], ca)

        def fetch() -> grpc.ServerCertificateConfiguration:
            nonlocal seen
            now = self._changed_at()
            if now == seen:
                return unchanged
            try:
                renewed = configuration()
            except ConfigError:
                return unchanged  # being replaced; the next handshake looks again
            seen = now
            return renewed

        return grpc.dynamic_ssl_server_credentials(configuration(), fetch, verify_clients)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For a channel to another process of ours. Raises ConfigError."""
        certificate, key, ca = self.read()
        return grpc.ssl_channel_credentials(ca, key, certificate)

    def _changed_at(self) -> tuple[int, ...]:
        try:
            return tuple((self.folder / name).stat().st_mtime_ns for name in ("tls.crt", "tls.key", "ca.crt"))
        except OSError:
            return ()


def tls_files(config: ProcessConfig) -> TlsFiles | None:
    """Those of a process; None: it does without TLS."""
    return TlsFiles(config.tls_folder) if config.tls_folder is not None else None
