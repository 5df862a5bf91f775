"""The prefill worker's loop with a scripted model and the local transport: what ends a request, and who hears of it."""

from __future__ import annotations

import hashlib
import threading
import time

import numpy as np
import pytest

from engine.config import EngineConfig
from kv_transfer.base import PageRegion, WriteState
from kv_transfer.errors import PeerLost
from kv_transfer.local_transport import LocalHub, LocalTransport
from kv_transfer.transfer_thread import TransferThread
from prefill_service import loop as prefill_loop
from prefill_service.config import PrefillConfig
from prefill_service.loop import PrefillLoop
from protos import inference_pb2, kv_pb2, worker_pb2
from tests.scripted import PAGE_SIZE, VOCAB, FakeClock, FakeTestPages, ScriptedRunner, make_parts, make_ref, make_spec
from worker_runtime.engine_loop import MAX_FAILED_STEPS
from worker_runtime.inbox import Drain, Inbox, RevokeTicket, SessionClosed, SessionCommand, SessionOpened

NUM_PAGES = 32


class Rig:
    """A worker whose loop is turned by hand, and a decode worker's transport to write to."""

    def __init__(self, token_budget=8, layer_groups=1):
        hub = LocalHub()
        self.memory = [np.zeros((NUM_PAGES + 2, 64), dtype=np.uint8) for _ in range(2)]
        regions = [
            PageRegion(m.ctypes.data, NUM_PAGES + 2, 64, num_test_pages=2, num_layer_groups=layer_groups)
            for m in self.memory
        ]
        self.transport, self.owner = LocalTransport(hub, "p/1", regions[0]), LocalTransport(hub, "d/1", regions[1])
        self.inbox, self.runner = Inbox(), ScriptedRunner()
        clock = FakeClock(tick=1e-6)
        self.transfers = TransferThread(self.transport, self.inbox.put, now=clock.now)
        parts = make_parts(
            "prefill", "p", NUM_PAGES, self.transfers, inbox=self.inbox, clock=clock,
            test_pages=FakeTestPages((32, 33)), num_layer_groups=layer_groups, token_budget=token_budget,
        )  # fmt: skip
        self.sessions, self.pool, self.metrics, self.clock = parts.sessions, parts.pool, parts.metrics, parts.clock
        self.loop = PrefillLoop(parts, self.runner, PrefillConfig(engine=EngineConfig(model="m")))
        self.transfers.start()
        connect = worker_pb2.ConnectPeerCommand(endpoint=self.owner.endpoint(), test_id="test")
        self.command(connect_peer=connect)
        self.turn_until(lambda: self.sessions.of("peer"))
        payloads = [notification.payload for notification in self.owner.take_notifications()]
        self.pair_tests = [kv_pb2.KvNotification.FromString(payload).pair_test for payload in payloads]

    def command(self, session_id=1, **command):
        self.inbox.put(SessionCommand(session_id, worker_pb2.SessionRequest(**command)))

    def submit(
        self, name, token_ids, max_tokens=5, stop_ids=(), lease_ms=0, session_id=1, first_page=0, attempt=0, **options
    ):
        pages = -(-len(token_ids) // PAGE_SIZE) - first_page
        ticket = kv_pb2.PageTicket(
            ref=make_ref(name, attempt),
            agent_name="d/1",
            page_ids=range(pages),
            first_page_index=first_page,
            lease_ms=lease_ms,
        )
        stop = worker_pb2.StopConfig(max_tokens=max_tokens, stop_token_ids=stop_ids)
        spec = make_spec(token_ids, stop=stop, **options)
        self.command(
            session_id, prefill=worker_pb2.PrefillCommand(ref=make_ref(name, attempt), spec=spec, ticket=ticket)
        )

    def revoke(self, name, on_revoked):
        """Its owner takes the pages back."""
        asked = kv_pb2.RevokeTicketRequest(agent_name="d/1", ref=make_ref(name))
        self.inbox.put(RevokeTicket(asked, on_revoked))

    def turn(self):
        """One turn of the loop, without waiting."""
        assert self.loop.turn()

    def turn_until(self, condition, seconds=5.0):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "what the test waits for did not happen"
            self.turn()
            time.sleep(0.001)

    def ended(self):
        """Requests that the worker has ended before their last token: cause and message."""
        return {e.ref.request_id: (e.cause, e.message) for e in self.sessions.of("request_ended")}

    def refused(self):
        return {e.ref.request_id: (e.cause, e.message) for e in self.sessions.of("refused")}

    def owner_heard(self):
        return [kv_pb2.KvNotification.FromString(n.payload) for n in self.owner.take_notifications()]

    def is_at_rest(self):
        counts = self.pool.counts()
        return not len(self.loop.requests) and not self.loop.has_open_transfers() and counts.held == counts.pinned == 0


@pytest.fixture
def rig():
    made = Rig()
    yield made
    made.turn_until(made.is_at_rest)
    made.transfers.stop()


def settle(rig):
    rig.turn_until(rig.is_at_rest)
    rig.transfers.stop()


class TestLayerGroups:
    """The last chunk's pages go layer by layer while later layers are computed."""

    def test_pages_that_are_too_few_go_whole(self):
        rig = Rig(layer_groups=4)
        rig.runner.layer_groups = 4
        groups = []
        rig.runner.on_group = groups.append
        rig.submit("r", [1, 2, 3])
        rig.turn_until(lambda: rig.sessions.of("transfer_finished"))
        assert groups == []
        settle(rig)

    def test_they_count_once_and_the_owner_hears_of_them_at_the_end(self, monkeypatch):
        monkeypatch.setattr(prefill_loop, "MIN_GROUPED_BYTES", 3 * 64)
        rig = Rig(token_budget=16, layer_groups=4)
        rig.runner.layer_groups = 4
        arrived = []

        def compute(group):
            rig.memory[0][:, group * 16 : (group + 1) * 16] = group + 1
            if group == 3:
                end = time.monotonic() + 5
                while not rig.memory[1][:3, :48].all() and time.monotonic() < end:
                    time.sleep(0.001)
                arrived.append(rig.memory[1][:3].copy())

        rig.runner.on_group = compute
        rig.submit("r", list(range(1, 11)))
        rig.turn_until(lambda: rig.sessions.of("transfer_finished"))
        [before_the_last] = arrived
        assert (before_the_last == [[1] * 16 + [2] * 16 + [3] * 16 + [0] * 16] * 3).all()
        assert (rig.memory[1][:3] == rig.memory[0][:3]).all()
        heard = rig.owner_heard()
        assert [(n.first_page, n.num_pages, n.first_token.token_id) for n in heard] == [(0, 3, 7)]
        [moved] = rig.sessions.of("transfer_finished")
        assert moved.kv_transfer.bytes == 3 * 64
        assert moved.kv_transfer.bytes_while_computing == 3 * 48
        settle(rig)

    def test_an_answer_that_ends_at_once_waits_for_what_is_on_its_way(self, monkeypatch):
        monkeypatch.setattr(prefill_loop, "MIN_GROUPED_BYTES", 0)
        rig = Rig(layer_groups=4)
        rig.runner.layer_groups = 4
        rig.submit("r", [1, 2, 3], max_tokens=1)
        rig.turn_until(lambda: rig.sessions.of("transfer_finished"))
        [closed] = rig.owner_heard()
        assert closed.closed and closed.ended_with_first_token
        settle(rig)

    def test_a_step_that_fails_half_way_gives_its_pages_back(self, monkeypatch):
        monkeypatch.setattr(prefill_loop, "MIN_GROUPED_BYTES", 0)
        rig = Rig(layer_groups=4)
        rig.runner.layer_groups, rig.runner.fail = 4, True
        rig.submit("r", [1, 2, 3])
        rig.turn_until(lambda: "r" in rig.ended())
        rig.runner.fail = False
        rig.turn_until(rig.is_at_rest)
        assert rig.owner_heard()[-1].closed
        settle(rig)


def test_nothing_is_sent_that_was_only_launched(rig):
    written = threading.Event()
    rig.runner.is_written = written.is_set
    rig.submit("r", list(range(1, 19)))
    rig.turn_until(lambda: rig.sessions.of("step_output"))
    for _ in range(20):
        rig.turn()
        time.sleep(0.002)
    assert rig.owner_heard() == []
    assert not rig.memory[1].any()
    rig.memory[0][:] = 3
    written.set()
    rig.turn_until(lambda: rig.sessions.of("transfer_finished"))
    assert (rig.memory[1][:5] == 3).all()


def test_a_prompt_is_sent_while_it_is_computed_and_brings_its_first_token(rig):
    rig.submit("r", list(range(1, 19)))
    rig.turn_until(lambda: rig.sessions.of("transfer_finished"))
    assert [n for step in rig.runner.steps for _, n in step] == [8, 8, 2]
    heard = rig.owner_heard()
    assert sorted((n.first_page, n.num_pages) for n in heard) == [(0, 2), (2, 2), (4, 1)]
    assert [n.first_token.token_id for n in heard if n.HasField("first_token")] == [7]
    [moved] = rig.sessions.of("transfer_finished")
    assert moved.kv_transfer.bytes == 5 * 64
    [output] = rig.sessions.of("step_output")[0].outputs
    assert output.num_chunks == 3
    assert (output.first_index, list(output.token_ids)) == (0, [7])


def test_pages_found_in_the_cache_are_sent_before_the_rest_is_computed(rig):
    rig.submit("first", list(range(1, 18)))
    rig.turn_until(lambda: rig.sessions.of("transfer_finished"))
    rig.owner_heard()
    rig.submit("again", list(range(1, 18)))
    rig.turn_until(lambda: len(rig.sessions.of("transfer_finished")) == 2)
    assert rig.runner.steps[-1] == [("again#0", 1)]
    assert sorted((n.first_page, n.num_pages) for n in rig.owner_heard()) == [(0, 4), (4, 1)]


def test_an_answer_that_ends_with_its_first_token_closes_the_ticket_regularly(rig):
    rig.submit("r", [1] * 10, stop_ids=[7])
    rig.turn_until(lambda: rig.sessions.of("transfer_finished"))
    assert rig.sessions.of("step_output")[0].outputs[0].finish_reason == inference_pb2.FINISH_REASON_STOP
    rig.turn_until(lambda: [n for n in rig.owner_heard() if n.closed and n.ended_with_first_token])
    assert rig.ended() == {}


def test_broken_logits_fail_their_request_only(rig):
    rig.runner.broken = {3}
    rig.submit("broken", [3, 1])
    rig.submit("fine", [4, 1])
    rig.turn_until(lambda: rig.sessions.of("transfer_finished"))
    assert rig.ended() == {"broken": (worker_pb2.CAUSE_NOT_FINITE, "the model's logits are not finite")}
    assert [o.outputs[0].ref.request_id for o in rig.sessions.of("step_output")] == ["fine"]


def test_a_lease_that_ends_stops_its_request_and_not_the_step(rig):
    """Casebook C103."""
    rig.submit("warm", list(range(1, 18)))
    rig.turn_until(lambda: rig.sessions.of("transfer_finished"))
    rig.submit("late", list(range(1, 18)), lease_ms=1)
    rig.submit("fine", [4, 1])
    rig.runner.on_run = lambda: rig.clock.advance(0.01)
    rig.turn_until(lambda: len(rig.sessions.of("transfer_finished")) == 3)
    assert rig.ended() == {"late": (worker_pb2.CAUSE_DEADLINE, "the page ticket's lease ended")}


def test_a_deadline_in_the_past_costs_no_token(rig):
    rig.submit("long", [3] * 30)
    rig.turn()
    rig.submit("late", [1] * 10, deadline_ms=1)
    rig.submit("running", [2] * 20)
    rig.turn()
    rig.clock.advance(0.01)
    rig.turn_until(rig.ended)
    assert rig.ended()["late"][0] == worker_pb2.CAUSE_DEADLINE
    assert not any(name == "late#0" for step in rig.runner.steps for name, _ in step)


def test_a_failing_step_is_retried_elsewhere_and_a_broken_worker_ends_itself(rig):
    rig.runner.fail = True
    for number in range(MAX_FAILED_STEPS - 1):
        rig.submit(f"r{number}", [1, 2])
        rig.turn()
    rig.submit("last", [1, 2])
    with pytest.raises(RuntimeError, match="out of luck"):
        rig.turn()
    assert [cause for cause, _ in rig.ended().values()] == [worker_pb2.CAUSE_STEP_FAILED] * MAX_FAILED_STEPS


def test_bad_commands_are_refused_in_words(rig):
    rig.submit("empty", [])
    rig.submit("strange", [VOCAB])
    rig.submit("large", [1] * (NUM_PAGES * PAGE_SIZE + 1))
    rig.turn()
    messages = {name: message for name, (_, message) in rig.refused().items()}
    assert "a prompt needs at least 1" in messages["empty"]
    assert "token ids must be in [0, 50)" in messages["strange"]
    assert "the prompt needs 33 pages, the prefill worker has 32" in messages["large"]


def test_a_closed_ticket_can_not_be_used_any_more(rig):
    answers = []
    rig.revoke("r", answers.append)
    rig.turn()
    assert answers == [False], "closed, and no fence is needed"
    rig.submit("r", [1, 2])
    rig.turn()
    cause, message = rig.refused()["r"]
    assert "was used or revoked before" in message
    assert cause == worker_pb2.CAUSE_TRANSFER_FAILED, "the router has not heard yet that this attempt is over"


def test_closing_a_running_ticket_waits_for_its_open_writes(rig):
    rig.submit("r", [1] * 30)
    rig.turn()
    rig.turn()
    assert len(rig.loop.requests) == 1
    answers = []
    rig.revoke("r", answers.append)
    rig.turn_until(lambda: answers)
    assert answers == [False]
    assert len(rig.loop.requests) == 0
    assert rig.pool.counts().pinned == 0


def test_a_ticket_with_a_failed_write_is_closed_once_its_connection_is_down(rig):
    class Broken:
        def poll(self):
            return WriteState.FAILED

    rig.transport.write = lambda *_: Broken()
    rig.submit("r", [1] * 10)
    rig.turn_until(rig.ended)
    assert rig.ended()["r"][0] == worker_pb2.CAUSE_TRANSFER_FAILED
    assert [e.ready for e in rig.sessions.of("peer")][-1] is False
    answers = []
    rig.revoke("r", answers.append)
    rig.turn_until(lambda: answers)
    assert answers == [True], "with a fence"
    assert rig.transport._peers == set()
    rig.revoke("r", answers.append)
    rig.turn()
    assert answers == [True, True], "asked again, it is the same"
    assert not any(n.closed for n in rig.owner_heard())


def test_a_post_that_fails_drops_every_ticket_for_that_peer(rig):
    def lost(*_):
        raise PeerLost("gone")

    rig.transport.write = lost
    rig.submit("a", [1] * 10)
    rig.submit("b", [2] * 10)
    rig.turn_until(lambda: len(rig.ended()) == 2)
    assert {cause for cause, _ in rig.ended().values()} == {worker_pb2.CAUSE_TRANSFER_FAILED}


def test_a_lost_router_takes_its_requests_along_and_nobody_elses(rig):
    rig.submit("mine", [1] * 30)
    rig.submit("theirs", [2] * 3, session_id=2)
    rig.turn()
    rig.inbox.put(SessionClosed(1))
    rig.turn_until(lambda: rig.sessions.of("transfer_finished", 2))
    rig.turn_until(lambda: [n for n in rig.owner_heard() if n.ref.request_id == "mine" and n.closed])
    assert rig.sessions.of("request_ended", 2) == []


def test_a_router_that_comes_later_is_told_how_things_stand(rig):
    rig.submit("r", list(range(1, 18)))
    rig.turn_until(lambda: rig.sessions.of("transfer_finished"))
    learned = [key for event in rig.sessions.of("cache") for key in event.added]
    before = len(rig.sessions.of("load"))
    rig.inbox.put(SessionOpened(2))
    rig.turn()
    assert [list(event.added) for event in rig.sessions.of("cache", 2)] == [learned]
    assert len(learned) == 4
    assert len(rig.sessions.of("load")) == before + 1


def test_a_ticket_without_pages_brings_the_first_token_over_the_transport(rig):
    """The decode worker has every page: zero bytes move, and it works all the same."""
    rig.submit("r", (1,) * 8, first_page=2)
    rig.turn_until(lambda: rig.sessions.of("transfer_finished"))
    [finished] = rig.sessions.of("transfer_finished")
    assert finished.kv_transfer.bytes == 0
    [notification] = rig.owner.take_notifications()
    message = kv_pb2.KvNotification.FromString(notification.payload)
    assert (message.num_pages, message.first_token.token_id) == (0, 7)


def test_logprobs_of_a_prompt_come_whole_whatever_the_chunks_and_the_cache(rig):
    rig.submit("warm", range(1, 15))
    rig.turn_until(lambda: len(rig.sessions.of("transfer_finished")) == 1)
    sampling = worker_pb2.SamplingConfig(top_p=1.0, repetition_penalty=1.0, num_logprobs=2, prompt_logprobs=True)
    rig.submit("r", range(1, 15), sampling=sampling)
    rig.turn_until(lambda: len(rig.sessions.of("transfer_finished")) == 2)
    output = rig.sessions.of("step_output")[-1].outputs[0]
    assert output.num_cached_tokens == 0
    assert output.prompt_logprobs.num_top == 2
    assert list(output.prompt_logprobs.token_ids[::3]) == list(range(2, 15))
    assert len(output.prompt_logprobs.logprobs) == 13 * 3
    assert output.logprobs.token_ids[0] == 7


def test_a_resumed_prompt_gives_logprobs_of_the_clients_part_only(rig):
    sampling = worker_pb2.SamplingConfig(top_p=1.0, repetition_penalty=1.0, prompt_logprobs=True)
    rig.submit("r", range(1, 8), num_prompt_tokens=4, sampling=sampling)
    rig.turn_until(lambda: rig.sessions.of("step_output"))
    output = rig.sessions.of("step_output")[0].outputs[0]
    assert list(output.prompt_logprobs.token_ids) == [2, 3, 4]
    assert not output.HasField("logprobs")


def test_test_pages_go_to_a_new_peer_and_are_timed(rig):
    assert [(test.test_id, test.sha256) for test in rig.pair_tests] == [
        ("test", b""), ("test", hashlib.sha256(b"noise").digest())
    ]  # fmt: skip
    [event] = rig.sessions.of("peer")
    assert event.ready
    assert event.test_id == "test"
    assert event.page_us > 0
    assert event.gb_per_s > 0
    assert repr(rig.pool) == "<PagePool 32 free, 0 held>"


def test_a_drained_worker_finishes_what_it_has_takes_nothing_new_and_ends(rig):
    rig.submit("old", (1,) * 20)
    rig.turn()
    rig.inbox.put(Drain(hand_over=False))
    rig.submit("new", (2,) * 8)
    rig.turn()
    assert rig.refused() == {"new": (worker_pb2.CAUSE_DRAINING, "the worker is draining")}
    while rig.loop.turn():
        time.sleep(0.001)
    [finished] = rig.sessions.of("transfer_finished")
    assert finished.kv_transfer.bytes == 5 * 64
    assert rig.pool.counts().held == rig.pool.counts().pinned == 0


def test_a_worker_that_must_end_gives_its_prompts_back(rig):
    rig.submit("r", (1,) * 20)
    rig.turn()
    rig.inbox.put(Drain(hand_over=True))
    while rig.loop.turn():
        time.sleep(0.001)
    assert rig.ended()["r"][0] == worker_pb2.CAUSE_DRAINING
    payloads = [kv_pb2.KvNotification.FromString(n.payload) for n in rig.owner.take_notifications()]
    assert payloads[-1].closed, "its decode worker must know that nothing comes any more"


def test_a_ticket_that_is_revoked_while_pages_are_sent_is_told_to_the_router_too(rig):
    """The router may have found a stop string: then it waits for nothing but the end of this transfer."""
    written = threading.Event()
    rig.runner.is_written = written.is_set
    rig.submit("r", list(range(1, 19)))
    rig.turn_until(lambda: rig.sessions.of("step_output"))
    revoked = []
    rig.revoke("r", revoked.append)
    rig.turn()
    assert (revoked, rig.sessions.of("transfer_finished")) == ([], [])
    written.set()
    rig.turn_until(lambda: revoked)
    assert [e.ref.request_id for e in rig.sessions.of("transfer_finished")] == ["r"]
    assert rig.ended() == {}


def test_a_lease_that_ends_in_a_step_with_prompt_logprobs_costs_its_own_request_only(rig):
    """Casebook C103."""
    sampling = worker_pb2.SamplingConfig(top_p=1.0, repetition_penalty=1.0, prompt_logprobs=True)
    rig.submit("late", list(range(1, 8)), sampling=sampling, lease_ms=1)
    rig.submit("fine", [4], sampling=sampling)
    rig.runner.on_run = lambda: rig.clock.advance(0.01)
    rig.submit("later", list(range(21, 30)), sampling=sampling, lease_ms=100)
    rig.turn_until(lambda: len(rig.sessions.of("transfer_finished")) >= 2)
    assert {cause for cause, _ in rig.ended().values()} <= {worker_pb2.CAUSE_DEADLINE}
    assert "fine" not in rig.ended()


def test_a_peer_that_nobody_wants_is_forgotten_when_its_last_write_has_failed(rig):
    class Open:
        state = WriteState.IN_PROGRESS

        def poll(self):
            return Open.state

    rig.transport.write = lambda *_: Open()
    rig.submit("r", [1] * 10)
    rig.turn_until(lambda: rig.sessions.of("step_output"))
    rig.command(forget_peer=worker_pb2.ForgetPeerCommand(agent_name="d/1"))
    rig.turn()
    assert "<Peers d/1>" in repr(rig.loop), "something is open towards it"
    Open.state = WriteState.FAILED
    rig.turn_until(rig.ended)
    assert "<Peers none>" in repr(rig.loop)


def test_a_step_that_went_well_forgives_those_that_failed(rig):
    for number in range(3 * MAX_FAILED_STEPS):
        rig.runner.fail = number % 2 == 0
        rig.submit(f"r{number}", [1, 2])
        rig.turn()
    rig.runner.fail = False
    assert len(rig.ended()) > MAX_FAILED_STEPS


def test_a_request_that_was_requeued_goes_before_new_ones_as_in_the_routers_queue(rig):
    rig.submit("running", [9] * 24)
    rig.turn()
    rig.submit("new", [1] * 8)
    rig.submit("resumed", [2] * 8, attempt=1)
    rig.turn_until(rig.is_at_rest)
    first_steps = [name for step in rig.runner.steps for name, _ in step]
    assert first_steps.index("resumed#1") < first_steps.index("new#0")
