"""Serving on a shared cluster: concurrency, text, stops, timings, reflection, bad input."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from kvferry.client import AsyncClient, KvferryError
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from tests.integration.conftest import MAX_MODEL_LEN
from tests.integration.support import wait_for

STAGES = [
    "queued",
    "reserved",
    "prefill_started",
    "prefill_finished",
    "transfer_finished",
    "decode_started",
    "finished",
]


def make_prompts(count, longest=300):
    rng = random.Random(9)
    return [
        rng.choices(range(3, 40000), k=rng.choice((1, 15, 16, 17, 60, 127, 128, 129, longest))) for _ in range(count)
    ]


@pytest.mark.slow
async def test_32_streams_of_mixed_lengths_equal_their_lone_runs(cluster):
    """Casebook C101, C102, C104: no page is read before its data is there, however many transfers run."""
    prompts = make_prompts(32)
    lengths = [5 + 3 * (i % 9) for i in range(32)]
    lone = [await asyncio.to_thread(cluster.greedy, p, n) for p, n in zip(prompts, lengths, strict=True)]
    async with AsyncClient(cluster.address) as client:
        streams = [
            client.generate(p, max_tokens=n, temperature=0.0, ignore_eos=True, return_token_ids=True, cache_salt="x")
            for p, n in zip(prompts, lengths, strict=True)
        ]
        together = await asyncio.gather(*(stream.result() for stream in streams))
    for one, many in zip(lone, together, strict=True):
        assert one.token_ids == many.token_ids
        assert one.text == many.text
        assert many.kv_transfer.bytes > 0
        assert many.kv_transfer.decode_computed_prompt_tokens == 0


def test_text_ids_usage_and_stages_agree(cluster):
    stream = cluster.client.generate(
        [{"role": "user", "content": "What is the capital of France?"}],
        temperature=0.0,
        max_tokens=40,
        return_token_ids=True,
    )
    pieces = list(stream)
    result = stream.result()
    assert "Paris" in result.text
    assert "".join(piece.text for piece in pieces) == result.text
    assert result.finish_reason == "stop"
    assert result.stop_reason == ""
    assert result.usage.completion_tokens == len(result.token_ids)
    # The ending EOS is counted, and is not text.
    assert cluster.client.detokenize(result.token_ids[:-1]) == result.text
    at = [result.timings_ms[stage] for stage in STAGES]
    assert at == sorted(at)
    assert at[0] >= 0
    assert result.timings_ms["prefill_finished"] <= result.timings_ms["first_token"] <= result.timings_ms["finished"]


def test_eos_at_the_last_allowed_token_is_a_stop(cluster):
    """Casebook C019: n tokens to EOS; max_tokens n stops, n-1 has no room for it."""
    prompt = [{"role": "user", "content": "What is the capital of France?"}]
    full = cluster.client.generate(prompt, temperature=0.0, max_tokens=40).result()
    n = full.usage.completion_tokens
    exact = cluster.client.generate(prompt, temperature=0.0, max_tokens=n).result()
    short = cluster.client.generate(prompt, temperature=0.0, max_tokens=n - 1).result()
    assert (exact.finish_reason, short.finish_reason) == ("stop", "length")
    assert exact.text == full.text == short.text


def test_an_answer_of_one_token_moves_nothing_it_does_not_need(cluster):
    result = cluster.greedy([5, 6, 7], max_tokens=1)
    assert (len(result.token_ids), result.finish_reason) == (1, "length")
    assert result.kv_transfer.bytes == 0
    assert result.timings_ms["decode_started"] == 0


def test_a_stop_string_is_cut_exactly_and_frees_the_workers(cluster):
    """Casebook C012, C013."""
    prompt = [{"role": "user", "content": "What is the capital of France?"}]
    full = cluster.client.generate(prompt, temperature=0.0, max_tokens=40).result().text
    for start, end in ((4, 14), (9, 12), (0, 1)):
        stop = full[start:end]
        result = cluster.client.generate(prompt, temperature=0.0, max_tokens=40, stop=[stop]).result()
        assert result.text == full[: full.find(stop)]
        assert (result.finish_reason, result.stop_reason) == ("stop", stop)
    kept = cluster.client.generate(prompt, temperature=0.0, max_tokens=40, stop=["capital"], include_stop=True).result()
    assert kept.text.endswith("capital")


def test_a_stop_token_is_told_by_its_id(cluster):
    first = cluster.greedy([50, 60, 70], max_tokens=4)
    stop_id = first.token_ids[2]
    stopped = cluster.client.generate(
        [50, 60, 70], temperature=0.0, max_tokens=20, ignore_eos=True, stop_token_ids=[stop_id], return_token_ids=True
    ).result()
    assert stopped.token_ids == first.token_ids[: first.token_ids.index(stop_id) + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", str(stop_id))


def test_seeds_decide_sampled_answers(cluster):
    """Casebook C034, C035."""
    prompt = cluster.client.tokenize("Once upon a time")

    def answer(**options):
        stream = cluster.client.generate(
            prompt, max_tokens=16, temperature=1.0, ignore_eos=True, return_token_ids=True, **options
        )
        return stream

    serial = [answer(seed=s).result().token_ids for s in range(6)]
    concurrent = [stream.result().token_ids for stream in [answer(seed=s) for s in range(6)]]
    assert serial == concurrent
    assert len(set(serial)) == 6
    unseeded = [stream.result() for stream in [answer() for _ in range(8)]]
    assert len({r.token_ids for r in unseeded}) >= 7
    again = answer(seed=unseeded[0].seed).result()
    assert again.token_ids == unseeded[0].token_ids


BAD = [
    ({"model": "nope"}, grpc.StatusCode.NOT_FOUND, "'nope' is not served here"),
    # Trailers over some kilobytes would be refused with another status.
    ({"model": "x" * 100_000}, grpc.StatusCode.NOT_FOUND, "... (100000 characters) is not served here"),
    ({"request_id": "x" * 100_000}, grpc.StatusCode.INVALID_ARGUMENT, "request_id: has 100000 characters"),
    ({"prompt": ""}, grpc.StatusCode.INVALID_ARGUMENT, "text: is empty"),
    ({"prompt": []}, grpc.StatusCode.INVALID_ARGUMENT, "token_ids: has no tokens"),
    (
        {"prompt": [1, 49152]},
        grpc.StatusCode.INVALID_ARGUMENT,
        "token_ids[1]: is 49152; token ids must be in [0, 49152)",
    ),
    ({"prompt": [-1]}, grpc.StatusCode.INVALID_ARGUMENT, "token_ids[0]: is -1"),
    ({"prompt": [5] * MAX_MODEL_LEN}, grpc.StatusCode.INVALID_ARGUMENT, "prompt: has 512 tokens"),
    (
        {"prompt": [5] * 502, "max_tokens": 11},
        grpc.StatusCode.INVALID_ARGUMENT,
        "stop.max_tokens: is 11; with a prompt of 502 tokens at most 10 are left",
    ),
    ({"temperature": -1.0}, grpc.StatusCode.INVALID_ARGUMENT, "sampling.temperature: is -1;"),
    ({"top_p": 2.0}, grpc.StatusCode.INVALID_ARGUMENT, "sampling.top_p: is 2; it must be in (0, 1]"),
]


@pytest.mark.parametrize(("bad", "code", "words"), BAD, ids=[words[:40] for _, _, words in BAD])
def test_bad_input_is_refused_in_words_while_others_go_on(bad, code, words, cluster):
    prompt = [9, 10, 11]
    expected = cluster.greedy(prompt, 10)
    running = cluster.client.generate(prompt, max_tokens=10, temperature=0.0, ignore_eos=True, return_token_ids=True)
    options = {"prompt": "hi", "max_tokens": 1} | bad
    with pytest.raises(KvferryError, match=re.escape(words)) as caught:
        cluster.client.generate(options.pop("prompt"), **options).result()
    assert caught.value.code is code
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        assert words.startswith(caught.value.field)
    assert running.result().token_ids == expected.token_ids


def test_one_request_id_runs_once(cluster):
    running = cluster.client.generate([7, 8], max_tokens=60, ignore_eos=True, request_id="mine")
    next(iter(running))
    with pytest.raises(KvferryError, match="'mine' is already running"):
        cluster.client.generate([7, 8], max_tokens=2, request_id="mine").result()
    assert running.result().request_id == "mine"
    assert cluster.client.generate([7, 8], max_tokens=2, request_id="mine").result().request_id == "mine"


def test_wrong_wire_bytes_do_not_hurt(cluster):
    with grpc.insecure_channel(cluster.address) as channel:
        call = channel.unary_stream("/kvferry.v1.InferenceService/Generate")
        with pytest.raises(grpc.RpcError):
            list(call(b"\xff\xff\xff\xff not a message", timeout=10))
    assert len(cluster.greedy([4], 2).token_ids) == 2


def test_tokenize_and_detokenize_are_what_generate_does(cluster):
    ids = cluster.client.tokenize([{"role": "user", "content": "hé😀"}])
    assert "hé😀" in cluster.client.detokenize(ids)
    stream = cluster.client.generate([{"role": "user", "content": "hé😀"}], max_tokens=1)
    assert stream.result().usage.prompt_tokens == len(ids)


def test_model_info_and_cluster_status_tell_the_truth(cluster):
    info = cluster.client.model_info()
    assert (info.vocab_size, info.max_model_len, info.page_size, info.dtype) == (49152, MAX_MODEL_LEN, 16, "float32")
    status = cluster.client.cluster_status()
    assert status.ready_pairs == 1
    assert [(w.tier, w.state, w.free_pages + w.cached_pages, w.total_pages) for w in status.workers] == [
        ("prefill", "ready", 1400, 1400),
        ("decode", "ready", 1400, 1400),
    ]
    assert len({w.incarnation_id for w in status.workers}) == 2


def test_health_and_reflection_answer_on_every_process(cluster):
    services = {
        "router": "kvferry.v1.InferenceService",
        "prefill-0": "kvferry.v1.PageTicketService",
        "decode-0": "kvferry.v1.WorkerService",
    }
    for name, service in services.items():
        with grpc.insecure_channel(cluster.cluster.find(name).address) as channel:
            for asked in ("", service):
                health = health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(service=asked), timeout=5
                )
                assert health.status == health_pb2.HealthCheckResponse.SERVING
            assert service in ProtoReflectionDescriptorDatabase(channel).get_services()


def test_the_router_never_loads_torch(cluster):
    maps = Path(f"/proc/{cluster.cluster.find('router').pid}/maps").read_text()
    assert "tokenizers" in maps
    assert "libtorch" not in maps


def test_counters_agree_with_answers(cluster):
    before = {name: cluster.metrics(name) for name in ("router", "prefill-0", "decode-0")}
    results = [cluster.greedy(p, 6, cache_salt="counted") for p in make_prompts(4)]
    after = {name: cluster.metrics(name) for name in before}

    def grown(name, metric):
        return after[name][metric] - before[name][metric]

    prompt_tokens = sum(r.usage.prompt_tokens for r in results)
    assert grown("router", "kvferry_requests_total,OK") == 4
    assert grown("router", "kvferry_output_tokens_total") == 24
    assert grown("router", "kvferry_prompt_tokens_total") == prompt_tokens
    assert grown("prefill-0", "kvferry_prompt_tokens_total") == prompt_tokens
    assert grown("prefill-0", "kvferry_kv_bytes_total") == sum(r.kv_transfer.bytes for r in results)
    assert grown("decode-0", "kvferry_output_tokens_total") == 24 - 4
    assert grown("decode-0", "kvferry_worker_requests_total,finished") == 4


def test_a_deadline_ends_the_request_everywhere(cluster):
    with pytest.raises(KvferryError) as caught:
        cluster.client.generate([5] * 300, max_tokens=200, ignore_eos=True, timeout=0.5).result()
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    cluster.settle()


def test_a_deadline_that_can_not_be_met_costs_no_token(cluster):
    cluster.greedy([8] * 200, 1, cache_salt="rate")
    before = cluster.metrics("prefill-0")["kvferry_prompt_tokens_total"]
    with pytest.raises(KvferryError) as caught:
        cluster.client.generate([9] * 500, max_tokens=2, cache_salt="hopeless", timeout=0.2).result()
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    cluster.settle()
    assert cluster.metrics("prefill-0")["kvferry_prompt_tokens_total"] == before


def test_a_client_made_only_from_the_proto_works(cluster):
    with grpc.insecure_channel(cluster.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        request = pb.GenerateRequest(text="One, two,", sampling=pb.SamplingParams(temperature=0))
        request.stop.max_tokens = 5
        messages = list(stub.Generate(request, timeout=30))
    assert messages[-1].finish_reason == pb.FINISH_REASON_LENGTH
    assert messages[-1].usage.completion_tokens == 5
    assert all(m.finish_reason == 0 for m in messages[:-1])


def test_a_deadline_over_grpc_is_counted_as_one(cluster):
    def counted(status):
        return cluster.metrics("router").get(f"kvferry_requests_total,{status}", 0.0)

    before, cancelled = counted("DEADLINE_EXCEEDED"), counted("CANCELLED")
    with pytest.raises(KvferryError) as caught:
        cluster.client.generate([7, 8], max_tokens=400, ignore_eos=True, timeout=0.5).result()
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    wait_for(lambda: counted("DEADLINE_EXCEEDED") == before + 1, what="a deadline that is counted")
    assert counted("CANCELLED") == cancelled


def test_a_text_that_is_far_too_long_costs_next_to_nothing(cluster):
    """16 MiB of text took a router 4 GB and 16 core-seconds before it was refused."""
    router = psutil.Process(cluster.cluster.find("router").pid)
    with contextlib.suppress(KvferryError):  # once, for what is allocated the first time
        cluster.client.generate("ab " * 100_000, max_tokens=2).result()
    memory, seconds = router.memory_info().rss, sum(router.cpu_times()[:2])
    for _ in range(4):
        with pytest.raises(KvferryError, match="maximum context length is 512 tokens"):
            cluster.client.generate("ab " * (5 << 20), max_tokens=2).result()
    assert router.memory_info().rss - memory < 400e6  # the text itself, several times
    assert sum(router.cpu_times()[:2]) - seconds < 8
