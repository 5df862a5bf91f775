"""Random faults against the whole state machine, in simulated time; `make chaos` runs 100,000 schedules."""

from __future__ import annotations

import logging

import pytest

from decode_service.incoming_tickets import IncomingTickets
from decode_service.loop import DecodeLoop
from decode_service.ticket_revoker import NoResponse, TicketRevoker
from engine.page_pool import PagePool
from kv_transfer.tickets import IncomingTicket
from router.dispatch import Dispatcher
from tests.simulation.world import BrokenPromise, Plan, World, run_schedule
from worker_runtime.inbox import WriterGone

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


def run_schedules(seeds, plan=None):
    for seed in seeds:
        run_schedule(seed, plan)


def events_of(seed):
    world = World(seed, Plan())
    world.run()
    return [(asked.tokens, round(world.clock.time, 9)) for asked in world.asked], list(world.trace)


def test_a_seed_is_a_schedule():
    """What failed once fails again."""
    assert events_of(7) == events_of(7)
    assert events_of(7) != events_of(8)


def free_at_once(self, ref):
    """What others do: pages of an ended request are free, whatever its writer does."""
    entry = self._entries.pop(ref, None)
    if entry is not None:
        self._pool.close_to_writer(entry.ticket.page_ids)
    return False


def believe_the_first_message(self):
    return self.first_token is not None


def close_silently(request, leg, abort=False, is_complete=False):
    _close(request, leg)


def take_silence_for_death(self, ref, writer, outcome):
    return WriterGone(ref, "it is silent") if isinstance(outcome, NoResponse) else _verdict(self, ref, writer, outcome)


_close, _verdict = Dispatcher._close, TicketRevoker._verdict

PLANTED = {
    "pages are freed without waiting for their writer": (IncomingTickets, "revoke", free_at_once),
    "pages that a write of ours reads are not pinned": (PagePool, "pin", lambda self, pages: None),
    "a first token counts as all pages": (IncomingTicket, "is_complete", property(believe_the_first_message)),
    "a lost notification is waited for": (DecodeLoop, "_on_ticket_overdue", lambda self, ref: None),
    "the other leg is not told": (Dispatcher, "_close", staticmethod(close_silently)),
    "a writer that is silent is taken for dead": (TicketRevoker, "_verdict", take_silence_for_death),
}


PLANS = {
    # A writer must be frozen while it writes, and asked in vain.
    "a writer that is silent is taken for dead": Plan(("freeze", "transfer", "cut"), most_requests=10, most_faults=8)
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug, monkeypatch):
    owner, name, planted = PLANTED[bug]
    monkeypatch.setattr(owner, name, planted)
    if name == "pin":
        monkeypatch.setattr(PagePool, "unpin", lambda self, pages: None)
    with pytest.raises(BrokenPromise, match="seed"):
        run_schedules(range(MOST_TO_FIND), PLANS.get(bug))
