"""The colocated worker's loop with a scripted model, turned by hand."""

from __future__ import annotations

import pytest

from colocated_service.config import ColocatedConfig
from colocated_service.loop import ColocatedLoop
from engine.config import EngineConfig
from kv_transfer.request_ref import RequestRef
from protos import inference_pb2, worker_pb2
from tests.scripted import VOCAB, ScriptedRunner, make_parts, make_ref, make_spec
from worker_runtime.engine_loop import MAX_FAILED_STEPS
from worker_runtime.inbox import Drain, SessionClosed, SessionCommand, SessionOpened
from worker_runtime.request import WorkerRequest


class Rig:
    """A worker whose loop is turned by hand."""

    def __init__(self, num_pages=32, token_budget=8, runner=None, parts=None, **options):
        self.runner = runner or ScriptedRunner()
        self.parts = parts = make_parts("colocated", "c", num_pages, token_budget=token_budget, **(parts or {}))
        self.inbox, self.sessions, self.pool, self.metrics = parts.inbox, parts.sessions, parts.pool, parts.metrics
        self.clock = parts.clock
        config = ColocatedConfig(EngineConfig(model="m"), max_num_sequences=4, **options)
        self.loop = ColocatedLoop(parts, self.runner, config)

    def turn(self, times=1):
        for _ in range(times):
            assert self.loop.turn()

    def command(self, session_id=1, **command):
        self.inbox.put(SessionCommand(session_id, worker_pb2.SessionRequest(**command)))

    def generate(self, name="r", token_ids=(1,) * 10, max_tokens=4, session_id=1, attempt=0, **options):
        spec = make_spec(token_ids, max_tokens, **options)
        self.command(session_id, generate=worker_pb2.GenerateCommand(ref=make_ref(name, attempt), spec=spec))

    def abort(self, name="r", session_id=1, is_complete=False):
        self.command(session_id, abort=worker_pb2.AbortCommand(ref=make_ref(name), is_complete=is_complete))

    def ended(self, cause=None):
        """Requests that the worker has ended before their last token, by cause if a test gives one."""
        return [e for e in self.sessions.of("request_ended") if cause in (None, e.cause)]

    def outputs(self, name="r", session_id=1):
        return [o for e in self.sessions.of("step_output", session_id) for o in e.outputs if o.ref.request_id == name]

    def tokens(self, name="r", session_id=1):
        return [t for o in self.outputs(name, session_id) for t in o.token_ids]


@pytest.fixture(params=["off", "on"])
def rig(request):
    """Also with steps that are launched before the one before is delivered, as on a GPU."""
    made = Rig(overlap=request.param)
    yield made
    made.inbox.put(SessionClosed(1))
    made.inbox.put(SessionClosed(2))
    made.turn()
    assert made.pool.counts().held == 0


def test_a_prompt_is_computed_in_chunks_and_its_answer_follows(rig):
    rig.generate(token_ids=range(1, 19))
    rig.turn(7)
    assert [n for step in rig.runner.steps for _, n in step] == [8, 8, 2, 1, 1, 1]
    assert rig.tokens() == [7, 7, 7, 7]
    assert [o.first_index for o in rig.outputs()] == [0, 1, 2, 3]
    assert rig.outputs()[-1].finish_reason == inference_pb2.FINISH_REASON_LENGTH
    assert [o.num_chunks for o in rig.outputs()] == [3, 0, 0, 0]
    assert [o.num_computed_prompt_tokens for o in rig.outputs()] == [0, 0, 0, 18]
    stages = {s.stage for o in rig.outputs() for s in o.stamps}
    assert stages == {
        worker_pb2.STAGE_PREFILL_STARTED, worker_pb2.STAGE_PREFILL_FINISHED, worker_pb2.STAGE_DECODE_STARTED,
        worker_pb2.STAGE_FINISHED,
    }  # fmt: skip


def test_one_run_of_the_model_has_both_phases(rig):
    rig.generate("a", token_ids=range(1, 5), max_tokens=9)
    rig.turn()
    rig.generate("b", token_ids=range(11, 21))
    rig.turn()
    assert [n for _, n in rig.runner.steps[-1]] == [1, 7]


def test_a_prefix_is_found_again_and_its_hits_are_told(rig):
    for name in ("a", "b"):
        rig.generate(name, token_ids=range(1, 14), max_tokens=1)
        rig.turn(4)
    assert [o.num_cached_tokens for o in rig.outputs("a") + rig.outputs("b")] == [0, 12]


def test_logprobs_of_prompt_and_answer(rig):
    sampling = worker_pb2.SamplingConfig(top_p=1.0, repetition_penalty=1.0, num_logprobs=1, prompt_logprobs=True)
    rig.generate(token_ids=range(1, 14), sampling=sampling, max_tokens=2)
    rig.turn(5)
    first, second = rig.outputs()
    assert list(first.prompt_logprobs.token_ids[::2]) == list(range(2, 14))
    assert not second.HasField("prompt_logprobs")
    assert len(first.logprobs.token_ids) == len(second.logprobs.token_ids) == 2


def test_an_abort_frees_pages_in_every_state_and_only_for_its_own_router(rig):
    for turns in range(5):
        rig.generate(str(turns), token_ids=range(1, 19), max_tokens=10)
        rig.turn(turns)
        rig.abort(str(turns), session_id=2)
        rig.turn()
        assert rig.loop.requests.get(RequestRef(str(turns), 0))
        rig.abort(str(turns))
        rig.turn()
        assert rig.pool.counts().held == 0


def test_a_lost_router_takes_its_requests_along(rig):
    rig.generate("mine")
    rig.generate("theirs", session_id=2)
    rig.turn()
    rig.inbox.put(SessionClosed(1))
    rig.turn(7)
    assert rig.tokens("theirs", 2) == [7] * 4
    assert len(rig.loop.requests) == 0


def test_broken_logits_fail_their_request_only(rig):
    rig.runner.broken = {3}
    rig.generate("broken", token_ids=(3,) * 4)
    rig.generate("fine", token_ids=(1,) * 4)
    rig.turn(5)
    assert [e.ref.request_id for e in rig.ended(worker_pb2.CAUSE_NOT_FINITE)] == ["broken"]
    assert rig.tokens("fine") == [7] * 4


def test_steps_that_fail_are_retried_elsewhere_and_end_the_worker(rig):
    rig.runner.fail = True
    for number in range(MAX_FAILED_STEPS):
        rig.generate(str(number))
        if number < MAX_FAILED_STEPS - 1:
            rig.turn()
    with pytest.raises(RuntimeError, match="out of luck"):
        rig.turn()
    assert len(rig.ended(worker_pb2.CAUSE_STEP_FAILED)) == MAX_FAILED_STEPS


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"token_ids": (VOCAB,)}, "token ids must be in"),
        ({"max_tokens": 500}, "do not fit 32 pages"),
        ({"stop": worker_pb2.StopConfig(max_tokens=1, stop_token_ids=[-1])}, "stop_token_ids must be"),
    ],
)
def test_what_can_not_be_computed_is_refused(rig, changes, words):
    rig.generate(**changes)
    rig.turn()
    assert words in rig.sessions.of("refused")[0].message


def test_one_key_runs_once(rig):
    rig.generate()
    rig.generate()
    rig.turn()
    assert [r.message for r in rig.sessions.of("refused")] == ["request r, attempt 0, is known already"]


def test_a_prompt_that_is_too_late_is_given_up(rig):
    rig.generate(deadline_ms=1)
    rig.turn()
    rig.clock.advance(0.01)
    rig.turn()
    assert len(rig.ended(worker_pb2.CAUSE_DEADLINE)) == 1


def test_a_newcomer_hears_of_cache_and_load(rig):
    rig.generate(max_tokens=1)
    rig.turn(3)
    rig.sessions.events.clear()
    rig.inbox.put(SessionOpened(1))
    rig.turn()
    assert len(rig.sessions.of("cache")[0].added) == 2
    assert rig.sessions.of("load")[0].cached_pages == 2


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_preempted_answers_are_counted_and_keep_their_tokens(overlap):
    rig = Rig(num_pages=6, token_budget=20, overlap=overlap)
    for _ in range(20):
        rig.loop.scheduler.decodes.lengths.learn(2, 12)
    for name in "abc":
        rig.generate(name, token_ids=(ord(name) % 40,) * 7, max_tokens=12)
    rig.turn(60)
    assert {name: len(rig.tokens(name)) for name in "abc"} == dict.fromkeys("abc", 12)
    for name in "abc":
        assert [o.first_index for o in rig.outputs(name)] == list(range(12))
    counted = [
        rig.metrics.registry.get_sample_value("kvferry_preemptions_total", {"tier": "colocated", "repeated": repeated})
        for repeated in ("false", "true")
    ]
    preempted = sum(counted)
    assert preempted > 0
    assert rig.pool.num_available == 6


def test_a_drained_worker_runs_on_or_hands_over_and_ends():
    rig = Rig()
    rig.generate()
    rig.turn()
    rig.inbox.put(Drain(hand_over=False))
    rig.turn()
    rig.inbox.put(Drain(hand_over=True))
    while rig.loop.turn():
        pass
    [handed] = rig.ended(worker_pb2.CAUSE_DRAINING)
    assert list(handed.output_token_ids)
    assert rig.pool.counts().held == 0


def test_logprobs_of_a_prompt_do_not_hold_back_running_answers(monkeypatch):
    """They wait for the step that was just launched; tokens of the one before are out by then."""
    rig, log = Rig(overlap="on"), []
    rig.generate("running", token_ids=(1,) * 4, max_tokens=9)
    rig.turn(2)
    sampling = worker_pb2.SamplingConfig(top_p=1.0, repetition_penalty=1.0, num_logprobs=0, prompt_logprobs=True)
    rig.generate("new", token_ids=range(1, 9), sampling=sampling)
    monkeypatch.setattr(rig.sessions, "flush", lambda: log.append(f"{len(rig.tokens('running'))} tokens are out"))
    take = WorkerRequest.take_prompt_logits
    monkeypatch.setattr(
        WorkerRequest, "take_prompt_logits", lambda self, prompt: (log.append("wait"), take(self, prompt))[1]
    )
    rig.turn()
    assert log[:2] == ["2 tokens are out", "wait"]
