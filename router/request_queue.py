"""The router's one queue: by priority, then by the order the prefill workers use.

Requests wait here, not at workers, so the order must be decided here too. With a slowdown, which the workers tell, a
request's rank is its virtual deadline, as in the prefill scheduler: prompt tokens that had arrived before it, plus
slowdown times its own; short prompts overtake long ones, but only for as long as that stays in proportion.
"""

from __future__ import annotations

import bisect
import itertools

from router.request import Order, Request


class RequestQueue:
    """Waiting requests in order. One that comes back for another attempt goes ahead of those that are new."""

    def __init__(self) -> None:
        self._waiting: list[Request] = []
        self._arrivals = itertools.count()
        self._arrived_tokens = self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of all waiting prompts."""
        return self._num_tokens

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request: Request) -> bool:
        return request in self._waiting

    def in_order(self) -> list[Request]:
        """The waiting requests, the one to bind next first."""
        return list(self._waiting)

    def admit(self, request: Request, slowdown: int) -> None:
        """Gives a new request its place and queues it. slowdown: that of the prefill workers."""
        num_tokens = len(request.checked.prompt_token_ids)
        rank = self._arrived_tokens + slowdown * num_tokens if slowdown else 0
        self._arrived_tokens += num_tokens
        request.order = Order(-request.checked.priority, True, rank, next(self._arrivals))
        self.put_back(request)

    def put_back(self, request: Request) -> None:
        """Queues a request at the place that its order says."""
        bisect.insort(self._waiting, request, key=lambda waiting: waiting.order)
        self._num_tokens += len(request.checked.prompt_token_ids)

    def remove(self, request: Request) -> None:
        """Takes a request out."""
        self._waiting.remove(request)
        self._num_tokens -= len(request.checked.prompt_token_ids)
