"""What every worker counts. Names are the same in both tiers; the tier is a label."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from engine.page_pool import PagePool
from rpc.metrics import STEP_BUCKETS

PAGE_OWNERS = ("free", "held", "cached", "pinned", "quarantined")


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
        self.output_tokens = counter("kvferry_output_tokens_total", "Tokens chosen").labels(tier)
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
            "Half-done prompts that gave their pages back since the start",
            labels,
            registry=self.registry,
        ).labels(tier)
        self._preemptions = Counter(
            "kvferry_preemptions_total",
            "Sequences handed back for lack of pages; repeated: for the second time or more, which should be rare",
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
        for end in ("finished", "aborted", "failed"):
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
        """A request ended: "finished", "aborted" or "failed"."""
        self.requests.labels(self._tier, end).inc()

    def count_preemption(self, is_repeated: bool) -> None:
        """A sequence was handed back."""
        self._preemptions.labels(self._tier, str(is_repeated).lower()).inc()

    def set_refusals(self, by_reason: Mapping[str, int]) -> None:
        """Sets how often prompts were told to wait, by what was short."""
        for reason, number in by_reason.items():
            self._refusals.labels(self._tier, reason).set(number)

    def set_sequences(self, **by_state: int) -> None:
        """Sets the number of sequences per state."""
        for state, number in by_state.items():
            self._sequences.labels(self._tier, state).set(number)
