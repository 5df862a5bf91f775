"""Metrics against timelines made by hand. Casebook kind (k)."""

from __future__ import annotations

import json

import pytest

from benchmarks.metrics import Slo, summarise, wilson_interval
from benchmarks.records import RequestRecord


def make_record(sent=0.0, tokens=(), status="OK", prompt_tokens=10, **options):
    """tokens: arrival times."""
    return RequestRecord(
        scheduled=sent, sent=sent, token_times=list(tokens), ended=max(tokens, default=sent), status=status,
        prompt_tokens=prompt_tokens, output_tokens=len(tokens), **options,
    )  # fmt: skip


def test_a_timeline_gives_the_numbers_that_one_counts_by_hand():
    record = make_record(1.0, (1.2, 1.3, 1.5, 1.5))
    assert record.ttft == pytest.approx(0.2)
    assert record.itls == pytest.approx([0.1, 0.2, 0.0])
    assert record.tpot == pytest.approx(0.1)
    assert record.e2e == pytest.approx(0.5)
    summary = summarise([record, make_record(1.0, (2.0,))], 2.0)
    assert summary["mean_ttft_ms"] == pytest.approx(600)
    assert summary["mean_itl_ms"] == pytest.approx(100)
    assert summary["total_output_tokens"] == 5
    assert summary["output_throughput"] == pytest.approx(2.5)
    assert summary["request_throughput"] == pytest.approx(1.0)


def test_tokens_of_one_message_are_tokens_not_one_message():
    """Casebook C161: four tokens per message, every 0.1 s."""
    record = make_record(0.0, [0.1 * (1 + n // 4) for n in range(40)])
    summary = summarise([record], 1.0)
    assert summary["total_output_tokens"] == 40
    assert summary["peak_output_throughput"] >= summary["output_throughput"]
    assert summary["mean_tpot_ms"] == pytest.approx(900 / 39)
    assert summary["p50_itl_ms"] == 0


@pytest.mark.parametrize("tokens", [(), (0.5,)])
def test_answers_of_no_or_one_token_have_no_tpot_and_no_nan(tokens):
    """Casebook C163."""
    summary = summarise([make_record(0.0, tokens)], 1.0, Slo(1000, 100))
    assert summary["mean_tpot_ms"] is summary["p99_itl_ms"] is None
    json.dumps(summary, allow_nan=False)
    assert summary["slo_attainment"] == (1.0 if tokens else 0.0)


def test_no_request_and_no_time_give_no_number_and_no_error():
    """Casebook C163."""
    for records in ([], [make_record(status="UNAVAILABLE")]):
        summary = summarise(records, 0.0, Slo(1, 1))
        json.dumps(summary, allow_nan=False)
        assert summary["request_throughput"] is None
    assert summarise([], 0.0, Slo(1, 1))["slo_attainment"] is None


def test_failed_requests_are_shown_by_status_and_count_as_missed():
    """Casebook C168: 30 % refused."""
    records = [make_record(0.0, (0.1, 0.2)) for _ in range(7)]
    records += [make_record(status="RESOURCE_EXHAUSTED") for _ in range(2)] + [make_record(status="INTERNAL")]
    summary = summarise(records, 1.0, Slo(500, 500))
    assert (summary["offered"], summary["completed"], summary["failed"]) == (10, 7, 3)
    assert summary["statuses"] == {"OK": 7, "RESOURCE_EXHAUSTED": 2, "INTERNAL": 1}
    assert summary["slo_attainment"] == pytest.approx(0.7)
    assert summary["request_goodput"] == pytest.approx(7.0)
    assert summary["offered_per_s"] == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("tokens", "status", "met"),
    [
        ((0.4, 0.5, 0.6), "OK", True),
        ((0.6, 0.7, 0.8), "OK", False),
        ((0.4, 0.5, 0.9), "OK", False),
        ((0.4,), "OK", True),
        ((0.4, 0.5), "CANCELLED", False),
        ((), "OK", False),
    ],
)
def test_an_slo_is_met_by_whole_answers_in_time_only(tokens, status, met):
    assert Slo(ttft_ms=500, tpot_ms=200).is_met(make_record(0.0, tokens, status)) is met


def test_a_generator_that_falls_behind_says_so():
    late = make_record(5.0, (5.1,))
    late.scheduled = 4.0
    summary = summarise([late, make_record(1.0, (1.1,))], 2.0)
    assert summary["late_requests"] == 1
    assert summary["max_lag_ms"] == pytest.approx(1000)


def test_the_peak_is_over_any_second():
    record = make_record(0.0, [0.9, 1.0, 1.1, 1.2, 5.0])
    assert summarise([record], 6.0)["peak_output_throughput"] == 4


def test_wilson_intervals_are_those_of_the_textbook():
    low, high = wilson_interval(9, 10)
    assert (low, high) == (pytest.approx(0.596, abs=1e-3), pytest.approx(0.982, abs=1e-3))
    assert wilson_interval(0, 0) == (0.0, 1.0)
    assert wilson_interval(10, 10)[1] == pytest.approx(1.0)
