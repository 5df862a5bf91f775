"""Keeps a session with every worker: connects, reads, notices silence, connects again."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import grpc

from kv_transfer.layout import PROTOCOL_VERSION
from protos import worker_pb2, worker_pb2_grpc
from router.name_watch import NameWatch
from router.worker_link import WorkerLink
from router.worker_pool import WorkerPool, WorkerRefused
from rpc.channel import open_channel
from rpc.clock import Clock
from rpc.tls import TlsFiles

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 1.0
SILENCE_LOOK_SECONDS = 0.5


class _Silent(Exception):
    """A worker that says nothing."""


class WorkerSessions:
    """The connections of a `WorkerPool`."""

    def __init__(
        self,
        pool: WorkerPool,
        router_id: str,
        clock: Clock,
        rng: random.Random,
        silence_seconds: float = 10.0,
        tls: TlsFiles | None = None,
    ) -> None:
        self._pool, self._router_id, self._clock, self._rng = pool, router_id, clock, rng
        self._silence_seconds, self._tls = silence_seconds, tls
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, address: str, tier: worker_pb2.Tier.ValueType) -> WorkerLink:
        """Starts keeping a session with the worker at an address."""
        link = self._pool.add(address, tier)
        self._start(self._keep(link))
        return link

    def watch(self, name_and_port: str, tier: worker_pb2.Tier.ValueType) -> None:
        """Keeps a session with the worker at each address that a name has."""

        def added(address: str) -> None:
            # A worker that was away from the name for a moment is still there.
            link = self._pool.find(address, tier) or self.add(address, tier)
            link.is_listed = True

        def removed(address: str) -> None:
            # The worker may be finishing its work: the session stays open until the worker ends it.
            link = self._pool.find(address, tier)
            if link is not None:
                link.is_listed = False

        name = NameWatch(name_and_port, added, removed)
        self._pool.names.append(name)
        self._start(name.run())

    async def close(self) -> None:
        """Ends all sessions."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _keep(self, link: WorkerLink) -> None:
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                await self._run(link)
                link.lost("the worker ended the session")
            except grpc.aio.AioRpcError as error:
                link.lost(f"{error.code().name}: {error.details()}")
            except _Silent as error:
                link.lost(str(error))
            except WorkerRefused as error:
                link.refused(str(error))
                log.error("worker refused", extra={"address": link.address, "reason": link.reason})
            except Exception as error:
                # A defect of ours must cost this session's requests an attempt, not the worker for ever.
                link.lost(f"session handling failed: {error}")
                log.exception("session handling failed", extra={"address": link.address})
            if link.is_open:
                pause = FIRST_PAUSE_SECONDS
                try:
                    self._pool.close(link)
                except Exception:
                    # Whatever it is, this worker must be connected again.
                    log.exception("closing a session failed", extra={"address": link.address})
            if not link.is_listed:
                self._pool.remove(link)
                return
            await asyncio.sleep(pause * self._rng.uniform(0.5, 1.5))
            pause = min(pause * 2, LONGEST_PAUSE_SECONDS)

    async def _run(self, link: WorkerLink) -> None:
        """One session, from hello to its end."""
        async with open_channel(link.address, self._tls) as channel:
            stub: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(channel)
            call = stub.Session(self._outgoing(link))
            link.heard(self._clock.now())
            watch = asyncio.get_running_loop().create_task(self._end_if_silent(link, call))
            try:
                async for event in call:
                    self._pool.receive(link, event)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if watch.done() and not (task is not None and task.cancelling()):
                    raise _Silent(f"nothing was heard of it for {self._silence_seconds:g} s") from None
                raise
            finally:
                watch.cancel()
                call.cancel()
                # gRPC leaves its reader of commands waiting if the worker ended the session.
                link.commands.put_nowait(None)

    async def _end_if_silent(self, link: WorkerLink, call: Any) -> None:
        """Ends a session whose worker is frozen, or cut off without a trace."""
        while True:
            slept_at = self._clock.now()
            await asyncio.sleep(SILENCE_LOOK_SECONDS)
            now = self._clock.now()
            # If this process itself was held up, what the worker said meanwhile is not read yet.
            was_held_up = now - slept_at > 2 * SILENCE_LOOK_SECONDS
            if not was_held_up and now - (link.last_seen or now) > self._silence_seconds:
                call.cancel()
                return

    async def _outgoing(self, link: WorkerLink) -> AsyncIterator[worker_pb2.SessionRequest]:
        hello = worker_pb2.RouterHello(router_id=self._router_id, protocol_version=PROTOCOL_VERSION)
        link.commands = asyncio.Queue()
        yield worker_pb2.SessionRequest(hello=hello)
        commands = link.commands
        while (command := await commands.get()) is not None:
            yield command
