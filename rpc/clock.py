"""The clock and timers of engine loops, routers and transfers, so that the simulator can replace them.

Code that depends on time or randomness gets a `Clock` and a `random.Random`. A process uses the system's; the simulator
creates both from one seed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Protocol


class Timer(Protocol):
    """A scheduled call."""

    def cancel(self) -> None:
        """Cancels the call."""
        ...


class Clock(Protocol):
    """Tells the time and schedules calls."""

    def now(self) -> float:
        """Seconds on a monotonic clock. Any thread may call this."""
        ...

    def call_later(self, seconds: float, function: Callable[..., object], *arguments: Any) -> Timer:
        """Calls a function on the event loop after some seconds. Only the event loop may call this."""
        ...

    def call_soon_threadsafe(self, function: Callable[..., object], *arguments: Any) -> object:
        """Calls a function on the event loop soon. Any thread may call this."""
        ...


class SystemClock:
    """The system's clock and an event loop."""

    def __init__(self, event_loop: asyncio.AbstractEventLoop) -> None:
        self._event_loop = event_loop

    def now(self) -> float:
        """See `Clock.now`."""
        return time.monotonic()

    def call_later(self, seconds: float, function: Callable[..., object], *arguments: Any) -> Timer:
        """See `Clock.call_later`."""
        return self._event_loop.call_later(seconds, function, *arguments)

    def call_soon_threadsafe(self, function: Callable[..., object], *arguments: Any) -> object:
        """See `Clock.call_soon_threadsafe`. Raises RuntimeError if the event loop is closed."""
        return self._event_loop.call_soon_threadsafe(function, *arguments)
