"""A router alone, with a scripted (model-free) worker: thousands of streams, overload, recovery."""

from __future__ import annotations

import asyncio
import time

import grpc
import psutil
import pytest

from benchmarks.micro.bench_router import running_router
from kvferry.client import AsyncClient, KvferryError, make_request
from protos import inference_pb2_grpc


async def test_a_thousand_streams_at_once(real_model):
    """Casebook C129: every stream gets every token; memory afterwards is what it was."""
    with running_router(real_model, step_ms=20.0) as info:
        router = psutil.Process(info["pid"])
        async with AsyncClient(info["address"]) as client:

            async def ask(n):
                stream = client.generate([5, n + 6], max_tokens=30, ignore_eos=True, return_token_ids=True)
                return await stream.result()

            await asyncio.gather(*(ask(n) for n in range(1000)))
            before = router.memory_info().rss
            results = await asyncio.gather(*(ask(n) for n in range(1000)))
            assert all(len(r.token_ids) == 30 for r in results)
            assert len({r.request_id for r in results}) == 1000
            status = await client.cluster_status()
            assert (status.queued_requests, status.running_requests) == (0, 0)
        assert router.memory_info().rss < before * 1.3
        assert router.num_fds() < 100


async def test_at_three_times_capacity_the_excess_is_refused_at_once_and_the_rest_is_served(real_model):
    """Casebook C131, C124, C106: 8 places, 10 tokens of 20 ms each: 40 requests/s. Offered: 120/s for 3 seconds."""
    flags = ("--max-queue-requests", "16")
    with running_router(real_model, 20.0, flags, ("--max-num-sequences", "8")) as info:
        async with AsyncClient(info["address"]) as client:
            served, refused = [], []

            async def ask(n):
                started = time.monotonic()
                try:
                    stream = client.generate([5, n % 1000 + 6], max_tokens=10, ignore_eos=True, return_token_ids=True)
                    await anext(aiter(stream))
                    served.append(time.monotonic() - started)
                    await stream.result()
                except KvferryError as error:
                    refused.append((time.monotonic() - started, error))

            await ask(0)
            tasks = []
            start = time.monotonic()
            for n in range(360):
                tasks.append(asyncio.create_task(ask(n)))
                await asyncio.sleep(max(0.0, start + (n + 1) / 120 - time.monotonic()))
            await asyncio.gather(*tasks)
            assert len(served) + len(refused) == 361
            assert len(refused) > 100
            # At most 16 wait before one: two rounds of answers, and a margin for a busy machine.
            assert sorted(served)[len(served) * 9 // 10] < 4 * 0.4
            assert {error.code for _, error in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
            assert all(error.retry_seconds > 0 for _, error in refused)
            assert sorted(seconds for seconds, _ in refused)[len(refused) // 2] < 0.1
            before = len(served)
            await ask(1)
            assert len(served) == before + 1, "it recovers at once"


async def test_a_full_queue_is_bounded_in_time_too(real_model):
    """Casebook C137: those that wait too long are refused in words, and never served."""
    flags = ("--max-queue-seconds", "0.3")
    with running_router(real_model, 50.0, flags, ("--max-num-sequences", "1")) as info:
        async with AsyncClient(info["address"]) as client:
            running = client.generate([5], max_tokens=40, ignore_eos=True, return_token_ids=True)
            pieces = aiter(running)
            await anext(pieces)
            with pytest.raises(KvferryError, match=r"no worker was free within 0\.3 s"):
                await client.generate([6], max_tokens=2).result()
            assert (await running.result()).usage.completion_tokens == 40


async def test_readers_that_pause_cost_bounded_memory_and_nobody_else(real_model):
    """Casebook C126: 20 streams that stop reading after one message; 10 that read."""
    worker_flags = ("--tokens-per-step", "64", "--max-model-len", "100000")
    with running_router(real_model, 0.0, ("--max-unread-tokens", "500"), worker_flags) as info:
        router = psutil.Process(info["pid"])
        # Otherwise gRPC finds a window in which the whole answer fits.
        small_window = [("grpc.http2.bdp_probe", 0)]
        async with (
            grpc.aio.insecure_channel(info["address"], options=small_window) as stuck,
            AsyncClient(info["address"]) as reading,
        ):

            async def pause(n):
                request = make_request([5, n + 6], max_tokens=90_000, ignore_eos=True, return_token_ids=True)
                call = inference_pb2_grpc.InferenceServiceStub(stuck).Generate(request)
                await call.read()
                return call

            paused = await asyncio.gather(*(pause(n) for n in range(20)))
            before = router.memory_info().rss
            for _ in range(3):
                normal = [reading.generate([5, n + 70], max_tokens=100, ignore_eos=True) for n in range(10)]
                results = await asyncio.gather(*(stream.result() for stream in normal))
                assert {r.usage.completion_tokens for r in results} == {100}
            end = time.monotonic() + 20
            while (await reading.cluster_status()).running_requests and time.monotonic() < end:
                await asyncio.sleep(0.05)
            assert (await reading.cluster_status()).running_requests == 0, "stuck readers hold workers"
            assert router.memory_info().rss < before + 50e6
            for call in paused:
                with pytest.raises(grpc.aio.AioRpcError, match="reads too slowly"):
                    await read_all(call)


async def test_cancelled_streams_leave_no_memory_behind(real_model):
    """Casebook C119; `make soak` does it 50,000 times."""
    with running_router(real_model, 5.0) as info:
        assert await memory_per_cancel(info, warm_up=500, cycles=1500) < 1500


async def test_a_router_that_is_told_to_end_ends_in_time_whatever_its_streams_do(real_model):
    """Casebook C158: idle channels, running, cancelled and stuck streams; every client gets a status."""
    worker_flags = ("--tokens-per-step", "64", "--max-model-len", "1000000")
    with running_router(real_model, 20.0, ("--drain-seconds", "2"), worker_flags) as info:
        small_window = [("grpc.http2.bdp_probe", 0)]
        async with (
            grpc.aio.insecure_channel(info["address"], options=small_window) as stuck,
            AsyncClient(info["address"]) as client,
            AsyncClient(info["address"]) as idle,
        ):
            await idle.cluster_status()
            short = [client.generate([5, n + 6], max_tokens=2000, ignore_eos=True) for n in range(10)]
            reading = [asyncio.create_task(stream.result()) for stream in short]
            request = make_request([5], max_tokens=900_000, ignore_eos=True)
            call = inference_pb2_grpc.InferenceServiceStub(stuck).Generate(request)
            await call.read()
            endless = asyncio.create_task(client.generate([9], max_tokens=900_000, ignore_eos=True).result())
            for n in range(10):
                stream = client.generate([5, n + 50], max_tokens=900_000, ignore_eos=True)
                await anext(aiter(stream))
                stream.cancel()
            router = psutil.Process(info["pid"])
            started = time.monotonic()
            router.terminate()
            assert all(result.finish_reason == "length" for result in await asyncio.gather(*reading))
            with pytest.raises(KvferryError):
                await endless
            with pytest.raises(grpc.aio.AioRpcError):
                await read_all(call)
            while router.is_running() and router.status() != psutil.STATUS_ZOMBIE:
                assert time.monotonic() - started < 10
                await asyncio.sleep(0.05)


async def read_all(call):
    while await call.read():
        pass


async def memory_per_cancel(info, warm_up, cycles):
    """Bytes that the router grows by with each stream that is cancelled after its first token."""
    router = psutil.Process(info["pid"])

    async def cancel_many(client, number):
        for _ in range(number):
            stream = client.generate([5, 6], max_tokens=100, ignore_eos=True, return_token_ids=True)
            await anext(aiter(stream))
            stream.cancel()

    async with AsyncClient(info["address"]) as client:
        await asyncio.gather(*(cancel_many(client, warm_up // 25) for _ in range(25)))
        before = router.memory_info().rss
        await asyncio.gather(*(cancel_many(client, cycles // 25) for _ in range(25)))
        return (router.memory_info().rss - before) / cycles
