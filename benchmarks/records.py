"""What the load generator saw of one request. All times are `time.perf_counter()` seconds at the client."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class RequestRecord:
    """One offered request, completed or not."""

    scheduled: float
    """When it should have been sent."""
    sent: float = 0.0
    token_times: list[float] = field(default_factory=list)
    """Arrival of each output token; tokens of one message have the same."""
    ended: float = 0.0
    status: str = ""
    """"OK", a gRPC status name, or "HTTP 503"; empty while it runs."""
    error: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    """As the server counts them."""
    cached_tokens: int = 0
    kv_bytes: int = 0
    token_ids: tuple[int, ...] = ()
    """Empty if the server does not return them."""
    counts_messages: bool = False
    """The server did not report tokens per message, so each message counts as one token."""

    @property
    def is_ok(self) -> bool:
        """Whether the output is complete and not empty."""
        return self.status == "OK" and self.output_tokens > 0

    @property
    def ttft(self) -> float | None:
        """Seconds from sending to the first token."""
        return self.token_times[0] - self.sent if self.token_times else None

    @property
    def e2e(self) -> float | None:
        """Seconds from sending to the last token of a complete output."""
        return self.token_times[-1] - self.sent if self.is_ok and self.token_times else None

    @property
    def itls(self) -> list[float]:
        """Each gap between tokens; 0 between those of one message."""
        return [later - earlier for earlier, later in zip(self.token_times, self.token_times[1:], strict=False)]

    @property
    def tpot(self) -> float | None:
        """(E2E - TTFT) / (output tokens - 1), one number per request; None for fewer than two tokens, and for an
        output that came all at once, whose tokens have no separate times."""
        if not self.is_ok or self.output_tokens < 2 or len(set(self.token_times)) < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (self.output_tokens - 1)

    @property
    def lag(self) -> float:
        """Seconds by which the generator sent it too late."""
        return max(0.0, self.sent - self.scheduled)
