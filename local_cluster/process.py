"""Starts, watches and ends a child process."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from local_cluster.config import defaults_of
from local_cluster.flags import flags_of
from router.config import RouterConfig
from worker_runtime.config import WorkerConfig

START_SECONDS = 1800.0
"""Most time for a process to become ready: on a GPU it may have to build kernels first."""
POLL_SECONDS = 0.02
ERROR_PREFIX = "kvferry: error: "
"""Prefix of the line in which a process reports why it can't run."""


class StartFailed(Exception):
    """A process ended, or was not ready in time."""


@dataclass
class Process:
    """A child process, with the content of its ready file."""

    name: str
    popen: subprocess.Popen[str]
    ready_file: Path
    lifeline: int
    """Write end of the pipe; closing it ends the child."""
    info: dict[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    """Of a router, in addition to those of the cluster."""
    recent: list[str] = field(default_factory=list)
    """Last lines of its log."""

    @property
    def pid(self) -> int:
        """Process id."""
        return self.popen.pid

    @property
    def address(self) -> str:
        """gRPC address; empty before it is ready."""
        return str(self.info.get("address", ""))

    def let_go(self) -> None:
        """Closes the write end of the pipe, which ends a process that still runs."""
        with contextlib.suppress(OSError):
            os.close(self.lifeline)

    def wait_ready(self, give_up: Callable[[], bool], seconds: float = START_SECONDS) -> None:
        """Waits for the ready file. Raises StartFailed.

        give_up: called while waiting; True ends the wait with StartFailed.
        """
        end = time.monotonic() + seconds
        while not self.ready_file.exists():
            if self.popen.poll() is not None:
                time.sleep(0.2)  # the log thread may not have read the last lines yet
                raise StartFailed(f"{self.name} ended with code {self.popen.returncode}: {self._reason()}")
            if give_up():
                raise StartFailed("told to stop")
            if time.monotonic() > end:
                raise StartFailed(f"{self.name} was not ready after {seconds:.0f} s: {self.recent[-1:]}")
            time.sleep(POLL_SECONDS)
        self.info = json.loads(self.ready_file.read_text())

    def _reason(self) -> str:
        """Why the process ended, from its log."""
        lines = [line for line in self.recent if line]
        reason = next((line for line in lines if line.startswith(ERROR_PREFIX)), (lines or ["its log is empty"])[-1])
        return reason.removeprefix(ERROR_PREFIX)

    def forward_log(self, log: TextIO, folder: Path | None) -> None:
        """Copies the output, in a thread, to a file in `folder`, or with a prefix to `log`."""
        threading.Thread(target=self._forward, args=(log, folder), name=f"log-{self.name}", daemon=True).start()

    def _forward(self, log: TextIO, folder: Path | None) -> None:
        assert self.popen.stdout is not None
        with contextlib.ExitStack() as stack:
            target, prefix = log, f"[{self.name}] "
            if folder is not None:
                try:
                    target = stack.enter_context((folder / f"{self.name}.log").open("a"))
                    prefix = ""
                except OSError as error:  # an unread pipe would block the process
                    print(f"kvferry: {self.name}: its log goes here: {error}", file=log)
            for line in self.popen.stdout:
                self.recent = [*self.recent[-50:], line.strip()]
                with contextlib.suppress(ValueError, OSError):
                    target.write(f"{prefix}{line}")
                    target.flush()


def start_process(
    name: str, program: list[str], config: WorkerConfig | RouterConfig, flags: tuple[str, ...]
) -> Process:
    """Starts a worker or a router. flags: in addition to those of its settings, which must have a ready file."""
    ready_file = config.process.ready_file
    assert ready_file is not None
    read_end, write_end = os.pipe()
    told = dataclasses.replace(config, process=dataclasses.replace(config.process, lifeline_fd=read_end))
    popen = subprocess.Popen(
        [*program, *flags_of(told, defaults_of(told)), *flags],
        pass_fds=(read_end,),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        # So that Ctrl-C reaches only this process, which ends the others in order.
        start_new_session=True,
    )
    os.close(read_end)
    return Process(name, popen, ready_file, write_end)


def end_all(processes: list[Process], seconds: float) -> None:
    """Sends SIGTERM to all, and after `seconds` SIGKILL to those that still run."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            process.popen.send_signal(signal.SIGTERM)
    end = time.monotonic() + seconds
    for process in processes:
        try:
            process.popen.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.popen.kill()
            process.popen.wait()


def share_of_cores(position: int, num_workers: int) -> tuple[str | None, int]:
    """Cores (None: any) and compute threads of one of `num_workers` workers.

    position: a worker that joins later counts on past `num_workers` and shares the cores of an earlier one.
    """
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // num_workers
    if each == 0:
        return None, 1
    first = position % num_workers * each
    mine = cores[first : first + each]
    return ",".join(map(str, mine)), each
