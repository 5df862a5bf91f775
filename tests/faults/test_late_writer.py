"""A prefill process is stopped at every point of a transfer, its request is cancelled, others need the pages, it wakes.

No page of another request may be touched; and when it is killed instead, its pages come back at once.
"""

from __future__ import annotations

import os
import random
import signal
import time

import psutil
import pytest

from tests.faults.faulty_kvferry import FAULTY, Faults
from tests.integration.support import running_cluster, wait_for

LONG = random.Random(1).choices(range(2, 258), k=300)
OTHERS = [random.Random(n).choices(range(2, 258), k=150) for n in range(2, 10)]
POINTS = [
    ("before post", 0),  # between the look at the lease and the first write
    ("before post", 2),
    ("after post", 0),
    ("after post", 3),
    ("before end", 1),
]


@pytest.fixture(scope="module")
def cluster(tiny_model, tmp_path_factory, faults_file):
    """prefill-0 fails on purpose, prefill-1 is sound; decode's pool holds the long prompt and little more."""
    with running_cluster(
        tmp_path_factory.mktemp("logs"), model=str(tiny_model("llama")), prefill=2, num_pages=40, token_budget=64,
        commands={"prefill-0": FAULTY}, decode_prefix_cache=False, prefix_cache=False,
        worker_silence_seconds=3.0,
    ) as cluster:  # fmt: skip
        cluster.expected = [cluster.greedy(prompt, 12).token_ids for prompt in OTHERS]
        yield cluster


def quarantined(cluster):
    return cluster.metrics("decode-0")["kvferry_pages,quarantined"]


def stop_in_transfer(cluster, faults_file, point, countdown):
    """Long prompts until the faulty worker has stopped with one; gives the streams that were cancelled."""
    Faults(stop_at=point, countdown=countdown).write_to(faults_file)
    process = psutil.Process(cluster.cluster.find("prefill-0").pid)
    while process.status() != psutil.STATUS_STOPPED:
        stream = cluster.client.generate(LONG, max_tokens=4, temperature=0.0, ignore_eos=True)
        end = time.monotonic() + 2
        while process.status() != psutil.STATUS_STOPPED and time.monotonic() < end:
            if cluster.client.cluster_status().running_requests == 0:
                break  # the sound worker had it
            time.sleep(0.005)
        stream.cancel()
    return process


def check_others(cluster):
    """Others use every page that can be had, and get what they would get alone."""
    streams = [
        cluster.client.generate(p, max_tokens=12, temperature=0.0, ignore_eos=True, return_token_ids=True)
        for p in OTHERS
    ]
    assert [stream.result().token_ids for stream in streams] == cluster.expected


@pytest.mark.parametrize(("point", "countdown"), POINTS)
def test_a_writer_that_wakes_up_late_touches_no_page_of_another(cluster, faults_file, point, countdown):
    process = stop_in_transfer(cluster, faults_file, point, countdown)
    if point != "before end":  # there the owner may have everything already
        wait_for(lambda: quarantined(cluster) > 0)
    held_back = quarantined(cluster)
    check_others(cluster)
    # Until the router noticed that it is silent, some of the others were bound to it too.
    assert quarantined(cluster) >= held_back, "time alone frees no page"
    running = [
        cluster.client.generate(p, max_tokens=12, temperature=0.0, ignore_eos=True, return_token_ids=True)
        for p in OTHERS
    ]
    Faults().write_to(faults_file)
    process.send_signal(signal.SIGCONT)
    assert [stream.result().token_ids for stream in running] == cluster.expected
    wait_for(lambda: quarantined(cluster) == 0)
    cluster.settle(3.0)
    check_others(cluster)


def test_pages_of_a_writer_that_is_killed_come_back_at_once(cluster, faults_file):
    stop_in_transfer(cluster, faults_file, "before post", 1)
    wait_for(lambda: quarantined(cluster) > 0)
    process = cluster.cluster.find("prefill-0")
    Faults().write_to(faults_file)
    os.kill(process.pid, signal.SIGKILL)
    process.popen.wait()
    # A second for bytes in the network, and the time to notice.
    wait_for(lambda: quarantined(cluster) == 0, 5.0)
    cluster.cluster.restart_worker(process)
    check_others(cluster)
