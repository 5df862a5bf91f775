"""A server with known latencies: OpenAI's completions over HTTP, with the first token after a stated time and the
others at stated gaps. For measuring a load generator, and nothing else: it computes nothing.

It notes how late it was itself, so that its own lateness is not taken for the generator's.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import json
import os
import time
from dataclasses import dataclass, field

import tyro

from rpc.config import ProcessConfig
from rpc.process import install_stop_signals, prepare_process, run_process, write_ready_file

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
_TOKEN = b'data: {"choices":[{"index":0,"text":" token","finish_reason":null}]}\n\n'


@dataclass(frozen=True)
class KnownConfig:
    """A server whose times are known."""

    process: ProcessConfig = field(default_factory=ProcessConfig)
    ttft_ms: float = 200.0
    """From a whole request to its first token."""
    itl_ms: float = 50.0
    """From each token to the next."""


class KnownServer:
    """Writes events when they are due. One heap for all streams: a timer for each token would cost more."""

    def __init__(self, config: KnownConfig) -> None:
        self._ttft, self._itl = config.ttft_ms / 1e3, config.itl_ms / 1e3
        self._due: list[tuple[float, int, int, int, asyncio.StreamWriter]] = []
        self._woken = asyncio.Event()
        self._count = 0
        self.lateness: list[float] = []

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, one request."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        if head.startswith("get"):
            late = sorted(self.lateness) or [0.0]
            body = json.dumps({"p50_ms": late[len(late) // 2] * 1e3, "p99_ms": late[len(late) * 99 // 100] * 1e3})
            self.lateness.clear()
            writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n{body}".encode())
            writer.close()
            return
        if "/completions " not in head.split("\r\n", 1)[0]:
            writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            writer.close()
            return
        length = next(int(line.split(":")[1]) for line in head.split("\r\n") if line.startswith("content-length"))
        body = json.loads(await reader.readexactly(length))
        due = time.perf_counter() + self._ttft
        writer.write(_HEAD)
        self._count += 1
        heapq.heappush(self._due, (due, self._count, 0, int(body["max_tokens"]), writer))
        self._woken.set()

    async def run(self) -> None:
        """Writes what is due, for ever."""
        while True:
            if not self._due:
                self._woken.clear()
                await self._woken.wait()
            pause = self._due[0][0] - time.perf_counter()
            if pause > 0:
                self._woken.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._woken.wait(), pause)
                continue
            self._write(*heapq.heappop(self._due))
            if len(self.lateness) % 64 == 0:
                await asyncio.sleep(0)

    def _write(self, due: float, number: int, index: int, num_tokens: int, writer: asyncio.StreamWriter) -> None:
        self.lateness.append(time.perf_counter() - due)
        if writer.is_closing():
            return
        if index + 1 < num_tokens:
            writer.write(_TOKEN)
            heapq.heappush(self._due, (due + self._itl, number, index + 1, num_tokens, writer))
            return
        usage = {"prompt_tokens": 1, "completion_tokens": num_tokens}
        last = {"choices": [{"index": 0, "text": " end", "finish_reason": "length"}], "usage": usage}
        writer.write(f"data: {json.dumps(last)}\n\ndata: [DONE]\n\n".encode())
        writer.close()


async def _serve(config: KnownConfig) -> int:
    stop = asyncio.Event()
    install_stop_signals(stop)
    known = KnownServer(config)
    server = await asyncio.start_server(known.handle, config.process.host, config.process.port, backlog=4096)
    port = server.sockets[0].getsockname()[1]
    running = asyncio.create_task(known.run())
    address = f"http://{config.process.host}:{port}"
    write_ready_file(config.process.ready_file, {"address": address, "pid": os.getpid()})
    await stop.wait()
    running.cancel()
    server.close()
    return 0


def serve(config: KnownConfig) -> int:
    """Runs until a signal stops it."""
    prepare_process(config.process)
    return asyncio.run(_serve(config))


if __name__ == "__main__":
    chosen = tyro.cli(tyro.conf.OmitArgPrefixes[KnownConfig], description=KnownConfig.__doc__)
    run_process(lambda: serve(chosen), ())
