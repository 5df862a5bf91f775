"""Mutual TLS between kvferry's own processes, and for clients of a router.

A folder holds `tls.crt`, `tls.key` and `ca.crt`, as cert-manager writes them into a Secret. Workers are reached by
addresses that change, so certificates do not name those: each has to be valid for the name TLS_NAME, and whoever has
one that the CA signed is one of us. Files that are renewed are read again: by servers at the next handshake, by
channels when they are opened. An HTTP server looks when it is told to.
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
        """Raises ConfigError if certificate, key and CA can't be used together."""
        folder = self.folder
        try:
            context.load_verify_locations(folder / "ca.crt")
            # With a password, so that OpenSSL does not ask at the terminal for that of an encrypted key.
            context.load_cert_chain(folder / "tls.crt", folder / "tls.key", password="")
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"--tls-folder {folder}: tls.crt, tls.key (not encrypted) and ca.crt can't be used together: {error}"
            ) from error

    def server_credentials(self, verify_clients: bool) -> grpc.ServerCredentials:
        """For a server; verify_clients: only those with a certificate of our CA may call. Raises ConfigError."""
        self.read()
        self.load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))  # gRPC would only say that it can't listen
        seen = self.changed_at()
        # gRPC takes None for "as before"; its types do not know.
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
                return unchanged  # being replaced; the next handshake looks again
            seen = now
            return renewed

        return grpc.dynamic_ssl_server_credentials(configuration(), fetch, verify_clients)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For a channel to another process of ours. Raises ConfigError."""
        certificate, key, ca = self.read()
        return grpc.ssl_channel_credentials(ca, key, certificate)

    def https(self, verify_clients: bool) -> HttpsContext:
        """For an HTTP server; verify_clients: as for gRPC. Raises ConfigError."""
        return HttpsContext(self, verify_clients)

    def changed_at(self) -> tuple[int, ...]:
        """Differs once a file was replaced."""
        try:
            return tuple((self.folder / name).stat().st_mtime_ns for name in ("tls.crt", "tls.key", "ca.crt"))
        except OSError:
            return ()


class HttpsContext:
    """What an HTTP server needs for TLS. `renew`, called now and then, takes up files that changed.

    A server keeps one context for its life; each handshake is handed on to the newest one. So a CA that is taken away
    is forgotten, which a context can't do.
    """

    def __init__(self, files: TlsFiles, verify_clients: bool) -> None:
        """Raises ConfigError."""
        self._files, self._verify_clients = files, verify_clients
        self._seen = self._tried = files.changed_at()
        files.read()
        self._newest, self.context = self._load(), self._load()
        self.context.sni_callback = self._hand_on

    def renew(self) -> None:
        """From the next handshake on, what is in the files now; what was there before, while they do not fit."""
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

    def _hand_on(self, connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Called in every handshake, before certificates are shown, whether a name was asked for or not."""
        connection.context = self._newest

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self._verify_clients:
            context.verify_mode = ssl.CERT_REQUIRED
        self._files.load(context)
        return context


def tls_files(config: ProcessConfig) -> TlsFiles | None:
    """Those of a process; None: it does without TLS."""
    return TlsFiles(config.tls_folder) if config.tls_folder is not None else None
