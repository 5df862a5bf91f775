"""Simulated time: events in order of their time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Timer:
    """Something that is to happen; can be called off."""

    __slots__ = ("action", "is_cancelled")

    def __init__(self, action: Callable[[], None]) -> None:
        self.action, self.is_cancelled = action, False

    def cancel(self) -> None:
        self.is_cancelled = True


class Clock:
    """Now, and what comes; see `rpc.clock.Clock`."""

    def __init__(self) -> None:
        self.time = 1000.0
        self._events: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()

    def after(self, seconds: float, action: Callable[[], None]) -> Timer:
        timer = Timer(action)
        heapq.heappush(self._events, (self.time + max(0.0, seconds), next(self._numbers), timer))
        return timer

    def run_until(self, end: float, is_done: Callable[[], bool] = lambda: False) -> None:
        """Lets things happen until a time, or until `is_done`, asked after each."""
        while self._events and self._events[0][0] <= end:
            self.time, _, timer = heapq.heappop(self._events)
            if not timer.is_cancelled:
                timer.action()
                if is_done():
                    return
        self.time = max(self.time, end)

    # as `rpc.clock.Clock`

    def now(self) -> float:
        return self.time

    def call_later(self, seconds, function, *arguments):
        return self.after(seconds, lambda: function(*arguments))

    def call_soon_threadsafe(self, function, *arguments):
        return self.after(0.0, lambda: function(*arguments))
