"""The transfer thread: every write ends, errors included, and an idle one costs next to nothing."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from kv_transfer import transfer_thread
from kv_transfer.base import Notification, PageRegion, WriteState
from kv_transfer.errors import PeerLost
from kv_transfer.local_transport import LocalHub, LocalTransport
from kv_transfer.nixl_transport import NixlTransport
from kv_transfer.transfer_thread import (
    Fenced,
    PageWrite,
    PeerConnected,
    PeerDisconnected,
    PeerFailed,
    TransferThread,
    WriteEnded,
)


class Worker:
    """A transfer thread over a small pool."""

    def __init__(self, make, name):
        self.memory = np.zeros((8, 4096), dtype=np.uint8)
        self.name = name
        self.events: queue.Queue = queue.Queue()
        self.transport = make(name, PageRegion(self.memory.ctypes.data, 8, 4096))
        self.thread = TransferThread(self.transport, self.events.put)
        self.thread.start()

    def next_event(self):
        return self.events.get(timeout=10)


@pytest.fixture(params=["local", "nixl"])
def workers(request):
    hub = LocalHub()
    make = NixlTransport if request.param == "nixl" else lambda name, region: LocalTransport(hub, name, region)
    pair = Worker(make, f"w-{time.monotonic_ns()}"), Worker(make, f"o-{time.monotonic_ns()}")
    yield pair
    for worker in pair:
        worker.thread.stop()
        assert not worker.thread.is_alive


def make_write(owner, pages=(0, 1), tag="tag"):
    return PageWrite(tag, owner.name, tuple(pages), tuple(pages), b"payload")


def test_a_write_ends_and_the_owner_hears_of_it(workers):
    writer, owner = workers
    writer.thread.connect(owner.transport.endpoint())
    assert writer.next_event() == PeerConnected(owner.name)
    writer.memory[:] = 5
    writer.thread.write(make_write(owner))
    ended = writer.next_event()
    assert isinstance(ended, WriteEnded)
    assert ended.ok
    assert ended.write.tag == "tag"
    assert ended.ended >= ended.started
    assert owner.next_event() == Notification(writer.name, b"payload")
    assert (owner.memory[:2] == 5).all()


def test_pages_are_not_read_before_the_device_has_written_them(workers):
    writer, owner = workers
    writer.thread.connect(owner.transport.endpoint())
    writer.next_event()
    written = threading.Event()
    writer.thread.write(replace(make_write(owner, tag="launched"), is_written=written.is_set))
    writer.thread.write(make_write(owner, pages=(4,), tag="there"))
    assert writer.next_event().write.tag == "there"  # others do not wait for it
    time.sleep(0.05)
    assert writer.events.empty()
    writer.memory[:2] = 9
    written.set()
    assert writer.next_event().write.tag == "launched"
    assert (owner.memory[:2] == 9).all()


def test_a_write_waits_for_those_it_comes_after(workers):
    writer, owner = workers
    writer.thread.connect(owner.transport.endpoint())
    writer.next_event()
    written = threading.Event()
    first = replace(make_write(owner, tag="first"), payload=b"", is_written=written.is_set)
    second = replace(make_write(owner, pages=(4,), tag="second"), payload=b"", after=(first,))
    last = replace(make_write(owner, pages=(5,), tag="last"), after=(first, second))
    for write in (first, second, last):
        writer.thread.write(write)
    time.sleep(0.05)
    assert writer.events.empty() and owner.events.empty()
    written.set()
    assert [writer.next_event().write.tag for _ in range(3)] == ["first", "second", "last"]
    assert owner.next_event().payload == b"payload"
    assert owner.events.empty()


def test_a_write_fails_with_the_one_it_comes_after():
    hub = LocalHub()
    made = [Worker(lambda name, region: LocalTransport(hub, name, region), f"f-{n}") for n in range(2)]
    writer, owner = made
    writer.thread.connect(owner.transport.endpoint())
    writer.next_event()
    written = threading.Event()
    writer.memory[:] = 5
    first = replace(make_write(owner, tag="first"), is_written=written.is_set)
    writer.thread.write(first)
    writer.thread.write(replace(make_write(owner, pages=(4,), tag="last"), after=(first,)))
    post = writer.transport.write

    def fail_once(*arguments):
        writer.transport.write = post
        raise PeerLost("on purpose")

    writer.transport.write = fail_once
    written.set()
    events = [writer.next_event() for _ in range(4)]
    assert [(e.write.tag, e.ok) for e in events if isinstance(e, WriteEnded)] == [("first", False), ("last", False)]
    assert isinstance(events[-1], PeerDisconnected)  # nothing keeps the broken connection
    assert not owner.memory.any()
    for worker in made:
        worker.thread.stop()


def test_a_device_that_failed_ends_its_writes(workers):
    writer, owner = workers
    writer.thread.connect(owner.transport.endpoint())
    writer.next_event()

    def broken():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    writer.thread.write(replace(make_write(owner), is_written=broken))
    ended = writer.next_event()
    assert not ended.ok
    assert "illegal memory access" in ended.reason
    assert writer.thread.is_alive


def test_a_write_of_no_pages_is_complete_at_once_and_still_heard(workers):
    writer, owner = workers
    writer.thread.connect(owner.transport.endpoint())
    writer.next_event()
    writer.thread.write(make_write(owner, pages=()))
    assert writer.next_event().ok
    assert owner.next_event().payload == b"payload"


def test_a_write_to_a_stranger_ends_too(workers):
    """Casebook C088: a write that could not be started is reported."""
    writer, owner = workers
    writer.thread.write(make_write(owner))
    ended, failed = writer.next_event(), writer.next_event()
    assert isinstance(ended, WriteEnded)
    assert not ended.ok
    assert "never connected" in ended.reason
    assert isinstance(failed, PeerFailed)


def test_a_peer_that_can_not_be_reached_is_said_to_be_failed(workers):
    writer, owner = workers
    endpoint = owner.transport.endpoint()
    endpoint.page_bytes = 1
    writer.thread.connect(endpoint)
    failed = writer.next_event()
    assert isinstance(failed, PeerFailed)
    assert "pages of 1 bytes" in failed.reason


def test_idle_threads_cost_next_to_nothing(workers):
    """A ratio from one run: CPU time of this process against wall time, two idle threads."""
    time.sleep(0.2)
    cpu, wall = time.process_time(), time.monotonic()
    time.sleep(1.0)
    share = (time.process_time() - cpu) / (time.monotonic() - wall)
    assert share < 0.1, f"two idle transfer threads take {share:.0%} of a core"


def test_a_peer_is_disconnected_only_when_nothing_is_open_towards_it():
    """Cutting an open write leaves it unknown what became of its bytes."""
    hub = LocalHub()
    writer = Worker(lambda name, region: LocalTransport(hub, name, region), "writer")
    owner = Worker(lambda name, region: LocalTransport(hub, name, region), "owner")
    disconnected = []
    forget = writer.transport.disconnect

    def disconnect(agent_name):
        disconnected.append([entry.write.tag for entry in writer.thread._open])
        forget(agent_name)

    writer.transport.disconnect = disconnect
    writer.thread.connect(owner.transport.endpoint())
    assert writer.next_event() == PeerConnected("owner")
    writer.thread.write(make_write(owner))
    writer.thread.disconnect("owner")
    ended = writer.next_event()
    assert isinstance(ended, WriteEnded)
    assert ended.ok
    assert writer.next_event() == PeerDisconnected("owner")
    writer.thread.connect(owner.transport.endpoint())
    assert writer.next_event() == PeerConnected("owner")
    assert disconnected == [[]]
    for worker in (writer, owner):
        worker.thread.stop()


class Gate:
    """A transport whose look around can be held up, as when the process is stopped."""

    def __init__(self, transport):
        self._transport, self.open = transport, threading.Event()
        self.open.set()

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def take_notifications(self):
        self.open.wait()
        return self._transport.take_notifications()


def test_a_fence_counts_only_time_in_which_progress_is_driven(monkeypatch):
    """Bytes wait in the network for a process that is stopped; they must land before their pages are given away."""
    monkeypatch.setattr(transfer_thread, "FENCE_SECONDS", 0.4)
    monkeypatch.setattr(transfer_thread, "MOST_DRIVEN_SECONDS", 0.05)
    worker = Worker(lambda name, region: Gate(LocalTransport(LocalHub(), name, region)), "owner")
    started = time.monotonic()
    worker.thread.fence("tag")
    time.sleep(0.1)
    worker.transport.open.clear()
    time.sleep(1.0)
    assert worker.events.empty()
    worker.transport.open.set()
    assert worker.next_event() == Fenced("tag")
    assert time.monotonic() - started > 1.2
    worker.thread.stop()


def test_a_peer_with_an_open_write_on_a_failed_connection_is_not_connected_over_it(monkeypatch):
    """It would look fresh, and the failed connection would never be taken down."""
    hub = LocalHub()
    writer = Worker(lambda name, region: LocalTransport(hub, name, region), "writer")
    owner = Worker(lambda name, region: LocalTransport(hub, name, region), "owner")
    writer.thread.connect(owner.transport.endpoint())
    assert writer.next_event() == PeerConnected("owner")
    state = [WriteState.IN_PROGRESS]

    class Stuck:
        def poll(self):
            return state[0]

    monkeypatch.setattr(transfer_thread, "STALLED_SECONDS", 0.05)
    writer.transport.write = lambda *_: Stuck()
    writer.thread.write(make_write(owner))
    assert writer.next_event() == PeerFailed("owner", "no write to agent owner ended for 0.05 s")
    writer.thread.write(make_write(owner, tag="another"))
    refused = writer.next_event()
    assert (refused.write.tag, refused.ok) == ("another", False), "not over a connection that has failed"
    writer.thread.connect(owner.transport.endpoint())
    assert writer.next_event() == PeerFailed("owner", "its previous connection still has open writes")
    state[0] = WriteState.DONE
    assert isinstance(writer.next_event(), WriteEnded)
    assert writer.next_event() == PeerDisconnected("owner")
    writer.thread.connect(owner.transport.endpoint())
    assert writer.next_event() == PeerConnected("owner")
    for worker in (writer, owner):
        worker.thread.stop()
