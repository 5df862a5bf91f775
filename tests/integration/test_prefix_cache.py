"""The prefix cache with real processes: the same tokens, fewer computed, nothing shared across salts."""

from __future__ import annotations

import os
import random
import signal

import pytest

from tests.integration.support import running_cluster
from tests.tiny_models import load_reference, reference_tokens

PAGE = 16
NUM_TOKENS = 6


@pytest.fixture(scope="module")
def reference(real_model):
    return load_reference(real_model)


def computed(cluster):
    return cluster.metrics("prefill-0")["kvferry_prompt_tokens_total"]


@pytest.mark.parametrize("shared", [PAGE - 1, PAGE, PAGE + 1])
def test_eight_copies_cold_then_warm_then_at_once(shared, cluster, reference):
    """Casebook C049: prefixes at the page's edges; every answer is the oracle's."""
    cluster.client.flush_prefix_cache()
    rng = random.Random(shared)
    prefix = rng.choices(range(3, 40000), k=shared)
    prompts = [prefix + rng.choices(range(3, 40000), k=40) for _ in range(2)]
    for number, prompt in enumerate(prompts):
        expected = reference_tokens(reference, prompt, NUM_TOKENS)
        cold_hit = shared // PAGE * PAGE if number else 0
        warm_hit = (len(prompt) - 1) // PAGE * PAGE
        before = computed(cluster)
        cold, warm = cluster.greedy(prompt, NUM_TOKENS), cluster.greedy(prompt, NUM_TOKENS)
        assert (cold.usage.cached_tokens, warm.usage.cached_tokens) == (cold_hit, warm_hit)
        assert computed(cluster) - before == 2 * len(prompt) - cold_hit - warm_hit
        at_once = [
            stream.result()
            for stream in [
                cluster.client.generate(
                    prompt, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, return_token_ids=True
                )
                for _ in range(8)
            ]
        ]
        assert {r.usage.cached_tokens for r in at_once} == {warm_hit}
        for result in (cold, warm, *at_once):
            assert list(result.token_ids) == expected
            assert result.kv_transfer.decode_computed_prompt_tokens == 0
        # Decode has the full pages of earlier ones too: only the last, partly filled one is sent again.
        num_pages = -(-len(prompt) // PAGE)
        page_bytes = cold.kv_transfer.bytes // (num_pages - cold.kv_transfer.decode_cached_tokens // PAGE)
        assert cold.kv_transfer.decode_cached_tokens == shared // PAGE * PAGE * number
        for result in (warm, *at_once):
            assert result.kv_transfer.decode_cached_tokens == len(prompt) // PAGE * PAGE
            assert result.kv_transfer.bytes == (num_pages - len(prompt) // PAGE) * page_bytes


def test_eight_copies_at_once_cold(cluster, reference):
    prompt = random.Random(77).choices(range(3, 40000), k=3 * PAGE)
    options = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True, "return_token_ids": True}
    results = [s.result() for s in [cluster.client.generate(prompt, **options) for _ in range(8)]]
    assert {r.token_ids for r in results} == {tuple(reference_tokens(reference, prompt, NUM_TOKENS))}


def test_salts_share_nothing_and_timing_shows_no_hit(cluster):
    """Casebook C074. Timing as a ratio within one run: another salt costs what a cold prompt costs."""
    cluster.client.flush_prefix_cache()
    prompt = random.Random(5).choices(range(3, 40000), k=450)

    def prefill_ms(salt):
        result = cluster.greedy(prompt, 2, cache_salt=salt)
        return result.usage.cached_tokens, result.timings_ms["prefill_finished"] - result.timings_ms["prefill_started"]

    (cold_hit, cold), (warm_hit, warm) = prefill_ms("tenant-a"), prefill_ms("tenant-a")
    assert (cold_hit, warm_hit) == (0, 448)
    for other in ("tenant-b", ""):
        hit, milliseconds = prefill_ms(other)
        assert hit == 0
        assert milliseconds > (cold + warm) / 2


def test_a_flush_forgets_everything(cluster):
    prompt = random.Random(6).choices(range(3, 40000), k=64)
    cluster.greedy(prompt, 2)
    assert cluster.greedy(prompt, 2).usage.cached_tokens == 48
    cluster.client.flush_prefix_cache()
    assert cluster.greedy(prompt, 2).usage.cached_tokens == 0
    assert cluster.metrics("prefill-0")["kvferry_pages,cached"] == 4


def test_load_and_hits_are_reported(cluster):
    cluster.greedy([5, 6, 7] * 30, 2)
    cluster.greedy([5, 6, 7] * 30, 2)
    worker = cluster.client.cluster_status().workers[0]
    assert worker.cached_pages > 0
    assert worker.hit_rate > 0
    assert worker.queued_tokens == 0


@pytest.mark.parametrize("flags", [{"prefix_cache": False}, {"prompt_order": "bounded_slowdown"}])
def test_other_settings_give_the_same_answers(flags, tiny_model, tmp_path):
    """Off means off; another order changes no token. A pool under pressure evicts, and still every answer is right."""
    folder = tiny_model("llama")
    reference = load_reference(folder)
    rng = random.Random(1)
    base = rng.choices(range(2, 258), k=40)
    prompts = [base + rng.choices(range(2, 258), k=rng.randint(1, 60)) for _ in range(12)] * 2
    with running_cluster(
        tmp_path, model=str(folder), token_budget=24, max_model_len=160, num_pages=12, **flags
    ) as cluster:
        streams = [
            cluster.client.generate(p, max_tokens=5, temperature=0.0, ignore_eos=True, return_token_ids=True)
            for p in prompts
        ]
        results = [stream.result() for stream in streams]
        for prompt, result in zip(prompts, results, strict=True):
            assert list(result.token_ids) == reference_tokens(reference, prompt, 5)
        hits = sum(result.usage.cached_tokens for result in results)
        assert hits == 0 if flags.get("prefix_cache") is False else hits > 0


def test_churn_on_a_small_pool_with_cancels(tiny_model, tmp_path):
    """Casebook C059, C066, C077: shared prefixes, random cancels, evictions; every answer right."""
    folder = tiny_model("qwen3")
    reference = load_reference(folder)
    rng = random.Random(4)
    bases = [rng.choices(range(2, 258), k=96) for _ in range(3)]
    prompts = [
        rng.choice(bases)[: rng.randint(0, 96)] + rng.choices(range(2, 258), k=rng.randint(1, 48)) for _ in range(40)
    ]
    expected = [reference_tokens(reference, prompt, 6) for prompt in prompts]
    with running_cluster(tmp_path, model=str(folder), token_budget=24, max_model_len=192, num_pages=16) as cluster:
        for _ in range(4):
            picked = rng.choices(range(len(prompts)), k=64)
            streams = [
                cluster.client.generate(
                    prompts[i], max_tokens=6, temperature=0.0, ignore_eos=True, return_token_ids=True
                )
                for i in picked
            ]
            for index, stream in zip(picked, streams, strict=True):
                if rng.random() < 0.3:
                    stream.cancel()
                else:
                    assert list(stream.result().token_ids) == expected[index]
            cluster.settle(2.0)


def test_page_keys_do_not_depend_on_the_process():
    """Casebook C072: workers with different hash seeds agree on every key."""
    import subprocess
    import sys

    code = (
        "from engine.prefix_cache import hash_full_pages\nfrom engine.sequence import Sequence\n"
        "s = Sequence('s', list(range(40)), 40, cache_salt='salt')\n"
        "print([h.hex() for h in hash_full_pages(s, 16)])"
    )
    keys = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(keys) == 1


def test_a_stopped_prefill_worker_writes_nothing_after_its_port_is_closed(tiny_model, tmp_path):
    """SIGTERM while it computes and sends: its requests go on at the other worker, and no answer is touched."""
    folder = tiny_model("llama")
    reference = load_reference(folder)
    prompts = [random.Random(i).choices(range(2, 258), k=400) for i in range(8)]
    with running_cluster(tmp_path, model=str(folder), prefill=2, token_budget=16, num_pages=300) as cluster:
        streams = [
            cluster.client.generate(p, max_tokens=40, temperature=0.0, ignore_eos=True, return_token_ids=True)
            for p in prompts
        ]
        iterators = [iter(stream) for stream in streams]
        next(iterators[0])
        stopped = cluster.cluster.find("prefill-0")
        os.kill(stopped.pid, signal.SIGTERM)
        for prompt, stream in zip(prompts, streams, strict=True):
            assert list(stream.result().token_ids) == reference_tokens(reference, prompt, 40)
        assert stopped.popen.wait(20) == 0
        cluster.cluster.processes.remove(stopped)
        cluster.settle(5.0)
