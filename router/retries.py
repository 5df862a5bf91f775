"""What becomes of a request that a worker refused or ended: one table by cause, and limits on further attempts.

Another attempt goes ahead of new requests. Attempts in a row that bring no token are limited:

* ``attempts``: the request itself may be the reason, and must not take one worker after the other down. Given up after
  MAX_FRUITLESS_ATTEMPTS of them.
* ``time``: a connection failed, which says nothing about the request. Given up after MAX_FRUITLESS_ATTEMPTS of them
  that span at least ``worker_loss_seconds``.
* ``none``: nothing failed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Literal

from protos import worker_pb2
from rpc.errors import DeadlineExceeded, Internal, Refused, RequestError, Unavailable

MAX_FRUITLESS_ATTEMPTS = 5
"""A request is given up after this many attempts in a row that brought no token."""
FIRST_REST_SECONDS = 0.05
LONGEST_REST_SECONDS = 2.0
"""Pauses before further attempts, except the first since the last token. Each is about twice the one before."""

RetryLimit = Literal["attempts", "time", "none"]


@dataclass(frozen=True)
class Consequence:
    """What a cause means for a request."""

    error: type[RequestError]
    """What the client is told if the request is given up."""
    limit: RetryLimit | None
    """How further attempts are limited. None: there are none."""
    counted_as: str = "leg_failed"
    """In `kvferry_request_retries_total`."""


UNKNOWN = Consequence(Internal, "attempts")
CONSEQUENCES: dict[worker_pb2.Cause.ValueType, Consequence] = {
    worker_pb2.CAUSE_NO_PAGES: Consequence(Unavailable, "none", "preempted"),
    worker_pb2.CAUSE_DRAINING: Consequence(Unavailable, "none", "draining"),
    worker_pb2.CAUSE_STEP_FAILED: Consequence(Internal, "attempts"),
    worker_pb2.CAUSE_TRANSFER_FAILED: Consequence(Unavailable, "time"),
    worker_pb2.CAUSE_NOT_FINITE: Consequence(Internal, None),
    worker_pb2.CAUSE_DEADLINE: Consequence(DeadlineExceeded, None),
    worker_pb2.CAUSE_INVALID: Consequence(Refused, None),
}
"""By cause; see `worker.proto: Cause`."""

NOT_NOW = frozenset({worker_pb2.CAUSE_NO_PAGES, worker_pb2.CAUSE_NO_SEQUENCES, worker_pb2.CAUSE_DRAINING})
"""Causes for which a reservation is refused without any fault: the request waits in the queue."""


@dataclass
class Retries:
    """Further attempts of one request since its last token."""

    number: int = 0
    _failures: list[tuple[RetryLimit, float]] = field(default_factory=list)

    def brought_token(self) -> None:
        """The request makes progress."""
        self.number = 0
        self._failures.clear()

    def failed(self, limit: RetryLimit, now: float) -> None:
        """An attempt ended without a token."""
        if limit != "none":
            self._failures.append((limit, now))

    def is_hopeless(self, worker_loss_seconds: float) -> bool:
        """Whether the request is to be given up."""
        num_attempts = sum(limit == "attempts" for limit, _ in self._failures)
        times = [moment for limit, moment in self._failures if limit == "time"]
        was_long = len(times) >= MAX_FRUITLESS_ATTEMPTS and times[-1] - times[0] >= worker_loss_seconds
        return num_attempts >= MAX_FRUITLESS_ATTEMPTS or was_long

    def begin(self, limit: RetryLimit, rng: random.Random) -> float:
        """Another attempt begins. Returns the seconds for which it rests before.

        What fails may need a moment, and all requests that met it must not come back together.
        """
        self.number += 1
        if limit == "none" or self.number == 1:
            return 0.0
        pause: float = min(FIRST_REST_SECONDS * 2.0 ** min(self.number - 2, 30), LONGEST_REST_SECONDS)
        return pause * rng.uniform(0.5, 1.5)
