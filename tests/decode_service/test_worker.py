"""The decode worker's loop with a scripted model: when it starts, and when pages come back."""

from __future__ import annotations

import pytest

from decode_service.ticket_closer import Writer
from decode_service.worker import DecodeWorker
from engine.page_pool import PagePool
from kv_transfer.base import Notification
from protos import inference_pb2, kv_pb2, worker_pb2
from tests.scripted import PAGE_SIZE, VOCAB, FakeSessions, ScriptedRunner
from worker.inbox import Inbox, SessionClosed, SessionCommand, WriterGone
from worker.metrics import WorkerMetrics
from worker.process import WorkerParts

NUM_PAGES = 16


class FakeTransfers:
    """Notes whether writes are expected."""

    def expect(self, expecting):
        self.expecting = expecting


class FakeCloser:
    """Notes which tickets are to be closed."""

    def __init__(self):
        self.asked = []

    def introduce(self, writer):
        pass

    def close(self, agent_name, request_id, attempt, writer):
        assert writer == Writer("p/1", "1", "p:1")
        self.asked.append((request_id, attempt))


class Rig:
    """A worker whose loop is turned by hand."""

    def __init__(self):
        self.inbox, self.sessions, self.runner = Inbox(), FakeSessions(), ScriptedRunner()
        self.pool, self.closer, self.transfers = PagePool(NUM_PAGES), FakeCloser(), FakeTransfers()
        self.metrics = WorkerMetrics("decode", self.pool)
        parts = WorkerParts(
            runner=None, pool=self.pool, page_size=PAGE_SIZE, transfers=self.transfers, transport_name="local",
            page_bytes=64, vocab_size=VOCAB, inbox=self.inbox, sessions=self.sessions, metrics=self.metrics,
            loop=None, worker_id="d", incarnation_id="1", agent_name="d/1",
        )  # fmt: skip
        self.worker = DecodeWorker(parts, self.runner, self.closer, 4, VOCAB)

    def turn(self):
        """One turn of the loop, without waiting."""
        assert self.worker._receive(wait=False)
        step = self.worker._scheduler.schedule()
        if step is not None:
            self.worker._run_and_deliver(step)
        self.worker._report_load()

    def command(self, session_id=1, **command):
        self.inbox.put(SessionCommand(session_id, worker_pb2.SessionRequest(**command)))
        self.turn()

    def reserve(self, name="r", token_ids=(1,) * 10, max_tokens=4, session_id=1, attempt=0):
        command = worker_pb2.ReserveCommand(
            request_id=name, attempt=attempt, token_ids=token_ids, num_prompt_tokens=len(token_ids),
            stop=worker_pb2.StopConfig(max_tokens=max_tokens), writer_agent_name="p/1", writer_incarnation_id="1",
            writer_address="p:1",
        )  # fmt: skip
        self.command(session_id, reserve=command)

    def hear(self, sender="p/1", name="r", **fields):
        message = kv_pb2.KvNotification(request_id=name, **fields)
        self.inbox.put(Notification(sender, message.SerializeToString()))
        self.turn()

    def complete(self, name="r", pages=3, token=7):
        self.hear(name=name, first_page=0, num_pages=pages, first_token=kv_pb2.FirstToken(token_id=token))

    def tokens(self):
        return [t for e in self.sessions.of("step_output") for o in e.outputs for t in o.token_ids]

    def ignored(self):
        return self.metrics.ignored_notifications._value.get()

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
    assert repr(rig) == "<PagePool 16 free, 0 held>"
    assert rig.closer.asked == []


def test_pages_of_an_aborted_request_wait_for_their_writer(rig):
    rig.reserve()
    rig.hear(first_page=0, num_pages=1)
    rig.command(abort=worker_pb2.AbortCommand(request_id="r"))
    assert repr(rig) == "<PagePool 13 free, 0 held, 3 quarantined>"
    assert rig.closer.asked == [("r", 0)]
    assert rig.transfers.expecting, "bytes on their way must still be taken in"
    rig.inbox.put(WriterGone("r", 0, "closed"))
    rig.turn()
    rig.turn()
    assert repr(rig) == "<PagePool 16 free, 0 held>"
    assert not rig.transfers.expecting


@pytest.mark.parametrize(
    "message", [{"closed": True}, {"first_page": 0, "num_pages": 3, "first_token": {"token_id": 1}}]
)
def test_the_writers_last_message_frees_quarantined_pages_too(rig, message):
    rig.reserve()
    rig.command(abort=worker_pb2.AbortCommand(request_id="r"))
    rig.hear(**message)
    assert repr(rig) == "<PagePool 16 free, 0 held>"
    rig.inbox.put(WriterGone("r", 0, "late"))
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
    rig.command(abort=worker_pb2.AbortCommand(request_id="r", attempt=1))


def test_a_writer_that_gives_up_fails_the_request_so_that_it_is_retried(rig):
    rig.reserve()
    rig.hear(closed=True, close_reason="no power")
    [failed] = rig.sessions.of("request_failed")
    assert (failed.status_code, failed.message, failed.retryable) == (14, "prefill gave up: no power", True)
    assert repr(rig) == "<PagePool 16 free, 0 held>"


def test_an_answer_that_ended_with_its_first_token_is_no_failure(rig):
    rig.reserve()
    rig.hear(closed=True, answer_ended=True)
    assert rig.sessions.of("request_failed") == []
    assert repr(rig) == "<PagePool 16 free, 0 held>"


def test_no_room_is_said_and_what_never_fits_is_refused(rig):
    rig.reserve("a", max_tokens=30)
    rig.reserve("b", max_tokens=30)
    assert [r.short_of for r in rig.sessions.of("refused")] == ["pages"]
    rig.reserve("c", max_tokens=500)
    [failed] = rig.sessions.of("request_failed")
    assert "need 128 pages, the decode worker has 16" in failed.message
    rig.reserve("d", token_ids=(VOCAB,))
    assert "token ids must be in [0, 50)" in rig.sessions.of("request_failed")[-1].message


def test_one_key_is_reserved_once_even_from_quarantine(rig):
    rig.reserve()
    rig.reserve()
    rig.command(abort=worker_pb2.AbortCommand(request_id="r"))
    rig.reserve()
    assert [f.message for f in rig.sessions.of("request_failed")] == ["request r, attempt 0, is known already"] * 2


def test_a_lost_router_takes_its_requests_along_and_nobody_elses(rig):
    rig.reserve("mine")
    rig.reserve("theirs", session_id=2)
    rig.inbox.put(SessionClosed(1))
    rig.turn()
    assert rig.closer.asked == [("mine", 0)]
    rig.complete("theirs")
    assert rig.sessions.of("step_output", 2)


def test_a_router_can_not_abort_anothers_request(rig):
    rig.reserve()
    rig.command(session_id=2, abort=worker_pb2.AbortCommand(request_id="r"))
    rig.complete()
    assert rig.tokens() == [7]


def test_broken_logits_fail_their_request_only(rig):
    rig.runner.broken = {3}
    rig.reserve("broken", token_ids=(3,) * 10)
    rig.reserve("fine")
    rig.complete("fine")
    rig.complete("broken")
    assert [f.request_id for f in rig.sessions.of("request_failed")] == ["broken"]
    rig.turn()
    rig.turn()
    assert rig.tokens() == [7, 7, 7]
    assert repr(rig) == "<PagePool 16 free, 0 held>"
