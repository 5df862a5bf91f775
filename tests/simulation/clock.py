"""Simulated time: events in order of their time, and stand-ins for the clock and the event loop."""

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
    """Now, and what comes. Also what modules see as `time` and as their event loop."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._events: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()

    def after(self, seconds: float, action: Callable[[], None]) -> Timer:
        timer = Timer(action)
        heapq.heappush(self._events, (self.now + max(0.0, seconds), next(self._numbers), timer))
        return timer

    def run_until(self, end: float, is_done: Callable[[], bool] = lambda: False) -> None:
        """Lets things happen until a time, or until `is_done`, asked after each."""
        while self._events and self._events[0][0] <= end:
            self.now, _, timer = heapq.heappop(self._events)
            if not timer.is_cancelled:
                timer.action()
                if is_done():
                    return
        self.now = max(self.now, end)

    # as `time`
    def monotonic(self) -> float:
        return self.now

    # as an event loop
    def call_later(self, seconds, function, *arguments):
        return self.after(seconds, lambda: function(*arguments))

    def call_soon_threadsafe(self, function, *arguments):
        return self.after(0.0, lambda: function(*arguments))

    # as `asyncio`, for modules that only ask for the loop
    def get_running_loop(self):
        return self
