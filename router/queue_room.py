"""Whether the queue has room for a request: a full system says so at once."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from router.config import RouterConfig
from router.policy import seconds_to_first_token
from router.request_queue import RequestQueue
from router.worker_pool import Pair
from rpc.errors import ResourceExhausted


class QueueRoom:
    """The limits of a queue, and the room in it that is promised to requests that come later."""

    def __init__(self, config: RouterConfig, queue: RequestQueue) -> None:
        self._config, self._queue = config, queue
        self.num_announced = self._announced_tokens = 0

    def announce(self, num_requests: int, num_tokens: int) -> None:
        """These requests have their room but are not there yet; negative: they came, or won't come.

        num_tokens: of each request's prompt.
        """
        self.num_announced += num_requests
        self._announced_tokens += num_requests * num_tokens

    def check(self, num_requests: int, num_tokens: int, deadline_seconds: float | None, pairs: Seq[Pair]) -> None:
        """Raises ResourceExhausted if there is no room, or no time.

        num_tokens: of each request's prompt. deadline_seconds: time left to the client's deadline; None: no deadline.
        """
        waiting, most_requests = len(self._queue) + self.num_announced, self._config.max_queue_requests
        if waiting + num_requests > most_requests:
            raise ResourceExhausted(f"the queue is full: {waiting} requests wait, {most_requests} may")
        waiting_tokens, most_tokens = self._queue.num_tokens + self._announced_tokens, self._config.max_queue_tokens
        new_tokens = num_requests * num_tokens
        # One prompt may wait however long it is: it can't be made shorter by trying again.
        if most_tokens is not None and waiting and waiting_tokens + new_tokens > most_tokens:
            raise ResourceExhausted(
                f"the queue is full: {waiting_tokens} prompt tokens wait, {most_tokens} may; "
                f"this request has {new_tokens}"
            )
        if self._config.deadline_admission == "predictive" and deadline_seconds is not None:
            needed = seconds_to_first_token(num_tokens, self._queue.num_tokens, pairs)
            if needed is not None and needed > deadline_seconds:
                raise ResourceExhausted(
                    f"the first token would take {needed:.1f} s at the measured rate, "
                    f"the deadline leaves {deadline_seconds:.1f} s"
                )
