"""The thread that owns a transport: posts writes, drives progress, reads notifications.

Because of its own thread, a transfer never waits for a model step. The thread polls often while a write is open or
expected, else rarely, since NIXL's own progress thread would spin and take a whole core.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kv_transfer.base import Notification, Transport, WriteHandle, WriteState
from kv_transfer.errors import TransferError
from protos import kv_pb2

log = logging.getLogger(__name__)

BUSY_SECONDS = 0.0005
"""Longest time between polls while a write is open or expected."""
SHORTEST_WAIT_SECONDS = 0.00005
SHARE_OF_AGE = 0.1
"""An open write is polled again after this fraction of its age: exact times for short writes, few polls for long."""
STALLED_SECONDS = 20.0
"""A peer has failed if it has open writes and none has ended for this long: packets may be lost silently."""
FENCE_SECONDS = 1.0
"""How long progress is driven until bytes of a broken connection can't arrive any more. Measured over TCP on one
machine: they arrived within 6 ms."""
MOST_DRIVEN_SECONDS = 0.1
"""Longest time between two polls that counts towards a fence."""
IDLE_SECONDS = 0.02
"""Time between polls when idle: bounds the delay of the first notification of a new peer."""


@dataclass(frozen=True, eq=False)
class PageWrite:
    """Pages, or one layer group of pages, to write to a peer. `tag` is returned with the result."""

    tag: object
    agent_name: str
    local_pages: tuple[int, ...]
    remote_pages: tuple[int, ...]
    payload: bytes
    """Notification for the peer after the data; none if empty."""
    layer_group: int | None = None
    """None: whole pages."""
    is_written: Callable[[], bool] | None = None
    """Tells when our pages are computed, so that the write can start; None: they are computed."""
    after: tuple[PageWrite, ...] = ()
    """Writes to the same peer that must end before this write starts. If one of them fails, this write fails too."""


@dataclass(frozen=True)
class WriteEnded:
    """A write is terminal: our pages are not read any more."""

    write: PageWrite
    ok: bool
    started: float
    """Time of the post, on the thread's clock."""
    ended: float
    reason: str = ""


@dataclass(frozen=True)
class PeerConnected:
    """A peer can be written to."""

    agent_name: str


@dataclass(frozen=True)
class PeerFailed:
    """A peer can't be written to (any more)."""

    agent_name: str
    reason: str


@dataclass(frozen=True)
class PeerDisconnected:
    """A peer was disconnected: bytes of its failed writes are not sent any more. Bytes that were in the network already
    may still arrive; see `TransferThread.fence`."""

    agent_name: str


@dataclass(frozen=True)
class Fenced:
    """A `fence` has passed: all bytes that were in the network when the fence was set have arrived."""

    tag: object


TransferEvent = WriteEnded | PeerConnected | PeerFailed | PeerDisconnected | Fenced | Notification


@dataclass(frozen=True)
class _Connect:
    endpoint: kv_pb2.TransferEndpoint


@dataclass(frozen=True)
class _Disconnect:
    agent_name: str


@dataclass(frozen=True)
class _Notify:
    agent_name: str
    payload: bytes


@dataclass
class _Fence:
    tag: object
    remaining_seconds: float


@dataclass(frozen=True)
class _Stop:
    pass


_Command = PageWrite | _Connect | _Disconnect | _Notify | _Fence | _Stop


@dataclass
class _OpenWrite:
    write: PageWrite
    handle: WriteHandle
    started: float
    is_stalled: bool = False


class TransferThread:
    """Runs a transport. Its methods may be called from any thread; events are delivered on its own thread."""

    def __init__(
        self,
        transport: Transport,
        deliver: Callable[[TransferEvent], None],
        prepare_thread: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """deliver: called on the transfer thread for every event; must not block. prepare_thread: called there first.
        now: the clock for all times, in seconds.
        """
        self._now = now
        self._transport, self._deliver, self._prepare_thread = transport, deliver, prepare_thread
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._open: list[_OpenWrite] = []
        self._waiting: list[PageWrite] = []
        """Writes not posted yet: their pages are not computed, or a write in `after` is open."""
        self._disconnecting: set[str] = set()  # peers to disconnect once they have no open writes
        self._expecting = False
        self._fences: list[_Fence] = []
        self._last_end: dict[str, float] = {}
        """Time at which the last write to a peer ended."""
        self._polled_at = self._now()
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self, timeout: float | None = None) -> None:
        """Waits for open writes to end, then closes the transport. timeout: longest wait, in seconds."""
        self._commands.put(_Stop())
        self._thread.join(timeout)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs. If the thread does not run, no pages can be transferred."""
        return self._thread.is_alive()

    def standing_seconds(self) -> float:
        """Seconds since the thread last polled. The thread polls many times a second unless the transport is stuck."""
        return self._now() - self._polled_at

    def connect(self, endpoint: kv_pb2.TransferEndpoint) -> None:
        """Connects to a peer. Delivers PeerConnected or PeerFailed."""
        self._commands.put(_Connect(endpoint))

    def disconnect(self, agent_name: str) -> None:
        """Disconnects a peer once it has no open writes. Delivers PeerDisconnected."""
        self._commands.put(_Disconnect(agent_name))

    def write(self, write: PageWrite) -> None:
        """Starts a write. Always delivers WriteEnded."""
        self._commands.put(write)

    def notify(self, agent_name: str, payload: bytes) -> None:
        """Sends a notification without data. Delivers PeerFailed if the notification can't be sent."""
        self._commands.put(_Notify(agent_name, payload))

    def fence(self, tag: object) -> None:
        """Delivers Fenced once progress was driven for FENCE_SECONDS in total.

        Time in which this process is stopped does not count, because bytes may wait in the network meanwhile.
        """
        self._commands.put(_Fence(tag, FENCE_SECONDS))

    def expect(self, expecting: bool) -> None:
        """Sets whether peers will write to us, so that the thread polls often."""
        self._expecting = expecting

    def _run(self) -> None:
        self._prepare_thread()
        stopping = False
        while not (stopping and not self._open and not self._waiting):
            self._pass_time()
            stopping |= self._do_commands()
            self._poll_writes()
            self._post_waiting()
            self._disconnect_idle()
            try:
                for notification in self._transport.take_notifications():
                    self._deliver(notification)
            except Exception:
                # A broken connection can raise here. Its open writes end as FAILED when they are polled.
                log.exception("reading notifications failed")
                time.sleep(IDLE_SECONDS)
        self._transport.close()

    def _pass_time(self) -> None:
        now = self._now()
        driven = min(now - self._polled_at, MOST_DRIVEN_SECONDS)
        self._polled_at = now
        for fence in self._fences:
            fence.remaining_seconds -= driven
            if fence.remaining_seconds <= 0:
                self._deliver(Fenced(fence.tag))
        self._fences = [fence for fence in self._fences if fence.remaining_seconds > 0]

    def _do_commands(self) -> bool:
        """Waits for a command, at most until the next poll, and executes all commands. Returns whether to stop."""
        try:
            command = self._commands.get(timeout=self._seconds_to_next_poll())
            while True:
                if isinstance(command, _Stop):
                    return True
                self._do(command)
                command = self._commands.get_nowait()
        except queue.Empty:
            return False

    def _seconds_to_next_poll(self) -> float:
        if self._open:
            age = self._now() - self._open[-1].started
            return min(max(age * SHARE_OF_AGE, SHORTEST_WAIT_SECONDS), BUSY_SECONDS)
        return BUSY_SECONDS if self._waiting or self._expecting else IDLE_SECONDS

    def _do(self, command: _Command) -> None:
        match command:
            case PageWrite():
                self._waiting.append(command)
                self._post_waiting()
            case _Connect(endpoint):
                self._disconnect_idle()
                if endpoint.agent_name in self._disconnecting:
                    self._deliver(PeerFailed(endpoint.agent_name, "its previous connection still has open writes"))
                    return
                try:
                    self._transport.connect(endpoint)
                    self._deliver(PeerConnected(endpoint.agent_name))
                except TransferError as error:
                    self._deliver(PeerFailed(endpoint.agent_name, str(error)))
            case _Disconnect(agent_name):
                self._disconnecting.add(agent_name)
            case _Fence():
                self._fences.append(command)
            case _Notify(agent_name, payload):
                try:
                    self._transport.notify(agent_name, payload)
                except TransferError as error:
                    self._fail_peer(agent_name, str(error))

    def _post_waiting(self) -> None:
        """Posts all writes that can start. A write starts only after all writes in its `after` have ended."""
        unfinished = {entry.write for entry in self._open}
        still_waiting: list[PageWrite] = []
        for write in self._waiting:
            is_disconnecting = write.agent_name in self._disconnecting  # then `_post` fails the write at once
            try:
                can_start = write.is_written is None or write.is_written()
            except Exception as error:
                # This write was not posted, but an earlier write may have sent bytes. So the peer fails too.
                now, reason = self._now(), f"the device failed: {error}"
                self._deliver(WriteEnded(write, False, now, now, reason))
                self._fail_peer(write.agent_name, reason)
                continue
            if is_disconnecting or (can_start and unfinished.isdisjoint(write.after)):
                self._post(write)
                if self._open and self._open[-1].write is write:
                    unfinished.add(write)
            else:
                still_waiting.append(write)
                unfinished.add(write)
        self._waiting = still_waiting

    def _post(self, write: PageWrite) -> None:
        started = self._now()
        if not write.local_pages:
            # No data: the write ends at once, but the peer is notified.
            self._do(_Notify(write.agent_name, write.payload))
            self._deliver(WriteEnded(write, True, started, started))
            return
        if write.agent_name in self._disconnecting:
            reason = f"the connection to agent {write.agent_name} has failed"
            self._deliver(WriteEnded(write, False, started, started, reason))
            return
        try:
            handle = self._transport.write(
                write.agent_name, write.local_pages, write.remote_pages, write.payload, write.layer_group
            )
        except TransferError as error:
            self._deliver(WriteEnded(write, False, started, self._now(), str(error)))
            self._fail_peer(write.agent_name, str(error))
            return
        self._open.append(_OpenWrite(write, handle, started))

    def _poll_writes(self) -> None:
        still_open: list[_OpenWrite] = []
        failed: set[str] = set()
        stalled: set[str] = set()
        for entry in self._open:
            state = entry.handle.poll()
            if state is WriteState.IN_PROGRESS:
                still_open.append(entry)
                last = max(entry.started, self._last_end.get(entry.write.agent_name, 0.0))
                if not entry.is_stalled and self._now() - last > STALLED_SECONDS:
                    entry.is_stalled = True
                    stalled.add(entry.write.agent_name)
                continue
            self._last_end[entry.write.agent_name] = self._now()
            ok = state is WriteState.DONE
            reason = "" if ok else f"a write to agent {entry.write.agent_name} failed"
            self._deliver(WriteEnded(entry.write, ok, entry.started, self._now(), reason))
            if not ok:
                failed.add(entry.write.agent_name)
        self._open = still_open
        for agent_name in failed:
            self._fail_peer(agent_name, f"a write to agent {agent_name} failed")
        for agent_name in stalled:
            # The transport reports no error, but no write ends. The pages of the open writes stay in use.
            self._fail_peer(agent_name, f"no write to agent {agent_name} ended for {STALLED_SECONDS:g} s")

    def _fail_peer(self, agent_name: str, reason: str) -> None:
        # The next connect must start anew, because metadata of a lost peer can't be used again.
        self._disconnecting.add(agent_name)
        self._deliver(PeerFailed(agent_name, reason))

    def _disconnect_idle(self) -> None:
        """Disconnects peers without open writes. Disconnecting earlier would leave the state of open writes unknown."""
        if self._disconnecting:
            busy = {entry.write.agent_name for entry in self._open} | {write.agent_name for write in self._waiting}
            for agent_name in self._disconnecting - busy:
                self._transport.disconnect(agent_name)
                self._last_end.pop(agent_name, None)
                self._deliver(PeerDisconnected(agent_name))
            self._disconnecting &= busy
