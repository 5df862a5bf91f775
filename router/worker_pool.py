"""The workers a router knows: one session each, kept alive, and the pairs that can move pages."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
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
from rpc.addresses import join_address, split_address
from rpc.channel import open_channel
from rpc.tls import TlsFiles

if TYPE_CHECKING:
    from router.request import Request

log = logging.getLogger(__name__)

RESOLVE_SECONDS = 2.0
"""Time between two looks at the addresses of a name."""
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 1.0
PROBE_SECONDS = 5.0
"""A pair whose test pages were not told of for this long is connected anew."""
SILENCE_LOOK_SECONDS = 0.5


class _Probe:
    """Test pages that a prefill worker is asked to send to a decode worker."""

    def __init__(self) -> None:
        self.probe_id = secrets.token_hex(8)
        self.result: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Empty if they came as they were sent, else what went wrong."""

    def end(self, reason: str) -> None:
        """The first end counts."""
        if not self.result.done():
            self.result.set_result(reason)


class WorkerLink:
    """A worker at an address: its session, its load, and what is bound to it."""

    def __init__(self, address: str, tier: worker_pb2.Tier.ValueType) -> None:
        self.address, self.tier = address, tier
        self.info: worker_pb2.WorkerInfo | None = None
        """Set while a session is open."""
        self.state = "connecting"
        self.reason = ""
        """Why it can't be used, if so."""
        self.pair_reason = ""
        """Why it has no pair, or one less, as far as that is known."""
        self.load = worker_pb2.LoadReport()
        self.is_listed = True
        """Its address is one that the router was given, or that a name still has."""
        self.last_seen = time.monotonic()
        self.is_full = False
        """It refused a reservation and has not reported since."""
        self.requests: dict[Request, None] = {}
        """Bound to it, in the order of binding."""
        self.num_prompts_sent = 0
        """In this session."""
        self.last_bound = 0
        """Number of the last binding to it; the router counts them."""
        self.cached_pages: set[bytes] = set()
        """Keys of pages its prefix cache holds, from its cache events."""
        self.ready_peers: set[str] = set()
        """Agent names of decode workers that got this prefill worker's test pages."""
        self.probes: dict[str, _Probe] = {}
        """Tests that run, by agent name of the decode worker."""
        self.probing = asyncio.Lock()
        """Held while a test of this decode worker runs."""
        self.takes_work = True
        """It is neither draining nor faulty."""
        self.commands: asyncio.Queue[worker_pb2.SessionRequest | None] = asyncio.Queue()
        """For the open session; None ends it."""

    @property
    def is_open(self) -> bool:
        """Whether commands reach the worker."""
        return self.info is not None

    @property
    def is_usable(self) -> bool:
        """Whether new requests may be bound to it."""
        return self.info is not None and self.takes_work

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
        silence_seconds: float = 10.0,
        tls: TlsFiles | None = None,
    ) -> None:
        """on_event: an event for requests; on_lost: a session broke; on_change: pairs or load changed."""
        self._tls = tls
        self._router_id, self._tokenizer_hash = router_id, tokenizer_hash
        self._on_event, self._on_lost, self._on_change = on_event, on_lost, on_change
        self._silence_seconds = silence_seconds
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
        name, port = split_address(name_and_port)
        mine: dict[str, WorkerLink] = {}
        self._unresolved[name_and_port] = "not looked up yet"
        while True:
            try:
                found = await asyncio.get_running_loop().getaddrinfo(name, port, type=SOCK_STREAM)
            except OSError as error:
                # No address yet, or the name server is away: those that are known stay.
                log.info("a name has no addresses", extra={"address": name_and_port, "reason": str(error)})
                self._unresolved[name_and_port] = str(error)
            else:
                self._unresolved.pop(name_and_port, None)
                hosts = {str(target[0]) for *_, target in found}
                addresses = {join_address(host, port) for host in hosts}
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
        alone = [(link, link) for link in self.colocated if link.is_usable]
        return alone + [
            (prefill, decode)
            for prefill in self.prefill
            for decode in self.decode
            if prefill.is_usable and decode.is_usable and decode.agent_name in prefill.ready_peers
        ]

    def can_have_pairs(self) -> bool:
        """Whether this router was given workers that could serve together, wherever they are now."""
        return bool(self._unresolved or self.colocated or (self.prefill and self.decode))

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
        if not self.can_have_pairs():
            return "this router was given no prefill or no decode worker, and no colocated one"
        for link in self.links:
            tier = _tier_name(link.tier)
            why = link.reason or link.pair_reason or ("no pair with it is ready" if link.is_open else "not connected")
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
            except _Silent as error:
                link.state, link.reason = "lost", str(error)
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
        async with open_channel(link.address, self._tls) as channel:
            stub: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(channel)
            call = stub.Session(self._outgoing(link))
            link.last_seen = time.monotonic()
            watch = asyncio.get_running_loop().create_task(self._end_if_silent(link, call))
            try:
                async for event in call:
                    self.receive(link, event)
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

    def receive(self, link: WorkerLink, event: worker_pb2.SessionResponse) -> None:
        """Acts on an event of a worker."""
        link.last_seen = time.monotonic()
        match event.WhichOneof("event"):
            case "info":
                self._open_link(link, event.info)
            case "peer":
                self._on_peer(link, event.peer)
            case "probed":
                self._on_probed(link, event.probed)
            case "state":
                self._on_state(link, event.state)
            case "cache":
                link.cached_pages.difference_update(event.cache.evicted)
                link.cached_pages.update(event.cache.added)
            case "load":
                link.load, link.is_full = event.load, False
                self._on_change()
            case "heartbeat":
                pass
            case _:
                self._on_event(link, event)

    async def _end_if_silent(self, link: WorkerLink, call: Any) -> None:
        """Ends a session whose worker is frozen, or cut off without a trace."""
        while True:
            slept_at = time.monotonic()
            await asyncio.sleep(SILENCE_LOOK_SECONDS)
            now = time.monotonic()
            # If this process itself was held up, what the worker said meanwhile is not read yet.
            was_held_up = now - slept_at > 2 * SILENCE_LOOK_SECONDS
            if not was_held_up and now - link.last_seen > self._silence_seconds:
                call.cancel()
                return

    async def _outgoing(self, link: WorkerLink) -> AsyncIterator[worker_pb2.SessionRequest]:
        hello = worker_pb2.RouterHello(router_id=self._router_id, protocol_version=PROTOCOL_VERSION)
        link.commands = asyncio.Queue()
        yield worker_pb2.SessionRequest(hello=hello)
        commands = link.commands
        while (command := await commands.get()) is not None:
            yield command

    def _open_link(self, link: WorkerLink, info: worker_pb2.WorkerInfo) -> None:
        if info.tier != link.tier:
            raise _Refused(f"it is a {_tier_name(info.tier)} worker, expected was {_tier_name(link.tier)}")
        if info.fingerprint.tokenizer_hash != self._tokenizer_hash:
            raise _Refused(
                f"its tokenizer differs from the router's (worker {info.fingerprint.tokenizer_hash[:12]}, "
                f"router {self._tokenizer_hash[:12]})"
            )
        link.info, link.state, link.reason, link.pair_reason = info, "ready", "", ""
        link.takes_work = True
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
        for probe in link.probes.values():
            probe.end("the prefill worker is gone")
        link.probes.clear()
        if link.tier == worker_pb2.TIER_DECODE:
            for prefill in self.prefill:
                prefill.ready_peers.discard(agent_name)
                if agent_name in prefill.probes:
                    prefill.probes.pop(agent_name).end("the decode worker is gone")
                forget = worker_pb2.ForgetPeerCommand(agent_name=agent_name)
                prefill.send(worker_pb2.SessionRequest(forget_peer=forget))
        self._on_lost(link)
        self._on_change()

    def _connect_pair(self, prefill: WorkerLink, decode: WorkerLink) -> None:
        """Begins to get a pair ready, if the pages of both mean the same."""
        assert prefill.info is not None and decode.info is not None
        try:
            check_equal(
                Fingerprint.from_proto(prefill.info.fingerprint), Fingerprint.from_proto(decode.info.fingerprint)
            )
        except LayoutMismatch as error:
            prefill.pair_reason = decode.pair_reason = f"not paired: {error}"
            log.error("pair refused", extra={"prefill": prefill.name, "decode": decode.name, "reason": str(error)})
            return
        if decode.agent_name not in prefill.probes:
            prefill.probes[decode.agent_name] = _Probe()
            self._start(self._get_ready(prefill, prefill.info, decode, decode.info))

    async def _get_ready(
        self, prefill: WorkerLink, writer: worker_pb2.WorkerInfo, decode: WorkerLink, owner: worker_pb2.WorkerInfo
    ) -> None:
        """Sends test pages until they come as they were sent, or one of the two is gone."""
        agent_name = owner.endpoint.agent_name
        pause = FIRST_PAUSE_SECONDS
        while prefill.info is writer and decode.info is owner:
            # One after the other: there is only one set of pages to send them to.
            async with decode.probing:
                if prefill.info is not writer or decode.info is not owner:
                    return  # and what their next sessions have begun is theirs
                probe = prefill.probes[agent_name] = _Probe()
                connect = worker_pb2.ConnectPeerCommand(
                    incarnation_id=owner.incarnation_id, endpoint=owner.endpoint, probe_id=probe.probe_id
                )
                prefill.send(worker_pb2.SessionRequest(connect_peer=connect))
                # A busy worker looks at its messages between two steps, several times for one test.
                limit = PROBE_SECONDS + 4 * prefill.load.step_ms / 1e3
                try:
                    reason = await asyncio.wait_for(probe.result, limit)
                except TimeoutError:
                    reason = f"test pages did not come to {decode.name} within {limit:.1f} s"
            if prefill.info is not writer or decode.info is not owner:
                return
            if not reason:
                del prefill.probes[agent_name]
                prefill.ready_peers.add(agent_name)
                prefill.pair_reason = decode.pair_reason = ""
                log.info("pair ready", extra={"prefill": prefill.name, "decode": decode.name})
                self._on_change()
                return
            prefill.pair_reason = reason
            log.warning("pair not ready", extra={"prefill": prefill.name, "decode": decode.name, "reason": reason})
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(pause * 2, LONGEST_PAUSE_SECONDS)

    def _on_peer(self, prefill: WorkerLink, event: worker_pb2.PeerEvent) -> None:
        if event.ready:
            log.info(
                "test pages sent",
                extra={
                    "prefill": prefill.name,
                    "decode": event.agent_name,
                    "page_us": round(event.page_us),
                    "gb_per_s": round(event.gb_per_s, 2),
                },
            )
            return
        reason = f"the connection to {event.agent_name} failed: {event.reason}"
        if (probe := prefill.probes.get(event.agent_name)) is not None:
            probe.end(reason)
            return
        # It was ready. A failure is not for ever.
        prefill.ready_peers.discard(event.agent_name)
        prefill.pair_reason = reason
        log.warning("pair failed", extra={"prefill": prefill.name, "decode": event.agent_name, "reason": event.reason})
        for decode in self.decode:
            if decode.is_open and decode.agent_name == event.agent_name:
                self._connect_pair(prefill, decode)
        self._on_change()

    def _on_probed(self, decode: WorkerLink, event: worker_pb2.ProbedEvent) -> None:
        """A decode worker looked at test pages, ours or another router's."""
        for prefill in self.prefill:
            probe = prefill.probes.get(decode.agent_name)
            if probe is not None and probe.probe_id == event.probe_id:
                # Where they differ, another router's test may have come across.
                wrong = f"its test pages did not come to {decode.name} as they were sent, or another router tested too"
                probe.end(event.reason if event.equal else wrong)

    def _on_state(self, link: WorkerLink, event: worker_pb2.WorkerStateEvent) -> None:
        link.takes_work = event.state == worker_pb2.WORKER_STATE_READY
        link.state = worker_pb2.WorkerState.Name(event.state).removeprefix("WORKER_STATE_").lower()
        if event.reason or not link.takes_work:
            log.warning(
                "worker takes no work", extra={"worker": link.name, "state": link.state, "reason": event.reason}
            )
            link.reason = event.reason
        elif link.reason:
            link.reason = ""
        if event.is_stuck:
            self._on_lost(link)
        self._on_change()


class _Silent(Exception):
    """A worker that says nothing."""


class _Refused(Exception):
    """A worker that must not be used."""


def _tier_name(tier: worker_pb2.Tier.ValueType) -> str:
    return worker_pb2.Tier.Name(tier).removeprefix("TIER_").lower()
