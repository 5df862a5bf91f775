"""Settings of a decode worker."""

from __future__ import annotations

from dataclasses import dataclass

from decode_service.scheduler import DecodeAdmission
from rpc.placeholders import MaybeSeconds
from worker_runtime.config import OverlapOptions, WorkerConfig


@dataclass(frozen=True, kw_only=True)
class AdmissionOptions:
    """When decode workers take another sequence."""

    decode_admission: DecodeAdmission = "learned"
    """Room that decode workers keep for outputs to grow. learned: from how long outputs get; a sequence that finds no
    page is preempted and resumed later. full: the longest output of each request, so that none is ever preempted."""


@dataclass(frozen=True)
class DecodeConfig(AdmissionOptions, OverlapOptions, WorkerConfig):
    """A decode worker: receives the pages of prompts and generates tokens, all sequences together."""

    quarantine_timeout: MaybeSeconds = None
    """Seconds after which pages are taken back from a writer that neither confirms nor is known to be gone. If the
    writer wakes up later, it writes into pages of others: only for operators who accept that. Unset: never."""
    prefix_cache: bool = True
    """Keep pages of ended sequences. Requests that begin with the same tokens need not be sent them."""
