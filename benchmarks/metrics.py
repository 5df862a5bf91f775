"""From records to numbers. Names as in `vllm bench serve` where it has them; an unknown value is None, never NaN.

Attainment counts *offered* requests, so refused and failed ones count as missed; latencies count requests that got a
token, throughput counts completed requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import binomtest

from benchmarks.records import RequestRecord

PERCENTILES = (50, 90, 95, 99)
LATE_SECONDS = 0.1
"""A request sent later than this counts as late: the generator fell behind."""


@dataclass(frozen=True)
class Slo:
    """What a request has to meet. None: no demand."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def is_met(self, record: RequestRecord) -> bool:
        """Whether the output is complete and in time. An output of one token meets any TPOT limit; an output of several
        tokens that came all at once has no TPOT, and misses it."""
        if not record.is_ok or record.ttft is None:
            return False
        if self.ttft_ms is not None and record.ttft * 1e3 > self.ttft_ms:
            return False
        if self.tpot_ms is None or record.output_tokens < 2:
            return True
        return record.tpot is not None and record.tpot * 1e3 <= self.tpot_ms


def summarise(records: Iterable[RequestRecord], duration: float, slo: Slo | None = None) -> dict[str, Any]:
    """All numbers of a run. duration: seconds from the first request's schedule to the last token."""
    records = list(records)
    done = [record for record in records if record.is_ok]
    per_second = (lambda number: number / duration) if duration > 0 else (lambda number: None)
    output_tokens = sum(record.output_tokens for record in done)
    input_tokens = sum(record.prompt_tokens for record in done)
    result: dict[str, Any] = {
        "offered": len(records),
        "completed": len(done),
        "failed": len(records) - len(done),
        "statuses": dict(Counter(record.status or "unfinished" for record in records)),
        "duration": duration,
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "total_cached_tokens": sum(record.cached_tokens for record in done),
        "cached_share": sum(record.cached_tokens for record in done) / input_tokens if input_tokens else None,
        "total_kv_bytes": sum(record.kv_bytes for record in done),
        "offered_per_s": per_second(len(records)),
        "request_throughput": per_second(len(done)),
        "output_throughput": per_second(output_tokens),
        "total_token_throughput": per_second(input_tokens + output_tokens),
        "peak_output_throughput": _peak_throughput(records),
        "late_requests": sum(record.lag > LATE_SECONDS for record in records),
        "max_lag_ms": max((record.lag for record in records), default=0.0) * 1e3,
        "itl_counts_messages": any(record.counts_messages for record in records),
    }
    for name, seconds in (
        ("ttft", [r.ttft for r in records if r.ttft is not None]),
        ("tpot", [r.tpot for r in records if r.tpot is not None]),
        ("itl", [gap for r in records for gap in r.itls]),
        ("e2el", [r.e2e for r in records if r.e2e is not None]),
    ):
        result |= _distribution(name, seconds)
        if name != "itl":
            result[f"left_out_of_{name}"] = len(records) - len(seconds)
    if slo is not None:
        met = sum(slo.is_met(record) for record in records)
        result["slo"] = {"ttft_ms": slo.ttft_ms, "tpot_ms": slo.tpot_ms}
        result["slo_attainment"] = met / len(records) if records else None
        result["request_goodput"] = per_second(met)
    return result


def _distribution(name: str, seconds: list[float]) -> dict[str, float | None]:
    """Mean, median, standard deviation and percentiles in milliseconds."""
    names = [f"mean_{name}_ms", f"median_{name}_ms", f"std_{name}_ms", *(f"p{p}_{name}_ms" for p in PERCENTILES)]
    if not seconds:
        return dict.fromkeys(names)
    ms = np.asarray(seconds) * 1e3
    values = [ms.mean(), np.median(ms), ms.std(), *np.percentile(ms, PERCENTILES)]
    return {key: float(value) for key, value in zip(names, values, strict=True)}


def _peak_throughput(records: list[RequestRecord]) -> float | None:
    """Most output tokens received within one second."""
    times = np.sort([t for record in records for t in record.token_times])
    if not len(times):
        return None
    return float(np.max(np.searchsorted(times, times + 1.0) - np.arange(len(times))))


def wilson_interval(met: int, offered: int) -> tuple[float, float]:
    """95 % confidence interval of a share (Wilson 1927)."""
    if offered == 0:
        return 0.0, 1.0
    interval = binomtest(met, offered).proportion_ci(0.95, method="wilson")
    return float(interval.low), float(interval.high)
