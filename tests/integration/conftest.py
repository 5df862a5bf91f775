"""Clusters shared between tests: starting one costs seconds."""

from __future__ import annotations

import pytest

from tests.integration.support import running_cluster

TOKEN_BUDGET = 128
MAX_MODEL_LEN = 512


def pytest_collection_modifyitems(items):
    for item in items:
        if "/integration/" in str(item.path):
            item.add_marker(pytest.mark.integration)


@pytest.fixture(scope="session")
def shared_cluster(real_model, tmp_path_factory):
    """The real model in fp32, 1 prefill and 1 decode worker; small budget, so that prompts have chunks."""
    with running_cluster(
        tmp_path_factory.mktemp("logs"),
        model=str(real_model),
        token_budget=TOKEN_BUDGET,
        max_model_len=MAX_MODEL_LEN,
        num_pages=1400,
    ) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster):
    """The shared cluster, at rest before and after each test."""
    shared_cluster.settle()
    yield shared_cluster
    shared_cluster.settle(2.0)
