"""Sessions with routers: order, and an end to those that do not read."""

from __future__ import annotations

import asyncio

from protos import worker_pb2
from rpc.clock import SystemClock
from worker_runtime import session
from worker_runtime.inbox import Inbox, SessionClosed
from worker_runtime.session import Sessions


def load(number):
    return worker_pb2.SessionResponse(load=worker_pb2.LoadReport(free_pages=number))


async def test_events_come_in_order_to_their_own_router():
    sessions = Sessions(SystemClock(asyncio.get_running_loop()), Inbox())
    queues = {number: sessions.open(number) for number in (1, 2)}
    for number in range(3):
        sessions.add(1, load(number))
    sessions.add(2, load(9))
    sessions.flush()
    await asyncio.sleep(0)
    assert [queues[1].get_nowait().load.free_pages for _ in range(3)] == [0, 1, 2]
    assert [queues[2].get_nowait().load.free_pages] == [9]
    assert queues[1].empty()


async def test_a_router_that_does_not_read_loses_its_session_and_others_do_not(monkeypatch):
    monkeypatch.setattr(session, "MAX_WAITING_EVENTS", 10)
    inbox = Inbox()
    sessions = Sessions(SystemClock(asyncio.get_running_loop()), inbox)
    stuck, fine = sessions.open(1), sessions.open(2)
    for number in range(11):
        for session_id in (1, 2):
            sessions.add(session_id, load(number))
        sessions.flush()
        await asyncio.sleep(0)
        fine.get_nowait()
    assert inbox.take(wait=False) == [SessionClosed(1)]
    assert sessions.all_ids() == [2]
    assert stuck.get_nowait() is session._END
    assert stuck.empty(), "memory is given back"


async def test_tokens_of_a_step_go_out_in_one_message_and_in_order_with_other_events():
    sessions = Sessions(SystemClock(asyncio.get_running_loop()), Inbox())
    queue = sessions.open(1)
    for index in range(3):
        sessions.add_output(1, worker_pb2.TokenOutput(first_index=index))
    sessions.add(1, load(7))
    sessions.add_output(1, worker_pb2.TokenOutput(first_index=3))
    sessions.add_output(2, worker_pb2.TokenOutput(first_index=9))
    sessions.flush()
    sessions.add_output(1, worker_pb2.TokenOutput(first_index=4))
    sessions.flush()
    await asyncio.sleep(0)
    events = [queue.get_nowait() for _ in range(queue.qsize())]
    assert [event.WhichOneof("event") for event in events] == ["step_output", "load", "step_output", "step_output"]
    assert [[o.first_index for o in event.step_output.outputs] for event in events] == [[0, 1, 2], [], [3], [4]]
