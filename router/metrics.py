"""What a router counts. Label values come from fixed sets, never from clients."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from rpc.metrics import SECONDS_BUCKETS


class RouterMetrics:
    """A router's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Gauge("kvferry_active_requests", "Requests by state", ["state"], registry=self.registry)
        self.ended = Counter(
            "kvferry_requests_total", "Ended requests by gRPC status", ["status"], registry=self.registry
        )
        self.retries = Counter(
            "kvferry_request_retries_total", "Further attempts by cause", ["cause"], registry=self.registry
        )
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

    def set_requests(self, queued: int, running: int) -> None:
        """Sets the number of requests per state."""
        self._requests.labels("queued").set(queued)
        self._requests.labels("running").set(running)
