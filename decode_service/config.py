"""Settings of a decode worker."""

from __future__ import annotations

from dataclasses import dataclass

from worker.config import WorkerConfig


@dataclass(frozen=True)
class DecodeConfig(WorkerConfig):
    """A decode worker: receives the pages of prompts and generates tokens, all sequences together."""
