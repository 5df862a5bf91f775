"""Compiles and loads the C sources of this folder. Without a C compiler the engine runs in plain torch, more slowly.

The library is kept in the cache folder. Its file name has a hash of source, flags and processor.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from filelock import FileLock

from engine.model_store import cache_folder

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
SOURCES = ("kernels.c", "decoder.c")
# No -ffast-math: linking with this flag would flush denormal numbers to zero in the whole process.
FLAGS = ["-O3", "-march=native", "-shared", "-fPIC", "-fopenmp", "-std=gnu11"]
FLAGS += ["-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math"]
COMPILE_SECONDS = 120


@functools.cache
def load_kernels() -> ctypes.CDLL | None:
    """The kernels, compiled if necessary; None, with a log line, if they can't be compiled or loaded."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        log.info("no C compiler found (gcc, or another as $CC); decode steps run in plain torch, which is slower")
        return None
    try:
        return _declare(ctypes.CDLL(str(_compiled(compiler))))
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        log.warning("the native kernels can't be used, decode steps run in plain torch: %s", reason.strip()[-500:])
        return None


def _compiled(compiler: str) -> Path:
    """The compiled library. Raises OSError or SubprocessError."""
    command = [compiler, *FLAGS]
    openmp = _torch_openmp()
    # torch's own OpenMP runtime: a second runtime would start threads that compete for the same cores.
    link = [str(openmp), f"-Wl,-rpath,{openmp.parent}"] if openmp is not None else []
    texts = [path.read_text() for path in sorted([*FOLDER.glob("*.c"), *FOLDER.glob("*.h")])]
    origin = "\0".join([*texts, *command, *link, platform.machine(), _processor()])
    key = hashlib.sha256(origin.encode()).hexdigest()[:16]
    target = cache_folder() / "native" / f"kernels-{key}.so"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_suffix(".lock")), tempfile.TemporaryDirectory(dir=target.parent) as folder:
        if target.is_file():  # another process was first
            return target
        log.info("compiling the native kernels; this happens once")
        made = Path(folder) / "kernels.so"
        full = [*command, *(str(FOLDER / name) for name in SOURCES), "-o", str(made), *link, "-lm"]
        subprocess.run(full, check=True, capture_output=True, text=True, timeout=COMPILE_SECONDS)
        made.replace(target)
    return target


def _torch_openmp() -> Path | None:
    """The OpenMP runtime in torch's package; None: there is none."""
    found = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    return found[0] if found else None


def _processor() -> str:
    """The processor's features, which -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


class DecodeAttention(ctypes.Structure):
    """Arguments of `kvferry_attend_decode`; field for field the struct `Attention` of kernels.c."""

    _fields_ = (
        ("cache", ctypes.c_void_p),
        ("page_stride", ctypes.c_int64),
        ("query", ctypes.c_void_p),
        ("key", ctypes.c_void_p),
        ("value", ctypes.c_void_p),
        ("query_token", ctypes.c_int64),
        ("query_head", ctypes.c_int64),
        ("key_token", ctypes.c_int64),
        ("key_head", ctypes.c_int64),
        ("value_token", ctypes.c_int64),
        ("value_head", ctypes.c_int64),
        ("output", ctypes.c_void_p),
        ("page_tables", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("token_indices", ctypes.c_void_p),
        ("partial", ctypes.c_void_p),
        ("num_sequences", ctypes.c_int32),
        ("max_pages", ctypes.c_int32),
        ("num_heads", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("page_size", ctypes.c_int32),
        ("splits", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("scaling", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


MAX_GROUP, MAX_HEAD_DIM, HEAD_DIM_MULTIPLE = 16, 256, 32
"""Limits of single tokens' attention, as in decode_attention.h."""
TASKS_PER_THREAD = 4
"""Single tokens' attention is split until there are this many tasks per thread ..."""
MIN_SPLIT_TOKENS = 128
"""... but no split is shorter than this."""


def num_splits(num_heads: int, longest: int) -> int:
    """Parts into which the attention of a token is split.

    num_heads: KV heads of all sequences. longest: tokens of the longest sequence.
    """
    wanted = -(-TASKS_PER_THREAD * torch.get_num_threads() // num_heads)
    return max(1, min(wanted, longest // MIN_SPLIT_TOKENS))


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    library.kvferry_attend_decode.argtypes = [ctypes.POINTER(DecodeAttention)]
    library.kvferry_attend_decode.restype = None
    library.kvferry_rms_norm.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 2 + [ctypes.c_float]
    library.kvferry_rms_norm.restype = None
    if hasattr(library, "kvferry_run_layers"):  # the processor has bf16 instructions
        pointer, number = ctypes.c_void_p, ctypes.c_int32
        library.kvferry_run_layers.argtypes = [pointer] * 2
        library.kvferry_run_head.argtypes = [pointer] * 2 + [ctypes.c_float] + [pointer] * 2 + [number] + [pointer] * 3
        library.kvferry_run_head.argtypes += [number]
        library.kvferry_pack.argtypes = [pointer, number, number, pointer, number, number]
        for name in ("kvferry_run_layers", "kvferry_run_head", "kvferry_pack"):
            getattr(library, name).restype = None
    if hasattr(library, "kvferry_pack_int8"):  # and VNNI
        library.kvferry_pack_int8.argtypes = [*library.kvferry_pack.argtypes, pointer, pointer]
        library.kvferry_pack_int8.restype = None
    return library
