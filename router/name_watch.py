"""Looks names up again and again, so that workers behind a name come and go."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from socket import SOCK_STREAM

from rpc.addresses import join_address, split_address

log = logging.getLogger(__name__)

RESOLVE_SECONDS = 2.0
"""Time between two looks at the addresses of a name."""


class NameWatch:
    """The addresses of one name. `run` is for a task."""

    def __init__(self, name_and_port: str, on_added: Callable[[str], None], on_removed: Callable[[str], None]) -> None:
        """on_added, on_removed: called with each host:port that the name has now, or has not any more."""
        self.name_and_port, self._on_added, self._on_removed = name_and_port, on_added, on_removed
        self.problem = "not looked up yet"
        """Why the name has no addresses; empty if it has."""
        self._addresses: set[str] = set()

    async def run(self) -> None:
        """Looks the name up until it is cancelled."""
        name, port = split_address(self.name_and_port)
        while True:
            try:
                found = await asyncio.get_running_loop().getaddrinfo(name, port, type=SOCK_STREAM)
            except OSError as error:
                # No address yet, or the name server is away: workers that are known stay.
                log.info("a name has no addresses", extra={"address": self.name_and_port, "reason": str(error)})
                self.problem = str(error)
            else:
                self.problem = ""
                self._set({join_address(str(target[0]), port) for *_, target in found})
            await asyncio.sleep(RESOLVE_SECONDS)

    def _set(self, addresses: set[str]) -> None:
        added, removed = addresses - self._addresses, self._addresses - addresses
        self._addresses = addresses
        for address in sorted(added):
            self._on_added(address)
        for address in sorted(removed):
            self._on_removed(address)
