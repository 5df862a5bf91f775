"""One worker as a router sees it: its session, its load, and the legs of requests that are bound to it.

    connecting ── WorkerInfo ──> ready <──> draining, faulty ── session broke ──> lost ──> connecting
         └── WorkerInfo that does not fit ──> refused ──> connecting

State is changed by the methods here only.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from kv_transfer.request_ref import RequestRef
from protos import worker_pb2
from rpc.prompt_order import Order


@dataclass(eq=False)
class Leg:
    """The part of a request that one worker does: compute the prompt, generate, or both at a colocated worker."""

    link: WorkerLink
    ref: RequestRef
    order: Order
    computes_prompt: bool
    generates: bool
    num_tokens: int
    """Prompt, and output of earlier attempts."""
    num_uncached_tokens: int
    """Of these, tokens that the worker has to compute, as far as the router knows."""
    prompt_number: int | None = None
    """How many prompts the worker had been sent with this one. None: it was not sent yet."""
    has_token: bool = False
    """The attempt has brought a token, so its prompt is computed."""
    is_reserving: bool = False
    """The worker was asked for pages and has not responded yet."""


class WorkerLink:
    """A worker at an address."""

    def __init__(self, address: str, tier: worker_pb2.Tier.ValueType) -> None:
        self.address, self.tier = address, tier
        self.info: worker_pb2.WorkerInfo | None = None
        """Set while a session is open."""
        self.state = "connecting"
        self.reason = ""
        """Why the worker can't be used, if so."""
        self.pair_reason = ""
        """Why it has no pair, or one pair less, as far as that is known."""
        self.load = worker_pb2.LoadReport()
        self.is_listed = True
        """The router was given this address, or a name still has it."""
        self.last_seen: float | None = None
        """When the worker said something last."""
        self.takes_work = True
        """The worker is neither draining nor faulty."""
        self.is_full = False
        """The worker refused a reservation and has not reported since."""
        self.legs: dict[RequestRef, Leg] = {}
        """Bound to it, in the order of binding."""
        self.last_bound = 0
        """Number of the last binding to it; the router counts them."""
        self.cached_pages: set[bytes] = set()
        """Keys of pages that its prefix cache holds, from its cache events."""
        self.ready_peers: set[str] = set()
        """Of a prefill worker: agent names of decode workers that have got its test pages."""
        self.commands: asyncio.Queue[worker_pb2.SessionRequest | None] = asyncio.Queue()
        """For the open session; None ends it."""
        self._num_prompts_sent = 0

    def __repr__(self) -> str:
        return f"<{tier_name(self.tier)} worker {self.name}: {self.state}, {len(self.legs)} legs>"

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

    # its session

    def opened(self, info: worker_pb2.WorkerInfo) -> None:
        """The worker said who it is. Nothing of an earlier session counts any more."""
        self.info, self.state, self.reason, self.pair_reason = info, "ready", "", ""
        self.takes_work, self.is_full, self._num_prompts_sent = True, False, 0
        self.load = worker_pb2.LoadReport(free_pages=info.limits.num_pages)
        self.cached_pages.clear()

    def refused(self, reason: str) -> None:
        """The worker at the address must not be used."""
        self.state, self.reason = "refused", reason

    def lost(self, reason: str) -> None:
        """The session broke. Only an open session can be lost; before that the worker is simply not there yet."""
        self.state, self.reason = "lost" if self.is_open else "connecting", reason

    def closed(self) -> None:
        """Commands do not reach the worker any more."""
        self.info = None
        self.ready_peers.clear()

    def heard(self, now: float) -> None:
        """The worker said something."""
        self.last_seen = now

    def reported(self, load: worker_pb2.LoadReport) -> None:
        """The worker said how busy it is."""
        self.load, self.is_full = load, False

    def learned(self, events: worker_pb2.CacheEvents) -> None:
        """The worker said what its prefix cache has."""
        self.cached_pages.difference_update(events.evicted)
        self.cached_pages.update(events.added)

    def told_state(self, event: worker_pb2.WorkerStateEvent) -> None:
        """The worker said whether it takes requests."""
        self.takes_work = event.state == worker_pb2.WORKER_STATE_READY
        self.state = worker_pb2.WorkerState.Name(event.state).removeprefix("WORKER_STATE_").lower()
        self.reason = event.reason

    def send(self, command: worker_pb2.SessionRequest) -> None:
        """Queues a command; dropped if the session is gone, as are its requests then."""
        if self.is_open:
            self.commands.put_nowait(command)

    # its pairs

    def peer_ready(self, agent_name: str) -> None:
        """The test pages of this prefill worker have arrived at a decode worker."""
        self.ready_peers.add(agent_name)
        self.pair_reason = ""

    def peer_lost(self, agent_name: str, reason: str = "") -> None:
        """This prefill worker can't send pages to a decode worker any more."""
        self.ready_peers.discard(agent_name)
        self.pair_reason = reason or self.pair_reason

    def note_pair(self, reason: str) -> None:
        """Why the worker has no pair, or one pair less; empty if it has."""
        self.pair_reason = reason

    # its requests

    def bind(self, leg: Leg, number: int) -> None:
        """A request is to be served here. number: of the router's bindings so far."""
        self.legs[leg.ref] = leg
        self.last_bound = number

    def release(self, leg: Leg) -> None:
        """A request is not served here any more."""
        self.legs.pop(leg.ref, None)

    def send_prompt(self, leg: Leg, command: worker_pb2.SessionRequest) -> None:
        """Sends the command that has the worker compute a prompt."""
        self._num_prompts_sent += 1
        leg.prompt_number = self._num_prompts_sent
        self.send(command)

    def no_room(self) -> None:
        """The worker refused a reservation: it gets no other one before it reports again."""
        self.is_full = True


def tier_name(tier: worker_pb2.Tier.ValueType) -> str:
    """For logs and people."""
    return worker_pb2.Tier.Name(tier).removeprefix("TIER_").lower()
