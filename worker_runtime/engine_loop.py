"""What every tier's engine loop does: take messages, step, report; end when told to, without losing anything.

A loop is turned by its own thread, or by a test or simulation by hand (`turn`). Only that thread touches scheduler,
page pool and requests.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

from worker_runtime.health import PAGES
from worker_runtime.inbox import Drain, InboxMessage, Stop
from worker_runtime.parts import WorkerParts

log = logging.getLogger(__name__)

CHECK_SECONDS = 1.0
"""Least time between two checks of all pages."""


@dataclass(frozen=True)
class PageOwners:
    """Who should own pages, told by the requests and not by the pool."""

    tables: Iterable[Iterable[int]]
    """Pages of sequences."""
    reads: Iterable[Iterable[int]] = ()
    """Pages of our own open writes."""
    writes: Iterable[Iterable[int]] = ()
    """Pages open to foreign writers."""


class EngineLoop(ABC):
    """Base of the tiers' loops."""

    def __init__(self, parts: WorkerParts) -> None:
        self._parts = parts
        self._is_draining = False
        self._checked_at = 0.0
        self._has_wrong_pages = False
        """Found once; they stay wrong."""

    def run(self) -> None:
        """Runs until a Stop message, or until everything is done after a Drain message."""
        is_busy = False
        while self._receive(wait=not is_busy):
            is_busy = self._turn()

    def turn(self) -> bool:
        """Once through the loop, without waiting. False: it has ended."""
        if not self._receive(wait=False):
            return False
        self._turn()
        return True

    @abstractmethod
    def _step(self) -> bool:
        """Plans, launches and delivers steps. False: there was nothing to do."""

    @abstractmethod
    def _report_load(self) -> None:
        """Tells routers and metrics how things stand."""

    @abstractmethod
    def _handle(self, message: InboxMessage) -> None:
        """Acts on a message."""

    @abstractmethod
    def _hand_over(self) -> None:
        """Gives everything that runs back to the routers."""

    @abstractmethod
    def _has_open_work(self) -> bool:
        """Whether a request runs, a step is under way, or a page may still be touched by a transfer."""

    @abstractmethod
    def _page_owners(self) -> PageOwners:
        """Who should own pages now."""

    def _turn(self) -> bool:
        health = self._parts.health
        health.reached("planning and computing a step")
        is_busy = self._step()
        health.reached("reporting")
        self._report_load()
        self._parts.sessions.flush()
        return is_busy

    def _receive(self, wait: bool) -> bool:
        """Handles what arrived. False: the loop is over."""
        if self._is_draining and not self._has_open_work():
            return False
        if wait:
            self._check_pages()
            self._parts.health.waits()
        for message in self._parts.inbox.take(wait):
            self._parts.health.reached(f"handling {type(message).__name__}")
            if isinstance(message, Stop):
                self._parts.sessions.flush()
                return False
            if isinstance(message, Drain):
                self._is_draining = True
                if message.hand_over:
                    self._hand_over()
            else:
                self._handle(message)
        return True

    def _check_pages(self) -> None:
        """At rest: every page belongs to whom the requests say. If not, this worker must not go on as if it did."""
        now = time.monotonic()
        if now - self._checked_at < CHECK_SECONDS or self._has_wrong_pages:
            return
        self._checked_at = now
        owners = self._page_owners()
        faults = self._parts.pool.check(owners.tables, owners.reads, owners.writes)
        if faults:
            self._has_wrong_pages = True
            reason = "pages do not add up: " + "; ".join(faults)
            log.error("%s\nlast changes: %s", reason, "\n".join(self._parts.pool.history()))
            self._parts.health.set_fault(PAGES, reason)
