"""Steps that are launched while the one before them is computed: what is known when, and what ends in between."""

from __future__ import annotations

import pytest

from engine.sampler import Choice
from engine.sequence import Sequence
from protos import inference_pb2, kv_pb2, worker_pb2
from tests.decode_service.test_loop import Rig
from worker_runtime import answering_loop
from worker_runtime.inbox import Drain, SessionClosed, SessionCommand
from worker_runtime.process import MAX_FAILED_STEPS


class Device:
    """Logs what a worker asks of it and when it is waited for; chooses the tokens that a test says, else 7."""

    def __init__(self, rig, monkeypatch):
        self.log, self.tokens, self.fails_when_waited_for = [], {}, False
        run, flush = rig.runner.run, rig.sessions.flush
        device = self

        def logged_run(batch, on_layer_group=None, previous=None):
            device.log.append(f"launch {len(rig.runner.steps) + 1}")
            pending = [e.sequence.sequence_id for e in batch if e.sequence.num_pending_tokens]
            assert all(name in previous.rows for name in pending)
            return run(batch, on_layer_group, previous)

        class Chosen:
            def __init__(self, logits, sequences):
                assert not any(s.num_pending_tokens for s in sequences), "penalties need all tokens before"
                self.number, self.sequences = len(rig.runner.steps), sequences
                self.rows = {s.sequence_id: row for row, s in enumerate(sequences)}
                self.tokens = [device.tokens.get((s.sequence_id, s.num_output_tokens), 7) for s in sequences]
                device.log.append(f"choose {self.number}")

            def choices(self):
                device.log.append(f"wait for {self.number}")
                if device.fails_when_waited_for:
                    raise RuntimeError("the device is lost")
                return [Choice(token) for token in self.tokens]

        def logged_flush():
            if rig.sessions.of("reserved"):
                device.log.append("events go out")
                rig.sessions.events[1] = [e for e in rig.sessions.events[1] if not e.HasField("reserved")]
            flush()

        monkeypatch.setattr(rig.runner, "run", logged_run)
        monkeypatch.setattr(rig.sessions, "flush", logged_flush)
        monkeypatch.setattr(answering_loop, "sample", Chosen)


@pytest.fixture
def rig():
    return Rig(num_pages=40, overlap="on", prefix_cache=False)


@pytest.fixture
def device(rig, monkeypatch):
    return Device(rig, monkeypatch)


def begin(rig, name="r", **options):
    rig.reserve(name, **options)
    rig.complete(name, pages=-(-len(options.get("token_ids", (1,) * 10)) // 4))


def abort(rig, name="r", is_complete=False):
    rig.command(abort=worker_pb2.AbortCommand(request_id=name, is_complete=is_complete))


def at_rest(rig):
    return rig.pool.counts().held == 0 and not rig.worker._has_open_work()


def test_by_default_only_devices_that_run_ahead_overlap():
    assert not Rig().worker._overlaps
    assert not Rig(overlap="off").worker._overlaps
    assert Rig(overlap="on").worker._overlaps


def test_the_next_step_is_launched_before_the_last_is_waited_for(rig, device):
    begin(rig)
    device.log.clear()
    rig.turn()
    rig.turn()
    assert device.log == [
        *("launch 2", "wait for 1", "choose 2"),
        *("launch 3", "wait for 2", "choose 3"),
    ]
    rig.turn()
    assert rig.tokens() == [7, 7, 7]
    assert device.log[-1] == "wait for 3", "no step is computed for tokens beyond max_tokens"
    assert rig.sessions.of("step_output")[-1].outputs[0].finish_reason == inference_pb2.FINISH_REASON_LENGTH
    assert at_rest(rig)


def test_a_row_whose_answer_has_ended_is_thrown_away(rig, device):
    device.tokens["r#0", 2] = 3
    begin(rig, stop=worker_pb2.StopConfig(max_tokens=40, stop_token_ids=[3]))
    begin(rig, "other", max_tokens=6, token_ids=(2,) * 5)
    for _ in range(8):
        rig.turn()
    of = {name: [] for name in ("r", "other")}
    for event in rig.sessions.of("step_output"):
        for output in event.outputs:
            of[output.request_id] += output.token_ids
    assert of == {"r": [7, 3], "other": [7] * 5}
    assert [name for step in rig.runner.steps for name, _ in step].count("r#0") == 3, "once too often"
    assert rig.tokens().count(3) == 1
    assert at_rest(rig)


def test_pages_of_a_step_under_way_are_not_told_to_a_writer_before_it_is_over(device, rig):
    """It still writes to pages of an answer that has ended; bytes from outside would be overwritten."""
    device.tokens["r#0", 2] = 3
    begin(rig, stop=worker_pb2.StopConfig(max_tokens=40, stop_token_ids=[3]))
    begin(rig, "other", max_tokens=40, token_ids=(2,) * 5)
    while rig.worker._requests.get(("r", 0)):
        rig.turn()
    under_way = len(rig.runner.steps)
    freed = rig.pool.num_available
    device.log.clear()
    rig.reserve("new", token_ids=(5,) * 4 * freed, max_tokens=1)
    assert device.log.index(f"wait for {under_way}") < device.log.index("events go out")


@pytest.mark.parametrize("how", ["abort", "the client has all", "session closed"])
def test_a_request_may_go_while_its_step_is_under_way(rig, device, how):
    begin(rig, max_tokens=40)
    rig.turn()
    assert rig.worker._has_step_under_way()
    if how == "session closed":
        rig.inbox.put(SessionClosed(1))
        rig.turn()
    else:
        abort(rig, is_complete=how == "the client has all")
    told = rig.tokens()
    rig.turn()
    assert rig.tokens() == told, "nothing more is said of it"
    assert at_rest(rig)


def test_the_same_id_again_is_another_request(rig, device):
    """A token of the old one comes when the new one has its place."""
    begin(rig, max_tokens=40)
    told = rig.tokens()
    command = worker_pb2.AbortCommand(request_id="r")
    rig.inbox.put(SessionCommand(1, worker_pb2.SessionRequest(abort=command)))
    rig.reserve(max_tokens=4)
    assert rig.worker._by_sequence["r#0"].sequence.num_output_tokens == 0
    rig.complete()
    for _ in range(5):
        rig.turn()
    assert rig.tokens() == [*told, 7, 7, 7]


def test_pages_of_an_ended_answer_are_found_again(monkeypatch):
    """Those that are full: 10 tokens of the prompt, 5 of the output."""
    rig = Rig(overlap="on")
    Device(rig, monkeypatch)
    begin(rig, max_tokens=6)
    while rig.worker._requests:
        rig.turn()
    rig.turn()
    rig.reserve("next", token_ids=(1,) * 10 + (7,) * 9)
    assert rig.worker._requests["next", 0].sequence.num_cached_tokens == 12


def test_handed_over_requests_take_the_token_under_way_along(rig, device):
    begin(rig, max_tokens=40)
    rig.turn()
    told = len(rig.tokens())
    rig.inbox.put(Drain(hand_over=True))
    rig.worker.turn()
    [handed] = rig.sessions.of("preempted")
    assert len(rig.tokens()) == told + 1
    assert list(handed.output_token_ids) == [7, *rig.tokens()]
    assert at_rest(rig)


def test_a_drained_worker_does_not_end_with_a_step_under_way(rig, device):
    """The last answer ends while a step is computed that has it once too often."""
    device.tokens["r#0", 3] = 3
    begin(rig, stop=worker_pb2.StopConfig(max_tokens=40, stop_token_ids=[3]))
    rig.inbox.put(Drain(hand_over=False))
    while rig.worker.turn():
        pass
    assert rig.tokens() == [7, 7, 3]
    assert device.log[-1] == f"wait for {len(rig.runner.steps)}"


def test_the_token_under_way_may_end_who_has_the_missing_page(monkeypatch):
    """`a` ends with it, and has what `b` needs: nobody has to go."""
    rig = Rig(overlap="on", num_pages=4, prefix_cache=False)
    device = Device(rig, monkeypatch)
    for _ in range(20):
        rig.worker._scheduler.lengths.learn(1, 8)
    device.tokens["a#0", 3] = 3
    stop = worker_pb2.StopConfig(max_tokens=8, stop_token_ids=[3])
    begin(rig, "a", token_ids=(1,) * 4, stop=stop)
    begin(rig, "b", token_ids=(2,) * 7, stop=stop)
    assert rig.pool.num_available == 0, "or nothing is tested"
    for _ in range(9):
        rig.turn()
    assert rig.sessions.of("preempted") == []
    assert len(rig.tokens()) == 3 + 7
    assert at_rest(rig)


def test_a_step_that_fails_fails_those_of_the_one_before_too(rig, device):
    begin(rig, max_tokens=40)
    begin(rig, "other", max_tokens=40, token_ids=(2,) * 5)
    rig.runner.fail = True
    rig.turn()
    failed = rig.sessions.of("request_failed")
    assert {(f.request_id, f.retryable) for f in failed} == {("r", True), ("other", True)}
    assert at_rest(rig)
    rig.runner.fail = False
    begin(rig, "new")
    for _ in range(5):
        rig.turn()
    assert rig.tokens()[-3:] == [7, 7, 7]


def test_a_device_that_fails_when_it_is_waited_for_ends_the_worker_in_the_end(rig, device):
    device.fails_when_waited_for = True

    def serve():
        for number in range(3 * MAX_FAILED_STEPS):
            begin(rig, str(number))
            rig.turn()

    with pytest.raises(RuntimeError, match="the device is lost"):
        serve()
    assert len(rig.sessions.of("request_failed")) == MAX_FAILED_STEPS
    assert all(f.retryable for f in rig.sessions.of("request_failed"))


def test_a_row_without_a_usable_token_fails_alone(rig, device):
    device.tokens["r#0", 2] = None
    begin(rig, max_tokens=40)
    begin(rig, "other", max_tokens=6, token_ids=(2,) * 5)
    for _ in range(8):
        rig.turn()
    [failed] = rig.sessions.of("request_failed")
    assert (failed.request_id, failed.retryable) == ("r", False)
    assert rig.tokens().count(7) == 1 + 5
    assert at_rest(rig)


def test_a_first_token_from_prefill_is_known_from_the_start(rig, device):
    rig.reserve()
    rig.hear(first_page=0, num_pages=3, first_token=kv_pb2.FirstToken(token_id=9))
    sequence = rig.worker._by_sequence["r#0"].sequence
    assert sequence.token_ids[10:] == [9]
    assert sequence.num_pending_tokens == 1, "its first step is under way"
    assert sequence.num_output_tokens == 2


@pytest.mark.parametrize("admission", ["full", "learned"])
def test_a_pending_last_token_takes_no_page(monkeypatch, admission):
    """4 prompt tokens and an answer of 5 need 2 pages, since the last token's KV is never computed; two fit 4 pages."""
    rig = Rig(num_pages=4, prefix_cache=False, overlap="on", decode_admission=admission)
    Device(rig, monkeypatch)
    begin(rig, "a", token_ids=(1,) * 4, max_tokens=5)
    scheduler, seen = rig.worker._scheduler, set()
    while sequence := rig.worker._by_sequence.get("a#0"):
        new = Sequence("new", [2] * 4, 4)
        assert scheduler.reserve(new, 5) is None
        scheduler.release(new)
        seen.add(sequence.sequence.num_tokens)
        rig.turn()
    assert max(seen) == 9


def test_a_pending_token_is_not_learned_as_part_of_an_answer(rig, device, monkeypatch):
    """The router found a stop string in what it has."""
    learned = []
    monkeypatch.setattr(rig.worker._scheduler.lengths, "learn", lambda length, most: learned.append(length))
    begin(rig, max_tokens=40)
    rig.turn()
    known = 1 + len(rig.tokens())
    rig.inbox.put(
        SessionCommand(1, worker_pb2.SessionRequest(abort=worker_pb2.AbortCommand(request_id="r", is_complete=True)))
    )
    rig.turn()
    assert learned == [known]


def test_known_tokens_go_out_before_a_step_is_waited_for(rig, monkeypatch):
    """To choose with a filter is to wait for the step that was just launched."""
    device = Device(rig, monkeypatch)
    sampling = worker_pb2.SamplingConfig(top_p=0.9, temperature=1.0, repetition_penalty=1.0)
    begin(rig, max_tokens=40, sampling=sampling)
    flush = rig.sessions.flush
    monkeypatch.setattr(rig.sessions, "flush", lambda: (device.log.append("flush"), flush()))
    device.log.clear()
    rig.turn()
    assert device.log == ["launch 2", "wait for 1", "flush", "choose 2", "flush"]
