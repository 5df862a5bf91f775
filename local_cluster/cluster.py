"""A whole cluster on one machine: workers and router as processes on loopback.

Processes are pinned to disjoint cores where there are enough. Each child holds the read end of its own pipe.
When this process dies, for any reason, the pipes close and the children end.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO, cast

from engine.model_store import resolve_model
from local_cluster.config import TIERS, ClusterConfig, Tier
from local_cluster.process import POLL_SECONDS, Process, StartFailed, end_all, share_of_cores, start_process
from protos import inference_pb2
from router.config import RouterConfig
from router_client.clients import Client
from router_client.errors import KvferryError
from rpc.config import ProcessConfig
from rpc.process import write_ready_file
from rpc.server import PortInUse, try_port
from worker_runtime.config import WorkerConfig

ROUTER_STOP_SECONDS = 5.0
STOP_SECONDS = 20.0
"""Most time for workers to stop: without a router they have no requests to finish."""


class LocalCluster:
    """Starts, watches and stops the processes. Use as a context manager."""

    def __init__(
        self, config: ClusterConfig, log: TextIO | None = None, commands: Mapping[str, list[str]] | None = None
    ) -> None:
        """log: where prefixed log lines go if there is no log_dir; default standard error.

        commands: what to run in place of `kvferry`, by process name: for tests with faulty workers, or with
        workers in another network.
        """
        self.config = config
        self._commands = dict(commands or {})
        self.processes: list[Process] = []
        self._log = log or sys.stderr
        self._folder = Path(tempfile.mkdtemp(prefix="kvferry-"))
        self._model: Path | None = None
        self._starts = itertools.count()
        self._give_up: Callable[[], bool] = lambda: False

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def address(self) -> str:
        """The router's address."""
        return self.find("router").address

    def find(self, name: str) -> Process:
        """The process of this name that was started last: "router", "prefill-0", "decode-1"."""
        return next(process for process in reversed(self.processes) if process.name == name)

    def start(self, give_up: Callable[[], bool] = lambda: False) -> None:
        """Starts everything and waits until the router is ready. Raises ModelUnavailable or StartFailed.

        give_up: called while waiting; True ends the start with StartFailed.
        """
        self._give_up = give_up
        if self.config.log_dir is not None:
            _make_folder("--log-dir", self.config.log_dir)
        if self.config.ready_file is not None:
            _make_folder("--ready-file", self.config.ready_file.parent)
        self._check_ports()
        self._model = resolve_model(self.config.model)
        workers = [self.start_worker(tier, index) for tier in TIERS for index in range(self.config.number_of(tier))]
        for worker in workers:
            self.wait_ready(worker)
        self.wait_ready(self.start_router())
        self._wait_for_pairs()
        write_ready_file(self.config.ready_file, self.describe())

    def _check_ports(self) -> None:
        """Checked before workers load a model, which takes time. Raises StartFailed."""
        for flag, port in (("--port", self.config.port), ("--http-port", self.config.router_http_port)):
            try:
                try_port(flag, "127.0.0.1", port)
            except PortInUse as error:
                raise StartFailed(str(error)) from error

    def start_worker(self, tier: Tier, index: int, *flags: str, port: int = 0) -> Process:
        """Starts one worker without waiting for it. flags: in addition to those of the cluster's settings."""
        config, name = self.config, f"{tier}-{index}"
        position = sum(config.number_of(before) for before in TIERS[: TIERS.index(tier)]) + index
        cpus, threads = share_of_cores(position, config.num_workers)
        share = config.memory_fraction / config.num_workers
        engine = replace(config.engine(), model=str(self._model), memory_fraction=share, threads=threads)
        worker = config.worker(tier, engine, ProcessConfig(port=port, cpus=cpus), worker_id=name)
        return self.start_process(name, tier, worker, flags)

    def restart_worker(self, dead: Process, give_up: Callable[[], bool] = lambda: False) -> Process:
        """Restarts a worker that ended, at the same address. Raises StartFailed."""
        self._give_up = give_up
        self.forget(dead)
        tier, _, index = dead.name.rpartition("-")
        process = self.start_worker(cast(Tier, tier), int(index), port=int(dead.address.rpartition(":")[2]))
        process.info = {"address": dead.address}  # needed to retry, if this start fails
        self.wait_ready(process)
        write_ready_file(self.config.ready_file, self.describe())
        return process

    def start_router(self, *flags: str) -> Process:
        """Starts the router for all running workers."""
        return self._start_router("router", self.config.port, self.config.router_http_port, *flags)

    def start_another_router(self, *flags: str) -> Process:
        """Starts one more router for the same workers, on free ports, and waits for it. Raises StartFailed."""
        names = {process.name for process in self.processes}
        name = next(f"router-{n}" for n in itertools.count(1) if f"router-{n}" not in names)
        process = self._start_router(name, 0, 0, *flags)
        self.wait_ready(process)
        return process

    def restart_router(self, dead: Process) -> Process:
        """Restarts a router that ended, at the same addresses. Raises StartFailed."""
        self.forget(dead)
        port, http_port = (int(str(dead.info[front]).rpartition(":")[2]) for front in ("address", "http"))
        process = self._start_router(dead.name, port, http_port, *dead.flags)
        self.wait_ready(process)
        write_ready_file(self.config.ready_file, self.describe())
        return process

    def forget(self, dead: Process) -> None:
        """Stops watching a process that ended."""
        self.processes.remove(dead)
        dead.let_go()

    def _start_router(self, name: str, port: int, http_port: int, *flags: str) -> Process:
        workers: dict[Tier, tuple[str, ...]] = {
            tier: tuple(
                process.address
                for process in self.processes
                if process.name.startswith(f"{tier}-") and process.popen.poll() is None
            )
            for tier in TIERS
        }
        router = replace(
            self.config.router(ProcessConfig(port=port), workers),
            model=str(self._model),
            served_model_name=self.config.model_name,
            http_port=http_port,
        )
        process = self.start_process(name, "router", router, flags)
        process.flags = flags
        return process

    def start_process(
        self, name: str, command: str, config: WorkerConfig | RouterConfig, flags: tuple[str, ...] = ()
    ) -> Process:
        """Starts a process with a config of its own; it ends with the cluster."""
        settings = replace(
            config.process,
            ready_file=self._folder / f"{name}-{next(self._starts)}.json",
            log_level=self.config.process_log_level,
        )
        program = self._commands.get(name, [sys.executable, "-m", "kvferry"])
        process = start_process(name, [*program, command], replace(config, process=settings), flags)
        self.processes.append(process)
        process.forward_log(self._log, self.config.log_dir)
        return process

    def wait_ready(self, process: Process) -> None:
        """Waits until a process is ready. Raises StartFailed."""
        process.wait_ready(self._give_up)

    def _wait_for_pairs(self, seconds: float = 30.0) -> None:
        """Waits for all pairs; a router is ready with its first pair. Raises StartFailed."""
        config = self.config
        wanted = config.num_prefill * config.num_decode + config.num_colocated
        end = time.monotonic() + seconds
        with Client(self.address) as client:
            while (status := self._status(client)).ready_pairs < wanted:
                if (dead := self.dead()) is not None:
                    raise StartFailed(f"{dead.name} ended with code {dead.popen.returncode}: {dead.recent[-1:]}")
                if self._give_up():
                    raise StartFailed("told to stop")
                if time.monotonic() > end:
                    reasons = "; ".join(f"{w.worker_id}: {w.reason}" for w in status.workers if w.reason)
                    raise StartFailed(f"{status.ready_pairs} of {wanted} pairs are ready: {reasons}")
                time.sleep(POLL_SECONDS)

    @staticmethod
    def _status(client: Client) -> inference_pb2.GetClusterStatusResponse:
        try:
            return client.cluster_status()
        except KvferryError as error:
            raise StartFailed(f"the router does not respond: {error}") from error

    def describe(self) -> dict[str, object]:
        """Addresses and pids of all processes."""

        def entry(process: Process) -> dict[str, object]:
            keys = ("address", "http", "metrics", "pid", "worker_id")
            return {key: process.info[key] for key in keys if key in process.info}

        return {
            "address": self.address,
            "http": self.find("router").info["http"],
            "model": self.config.model_name,
            "pid": os.getpid(),
            "router": entry(self.find("router")),
        } | {tier: [entry(p) for p in self.processes if p.name.startswith(f"{tier}-")] for tier in TIERS}

    def dead(self) -> Process | None:
        """A process that ended unexpectedly, if there is one."""
        return next((process for process in self.processes if process.popen.poll() is not None), None)

    def stop(self) -> None:
        """Ends all processes by SIGTERM, then SIGKILL. Routers end first, since their running requests need the
        workers."""
        routers = [process for process in self.processes if process.name.startswith("router")]
        end_all(routers, self.config.drain_seconds + ROUTER_STOP_SECONDS)
        end_all([process for process in self.processes if process not in routers], STOP_SECONDS)
        for process in self.processes:
            process.let_go()
        self.processes.clear()
        if self.config.ready_file is not None:
            self.config.ready_file.unlink(missing_ok=True)  # a stale file would make the next start look ready
        shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self) -> None:
        """Kills all processes. The caller must still call `stop`."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.popen.kill()


def _make_folder(flag: str, folder: Path) -> None:
    """Creates a folder. Raises StartFailed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartFailed(f"{flag}: the folder {folder} can't be made: {error.strerror}") from error
