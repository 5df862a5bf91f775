"""Settings of a decode worker."""

from __future__ import annotations

from dataclasses import dataclass

from decode_service.scheduler import Admission
from rpc.placeholders import MaybeSeconds
from worker_runtime.config import Overlap, WorkerConfig


@dataclass(frozen=True)
class DecodeConfig(WorkerConfig):
    """A decode worker: receives the pages of prompts and generates tokens, all sequences together."""

    decode_admission: Admission = "learned"
    """Room kept for answers to grow: learned from how long answers get (one that finds no page is handed back and
    resumed later), or full: the longest answer of each request, so that none is ever handed back."""
    quarantine_timeout: MaybeSeconds = None
    """Seconds after which pages are taken back from a writer that neither confirms nor is known to be gone. If it wakes
    up later, it writes into pages of others: only for operators who accept that. Unset: never."""
    overlap: Overlap = "auto"
    """Plan and launch a step while the one before it is computed. auto: on a GPU."""
    prefix_cache: bool = True
    """Keep pages of ended sequences, so that requests that begin alike need not be sent them."""
