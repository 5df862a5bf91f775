"""Whether a worker takes work: draining, faults, an engine thread that stands still."""

from __future__ import annotations

import threading

import pytest

from protos import worker_pb2
from tests.scripted import FakeClock
from worker_runtime.health import PAGES, Health


def stand_still(event):
    event.wait()


@pytest.fixture
def stuck():
    """A thread that stands."""
    event = threading.Event()
    thread = threading.Thread(target=stand_still, args=(event,))
    thread.start()
    yield thread
    event.set()
    thread.join()


def test_an_engine_without_progress_is_a_fault_until_it_goes_on(stuck):
    """Casebook C141: it says where it stands, and recovers."""
    clock, changes = FakeClock(), []
    health = Health(clock, lambda: changes.append(health.event().state))
    health.reached("computing a step")
    assert health.watch_engine(stuck, 10.0) is None
    clock.advance(0.02)
    stack = health.watch_engine(stuck, 0.01)
    assert "stand_still" in stack
    assert health.watch_engine(stuck, 0.01) is None, "said once"
    event = health.event()
    assert event.is_stuck
    assert "has stood for 0 s in: computing a step" in event.reason
    health.reached("the next step")
    health.watch_engine(stuck, 10.0)
    assert changes == [worker_pb2.WORKER_STATE_FAULTY, worker_pb2.WORKER_STATE_READY]


def test_waiting_for_work_is_no_fault(stuck):
    clock = FakeClock()
    health = Health(clock, lambda: None)
    health.reached("something")
    health.waits()
    clock.advance(0.02)
    assert health.watch_engine(stuck, 0.01) is None
    assert health.event().state == worker_pb2.WORKER_STATE_READY


def test_a_fault_is_told_before_draining_and_only_some_are_stuck():
    health = Health(FakeClock(), lambda: None)
    health.drain()
    assert health.event().state == worker_pb2.WORKER_STATE_DRAINING
    health.set_fault(PAGES, "pages do not add up")
    event = health.event()
    assert event.state == worker_pb2.WORKER_STATE_FAULTY
    assert event.reason == "pages do not add up"
    assert not event.is_stuck
