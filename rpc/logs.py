"""Structured logs: one line per event, with `key=value` fields after the text."""

from __future__ import annotations

import logging
import sys

# color_message: uvicorn's message with terminal escape codes.
_PLAIN = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


class KeyValueFormatter(logging.Formatter):
    """Appends the fields of `extra=` to the line."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, plus the traceback if there is one."""
        line = super().format(record)
        extra = [f"{name}={value}" for name, value in vars(record).items() if name not in _PLAIN]
        head, *rest = line.split("\n", 1)
        return "\n".join([" ".join([head, *extra]), *rest])


def configure_logging(level: str) -> None:
    """Sends this process's log to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(KeyValueFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for noisy in ("httpx", "urllib3", "filelock", "huggingface_hub", "asyncio", "uvicorn"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
