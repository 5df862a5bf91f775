"""A CA and certificates as cert-manager would write them, made with openssl."""

from __future__ import annotations

import subprocess


def run(*arguments, folder):
    subprocess.run(["openssl", *map(str, arguments)], cwd=folder, check=True, capture_output=True)


class Authority:
    """A CA in a folder."""

    def __init__(self, folder):
        folder.mkdir(parents=True)
        self.folder = folder
        run(
            "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
            "-subj", "/CN=tests", "-keyout", "ca.key", "-out", "ca.crt", folder=folder,
        )  # fmt: skip

    def issue(self, folder, name="kvferry"):
        """Writes tls.crt, tls.key and ca.crt into a folder; again: renews them."""
        folder.mkdir(parents=True, exist_ok=True)
        run(
            "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", f"/CN={name}",
            "-addext", f"subjectAltName=DNS:{name}", "-keyout", folder / "tls.key.new", "-out", "request",
            folder=self.folder,
        )  # fmt: skip
        run(
            "x509", "-req", "-in", "request", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2",
            "-copy_extensions", "copyall", "-out", folder / "tls.crt.new", folder=self.folder,
        )  # fmt: skip
        (folder / "ca.crt").write_bytes((self.folder / "ca.crt").read_bytes())
        for file in ("tls.key", "tls.crt"):
            (folder / f"{file}.new").replace(folder / file)
        return folder
