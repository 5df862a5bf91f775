"""A whole cluster in one thread, in simulated time: the real router state machine, the real workers' loops with their
schedulers, caches and page pools. Only the model, the network and time are simulated, and they fail on purpose.

Memory is simulated too: each page says which tokens its KV is of. Every write that lands is checked against who owns
the page at that moment, and every token that is computed against the content of all pages before it. So a stale write,
a page that is reused too early, a notification that overtakes its data, or a prefix found wrongly is seen at once.

One integer decides everything that happens.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import worker_runtime.answering_loop as answering_loop
from decode_service.ticket_closer import Writer

import decode_service.loop
import prefill_service.loop
import router.dispatch
import router.policy
import router.request
import router.worker_pool
import worker_runtime.engine_loop as engine_loop
import worker_runtime.health as worker_health
import worker_runtime.stamps as worker_stamps
from decode_service.config import DecodeConfig
from decode_service.loop import DecodeLoop
from engine.config import EngineConfig
from engine.model_runner import StepLogits
from engine.page_pool import PagePool
from engine.sampler import SampledToken
from kv_transfer.base import Notification
from kv_transfer.transfer_thread import (
    FENCE_SECONDS,
    Fenced,
    PageWrite,
    PeerConnected,
    PeerDisconnected,
    PeerFailed,
    WriteEnded,
)
from prefill_service.config import PrefillConfig
from prefill_service.loop import PrefillLoop
from protos import kv_pb2
from protos import worker_pb2 as wpb
from router.config import RouterConfig
from router.dispatch import Dispatcher
from router.output_stream import Ended, Tokens
from router.request import Request
from router.validation import CheckedRequest
from router.worker_pool import WorkerLink
from rpc.errors import Cancelled
from tests.scripted import FakeProbePages
from tests.simulation.clock import Clock
from worker_runtime.inbox import (
    CloseTicket,
    Drain,
    Inbox,
    SessionClosed,
    SessionCommand,
    SessionOpened,
    WriterGone,
)
from worker_runtime.parts import WorkerParts

PAGE_SIZE = 4
NUM_TEST_PAGES = 1


class BrokenPromise(AssertionError):
    """The simulation saw what must never be."""


class Nothing:
    """Metrics that nobody reads."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self


NOTHING = Nothing()


def next_token(token_ids: list[int]) -> int:
    """The simulated model: a token that depends on all before it."""
    return hash(tuple(token_ids)) % 90 + 5


def content(token_ids: list[int], page: int, num_computed: int) -> tuple[int, int] | None:
    """What a sequence's page must hold when its first `num_computed` tokens are computed."""
    end = min((page + 1) * PAGE_SIZE, num_computed)
    return (end, hash(tuple(token_ids[:end]))) if end > page * PAGE_SIZE else None


POISON = 99
"""What a device chooses that built on wrong KV; the simulated model never does."""


@dataclass
class SimStep:
    """A step on its way through a device, and the tokens it chooses."""

    process: SimWorker
    entries: list[tuple[str, list[int], list[int], int, int]]
    """Sequence id, its known tokens, its pages, first and last new token."""
    previous: SimStep | None
    chosen: dict[str, int] | None = None
    """By sequence id, once it is computed."""
    rows: dict[str, int] = field(default_factory=dict)
    """Of the sequences that get a token."""

    def compute(self) -> None:
        """Computes KV into the simulated memory and checks all KV that it builds on."""
        memory, self.chosen = self.process.memory, {}
        for name, known, pages, start, end in self.entries:
            token_ids = known
            if len(known) < end:
                assert self.previous is not None and self.previous.chosen is not None
                token_ids = [*known, self.previous.chosen[name]]
            wrong = ""
            for place in range(-(-start // PAGE_SIZE)):
                expected = content(token_ids, place, start)
                # A page may hold more than this sequence has of it: another one went on from there.
                if memory[pages[place]] != expected:
                    wrong = f"page {pages[place]} of {name} holds {memory[pages[place]]}, not {expected}"
            for place in range(start // PAGE_SIZE, -(-end // PAGE_SIZE)):
                memory[pages[place]] = content(token_ids, place, end)
            if wrong and not self.process.runs_ahead:
                raise BrokenPromise(f"{self.process.name}: {wrong}")
            # A device that runs ahead may compute a sequence that has ended, whose pages are others' now.
            self.chosen[name] = POISON if wrong else next_token(token_ids)

    # what `sample` gives

    def wait(self) -> list[SampledToken]:
        """Computes everything up to here."""
        self.process.compute_until(self)
        assert self.chosen is not None
        return [SampledToken(self.chosen[name]) for name in self.rows]


class SimRunner:
    """Hands steps to a device, which computes them as late as it can if it runs ahead."""

    def __init__(self, process: SimWorker) -> None:
        self._process = process

    @property
    def runs_ahead(self):
        return self._process.runs_ahead

    def settle(self):
        self._process.compute_until(None)

    def run(self, batch, on_layer_group=None, previous=None):
        entries = []
        for entry in batch:
            sequence, start = entry.sequence, entry.sequence.num_computed_tokens
            end = start + entry.num_new_tokens
            pages = sequence.page_table[: -(-end // PAGE_SIZE)]
            entries.append((sequence.sequence_id, list(sequence.token_ids), pages, start, end))
        step = SimStep(self._process, entries, previous)
        self._process.launched.append(step)
        if not self.runs_ahead:
            step.wait()
        sampled = [entry for entry in batch if entry.is_sampled]
        return StepLogits(sampled, step if sampled else None)  # type: ignore[arg-type]


def sim_sample(step, sequences):
    step.rows = {sequence.sequence_id: row for row, sequence in enumerate(sequences)}
    return step


class SimSessions:
    """A worker's events, on their way to the router."""

    def __init__(self, process: SimWorker) -> None:
        self._process = process
        self._waiting: list[tuple[int, wpb.SessionResponse]] = []

    def all_ids(self):
        return [] if self._process.session is None else [self._process.session]

    def add(self, session_id, event):
        self._waiting.append((session_id, event))

    def flush(self):
        waiting, self._waiting = self._waiting, []
        for session_id, event in waiting:
            self._process.send_event(session_id, event)


class SimCommands:
    """A router's commands, on their way down one session."""

    def __init__(self, world: World, process: SimWorker, session: int) -> None:
        self._world, self._process, self._session = world, process, session

    def put_nowait(self, command):
        self._world.carry_down(self._process, self._session, command)


class SimTransfers:
    """Posts writes when the transfer thread gets to it, lands them later, and tells both ends, or fails to."""

    def __init__(self, process: SimWorker) -> None:
        self._process, self._world = process, process.world
        self._peers: set[str] = set()

    def expect(self, expecting):
        pass

    def connect(self, endpoint):
        self._soon(lambda: self._connect(endpoint.agent_name))

    def fence(self, tag):
        # The thread counts only time in which its process runs.
        self._process.when_awake(FENCE_SECONDS, lambda: self._process.put(Fenced(tag)))

    def _connect(self, agent_name):
        if self._world.find_agent(agent_name) is None:
            self._process.put(PeerFailed(agent_name, "nobody there"))
        else:
            self._peers.add(agent_name)
            self._process.put(PeerConnected(agent_name))

    def disconnect(self, agent_name):
        self._soon(lambda: self._disconnect(agent_name))

    def _disconnect(self, agent_name):
        self._peers.discard(agent_name)
        self._process.put(PeerDisconnected(agent_name))

    def notify(self, agent_name, payload):
        def send():
            if agent_name not in self._peers:
                self._process.put(PeerFailed(agent_name, "unknown peer"))
            else:
                self._world.notify(self._process, agent_name, payload, self._world.delay())

        self._soon(send)

    def write(self, write):
        self._soon(lambda: self._post(write))

    def _soon(self, action):
        """On the transfer thread: after a while, and not while the process is frozen."""
        self._process.when_awake(self._world.delay(0.2), action)

    def _post(self, write: PageWrite) -> None:
        world, started = self._world, self._world.clock.now
        target = world.find_agent(write.agent_name)
        fault = world.transfer_fault()
        if target is None or write.agent_name not in self._peers or fault == "post fails":
            self._fail(write, started)
            return
        lands = world.delay()
        is_over: list[bool] = []

        def end(ok: bool) -> None:
            if not is_over:
                is_over.append(True)
                self._end(write, True, started) if ok else self._fail(write, started)

        world.on_death(target, lambda: self._process.when_awake(world.delay(), lambda: end(False)))
        fails = fault == "fails, bytes land later"

        def arrive() -> None:
            world.land(self._process, target, write)
            if not fails:
                if fault != "notification lost":
                    world.notify(self._process, write.agent_name, write.payload, world.delay(0.5))
                if fault == "notification twice":
                    world.notify(self._process, write.agent_name, write.payload, world.delay(3.0))
                self._process.when_awake(world.delay(0.5), lambda: end(True))

        # Bytes are taken in by a process that runs. They are in the network already, so the writer may be gone.
        target.when_awake(lands, arrive)
        if fails:
            # The writer hears of a failure while its bytes are still in the network.
            self._process.when_awake(lands * world.rng.random(), lambda: end(False))

    def _fail(self, write, started):
        self._end(write, False, started)
        self._process.put(PeerFailed(write.agent_name, "a write failed"))
        self._disconnect(write.agent_name)

    def _end(self, write, ok, started):
        self._process.put(WriteEnded(write, ok, started, self._world.clock.now, "" if ok else "failed"))


class SimCloser:
    """Asks writers to let go, over gRPC: it is answered, or the writer's process is known to be gone."""

    def __init__(self, process: SimWorker) -> None:
        self._process, self._world = process, process.world

    def meet(self, writer, on_met):
        on_met("")

    def settled(self, request_id, attempt):
        pass

    def close(self, agent_name, request_id, attempt, writer: Writer):
        asked = kv_pb2.CloseTicketRequest(
            writer_incarnation_id=writer.incarnation_id, agent_name=agent_name, request_id=request_id, attempt=attempt
        )
        self._world.clock.after(self._world.delay(), lambda: self._ask(asked, writer))

    def _ask(self, asked, writer):
        target = self._world.find_agent(writer.agent_name)
        if target is None:
            self._process.put(WriterGone(asked.request_id, asked.attempt, "gone", needs_fence=True))
            return

        def done(needs_fence: bool) -> None:
            gone = WriterGone(asked.request_id, asked.attempt, "closed", needs_fence)
            self._world.clock.after(self._world.delay(), lambda: self._process.put(gone))

        target.put(CloseTicket(asked, done))
        # If it dies before it answers, it is asked again and found dead.
        self._world.on_death(target, lambda: self._ask(asked, writer))


class SimInbox(Inbox):
    """Wakes the engine thread."""

    def __init__(self, process: SimWorker) -> None:
        super().__init__()
        self._process = process

    def put(self, message: Any) -> None:
        if not self._process.is_dead:
            super().put(message)
            self._process.plan_turn()


class SimWorker:
    """A worker process: a real loop over simulated surroundings."""

    def __init__(self, world: World, tier: wpb.Tier.ValueType, number: int) -> None:
        self.world, self.tier, self.number = world, tier, number
        self.inbox = SimInbox(self)
        self.name = f"{'p' if tier == wpb.TIER_PREFILL else 'd'}{number}"
        self.incarnation = str(next(world.numbers))
        self.agent_name = f"{self.name}/{self.incarnation}"
        self.is_dead = False
        self.frozen_until = 0.0
        self.session: int | None = None
        self._is_turn_planned = False
        self.runs_ahead = tier == wpb.TIER_DECODE and world.decode_runs_ahead
        self.launched: deque[SimStep] = deque()
        num_pages = world.num_pages
        self.pool = PagePool(num_pages)
        self.memory: list[Any] = [None] * (num_pages + NUM_TEST_PAGES)
        parts = WorkerParts(
            runner=NOTHING, pool=self.pool, page_size=PAGE_SIZE, transfers=SimTransfers(self), transport_name="sim",
            page_bytes=1, vocab_size=100, inbox=self.inbox, sessions=SimSessions(self), metrics=NOTHING,
            loop=world.clock, probe_pages=FakeProbePages(tuple(range(num_pages, num_pages + NUM_TEST_PAGES))),
            worker_id=self.name, incarnation_id=self.incarnation, agent_name=self.agent_name,
            address=self.name,
        )  # fmt: skip
        self.parts = parts
        parts.health.on_change = self._tell_state
        engine = EngineConfig(model="m")
        if tier == wpb.TIER_PREFILL:
            config = PrefillConfig(
                engine=engine, token_budget=world.token_budget, max_num_sequences=8, prefix_cache=world.prefix_cache
            )
            self.loop: PrefillLoop | DecodeLoop = PrefillLoop(parts, SimRunner(self), config)
        else:
            decode = DecodeConfig(engine=engine, max_num_sequences=6, prefix_cache=world.prefix_cache)
            self.loop = DecodeLoop(parts, SimRunner(self), SimCloser(self), decode)  # type: ignore[arg-type]
        limits = wpb.WorkerLimits(
            num_pages=num_pages, page_size=PAGE_SIZE, max_model_len=1000, vocab_size=100, max_num_sequences=8,
            token_budget=world.token_budget,
        )  # fmt: skip
        endpoint = kv_pb2.TransferEndpoint(
            agent_name=self.agent_name, num_pages=num_pages, num_test_pages=NUM_TEST_PAGES
        )
        self.info = wpb.WorkerInfo(
            worker_id=self.name, incarnation_id=self.incarnation, tier=tier, limits=limits, endpoint=endpoint
        )

    # time

    def when_awake(self, seconds: float, action: Callable[[], None]) -> None:
        """Does something in this process, unless it dies before; not while it is frozen."""

        def act() -> None:
            if self.is_dead:
                return
            if self.world.clock.now < self.frozen_until:
                self.world.clock.after(self.frozen_until - self.world.clock.now, act)
            else:
                action()

        self.world.clock.after(seconds, act)

    def put(self, message: Any) -> None:
        """A message for the engine thread, from inside or outside."""
        self.inbox.put(message)

    def plan_turn(self) -> None:
        if not self._is_turn_planned:
            self._is_turn_planned = True
            self.when_awake(self.world.delay(0.3), self._turn)

    def _turn(self) -> None:
        self._is_turn_planned = False
        if not self.loop._receive(wait=False):
            self.world.note(f"{self.agent_name} has drained")
            self.world.kill(self, restart_after=self.world.rng.random())
        elif self.loop._turn() or self.parts.health.is_draining:
            self.plan_turn()

    def compute_until(self, step: SimStep | None) -> None:
        """The device computes in order; all if no step is given."""
        while self.launched and (step is None or step.chosen is None):
            self.launched.popleft().compute()

    def drain(self, hand_over: bool) -> None:
        """SIGTERM."""
        self.parts.health.drain()
        self.put(Drain(hand_over))

    # its session

    def _tell_state(self) -> None:
        if self.session is not None:
            self.send_event(self.session, wpb.SessionResponse(state=self.parts.health.event()))

    def send_event(self, session_id: int, event: wpb.SessionResponse) -> None:
        self.world.to_router(self, session_id, event)


@dataclass
class Asked:
    """A client's request and what it got."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    ended: Ended | None = None
    was_cancelled: bool = False

    def expected(self) -> list[int]:
        token_ids = list(self.request.checked.prompt_token_ids)
        for _ in range(self.request.checked.stop.max_tokens):
            token_ids.append(next_token(token_ids))
        return token_ids[len(self.request.checked.prompt_token_ids) :]


@dataclass
class Plan:
    """What is done to a cluster; drawn from the seed."""

    faults: tuple[str, ...] = ("kill", "freeze", "cut", "drain", "transfer")
    most_requests: int = 7
    most_faults: int = 3


class World:
    """One cluster and one schedule of what happens to it."""

    def __init__(self, seed: int, plan: Plan) -> None:
        self.rng, self.clock, self.numbers = random.Random(seed), Clock(), itertools.count(1)
        self.plan = plan
        self.num_pages = self.rng.choice((10, 14, 20, 40))
        self.prefix_cache = self.rng.random() < 0.7
        self.num_requests = self.rng.randint(2, plan.most_requests)
        self.decode_runs_ahead = self.rng.random() < 0.5
        self.token_budget = self.rng.choice((4, 8, 16))
        self._latency = self.rng.choice((0.001, 0.01, 0.1))
        self._fault_rate = self.rng.choice((0.0, 0.05, 0.2)) if "transfer" in plan.faults else 0.0
        self._deaths: dict[SimWorker, list[Callable[[], None]]] = {}
        self._arrived: dict[tuple[Any, ...], float] = {}
        self.asked: list[Asked] = []
        self.trace: deque[str] = deque(maxlen=400)

    # chance

    def delay(self, scale: float = 1.0) -> float:
        return self._latency * scale * self.rng.random()

    def transfer_fault(self) -> str | None:
        if self.rng.random() >= self._fault_rate:
            return None
        return self.rng.choice(("post fails", "fails, bytes land later", "notification lost", "notification twice"))

    def note(self, text: str) -> None:
        self.trace.append(f"{self.clock.now - 1000:9.4f} {text}")

    # the cluster

    def start(self) -> None:
        config = RouterConfig(model="m", worker_loss_seconds=60.0)
        self.dispatcher = Dispatcher(config, "", NOTHING)
        pool = self.dispatcher.pool
        pool._connect_pair = self._connect_pair  # type: ignore[method-assign]
        self.links: dict[str, WorkerLink] = {}
        self.workers: dict[str, SimWorker] = {}
        for tier, count in ((wpb.TIER_PREFILL, self.rng.choice((1, 2))), (wpb.TIER_DECODE, self.rng.choice((1, 2)))):
            for number in range(count):
                worker = SimWorker(self, tier, number)
                link = WorkerLink(f"{worker.name}:1", tier)
                pool._of_tier(tier).append(link)
                self.links[worker.name], self.workers[worker.name] = link, worker
                self._open_session(worker)

    def _connect_pair(self, prefill: WorkerLink, decode: WorkerLink) -> None:
        connect = wpb.ConnectPeerCommand(endpoint=decode.info.endpoint, probe_id="x")
        prefill.send(wpb.SessionRequest(connect_peer=connect))

    def find_agent(self, agent_name: str) -> SimWorker | None:
        """The living process with this agent."""
        found = self.workers.get(agent_name.partition("/")[0])
        return found if found is not None and found.agent_name == agent_name and not found.is_dead else None

    # sessions

    def _open_session(self, worker: SimWorker) -> None:
        if worker.is_dead or worker.session is not None:
            return
        session = next(self.numbers)
        worker.session = session
        link = self.links[worker.name]
        self._to_router(worker, session, wpb.SessionResponse(info=worker.info))
        self._to_router(worker, session, wpb.SessionResponse(state=worker.parts.health.event()))
        worker.put(SessionOpened(session))
        link.sim_session = session  # type: ignore[attr-defined]
        link.commands = SimCommands(self, worker, session)  # type: ignore[assignment]

    def carry_down(self, worker: SimWorker, session: int, command: wpb.SessionRequest) -> None:
        self._in_order(("down", session), lambda: self._command(worker, session, command))

    def _command(self, worker: SimWorker, session: int, command: wpb.SessionRequest) -> None:
        if worker.session == session:
            worker.put(SessionCommand(session, command))

    def to_router(self, worker: SimWorker, session: int, event: wpb.SessionResponse) -> None:
        if worker.session == session:
            self._to_router(worker, session, event)

    def _to_router(self, worker: SimWorker, session: int, event: wpb.SessionResponse) -> None:
        copy = wpb.SessionResponse()
        copy.CopyFrom(event)
        self._in_order(("up", session), lambda: self._event(worker, session, copy))

    def _event(self, worker: SimWorker, session: int, event: wpb.SessionResponse) -> None:
        link = self.links[worker.name]
        if getattr(link, "sim_session", None) != session:
            return
        kind = event.WhichOneof("event")
        if kind == "peer":
            self._on_peer(link, event.peer)
        elif kind != "probed":
            self.dispatcher.pool.receive(link, event)
        self._take_outputs()

    def _on_peer(self, link: WorkerLink, event: wpb.PeerEvent) -> None:
        if event.ready:
            link.ready_peers.add(event.agent_name)
            self.dispatcher.pool._on_change()
            return
        link.ready_peers.discard(event.agent_name)

        def again() -> None:
            for decode in self.dispatcher.pool.decode:
                if decode.is_open and decode.agent_name == event.agent_name and link.is_open:
                    self._connect_pair(link, decode)

        self.clock.after(1.0, again)

    def _in_order(self, channel: tuple[Any, ...], action: Callable[[], None]) -> None:
        """A message on a stream: late, but never before the one before it."""
        arrives = max(self.clock.now + self.delay(), self._arrived.get(channel, 0.0) + 1e-9)
        self._arrived[channel] = arrives
        self.clock.after(arrives - self.clock.now, action)

    def break_session(self, worker: SimWorker) -> None:
        """Both ends see it, each in its time; the router connects again."""
        session = worker.session
        if session is None:
            return
        self.note(f"session of {worker.name} breaks")
        worker.session = None
        worker.put(SessionClosed(session))
        link = self.links[worker.name]
        link.sim_session = None  # type: ignore[attr-defined]
        info = link.info
        self.clock.after(self.delay(3.0), lambda: self._lose(link, info))
        self.clock.after(0.5 + self.rng.random(), lambda: self._open_session(self.workers[worker.name]))

    def _lose(self, link: WorkerLink, info: wpb.WorkerInfo | None) -> None:
        if link.is_open and link.info is info:
            link.reason = "broken"
            self.dispatcher.pool._close_link(link)
            self._take_outputs()

    # faults

    def kill(self, worker: SimWorker, restart_after: float) -> None:
        if worker.is_dead:
            return
        self.note(f"{worker.agent_name} is killed")
        worker.is_dead = True
        session, worker.session = worker.session, None
        link = self.links[worker.name]
        info = link.info
        if session is not None:
            link.sim_session = None  # type: ignore[attr-defined]
            self.clock.after(self.delay(3.0), lambda: self._lose(link, info))
        for action in self._deaths.pop(worker, []):
            self.clock.after(self.delay(), action)

        def restart() -> None:
            self._lose(link, info)
            fresh = SimWorker(self, worker.tier, worker.number)
            self.workers[worker.name] = fresh
            self.note(f"{fresh.agent_name} comes up")
            self._open_session(fresh)

        self.clock.after(restart_after, restart)

    def on_death(self, worker: SimWorker, action: Callable[[], None]) -> None:
        self._deaths.setdefault(worker, []).append(action)

    def freeze(self, worker: SimWorker, seconds: float) -> None:
        self.note(f"{worker.agent_name} is frozen for {seconds:.2f} s")
        worker.frozen_until = self.clock.now + seconds
        if self.rng.random() < 0.7:
            # The router notices that it says nothing.
            self.clock.after(seconds * self.rng.random(), lambda: self.break_session(worker))

    # transfers

    def land(self, writer: SimWorker, target: SimWorker, write: PageWrite) -> None:
        """Bytes arrive in a decode worker's memory, whoever owns it now."""
        if target.is_dead:
            return
        request = write.tag
        key = getattr(getattr(request, "ticket", None), "key", None)
        for local, remote in zip(write.local_pages, write.remote_pages, strict=True):
            if remote < self.num_pages:
                self._check_owner(target, remote, key)
            target.memory[remote] = writer.memory[local]

    def _check_owner(self, target: SimWorker, page: int, key: tuple[str, int] | None) -> None:
        loop = target.loop
        assert isinstance(loop, DecodeLoop)
        request = loop._requests.get(key) if key else None
        ticket = request.ticket if request is not None else loop._quarantined.get(key) if key else None
        if ticket is None or page not in ticket.page_ids or not target.pool._writers[page]:
            raise BrokenPromise(
                f"a write of {key} lands in page {page} of {target.agent_name}, which is not open to it"
            )

    def notify(self, writer: SimWorker, agent_name: str, payload: bytes, seconds: float) -> None:
        def arrive() -> None:
            target = self.find_agent(agent_name)
            if target is not None:
                target.put(Notification(writer.agent_name, payload))

        self.clock.after(seconds, arrive)

    # clients

    def ask(self) -> Asked:
        rng = self.rng
        # Few different beginnings, so that prefixes are found.
        start = [rng.choice((1, 2))] * rng.choice((0, 4, 9))
        prompt = (*start, *(rng.randrange(5, 95) for _ in range(rng.randint(1, 16))))
        stop = wpb.StopConfig(max_tokens=rng.randint(1, 9))
        sampling = wpb.SamplingConfig(top_p=1.0, repetition_penalty=1.0)
        checked = CheckedRequest(
            f"r{len(self.asked)}", prompt, sampling, stop, (), False, frozenset(), False, "", 0
        )  # fmt: skip
        asked = Asked(Request(checked, None))
        self.asked.append(asked)
        self.dispatcher.submit(asked.request)
        return asked

    def cancel(self, asked: Asked) -> None:
        asked.was_cancelled = True
        self.dispatcher.cancel(asked.request)
        self._take_outputs()

    def _take_outputs(self) -> None:
        for asked in self.asked:
            if asked.ended is None:
                for event in asked.request.output.take():
                    if isinstance(event, Tokens):
                        asked.tokens += event.token_ids
                    else:
                        asked.ended = event

    # a schedule

    def run(self) -> None:
        """Everything that the seed says; then quiet, and everything must have ended well."""
        rng, plan = self.rng, self.plan
        self.start()
        span = 20 * self._latency + 0.5
        for _ in range(self.num_requests):
            self.clock.after(0.2 + span * rng.random(), self.ask)
        if rng.random() < 0.5:
            self.clock.after(0.2 + 1.5 * span * rng.random(), self._cancel_one)
        for _ in range(rng.randint(0, plan.most_faults)):
            self.clock.after(0.2 + 1.5 * span * rng.random(), self._fault)
        # Longer than every timer of ours, shorter than what gives a request up.
        self.clock.run_until(1000.0 + 1.5 * span + 0.3)
        self._fault_rate = 0.0
        self.clock.run_until(1060.0, self._all_ended)
        self.check_answers()
        self.clock.run_until(self.clock.now + 10.0)
        self.check_pages()

    def _all_ended(self) -> bool:
        return len(self.asked) == self.num_requests and all(asked.ended for asked in self.asked)

    def _cancel_one(self) -> None:
        running = [asked for asked in self.asked if asked.ended is None]
        if running:
            self.cancel(self.rng.choice(running))

    def _fault(self) -> None:
        kinds = [kind for kind in self.plan.faults if kind != "transfer"]
        if not kinds:
            return
        worker = self.workers[self.rng.choice(sorted(self.workers))]
        match self.rng.choice(kinds):
            case "kill":
                self.kill(worker, self.rng.random() * 2)
            case "freeze":
                self.freeze(worker, self.rng.random() * 3)
            case "drain":
                self.note(f"{worker.agent_name} is told to end")
                worker.drain(hand_over=self.rng.random() < 0.5)
            case "cut":
                self.break_session(worker)

    # promises

    def check_answers(self) -> None:
        for asked in self.asked:
            name = asked.request.checked.request_id
            if asked.ended is None:
                raise BrokenPromise(f"{name} never ended; it is {asked.request.state}")
            error = asked.ended.error
            if asked.was_cancelled:
                if not isinstance(error, Cancelled | None):
                    raise BrokenPromise(f"{name} was cancelled and ended with {error!r}")
                if asked.tokens != asked.expected()[: len(asked.tokens)]:
                    raise BrokenPromise(f"{name} got {asked.tokens}, not {asked.expected()}")
            elif error is not None:
                raise BrokenPromise(f"{name} was lost: {error!r}")
            elif asked.tokens != asked.expected():
                raise BrokenPromise(f"{name} got {asked.tokens}, not {asked.expected()}")

    def check_pages(self) -> None:
        for process in self.workers.values():
            owners = process.loop._page_owners()
            faults = process.pool.check(owners.tables, owners.reads, owners.writes)
            counts = process.pool.counts()
            if counts.held or counts.pinned or counts.quarantined:
                faults.append(f"not at rest: {counts}")
            if faults:
                raise BrokenPromise(f"{process.agent_name}: {'; '.join(faults)}")
        if self.dispatcher.num_queued or self.dispatcher.num_running:
            raise BrokenPromise("the router still has requests")


@contextmanager
def simulated(world: World):
    """The modules that look at the clock or the event loop see the simulated ones."""
    clock = world.clock
    patches = [
        (module, name, value)
        for module, names in (
            (router.dispatch, ("time", "asyncio")),
            (router.request, ("time",)),
            (router.worker_pool, ("time",)),
            (prefill_service.loop, ("time",)),
            (decode_service.loop, ("time",)),
            (answering_loop, ("time",)),
            (engine_loop, ("time",)),
            (worker_health, ("time",)),
            (worker_stamps, ("time",)),
        )
        for name, value in ((name, clock) for name in names)
    ]
    patches += [(module, "sample", sim_sample) for module in (prefill_service.loop, answering_loop)]
    patches += [(module, "random", world.rng) for module in (router.dispatch, router.policy, router.worker_pool)]
    saved = [(module, name, getattr(module, name)) for module, name, _ in patches]
    for module, name, value in patches:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in saved:
            setattr(module, name, value)


def run_schedule(seed: int, plan: Plan | None = None) -> None:
    """One schedule. Raises BrokenPromise, with the seed and the last things that happened."""
    world = World(seed, plan or Plan())
    with simulated(world):
        try:
            world.run()
        except Exception as error:
            trace = "\n".join(world.trace)
            raise BrokenPromise(f"seed {seed}: {type(error).__name__}: {error}\n{trace}") from error
