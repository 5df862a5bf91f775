"""Random faults against the whole state machine, in simulated time; `make chaos` runs 100,000 schedules."""

from __future__ import annotations

import logging

import pytest

from decode_service.loop import DecodeLoop
from engine.page_pool import PagePool
from kv_transfer.tickets import IncomingTicket
from router.dispatch import Dispatcher
from tests.simulation.world import BrokenPromise, Plan, World, run_schedule, simulated

SCHEDULES = 1000
MOST_TO_FIND = 3000


@pytest.fixture(autouse=True)
def _quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("block", range(4))
def test_no_schedule_breaks_a_promise(block):
    """Every request ends with exactly its tokens, every page comes back, no write meets a page of another."""
    run_schedules(range(block * SCHEDULES // 4, (block + 1) * SCHEDULES // 4))


def run_schedules(seeds):
    for seed in seeds:
        run_schedule(seed)


def events_of(seed):
    world = World(seed, Plan())
    with simulated(world):
        world.run()
    return [(asked.tokens, round(world.clock.now, 9)) for asked in world.asked], list(world.trace)


def test_a_seed_is_a_schedule():
    """What failed once fails again."""
    assert events_of(7) == events_of(7)
    assert events_of(7) != events_of(8)


def free_at_once(self, request):
    """What others do: pages of an ended request are free, whatever its writer does."""
    del self._requests[request.ticket.key]
    del self._by_sequence[request.sequence.sequence_id]
    self._scheduler.release(request.sequence)
    if not request.ticket.is_terminal:
        self._parts.pool.close_to_writer(request.ticket.page_ids)


def believe_the_first_message(self):
    return self.first_token is not None


def close_silently(self, request, leg, abort, is_complete=False):
    return _close_leg(self, request, leg, abort=False)


_close_leg = Dispatcher._close_leg

PLANTED = {
    "pages are freed without waiting for their writer": (DecodeLoop, "_release", free_at_once),
    "pages that a write of ours reads are not pinned": (PagePool, "pin", lambda self, pages: None),
    "a first token counts as all pages": (IncomingTicket, "is_complete", property(believe_the_first_message)),
    "a lost notification is waited for": (DecodeLoop, "_on_ticket_overdue", lambda self, key: None),
    "the other leg is not told": (Dispatcher, "_close_leg", close_silently),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug, monkeypatch):
    owner, name, planted = PLANTED[bug]
    monkeypatch.setattr(owner, name, planted)
    if name == "pin":
        monkeypatch.setattr(PagePool, "unpin", lambda self, pages: None)
    with pytest.raises(BrokenPromise, match="seed"):
        run_schedules(range(MOST_TO_FIND))
