"""What tests share. Real models are prepared once; tiny ones are made in a second."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.model_store import DEFAULT_MODEL, resolve_model
from tests.faults.faulty_kvferry import VARIABLE, Faults
from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="session", autouse=True)
def _two_threads() -> None:
    torch.set_num_threads(2)


@pytest.fixture(scope="session")
def real_model() -> Path:
    """The default model, prepared."""
    return resolve_model(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny random model by family name, made once."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = make_tiny_model(family, tmp_path_factory.mktemp(f"tiny-{family.replace(' ', '-')}"))
        return made[family]

    return get


@pytest.fixture(scope="module")
def faults_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What goes wrong in workers that run as `tests.faults.faulty_kvferry`: nothing, until a test writes to it."""
    path = tmp_path_factory.mktemp("faults") / "faults.json"
    Faults().write_to(path)
    os.environ[VARIABLE] = str(path)
    return path
