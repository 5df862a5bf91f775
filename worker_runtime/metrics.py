"""What every worker counts. Names are the same in both tiers; the tier is a label."""

from __future__ import annotations

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
        self.registry = CollectorRegistry()
        labels = ["tier"]

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, labels, registry=self.registry)

        self.step_seconds = Histogram(
            "kvferry_step_seconds", "Time of one engine step", labels, buckets=STEP_BUCKETS, registry=self.registry
        ).labels(tier)
        self.prompt_tokens = counter("kvferry_prompt_tokens_total", "Prompt tokens computed").labels(tier)
        self.cached_tokens = counter("kvferry_cached_tokens_total", "Prompt tokens found in the prefix cache").labels(
            tier
        )
        self.output_tokens = counter("kvferry_output_tokens_total", "Tokens sampled").labels(tier)
        self.kv_bytes = counter("kvferry_kv_bytes_total", "Bytes of KV pages moved, counted by the writer").labels(tier)
        self.kv_write_failures = counter("kvferry_kv_write_failures_total", "Page writes that failed").labels(tier)
        self.ignored_notifications = counter(
            "kvferry_ignored_notifications_total", "Unknown, old or duplicate transfer notifications"
        ).labels(tier)
        self.requests = Counter(
            "kvferry_worker_requests_total", "Requests by how they ended", ["tier", "end"], registry=self.registry
        )
        self.queued_seconds = Gauge(
            "kvferry_queued_seconds", "Prompt work that waits, at the measured rate", labels, registry=self.registry
        ).labels(tier)
        self.tokens_per_second = Gauge(
            "kvferry_prompt_tokens_per_second",
            "Prompt tokens per second while it computes, as measured; 0 until it was",
            labels,
            registry=self.registry,
        ).labels(tier)
        self._refusals = Gauge(
            "kvferry_admission_refusals",
            "Times a prompt was told to wait since the start, by what was short",
            ["tier", "short_of"],
            registry=self.registry,
        )
        self.prompt_restarts = Gauge(
            "kvferry_prompt_restarts",
            "Half-computed prompts that gave their pages back since the start",
            labels,
            registry=self.registry,
        ).labels(tier)
        self._preemptions = Counter(
            "kvferry_preemptions_total",
            "Sequences preempted for lack of pages; repeated: for the second time or more, which should be rare",
            ["tier", "repeated"],
            registry=self.registry,
        )
        self.quarantine_age = Gauge(
            "kvferry_quarantine_oldest_seconds",
            "Time since the oldest pages wait for their writer to let go; alarm when it grows",
            labels,
            registry=self.registry,
        ).labels(tier)
        self.ready = Gauge("kvferry_ready", "1 while the worker takes new work", labels, registry=self.registry).labels(
            tier
        )
        self.ready.set(1)
        self.expected_growth_pages = Gauge(
            "kvferry_expected_growth_pages",
            "Pages that admitted sequences are expected to take until they end",
            labels,
            registry=self.registry,
        ).labels(tier)
        self._tier = tier
        for repeated in ("false", "true"):
            self._preemptions.labels(tier, repeated)
        for end in ENDS:
            self.requests.labels(tier, end)
        sequences = Gauge("kvferry_sequences", "Sequences by state", ["tier", "state"], registry=self.registry)
        self._sequences = sequences
        pages = Gauge(
            "kvferry_pages", "KV pages by owner; they add up to the pool", ["tier", "owner"], registry=self.registry
        )
        for owner in PAGE_OWNERS:
            pages.labels(tier, owner).set_function(lambda owner=owner: getattr(pool.counts(), owner))  # type: ignore[misc]
        Gauge("kvferry_max_sequences", "Most sequences at once", labels, registry=self.registry).labels(tier).set(
            max_num_sequences
        )
        Gauge("kvferry_page_tokens", "Tokens in a KV page", labels, registry=self.registry).labels(tier).set(page_size)
        Gauge("kvferry_pages_total", "KV pages of the pool", labels, registry=self.registry).labels(tier).set(
            pool.num_pages
        )

    def count_end(self, end: str) -> None:
        """A request has ended: one of ENDS."""
        self.requests.labels(self._tier, end).inc()

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
        self.queued_seconds.set(load.queued_seconds)
        self.tokens_per_second.set(load.tokens_per_second)
        self.expected_growth_pages.set(load.expected_growth_pages)
        self.prompt_restarts.set(num_restarts)
        for reason, number in refusals.items():
            self._refusals.labels(self._tier, reason).set(number)
