"""How a process of kvferry starts, says that it is ready, and ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from rpc.config import ConfigError, ProcessConfig
from rpc.logs import configure_logging

log = logging.getLogger(__name__)

EXIT_AFTER_LIFELINE_SECONDS = 10
"""A process whose parent is gone and that does not end by itself is ended after this long."""


def prepare_process(config: ProcessConfig) -> None:
    """Logging, cores, and the lifeline to a parent. Call before any library starts threads.

    Raises ConfigError if `--cpus` names cores this process can't have.
    """
    configure_logging(config.log_level)
    cpus = config.cpu_set()
    if cpus is not None:
        try:
            os.sched_setaffinity(0, cpus)
        except OSError as error:
            usable = sorted(os.sched_getaffinity(0))
            raise ConfigError(f"--cpus is {config.cpus}, but usable are {usable}: {error}") from error
    if config.lifeline_fd is not None:
        threading.Thread(target=_watch_lifeline, args=(config.lifeline_fd,), name="lifeline", daemon=True).start()


def _watch_lifeline(fd: int) -> None:
    """Ends this process when the other end of the pipe is closed, however the parent died."""
    with contextlib.suppress(OSError):
        while os.read(fd, 1):
            pass
    log.warning("parent process is gone; ending")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(EXIT_AFTER_LIFELINE_SECONDS)
    os._exit(1)


def write_ready_file(path: Path | None, content: dict[str, object]) -> None:
    """Says that the process is ready; readers never see half a file."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content))
    temporary.replace(path)


def install_stop_signals(stop: asyncio.Event) -> None:
    """SIGTERM and SIGINT set `stop`; a second one exits at once."""
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(1)
        stop.set()

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, on_signal)


def run_process(main: Callable[[], int], expected_errors: tuple[type[Exception], ...]) -> None:
    """Runs a process's main function and exits; errors that users can cause are told in one line."""
    try:
        code = main()
    except expected_errors as error:
        # One line, whatever a library put into its message.
        print(f"kvferry: error: {' '.join(str(error).split())}", file=sys.stderr)
        code = 2
    sys.stdout.flush()
    sys.stderr.flush()
    # Native libraries of transports and tensor threads may hang in their destructors; there is nothing left to save.
    os._exit(code)
