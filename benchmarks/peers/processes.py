"""Processes of other projects: started in a group of their own, so that all of a group can be ended."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

STOP_SECONDS = 20.0
_ALONE = {
    "NO_PROXY": "127.0.0.1,localhost",
    "no_proxy": "127.0.0.1,localhost",
    "PYTHONUNBUFFERED": "1",
}


class PeerFailed(Exception):
    """A peer can't be installed, or one of its processes failed. The message is one line."""


def clean_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables for a process of another project: ours, but our packages are not on its path."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | _ALONE | dict(variables)


def reason(output: str) -> str:
    """The line of a program's output that says why it failed: the last one with "error", else the last."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["it said nothing"])[-1][:300]


@contextmanager
def process_group(
    command: list[str], log: Path, variables: Mapping[str, str] | None = None, stdout: int | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A process, ended with all that it started. log: takes its output, without its stdout if that goes elsewhere."""
    log.unlink(missing_ok=True)
    with log.open("a") as file:
        process = subprocess.Popen(
            command,
            env=clean_environment(variables or {}),
            stdin=subprocess.DEVNULL,
            stdout=file if stdout is None else stdout,
            stderr=file,
            text=True,
            errors="replace",
            start_new_session=True,  # so that Ctrl-C reaches only us, and we end the group
        )
        try:
            yield process
        finally:
            end_group(process)


def end_group(process: subprocess.Popen[str], seconds: float = STOP_SECONDS) -> None:
    """SIGTERM to the leader, and after at most `seconds` SIGKILL to all of its group that still run."""
    with suppress(ProcessLookupError):
        process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_ready(process: subprocess.Popen[str], url: str, seconds: float, log: Path) -> None:
    """Waits until `url` answers. Raises PeerFailed."""
    end = time.monotonic() + seconds
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while True:
        with suppress(urllib.error.URLError, OSError), opener.open(url, timeout=5) as response:
            if response.status == 200:
                return
        if process.poll() is not None:
            raise PeerFailed(
                f"{log.stem} ended with code {process.returncode}: {reason(log.read_text(errors='replace'))}; see {log}"
            )
        if time.monotonic() > end:
            raise PeerFailed(f"{log.stem} was not ready after {seconds:.0f} s; see {log}")
        time.sleep(0.1)


def cpu_seconds(pids: Iterable[int]) -> float:
    """CPU time that these processes and their descendants, as far as they run, have used."""
    total = 0.0
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            leader = psutil.Process(pid)
            for process in (leader, *leader.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    times = process.cpu_times()
                    total += times.user + times.system
    return total
