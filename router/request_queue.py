"""The router's one queue: by priority, then by the order that the prefill workers use.

Requests wait here and not at workers, so the order must be decided here too; see `rpc.prompt_order`. Which order the
workers use they tell by their slowdown.
"""

from __future__ import annotations

import bisect

from router.request import Request
from rpc.prompt_order import Arrivals


class RequestQueue:
    """Waiting requests in order. A request that comes back for another attempt goes ahead of new ones."""

    def __init__(self) -> None:
        self._waiting: list[Request] = []
        self._arrivals = Arrivals()
        self._num_tokens = 0

    def __repr__(self) -> str:
        return f"<RequestQueue {len(self._waiting)} requests, {self._num_tokens} prompt tokens>"

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
        """Gives a new request its order and queues it. slowdown: that of the prefill workers."""
        num_tokens = len(request.checked.prompt_token_ids)
        request.order = self._arrivals.order(num_tokens, request.checked.priority, slowdown)
        self.put_back(request)

    def put_back(self, request: Request) -> None:
        """Queues a request where its order says."""
        bisect.insort(self._waiting, request, key=lambda waiting: waiting.order)
        self._num_tokens += len(request.checked.prompt_token_ids)

    def remove(self, request: Request) -> None:
        """Takes a request out."""
        self._waiting.remove(request)
        self._num_tokens -= len(request.checked.prompt_token_ids)
