"""The thread that does all torch work of a worker, from loading the model to the last step.

libgomp, torch's runtime for threads, keeps one pool of compute threads for each thread that ever opened a parallel
region. With more pool threads than cores, they stop spinning between regions and sleep instead, and a step takes twice
as long. So one thread owns torch, and all others compute with one thread each, for which no pool is made.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

from engine.loader import set_threads

T = TypeVar("T")


class EngineThread:
    """See the module."""

    def __init__(self, threads: int | None) -> None:
        """threads: compute threads; None: one per usable core."""
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.thread.start()
        self.num_threads = self.call(lambda: set_threads(threads))
        # For every other thread, those that start later included. The setting of the engine thread stays.
        torch.set_num_threads(1)

    def call(self, function: Callable[[], T]) -> T:
        """Runs a function on the thread and returns its result, or raises what the function raised."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._work.put(run)
        return future.result()

    def run_last(self, function: Callable[[], object]) -> None:
        """Runs a function on the thread, which then ends. Returns at once."""
        self._work.put(function)
        self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
