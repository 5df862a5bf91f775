"""What kvferry asks of a transport: write pages into a peer's pool, and tell it so afterwards.

The fake stands beside the real thing: `local_transport` (one process) and `nixl_transport` pass the same tests.
A transport is used by one thread only, the one in `transfer_thread`.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from protos import kv_pb2


@dataclass(frozen=True)
class PageRegion:
    """The memory of a worker's page pool."""

    base_address: int
    num_pages: int
    """Of all pages, those for tests of connections included."""
    page_bytes: int
    memory_type: str = "DRAM"
    """"DRAM" or "VRAM"."""
    device_id: int = 0
    num_test_pages: int = 0
    """The last ones, which only tests of connections are written to."""
    num_layer_groups: int = 1
    """Equal parts of a page, each the pages' share of some layers, that can be written by themselves."""


class WriteState(Enum):
    """How far a write is. All but IN_PROGRESS are terminal: our own pages are not read any more.

    After DONE the peer's pages are not written any more either. After FAILED that is not known: measured over TCP,
    bytes already handed to the kernel still landed when the target drove its progress.
    """

    IN_PROGRESS = "in progress"
    DONE = "done"
    FAILED = "failed"


class WriteHandle(Protocol):
    """A write that was posted."""

    def poll(self) -> WriteState:
        """How far it is. After a terminal state the handle is released and keeps answering the same."""
        ...


@dataclass(frozen=True)
class Notification:
    """A message of a peer. It arrives after the data of the write it was posted with."""

    sender: str
    """The peer's agent name."""
    payload: bytes


class Transport(Protocol):
    """Moves pages. Agent names carry the incarnation of their process, so a name is never used twice."""

    name: str
    """What carries the bytes, for logs and reports, for example "nixl/UCX"."""

    def endpoint(self) -> kv_pb2.TransferEndpoint:
        """What a peer needs to write to our pages."""
        ...

    def connect(self, endpoint: kv_pb2.TransferEndpoint) -> None:
        """Gets ready to write to a peer. Idempotent. Raises TransferError."""
        ...

    def disconnect(self, agent_name: str) -> None:
        """Forgets a peer. Unknown ones are ignored."""
        ...

    def write(
        self,
        agent_name: str,
        local_pages: Seq[int],
        remote_pages: Seq[int],
        payload: bytes,
        layer_group: int | None = None,
    ) -> WriteHandle:
        """Posts a write of whole pages, or of one layer group of them; the peer gets `payload`, unless it is empty,
        once they are there.

        Raises PeerLost if the peer is unknown or gone: then nothing was posted.
        """
        ...

    def notify(self, agent_name: str, payload: bytes) -> None:
        """Sends a message without data. Raises PeerLost."""
        ...

    def take_notifications(self) -> list[Notification]:
        """Messages that arrived since the last call. Also drives the transport's progress."""
        ...

    def close(self) -> None:
        """Lets go of memory and peers. Every write must be terminal."""
        ...
