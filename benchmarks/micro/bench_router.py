"""`make bench-router`: what a router costs, by itself. Workers are scripted: no model, tokens at full speed.

For 1, 64 and 512 streams over gRPC and HTTP: tokens forwarded per CPU-second of the router process; and at a steady
rate of tokens, the CPU time of a token, and its latency from worker to client (both on this machine, one clock). The
load comes from a process of its own, so that the client's Python is not what is measured. The bound is a gRPC server
without any logic, from the same run.

Then long prompts, as text: how many a router takes per second, and what paced streams notice of them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.micro.scripted_worker import age_seconds, tokenizer_hash
from benchmarks.micro.texts import own_pages
from engine.model_store import DEFAULT_MODEL, resolve_model
from router_client.clients import AsyncClient

STREAMS = (1, 64, 512)
PACED_TOKENS = 50
"""Of a paced output: five seconds at a token each 100 ms."""
LONG_PROMPTS_AT_ONCE = 64
"""Enough that the paced worker, which ends a prompt at its next step, is not the limit."""
STREAMS_BESIDE = 8
TURNS, TURN_CHARACTERS = 20, 1750


@dataclass(frozen=True)
class Outcome:
    """One measured load."""

    tokens_per_cpu_second: float
    tokens_per_second: float
    added_ms: tuple[float, float] | None
    """(p50, p99) latency of a token from worker to client."""


@contextmanager
def running_router(
    model: Path, step_ms: float, router_flags: tuple[str, ...] = (), worker_flags: tuple[str, ...] = ()
) -> Iterator[dict[str, Any]]:
    """A scripted worker and a router. Yields what the router's ready file says."""
    with tempfile.TemporaryDirectory() as folder:
        worker_file, router_file = Path(folder) / "worker.json", Path(folder) / "router.json"
        processes = [
            _start(
                [
                    "benchmarks.micro.scripted_worker",
                    "--tokenizer-hash",
                    tokenizer_hash(model),
                    "--step-ms",
                    str(step_ms),
                    *worker_flags,
                ],
                worker_file,
            )
        ]
        try:
            address = _ready(worker_file, processes[0])["address"]
            arguments = ["router", "--model", str(model), "--colocated", address, "--drain-seconds", "2", *router_flags]
            processes.append(_start(["kvferry", *arguments], router_file))
            yield _ready(router_file, processes[1])
        finally:
            for process in reversed(processes):
                process.terminate()
                process.wait(20)


@contextmanager
def running_bare_server(step_ms: float = 0.0) -> Iterator[dict[str, Any]]:
    """The public service without a router: gRPC's own cost. Yields what its ready file says."""
    with tempfile.TemporaryDirectory() as folder:
        ready_file = Path(folder) / "bare.json"
        process = _start(["benchmarks.micro.bare_server", "--step-ms", str(step_ms)], ready_file)
        try:
            yield _ready(ready_file, process)
        finally:
            process.terminate()
            process.wait(20)


def _start(arguments: list[str], ready_file: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", *arguments, "--ready-file", str(ready_file), "--log-level", "error"]
    return subprocess.Popen(command)


def _ready(file: Path, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    end = time.monotonic() + 60
    while not file.exists():
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError("a process did not become ready")
        time.sleep(0.02)
    content: dict[str, Any] = json.loads(file.read_text())
    return content


async def _grpc_stream(client: AsyncClient, max_tokens: int, ages: list[float]) -> int:
    stream = client.generate([5, 6, 7], max_tokens=max_tokens, ignore_eos=True, return_token_ids=True)
    number = 0
    async for piece in stream:
        number += len(piece.token_ids)
        ages += [age_seconds(token) for token in piece.token_ids]
    return number


async def _http_stream(client: httpx.AsyncClient, max_tokens: int, ages: list[float]) -> int:
    body = {"prompt": [5, 6, 7], "max_tokens": max_tokens, "ignore_eos": True, "stream": True, "return_token_ids": True}
    number = 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                ids = json.loads(line[6:])["choices"][0].get("token_ids", ())
                number += len(ids)
                ages += [age_seconds(token) for token in ids]
    return number


async def _load(front: str, info: dict[str, Any], streams: int, max_tokens: int, seconds: float) -> dict[str, Any]:
    """Keeps `streams` requests in flight for `seconds`."""
    ages: list[float] = []
    num_tokens = 0
    end = time.monotonic() + seconds

    async def keep_asking(client: Any) -> None:
        nonlocal num_tokens
        ask = _grpc_stream if front == "gRPC" else _http_stream
        while time.monotonic() < end:
            # First awaited, then added: others count meanwhile.
            number = await ask(client, max_tokens, ages)
            num_tokens += number

    if front == "gRPC":
        async with AsyncClient(info["address"]) as grpc_client:
            await asyncio.gather(*(keep_asking(grpc_client) for _ in range(streams)))
    else:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=info["http"], timeout=60, limits=limits) as http_client:
            await asyncio.gather(*(keep_asking(http_client) for _ in range(streams)))
    return {"tokens": num_tokens, "ages": ages}


def _run_load(arguments: tuple[str, dict[str, Any], int, int, float]) -> dict[str, Any]:
    return asyncio.run(_load(*arguments))


async def _long_prompts(address: str, name: str, known_turns: int, seconds: float) -> tuple[int, list[float]]:
    """Sends prompts of `TURNS` turns, several at once, beside paced streams. Returns their number, and ages of the
    streams' tokens. known_turns: turns at their beginning that all have in common; the rest no prompt has had before,
    if `name` is new."""
    ages: list[float] = []
    number, numbers, conversations = 0, itertools.count(), Conversations()
    known, end = conversations.turns("known", known_turns), time.monotonic() + seconds

    async with AsyncClient(address) as client, AsyncClient(address) as other:

        async def keep_asking() -> None:
            nonlocal number
            while time.monotonic() < end:
                prompt = known + conversations.turns(f"{name}/{next(numbers)}", TURNS - known_turns)
                async for _ in client.generate(prompt, max_tokens=1, ignore_eos=True):
                    pass
                number += 1

        async def stream() -> None:
            while time.monotonic() < end:
                await _grpc_stream(other, 10, ages)

        await asyncio.gather(
            *(keep_asking() for _ in range(LONG_PROMPTS_AT_ONCE)), *(stream() for _ in range(STREAMS_BESIDE))
        )
    return number, ages


def _run_long_prompts(arguments: tuple[str, str, int, float]) -> tuple[int, list[float]]:
    return asyncio.run(_long_prompts(*arguments))


class Conversations:
    """Conversations as text, of turns of about 500 tokens. No two turns with different names are alike."""

    def __init__(self) -> None:
        self._text = "\n".join(own_pages()).replace("<|", "")

    def turns(self, name: str, number: int) -> str:
        """Some turns."""
        return "".join(self._turn(f"{name}/{turn}", ("user", "assistant")[turn % 2]) for turn in range(number))

    def _turn(self, name: str, role: str) -> str:
        start = random.Random(name).randrange(len(self._text) - TURN_CHARACTERS)
        return f"<|im_start|>{role}\n{name} {self._text[start : start + TURN_CHARACTERS]}<|im_end|>\n"


def long_prompts(model: Path, seconds: float, step_ms: float, console: Console) -> None:
    """Prompts of 10,000 tokens: each one new, and each one a conversation of which only the last turn is new."""
    kinds = {"all new": 0, f"last of {TURNS} turns new": TURNS - 1}
    table = Table(title=f"prompts of 10,000 tokens as text, {LONG_PROMPTS_AT_ONCE} at once")
    for column in ("prompts", "prompts/s", "CPU ms each", "streams beside: added ms p50", "p99"):
        table.add_column(column, justify="left" if column == "prompts" else "right")
    for name, known_turns in kinds.items():
        with running_router(model, step_ms, worker_flags=("--max-model-len", "16384")) as info:
            router = psutil.Process(info["pid"])
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                pool.map(_run_long_prompts, [(info["address"], "first", TURNS - 1, 0.2)])
                before, started = router.cpu_times(), time.monotonic()
                [(number, ages)] = pool.map(_run_long_prompts, [(info["address"], "measured", known_turns, seconds)])
                after, elapsed = router.cpu_times(), time.monotonic() - started
        cpu = (after.user + after.system) - (before.user + before.system)
        added = np.percentile(np.asarray(ages) * 1e3, [50, 99])
        table.add_row(
            name, f"{number / elapsed:.0f}", f"{cpu / number * 1e3:.1f}", *(f"{value:.1f}" for value in added)
        )
    console.print(table)


def measure(front: str, info: dict[str, Any], streams: int, max_tokens: int, seconds: float) -> Outcome:
    """One load, from a process of its own."""
    router = psutil.Process(info["pid"])
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        pool.map(_run_load, [(front, info, 1, 8, 0.2)])  # imports and connections, not measured
        before, started = router.cpu_times(), time.monotonic()
        [result] = pool.map(_run_load, [(front, info, streams, max_tokens, seconds)])
        after, elapsed = router.cpu_times(), time.monotonic() - started
    cpu = (after.user + after.system) - (before.user + before.system)
    ages = np.asarray(result["ages"]) * 1e3
    added = (float(np.percentile(ages, 50)), float(np.percentile(ages, 99))) if len(ages) else None
    return Outcome(result["tokens"] / cpu, result["tokens"] / elapsed, added)


def main(model: str = DEFAULT_MODEL, seconds: float = 5.0, max_tokens: int = 200, step_ms: float = 100.0) -> None:
    """Measures a router with scripted workers. step_ms: time between tokens of a stream, for the added latency."""
    console, folder = Console(), resolve_model(model)
    table = Table(title=f"one router, {os.cpu_count()} cores; outputs of {max_tokens} tokens")
    for column in ("front", "streams", "tokens per CPU-s", "of bare gRPC", "tokens/s"):
        table.add_column(column, justify="right")
    for column in ("paced: CPU-µs per token", "of bare gRPC", "added ms p50", "p99"):
        table.add_column(column, justify="right")
    bare = {}
    for streams in track(STREAMS, "bare gRPC", console=console, transient=True):
        with running_bare_server() as info:
            full = measure("gRPC", info, streams, max_tokens, seconds)
        with running_bare_server(step_ms) as info:
            bare[streams] = full, measure("gRPC", info, streams, PACED_TOKENS, seconds)
    cases = [(front, streams) for front in ("gRPC", "HTTP") for streams in STREAMS]
    for front, streams in track(cases, "router", console=console, transient=True):
        with running_router(folder, 0.0) as info:
            full = measure(front, info, streams, max_tokens, seconds)
        with running_router(folder, step_ms) as info:
            paced = measure(front, info, streams, PACED_TOKENS, seconds)
        assert paced.added_ms is not None
        bare_full, bare_paced = bare[streams]
        table.add_row(
            front,
            str(streams),
            f"{full.tokens_per_cpu_second:,.0f}",
            f"{full.tokens_per_cpu_second / bare_full.tokens_per_cpu_second:.2f}",
            f"{full.tokens_per_second:,.0f}",
            f"{1e6 / paced.tokens_per_cpu_second:.0f}",
            f"{bare_paced.tokens_per_cpu_second / paced.tokens_per_cpu_second:.1f} x",
            *(f"{value:.2f}" for value in paced.added_ms),
        )
    console.print(table)
    console.print(f"added: from worker to client, at one token each {step_ms:.0f} ms per stream", highlight=False)
    console.print(
        "of bare gRPC: against a server that streams one ready-made message per token, tokens per CPU-s at full speed "
        "(above 1 where the router joins tokens that wait), and CPU-µs per token paced",
        highlight=False,
    )
    long_prompts(folder, seconds, step_ms, console)


if __name__ == "__main__":
    tyro.cli(main)
