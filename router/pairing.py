"""Gets pairs of a prefill and a decode worker ready: they are tested with pages before they are used.

    both sessions open ──> waits its turn ──> testing ── every byte arrived ──> ready
                               ^                 └── failed, or too late ──> rests ──┐
                               └─────────────────────────────────────────────────────┘

Tests towards one decode worker run one after the other, because there is only one set of test pages to write to. A
connection that breaks sends a ready pair back to the beginning. Clock and random source are arguments.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kv_transfer.errors import LayoutMismatch
from kv_transfer.layout import Fingerprint, check_equal
from protos import worker_pb2
from router.worker_link import WorkerLink
from rpc.clock import Clock, Timer

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 1.0
TEST_SECONDS = 5.0
"""A test whose end was not told for this long has failed."""


@dataclass(eq=False)
class _Candidate:
    """A pair that is not ready yet, of two incarnations."""

    prefill: WorkerLink
    writer: worker_pb2.WorkerInfo
    decode: WorkerLink
    owner: worker_pb2.WorkerInfo
    pause: float = FIRST_PAUSE_SECONDS
    test_id: str = ""
    timer: Timer | None = None
    """The end of its test, or of its rest."""

    @property
    def owner_agent(self) -> str:
        """The transfer agent of the decode worker."""
        return self.owner.endpoint.agent_name

    @property
    def is_current(self) -> bool:
        """Whether both sessions are still those it began with."""
        return self.prefill.info is self.writer and self.decode.info is self.owner

    def cancel_timer(self) -> None:
        """Nothing is to happen later."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class Pairing:
    """Lives on the event loop."""

    def __init__(self, clock: Clock, rng: random.Random, on_change: Callable[[], None]) -> None:
        """on_change: called when a pair became ready or was lost."""
        self._clock, self._rng, self._on_change = clock, rng, on_change
        self._candidates: dict[tuple[WorkerLink, str], _Candidate] = {}
        """By prefill link and agent of the decode worker."""
        self._testing: dict[str, _Candidate] = {}
        """By agent of the decode worker."""
        self._waiting: dict[str, list[_Candidate]] = {}

    def __repr__(self) -> str:
        return f"<Pairing {len(self._candidates)} pairs to get ready, {len(self._testing)} tests>"

    def get_ready(self, prefill: WorkerLink, decode: WorkerLink) -> None:
        """Begins to get a pair ready, if the pages of both workers mean the same. Both sessions are open."""
        assert prefill.info is not None and decode.info is not None
        try:
            check_equal(
                Fingerprint.from_proto(prefill.info.fingerprint), Fingerprint.from_proto(decode.info.fingerprint)
            )
        except LayoutMismatch as error:
            for link in (prefill, decode):
                link.note_pair(f"not paired: {error}")
            log.error("pair refused", extra={"prefill": prefill.name, "decode": decode.name, "reason": str(error)})
            return
        candidate = _Candidate(prefill, prefill.info, decode, decode.info)
        if (prefill, candidate.owner_agent) not in self._candidates:
            self._candidates[prefill, candidate.owner_agent] = candidate
            self._wait_turn(candidate)

    def closed(self, link: WorkerLink, agent_name: str, prefills: Iterable[WorkerLink]) -> None:
        """The session of a worker is over. agent_name: its transfer agent."""
        for candidate in [c for c in self._candidates.values() if link in (c.prefill, c.decode)]:
            self._drop(candidate)
        if link.tier == worker_pb2.TIER_DECODE:
            for prefill in prefills:
                prefill.peer_lost(agent_name)
                forget = worker_pb2.ForgetPeerCommand(agent_name=agent_name)
                prefill.send(worker_pb2.SessionRequest(forget_peer=forget))

    def on_peer(self, prefill: WorkerLink, event: worker_pb2.PeerEvent, decodes: Iterable[WorkerLink]) -> None:
        """A prefill worker told how a connection to a decode worker is."""
        about = {"prefill": prefill.name, "decode": event.agent_name}
        if event.ready:
            rates = {"page_us": round(event.page_us), "gb_per_s": round(event.gb_per_s, 2)}
            log.info("test pages sent", extra={**about, **rates})
            return
        reason = f"the connection to {event.agent_name} failed: {event.reason}"
        candidate = self._candidates.get((prefill, event.agent_name))
        if candidate is not None:
            self._end_test(candidate, reason)
            return
        # The pair was ready. A failure is not for ever.
        prefill.peer_lost(event.agent_name, reason)
        log.warning("pair failed", extra={**about, "reason": event.reason})
        for decode in decodes:
            if decode.is_open and decode.agent_name == event.agent_name:
                self.get_ready(prefill, decode)
        self._on_change()

    def on_pair_tested(self, decode: WorkerLink, event: worker_pb2.PairTestedEvent) -> None:
        """A decode worker looked at test pages, ours or those of another router."""
        candidate = self._testing.get(decode.agent_name)
        if candidate is not None and candidate.test_id == event.test_id:
            # Where bytes differ, the test of another router may have come across.
            wrong = f"its test pages did not come to {decode.name} as they were sent, or another router tested too"
            self._end_test(candidate, event.reason if event.equal else wrong)

    def _wait_turn(self, candidate: _Candidate) -> None:
        candidate.timer = None
        self._waiting.setdefault(candidate.owner_agent, []).append(candidate)
        self._test_next(candidate.owner_agent)

    def _test_next(self, owner_agent: str) -> None:
        if owner_agent in self._testing:
            return
        # The session of a candidate that waits may be over, and is about to be dropped.
        waiting = [candidate for candidate in self._waiting.pop(owner_agent, ()) if candidate.is_current]
        if not waiting:
            return
        candidate, *others = waiting
        self._testing[owner_agent] = candidate
        if others:
            self._waiting[owner_agent] = others
        candidate.test_id = f"{self._rng.getrandbits(64):016x}"
        connect = worker_pb2.ConnectPeerCommand(
            incarnation_id=candidate.owner.incarnation_id,
            endpoint=candidate.owner.endpoint,
            test_id=candidate.test_id,
        )
        candidate.prefill.send(worker_pb2.SessionRequest(connect_peer=connect))
        # A busy worker looks at its messages between two steps, several times for one test.
        seconds = TEST_SECONDS + 4 * candidate.prefill.load.step_ms / 1e3
        late = f"test pages did not come to {candidate.decode.name} within {seconds:.1f} s"
        candidate.timer = self._clock.call_later(seconds, self._end_test, candidate, late)

    def _end_test(self, candidate: _Candidate, reason: str) -> None:
        """A test is over; it went well if there is no reason. Ignored if the pair is not being tested."""
        if self._testing.get(candidate.owner_agent) is not candidate:
            return
        del self._testing[candidate.owner_agent]
        candidate.cancel_timer()
        prefill, decode = candidate.prefill, candidate.decode
        about = {"prefill": prefill.name, "decode": decode.name}
        if not reason:
            del self._candidates[prefill, candidate.owner_agent]
            prefill.peer_ready(candidate.owner_agent)
            decode.note_pair("")
            log.info("pair ready", extra=about)
        else:
            prefill.note_pair(reason)
            log.warning("pair not ready", extra={**about, "reason": reason})
            seconds = candidate.pause * self._rng.uniform(0.5, 1.5)
            candidate.pause = min(candidate.pause * 2, LONGEST_PAUSE_SECONDS)
            candidate.timer = self._clock.call_later(seconds, self._wait_turn, candidate)
        self._test_next(candidate.owner_agent)
        if not reason:
            self._on_change()

    def _drop(self, candidate: _Candidate) -> None:
        del self._candidates[candidate.prefill, candidate.owner_agent]
        candidate.cancel_timer()
        if self._testing.get(candidate.owner_agent) is candidate:
            del self._testing[candidate.owner_agent]
        self._test_next(candidate.owner_agent)
