"""`make soak`: what shows only after minutes or tens of thousands of requests. Bounded counts."""

from __future__ import annotations

import pytest

from benchmarks.micro.bench_router import running_router
from kvferry.client import AsyncClient
from tests.integration.test_router_load import memory_per_cancel

QUIET_SECONDS = 240


@pytest.mark.timeout(QUIET_SECONDS + 60)
async def test_a_stream_that_is_quiet_for_minutes_survives(real_model):
    """One token, four minutes of nothing, the next token: no keepalive or idle timer ends it."""
    with running_router(real_model, QUIET_SECONDS * 1e3) as info:
        async with AsyncClient(info["address"]) as client:
            result = await client.generate([5], max_tokens=2, ignore_eos=True, return_token_ids=True).result()
    assert len(result.token_ids) == 2


@pytest.mark.timeout(1200)
async def test_50000_cancelled_streams_leave_no_memory_behind(real_model):
    """Casebook C119."""
    with running_router(real_model, 5.0) as info:
        grown = await memory_per_cancel(info, warm_up=5000, cycles=50_000)
    print(f"{grown:.0f} bytes per cancelled stream")
    assert grown < 200
