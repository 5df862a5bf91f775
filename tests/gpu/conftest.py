"""Tests that need a CUDA device; where there is none they are skipped, and say so.

Nothing in here needs the conftest of all tests, so `make gpu-check` runs without it, where less is installed."""

from __future__ import annotations

import pytest
import torch

BUILD_SECONDS = 3600
"""FlashInfer builds its kernels where they run, and the first tests wait for that."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Gives them the time that building takes, where the plugin that ends tests is installed."""
    if config.pluginmanager.hasplugin("timeout"):
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(pytest.mark.timeout(BUILD_SECONDS))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU."""
    if not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} sees no CUDA device here")
    chosen = torch.device("cuda", 0)
    torch.cuda.set_device(chosen)
    print(f"{torch.cuda.get_device_name(chosen)}, torch {torch.__version__}")
    return chosen
