"""The router's request machine with scripted workers: no process, no socket."""

from __future__ import annotations

import dataclasses

import pytest

from protos import inference_pb2 as pb
from protos import worker_pb2 as wpb
from router.dispatch import LAST_NUMBERS_SECONDS
from router.metrics import RouterMetrics
from router.output_stream import Ended
from router.request import RequestState
from router.retries import FIRST_REST_SECONDS, MAX_FRUITLESS_ATTEMPTS
from rpc.errors import Internal, ResourceExhausted, Unavailable
from tests.router.rig import Rig, events, ids, make_link
from tests.scripted import FakeClock, make_ref

pytestmark = pytest.mark.asyncio


async def test_a_request_goes_reserve_prefill_decode_and_ends_with_final_numbers():
    rig = Rig()
    request = rig.submit()
    [p], [d] = rig.prefill, rig.decode
    [reserve] = rig.sent(d)
    assert reserve.reserve.writer.agent_name == "agent-p0"
    rig.reserved(request)
    assert rig.kinds(p) == ["prefill"]
    rig.tokens(request, p, 0, 11)
    rig.tokens(request, d, 1, 12, finish=pb.FINISH_REASON_LENGTH)
    assert ids(events(request)) == [11, 12]
    assert request.state is RequestState.RUNNING
    rig.transferred(request, p)
    assert events(request) == [Ended(None)]
    assert request.kv_transfer.bytes == 7
    assert rig.kinds(p) == rig.kinds(d) == []
    assert rig.dispatcher.num_running == 0


async def test_tokens_from_two_workers_are_put_in_order():
    rig = Rig()
    request = rig.submit()
    rig.reserved(request)
    rig.tokens(request, rig.decode[0], 1, 12)
    assert events(request) == []
    rig.tokens(request, rig.prefill[0], 0, 11)
    rig.tokens(request, rig.prefill[0], 0, 11)
    assert ids(events(request)) == [11, 12]


async def test_an_answer_that_ends_with_its_first_token_frees_decode_at_once():
    rig = Rig()
    request = rig.submit()
    rig.reserved(request)
    rig.sent(rig.decode[0])
    rig.tokens(request, rig.prefill[0], 0, 2, finish=pb.FINISH_REASON_STOP)
    assert rig.kinds(rig.decode[0]) == ["abort"]
    rig.transferred(request, rig.prefill[0])
    assert events(request)[-1] == Ended(None)


async def test_cancel_tells_both_legs_and_late_events_are_ignored():
    rig = Rig()
    request = rig.submit()
    rig.reserved(request)
    rig.sent(rig.decode[0])
    rig.dispatcher.cancel(request)
    rig.dispatcher.cancel(request)
    assert rig.kinds(rig.prefill[0]) == ["prefill", "abort"]
    assert rig.kinds(rig.decode[0]) == ["abort"]
    rig.tokens(request, rig.prefill[0], 0, 2)
    rig.reserved(request)
    assert ids(events(request)) == []
    assert rig.kinds(rig.prefill[0]) == []


async def test_a_prefill_worker_has_about_one_step_of_work_and_the_rest_waits_in_the_router():
    rig = Rig()
    requests = [rig.submit(num_tokens=40) for _ in range(5)]
    assert (rig.dispatcher.num_running, rig.dispatcher.num_queued) == (2, 3)
    rig.reserved(requests[0])
    rig.tokens(requests[0], rig.prefill[0], 0, 3)
    assert (rig.dispatcher.num_running, rig.dispatcher.num_queued) == (3, 2)


async def test_a_refused_request_waits_for_the_workers_next_report():
    rig = Rig()
    request = rig.submit()
    rig.sent(rig.decode[0])
    rig.refused(request)
    assert request.state is RequestState.QUEUED
    assert rig.kinds(rig.decode[0]) == []
    rig.report(rig.decode[0])
    assert rig.kinds(rig.decode[0]) == ["reserve"]


@pytest.mark.parametrize("tier", ["prefill", "decode"])
async def test_a_lost_worker_costs_an_attempt_not_a_token(tier):
    rig = Rig(prefill=2, decode=2)
    request = rig.submit()
    prefill, decode = request.prefill, request.decode
    rig.reserved(request, decode)
    rig.tokens(request, prefill, 0, 11)
    lost, other = (prefill, decode) if tier == "prefill" else (decode, prefill)
    rig.sent(other)
    rig.lose(lost)
    assert "abort" in rig.kinds(other)
    assert request.attempt == 1
    assert lost not in (request.prefill, request.decode)
    rig.reserved(request, request.decode)
    command = rig.sent(request.prefill)[-1]
    assert list(command.prefill.spec.token_ids)[-1] == 11
    assert command.prefill.spec.num_prompt_tokens == 20
    rig.tokens(request, request.prefill, 1, 12)
    assert ids(events(request)) == [11, 12]


async def test_a_lost_prefill_worker_does_not_matter_once_decode_runs():
    rig = Rig()
    request = rig.submit()
    rig.reserved(request)
    rig.tokens(request, rig.prefill[0], 0, 11)
    rig.tokens(request, rig.decode[0], 1, 12)
    rig.lose(rig.prefill[0])
    rig.tokens(request, rig.decode[0], 2, 13, finish=pb.FINISH_REASON_LENGTH)
    found = events(request)
    assert ids(found) == [11, 12, 13]
    assert found[-1] == Ended(None)


async def test_retries_are_bounded_and_take_their_time():
    """No retry storm: a step that fails again and again may be the request's fault; its error reaches the client."""
    rig = Rig()
    request = rig.submit()
    pauses = []
    for attempt in range(MAX_FRUITLESS_ATTEMPTS):
        if request.decode is None:
            pauses.append(rest(rig))
        assert request.attempt == attempt
        rig.ended(request, wpb.CAUSE_STEP_FAILED)
    [ended] = events(request)
    assert isinstance(ended.error, Internal)
    assert ended.error.message == "why"
    # The first retry is at once. Then each pause is drawn from half to one and a half of twice the one before.
    for number, pause in enumerate(pauses):
        assert 0.5 <= pause / (FIRST_REST_SECONDS * 2**number) <= 1.5
    assert len(pauses) == 3
    assert rig.dispatcher.num_queued == rig.dispatcher.num_running == 0


def rest(rig):
    """Lets a request rest for as long as it must. Returns how long that is."""
    [timer] = rig.clock.later
    pause = timer.due - rig.clock.now()
    rig.clock.advance(pause)
    return pause


async def test_a_connection_that_fails_is_tried_for_as_long_as_a_lost_worker_is_waited_for():
    rig = Rig(loss_seconds=3.0)
    request = rig.submit()
    started, attempts = rig.clock.now(), 0
    while request.state is not RequestState.FINISHED:
        if request.decode is None:
            rest(rig)
        rig.ended(request, wpb.CAUSE_TRANSFER_FAILED)
        attempts += 1
    [ended] = events(request)
    assert isinstance(ended.error, Unavailable)
    assert rig.clock.now() - started >= 3.0
    assert MAX_FRUITLESS_ATTEMPTS < attempts < 20


async def test_one_failed_connection_after_a_long_time_is_not_the_end():
    """What took long was computing and waiting, not failing."""
    rig = Rig(loss_seconds=0.05)
    request = rig.submit()
    rig.preempted(request)
    rig.ended(request, wpb.CAUSE_TRANSFER_FAILED)
    rest(rig)
    rig.clock.advance(100.0)
    rig.ended(request, wpb.CAUSE_TRANSFER_FAILED)
    rest(rig)
    assert request.state is RequestState.RESERVING


async def test_draining_workers_cost_a_request_no_failure():
    rig = Rig(loss_seconds=0.0)
    request = rig.submit()
    for _ in range(2 * MAX_FRUITLESS_ATTEMPTS):
        rig.ended(request, wpb.CAUSE_DRAINING)
    assert request.state is RequestState.RESERVING


@pytest.mark.parametrize(
    ("cause", "status", "counted"),
    [
        (wpb.CAUSE_NO_PAGES, None, "preempted"),
        (wpb.CAUSE_DRAINING, None, "draining"),
        (wpb.CAUSE_STEP_FAILED, None, "leg_failed"),
        (wpb.CAUSE_TRANSFER_FAILED, None, "leg_failed"),
        (wpb.CAUSE_UNSPECIFIED, None, "leg_failed"),
        (wpb.CAUSE_NOT_FINITE, "INTERNAL", None),
        (wpb.CAUSE_DEADLINE, "DEADLINE_EXCEEDED", None),
        (wpb.CAUSE_INVALID, "INVALID_ARGUMENT", None),
    ],
)
@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_what_a_cause_means_for_a_request(leg, cause, status, counted):
    rig = Rig()
    request = rig.submit()
    rig.reserved(request)
    rig.ended(request, cause, link=getattr(request, leg))
    if status is None:
        assert (request.state, request.attempt) == (RequestState.RESERVING, 1)
        labels = {"cause": counted}
        assert rig.metrics.registry.get_sample_value("kvferry_request_retries_total", labels) == 1
    else:
        assert events(request)[-1].error.code.name == status
    assert request.was_preempted == (leg == "decode" and cause == wpb.CAUSE_NO_PAGES)


@pytest.mark.parametrize("cause", [wpb.CAUSE_NO_PAGES, wpb.CAUSE_NO_SEQUENCES, wpb.CAUSE_DRAINING])
async def test_a_refused_reservation_is_no_attempt(cause):
    rig = Rig()
    request = rig.submit()
    rig.refused(request, cause)
    assert (request.state, request.attempt) == (RequestState.QUEUED, 0)


async def test_a_prompt_that_crosses_the_news_of_a_drain_continues_elsewhere():
    rig = Rig(prefill=2)
    request = rig.submit()
    rig.reserved(request)
    draining = request.prefill
    refused = wpb.RefusedEvent(ref=request.ref.to_proto(), cause=wpb.CAUSE_DRAINING, message="the worker is draining")
    rig.event(draining, state=wpb.WorkerStateEvent(state=wpb.WORKER_STATE_DRAINING, reason="it was told to end"))
    rig.event(draining, refused=refused)
    assert request.attempt == 1
    assert request.prefill is not draining
    assert rig.kinds(rig.decode[0]) == ["reserve", "abort", "reserve"]


async def test_a_command_that_a_worker_finds_invalid_ends_its_request():
    rig = Rig()
    request = rig.submit()
    refused = wpb.RefusedEvent(ref=request.ref.to_proto(), cause=wpb.CAUSE_INVALID, message="no such token")
    rig.event(rig.decode[0], refused=refused)
    assert events(request)[-1].error.message == "no such token"


async def test_decode_is_told_when_prefill_has_sent_everything():
    rig = Rig()
    request = rig.submit()
    rig.reserved(request)
    rig.tokens(request, rig.prefill[0], 0, 11)
    rig.sent(rig.decode[0])
    rig.transferred(request, rig.prefill[0])
    assert rig.kinds(rig.decode[0]) == ["transfer_done"]


async def test_further_answers_do_not_expire_once_the_first_has_begun():
    rig = Rig(max_queue_seconds=0.02)
    rig.decode[0].is_full = True
    sibling = rig.make_request()
    rig.dispatcher.submit(sibling, may_expire=False)
    rig.clock.advance(0.05)
    assert sibling.state is RequestState.QUEUED


async def test_a_request_that_rests_can_be_cancelled():
    rig = Rig()
    request = rig.submit()
    for _ in range(2):
        rig.ended(request, wpb.CAUSE_TRANSFER_FAILED)
    assert rig.dispatcher.num_queued == 1
    rig.dispatcher.cancel(request)
    assert rig.dispatcher.num_queued == 0
    rig.clock.advance(10.0)
    assert request.decode is None


async def test_without_workers_that_could_serve_a_request_is_refused_at_once():
    rig = Rig()
    rig.dispatcher.pool.remove(rig.decode[0])
    with pytest.raises(Unavailable, match="was given no prefill or no decode worker"):
        rig.submit()


async def test_a_router_that_was_just_started_waits_for_its_first_pair_but_not_for_ever():
    rig = Rig(loss_seconds=0.1)
    rig.prefill[0].peer_lost("agent-d0")
    early = rig.submit()
    assert early.state is RequestState.QUEUED
    rig.clock.advance(0.15)
    with pytest.raises(Unavailable, match="no pair of prefill and decode workers is ready"):
        rig.submit()


async def test_a_request_that_comes_just_after_the_last_pair_was_lost_waits_for_another():
    """A rolling restart of a small cluster: for a moment nobody is there."""
    rig = Rig(loss_seconds=0.1)
    rig.submit()
    rig.lose(rig.decode[0])
    late = rig.submit(num_tokens=5)
    assert late.state is RequestState.QUEUED
    rig.event(rig.decode[0], info=make_link(wpb.TIER_DECODE, "d0", tokenizer="hash").info)
    rig.prefill[0].peer_ready("agent-d0")
    rig.report(rig.decode[0])
    assert late.state is RequestState.RESERVING
    rig.lose(rig.decode[0])
    rig.clock.advance(0.15)
    with pytest.raises(Unavailable, match="no pair of prefill and decode workers is ready"):
        rig.submit()


async def test_a_request_that_lost_its_last_pair_waits_a_stated_time():
    rig = Rig(loss_seconds=0.05)
    request = rig.submit()
    rig.lose(rig.decode[0])
    assert request.state is RequestState.QUEUED
    rig.clock.advance(0.1)
    assert isinstance(events(request)[-1].error, Unavailable)
    assert rig.dispatcher.num_queued == 0


async def test_equal_workers_get_equal_shares():
    rig = Rig(prefill=2, decode=2)
    shares = {}
    for _ in range(400):
        request = rig.submit(num_tokens=64)
        for link in (request.prefill, request.decode):
            shares[link.address] = shares.get(link.address, 0) + 1
        rig.dispatcher.cancel(request)
    for tier in ("p", "d"):
        first, second = (n for address, n in sorted(shares.items()) if address.startswith(tier))
        assert abs(first - second) < 0.2 * 400


async def test_a_stop_string_found_between_two_attempts_ends_the_request():
    """Tokens of the old attempt are read while the new one waits: nothing of it runs, so nothing else would end it."""
    for state in (RequestState.QUEUED, RequestState.RESERVING):
        rig = Rig(decode=2)
        request = rig.submit()
        rig.reserved(request, request.decode)
        rig.tokens(request, rig.prefill[0], 0, 11)
        if state is RequestState.QUEUED:
            for link in rig.decode:
                link.is_full = True
        rig.lose(request.decode)
        assert request.state is state
        rig.dispatcher.complete(request)
        assert events(request)[-1] == Ended(None)
        assert rig.dispatcher.num_queued == rig.dispatcher.num_running == 0
        assert not any(link.legs for link in rig.prefill + rig.decode)


async def test_a_request_that_no_present_pair_can_hold_does_not_block_the_others():
    rig = Rig(decode=2, loss_seconds=0.05)
    rig.decode[1].info.limits.num_pages = 3
    large = rig.submit(num_tokens=20, max_tokens=200)
    assert large.decode is rig.decode[0]
    rig.lose(rig.decode[0])
    small = rig.submit(num_tokens=20, max_tokens=10)
    assert small.decode is rig.decode[1]
    rig.clock.advance(0.1)
    assert isinstance(events(large)[-1].error, Unavailable)


async def test_requests_that_lost_all_workers_do_not_wait_one_after_another():
    rig = Rig(loss_seconds=0.1)
    requests = [rig.submit(num_tokens=64) for _ in range(5)]
    rig.lose(rig.decode[0])
    rig.clock.advance(2 * 0.1)
    for request in requests:
        assert isinstance(events(request)[-1].error, Unavailable)


async def test_pairs_are_chosen_by_the_prefill_pool_too():
    rig = Rig(prefill=2)
    rig.prefill[0].info.limits.num_pages = 1
    for _ in range(10):
        assert rig.submit(num_tokens=40).prefill is rig.prefill[1]
        rig.prefill[1].legs.clear()


async def test_another_model_does_not_go_on_with_an_answer():
    rig = Rig(prefill=2, decode=2)
    request = rig.submit()
    other = next(link for link in rig.prefill if link is not request.prefill)
    other.info.fingerprint.weights_hash = "other"
    rig.reserved(request, request.decode)
    rig.tokens(request, request.prefill, 0, 11)
    rig.lose(request.prefill)
    assert request.state is RequestState.QUEUED


@pytest.mark.parametrize("lost", ["prefill", "decode"])
async def test_another_model_may_begin_an_answer_that_has_no_token_yet(lost):
    """In a rollout, requests that the old generation took and did not begin are the new one's."""
    rig = Rig(prefill=2, decode=2)
    request = rig.submit()
    other = next(link for link in rig.prefill if link is not request.prefill)
    other.info.fingerprint.weights_hash = "other"
    for prefill in rig.prefill:
        prefill.ready_peers.clear()
    request.prefill.peer_ready(request.decode.agent_name)
    other.peer_ready(next(d.agent_name for d in rig.decode if d is not request.decode))
    rig.reserved(request, request.decode)
    if lost == "decode":  # its token may come before the first one, and goes with it
        rig.tokens(request, request.decode, 1, 12)
    rig.lose(getattr(request, lost))
    assert request.state is not RequestState.QUEUED
    assert request.prefill is other
    rig.reserved(request, request.decode)
    rig.tokens(request, other, 0, 21)
    rig.tokens(request, request.decode, 1, 22)
    assert ids(events(request)) == [21, 22]


@pytest.mark.parametrize(("limit", "fits"), [("max_model_len", 29), ("vocab_size", 99)])
async def test_workers_of_another_generation_may_take_less_than_a_request_was_checked_for(limit, fits):
    """It waits for workers that can take all of it, and is not sent where it would be refused or go too far."""
    rig = Rig(prefill=1, decode=1)
    setattr(rig.prefill[0].info.limits, limit, fits)
    request = rig.make_request(num_tokens=20, max_tokens=10)
    request.checked = dataclasses.replace(request.checked, vocab_size=100)
    rig.dispatcher.submit(request)
    assert request.state is RequestState.QUEUED
    setattr(rig.prefill[0].info.limits, limit, fits + 1)
    if limit == "max_model_len":
        rig.prefill[0].info.limits.vocab_size = 100
    rig.report(rig.prefill[0])
    assert request.state is RequestState.RESERVING


async def test_attempts_that_bring_tokens_are_not_counted_against_a_long_answer():
    rig = Rig(decode=2)
    request = rig.submit(max_tokens=100)
    for index in range(3 * MAX_FRUITLESS_ATTEMPTS):
        rig.reserved(request, request.decode)
        rig.tokens(request, request.prefill, index, 50 + index)
        rig.ended(request, wpb.CAUSE_TRANSFER_FAILED)
    assert len(ids(events(request))) == 3 * MAX_FRUITLESS_ATTEMPTS


async def test_a_full_queue_refuses_at_once():
    rig = Rig()
    rig.decode[0].is_full = True
    for _ in range(1024):
        rig.submit()
    with pytest.raises(ResourceExhausted, match="1024 requests wait"):
        rig.submit()


async def test_priority_then_arrival_decide_the_order():
    rig = Rig()
    rig.decode[0].is_full = True
    requests = [rig.submit(priority=p) for p in (0, 0, 5, -1, 5)]
    rig.decode[0].is_full = False
    assert rig.dispatcher.waiting == [requests[i] for i in (2, 4, 0, 1, 3)]


async def test_short_prompts_overtake_long_ones_with_bounded_slowdown_but_not_for_ever():
    rig = Rig()
    rig.prefill[0].info.limits.slowdown = 4
    long = rig.submit(num_tokens=1000)
    short = rig.submit(num_tokens=10)
    assert (long.state, short.state) == (RequestState.RESERVING, RequestState.RESERVING)
    waiting = rig.submit(num_tokens=900)
    assert waiting.state is RequestState.QUEUED
    later = rig.submit(num_tokens=20)
    assert later.state is RequestState.RESERVING
    # After 4 times its length of arriving work, the long one is before new short ones.
    for _ in range(100):
        last = rig.submit(num_tokens=60)
    assert waiting.order < last.order


async def test_a_request_that_was_handed_back_goes_on_ahead_of_new_ones():
    rig = Rig()
    [p], [d] = rig.prefill, rig.decode
    request = rig.submit(num_tokens=40)
    rig.reserved(request)
    rig.tokens(request, p, 0, 11)
    rig.transferred(request, p)
    rig.tokens(request, d, 1, 12)
    d.is_full = True
    waiting = rig.submit(priority=0)
    rig.sent(d)
    rig.preempted(request, 11, 12)
    assert rig.dispatcher.waiting == [request, waiting]
    assert rig.kinds(d) == [], "decode let go by itself: nothing to abort"
    rig.report(d)
    [reserve, _] = rig.sent(d)
    assert list(reserve.reserve.spec.token_ids) == [5] * 40 + [11, 12]
    assert (reserve.reserve.spec.num_prompt_tokens, reserve.reserve.ref.attempt) == (40, 1)
    assert reserve.reserve.spec.was_preempted
    rig.reserved(request)
    rig.tokens(request, p, 2, 13)
    assert ids(events(request)) == [11, 12, 13]


async def test_the_first_token_may_come_with_the_hand_back_and_late_from_prefill():
    rig = Rig()
    [p], [d] = rig.prefill, rig.decode
    request = rig.submit()
    rig.reserved(request)
    rig.tokens(request, d, 1, 12)
    rig.preempted(request, 11, 12)
    late = wpb.TokenOutput(ref=make_ref(request.wire_id), first_index=0, token_ids=[99])
    rig.event(p, step_output=wpb.StepOutput(outputs=[late]))  # of the attempt that is over
    assert ids(events(request)) == [11, 12]
    assert rig.sent(d)[-1].reserve.ref.attempt == 1


async def test_tokens_without_their_logprobs_are_computed_again():
    rig = Rig()
    request = rig.submit(num_logprobs=2)
    rig.reserved(request)
    rig.tokens(request, rig.decode[0], 1, 12)
    rig.preempted(request, 11, 12)
    assert ids(events(request)) == []
    assert list(rig.sent(rig.decode[0])[-1].reserve.spec.token_ids) == [5] * 20


async def test_prompt_logprobs_are_asked_for_until_they_came():
    rig = Rig(prefill=2)
    request = rig.submit(num_logprobs=0, prompt_logprobs=True)
    first = request.prefill
    rig.reserved(request)
    assert rig.sent(first)[0].prefill.spec.sampling.prompt_logprobs
    rig.lose(first)
    rig.reserved(request)
    second = request.prefill
    assert rig.sent(second)[-1].prefill.spec.sampling.prompt_logprobs
    rig.tokens(request, second, 0, 11)
    rig.preempted(request, 11)
    rig.reserved(request)
    assert not rig.sent(request.prefill)[-1].prefill.spec.sampling.prompt_logprobs


async def test_tokens_of_a_slow_reader_are_merged_in_order():
    rig = Rig()
    request = rig.submit(max_tokens=100)
    rig.reserved(request)
    rig.tokens(request, rig.prefill[0], 0, 10)
    for index in range(1, 20):
        rig.tokens(request, rig.decode[0], index, 10 + index)
    [tokens] = events(request)
    assert tokens.token_ids == tuple(range(10, 30))


async def test_a_reader_that_is_too_slow_loses_its_request_and_frees_the_workers():
    rig = Rig(max_unread_tokens=5)
    request, other = rig.submit(max_tokens=100), rig.submit(max_tokens=100)
    for r in (request, other):
        rig.reserved(r)
        rig.tokens(r, rig.prefill[0], 0, 10)
    rig.sent(rig.decode[0])
    for index in range(1, 7):
        rig.tokens(request, rig.decode[0], index, 11)
        rig.tokens(other, rig.decode[0], index, 11)
        assert len(ids(events(other))) == (2 if index == 1 else 1)
    [ended] = events(request)
    assert isinstance(ended.error, ResourceExhausted)
    assert "6 tokens wait for it, 5 may" in ended.error.message
    assert rig.kinds(rig.decode[0]) == ["abort"]
    assert rig.metrics.registry.get_sample_value("kvferry_slow_readers_total") == 1
    assert request.output.num_waiting == 0


async def test_a_stop_string_in_older_tokens_ends_a_request_whatever_crosses_it():
    """A slow client: the router finds the stop while the next attempt is about to bring tokens."""
    rig = Rig()
    [p], [d] = rig.prefill, rig.decode
    request = rig.submit()
    rig.reserved(request)
    rig.tokens(request, p, 0, 11)
    rig.transferred(request, p)
    rig.preempted(request, 11)
    rig.reserved(request)
    assert request.state is RequestState.RUNNING
    rig.dispatcher.complete(request)
    rig.tokens(request, p, 1, 12)
    rig.transferred(request, p)
    assert request.state is RequestState.FINISHED
    assert events(request)[-1] == Ended(None)
    assert rig.dispatcher.num_running == 0
    assert request.output_token_ids == [11]
    assert not d.legs


@pytest.mark.parametrize("how", ["a stop string", "the first token"])
async def test_the_end_of_an_output_does_not_wait_for_ever_for_numbers(how):
    """Its prefill worker never tells what was moved."""
    rig = Rig()
    request = rig.submit()
    rig.reserved(request)
    if how == "a stop string":
        rig.tokens(request, rig.prefill[0], 0, 11)
        rig.dispatcher.complete(request)
    else:
        rig.tokens(request, rig.prefill[0], 0, 11, finish=pb.FINISH_REASON_STOP)
    assert request.state is RequestState.RUNNING
    rig.clock.advance(LAST_NUMBERS_SECONDS)
    assert events(request)[-1] == Ended(None)
    assert rig.dispatcher.num_running == 0


async def test_cached_tokens_are_the_prompts_whatever_a_resumed_attempt_finds():
    rig = Rig()
    [p], [d] = rig.prefill, rig.decode
    request = rig.submit(num_tokens=20)

    def first_output(index, token, num_cached):
        event = wpb.ReservedEvent(ref=request.ref.to_proto(), num_cached_tokens=num_cached)
        rig.event(d, reserved=event)
        output = wpb.TokenOutput(
            ref=request.ref.to_proto(), first_index=index, token_ids=[token], num_cached_tokens=num_cached,
            num_chunks=1,
        )  # fmt: skip
        rig.event(p, step_output=wpb.StepOutput(outputs=[output]))

    first_output(0, 11, 16)
    rig.preempted(request, *range(11, 200))
    first_output(189, 12, 160)
    assert (request.num_cached_tokens, request.kv_transfer.decode_cached_tokens) == (16, 16)


async def test_hand_backs_before_the_first_token_do_not_count_as_fruitless():
    rig = Rig()
    request = rig.submit()
    for _ in range(2 * MAX_FRUITLESS_ATTEMPTS):
        rig.reserved(request)
        rig.preempted(request)
    assert request.state is RequestState.RESERVING


async def test_prompt_logprobs_survive_a_hand_back_that_overtakes_them():
    rig = Rig()
    request = rig.submit(prompt_logprobs=True)
    rig.reserved(request)
    rig.preempted(request, 11)
    assert request.output_token_ids == []
    assert request.sampling.prompt_logprobs


async def test_cached_pages_do_not_make_a_decode_worker_look_busy():
    rig = Rig(decode=2)
    idle, busy = rig.decode
    rig.report(idle, free_pages=0, cached_pages=400)
    rig.report(busy, free_pages=120, held_pages=280, expected_growth_pages=60)
    for _ in range(10):
        assert rig.submit().decode is idle
        idle.legs.clear()
        rig.prefill[0].legs.clear()


async def test_announced_answers_count_in_the_queue():
    rig = Rig(max_queue_requests=4)
    rig.dispatcher.room.announce(3, 20)
    rig.dispatcher.check_room(1, 20)
    with pytest.raises(ResourceExhausted, match="3 requests wait, 4 may"):
        rig.dispatcher.check_room(2, 20)


def with_prefix(rig, keys):
    """A request whose prompt's pages have these keys."""
    request = rig.make_request(num_tokens=16 * len(keys) + 4)
    request.checked = dataclasses.replace(request.checked, page_size=16, page_keys=tuple(keys))
    rig.dispatcher.submit(request)
    return request


async def test_prompts_go_where_their_pages_are():
    rig = Rig(prefill=3, decode=2)
    keys = [bytes([n]) * 16 for n in range(3)]
    rig.prefill[1].cached_pages = set(keys)
    rig.decode[1].cached_pages = set(keys[:2])
    for _ in range(5):
        request = with_prefix(rig, keys)
        assert (request.prefill, request.decode) == (rig.prefill[1], rig.decode[1])
        assert request.legs[0].num_uncached_tokens == 4
        rig.dispatcher.cancel(request)


async def test_a_cache_does_not_outweigh_any_queue():
    rig = Rig(prefill=2)
    keys = [bytes([n]) * 16 for n in range(3)]
    rig.prefill[1].cached_pages = set(keys)
    rig.prefill[1].load.queued_tokens = 60  # more than the 48 tokens that the cache saves
    assert with_prefix(rig, keys).prefill is rig.prefill[0]


async def test_only_pages_from_the_beginning_count_and_only_of_the_same_size():
    rig = Rig(prefill=2)
    keys = [bytes([n]) * 16 for n in range(3)]
    rig.prefill[1].cached_pages = set(keys[1:])
    request = with_prefix(rig, keys)
    assert request.legs[0].num_uncached_tokens == 52
    rig.dispatcher.cancel(request)
    for link in rig.prefill:
        link.cached_pages = set(keys)
        link.info.limits.page_size = 32
    assert with_prefix(rig, keys).legs[0].num_uncached_tokens == 52


async def test_a_worker_that_restarts_is_believed_to_have_nothing():
    """Casebook C152."""
    rig = Rig()
    rig.prefill[0].cached_pages = {b"x" * 16}
    rig.event(rig.prefill[0], info=make_link(wpb.TIER_PREFILL, "p0", tokenizer="hash").info)
    assert rig.prefill[0].cached_pages == set()


async def test_the_queue_is_bounded_by_tokens_but_one_prompt_may_always_wait():
    rig = Rig(max_queue_tokens=100)
    rig.decode[0].is_full = True
    rig.submit(num_tokens=300)
    with pytest.raises(ResourceExhausted, match="300 prompt tokens wait, 100 may; this request has 20"):
        rig.submit(num_tokens=20)
    rig.dispatcher.cancel(rig.dispatcher.waiting[0])
    for _ in range(5):
        rig.submit(num_tokens=20)
    with pytest.raises(ResourceExhausted, match="100 prompt tokens wait"):
        rig.submit(num_tokens=1)
    rig.dispatcher.cancel(rig.dispatcher.waiting[0])
    rig.dispatcher.room.announce(3, 10)
    with pytest.raises(ResourceExhausted, match="110 prompt tokens wait, 100 may"):
        rig.submit(num_tokens=1)


async def test_waiting_too_long_for_a_first_worker_is_refused_and_running_long_is_not():
    """Casebook C137, C139."""
    rig = Rig(max_queue_seconds=0.05)
    running = rig.submit()
    rig.reserved(running)
    rig.tokens(running, rig.prefill[0], 0, 11)
    rig.decode[0].is_full = True
    waiting = rig.submit()
    rig.clock.advance(0.05)
    [ended] = events(waiting)
    assert isinstance(ended.error, ResourceExhausted)
    assert ended.error.message == "no worker was free within 0.05 s"
    assert running.state is RequestState.RUNNING
    rig.preempted(running, 11)
    rig.clock.advance(0.1)
    assert running.state is RequestState.QUEUED, "it was begun, so it may wait"


def make_colocated(rig, max_num_sequences=2):
    link = make_link(wpb.TIER_COLOCATED, "c0")
    link.info.limits.max_num_sequences = max_num_sequences
    rig.dispatcher.pool.links.append(link)
    return link


async def test_a_colocated_worker_serves_with_one_leg_and_frees_its_place_when_done():
    rig = Rig(prefill=0, decode=0)
    link = make_colocated(rig)
    requests = [rig.submit() for _ in range(3)]
    assert rig.kinds(link) == ["generate", "generate"]
    assert requests[2].state is RequestState.QUEUED
    first = requests[0]
    rig.tokens(first, link, 0, 11)
    rig.tokens(first, link, 1, 12, finish=pb.FINISH_REASON_STOP)
    assert events(first)[-1] == Ended(None)
    [command] = rig.sent(link)
    assert command.generate.ref.request_id == requests[2].wire_id, "no load report is needed for that"
    rig.dispatcher.cancel(requests[1])
    assert rig.kinds(link) == ["abort"]


async def test_pairs_and_colocated_workers_take_over_from_each_other():
    rig = Rig()
    link = make_colocated(rig)
    rig.decode[0].is_full = True
    request = rig.submit()
    rig.tokens(request, link, 0, 11)
    rig.decode[0].is_full = False
    rig.lose(link)
    assert request.decode is rig.decode[0]
    rig.reserved(request)
    rig.tokens(request, rig.prefill[0], 1, 12)
    assert ids(events(request)) == [11, 12]


async def test_a_deadline_that_can_not_be_met_is_refused_at_once_if_asked_for():
    rig = Rig(prefill=2, deadline_admission="predictive")
    rig.dispatcher.check_room(1, 10**6, deadline_seconds=0.1)  # no rate is known yet
    for link in rig.prefill:
        link.load.tokens_per_second = 500.0
    rig.prefill[0].load.queued_tokens = 1000
    rig.dispatcher.check_room(1, 1000, deadline_seconds=3.1)
    with pytest.raises(ResourceExhausted, match=r"would take 3\.0 s at the measured rate, the deadline leaves 2\.9 s"):
        rig.dispatcher.check_room(1, 1000, deadline_seconds=2.9)
    rig.dispatcher.check_room(1, 10**6)
    Rig(prefill=1).dispatcher.check_room(1, 10**6, deadline_seconds=0.1)


async def test_the_next_prompt_is_bound_while_the_last_chunk_of_the_one_before_is_computed():
    """A prefill worker must not run dry between two prompts: what counts is what it has left, not what it was sent."""
    rig = Rig()
    [p] = rig.prefill
    first = rig.submit(num_tokens=100)
    rig.reserved(first)
    second = rig.submit(num_tokens=100)
    assert second.state is RequestState.QUEUED
    rig.report(p, running_tokens=100)
    assert second.state is RequestState.QUEUED, "the report is older than the prompt"
    rig.report(p, running_tokens=90, num_prompts_received=1)
    assert second.state is RequestState.QUEUED, "more than a step is left"
    rig.report(p, running_tokens=40, num_prompts_received=1)
    assert second.state is RequestState.RESERVING
    third = rig.submit(num_tokens=30)
    assert third.state is RequestState.QUEUED, "the second one is bound, though the worker has not heard of it"


async def test_a_deadline_without_end_is_no_overflow():
    rig = Rig()
    for seconds in (float("inf"), 1e300):
        request = rig.make_request()
        request.deadline = rig.clock.now() + seconds
        rig.dispatcher.submit(request)
        assert rig.sent(rig.decode[0])[-1].reserve.spec.deadline_ms > 0
        rig.dispatcher.cancel(request)


async def test_a_defect_in_binding_costs_its_request_only():
    rig = Rig()
    bad, good = rig.make_request(), rig.make_request()
    bad.remaining_ms = lambda: 1 / 0
    rig.dispatcher.submit(bad)
    rig.dispatcher.submit(good)
    [ended] = events(bad)
    assert ended.error.code.name == "INTERNAL"
    assert good.state is RequestState.RESERVING


async def test_a_request_that_was_refused_after_its_time_does_not_wait_on():
    rig = Rig(max_queue_seconds=0.05)
    request = rig.submit()
    rig.clock.advance(0.1)
    rig.refused(request)
    assert isinstance(events(request)[-1].error, ResourceExhausted)


async def test_only_complete_answers_teach_lengths():
    rig = Rig()
    request = rig.submit()
    rig.reserved(request)
    rig.tokens(request, rig.prefill[0], 0, 11)
    rig.sent(rig.decode[0])
    rig.dispatcher.complete(request)
    assert rig.sent(rig.decode[0])[0].abort.is_complete
    other = rig.submit()
    rig.reserved(other)
    rig.sent(rig.decode[0])
    rig.dispatcher.cancel(other)
    assert not rig.sent(rig.decode[0])[0].abort.is_complete


async def test_stages_are_in_order_whatever_the_messages_way_took():
    rig = Rig()
    request = rig.submit()
    stages = [wpb.STAGE_PREFILL_STARTED, wpb.STAGE_PREFILL_FINISHED, wpb.STAGE_DECODE_STARTED, wpb.STAGE_FINISHED]
    for number, milliseconds in enumerate((5, 9, 8, 20)):
        setattr(request.timings, f"{wpb.Stage.Name(stages[number])[6:].lower()}_ms", milliseconds)
    timings = request.ordered_timings()
    assert timings.prefill_started_ms == 5
    assert timings.prefill_finished_ms == timings.decode_started_ms == 8
    assert (timings.finished_ms, timings.transfer_finished_ms) == (20, 0)


class TestWhatTheQueueWaitsFor:
    """Autoscalers grow a tier for what waits for it: prefill must not grow because decode is full."""

    def waiting(self, rig):
        """(what for, prompt tokens) as told last."""
        rig.report(rig.prefill[0], num_prompts_received=0)
        return rig.metrics.queue

    async def test_for_prefill_while_it_has_a_step_of_work_and_decode_has_room(self):
        rig = Rig()
        rig.submit(num_tokens=70)
        rig.submit(num_tokens=30)
        assert self.waiting(rig) == ("prefill", 30)

    async def test_for_decode_while_all_of_it_has_refused(self):
        rig = Rig()
        request = rig.submit(num_tokens=70)
        rig.submit(num_tokens=30)
        rig.refused(request)
        assert self.waiting(rig) == ("decode", 100)

    async def test_for_decode_that_takes_no_more_sequences_though_it_has_pages(self):
        rig = Rig()
        rig.submit(num_tokens=70)
        rig.submit(num_tokens=30)
        rig.decode[0].load.num_sequences = rig.decode[0].info.limits.max_num_sequences
        assert self.waiting(rig) == ("decode", 30)

    async def test_for_prefill_only_as_far_as_decode_has_pages(self):
        rig = Rig()
        rig.submit(num_tokens=70)
        for _ in range(4):
            rig.submit(num_tokens=30)
        rig.report(rig.decode[0], free_pages=6, expected_growth_pages=2)
        assert self.waiting(rig) == ("prefill", 4 * 16)  # of 120 tokens

    async def test_for_workers_while_there_is_no_pair(self):
        rig = Rig()
        rig.submit(num_tokens=70)
        rig.submit(num_tokens=30)
        rig.lose(rig.decode[0])
        kind, _ = self.waiting(rig)
        assert kind == "workers"

    async def test_tokens_count_for_as_long_as_they_wait(self):
        clock = FakeClock()
        metrics = RouterMetrics(clock.now)
        for seconds, queue in ((0, ("prefill", 100)), (2, ("decode", 50)), (3, ("prefill", 0))):
            clock.advance(seconds)
            metrics.set_queue(*queue)
        values = {
            waits_for: metrics.registry.get_sample_value("kvferry_queued_token_seconds_total", {"waits_for": waits_for})
            for waits_for in ("prefill", "decode", "workers")
        }
        assert values == {"prefill": 200.0, "decode": 150.0, "workers": 0.0}
