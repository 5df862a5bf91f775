"""Files of results."""

from __future__ import annotations

from pathlib import Path


def check_writable(path: Path) -> None:
    """Checked before a run, so that its results are not lost. Raises ValueError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a"):
            pass
    except OSError as error:
        raise ValueError(f"--output {path} can't be written: {error.strerror}") from error
