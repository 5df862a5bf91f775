"""What a router counts. Label values come from fixed sets, never from clients."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from rpc.metrics import SECONDS_BUCKETS

WaitsFor = Literal["prefill", "decode", "workers"]
"""What the queue waits for: a prefill worker with little to do, a decode worker with room, or any pair at all."""


STATUSES = (
    "OK",
    "CANCELLED",
    "DEADLINE_EXCEEDED",
    "INTERNAL",
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "RESOURCE_EXHAUSTED",
    "UNAVAILABLE",
)
"""How requests end; series of all are there from the start, so that rates have no gap before the first."""


class RouterMetrics:
    """A router's metrics, in a registry of their own."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.registry = CollectorRegistry()
        self._requests = Gauge("kvferry_active_requests", "Requests by state", ["state"], registry=self.registry)
        self.ended = Counter(
            "kvferry_requests_total", "Ended requests by gRPC status", ["status"], registry=self.registry
        )
        for status in STATUSES:
            self.ended.labels(status)
        self.retries = Counter(
            "kvferry_request_retries_total", "Further attempts by cause", ["cause"], registry=self.registry
        )
        for cause in ("preempted", "draining", "leg_failed", "prefill_lost", "decode_lost"):
            self.retries.labels(cause)
        self.prompt_tokens = Counter(
            "kvferry_prompt_tokens_total", "Tokens of accepted prompts", registry=self.registry
        )
        self.output_tokens = Counter("kvferry_output_tokens_total", "Tokens sent to clients", registry=self.registry)
        self.ttft_seconds = Histogram(
            "kvferry_ttft_seconds", "Request received to first token", buckets=SECONDS_BUCKETS, registry=self.registry
        )
        self.e2e_seconds = Histogram(
            "kvferry_e2e_seconds", "Request received to last token", buckets=SECONDS_BUCKETS, registry=self.registry
        )
        self.slow_readers = Counter(
            "kvferry_slow_readers_total", "Requests ended because their client read too slowly", registry=self.registry
        )
        self.ready_pairs = Gauge("kvferry_ready_pairs", "Pairs that can move pages", registry=self.registry)

        self._queued_token_seconds = Counter(
            "kvferry_queued_token_seconds_total",
            "Prompt tokens in the queue times the time they were there, by what they waited for; its rate is the mean "
            "number of tokens that wait",
            ["waits_for"],
            registry=self.registry,
        )
        for waits_for in ("prefill", "decode", "workers"):
            self._queued_token_seconds.labels(waits_for)
        self._queue_told_at = self._now()
        self.queue: tuple[WaitsFor, int] = ("workers", 0)
        """What the queue waits for, and how many prompt tokens of it."""

    def set_queue(self, waits_for: WaitsFor, num_tokens: int) -> None:
        """So many prompt tokens in the queue wait for that from now on."""
        now = self._now()
        before, tokens = self.queue
        self._queued_token_seconds.labels(before).inc(tokens * (now - self._queue_told_at))
        self._queue_told_at, self.queue = now, (waits_for, num_tokens)

    def set_requests(self, queued: int, running: int) -> None:
        """Sets the number of requests per state."""
        self._requests.labels("queued").set(queued)
        self._requests.labels("running").set(running)
