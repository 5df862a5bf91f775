"""The thread that owns a transport: posts writes, drives progress, hears notifications.

It has its own clock, so transfers never wait for a model step. While something is open it looks often; with
nothing open, rarely: NIXL's own progress thread would spin and take a whole core.
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
"""Most time between looks while a write is open or one is expected."""
SHORTEST_WAIT_SECONDS = 0.00005
SHARE_OF_AGE = 0.1
"""A young write is looked at after this share of its age: a short one is not counted long, a long one costs little."""
STALLED_SECONDS = 20.0
"""A peer with open writes of which none ended for so long has failed: packets may be dropped without a word."""
FENCE_SECONDS = 1.0
"""How long bytes that a broken connection left in the network are waited for, while progress is driven. Measured over
TCP on one machine: they landed within 6 ms."""
MOST_DRIVEN_SECONDS = 0.1
"""Most time that counts for a fence between two looks."""
IDLE_SECONDS = 0.02
"""Time between looks otherwise: bounds how long a first message of a new peer waits."""


@dataclass(frozen=True, eq=False)
class PageWrite:
    """Pages to write to a peer, or one layer group of them. `tag` comes back with the result."""

    tag: object
    agent_name: str
    local_pages: tuple[int, ...]
    remote_pages: tuple[int, ...]
    payload: bytes
    """Told to the peer afterwards, unless it is empty."""
    layer_group: int | None = None
    """None: whole pages."""
    is_written: Callable[[], bool] | None = None
    """Our pages must not be read before this says so; None: they can be."""
    after: tuple[PageWrite, ...] = ()
    """Writes to the same peer whose bytes are there before this one starts. If one fails, this one fails too."""


@dataclass(frozen=True)
class WriteEnded:
    """A write is terminal: its pages are not read any more."""

    write: PageWrite
    ok: bool
    started: float
    """When it was posted, on the thread's clock."""
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
    """The connection to a peer is taken down: writes that failed on it can't be sent any more. What was in the network
    already may still arrive; see `TransferThread.fence`."""

    agent_name: str


@dataclass(frozen=True)
class Fenced:
    """Progress was driven for long enough after a `fence` that what was in the network then has arrived."""

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
    """Runs a transport. Its methods may be called from any thread; events come on its own."""

    def __init__(
        self,
        transport: Transport,
        deliver: Callable[[TransferEvent], None],
        prepare_thread: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """deliver: called on this thread for every event; must not block. prepare_thread: called on it first.
        now: the clock of all times that are told or compared here.
        """
        self._now = now
        self._transport, self._deliver, self._prepare_thread = transport, deliver, prepare_thread
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._open: list[_OpenWrite] = []
        self._waiting: list[PageWrite] = []
        """Not posted yet: their pages are not written, or writes that come first are open."""
        self._doomed: set[str] = set()  # peers to disconnect once nothing is open towards them
        self._expecting = False
        self._fences: list[_Fence] = []
        self._last_end: dict[str, float] = {}
        """When a write to a peer ended last."""
        self._turned_at = self._now()
        self._thread = threading.Thread(target=self._run, name="kv-transfer", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self, timeout: float | None = None) -> None:
        """Waits for open writes to end, then closes the transport. timeout: most seconds to wait."""
        self._commands.put(_Stop())
        self._thread.join(timeout)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs; if it does not, nothing can be moved."""
        return self._thread.is_alive()

    def standing_seconds(self) -> float:
        """How long ago the thread last looked around; it does so many times a second unless the transport is stuck."""
        return self._now() - self._turned_at

    def connect(self, endpoint: kv_pb2.TransferEndpoint) -> None:
        """Answers with PeerConnected or PeerFailed."""
        self._commands.put(_Connect(endpoint))

    def disconnect(self, agent_name: str) -> None:
        """Forgets a peer, once nothing is open towards it."""
        self._commands.put(_Disconnect(agent_name))

    def write(self, write: PageWrite) -> None:
        """Answers with WriteEnded, always."""
        self._commands.put(write)

    def notify(self, agent_name: str, payload: bytes) -> None:
        """Sends a message without data; answers with PeerFailed if that can't be done."""
        self._commands.put(_Notify(agent_name, payload))

    def fence(self, tag: object) -> None:
        """Answers with Fenced once progress was driven for FENCE_SECONDS, in which this process really ran.

        A process that is stopped meanwhile does not count that time: bytes may wait for it in the network.
        """
        self._commands.put(_Fence(tag, FENCE_SECONDS))

    def expect(self, expecting: bool) -> None:
        """Whether peers are going to write to us, so that it pays to look often."""
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
                # A broken connection may show here; the write that used it ends on its own.
                log.exception("reading notifications failed")
                time.sleep(IDLE_SECONDS)
        self._transport.close()

    def _pass_time(self) -> None:
        now = self._now()
        driven = min(now - self._turned_at, MOST_DRIVEN_SECONDS)
        self._turned_at = now
        for fence in self._fences:
            fence.remaining_seconds -= driven
            if fence.remaining_seconds <= 0:
                self._deliver(Fenced(fence.tag))
        self._fences = [fence for fence in self._fences if fence.remaining_seconds > 0]

    def _do_commands(self) -> bool:
        """Waits for a command, but no longer than until the next look. Returns whether to stop."""
        try:
            command = self._commands.get(timeout=self._seconds_to_next_look())
            while True:
                if isinstance(command, _Stop):
                    return True
                self._do(command)
                command = self._commands.get_nowait()
        except queue.Empty:
            return False

    def _seconds_to_next_look(self) -> float:
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
                if endpoint.agent_name in self._doomed:
                    self._deliver(PeerFailed(endpoint.agent_name, "its last connection still has open writes"))
                    return
                try:
                    self._transport.connect(endpoint)
                    self._deliver(PeerConnected(endpoint.agent_name))
                except TransferError as error:
                    self._deliver(PeerFailed(endpoint.agent_name, str(error)))
            case _Disconnect(agent_name):
                self._doomed.add(agent_name)
            case _Fence():
                self._fences.append(command)
            case _Notify(agent_name, payload):
                try:
                    self._transport.notify(agent_name, payload)
                except TransferError as error:
                    self._fail_peer(agent_name, str(error))

    def _post_waiting(self) -> None:
        """Posts what can be; a write never overtakes one of `after`, even one that waits itself."""
        unfinished = {entry.write for entry in self._open}
        still_waiting: list[PageWrite] = []
        for write in self._waiting:
            is_doomed = write.agent_name in self._doomed  # a connection that has failed is waited for by nobody
            try:
                can_start = write.is_written is None or write.is_written()
            except Exception as error:
                # Nothing was posted; what was before it, nobody knows. Its owner hears that once the peer is let go.
                now, reason = self._now(), f"the device failed: {error}"
                self._deliver(WriteEnded(write, False, now, now, reason))
                self._fail_peer(write.agent_name, reason)
                continue
            if is_doomed or (can_start and unfinished.isdisjoint(write.after)):
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
            # Nothing to move: complete at once, the message still goes.
            self._do(_Notify(write.agent_name, write.payload))
            self._deliver(WriteEnded(write, True, started, started))
            return
        if write.agent_name in self._doomed:
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
            # Nobody says that the connection is broken, but nothing comes through. Its pages stay in use.
            self._fail_peer(agent_name, f"nothing came through to agent {agent_name} for {STALLED_SECONDS:g} s")

    def _fail_peer(self, agent_name: str, reason: str) -> None:
        # The next connect must start afresh: metadata of a peer that was lost once is useless.
        self._doomed.add(agent_name)
        self._deliver(PeerFailed(agent_name, reason))

    def _disconnect_idle(self) -> None:
        """Disconnects peers that are to go and have nothing open: cutting a write leaves its fate unknown."""
        if self._doomed:
            busy = {entry.write.agent_name for entry in self._open} | {write.agent_name for write in self._waiting}
            for agent_name in self._doomed - busy:
                self._transport.disconnect(agent_name)
                self._last_end.pop(agent_name, None)
                self._deliver(PeerDisconnected(agent_name))
            self._doomed &= busy
