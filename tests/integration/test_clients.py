"""Clients as they are: they never read, drop calls, retry too early, send too much, come all at once."""

from __future__ import annotations

import asyncio
import random
import time

import grpc
import pytest
from google.protobuf import descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from kvferry.client import AsyncClient, KvferryError
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from rpc.channel import CLIENT_OPTIONS, MAX_MESSAGE_BYTES, SERVER_OPTIONS
from tests.integration.support import running_cluster

IDS = range(2, 258)
GREEDY = {"temperature": 0.0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def tiny(tiny_model, tmp_path_factory):
    """1 prefill and 1 decode worker; the pool holds two sequences of full length and little more."""
    with running_cluster(
        tmp_path_factory.mktemp("logs"), model=str(tiny_model("llama")), num_pages=80, token_budget=64
    ) as cluster:
        yield cluster


@pytest.fixture
def cluster(tiny):
    yield tiny
    tiny.settle(2.0)


def prompt(rng, length=20):
    return rng.choices(IDS, k=length)


def test_a_client_made_only_from_reflection_works(cluster):
    """What grpcurl does: list, describe, call with messages built from the descriptors that the server sends."""
    with grpc.insecure_channel(cluster.address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert "kvferry.v1.InferenceService" in database.get_services()
        pool = descriptor_pool.DescriptorPool(database)
        method = pool.FindServiceByName("kvferry.v1.InferenceService").FindMethodByName("Generate")
        assert method.server_streaming
        request_class = message_factory.GetMessageClass(method.input_type)
        response_class = message_factory.GetMessageClass(method.output_type)
        call = channel.unary_stream(
            "/kvferry.v1.InferenceService/Generate",
            request_serializer=request_class.SerializeToString,
            response_deserializer=response_class.FromString,
        )
        request = request_class(text="hello", stop={"max_tokens": 5, "ignore_eos": True})
        messages = list(call(request, timeout=30))
    assert messages[-1].usage.completion_tokens == 5


def test_the_options_exist_in_this_grpc():
    """gRPC ignores names it does not know, so a keepalive that is not there would show only in production."""
    from grpc._cython import cygrpc

    with open(cygrpc.__file__, "rb") as library:
        known = library.read()
    for name, _ in CLIENT_OPTIONS + SERVER_OPTIONS:
        assert name.encode() + b"\0" in known, name


def test_compression_is_off(cluster):
    with grpc.insecure_channel(cluster.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        request = pb.GenerateRequest(text="a" * 50)
        request.stop.max_tokens = 20
        call = stub.Generate(request, timeout=30)
        headers = dict(call.initial_metadata())
        list(call)
    assert headers.get("grpc-encoding", "identity") == "identity"


def test_long_messages_are_refused_in_words_before_anything_is_computed(cluster):
    """Casebook C123."""
    before = cluster.metrics("prefill-0")["kvferry_prompt_tokens_total"]
    with pytest.raises(KvferryError, match="prompt") as raised:
        cluster.client.generate([5] * 1_500_000, max_tokens=2).result()
    assert raised.value.code is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(KvferryError, match="prompt") as raised:
        cluster.client.generate("ab " * 1_700_000, max_tokens=2).result()
    assert raised.value.code is grpc.StatusCode.INVALID_ARGUMENT
    with grpc.insecure_channel(cluster.address) as channel:  # with gRPC's own limits, as any client
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as too_long:
            list(stub.Generate(pb.GenerateRequest(text="a" * (MAX_MESSAGE_BYTES + 1)), timeout=60))
    assert too_long.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(MAX_MESSAGE_BYTES) in too_long.value.details()
    assert cluster.metrics("prefill-0")["kvferry_prompt_tokens_total"] == before


def test_names_that_clients_choose_are_no_metric_labels(cluster):
    """Casebook C155."""

    def series():
        return {key for key, _ in cluster.metrics("router").items()}

    cluster.client.generate([5, 6], max_tokens=1).result()
    with pytest.raises(KvferryError):
        cluster.client.generate([5], max_tokens=1, model="m0").result()
    before = series()
    for number in range(50):
        with pytest.raises(KvferryError):
            cluster.client.generate([5], max_tokens=1, model=f"model-{number}").result()
        cluster.client.generate([5], max_tokens=1, request_id=f"id-{number}", cache_salt=f"salt-{number}").result()
    assert series() == before


def test_a_client_that_never_reads_and_then_cancels_is_gone(cluster):
    """Casebook C121."""
    for _ in range(10):
        stream = cluster.client.generate([7] * 20, max_tokens=400, ignore_eos=True, return_token_ids=True)
        time.sleep(0.05)
        stream.cancel()
    cluster.settle(1.0)


async def test_a_client_that_drops_its_call_costs_one_answer_at_most(cluster):
    """Casebook C120: no timer ends it; its answer is short, or its unread tokens reach the limit."""
    async with AsyncClient(cluster.address) as client:
        pieces = aiter(client.generate([7] * 20, max_tokens=300, **GREEDY))
        await anext(pieces)
        del pieces
        await client.generate([8] * 20, max_tokens=3, **GREEDY).result()
    await asyncio.to_thread(cluster.settle, 5.0)


async def test_early_retries_leave_no_ghosts(cluster):
    """Casebook C128: 20 clients give up after a moment, 20 times each; nothing of them goes on."""
    rng = random.Random(1)

    async def impatient(client):
        for _ in range(20):
            with pytest.raises(KvferryError) as raised:
                await client.generate(prompt(rng, 60), max_tokens=400, timeout=0.1, **GREEDY).result()
            assert raised.value.code in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED)

    async with AsyncClient(cluster.address) as client:
        tasks = [asyncio.create_task(impatient(client)) for _ in range(20)]
        while not all(task.done() for task in tasks):
            status = await client.cluster_status()
            # One that just ended may be on its way out while its client's next one comes in.
            assert status.queued_requests + status.running_requests <= 40
            await asyncio.sleep(0.02)
        await asyncio.gather(*tasks)
    await asyncio.to_thread(cluster.settle, 1.0)


async def test_answers_are_never_mixed(cluster):
    """Casebook C130: 64 users, each with a token of their own; some go away."""
    rng = random.Random(2)

    async def ask(client, token):
        stream = client.generate(
            prompt(rng), max_tokens=8, temperature=0.0, ignore_eos=True, return_token_ids=True, logit_bias={token: 100}
        )
        if rng.random() < 0.2:
            async for piece in stream:
                assert set(piece.token_ids) <= {token}
                stream.cancel()
                return
        assert (await stream.result()).token_ids == (token,) * 8

    async with AsyncClient(cluster.address) as client:
        for _ in range(10):
            await asyncio.gather(*(ask(client, 2 + n) for n in range(64)))


async def test_a_full_pool_keeps_moving_and_its_cancelled_leave_nothing(cluster):
    """Casebook C106, C134, C136, C140, C156: 300 where a few fit; handed back, cancelled or served, none lost."""
    rng = random.Random(3)
    preempted = cluster.metrics("decode-0")
    ended = []

    async def ask(client, number):
        stream = client.generate(prompt(rng, rng.randint(10, 120)), max_tokens=rng.randint(5, 150), **GREEDY)
        pieces = aiter(stream)
        if number % 3 == 0:
            for _ in range(rng.randint(0, 4)):
                await anext(pieces)
            stream.cancel()
        else:
            assert (await stream.result()).finish_reason == "length"
        ended.append(number)

    async with AsyncClient(cluster.address) as client:
        tasks = [asyncio.create_task(ask(client, n)) for n in range(300)]
        health = health_pb2_grpc.HealthStub(client._channel)
        moving = [-1, -1, -1]
        while not all(task.done() for task in tasks):
            started = time.monotonic()
            await health.Check(health_pb2.HealthCheckRequest(), timeout=5)
            assert time.monotonic() - started < 2.0
            values = {name: await asyncio.to_thread(cluster.metrics, name) for name in ("router", *cluster.workers())}
            assert all(value >= 0 for of_process in values.values() for value in of_process.values())  # C156; NaN fails
            moving = [*moving[1:], values["router"]["kvferry_output_tokens_total"]]
            assert moving[0] < moving[-1] or len(ended) >= 300, "nothing moves"
            await asyncio.sleep(0.4)
        await asyncio.gather(*tasks)
    grown = cluster.metrics("decode-0")
    assert sum(grown[k] - preempted[k] for k in grown if k.startswith("kvferry_preemptions_total")) > 0
