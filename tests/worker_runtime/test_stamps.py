"""Stages are sent once, with their age."""

from __future__ import annotations

from protos import worker_pb2 as wpb
from tests.scripted import FakeClock
from worker_runtime.stamps import Stamps


def taken(stamps):
    return [(stamp.stage, stamp.age_us) for stamp in stamps.take()]


def test_ages_are_microseconds_since_the_stage():
    clock = FakeClock()
    stamps = Stamps(clock.now)
    stamps.reach(wpb.STAGE_PREFILL_STARTED)
    clock.advance(2.0)
    stamps.reach(wpb.STAGE_PREFILL_FINISHED)
    clock.advance(0.5)
    assert taken(stamps) == [(wpb.STAGE_PREFILL_STARTED, 2_500_000), (wpb.STAGE_PREFILL_FINISHED, 500_000)]


def test_each_stage_is_sent_once():
    stamps = Stamps(FakeClock().now)
    assert taken(stamps) == []
    stamps.reach(wpb.STAGE_PREFILL_STARTED)
    assert taken(stamps) == [(wpb.STAGE_PREFILL_STARTED, 0)]
    stamps.reach(wpb.STAGE_PREFILL_STARTED)
    assert taken(stamps) == []
    stamps.reach(wpb.STAGE_FINISHED)
    assert taken(stamps) == [(wpb.STAGE_FINISHED, 0)]


def test_only_the_first_time_counts():
    clock = FakeClock()
    stamps = Stamps(clock.now)
    stamps.reach(wpb.STAGE_DECODE_STARTED)
    clock.advance(1.0)
    stamps.reach(wpb.STAGE_DECODE_STARTED)
    assert taken(stamps) == [(wpb.STAGE_DECODE_STARTED, 1_000_000)]
