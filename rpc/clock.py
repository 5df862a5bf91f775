"""Time as an argument: what loops, routers and transfers see of the clock, and how they have things happen later.

Code that decides something gets a `Clock` and a `random.Random`. In a process they are the system's; in the simulator
they belong to one seed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Protocol


class Timer(Protocol):
    """Something that is to happen."""

    def cancel(self) -> None:
        """It is not to happen any more."""
        ...


class Clock(Protocol):
    """Now, and later."""

    def now(self) -> float:
        """Seconds on a clock that never goes back. From any thread."""
        ...

    def call_later(self, seconds: float, function: Callable[..., object], *arguments: Any) -> Timer:
        """Calls a function on the event loop after some time. From the event loop only."""
        ...

    def call_soon_threadsafe(self, function: Callable[..., object], *arguments: Any) -> object:
        """Calls a function on the event loop soon. From any thread."""
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
