"""What every worker counts. Names are the same in all tiers; the tier is a label."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from engine.page_pool import PagePool
from protos import worker_pb2
from rpc.metrics import STEP_BUCKETS

PAGE_OWNERS = ("free", "held", "cached", "pinned", "quarantined")
ENDS = ("finished", "aborted", "preempted", "requeued", "failed", "refused")
"""How a request may end at a worker; see `worker_runtime.request_table`. Refused requests never began."""


class WorkerMetrics:
    """A worker's metrics, in a registry of their own."""

    def __init__(self, tier: str, pool: PagePool, page_size: int = 1, max_num_sequences: int = 1) -> None:
        self.registry, self._tier = CollectorRegistry(), tier
        self.step_seconds = Histogram(
            "kvferry_step_seconds", "Time of one engine step", ["tier"], buckets=STEP_BUCKETS, registry=self.registry
        ).labels(tier)
        self.prompt_tokens = self._counter("kvferry_prompt_tokens_total", "Prompt tokens computed")
        self.cached_tokens = self._counter("kvferry_cached_tokens_total", "Prompt tokens found in the prefix cache")
        self.output_tokens = self._counter("kvferry_output_tokens_total", "Tokens sampled")
        self.kv_bytes = self._counter("kvferry_kv_bytes_total", "Bytes of KV pages moved, counted by the writer")
        self.kv_write_failures = self._counter("kvferry_kv_write_failures_total", "Page writes that failed")
        self.ignored_notifications = self._counter(
            "kvferry_ignored_notifications_total", "Unknown, old or duplicate transfer notifications"
        )
        self._requests = self._counters("kvferry_worker_requests_total", "Requests by how they ended", "end", *ENDS)
        self._preemptions = self._counters(
            "kvferry_preemptions_total",
            "Sequences preempted for lack of pages; repeated: for the second time or more, which should be rare",
            "repeated",
            "false",
            "true",
        )
        self._add_gauges()
        self._add_pool(pool)
        self._gauge("kvferry_max_sequences", "Most sequences at once").set(max_num_sequences)
        self._gauge("kvferry_page_tokens", "Tokens in a KV page").set(page_size)

    def _add_gauges(self) -> None:
        self._queued_seconds = self._gauge("kvferry_queued_seconds", "Prompt work that waits, at the measured rate")
        self._tokens_per_second = self._gauge(
            "kvferry_prompt_tokens_per_second",
            "Prompt tokens per second while it computes, as measured; 0 until it was",
        )
        self._refusals = Gauge(
            "kvferry_admission_refusals",
            "Times a prompt had to wait since the start, by what was short",
            ["tier", "short_of"],
            registry=self.registry,
        )
        self._prompt_restarts = self._gauge(
            "kvferry_prompt_restarts", "Half-computed prompts that gave their pages back since the start"
        )
        self.quarantine_age = self._gauge(
            "kvferry_quarantine_oldest_seconds",
            "Time since the oldest pages wait for their writer to let go; alarm when it grows",
        )
        self.ready = self._gauge("kvferry_ready", "1 while the worker takes new requests")
        self.ready.set(1)
        self._expected_growth_pages = self._gauge(
            "kvferry_expected_growth_pages", "Pages that admitted sequences are expected to take until they end"
        )
        self._sequences = Gauge("kvferry_sequences", "Sequences by state", ["tier", "state"], registry=self.registry)

    def _add_pool(self, pool: PagePool) -> None:
        pages = Gauge(
            "kvferry_pages", "KV pages by owner; they add up to the pool", ["tier", "owner"], registry=self.registry
        )
        for owner in PAGE_OWNERS:
            pages.labels(self._tier, owner).set_function(functools.partial(_count, pool, owner))
        self._gauge("kvferry_pages_total", "KV pages of the pool").set(pool.num_pages)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ["tier"], registry=self.registry).labels(self._tier)

    def _counters(self, name: str, text: str, label: str, *values: str) -> Counter:
        """One per value of a label; all are there from the start, so that rates have no gap before the first."""
        counters = Counter(name, text, ["tier", label], registry=self.registry)
        for value in values:
            counters.labels(self._tier, value)
        return counters

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, ["tier"], registry=self.registry).labels(self._tier)

    def count_end(self, end: str) -> None:
        """A request has ended: one of ENDS."""
        self._requests.labels(self._tier, end).inc()

    def count_preemption(self, is_repeated: bool) -> None:
        """A sequence was preempted."""
        self._preemptions.labels(self._tier, str(is_repeated).lower()).inc()

    def set_sequences(self, by_state: Mapping[str, int], num_sending: int) -> None:
        """Sets the number of sequences per state. num_sending: those of which only pages are left to send."""
        for state, number in by_state.items():
            self._sequences.labels(self._tier, state).set(number)
        if self._tier == "prefill":
            self._sequences.labels(self._tier, "sending").set(num_sending)

    def set_load(self, load: worker_pb2.LoadReport, refusals: Mapping[str, int], num_restarts: int) -> None:
        """Sets what routers are told, and what a scheduler has counted since the start."""
        self._queued_seconds.set(load.queued_seconds)
        self._tokens_per_second.set(load.tokens_per_second)
        self._expected_growth_pages.set(load.expected_growth_pages)
        self._prompt_restarts.set(num_restarts)
        for reason, number in refusals.items():
            self._refusals.labels(self._tier, reason).set(number)


def _count(pool: PagePool, owner: str) -> float:
    pages: int = getattr(pool.counts(), owner)
    return pages
