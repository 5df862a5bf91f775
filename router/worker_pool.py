"""The workers that a router knows, and the pairs of them that can serve together.

`WorkerPool` takes what workers say and decides; it has no socket. `router.sessions` keeps the connections.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import NamedTuple

from protos import worker_pb2
from router.config import DNS_PREFIX
from router.name_watch import NameWatch
from router.pairing import Pairing
from router.validation import ClusterLimits
from router.worker_link import WorkerLink, tier_name
from rpc.clock import Clock

log = logging.getLogger(__name__)


class WorkerRefused(Exception):
    """A worker must not be used."""


class Pair(NamedTuple):
    """Two workers that can serve a request together. A colocated worker is a pair with itself."""

    prefill: WorkerLink
    """Computes the prompt."""
    decode: WorkerLink
    """Generates."""

    @property
    def links(self) -> tuple[WorkerLink, ...]:
        """Each worker once."""
        return (self.prefill,) if self.prefill is self.decode else (self.prefill, self.decode)


EventHandler = Callable[[WorkerLink, worker_pb2.SessionResponse], None]


class WorkerPool:
    """Lives on the event loop."""

    def __init__(
        self,
        tokenizer_hash: str,
        clock: Clock,
        rng: random.Random,
        on_event: EventHandler,
        on_lost: Callable[[WorkerLink], None],
        on_change: Callable[[], None],
    ) -> None:
        """on_event: an event for requests. on_lost: the requests of a worker must continue elsewhere. on_change: pairs
        or load changed."""
        self._tokenizer_hash, self._clock = tokenizer_hash, clock
        self._on_event, self._on_lost, self._on_change = on_event, on_lost, on_change
        self.links: list[WorkerLink] = []
        self.names: list[NameWatch] = []
        self._pairing = Pairing(clock, rng, on_change)

    def __repr__(self) -> str:
        return f"<WorkerPool {len(self.ready_pairs())} pairs ready, {self._pairing!r} {self.links}>"

    def of_tier(self, tier: worker_pb2.Tier.ValueType) -> list[WorkerLink]:
        """All workers of a tier."""
        return [link for link in self.links if link.tier == tier]

    def add(self, address: str, tier: worker_pb2.Tier.ValueType) -> WorkerLink:
        """A worker that may be at an address."""
        link = WorkerLink(address, tier)
        self.links.append(link)
        return link

    def find(self, address: str, tier: worker_pb2.Tier.ValueType) -> WorkerLink | None:
        """The worker at an address."""
        return next((link for link in self.of_tier(tier) if link.address == address), None)

    def remove(self, link: WorkerLink) -> None:
        """The worker is not listed any more, and its session is over."""
        self.links.remove(link)

    # what workers say

    def receive(self, link: WorkerLink, event: worker_pb2.SessionResponse) -> None:
        """Acts on an event of a worker. Raises WorkerRefused if it must not be used."""
        link.heard(self._clock.now())
        match event.WhichOneof("event"):
            case "info":
                self._open(link, event.info)
            case "peer":
                self._pairing.on_peer(link, event.peer, self.of_tier(worker_pb2.TIER_DECODE))
            case "pair_tested":
                self._pairing.on_pair_tested(link, event.pair_tested)
            case "state":
                self._on_state(link, event.state)
            case "cache":
                link.learned(event.cache)
            case "load":
                link.reported(event.load)
                self._on_change()
            case "heartbeat":
                pass
            case _:
                self._on_event(link, event)

    def _open(self, link: WorkerLink, info: worker_pb2.WorkerInfo) -> None:
        if info.tier != link.tier:
            raise WorkerRefused(f"it is a {tier_name(info.tier)} worker, expected was {tier_name(link.tier)}")
        if info.fingerprint.tokenizer_hash != self._tokenizer_hash:
            raise WorkerRefused(
                f"its tokenizer differs from the router's (worker {info.fingerprint.tokenizer_hash[:12]}, "
                f"router {self._tokenizer_hash[:12]})"
            )
        link.opened(info)
        about = {"worker": link.name, "tier": tier_name(link.tier), "address": link.address}
        log.info("worker connected", extra=about)
        for prefill in self.of_tier(worker_pb2.TIER_PREFILL):
            for decode in self.of_tier(worker_pb2.TIER_DECODE):
                if link in (prefill, decode) and prefill.is_open and decode.is_open:
                    self._pairing.get_ready(prefill, decode)

    def close(self, link: WorkerLink) -> None:
        """The session of a worker that was open is over."""
        log.warning("worker lost", extra={"worker": link.name, "address": link.address, "reason": link.reason})
        agent_name = link.agent_name
        link.closed()
        self._pairing.closed(link, agent_name, self.of_tier(worker_pb2.TIER_PREFILL))
        self._on_lost(link)
        self._on_change()

    def _on_state(self, link: WorkerLink, event: worker_pb2.WorkerStateEvent) -> None:
        link.told_state(event)
        if event.reason or not link.takes_work:
            about = {"worker": link.name, "state": link.state, "reason": event.reason}
            log.warning("worker takes no requests", extra=about)
        if event.is_stuck:
            self._on_lost(link)
        self._on_change()

    # what they can do together

    def ready_pairs(self) -> list[Pair]:
        """Pairs that can serve requests."""
        usable = [link for link in self.links if link.is_usable]
        alone = [Pair(link, link) for link in usable if link.tier == worker_pb2.TIER_COLOCATED]
        decodes = [link for link in usable if link.tier == worker_pb2.TIER_DECODE]
        return alone + [
            Pair(prefill, decode)
            for prefill in usable
            if prefill.tier == worker_pb2.TIER_PREFILL
            for decode in decodes
            if decode.agent_name in prefill.ready_peers
        ]

    def can_have_pairs(self) -> bool:
        """Whether this router was given workers that could serve together, wherever they are now."""
        tiers = {link.tier for link in self.links}
        is_pair = {worker_pb2.TIER_PREFILL, worker_pb2.TIER_DECODE} <= tiers
        return is_pair or worker_pb2.TIER_COLOCATED in tiers or any(name.problem for name in self.names)

    def slowdown(self) -> int:
        """Order of prompts, as the workers keep it; see `WorkerLimits.slowdown`."""
        infos = (link.info for link in self.links if link.tier != worker_pb2.TIER_DECODE)
        return next((info.limits.slowdown for info in infos if info is not None), 0)

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
        if not self.can_have_pairs():
            return "this router was given no prefill or no decode worker, and no colocated one"
        parts = [f"{DNS_PREFIX}{n.name_and_port} has no addresses: {n.problem}" for n in self.names if n.problem]
        for link in sorted(self.links, key=lambda link: link.tier):
            why = link.reason or link.pair_reason or ("no pair with it is ready" if link.is_open else "not connected")
            parts.append(f"{tier_name(link.tier)} {link.address}: {why}")
        return "; ".join(parts)
