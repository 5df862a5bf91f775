"""A whole cluster in one thread, in simulated time: the real router state machine with its links, pairing and queue,
and the real workers' loops with their schedulers, caches, page pools, tickets and session queues.

Only the model, the network, the transport and time are simulated, and they fail on purpose. Nothing is patched: clock,
chance, runner, transfers and the way to writers are arguments. Not simulated: gRPC streams themselves (a session is an
ordered channel that may break), the tokenizer, and what a router says to clients.

Memory is simulated too: each page says which tokens its KV is of. Every write that lands is checked against who owns
the page at that moment, and every token that is computed against the content of all pages before it. So a stale write,
a page that is reused too early, a notification that overtakes its data, or a prefix found wrongly is seen at once.

One integer decides everything that happens.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from decode_service.config import DecodeConfig
from decode_service.loop import DecodeLoop
from decode_service.ticket_revoker import NoResponse, TicketRevoker
from engine.config import EngineConfig
from engine.model_runner import StepLogits
from engine.page_pool import PagePool
from engine.sampler import SampledToken
from kv_transfer.base import Notification
from kv_transfer.request_ref import RequestRef
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
from prefill_service.page_sender import PageTransfer
from protos import kv_pb2
from protos import worker_pb2 as wpb
from router.config import RouterConfig
from router.dispatch import Dispatcher
from router.output_stream import Ended
from router.request import Request
from router.validation import CheckedRequest
from router.worker_link import WorkerLink
from rpc.errors import Cancelled
from tests.simulation.clock import Clock, Timer
from worker_runtime.health import Health
from worker_runtime.inbox import Drain, Inbox, RevokeTicket, SessionClosed, SessionCommand, SessionOpened
from worker_runtime.parts import WorkerParts
from worker_runtime.session import Sessions

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

    # as `SampledBatch`

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

    def sample(self, step, sequences):
        step.rows = {sequence.sequence_id: row for row, sequence in enumerate(sequences)}
        return step

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


class SimTestPages:
    """Pages behind those of the pool. In the beginning they hold what no other process has."""

    def __init__(self, process: SimWorker) -> None:
        self._process = process
        self.page_ids = tuple(range(process.world.num_pages, process.world.num_pages + NUM_TEST_PAGES))
        for page in self.page_ids:
            process.memory[page] = (process.agent_name, page)

    def digest(self):
        return hashlib.sha256(repr([self._process.memory[page] for page in self.page_ids]).encode()).digest()

    def clear(self):
        for page in self.page_ids:
            self._process.memory[page] = None


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
        world, started = self._world, self._world.clock.time
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
        self._process.put(WriteEnded(write, ok, started, self._world.clock.time, "" if ok else "failed"))


class SimWriters:
    """The way from a decode worker to its writers. It may fail, and silence proves nothing."""

    def __init__(self, process: SimWorker) -> None:
        self._process, self._world = process, process.world

    def ask(self, writer, request, seconds, on_outcome):
        world, call = self._world, Timer(lambda: None)

        def end(outcome: Any) -> None:
            if not call.is_cancelled:
                call.cancel()
                self._process.when_awake(world.delay(), lambda: on_outcome(outcome))

        def arrive() -> None:
            target = world.workers.get(writer.address)
            if target is None or target.is_dead:
                end(NoResponse("UNAVAILABLE", True))
            elif world.transfer_fault() is not None:
                end(NoResponse("UNAVAILABLE", False))
            else:
                world.on_death(target, lambda: end(NoResponse("UNAVAILABLE", False)))
                target.when_awake(0.0, lambda: self._respond(target, request, end))

        world.clock.after(world.delay(), arrive)
        world.clock.after(seconds, lambda: end(NoResponse("DEADLINE_EXCEEDED", False)))
        return call

    @staticmethod
    def _respond(target: SimWorker, request: kv_pb2.RevokeTicketRequest, end: Callable[[Any], None]) -> None:
        """What `PageTicketServicer` does."""

        def revoked(needs_fence: bool) -> None:
            end(kv_pb2.RevokeTicketResponse(
                worker_id=target.name, incarnation_id=target.incarnation, needs_fence=needs_fence
            ))  # fmt: skip

        if request.writer_incarnation_id != target.incarnation or not request.HasField("ref"):
            revoked(False)
        else:
            target.put(RevokeTicket(request, revoked))


class ProcessClock:
    """Time as a process sees it: nothing happens in it while it is frozen, or after it is dead."""

    def __init__(self, process: SimWorker) -> None:
        self._process = process

    def now(self):
        return self._process.world.clock.time

    def call_later(self, seconds, function, *arguments):
        return self._process.when_awake(seconds, lambda: function(*arguments))

    def call_soon_threadsafe(self, function, *arguments):
        return self.call_later(0.0, function, *arguments)


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
        self.memory: list[Any] = [None] * (num_pages + NUM_TEST_PAGES)
        clock = ProcessClock(self)
        self.sessions = Sessions(clock, self.inbox)
        self.health = Health(clock, self._tell_state)
        self.pool = PagePool(num_pages)
        parts = WorkerParts(
            pool=self.pool, page_size=PAGE_SIZE, transfers=SimTransfers(self), transport_name="sim", page_bytes=1,
            vocab_size=100, inbox=self.inbox, sessions=self.sessions, metrics=NOTHING, clock=clock, health=self.health,
            test_pages=SimTestPages(self), worker_id=self.name, incarnation_id=self.incarnation,
            agent_name=self.agent_name, address=self.name, token_budget=world.token_budget,
        )  # fmt: skip
        engine = EngineConfig(model="m")
        if tier == wpb.TIER_PREFILL:
            config = PrefillConfig(engine=engine, max_num_sequences=8, prefix_cache=world.prefix_cache)
            self.loop: PrefillLoop | DecodeLoop = PrefillLoop(parts, SimRunner(self), config)
        else:
            decode = DecodeConfig(engine=engine, max_num_sequences=6, prefix_cache=world.prefix_cache)
            revoker = TicketRevoker(self.inbox, SimWriters(self), clock, world.rng)
            self.loop = DecodeLoop(parts, SimRunner(self), revoker, decode)
        limits = wpb.WorkerLimits(
            num_pages=num_pages, page_size=PAGE_SIZE, max_model_len=1000, vocab_size=100, max_num_sequences=8,
            token_budget=world.token_budget,
        )  # fmt: skip
        endpoint = kv_pb2.TransferEndpoint(
            agent_name=self.agent_name, num_pages=num_pages, num_test_pages=NUM_TEST_PAGES
        )
        self.info = wpb.WorkerInfo(
            worker_id=self.name,
            incarnation_id=self.incarnation,
            tier=tier,
            limits=limits,
            endpoint=endpoint,
            address=self.name,
        )

    # time

    def when_awake(self, seconds: float, action: Callable[[], None]) -> Timer:
        """Does something in this process, unless it dies before; not while it is frozen."""

        def act() -> None:
            if self.is_dead or timer.is_cancelled:
                return
            if self.world.clock.time < self.frozen_until:
                self.world.clock.after(self.frozen_until - self.world.clock.time, act)
            else:
                action()

        timer = self.world.clock.after(seconds, act)
        return timer

    def put(self, message: Any) -> None:
        """A message for the engine thread, from inside or outside."""
        self.inbox.put(message)

    def plan_turn(self) -> None:
        if not self._is_turn_planned:
            self._is_turn_planned = True
            self.when_awake(self.world.delay(0.3), self._turn)

    def _turn(self) -> None:
        self._is_turn_planned = False
        if not self.loop.turn():
            self.world.note(f"{self.agent_name} has drained")
            self.world.kill(self, restart_after=self.world.rng.random())
            return
        self.when_awake(0.0, self._send_events)
        if self.loop.is_busy or self.health.is_draining:
            self.plan_turn()

    def compute_until(self, step: SimStep | None) -> None:
        """The device computes in order; all if no step is given."""
        while self.launched and (step is None or step.chosen is None):
            self.launched.popleft().compute()

    def drain(self, hand_over: bool) -> None:
        """SIGTERM."""
        self.health.drain()
        self.put(Drain(hand_over))

    # its session

    def open_session(self, session_id: int) -> None:
        """What `SessionServicer` does."""
        self.session, self._events = session_id, self.sessions.open(session_id)
        self.put(SessionOpened(session_id))
        self.world.to_router(self, session_id, wpb.SessionResponse(info=self.info))
        self.world.to_router(self, session_id, wpb.SessionResponse(state=self.health.event()))

    def close_session(self) -> None:
        if self.session is not None:
            self.sessions.close(self.session)
            self.put(SessionClosed(self.session))
            self.session = None

    def _tell_state(self) -> None:
        self.sessions.tell_all(wpb.SessionResponse(state=self.health.event()))
        self._send_events()

    def _send_events(self) -> None:
        """What waits in the session's queue goes out."""
        while self.session is not None and not self._events.empty():
            self.world.to_router(self, self.session, self._events.get_nowait())


@dataclass
class Asked:
    """A client's request and what it got."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    ended: Ended | None = None
    was_cancelled: bool = False
    stops_at: int | None = None
    """The router finds a stop string behind so many tokens."""
    has_stopped: bool = False

    def expected(self) -> list[int]:
        token_ids = list(self.request.checked.prompt_token_ids)
        for _ in range(self.stops_at or self.request.checked.stop.max_tokens):
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
        self.trace.append(f"{self.clock.time - 1000:9.4f} {text}")

    # the cluster

    def start(self) -> None:
        config = RouterConfig(model="m", worker_loss_seconds=60.0)
        self.dispatcher = Dispatcher(config, "", NOTHING, self.clock, self.rng)
        self.links: dict[str, WorkerLink] = {}
        self.workers: dict[str, SimWorker] = {}
        self.open_sessions: dict[str, int] = {}
        """By worker: the session as the router sees it."""
        for tier, count in ((wpb.TIER_PREFILL, self.rng.choice((1, 2))), (wpb.TIER_DECODE, self.rng.choice((1, 2)))):
            for number in range(count):
                worker = SimWorker(self, tier, number)
                self.links[worker.name] = self.dispatcher.pool.add(f"{worker.name}:1", tier)
                self.workers[worker.name] = worker
                self._open_session(worker)

    def find_agent(self, agent_name: str) -> SimWorker | None:
        """The living process with this agent."""
        found = self.workers.get(agent_name.partition("/")[0])
        return found if found is not None and found.agent_name == agent_name and not found.is_dead else None

    # sessions

    def _open_session(self, worker: SimWorker) -> None:
        if worker.is_dead or worker.session is not None:
            return
        session = self.open_sessions[worker.name] = next(self.numbers)
        self.links[worker.name].commands = SimCommands(self, worker, session)  # type: ignore[assignment]
        worker.open_session(session)

    def carry_down(self, worker: SimWorker, session: int, command: wpb.SessionRequest) -> None:
        self._in_order(("down", session), lambda: self._command(worker, session, command))

    def _command(self, worker: SimWorker, session: int, command: wpb.SessionRequest) -> None:
        if worker.session == session:
            worker.put(SessionCommand(session, command))

    def to_router(self, worker: SimWorker, session: int, event: wpb.SessionResponse) -> None:
        copy = wpb.SessionResponse()
        copy.CopyFrom(event)
        self._in_order(("up", session), lambda: self._event(worker, session, copy))

    def _event(self, worker: SimWorker, session: int, event: wpb.SessionResponse) -> None:
        if self.open_sessions.get(worker.name) == session:
            self.dispatcher.pool.receive(self.links[worker.name], event)
            self._take_outputs()

    def _in_order(self, channel: tuple[Any, ...], action: Callable[[], None]) -> None:
        """A message on a stream: late, but never before the one before it."""
        arrives = max(self.clock.time + self.delay(), self._arrived.get(channel, 0.0) + 1e-9)
        self._arrived[channel] = arrives
        self.clock.after(arrives - self.clock.time, action)

    def break_session(self, worker: SimWorker) -> None:
        """Both ends see it, each in its time; the router connects again."""
        if worker.session is None:
            return
        self.note(f"session of {worker.name} breaks")
        worker.close_session()
        self.open_sessions.pop(worker.name, None)
        info = self.links[worker.name].info
        self.clock.after(self.delay(3.0), lambda: self._lose(worker.name, info))
        self.clock.after(0.5 + self.rng.random(), lambda: self._open_session(self.workers[worker.name]))

    def _lose(self, name: str, info: wpb.WorkerInfo | None) -> None:
        link = self.links[name]
        if link.is_open and link.info is info:
            link.lost("broken")
            self.dispatcher.pool.close(link)
            self._take_outputs()

    # faults

    def kill(self, worker: SimWorker, restart_after: float) -> None:
        if worker.is_dead:
            return
        self.note(f"{worker.agent_name} is killed")
        worker.is_dead = True
        worker.session = None
        info = self.links[worker.name].info
        if self.open_sessions.pop(worker.name, None) is not None:
            self.clock.after(self.delay(3.0), lambda: self._lose(worker.name, info))
        for action in self._deaths.pop(worker, []):
            self.clock.after(self.delay(), action)

        def restart() -> None:
            self._lose(worker.name, info)
            fresh = SimWorker(self, worker.tier, worker.number)
            self.workers[worker.name] = fresh
            self.note(f"{fresh.agent_name} comes up")
            self._open_session(fresh)

        self.clock.after(restart_after, restart)

    def on_death(self, worker: SimWorker, action: Callable[[], None]) -> None:
        self._deaths.setdefault(worker, []).append(action)

    def freeze(self, worker: SimWorker, seconds: float) -> None:
        self.note(f"{worker.agent_name} is frozen for {seconds:.2f} s")
        worker.frozen_until = self.clock.time + seconds
        if self.rng.random() < 0.7:
            # The router notices that it says nothing.
            self.clock.after(seconds * self.rng.random(), lambda: self.break_session(worker))

    # transfers

    def land(self, writer: SimWorker, target: SimWorker, write: PageWrite) -> None:
        """Bytes arrive in a decode worker's memory, whoever owns it now."""
        if target.is_dead:
            return
        ref = write.tag.ticket.ref if isinstance(write.tag, PageTransfer) else None
        for local, remote in zip(write.local_pages, write.remote_pages, strict=True):
            if remote < self.num_pages:
                self._check_owner(target, remote, ref)
            target.memory[remote] = writer.memory[local]

    def _check_owner(self, target: SimWorker, page: int, ref: RequestRef | None) -> None:
        assert isinstance(target.loop, DecodeLoop)
        is_open = ref is not None and target.loop.tickets.is_writable(ref, page)
        if not is_open or not target.pool.is_open_to_writer(page):
            raise BrokenPromise(
                f"a write of {ref} lands in page {page} of {target.agent_name}, which is not open to it"
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
        asked = Asked(Request(checked, None, self.clock.now, rng))
        if rng.random() < 0.2:
            asked.stops_at = rng.randint(1, stop.max_tokens)
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
                    if isinstance(event, Ended):
                        asked.ended = event
                    elif not asked.has_stopped:
                        asked.tokens += event.token_ids
                        self._look_for_stop(asked)

    def _look_for_stop(self, asked: Asked) -> None:
        if asked.stops_at is not None and len(asked.tokens) >= asked.stops_at:
            asked.has_stopped, asked.tokens = True, asked.tokens[: asked.stops_at]
            self.dispatcher.complete(asked.request)

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
        self.clock.run_until(self.clock.time + 10.0)
        self.check_pages()

    def _all_ended(self) -> bool:
        self._take_outputs()
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
            owners = process.loop.page_owners()
            faults = process.pool.check(owners.tables, owners.reads, owners.writes)
            counts = process.pool.counts()
            if counts.held or counts.pinned or counts.quarantined:
                faults.append(f"not at rest: {counts}")
            if faults:
                raise BrokenPromise(f"{process.agent_name}: {'; '.join(faults)}")
        if self.dispatcher.num_queued or self.dispatcher.num_running:
            raise BrokenPromise("the router still has requests")


def run_schedule(seed: int, plan: Plan | None = None) -> None:
    """One schedule. Raises BrokenPromise, with the seed and the last things that happened."""
    world = World(seed, plan or Plan())
    try:
        world.run()
    except Exception as error:
        trace = "\n".join(world.trace)
        raise BrokenPromise(f"seed {seed}: {type(error).__name__}: {error}\n{trace}") from error
