"""The workers a router knows: one session each, kept alive, and the pairs that can move pages."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from socket import SOCK_STREAM
from typing import TYPE_CHECKING, Any

import grpc

from kv_transfer.errors import LayoutMismatch
from kv_transfer.layout import PROTOCOL_VERSION, Fingerprint, check_equal
from protos import worker_pb2, worker_pb2_grpc
from router.config import DNS_PREFIX
from router.validation import ClusterLimits
from rpc.channel import open_channel

if TYPE_CHECKING:
    from router.request import Request

log = logging.getLogger(__name__)

RESOLVE_SECONDS = 2.0
"""Time between two looks at the addresses of a name."""
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 2.0


class WorkerLink:
    """A worker at an address: its session, its load, and what is bound to it."""

    def __init__(self, address: str, tier: worker_pb2.Tier.ValueType) -> None:
        self.address, self.tier = address, tier
        self.info: worker_pb2.WorkerInfo | None = None
        """Set while a session is open."""
        self.state = "connecting"
        self.reason = ""
        self.load = worker_pb2.LoadReport()
        self.is_listed = True
        """Its address is one that the router was given, or that a name still has."""
        self.last_seen = time.monotonic()
        self.is_full = False
        """It refused a reservation and has not reported since."""
        self.requests: set[Request] = set()
        self.num_prompts_sent = 0
        """In this session."""
        self.last_bound = 0
        """Number of the last binding to it; the router counts them."""
        self.cached_pages: set[bytes] = set()
        """Keys of pages its prefix cache holds, from its cache events."""
        self.ready_peers: set[str] = set()
        """Agent names of decode workers that this prefill worker can write to."""
        self.commands: asyncio.Queue[worker_pb2.SessionRequest] = asyncio.Queue()

    @property
    def is_open(self) -> bool:
        """Whether commands reach the worker."""
        return self.info is not None

    @property
    def name(self) -> str:
        """For logs."""
        return self.info.worker_id if self.info else self.address

    @property
    def agent_name(self) -> str:
        """The transfer agent of this incarnation."""
        return self.info.endpoint.agent_name if self.info else ""

    def send(self, command: worker_pb2.SessionRequest) -> None:
        """Queues a command; dropped if the session is gone, as are its requests then."""
        if self.is_open:
            self.commands.put_nowait(command)


EventHandler = Callable[[WorkerLink, worker_pb2.SessionResponse], None]


class WorkerPool:
    """Keeps a session with every worker and decides which pairs fit together."""

    def __init__(
        self,
        router_id: str,
        tokenizer_hash: str,
        on_event: EventHandler,
        on_lost: Callable[[WorkerLink], None],
        on_change: Callable[[], None],
    ) -> None:
        """on_event: an event for requests; on_lost: a session broke; on_change: pairs or load changed."""
        self._router_id, self._tokenizer_hash = router_id, tokenizer_hash
        self._on_event, self._on_lost, self._on_change = on_event, on_lost, on_change
        self.prefill: list[WorkerLink] = []
        self.decode: list[WorkerLink] = []
        self.colocated: list[WorkerLink] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._unresolved: dict[str, str] = {}
        """Names that have no addresses, and why."""

    def add(self, address: str, tier: worker_pb2.Tier.ValueType) -> WorkerLink:
        """Starts keeping a session with the worker at an address."""
        link = WorkerLink(address, tier)
        self._of_tier(tier).append(link)
        self._start(self._keep_session(link))
        return link

    def watch(self, name_and_port: str, tier: worker_pb2.Tier.ValueType) -> None:
        """Keeps a session with the worker at each address that a name has, and looks them up again and again."""
        self._start(self._keep_resolving(name_and_port, tier))

    async def _keep_resolving(self, name_and_port: str, tier: worker_pb2.Tier.ValueType) -> None:
        name, _, port = name_and_port.rpartition(":")
        mine: dict[str, WorkerLink] = {}
        self._unresolved[name_and_port] = "not looked up yet"
        while True:
            try:
                found = await asyncio.get_running_loop().getaddrinfo(name.strip("[]"), int(port), type=SOCK_STREAM)
            except OSError as error:
                # No address yet, or the name server is away: those that are known stay.
                log.info("a name has no addresses", extra={"address": name_and_port, "reason": str(error)})
                self._unresolved[name_and_port] = str(error)
            else:
                self._unresolved.pop(name_and_port, None)
                hosts = {str(target[0]) for *_, target in found}
                addresses = {f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts}
                for address in sorted(addresses - mine.keys()):
                    # One that was away from the name for a moment is still there.
                    known = (link for link in self._of_tier(tier) if link.address == address)
                    mine[address] = next(known, None) or self.add(address, tier)
                    mine[address].is_listed = True
                for address in sorted(mine.keys() - addresses):
                    # It may be finishing its work: the session goes on until it ends.
                    mine.pop(address).is_listed = False
            await asyncio.sleep(RESOLVE_SECONDS)

    async def close(self) -> None:
        """Ends all sessions."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def links(self) -> list[WorkerLink]:
        """All workers."""
        return [*self.prefill, *self.decode, *self.colocated]

    def ready_pairs(self) -> list[tuple[WorkerLink, WorkerLink]]:
        """Pairs (prefill, decode) that can move pages. A colocated worker is a pair with itself."""
        alone = [(link, link) for link in self.colocated if link.is_open]
        return alone + [
            (prefill, decode)
            for prefill in self.prefill
            for decode in self.decode
            if prefill.is_open and decode.is_open and decode.agent_name in prefill.ready_peers
        ]

    def slowdown(self) -> int:
        """Order of prompts, as the prefill workers keep it; see `WorkerLimits.slowdown`."""
        computing = [*self.prefill, *self.colocated]
        return next((link.info.limits.slowdown for link in computing if link.info is not None), 0)

    def limits(self) -> ClusterLimits | None:
        """What the ready pairs can take; None while there is none."""
        infos = [(p.info, d.info) for p, d in self.ready_pairs() if p.info and d.info]
        if not infos:
            return None
        # Those of the pair that can take the longest request.
        most = max(infos, key=lambda pair: min(pair[0].limits.num_pages, pair[1].limits.num_pages))
        first = most[0].limits
        return ClusterLimits(
            max_model_len=first.max_model_len,
            vocab_size=first.vocab_size,
            page_size=first.page_size,
            prefill_pages=most[0].limits.num_pages,
            decode_pages=most[1].limits.num_pages,
        )

    def why_not_ready(self) -> str:
        """In words, for clients and people."""
        parts = [f"{DNS_PREFIX}{name} has no addresses: {reason}" for name, reason in self._unresolved.items()]
        if not parts and not self.colocated and not (self.prefill and self.decode):
            return "this router was given no prefill or no decode worker, and no colocated one"
        for link in self.links:
            tier = _tier_name(link.tier)
            why = link.reason or ("no pair with it is ready" if link.is_open else "not connected")
            parts.append(f"{tier} {link.address}: {why}")
        return "; ".join(parts)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _keep_session(self, link: WorkerLink) -> None:
        pause = FIRST_PAUSE_SECONDS
        while True:
            try:
                await self._run_session(link)
                link.state, link.reason = "lost", "the worker ended the session"
            except grpc.aio.AioRpcError as error:
                # Only a session that was open can be lost; before that the worker is simply not there yet.
                link.state = "lost" if link.is_open else "connecting"
                link.reason = f"{error.code().name}: {error.details()}"
            except _Refused as error:
                link.state, link.reason = "refused", str(error)
                log.error("worker refused", extra={"address": link.address, "reason": link.reason})
            except Exception as error:
                # A defect of ours must cost this session's requests an attempt, not the worker for ever.
                link.state, link.reason = "lost", f"session handling failed: {error}"
                log.exception("session handling failed", extra={"address": link.address})
            if link.is_open:
                pause = FIRST_PAUSE_SECONDS
                try:
                    self._close_link(link)
                except Exception:
                    # Whatever it is, this worker must be connected again.
                    log.exception("closing a session failed", extra={"address": link.address})
            if not link.is_listed:
                self._of_tier(link.tier).remove(link)
                return
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(pause * 2, LONGEST_PAUSE_SECONDS)

    def _of_tier(self, tier: worker_pb2.Tier.ValueType) -> list[WorkerLink]:
        return {
            worker_pb2.TIER_PREFILL: self.prefill,
            worker_pb2.TIER_DECODE: self.decode,
            worker_pb2.TIER_COLOCATED: self.colocated,
        }[tier]

    async def _run_session(self, link: WorkerLink) -> None:
        """One session, from hello to its end."""
        async with open_channel(link.address) as channel:
            stub: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(channel)
            call = stub.Session(self._outgoing(link))
            try:
                async for event in call:
                    link.last_seen = time.monotonic()
                    if event.HasField("info"):
                        self._open_link(link, event.info)
                    elif event.HasField("peer"):
                        self._on_peer(link, event.peer)
                    elif event.HasField("cache"):
                        link.cached_pages.difference_update(event.cache.evicted)
                        link.cached_pages.update(event.cache.added)
                    elif event.HasField("load"):
                        link.load, link.is_full = event.load, False
                        self._on_change()
                    else:
                        self._on_event(link, event)
            finally:
                call.cancel()

    async def _outgoing(self, link: WorkerLink) -> AsyncIterator[worker_pb2.SessionRequest]:
        hello = worker_pb2.RouterHello(router_id=self._router_id, protocol_version=PROTOCOL_VERSION)
        link.commands = asyncio.Queue()
        yield worker_pb2.SessionRequest(hello=hello)
        while True:
            yield await link.commands.get()

    def _open_link(self, link: WorkerLink, info: worker_pb2.WorkerInfo) -> None:
        if info.tier != link.tier:
            raise _Refused(f"it is a {_tier_name(info.tier)} worker, expected was {_tier_name(link.tier)}")
        if info.fingerprint.tokenizer_hash != self._tokenizer_hash:
            raise _Refused(
                f"its tokenizer differs from the router's (worker {info.fingerprint.tokenizer_hash[:12]}, "
                f"router {self._tokenizer_hash[:12]})"
            )
        link.info, link.state, link.reason = info, "ready", ""
        link.num_prompts_sent = 0
        link.load = worker_pb2.LoadReport(free_pages=info.limits.num_pages)
        link.is_full = False
        link.cached_pages.clear()
        log.info(
            "worker connected", extra={"worker": link.name, "tier": _tier_name(link.tier), "address": link.address}
        )
        for prefill in self.prefill:
            for decode in self.decode:
                if link in (prefill, decode) and prefill.is_open and decode.is_open:
                    self._connect_pair(prefill, decode)

    def _close_link(self, link: WorkerLink) -> None:
        log.warning("worker lost", extra={"worker": link.name, "address": link.address, "reason": link.reason})
        agent_name = link.agent_name
        link.info = None
        link.ready_peers.clear()
        if link.tier == worker_pb2.TIER_DECODE:
            for prefill in self.prefill:
                prefill.ready_peers.discard(agent_name)
                forget = worker_pb2.ForgetPeerCommand(agent_name=agent_name)
                prefill.send(worker_pb2.SessionRequest(forget_peer=forget))
        self._on_lost(link)
        self._on_change()

    def _connect_pair(self, prefill: WorkerLink, decode: WorkerLink) -> None:
        """Asks a prefill worker to get ready for a decode worker, if their pages mean the same."""
        assert prefill.info is not None and decode.info is not None
        try:
            check_equal(
                Fingerprint.from_proto(prefill.info.fingerprint), Fingerprint.from_proto(decode.info.fingerprint)
            )
        except LayoutMismatch as error:
            prefill.reason = decode.reason = f"not paired: {error}"
            log.error("pair refused", extra={"prefill": prefill.name, "decode": decode.name, "reason": str(error)})
            return
        connect = worker_pb2.ConnectPeerCommand(
            incarnation_id=decode.info.incarnation_id, endpoint=decode.info.endpoint
        )
        prefill.send(worker_pb2.SessionRequest(connect_peer=connect))

    def _on_peer(self, prefill: WorkerLink, event: worker_pb2.PeerEvent) -> None:
        if event.ready:
            prefill.ready_peers.add(event.agent_name)
            log.info("pair ready", extra={"prefill": prefill.name, "decode": event.agent_name})
        else:
            prefill.ready_peers.discard(event.agent_name)
            log.warning(
                "pair failed", extra={"prefill": prefill.name, "decode": event.agent_name, "reason": event.reason}
            )
            self._start(self._reconnect_pair(prefill, event.agent_name))
        self._on_change()

    async def _reconnect_pair(self, prefill: WorkerLink, agent_name: str) -> None:
        """A failure is not for ever: tries again while both are there."""
        await asyncio.sleep(LONGEST_PAUSE_SECONDS * random.uniform(0.25, 0.75))
        for decode in self.decode:
            if decode.is_open and decode.agent_name == agent_name and prefill.is_open:
                self._connect_pair(prefill, decode)


class _Refused(Exception):
    """A worker that must not be used."""


def _tier_name(tier: worker_pb2.Tier.ValueType) -> str:
    return worker_pb2.Tier.Name(tier).removeprefix("TIER_").lower()
