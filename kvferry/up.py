"""`kvferry up`: runs a cluster on this machine until a signal stops it."""

from __future__ import annotations

import signal
import sys
import threading

from engine.model_store import ModelUnavailable
from local_cluster.cluster import LocalCluster
from local_cluster.config import ClusterConfig
from local_cluster.process import StartFailed

RESTART_PAUSE_SECONDS = 2.0
"""Pause after a failed restart of a worker, before the next try."""


def run_up(config: ClusterConfig) -> int:
    """Runs until a signal comes or the router ends. Returns the exit code."""
    stop = threading.Event()
    cluster = LocalCluster(config)

    def on_signal(*_: object) -> None:
        if stop.is_set():
            cluster.kill()  # a second signal skips the drain
        stop.set()

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, on_signal)
    code, message = 0, ""
    kinds = (("prefill", config.num_prefill), ("decode", config.num_decode), ("colocated", config.num_colocated))
    workers = " and ".join(f"{number} {kind}" for kind, number in kinds if number)
    print(f"kvferry: starting a router and {workers} worker(s) for {config.model}", file=sys.stderr, flush=True)
    try:
        cluster.start(stop.is_set)
        http = cluster.find("router").info["http"]
        print(
            f"kvferry: ready on {cluster.address} and {http}/v1; Ctrl-C stops the cluster", file=sys.stderr, flush=True
        )
        while not stop.wait(0.2):
            if (dead := cluster.dead()) is None:
                continue
            message = f"{dead.name} ended with code {dead.popen.returncode}"
            if dead.name == "router":
                code = 1
                break
            print(f"kvferry: {message}; restarting the worker", file=sys.stderr, flush=True)
            try:
                cluster.restart_worker(dead, stop.is_set)
            except StartFailed as error:
                # The cause may be temporary, and the other processes continue.
                print(f"kvferry: {error}", file=sys.stderr, flush=True)
                stop.wait(RESTART_PAUSE_SECONDS)
            message = ""
    except (StartFailed, ModelUnavailable) as error:
        if not stop.is_set():
            code, message = 2, str(error)
    finally:
        cluster.stop()
    if message:
        # Printed last, after the logs of the processes that end.
        print(f"kvferry: error: {message}", file=sys.stderr)
    return code
