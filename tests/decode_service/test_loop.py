"""The decode worker's loop with a scripted model: when it starts, and when pages come back."""

from __future__ import annotations

import hashlib

import pytest

from decode_service.config import DecodeConfig
from decode_service.loop import OVERDUE_SECONDS, DecodeLoop
from decode_service.ticket_revoker import Writer
from engine.config import EngineConfig
from kv_transfer.base import Notification
from kv_transfer.request_ref import RequestRef
from kv_transfer.transfer_thread import Fenced
from protos import inference_pb2, kv_pb2, worker_pb2
from tests.scripted import VOCAB, ScriptedRunner, make_parts, make_ref, make_spec
from worker_runtime.engine_loop import CHECK_SECONDS
from worker_runtime.inbox import Drain, SessionClosed, SessionCommand, WriterGone

NUM_PAGES = 16
R = RequestRef("r", 0)


class FakeTransfers:
    """Notes whether writes are expected, and which fences are asked for."""

    def __init__(self):
        self.expecting, self.fences = False, []

    def expect(self, expecting):
        self.expecting = expecting

    def fence(self, tag):
        self.fences.append(tag)


class FakeRevoker:
    """Notes which tickets are revoked and which addresses are checked."""

    def __init__(self):
        self.revoked, self.checked, self.what_is_wrong = [], [], ""

    def check_address(self, writer, on_checked):
        self.checked.append(writer)
        on_checked(self.what_is_wrong)

    def settled(self, ref):
        pass

    def revoke(self, agent_name, ref, writer):
        assert writer == Writer("p/1", "1", "p:1")
        self.revoked.append(ref)


class Rig:
    """A worker whose loop is turned by hand."""

    def __init__(self, num_pages=NUM_PAGES, runner=None, **options):
        self.revoker, self.transfers, self.runner = FakeRevoker(), FakeTransfers(), runner or ScriptedRunner()
        self.parts = parts = make_parts("decode", "d", num_pages, self.transfers)
        self.inbox, self.sessions, self.pool, self.metrics = parts.inbox, parts.sessions, parts.pool, parts.metrics
        self.clock, self.test_pages = parts.clock, parts.test_pages
        config = DecodeConfig(EngineConfig(model="m"), max_num_sequences=4, **options)
        self.loop = DecodeLoop(parts, self.runner, self.revoker, config)

    def turn(self):
        """One turn of the loop, without waiting."""
        assert self.loop.turn()

    def command(self, session_id=1, **command):
        self.inbox.put(SessionCommand(session_id, worker_pb2.SessionRequest(**command)))
        self.turn()

    def reserve(self, name="r", token_ids=(1,) * 10, max_tokens=4, session_id=1, attempt=0, **options):
        writer = worker_pb2.PageWriter(agent_name="p/1", incarnation_id="1", address="p:1")
        command = worker_pb2.ReserveCommand(
            ref=make_ref(name, attempt), spec=make_spec(token_ids, max_tokens, **options), writer=writer
        )
        self.command(session_id, reserve=command)

    def abort(self, name="r", attempt=0, session_id=1, is_complete=False):
        self.command(session_id, abort=worker_pb2.AbortCommand(ref=make_ref(name, attempt), is_complete=is_complete))

    def hear(self, sender="p/1", name="r", attempt=0, **fields):
        message = kv_pb2.KvNotification(ref=make_ref(name, attempt), **fields)
        self.inbox.put(Notification(sender, message.SerializeToString()))
        self.turn()

    def complete(self, name="r", pages=3, token=7):
        self.hear(name=name, first_page=0, num_pages=pages, first_token=kv_pb2.FirstToken(token_id=token))

    def tokens(self):
        return [t for e in self.sessions.of("step_output") for o in e.outputs for t in o.token_ids]

    def ignored(self):
        return self.metrics.registry.get_sample_value("kvferry_ignored_notifications_total", {"tier": "decode"})

    def ended(self, cause=None, session_id=1):
        """Requests that the worker has ended before their last token, by cause if a test gives one."""
        return [e for e in self.sessions.of("request_ended", session_id) if cause in (None, e.cause)]

    def __repr__(self):
        return repr(self.pool)


@pytest.fixture
def rig():
    return Rig()


def test_a_request_decodes_once_every_page_is_there(rig):
    rig.reserve()
    [reserved] = rig.sessions.of("reserved")
    assert (reserved.ticket.agent_name, list(reserved.ticket.page_ids)) == ("d/1", [0, 1, 2])
    rig.hear(first_page=1, num_pages=2)
    rig.hear(first_page=0, num_pages=1)
    assert rig.runner.steps == []
    rig.hear(first_token=kv_pb2.FirstToken(token_id=9))
    rig.turn()
    rig.turn()
    assert rig.tokens() == [7, 7, 7]
    last = rig.sessions.of("step_output")[-1].outputs[0]
    assert last.finish_reason == inference_pb2.FINISH_REASON_LENGTH
    assert last.num_computed_prompt_tokens == 0
    assert repr(rig) == "<PagePool 13 free, 0 held, 3 cached>"
    assert rig.revoker.revoked == []


def test_pages_of_an_aborted_request_wait_for_their_writer(rig):
    rig.reserve()
    rig.hear(first_page=0, num_pages=1)
    rig.abort()
    assert repr(rig) == "<PagePool 13 free, 0 held, 3 quarantined>"
    assert rig.revoker.revoked == [R]
    assert rig.transfers.expecting, "bytes on their way must still be taken in"
    rig.inbox.put(WriterGone(R, "closed"))
    rig.turn()
    rig.turn()
    assert repr(rig) == "<PagePool 16 free, 0 held>"
    assert not rig.transfers.expecting


@pytest.mark.parametrize(
    "message", [{"closed": True}, {"first_page": 0, "num_pages": 3, "first_token": {"token_id": 1}}]
)
def test_the_writers_last_message_frees_quarantined_pages_too(rig, message):
    rig.reserve()
    rig.abort()
    rig.hear(**message)
    assert repr(rig) == "<PagePool 16 free, 0 held>"
    rig.inbox.put(WriterGone(R, "late"))
    rig.turn()
    assert repr(rig) == "<PagePool 16 free, 0 held>"


def test_strangers_old_attempts_and_repetitions_are_ignored_and_counted(rig):
    rig.reserve(attempt=1)
    rig.hear(sender="stranger", first_page=0, num_pages=3, attempt=1, first_token=kv_pb2.FirstToken(token_id=1))
    rig.hear(first_page=0, num_pages=3, attempt=0)
    rig.hear(name="unknown", first_page=0, num_pages=3)
    rig.hear(first_page=0, num_pages=1, attempt=1)
    rig.hear(first_page=0, num_pages=1, attempt=1)
    rig.inbox.put(Notification("p/1", b"\xff\xff not a message"))
    rig.turn()
    assert rig.ignored() == 5
    assert rig.runner.steps == []
    rig.abort(attempt=1)


def test_pages_of_a_dead_writer_wait_for_bytes_in_the_network(rig):
    rig.reserve()
    rig.abort()
    rig.inbox.put(WriterGone(R, "gone", needs_fence=True))
    rig.turn()
    assert rig.transfers.fences == [R]
    assert repr(rig) == "<PagePool 13 free, 0 held, 3 quarantined>"
    rig.inbox.put(Fenced(R))
    rig.turn()
    assert repr(rig) == "<PagePool 16 free, 0 held>"


def test_a_writer_that_gives_up_fails_the_request_so_that_it_is_retried(rig):
    rig.reserve()
    rig.hear(closed=True, close_reason="no power")
    [ended] = rig.ended()
    assert (ended.cause, ended.message) == (worker_pb2.CAUSE_TRANSFER_FAILED, "prefill gave up: no power")
    assert repr(rig) == "<PagePool 16 free, 0 held>"


def test_an_answer_that_ended_with_its_first_token_is_no_failure(rig):
    rig.reserve()
    rig.hear(closed=True, ended_with_first_token=True)
    assert rig.ended() == []
    assert repr(rig) == "<PagePool 16 free, 0 held>"


def test_no_room_is_said_and_what_never_fits_is_refused(rig):
    rig.reserve("a", max_tokens=30)
    rig.reserve("b", max_tokens=30)
    assert [r.cause for r in rig.sessions.of("refused")] == [worker_pb2.CAUSE_NO_PAGES]
    rig.reserve("c", max_tokens=500)
    rig.reserve("d", token_ids=(VOCAB,))
    never = rig.sessions.of("refused")[1:]
    assert [r.cause for r in never] == [worker_pb2.CAUSE_INVALID] * 2
    assert "need 128 pages, the decode worker has 16" in never[0].message
    assert "token ids must be in [0, 50)" in never[1].message


def test_one_key_is_reserved_once_even_from_quarantine(rig):
    rig.reserve()
    rig.reserve()
    rig.abort()
    rig.reserve()
    assert [r.message for r in rig.sessions.of("refused")] == ["request r, attempt 0, is known already"] * 2


def test_a_lost_router_takes_its_requests_along_and_nobody_elses(rig):
    rig.reserve("mine")
    rig.reserve("theirs", session_id=2)
    rig.inbox.put(SessionClosed(1))
    rig.turn()
    assert rig.revoker.revoked == [RequestRef("mine", 0)]
    rig.complete("theirs")
    assert rig.sessions.of("step_output", 2)


def test_a_router_can_not_abort_anothers_request(rig):
    rig.reserve()
    rig.abort(session_id=2)
    rig.complete()
    assert rig.tokens() == [7]


def test_broken_logits_fail_their_request_only(rig):
    rig.runner.broken = {3}
    rig.reserve("broken", token_ids=(3,) * 10)
    rig.reserve("fine")
    rig.complete("fine")
    rig.complete("broken")
    assert [e.ref.request_id for e in rig.ended(worker_pb2.CAUSE_NOT_FINITE)] == ["broken"]
    rig.turn()
    rig.turn()
    assert rig.tokens() == [7, 7, 7]
    assert rig.pool.num_available == NUM_PAGES


def test_a_follow_up_is_sent_only_what_is_not_here():
    rig = Rig()
    rig.reserve(token_ids=(1,) * 10)
    rig.complete()
    rig.turn()
    rig.turn()
    rig.reserve("next", token_ids=(1,) * 10 + (7, 7, 7, 2))
    [_, second] = rig.sessions.of("reserved")
    assert (second.num_cached_tokens, second.ticket.first_page_index) == (12, 3)
    assert len(second.ticket.page_ids) == 1
    rig.complete("next", pages=1)
    rig.turn()
    assert rig.tokens()[3:] == [7, 7]


def test_a_wholly_known_prompt_needs_only_its_first_token():
    rig = Rig()
    for name in ("a", "b"):
        rig.reserve(name, token_ids=(1,) * 8, max_tokens=2)
        ticket = rig.sessions.of("reserved")[-1].ticket
        rig.complete(name, pages=len(ticket.page_ids))
    assert (list(ticket.page_ids), ticket.first_page_index) == ([], 2)
    assert len(rig.tokens()) == 2
    assert len(rig.loop.requests) == 0


def test_a_flush_and_another_salt_find_nothing():
    rig = Rig()
    rig.reserve("a", token_ids=(1,) * 8, max_tokens=2)
    rig.complete("a", pages=2)
    rig.reserve("salted", token_ids=(1,) * 8, max_tokens=2, cache_salt="x")
    rig.command(flush_cache=worker_pb2.FlushCacheCommand())
    rig.reserve("b", token_ids=(1,) * 8, max_tokens=2)
    assert [r.num_cached_tokens for r in rig.sessions.of("reserved")] == [0, 0, 0]


def test_without_a_prefix_cache_nothing_stays():
    rig = Rig(prefix_cache=False)
    rig.reserve(token_ids=(1,) * 8, max_tokens=2)
    rig.complete(pages=2)
    assert repr(rig) == "<PagePool 16 free, 0 held>"


def num_preempted(rig, repeated):
    labels = {"tier": "decode", "repeated": repeated}
    return rig.metrics.registry.get_sample_value("kvferry_preemptions_total", labels)


def fill(rig, *names, **options):
    """Requests that were let in because answers used to be short."""
    for _ in range(20):
        rig.loop.scheduler.lengths.learn(2, 20)
    for name in names:
        rig.reserve(name, token_ids=(ord(name[0]) % 40,) * 7, max_tokens=20, **options.get(name, {}))
    for name in names:
        rig.complete(name, pages=2)


def test_a_request_that_is_handed_back_goes_with_all_its_tokens():
    rig = Rig(num_pages=7)
    fill(rig, "a", "b", "c", b={"session_id": 2})
    for _ in range(3):
        rig.turn()
    [preempted] = rig.ended(worker_pb2.CAUSE_NO_PAGES)
    assert preempted.ref.request_id == "c"
    sent = [
        t for e in rig.sessions.of("step_output") for o in e.outputs if o.ref.request_id == "c" for t in o.token_ids
    ]
    assert list(preempted.output_token_ids) == [7, *sent], "the first token came from prefill"
    assert rig.pool.counts().quarantined == 0
    assert num_preempted(rig, "false") == 1


def test_handing_one_back_twice_is_counted_apart():
    rig = Rig(num_pages=7)
    fill(rig, "a", "b", "c", a={"was_preempted": True}, b={"was_preempted": True}, c={"was_preempted": True})
    for _ in range(3):
        rig.turn()
    assert [p.ref.request_id for p in rig.ended(worker_pb2.CAUSE_NO_PAGES)] == ["c"]
    assert num_preempted(rig, "true") == 1


def test_a_reservation_that_is_handed_back_is_quarantined_until_its_writer_let_go():
    rig = Rig(num_pages=8)
    for _ in range(20):
        rig.loop.scheduler.lengths.learn(2, 20)
    rig.reserve("a", token_ids=(1,) * 7, max_tokens=20)
    rig.reserve("b", token_ids=(2,) * 23, max_tokens=2)
    rig.complete("a", pages=2)
    for _ in range(3):
        rig.turn()
    assert [p.ref.request_id for p in rig.ended(worker_pb2.CAUSE_NO_PAGES)] == ["b"]
    assert list(rig.ended(worker_pb2.CAUSE_NO_PAGES)[0].output_token_ids) == []
    assert rig.revoker.revoked == [RequestRef("b", 0)]
    before = len(rig.tokens())
    rig.turn()
    assert len(rig.tokens()) == before
    rig.inbox.put(WriterGone(RequestRef("b", 0), "closed"))
    rig.turn()
    assert len(rig.tokens()) == before + 1


def test_logprobs_and_cache_events_go_out():
    rig = Rig()
    sampling = worker_pb2.SamplingConfig(top_p=1.0, repetition_penalty=1.0, num_logprobs=2)
    rig.reserve(token_ids=(1,) * 8, sampling=sampling)
    rig.complete(pages=2)
    output = rig.sessions.of("step_output")[0].outputs[0]
    assert output.logprobs.num_top == 2
    assert output.logprobs.token_ids[:2] == [7, 7]
    assert len(output.logprobs.logprobs) == 3
    added = [key for event in rig.sessions.of("cache") for key in event.added]
    assert len(added) == 2


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"top_p": 0.0, "repetition_penalty": 1.0}, "out of range"),
        ({"top_p": 1.0, "repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"top_p": 1.0, "repetition_penalty": 1.0, "bias_token_ids": [VOCAB], "biases": [1.0]}, "bias_token_ids must"),
        ({"top_p": 1.0, "repetition_penalty": 1.0, "bias_token_ids": [1]}, "1 tokens have 0 biases"),
        ({"top_p": 1.0, "repetition_penalty": 1.0, "bias_token_ids": [1, 1], "biases": [1, 2]}, "two biases"),
        ({"top_p": 1.0, "repetition_penalty": 1.0, "temperature": float("nan")}, "temperature nan"),
        ({"top_p": 1.0, "repetition_penalty": 1.0, "presence_penalty": float("nan")}, "must be finite"),
    ],
)
def test_a_router_that_checked_badly_can_not_hurt_the_loop(rig, sampling, words):
    """Casebook C028: nothing unchecked reaches the engine."""
    rig.reserve(sampling=worker_pb2.SamplingConfig(**sampling))
    assert words in rig.sessions.of("refused")[0].message


@pytest.mark.parametrize(
    ("stop", "words"),
    [({"max_tokens": 0}, "max_tokens is 0"), ({"max_tokens": 1, "stop_token_ids": [VOCAB]}, "stop_token_ids must")],
)
def test_stops_are_checked_too(rig, stop, words):
    rig.reserve(stop=worker_pb2.StopConfig(**stop))
    assert words in rig.sessions.of("refused")[0].message


def test_tokens_that_a_step_brought_go_out_even_if_a_later_one_fails():
    rig = Rig()
    rig.reserve("a", max_tokens=12)
    rig.reserve("b", max_tokens=12)
    rig.complete("a")
    rig.complete("b")
    rig.turn()
    before = len(rig.tokens())
    rig.loop.requests.get(RequestRef("b", 0)).stop.finish_reason = lambda sequence: 1 / 0
    rig.turn()
    assert len(rig.tokens()) == before + 1
    # Both continue elsewhere: the router knows how far each got.
    assert [e.ref.request_id for e in rig.ended(worker_pb2.CAUSE_STEP_FAILED)] == ["a", "b"]


def digest(content):
    return hashlib.sha256(content).digest()


@pytest.mark.parametrize(("came", "equal"), [(b"noise", True), (b"something else", False)])
def test_test_pages_are_compared_and_forgotten(rig, came, equal):
    rig.test_pages.content = came
    rig.hear(name="", pair_test={"test_id": "x", "sha256": digest(b"noise"), "writer_address": "p:1"})
    rig.turn()
    assert rig.revoker.checked == ([Writer("p/1", "1", "p:1")] if equal else [])
    [event] = rig.sessions.of("pair_tested")
    assert (event.writer_agent_name, event.test_id, event.equal) == ("p/1", "x", equal)
    rig.hear(name="", pair_test={"test_id": "y", "sha256": digest(b"noise")})
    assert not rig.sessions.of("pair_tested")[-1].equal, "only a new write makes them equal again"
    assert rig.ignored() == 0


def test_a_writer_that_is_not_at_its_address_is_not_paired(rig):
    """Its pages could never be taken back after its death."""
    rig.revoker.what_is_wrong = "p advertises p:1, where it does not respond"
    rig.test_pages.content = b"noise"
    rig.hear(name="", pair_test={"test_id": "x", "sha256": digest(b"noise"), "writer_address": "p:1"})
    rig.turn()
    [event] = rig.sessions.of("pair_tested")
    assert (event.equal, event.reason) == (True, "p advertises p:1, where it does not respond")


def test_a_lost_notification_costs_seconds_not_the_request(rig):
    """Casebook C115, C088: the writer has sent everything, its word of it does not come."""
    rig.reserve()
    rig.hear(first_page=0, num_pages=2)
    rig.command(transfer_done=worker_pb2.TransferDoneCommand(ref=make_ref()))
    rig.turn()
    assert rig.ended() == []
    rig.clock.advance(OVERDUE_SECONDS)
    rig.turn()
    [ended] = rig.ended(worker_pb2.CAUSE_TRANSFER_FAILED)
    assert "notification did not come" in ended.message
    assert rig.revoker.revoked == [R]


def test_a_notification_that_came_late_but_came_starts_its_request(rig):
    rig.reserve()
    rig.command(transfer_done=worker_pb2.TransferDoneCommand(ref=make_ref()))
    rig.complete()
    rig.clock.advance(OVERDUE_SECONDS)
    rig.turn()
    assert rig.ended() == []
    assert rig.tokens()


def test_a_drained_worker_runs_on_takes_nothing_and_ends(rig):
    rig.reserve()
    rig.complete()
    rig.inbox.put(Drain(hand_over=False))
    rig.reserve(name="new")
    assert [(e.ref.request_id, e.cause) for e in rig.sessions.of("refused")] == [("new", worker_pb2.CAUSE_DRAINING)]
    while rig.loop.turn():
        pass
    assert rig.tokens() == [7, 7, 7]
    assert rig.pool.counts().held == 0


def test_handed_over_requests_go_with_their_tokens_and_open_tickets_are_waited_for(rig):
    rig.reserve(max_tokens=40)
    rig.complete()
    rig.reserve(name="being filled", token_ids=(2,) * 5)
    rig.inbox.put(Drain(hand_over=True))
    rig.turn()
    handed = {e.ref.request_id: list(e.output_token_ids) for e in rig.ended(worker_pb2.CAUSE_DRAINING)}
    assert handed == {"r": [7, *rig.tokens()], "being filled": []}
    assert rig.loop.turn(), "a writer may still write"
    rig.inbox.put(WriterGone(RequestRef("being filled", 0), "closed"))
    rig.loop.turn()
    assert not rig.loop.turn()


def rest(rig):
    """The loop is about to wait, some time after its last check of pages."""
    rig.clock.advance(CHECK_SECONDS)
    rig.inbox.put(Notification("stranger", b""))
    assert rig.loop.turn(wait=True)


def test_pages_that_do_not_add_up_make_the_worker_not_ready(rig, caplog):
    rig.reserve()
    rest(rig)
    assert rig.parts.health.event().state == worker_pb2.WORKER_STATE_READY
    rig.pool.allocate(2)  # somebody takes pages and forgets them
    rest(rig)
    event = rig.parts.health.event()
    assert event.state == worker_pb2.WORKER_STATE_FAULTY
    assert "holders of 2 pages differ from those of the requests" in event.reason
    assert "allocate" in caplog.text


def test_only_an_operator_may_let_time_free_a_page():
    rig = Rig(quarantine_timeout=30.0)
    rig.reserve()
    rig.abort()
    rig.clock.advance(29.0)
    rig.turn()
    assert repr(rig) == "<PagePool 13 free, 0 held, 3 quarantined>"
    assert rig.loop.tickets.quarantine_age() == 29.0
    rig.clock.advance(1.0)
    rig.turn()
    assert repr(rig) == "<PagePool 16 free, 0 held>"
    assert rig.loop.tickets.quarantine_age() == 0
