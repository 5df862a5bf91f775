"""The interface of transports, which write pages into a peer's pool and then notify the peer.

The fake `local_transport` (one process) and `nixl_transport` pass the same tests.
Only one thread uses a transport: the thread in `transfer_thread`.
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
    """Number of pages, test pages included."""
    page_bytes: int
    memory_type: str = "DRAM"
    """"DRAM" or "VRAM"."""
    device_id: int = 0
    num_test_pages: int = 0
    """Number of test pages, the last pages of the region. Only connection tests write to them."""
    num_layer_groups: int = 1
    """Number of equal parts of a page that can be written separately. A part has the K and V of some layers."""


class WriteState(Enum):
    """State of a write. DONE and FAILED are terminal: the write does not read our pages any more.

    After DONE, the write does not change the peer's pages any more either. After FAILED it may. Measured over TCP:
    bytes that the kernel already had still arrived when the target drove progress.
    """

    IN_PROGRESS = "in progress"
    DONE = "done"
    FAILED = "failed"


class WriteHandle(Protocol):
    """A posted write."""

    def poll(self) -> WriteState:
        """The state of the write. A terminal state releases the handle; later calls return the same state."""
        ...


@dataclass(frozen=True)
class Notification:
    """A message of a peer. If the message belongs to a write, the data of the write has arrived before."""

    sender: str
    """The peer's agent name."""
    payload: bytes


class Transport(Protocol):
    """Moves pages. An agent name has the incarnation id of its process, so a name is never used twice."""

    name: str
    """Name for logs and reports, for example "nixl/UCX"."""

    def endpoint(self) -> kv_pb2.TransferEndpoint:
        """The data that a peer needs to write to our pages."""
        ...

    def connect(self, endpoint: kv_pb2.TransferEndpoint) -> None:
        """Prepares writes to a peer. Idempotent. Raises TransferError."""
        ...

    def disconnect(self, agent_name: str) -> None:
        """Removes a peer. Unknown peers are ignored."""
        ...

    def write(
        self,
        agent_name: str,
        local_pages: Seq[int],
        remote_pages: Seq[int],
        payload: bytes,
        layer_group: int | None = None,
    ) -> WriteHandle:
        """Posts a write of whole pages, or of one layer group of pages. Once the data has arrived, the peer receives
        `payload` as a notification; an empty payload is not sent.

        Raises PeerLost if the peer is unknown or gone. Nothing was posted then.
        """
        ...

    def notify(self, agent_name: str, payload: bytes) -> None:
        """Sends a message without data. Raises PeerLost."""
        ...

    def take_notifications(self) -> list[Notification]:
        """Notifications that arrived since the last call. Also drives the transport's progress."""
        ...

    def close(self) -> None:
        """Releases memory and peers. Every write must be terminal."""
        ...
