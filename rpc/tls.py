"""Mutual TLS between kvferry processes, and TLS for clients of a router.

A folder holds `tls.crt`, `tls.key` and `ca.crt`, as cert-manager writes them into a Secret. Workers' addresses change,
so certificates are valid for the name TLS_NAME. A process with a certificate of the CA is trusted. Renewed files
are read again: by gRPC servers at the next handshake, by channels when opened, by HTTP servers when `renew` is called.
"""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import grpc

from rpc.config import ConfigError, ProcessConfig

log = logging.getLogger(__name__)

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

    def load(self, context: ssl.SSLContext) -> None:
        """Loads the files into a context. Raises ConfigError if certificate, key and CA can't be used together."""
        folder = self.folder
        try:
            context.load_verify_locations(folder / "ca.crt")
            # The empty password keeps OpenSSL from asking for one on the terminal if the key is encrypted.
            context.load_cert_chain(folder / "tls.crt", folder / "tls.key", password="")
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"--tls-folder {folder}: tls.crt, tls.key (not encrypted) and ca.crt can't be used together: {error}"
            ) from error

    def server_credentials(self, verify_clients: bool) -> grpc.ServerCredentials:
        """For a gRPC server. verify_clients: only clients with a certificate of our CA may call. Raises ConfigError."""
        self.read()
        self.load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))  # gRPC's own error would not name the reason
        seen = self.changed_at()
        # gRPC accepts None for "unchanged", but its type stubs do not.
        unchanged = cast(grpc.ServerCertificateConfiguration, None)

        def configuration() -> grpc.ServerCertificateConfiguration:
            certificate, key, ca = self.read()
            return grpc.ssl_server_certificate_configuration([(key, certificate)], ca)

        def fetch() -> grpc.ServerCertificateConfiguration:
            nonlocal seen
            now = self.changed_at()
            if now == seen:
                return unchanged
            try:
                renewed = configuration()
            except ConfigError:
                return unchanged  # the files are being replaced; the next handshake reads them again
            seen = now
            return renewed

        return grpc.dynamic_ssl_server_credentials(configuration(), fetch, verify_clients)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For a channel to another kvferry process. Raises ConfigError."""
        certificate, key, ca = self.read()
        return grpc.ssl_channel_credentials(ca, key, certificate)

    def https(self, verify_clients: bool) -> HttpsContext:
        """For an HTTP server. verify_clients: as for gRPC. Raises ConfigError."""
        return HttpsContext(self, verify_clients)

    def changed_at(self) -> tuple[int, ...]:
        """Modification times of the files, which differ once a file was replaced."""
        try:
            return tuple((self.folder / name).stat().st_mtime_ns for name in ("tls.crt", "tls.key", "ca.crt"))
        except OSError:
            return ()


class HttpsContext:
    """TLS for an HTTP server. `renew` must be called periodically to load changed files.

    A server keeps one context. Each handshake is switched to the newest context, because a context can't remove a CA
    that it has loaded.
    """

    def __init__(self, files: TlsFiles, verify_clients: bool) -> None:
        """Raises ConfigError."""
        self._files, self._verify_clients = files, verify_clients
        self._seen = self._tried = files.changed_at()
        files.read()
        self._newest, self.context = self._load(), self._load()
        self.context.sni_callback = self._use_newest

    def renew(self) -> None:
        """Loads changed files for the next handshakes. If they don't fit together, logs once and keeps the old ones."""
        changed_at = self._files.changed_at()
        if changed_at == self._seen:
            return
        try:
            self._newest = self._load()
            self._seen = changed_at
        except ConfigError as error:
            if changed_at != self._tried:
                log.warning("renewed TLS files can't be used", extra={"reason": error})
        self._tried = changed_at

    def _use_newest(self, connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """OpenSSL calls this in every handshake before it sends certificates, even without a server name."""
        connection.context = self._newest

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self._verify_clients:
            context.verify_mode = ssl.CERT_REQUIRED
        self._files.load(context)
        return context


def tls_files(config: ProcessConfig) -> TlsFiles | None:
    """TLS files of a process; None: the process does not use TLS."""
    return TlsFiles(config.tls_folder) if config.tls_folder is not None else None
