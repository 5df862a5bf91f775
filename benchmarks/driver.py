"""Sends a load: open loop (each request at its time, whatever the others do) or closed loop (so many at once)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from benchmarks.records import RequestRecord
from benchmarks.targets import Target
from benchmarks.workload import LoadRequest

Progress = Callable[[], object]
"""Called when a request has ended."""


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

    async def worker() -> None:
        for request in waiting:
            record = await _send(target, request, RequestRecord(time.perf_counter()), progress)
            records.append(record)

    await asyncio.gather(*(worker() for _ in range(concurrency)))
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
