"""Addresses as host:port. An IPv6 host may be in brackets, as in URLs and gRPC, or without brackets, as Kubernetes
writes a pod's own address into its environment."""

from __future__ import annotations

import ipaddress

ANY_HOSTS = frozenset({"0.0.0.0", "::"})
"""Hosts that mean "all addresses of this machine". :: includes IPv4 if the system has both."""


def bare_host(host: str) -> str:
    """A host without brackets, for sockets."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def join_address(host: str, port: int) -> str:
    """host:port in the form of URLs and gRPC."""
    bare = bare_host(host)
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Host, without brackets, and port. Raises ValueError with a message for users."""
    host, _, port = address.rpartition(":")
    bare = bare_host(host)
    is_wrong = not bare or "/" in bare or not port.isdigit() or not 1 <= int(port) <= 65535
    if ":" in bare and not is_wrong:
        try:
            ipaddress.IPv6Address(bare.partition("%")[0])
        except ValueError:
            is_wrong = True
    if is_wrong:
        raise ValueError(f"{address!r} must look like host:port or [IPv6]:port")
    return bare, int(port)


def normal_address(address: str) -> str:
    """The address, with brackets around an IPv6 host. Raises ValueError with a message for users."""
    return join_address(*split_address(address))
