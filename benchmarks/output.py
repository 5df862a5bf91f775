"""Where results go."""

from __future__ import annotations

from pathlib import Path


def check_writable(path: Path) -> None:
    """Before a run, not after it. Raises ValueError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a"):
            pass
    except OSError as error:
        raise ValueError(f"--output {path} can't be written: {error.strerror}") from error
