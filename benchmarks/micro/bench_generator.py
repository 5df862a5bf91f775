"""`make bench-generator`: what the load generator reports for a server with known latencies, at 1 to 512 streams.

The server sends the first token 200 ms after a request and the others 50 ms after each other, always. What the
generator reports beyond that is its own lag, or the server's, which the server reports.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.driver import GeneratorLoad, closed_loop, duration_of, watched
from benchmarks.metrics import summarise
from benchmarks.targets import OpenAiTarget
from benchmarks.workload import LoadRequest

STREAMS = (1, 64, 256, 512)
NUM_TOKENS = 60
TTFT_MS, ITL_MS = 200.0, 50.0


@dataclass(frozen=True)
class Point:
    """What was reported at one number of streams."""

    streams: int
    summary: dict[str, Any]
    generator: GeneratorLoad
    server: dict[str, float]
    """The server's own lateness in milliseconds: p50_ms, p99_ms."""


@contextmanager
def known_server(ttft_ms: float = TTFT_MS, itl_ms: float = ITL_MS) -> Iterator[str]:
    """Runs one in a process of its own. Gives its URL."""
    with tempfile.TemporaryDirectory(prefix="kvferry-known-") as folder:
        ready = Path(folder) / "ready.json"
        command = [sys.executable, "-m", "benchmarks.micro.known_server", "--ready-file", str(ready)]
        process = subprocess.Popen([*command, "--ttft-ms", str(ttft_ms), "--itl-ms", str(itl_ms)])
        try:
            end = time.monotonic() + 30
            while not ready.exists():
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError("the server did not start")
                time.sleep(0.02)
            yield str(json.loads(ready.read_text())["address"])
        finally:
            process.terminate()
            process.wait(10)


def measure(url: str, streams: int, num_tokens: int = NUM_TOKENS, rounds: int = 2) -> Point:
    """`streams` streams at once, `rounds` times each."""
    requests = [LoadRequest((300, 301), num_tokens)] * (streams * rounds)

    async def run() -> tuple[dict[str, Any], GeneratorLoad]:
        async with OpenAiTarget(f"{url}/v1", "known", 120) as target, watched() as generator:
            records = await closed_loop(target, requests, streams, lambda: None)
        return summarise(records, duration_of(records)), generator

    summary, generator = asyncio.run(run())
    with urllib.request.urlopen(url, timeout=10) as response:
        server = json.loads(response.read())
    return Point(streams, summary, generator, server)


def main() -> None:
    """Prints a table."""
    table = Table("streams", "TTFT p50, p99 ms", "ITL p50, p99 ms", "server late p50, p99 ms", "generator late p99 ms",
                  "of a core", "the limit", title=f"known: TTFT {TTFT_MS:g} ms, ITL {ITL_MS:g} ms")  # fmt: skip
    with known_server() as url:
        measure(url, 4, 5, 1)
        for streams in STREAMS:
            point = measure(url, streams)
            numbers, generator = point.summary, point.generator
            assert numbers["completed"] == numbers["offered"], numbers["statuses"]
            table.add_row(
                str(streams),
                f"{numbers['median_ttft_ms']:.1f}, {numbers['p99_ttft_ms']:.1f}",
                f"{numbers['median_itl_ms']:.1f}, {numbers['p99_itl_ms']:.1f}",
                f"{point.server['p50_ms']:.1f}, {point.server['p99_ms']:.1f}",
                f"{generator.p99_lag_ms:.1f}",
                f"{generator.cpu_share:.0%}",
                "yes" if generator.is_limit else "no",
            )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
