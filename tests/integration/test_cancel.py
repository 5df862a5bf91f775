"""A cancelled request gives its pages back within a second, wherever it is, and its neighbours do not notice."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from tests.integration.support import wait_for

REPEATS = 20
SALTS = itertools.count()
LONG = random.Random(1).choices(range(3, 40000), k=480)
CONTROL = random.Random(2).choices(range(3, 40000), k=20)


@pytest.fixture(scope="module")
def control(shared_cluster):
    return shared_cluster.greedy(CONTROL, 8).token_ids


@pytest.fixture(scope="module")
def prefill_seconds(shared_cluster):
    return shared_cluster.greedy(LONG, 1).timings_ms["prefill_finished"] / 1e3


def start(cluster, prompt=LONG, max_tokens=30):
    # A salt of its own, so that the prompt is computed and not found in the prefix cache.
    options = {"temperature": 0.0, "ignore_eos": True, "timeout": 120, "cache_salt": f"cancel-{next(SALTS)}"}
    return cluster.client.generate(prompt, max_tokens=max_tokens, **options)


def check_alive(cluster, control):
    cluster.settle(1.0)
    assert cluster.greedy(CONTROL, 8).token_ids == control


def test_in_the_queue(cluster, control):
    first = start(cluster)
    queued = [start(cluster) for _ in range(REPEATS + 2)]
    wait_for(lambda: cluster.client.cluster_status().queued_requests >= REPEATS)
    computed = cluster.metrics("prefill-0")["kvferry_prompt_tokens_total"]
    for stream in queued:
        stream.cancel()
    wait_for(lambda: cluster.client.cluster_status().queued_requests == 0, 1.0)
    first.cancel()
    check_alive(cluster, control)
    # What never left the queue cost at most the prompts that were bound when we looked, and the control's.
    assert cluster.metrics("prefill-0")["kvferry_prompt_tokens_total"] - computed <= 3 * len(LONG) + len(CONTROL)


@pytest.mark.slow
def test_in_prefill(cluster, control, prefill_seconds):
    for number in range(REPEATS):
        stream = start(cluster)
        time.sleep(prefill_seconds * number / REPEATS)
        stream.cancel()
        cluster.settle(1.0)
    check_alive(cluster, control)


@pytest.mark.slow
def test_in_transfer(cluster, control):
    """The first token is out and the last pages are on their way, or some are there and more follow."""
    for number in range(REPEATS):
        stream = start(cluster)
        if number % 2:
            next(iter(stream))
        else:
            sent = cluster.metrics("prefill-0")["kvferry_kv_bytes_total"]
            wait_for(lambda sent=sent: cluster.metrics("prefill-0")["kvferry_kv_bytes_total"] > sent)
        stream.cancel()
        cluster.settle(1.0)
    check_alive(cluster, control)


def test_in_decode(cluster, control):
    for number in range(REPEATS):
        stream = start(cluster, CONTROL, max_tokens=200)
        pieces = iter(stream)
        for _ in range(2 + number % 5):
            next(pieces)
        stream.cancel()
        cluster.settle(1.0)
    check_alive(cluster, control)


@pytest.mark.slow
def test_many_at_random_times(cluster, control, prefill_seconds):
    """Casebook C097, C116: a mix of stages at once, beside one that goes on."""
    rng = random.Random(3)
    survivor = start(cluster, CONTROL, max_tokens=60)
    expected = cluster.greedy(CONTROL, 60)
    for _ in range(10):
        streams = [start(cluster, LONG[: rng.randint(1, 480)]) for _ in range(5)]
        time.sleep(rng.uniform(0, prefill_seconds * 1.5))
        for stream in streams:
            stream.cancel()
    assert survivor.result().text == expected.text
    check_alive(cluster, control)
