"""A TCP link that can be cut, go silent, or become slow, between processes that do not know of it."""

from __future__ import annotations

import asyncio
import contextlib


class LinkProxy:
    """Forwards connections to a target. `address` stands for the target's."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._server: asyncio.Server | None = None
        self._pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._flows = asyncio.Event()
        self._flows.set()
        self._is_cut = False
        self.delay_seconds = 0.0
        self.address = ""

    async def start(self) -> LinkProxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def cut(self) -> None:
        """Both ends see it: connections are reset, new ones are refused at once."""
        self._is_cut = True
        for pair in list(self._pairs):
            for writer in pair:
                writer.transport.abort()

    def silence(self) -> None:
        """Half-open: nobody is told, nothing comes through."""
        self._flows.clear()

    def heal(self) -> None:
        self._is_cut = False
        self._flows.set()

    async def close(self) -> None:
        self.heal()
        self.cut()
        if self._server is not None:
            self._server.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection(self._host.strip("[]"), self._port)
        except OSError:
            writer.transport.abort()
            return
        pair = (writer, far_writer)
        self._pairs.add(pair)
        try:
            await asyncio.gather(self._carry(reader, far_writer), self._carry(far_reader, writer))
        finally:
            self._pairs.discard(pair)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                await self._flows.wait()
                if self.delay_seconds:
                    await asyncio.sleep(self.delay_seconds)
                writer.write(data)
                await writer.drain()
        writer.close()
