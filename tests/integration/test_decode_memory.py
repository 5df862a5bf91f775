"""Decode's memory: hand-backs on a small pool, its prefix cache over a conversation, slow readers."""

from __future__ import annotations

import asyncio
import itertools
import random
import time

import grpc
import pytest

from kvferry.client import AsyncClient, KvferryError
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from tests.integration.support import running_cluster

PAGE = 16


def make_prompts(count, length):
    rng = random.Random(count)
    return [rng.choices(range(2, 258), k=length) for _ in range(count)]


async def watch(stream, arrivals):
    async for piece in stream:
        arrivals += [time.monotonic()] * len(piece.token_ids)
    return await stream.result()


async def give_short_answers(client, count, max_tokens):
    """Answers that end long before max_tokens, so that the forecast for such requests becomes short."""
    options = {"max_tokens": max_tokens, "temperature": 0.0, "stop_token_ids": list(range(2, 60))}
    streams = [client.generate(p, **options) for p in make_prompts(count, 20)]
    await asyncio.gather(*(stream.result() for stream in streams))


def preemptions(cluster):
    values = cluster.metrics("decode-0")
    return {kind: values[f"kvferry_preemptions_total,{kind}"] for kind in ("false", "true")}


@pytest.fixture(scope="module")
def small_pool(tiny_model, tmp_path_factory):
    """200 pages; 64 answers of 180 tokens need more than 800."""
    with running_cluster(
        tmp_path_factory.mktemp("logs"), model=str(tiny_model("llama")), num_pages=200, max_num_sequences=64,
        token_budget=256, overlap="on",
    ) as cluster:  # fmt: skip
        yield cluster


@pytest.mark.slow
async def test_64_long_answers_on_a_small_pool_are_handed_back_and_come_out_the_same(small_pool):
    """Casebook C111: KV came, and there is no page for the next token."""
    cluster, num_tokens = small_pool, 180
    prompts = make_prompts(64, 20)
    options = {"max_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True, "return_token_ids": True}
    lone = [await asyncio.to_thread(cluster.greedy, prompt, num_tokens) for prompt in prompts]
    # Now answers of this kind are known to be long. Many short ones make the forecast wrong again.
    async with AsyncClient(cluster.address) as client:
        await give_short_answers(client, 300, max_tokens=170)
        before = preemptions(cluster)
        arrivals: list[float] = []
        streams = [client.generate(prompt, cache_salt="crowd", **options) for prompt in prompts]
        together = await asyncio.gather(*(watch(stream, arrivals) for stream in streams))
    after = preemptions(cluster)
    handed_back = sum(after.values()) - sum(before.values())
    assert handed_back > 0
    assert [r.token_ids for r in together] == [r.token_ids for r in lone]
    assert [r.text for r in together] == [r.text for r in lone]
    assert all(r.usage.completion_tokens == num_tokens for r in together)
    assert all(r.kv_transfer.decode_computed_prompt_tokens == 0 and r.kv_transfer.bytes > 0 for r in together)
    # No thrash: few are handed back, and hardly any twice.
    assert after["true"] - before["true"] <= handed_back / 2
    assert handed_back <= 64
    gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
    print(f"handed back {handed_back:.0f} of 64, repeatedly {after['true'] - before['true']:.0f}; "
          f"longest pause of all streams together {max(gaps):.3f} s")  # fmt: skip
    assert max(gaps) < 1.0
    assert cluster.metrics("router")["kvferry_request_retries_total,preempted"] == handed_back + sum(before.values())
    cluster.settle()


async def test_with_full_admission_none_is_handed_back(tiny_model, tmp_path):
    with running_cluster(
        tmp_path, model=str(tiny_model("llama")), num_pages=60, decode_admission="full", token_budget=256
    ) as cluster:
        async with AsyncClient(cluster.address) as client:
            options = {"max_tokens": 150, "temperature": 0.0, "return_token_ids": True}
            await give_short_answers(client, 30, max_tokens=150)
            streams = [client.generate(p, ignore_eos=True, **options) for p in make_prompts(24, 20)]
            results = await asyncio.gather(*(stream.result() for stream in streams))
        assert all(r.usage.completion_tokens == 150 for r in results)
        assert sum(preemptions(cluster).values()) == 0


@pytest.mark.slow
async def test_a_seeded_answer_with_penalties_and_logprobs_survives_hand_backs(small_pool):
    """What has to be handed over with a sequence: nothing but its tokens."""
    cluster = small_pool
    options = {
        "temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "seed": 4,
        "num_logprobs": 2, "min_tokens": 100,
    }  # fmt: skip
    prompts = make_prompts(30, 33)
    lone = [await asyncio.to_thread(cluster.greedy, p, 150, **options) for p in prompts]
    async with AsyncClient(cluster.address) as client:
        await give_short_answers(client, 300, max_tokens=170)
        before = sum(preemptions(cluster).values())
        streams = [
            client.generate(
                p, max_tokens=150, ignore_eos=True, return_token_ids=True, cache_salt="again", timeout=120, **options
            )
            for p in prompts * 2
        ]
        together = await asyncio.gather(*(stream.result() for stream in streams))
    assert sum(preemptions(cluster).values()) > before
    assert [r.token_ids for r in together] == [r.token_ids for r in lone] * 2
    for one, other in zip(together, lone * 2, strict=True):
        assert [e.chosen.token_id for e in one.logprobs] == list(one.token_ids)
        assert [e.chosen.logprob for e in one.logprobs] == pytest.approx(
            [e.chosen.logprob for e in other.logprobs], abs=1e-3
        )


def converse(cluster, num_turns, **options):
    """A conversation by token ids: each turn is all before it, and 20 new tokens."""
    rng = random.Random(6)
    ids: list[int] = []
    turns = []
    for _ in range(num_turns):
        ids += rng.choices(range(3, 40000), k=20)
        result = cluster.greedy(list(ids), 12, **options)
        turns.append((len(ids), result))
        ids += result.token_ids
    return turns


def test_a_conversation_moves_only_what_decode_does_not_have(cluster):
    turns = converse(cluster, 6, cache_salt="talk")
    full_bytes = turns[0][1].kv_transfer.bytes // 2
    held = 0
    for num_tokens, result in turns:
        assert result.kv_transfer.decode_cached_tokens == held // PAGE * PAGE
        assert result.kv_transfer.bytes == (-(-num_tokens // PAGE) - held // PAGE) * full_bytes
        held = num_tokens + 12 - 1  # the last token's KV is never computed
    cluster.client.flush_prefix_cache()
    fresh = converse(cluster, 6, cache_salt="other")
    assert [r.token_ids for _, r in fresh] == [r.token_ids for _, r in turns]


@pytest.mark.parametrize("length", [PAGE, 2 * PAGE, 4 * PAGE])
def test_a_wholly_cached_prompt_moves_nothing_and_works(length, cluster):
    """Casebook C049."""
    prompt = random.Random(length).choices(range(3, 40000), k=length)
    first = cluster.greedy(prompt, 6)
    second = cluster.greedy(prompt, 6)
    at_once = [
        stream.result()
        for stream in [
            cluster.client.generate(prompt, max_tokens=6, temperature=0.0, ignore_eos=True, return_token_ids=True)
            for _ in range(8)
        ]
    ]
    for result in (second, *at_once):
        assert result.token_ids == first.token_ids
        assert result.kv_transfer.bytes == 0
        assert result.kv_transfer.decode_cached_tokens == length
        assert result.usage.cached_tokens <= length - 1
        assert result.kv_transfer.decode_computed_prompt_tokens == 0
    salted = cluster.greedy(prompt, 6, cache_salt="x")
    assert salted.kv_transfer.decode_cached_tokens == 0
    assert salted.token_ids == first.token_ids


@pytest.mark.slow
def test_a_client_that_does_not_read_is_ended_with_a_clear_status_and_slows_nobody(cluster):
    router = cluster.cluster.start_router("--max-unread-tokens", "20")
    try:
        cluster.cluster.wait_ready(router)
        # A window that does not grow, so that little fits between the two ends.
        options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536)]
        with grpc.insecure_channel(router.address, options) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6, 7]), num_logprobs=20)
            request.stop.max_tokens, request.stop.ignore_eos = 480, True
            call = stub.Generate(request)
            next(call)
            end = time.monotonic() + 60
            while cluster.metrics("router")["kvferry_slow_readers_total"] == 0:
                assert time.monotonic() < end, "it was never ended"
                # Others go on meanwhile.
                assert len(cluster.greedy([8, 9], 5).token_ids) == 5
            cluster.settle(5.0)  # its pages are free, though it still does not read
            with pytest.raises(grpc.RpcError) as caught:
                list(call)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "the client reads too slowly" in caught.value.details()
    finally:
        cluster.cluster.processes.remove(router)
        router.popen.terminate()
        router.popen.wait(20)


@pytest.mark.slow
def test_a_reader_that_is_slow_now_and_then_gets_every_token(cluster):
    call = cluster.client.generate(
        [5, 6, 7], max_tokens=100, temperature=0.0, ignore_eos=True, return_token_ids=True, num_logprobs=20
    )
    pieces = iter(call)
    ids = list(next(pieces).token_ids)
    time.sleep(3.0)
    ids += [token for piece in pieces for token in piece.token_ids]
    assert tuple(ids) == cluster.greedy([5, 6, 7], 100).token_ids


def test_prompts_that_are_wrong_do_not_hurt_running_streams(cluster):
    """Casebook C044, C048, C051."""
    expected = cluster.greedy([4, 5], 40)
    running = [
        cluster.client.generate([4, 5], max_tokens=40, temperature=0.0, ignore_eos=True, return_token_ids=True)
        for _ in range(4)
    ]
    for prompt, options in (
        ("", {}), ([], {}), ([49152], {}), ([-1], {}), ([2**31 - 1], {}), ([5] * 512, {}), ([5], {"max_tokens": 0}),
        ([5], {"max_tokens": 2**31}),
    ):  # fmt: skip
        with pytest.raises(KvferryError) as caught:
            cluster.client.generate(prompt, **options).result()
        assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert cluster.greedy([49151], 2).usage.completion_tokens == 2
    assert [stream.result().token_ids for stream in running] == [expected.token_ids] * 4
