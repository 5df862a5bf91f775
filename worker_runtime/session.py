"""The worker's end of router sessions: commands go to the engine thread, events come back in order.

hello ──> info, commands <──> events ──> the stream ends: the engine thread drops the router's requests.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import defaultdict
from collections.abc import AsyncIterator

import grpc

from kv_transfer.layout import PROTOCOL_VERSION
from protos import worker_pb2, worker_pb2_grpc
from rpc.clock import Clock
from worker_runtime.health import Health
from worker_runtime.inbox import Inbox, SessionClosed, SessionCommand, SessionOpened

log = logging.getLogger(__name__)

MAX_WAITING_EVENTS = 20_000
"""Events that may wait for a router that does not read; with more its session is ended."""
HEARTBEAT_SECONDS = 1.0

Events = asyncio.Queue[worker_pb2.SessionResponse]


class Sessions:
    """The open sessions' outgoing queues. The engine thread writes, the event loop reads."""

    def __init__(self, clock: Clock, inbox: Inbox) -> None:
        self._clock, self._inbox = clock, inbox
        self._queues: dict[int, Events] = {}
        self._pending: dict[int, list[worker_pb2.SessionResponse]] = defaultdict(list)

    def open(self, session_id: int) -> Events:
        """Called on the event loop."""
        return self._queues.setdefault(session_id, asyncio.Queue())

    def tell_all(self, event: worker_pb2.SessionResponse) -> None:
        """Called on the event loop: sends an event that is not about requests, ahead of events that are not flushed."""
        for queue in self._queues.values():
            queue.put_nowait(event)

    def end_all(self) -> None:
        """Called on the event loop: sessions end when what waits was sent."""
        self.tell_all(_END)

    async def beat_for_ever(self) -> None:
        """Lets routers know that this process lives."""
        beat = worker_pb2.SessionResponse(heartbeat=worker_pb2.Heartbeat())
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            for queue in self._queues.values():
                if queue.empty():
                    queue.put_nowait(beat)

    def close(self, session_id: int) -> None:
        """Called on the event loop."""
        self._queues.pop(session_id, None)

    def all_ids(self) -> list[int]:
        """Ids of the open sessions."""
        return list(self._queues)

    def add(self, session_id: int, event: worker_pb2.SessionResponse) -> None:
        """Called on the engine thread; goes out with the next `flush`."""
        self._pending[session_id].append(event)

    def add_output(self, session_id: int, output: worker_pb2.TokenOutput) -> None:
        """Like `add`, for new tokens: tokens that follow each other go out in one message."""
        pending = self._pending[session_id]
        if not pending or not pending[-1].HasField("step_output"):
            pending.append(worker_pb2.SessionResponse())
        pending[-1].step_output.outputs.append(output)

    def flush(self) -> None:
        """Hands everything added to the event loop, in one call."""
        if self._pending:
            pending, self._pending = dict(self._pending), defaultdict(list)
            self._clock.call_soon_threadsafe(self._put_all, pending)

    def _put_all(self, pending: dict[int, list[worker_pb2.SessionResponse]]) -> None:
        for session_id, events in pending.items():
            queue = self._queues.get(session_id)
            if queue is None:
                continue
            if queue.qsize() + len(events) > MAX_WAITING_EVENTS:
                # Frozen, or cut off without a trace: its requests end here, and it may connect again.
                log.error("a router does not read; its session ends", extra={"session": session_id})
                del self._queues[session_id]
                while not queue.empty():
                    queue.get_nowait()
                queue.put_nowait(_END)
                # Its stream may be stuck in a write for long: the engine hears of it now.
                self._inbox.put(SessionClosed(session_id))
                continue
            for event in events:
                queue.put_nowait(event)


class SessionServicer(worker_pb2_grpc.WorkerServiceServicer):
    """See `worker.proto`."""

    def __init__(self, info: worker_pb2.WorkerInfo, inbox: Inbox, sessions: Sessions, health: Health) -> None:
        self._info, self._inbox, self._sessions, self._health = info, inbox, sessions, health
        self._ids = itertools.count(1)

    async def Session(
        self,
        request_iterator: AsyncIterator[worker_pb2.SessionRequest],
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]
    ) -> AsyncIterator[worker_pb2.SessionResponse]:
        """One router's connection."""
        first = await anext(aiter(request_iterator), None)
        if first is None or first.WhichOneof("command") != "hello":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first command of a session must be hello")
        assert first is not None
        if first.hello.protocol_version != PROTOCOL_VERSION:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"protocol_version: router has {first.hello.protocol_version}, worker has {PROTOCOL_VERSION}",
            )
        session_id = next(self._ids)
        events = self._sessions.open(session_id)
        self._inbox.put(SessionOpened(session_id))
        log.info("router connected", extra={"router": first.hello.router_id, "session": session_id})
        reader = asyncio.create_task(self._read(session_id, request_iterator, events))
        try:
            yield worker_pb2.SessionResponse(info=self._info)
            yield worker_pb2.SessionResponse(state=self._health.event())
            while True:
                event = await events.get()
                if event is _END:
                    return
                yield event
        finally:
            reader.cancel()
            self._sessions.close(session_id)
            self._inbox.put(SessionClosed(session_id))
            log.info("router disconnected", extra={"router": first.hello.router_id, "session": session_id})

    async def _read(self, session_id: int, requests: AsyncIterator[worker_pb2.SessionRequest], events: Events) -> None:
        async for request in requests:
            if session_id in self._sessions.all_ids():
                self._inbox.put(SessionCommand(session_id, request))
        events.put_nowait(_END)


_END = worker_pb2.SessionResponse()
