"""Sends a load: open loop (each request at its arrival time) or closed loop (a fixed number in flight)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np

from benchmarks.records import RequestRecord
from benchmarks.targets import Target
from benchmarks.workload import LoadRequest

LOOKS_PER_SECOND = 50
MOST_LAG_MS = 20.0
"""A generator whose event loop wakes up later than this is reported as the limit."""
MOST_CPU_SHARE = 0.9
START_GAP_SECONDS = 0.001
"""Between the starts of a closed loop's first requests."""

Progress = Callable[[], object]
"""Called when a request has ended."""


@dataclass
class GeneratorLoad:
    """How busy the load generator itself was: tokens that it reads late are reported late."""

    lags: list[float] = field(default_factory=list)
    """Seconds by which its event loop woke up late, sampled LOOKS_PER_SECOND times a second."""
    cpu_share: float = 0.0
    """Of one core."""

    @property
    def p99_lag_ms(self) -> float:
        """99th percentile of the lags, in ms."""
        return float(np.percentile(self.lags, 99)) * 1e3 if self.lags else 0.0

    @property
    def is_limit(self) -> bool:
        """Whether the generator's lag distorts the reported times."""
        return self.p99_lag_ms > MOST_LAG_MS or self.cpu_share > MOST_CPU_SHARE


@asynccontextmanager
async def watched() -> AsyncIterator[GeneratorLoad]:
    """Measures how busy this process is in the meantime."""
    load = GeneratorLoad()
    started, cpu = time.perf_counter(), time.process_time()

    async def look() -> None:
        pause = 1 / LOOKS_PER_SECOND
        while True:
            due = time.perf_counter() + pause
            await asyncio.sleep(pause)
            load.lags.append(max(0.0, time.perf_counter() - due))

    looking = asyncio.create_task(look())
    try:
        yield load
    finally:
        looking.cancel()
        load.cpu_share = (time.process_time() - cpu) / max(1e-9, time.perf_counter() - started)


async def open_loop(target: Target, requests: Sequence[LoadRequest], progress: Progress) -> list[RequestRecord]:
    """Each request at its arrival time. Raises ValueError if one has none."""
    if any(request.arrival is None for request in requests):
        raise ValueError("an open loop needs an arrival time for each request")
    start = time.perf_counter()
    tasks: list[asyncio.Task[RequestRecord]] = []
    for request in sorted(requests, key=lambda r: r.arrival or 0.0):
        scheduled = start + (request.arrival or 0.0)
        if (pause := scheduled - time.perf_counter()) > 0:
            await asyncio.sleep(pause)
        tasks.append(asyncio.create_task(_send(target, request, RequestRecord(scheduled), progress)))
    return list(await asyncio.gather(*tasks))


async def closed_loop(
    target: Target, requests: Sequence[LoadRequest], concurrency: int, progress: Progress
) -> list[RequestRecord]:
    """`concurrency` requests at any time, the next one when one has ended. Raises ValueError for less than one."""
    if concurrency < 1:
        raise ValueError(f"--concurrency is {concurrency}; it must be at least 1")
    waiting = iter(requests)
    records: list[RequestRecord] = []

    async def worker(number: int) -> None:
        # Staggered: opening hundreds of connections at once takes time that would count as the server's.
        await asyncio.sleep(number * START_GAP_SECONDS)
        for request in waiting:
            record = await _send(target, request, RequestRecord(time.perf_counter()), progress)
            records.append(record)

    await asyncio.gather(*(worker(number) for number in range(concurrency)))
    return records


async def _send(target: Target, request: LoadRequest, record: RequestRecord, progress: Progress) -> RequestRecord:
    await target.send(request, record)
    progress()
    return record


def duration_of(records: Sequence[RequestRecord]) -> float:
    """Seconds from the first schedule to the last end; 0 for no records."""
    if not records:
        return 0.0
    return max(record.ended for record in records) - min(record.scheduled for record in records)
