"""Prometheus metrics of a router. Label values come from fixed sets, never from clients."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from rpc.metrics import SECONDS_BUCKETS

WaitsFor = Literal["prefill", "decode", "workers"]
"""What the queue waits for: a prefill worker with a short queue, a decode worker with room, or any ready pair."""


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
"""How requests end. All series exist from the start, so that rates have no gap before the first request."""


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
            "kvferry_request_retries_total", "Retries of requests by cause", ["cause"], registry=self.registry
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
            "Prompt tokens in the queue times seconds, by what the queue waited for; the rate is the mean number of "
            "waiting tokens",
            ["waits_for"],
            registry=self.registry,
        )
        for waits_for in ("prefill", "decode", "workers"):
            self._queued_token_seconds.labels(waits_for)
        self._queue_set_at = self._now()
        self.queue: tuple[WaitsFor, int] = ("workers", 0)
        """What the queue waits for, and the number of prompt tokens in the queue."""

    def set_queue(self, waits_for: WaitsFor, num_tokens: int) -> None:
        """Sets what the queue waits for from now on, and its number of prompt tokens."""
        now = self._now()
        before, tokens = self.queue
        self._queued_token_seconds.labels(before).inc(tokens * (now - self._queue_set_at))
        self._queue_set_at, self.queue = now, (waits_for, num_tokens)

    def set_requests(self, queued: int, running: int) -> None:
        """Sets the number of requests in each state."""
        self._requests.labels("queued").set(queued)
        self._requests.labels("running").set(running)
