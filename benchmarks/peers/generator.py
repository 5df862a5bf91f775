"""`vllm bench serve`, the load generator for every server: how it is called, and what its result file says."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks.metrics import Slo
from benchmarks.peers.processes import PeerFailed, cpu_seconds, end_group, process_group, reason
from benchmarks.peers.servers import Server, Setting, vllm_variables
from benchmarks.records import RequestRecord
from engine.model_store import DEFAULT_MODEL

LOAD_BEGINS, LOAD_ENDS = "Starting main benchmark run", "Serving Benchmark Result"
"""Lines of its output. What it does before and after, importing and tokenizing, loads no server."""
NUM_WARMUPS = 4
SPARE_SECONDS = 600.0
"""It is ended if it takes this much longer than its arrivals."""


@dataclass(frozen=True)
class Load:
    """Requests of one length with Poisson arrivals."""

    prompt_tokens: int
    output_tokens: int
    rate: float
    """Requests per second."""

    def __str__(self) -> str:
        return f"{self.prompt_tokens}/{self.output_tokens}@{self.rate:g}"


@dataclass(frozen=True)
class Run:
    """One load on one server."""

    records: list[RequestRecord]
    duration: float
    """Seconds from the first request to the last token."""
    server_cores: float = 0.0
    """Cores that the server's processes kept busy."""
    generator_cores: float = 0.0
    """Cores that the load generator kept busy."""


def parse_load(text: str) -> Load:
    """512/64@1: prompts of 512 tokens, outputs of 64, 1 request per second. Raises ValueError."""
    found = re.fullmatch(r"(\d+)/(\d+)@(\d+(?:\.\d+)?)", text)
    load = found and Load(int(found[1]), int(found[2]), float(found[3]))
    if not load or load.prompt_tokens < 1 or load.output_tokens < 2 or load.rate <= 0:
        raise ValueError(
            f"--loads has {text!r}; it must look like 512/64@1: prompt tokens/output tokens@requests per s"
        )
    return load


def command(
    vllm: Path, url: str, model: Path, load: Load, num_prompts: int, seed: int, slo: Slo, result: Path
) -> list[str]:
    """How the generator is called. Equal seeds give equal prompts and arrivals."""
    return [
        str(vllm),
        *("bench", "serve", "--backend", "openai", "--endpoint", "/v1/completions"),
        *("--base-url", url, "--model", DEFAULT_MODEL, "--tokenizer", str(model)),
        *("--dataset-name", "random", "--ignore-eos", "--temperature", "0"),
        *("--random-input-len", str(load.prompt_tokens), "--random-output-len", str(load.output_tokens)),
        *("--num-prompts", str(num_prompts), "--num-warmups", str(NUM_WARMUPS)),
        *("--request-rate", f"{load.rate:g}", "--seed", str(seed)),
        *("--goodput", f"ttft:{slo.ttft_ms:g}", f"tpot:{slo.tpot_ms:g}"),
        *("--save-result", "--save-detailed", "--result-dir", str(result.parent), "--result-filename", result.name),
        "--disable-tqdm",
    ]


def offer(server: Server, setting: Setting, load: Load, num_prompts: int, seed: int, slo: Slo, result: Path) -> Run:
    """Runs a load. result: the file to write. Raises PeerFailed."""
    vllm, log = setting.vllm.folder / "bin" / "vllm", result.with_suffix(".log")
    called = command(vllm, server.url, setting.model, load, num_prompts, seed, slo, result)
    result.unlink(missing_ok=True)
    marks: list[tuple[float, float, float]] = []
    with process_group(called, log, vllm_variables(), stdout=subprocess.PIPE) as process, log.open("a") as file:
        limit = threading.Timer(num_prompts / load.rate + SPARE_SECONDS, end_group, (process,))
        limit.daemon = True
        limit.start()
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            if LOAD_BEGINS in line or LOAD_ENDS in line:
                marks.append((time.monotonic(), cpu_seconds(server.pids), cpu_seconds([process.pid])))
        code = process.wait()
        limit.cancel()
    if code or not result.is_file() or len(marks) != 2:
        raise PeerFailed(
            f"vllm bench serve ended with code {code}: {reason(log.read_text(errors='replace'))}; see {log}"
        )
    seconds, of_server, of_generator = (end - begin for begin, end in zip(*marks, strict=True))
    content = json.loads(result.read_text())
    return Run(records(content), float(content["duration"]), of_server / seconds, of_generator / seconds)


def records(result: Mapping[str, Any]) -> list[RequestRecord]:
    """The requests of a detailed result file. A failed one has no output tokens."""
    columns = ("start_times", "ttfts", "itls", "input_lens", "output_lens", "errors")
    found = []
    for start, ttft, gaps, prompt_tokens, output_tokens, error in zip(*(result[key] for key in columns), strict=True):
        is_ok = output_tokens > 0 and not error
        times = list(accumulate(gaps, initial=start + ttft)) if is_ok else []
        found.append(
            RequestRecord(
                scheduled=start,
                sent=start,
                token_times=times,
                ended=times[-1] if times else start,
                status="OK" if is_ok else "failed",
                error=error or "",
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens if is_ok else 0,
            )
        )
    return found
