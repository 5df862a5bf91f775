"""Starts and ends a kvferry process, and reports its readiness."""

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
"""Time after SIGTERM until a process without parent is killed."""


def prepare_process(config: ProcessConfig) -> None:
    """Sets up logging, cores, and the lifeline to a parent. Call before any library starts threads.

    Raises ConfigError if `--cpus` names cores that this process can't use.
    """
    configure_logging(config.log_level)
    cpus = config.cpu_set()
    if cpus is not None:
        try:
            os.sched_setaffinity(0, cpus)
        except OSError as error:
            usable = sorted(os.sched_getaffinity(0))
            raise ConfigError(f"--cpus is {config.cpus}, but the usable cores are {usable}: {error}") from error
    if config.lifeline_fd is not None:
        threading.Thread(target=_watch_lifeline, args=(config.lifeline_fd,), name="lifeline", daemon=True).start()


def _watch_lifeline(fd: int) -> None:
    """Ends this process when the other end of the pipe is closed, however the parent died."""
    with contextlib.suppress(OSError):
        while os.read(fd, 1):
            pass
    log.warning("the parent process has ended; exiting")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(EXIT_AFTER_LIFELINE_SECONDS)
    os._exit(1)


def write_ready_file(path: Path | None, content: dict[str, object]) -> None:
    """Writes a file that shows that the process is ready. The rename is atomic, so readers never see a partial file."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content))
    temporary.replace(path)


def install_stop_signals(stop: asyncio.Event) -> None:
    """SIGTERM and SIGINT set `stop`; a second one exits at once."""
    event_loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(1)
        stop.set()

    for signum in (signal.SIGTERM, signal.SIGINT):
        event_loop.add_signal_handler(signum, on_signal)


def run_process(main: Callable[[], int], expected_errors: tuple[type[Exception], ...]) -> None:
    """Runs a process's main function and exits. An expected error is printed as one line."""
    try:
        code = main()
    except expected_errors as error:
        # Libraries may put line breaks into their messages.
        print(f"kvferry: error: {' '.join(str(error).split())}", file=sys.stderr)
        code = 2
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip destructors: those of native libraries may hang, and nothing is left to save.
    os._exit(code)
