"""Orderings that a worker's turn must keep. Each was prose once; breaking one loses bytes where no counter sees it."""

from __future__ import annotations

import pytest

from engine.sampler import SampledToken
from protos import worker_pb2
from tests.colocated_service.test_loop import Rig as ColocatedRig
from tests.decode_service.test_loop import Rig as DecodeRig
from tests.prefill_service.test_loop import Rig as PrefillRig
from tests.scripted import make_ref, make_spec
from worker_runtime.inbox import SessionCommand

STOP = 3
"""The token that ends an answer in these tests."""


class Device:
    """A device that computes behind the host's back. Logs launches, waits and what goes out to routers."""

    def __init__(self, rig, monkeypatch):
        self.log, self.stops, self.on_wait = [], set(), lambda number: None
        run, flush = rig.runner.run, rig.sessions.flush
        device, sent = self, set()

        def logged_run(batch, on_layer_group=None, previous=None):
            device.log.append(("launch", len(rig.runner.steps) + 1))
            return run(batch, on_layer_group, previous)

        class Chosen:
            def __init__(self, logits, sequences):
                self.number = len(rig.runner.steps)
                self.rows = {s.sequence_id: row for row, s in enumerate(sequences)}
                self.tokens = [STOP if (s.sequence_id, s.num_output_tokens) in device.stops else 7 for s in sequences]

            def wait(self):
                device.log.append(("over", self.number))
                device.on_wait(self.number)
                return [SampledToken(token) for token in self.tokens]

        def logged_flush():
            for event in rig.sessions.events[1]:
                if id(event) not in sent:
                    sent.add(id(event))
                    device.log.append(("out", event.WhichOneof("event")))
            flush()

        monkeypatch.setattr(rig.runner, "run", logged_run)
        monkeypatch.setattr(rig.sessions, "flush", logged_flush)
        rig.runner.sampler = Chosen

    def num_launched(self):
        return max(number for what, number in self.log if what == "launch")


def begin(rig, name, token_ids, **options):
    rig.reserve(name, token_ids=token_ids, **options)
    rig.complete(name, pages=-(-len(token_ids) // 4))


@pytest.fixture
def rig():
    return DecodeRig(num_pages=24, overlap="on", prefix_cache=False)


@pytest.fixture
def device(rig, monkeypatch):
    made = Device(rig, monkeypatch)
    stop = worker_pb2.StopConfig(max_tokens=40, stop_token_ids=[STOP])
    begin(rig, "ends", (1,) * 10, stop=stop)
    begin(rig, "stays", (2,) * 5, stop=stop)
    return made


def test_no_event_of_a_turn_goes_out_before_the_step_that_it_may_contradict_is_over(rig, device):
    """An answer has ended, but the step in flight still has a row of it and writes to its pages. They are given to
    a new request in the next turn: its ticket must not reach a writer before that step is over."""
    device.stops.add(("ends#0", 3))
    while not any(output.finish_reason for event in rig.sessions.of("step_output") for output in event.outputs):
        rig.turn()
    in_flight = device.num_launched()
    device.log.clear()
    rig.reserve("new", token_ids=(5,) * 4 * rig.pool.num_available, max_tokens=1)
    assert ("out", "reserved") in device.log
    assert device.log.index(("over", in_flight)) < device.log.index(("out", "reserved"))


def test_pages_freed_in_a_turn_are_offered_to_a_foreign_writer_one_turn_later(rig, device):
    """A reservation that came while a step was waited for could be met with the pages that this very step has freed,
    though the step behind it, which is launched already, still writes to them."""
    device.stops.add(("ends#0", 3))
    writer = worker_pb2.PageWriter(agent_name="p/1", incarnation_id="1", address="p:1")
    spec = make_spec((5,) * 8, max_tokens=1)
    command = worker_pb2.ReserveCommand(ref=make_ref("new"), spec=spec, writer=writer)

    def ask_now(number):
        if not rig.sessions.of("reserved")[2:] and rig.inbox._queue.empty():
            rig.inbox.put(SessionCommand(1, worker_pb2.SessionRequest(reserve=command)))

    device.on_wait = ask_now
    rig.turn()
    assert len(rig.sessions.of("reserved")) == 2, "it came while this turn waited for its device"
    device.log.clear()
    rig.turn()
    assert len(rig.sessions.of("reserved")) == 3
    kinds = [entry[0] if entry[1] != "reserved" else "ticket" for entry in device.log]
    assert kinds.index("over") < kinds.index("ticket")


def run_into_a_failing_step(rig, log, monkeypatch):
    release = rig.pool.release
    monkeypatch.setattr(rig.runner, "settle", lambda: log.append("settle"))
    monkeypatch.setattr(rig.pool, "release", lambda pages: (log.append("free"), release(pages)))
    rig.runner.fail = True
    rig.turn()
    rig.runner.fail = False


@pytest.mark.parametrize("tier", ["prefill", "decode", "colocated"])
def test_a_failed_step_settles_the_device_before_pages_are_freed(tier, monkeypatch):
    """Part of the step may run on, and pages that are freed may be somebody else's by then."""
    log = []
    match tier:
        case "prefill":
            rig = PrefillRig()
            rig.submit("r", list(range(1, 11)))
        case "decode":
            rig = DecodeRig()
            begin(rig, "r", (1,) * 10)
        case "colocated":
            rig = ColocatedRig()
            rig.generate("r")
    run_into_a_failing_step(rig, log, monkeypatch)
    assert log[:2] == ["settle", "free"]
    if tier == "prefill":
        rig.turn_until(rig.is_at_rest)
        rig.transfers.stop()
