"""`python -m tests.faults.faulty_kvferry prefill ...`: a worker whose transport fails on purpose.

What fails is read from the file that KVFERRY_TEST_FAULTS names, again before each write, so that a test can change it
while the worker runs. See `Faults`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path

import worker_runtime.process
from kv_transfer.base import WriteState
from kv_transfer.errors import PeerLost
from kvferry.cli import main
from protos import kv_pb2

VARIABLE = "KVFERRY_TEST_FAULTS"
FAULTY = [sys.executable, "-m", "tests.faults.faulty_kvferry"]


@dataclass
class Faults:
    """What goes wrong from now on. Writes of test pages are spared, unless `test_pages` is set."""

    stop_at: str = ""
    """Where this process stops itself (SIGSTOP), once: "before post", "after post", "before end"."""
    countdown: int = 0
    """Writes that go well before that."""
    post_fails: float = 0.0
    """Share of writes whose post fails."""
    notification_lost: float = 0.0
    notification_twice: float = 0.0
    notification_late: float = 0.0
    """Share of writes whose notification comes some milliseconds after the data, out of order."""
    hang_seconds: float = 0.0
    """How long each post stands in the transport."""
    test_pages: bool = False

    def write_to(self, path: Path) -> None:
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(asdict(self)))
        temporary.replace(path)


class FaultyTransport:
    """A real transport with faults."""

    def __init__(self, transport) -> None:
        self._transport, self._path = transport, Path(os.environ[VARIABLE])
        self._read_at, self._faults, self._num_writes = 0.0, Faults(), 0
        self._rng = random.Random(os.getpid())
        self._late: deque[tuple[float, str, bytes]] = deque()

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def faults(self) -> Faults:
        changed = self._path.stat().st_mtime_ns
        if changed != self._read_at:
            self._read_at, self._num_writes = changed, 0
            self._faults = Faults(**json.loads(self._path.read_text()))
        return self._faults

    def write(self, agent_name, local_pages, remote_pages, payload, layer_group=None):
        faults = self.faults()
        if kv_pb2.KvNotification.FromString(payload).HasField("pair_test") and not faults.test_pages:
            return self._transport.write(agent_name, local_pages, remote_pages, payload, layer_group)
        self._num_writes += 1
        is_there = self._num_writes == faults.countdown + 1
        if faults.stop_at == "before post" and is_there:
            stop()
        time.sleep(faults.hang_seconds)
        chance = self._rng.random()
        if chance < faults.post_fails:
            raise PeerLost("a post that fails on purpose")
        kind = self._kind_of_notification(faults)
        handle = self._transport.write(
            agent_name, local_pages, remote_pages, b"" if kind in ("lost", "late") else payload, layer_group
        )
        if kind in ("late", "twice"):
            self._late.append((time.monotonic() + self._rng.random() * 0.1, agent_name, payload))
        if faults.stop_at == "after post" and is_there:
            stop()
        return StoppingHandle(handle) if faults.stop_at == "before end" and is_there else handle

    def _kind_of_notification(self, faults: Faults) -> str:
        chance = self._rng.random()
        for kind, share in (
            ("lost", faults.notification_lost),
            ("twice", faults.notification_twice),
            ("late", faults.notification_late),
        ):
            if chance < share:
                return kind
            chance -= share
        return "as it should"

    def take_notifications(self):
        for _ in range(len(self._late)):
            due, agent_name, payload = self._late.popleft()
            if due > time.monotonic():
                self._late.append((due, agent_name, payload))
                continue
            try:
                self._transport.notify(agent_name, payload)
            except PeerLost:
                continue
        return self._transport.take_notifications()


class StoppingHandle:
    """Stops the process when its write has ended, before anybody hears of it."""

    def __init__(self, handle) -> None:
        self._handle, self._has_stopped = handle, False

    def poll(self):
        state = self._handle.poll()
        if state is not WriteState.IN_PROGRESS and not self._has_stopped:
            self._has_stopped = True
            stop()
        return state


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    make_transport = worker_runtime.process.NixlTransport
    worker_runtime.process.NixlTransport = lambda *arguments: FaultyTransport(make_transport(*arguments))  # type: ignore
    main()
