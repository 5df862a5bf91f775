"""A transport within one process: a fake for tests.

A write copies at its second poll, not when posted. So tests find code that reads pages before the write is done.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Sequence as Seq

from kv_transfer.base import Notification, PageRegion, WriteState
from kv_transfer.errors import PeerLost, TransferError
from protos import kv_pb2


class LocalHub:
    """Registry of the agents in one process that can reach each other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._agents: dict[str, LocalTransport] = {}

    def add(self, agent: LocalTransport) -> None:
        """Makes an agent reachable. Raises TransferError if the name is in use."""
        with self._lock:
            if agent.agent_name in self._agents:
                raise TransferError(f"agent {agent.agent_name} exists already")
            self._agents[agent.agent_name] = agent

    def remove(self, agent_name: str) -> None:
        """Makes an agent unreachable."""
        with self._lock:
            self._agents.pop(agent_name, None)

    def find(self, agent_name: str) -> LocalTransport:
        """The agent. Raises PeerLost."""
        with self._lock:
            agent = self._agents.get(agent_name)
        if agent is None:
            raise PeerLost(f"agent {agent_name} is gone")
        return agent


class _LocalWrite:
    def __init__(
        self,
        sender: LocalTransport,
        agent_name: str,
        local: Seq[int],
        remote: Seq[int],
        payload: bytes,
        layer_group: int | None,
    ) -> None:
        self._sender, self._agent_name, self._payload = sender, agent_name, payload
        self._layer_group = layer_group
        self._local, self._remote = list(local), list(remote)
        self._polls = 0
        self._state = WriteState.IN_PROGRESS

    def poll(self) -> WriteState:
        """See `WriteHandle.poll`."""
        self._polls += 1
        if self._state is WriteState.IN_PROGRESS and self._polls > 1:
            try:
                self._copy(self._sender.hub.find(self._agent_name))
                self._state = WriteState.DONE
            except PeerLost:
                self._state = WriteState.FAILED
        return self._state

    def _copy(self, receiver: LocalTransport) -> None:
        source, target = self._sender.region, receiver.region
        size, offset = source.page_bytes, 0
        if self._layer_group is not None:
            size //= source.num_layer_groups
            offset = self._layer_group * size
        for local, remote in zip(self._local, self._remote, strict=True):
            ctypes.memmove(
                target.base_address + remote * target.page_bytes + offset,
                source.base_address + local * source.page_bytes + offset,
                size,
            )
        if self._payload:
            receiver.inbox.append(Notification(self._sender.agent_name, self._payload))


class LocalTransport:
    """See `Transport`."""

    def __init__(self, hub: LocalHub, agent_name: str, region: PageRegion) -> None:
        self.name = "local"
        self.hub, self.agent_name, self.region = hub, agent_name, region
        self.inbox: deque[Notification] = deque()
        self._peers: set[str] = set()
        hub.add(self)

    def endpoint(self) -> kv_pb2.TransferEndpoint:
        """See `Transport.endpoint`."""
        return make_endpoint("local", self.agent_name, b"", self.region)

    def connect(self, endpoint: kv_pb2.TransferEndpoint) -> None:
        """See `Transport.connect`."""
        check_page_bytes(self.region, endpoint)
        self.hub.find(endpoint.agent_name)
        self._peers.add(endpoint.agent_name)

    def disconnect(self, agent_name: str) -> None:
        """See `Transport.disconnect`."""
        self._peers.discard(agent_name)

    def write(
        self,
        agent_name: str,
        local_pages: Seq[int],
        remote_pages: Seq[int],
        payload: bytes,
        layer_group: int | None = None,
    ) -> _LocalWrite:
        """See `Transport.write`."""
        self._check_known(agent_name)
        self.hub.find(agent_name)
        return _LocalWrite(self, agent_name, local_pages, remote_pages, payload, layer_group)

    def notify(self, agent_name: str, payload: bytes) -> None:
        """See `Transport.notify`."""
        self._check_known(agent_name)
        self.hub.find(agent_name).inbox.append(Notification(self.agent_name, payload))

    def take_notifications(self) -> list[Notification]:
        """See `Transport.take_notifications`."""
        taken = []
        while self.inbox:
            taken.append(self.inbox.popleft())
        return taken

    def close(self) -> None:
        """See `Transport.close`."""
        self.hub.remove(self.agent_name)

    def _check_known(self, agent_name: str) -> None:
        if agent_name not in self._peers:
            raise PeerLost(f"agent {agent_name} was never connected")


def make_endpoint(transport: str, agent_name: str, metadata: bytes, region: PageRegion) -> kv_pb2.TransferEndpoint:
    """The wire form of an agent's page region."""
    return kv_pb2.TransferEndpoint(
        transport=transport,
        agent_name=agent_name,
        agent_metadata=metadata,
        base_address=region.base_address,
        num_pages=region.num_pages - region.num_test_pages,
        page_bytes=region.page_bytes,
        memory_type=region.memory_type,
        device_id=region.device_id,
        num_test_pages=region.num_test_pages,
    )


def check_page_bytes(region: PageRegion, endpoint: kv_pb2.TransferEndpoint) -> None:
    """Raises TransferError if a peer's pages have another size than ours."""
    if endpoint.page_bytes != region.page_bytes:
        raise TransferError(
            f"agent {endpoint.agent_name} has pages of {endpoint.page_bytes} bytes, this worker of {region.page_bytes}"
        )
