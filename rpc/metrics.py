"""Serves Prometheus metrics over HTTP, from a registry that is not global."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, start_http_server

from rpc.addresses import bare_host
from rpc.server import PortInUse

SECONDS_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300)
STEP_BUCKETS = tuple(sorted({*SECONDS_BUCKETS, 0.03, 0.04, 0.06, 0.07, 0.08, 0.09, 0.12, 0.15}))
"""Finer around typical limits of the time between tokens. Prometheus interpolates percentiles within a bucket, and
autoscalers use these percentiles."""


def serve_metrics(registry: CollectorRegistry, host: str, port: int) -> int:
    """Serves /metrics in a thread. Returns the port. Raises PortInUse."""
    try:
        server, _ = start_http_server(port, addr=bare_host(host), registry=registry)
    except OSError as error:
        raise PortInUse(f"--metrics-port {port} on {host} can't be listened on: {error}") from error
    bound: int = server.server_port
    return bound
