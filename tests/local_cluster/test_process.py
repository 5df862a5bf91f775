"""Cores and threads of local processes."""

import os

import pytest

from local_cluster.process import share_of_cores
from rpc.config import ProcessConfig


@pytest.mark.parametrize("cores", [{0}, {0, 1}, {2, 3, 5, 7, 8}])
@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
def test_every_worker_gets_cores_that_the_process_has(monkeypatch, cores, num_workers):
    """Workers that are started later too, whose position is past the number of the first ones."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
    shares = [share_of_cores(position, num_workers) for position in range(3 * num_workers)]
    for cpus, threads in shares:
        mine = ProcessConfig(cpus=cpus).cpu_set()
        assert mine is None or (mine <= cores and len(mine) == threads)
    assert shares[:num_workers] * 3 == shares
    first = [ProcessConfig(cpus=cpus).cpu_set() or set() for cpus, _ in shares[:num_workers]]
    assert sum(map(len, first)) == len(set().union(*first))
