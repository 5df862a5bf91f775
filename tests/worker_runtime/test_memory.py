"""Free memory: what the machine has, or what a container's limit leaves."""

import psutil
import pytest
import torch

from worker_runtime import pool_size

CPU = torch.device("cpu")


@pytest.fixture
def cgroup(tmp_path, monkeypatch):
    monkeypatch.setattr(pool_size, "CGROUP", tmp_path)
    return tmp_path


def test_a_limit_counts_less_what_is_used(cgroup):
    (cgroup / "memory.max").write_text("1000000\n")
    (cgroup / "memory.current").write_text("400000\n")
    assert pool_size.free_memory(CPU) == 600_000


@pytest.mark.parametrize("limit", ["max\n", None])
def test_without_a_limit_the_machine_counts(cgroup, limit):
    if limit is not None:
        (cgroup / "memory.max").write_text(limit)
    assert abs(pool_size.free_memory(CPU) - psutil.virtual_memory().available) < 2**30
