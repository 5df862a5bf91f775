"""Whether a worker takes new work, and if not, why; and what its engine thread is doing.

Ready is the state of a worker without faults that was not told to end. The engine thread notes where it is; a watchdog
on the event loop sees when it stands there for too long. Any thread may set and clear faults.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable

from protos import worker_pb2
from rpc.clock import Clock

ENGINE, TRANSFERS, PAGES = "engine", "transfers", "pages"
"""Kinds of faults. Of the first two a worker may recover; pages that do not add up stay wrong."""


class Health:
    """A worker's state."""

    def __init__(self, clock: Clock, on_change: Callable[[], None]) -> None:
        """on_change: called by whichever thread changed the state."""
        self._clock, self._on_change = clock, on_change
        self.is_draining = False
        self._faults: dict[str, str] = {}
        self._doing = ""
        self._since: float | None = None
        """When the engine thread began that; None while it waits for work."""

    def drain(self) -> None:
        """The worker was told to end."""
        self.is_draining = True
        self._on_change()

    def set_fault(self, kind: str, reason: str) -> None:
        """Something is wrong."""
        is_new = kind not in self._faults
        self._faults[kind] = reason
        if is_new:
            self._on_change()

    def clear_fault(self, kind: str) -> None:
        """It is right again. Harmless if it always was."""
        if self._faults.pop(kind, None) is not None:
            self._on_change()

    def event(self) -> worker_pb2.WorkerStateEvent:
        """What routers are told."""
        faults = dict(self._faults)
        if faults:
            return worker_pb2.WorkerStateEvent(
                state=worker_pb2.WORKER_STATE_FAULTY,
                reason="; ".join(faults.values()),
                is_stuck=ENGINE in faults or TRANSFERS in faults,
            )
        if self.is_draining:
            return worker_pb2.WorkerStateEvent(state=worker_pb2.WORKER_STATE_DRAINING, reason="it was told to end")
        return worker_pb2.WorkerStateEvent(state=worker_pb2.WORKER_STATE_READY)

    # the engine thread's progress

    def reached(self, doing: str) -> None:
        """Called on the engine thread when it begins something."""
        self._doing, self._since = doing, self._clock.now()

    def waits(self) -> None:
        """Called on the engine thread before it waits for work: it may take as long as it likes."""
        self._since = None

    def watch_engine(self, thread: threading.Thread, limit_seconds: float) -> str | None:
        """Sets or clears the fault of an engine thread without progress. Returns its stack when that is set."""
        since = self._since
        standing = 0.0 if since is None else self._clock.now() - since
        if standing <= limit_seconds:
            self.clear_fault(ENGINE)
            return None
        if ENGINE in self._faults:
            return None
        self.set_fault(ENGINE, f"the engine has stood for {standing:.0f} s in: {self._doing}")
        frame = sys._current_frames().get(thread.ident or 0)
        return "".join(traceback.format_stack(frame)) if frame is not None else "its thread is gone"
