"""Writes pages over NIXL, with the transport that UCX finds between two machines: RDMA, NVLink, shared memory or TCP.

Measurements with nixl 1.5.1 that this design is based on:

* NIXL's progress thread spins and takes a whole core, so it is off and `take_notifications` drives progress.
* On shared memory, `transfer()` copies inside the call, without the GIL. Never call it on an event loop.
* A descriptor list with one entry per page is prepared once per peer. Writing consecutive entries is as fast as writing
  one large block (4096 pages of 12 KiB: 7.7 GB/s against 7.4), because NIXL merges consecutive entries.
* If a peer was killed or removed, calls raise; no state reports this. An exception ends the write as FAILED.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kv_transfer.base import Notification, PageRegion, WriteState
from kv_transfer.errors import PeerLost, TransferError, TransportUnavailable
from kv_transfer.local_transport import check_page_bytes, make_endpoint
from protos import kv_pb2

log = logging.getLogger(__name__)

BACKEND = "UCX"
RDMA_DEVICES = Path("/sys/class/infiniband")
_STATES = {"DONE": WriteState.DONE, "PROC": WriteState.IN_PROGRESS, "ERR": WriteState.FAILED}


@dataclass(frozen=True)
class _Peer:
    """A connected peer."""

    agent_name: str
    page_list: Any  # prepared list, one entry per remote page
    group_list: Any  # prepared list, one entry per layer group of a remote page; None if pages have one group


class _NixlWrite:
    def __init__(self, handle: Any, agent: Any, state: WriteState) -> None:
        self._handle, self._agent, self._state = handle, agent, state
        self._release_if_terminal()

    def poll(self) -> WriteState:
        """See `WriteHandle.poll`."""
        if self._state is WriteState.IN_PROGRESS:
            try:
                self._state = _STATES[self._agent.check_xfer_state(self._handle)]
            except Exception as error:  # the bindings raise untyped classes of their own
                log.warning("write failed: %s", error)
                self._state = WriteState.FAILED
            self._release_if_terminal()
        return self._state

    def _release_if_terminal(self) -> None:
        if self._state is not WriteState.IN_PROGRESS and self._handle is not None:
            try:
                self._agent.release_xfer_handle(self._handle)
            except Exception as error:
                log.debug("the handle of an ended write can't be released: %s", error)
            self._handle = None


def _forbid_tcp() -> None:
    """Excludes TCP from UCX's transports. Must run before UCX starts. Raises TransportUnavailable."""
    devices = sorted(path.name for path in RDMA_DEVICES.iterdir()) if RDMA_DEVICES.exists() else []
    if not devices:
        raise TransportUnavailable(f"--require-rdma, but this machine has no RDMA device ({RDMA_DEVICES} is empty)")
    allowed = os.environ.get("UCX_TLS", "")
    names = set(allowed.removeprefix("^").split(",")) - {""}
    if allowed.startswith("^") or not allowed:
        os.environ["UCX_TLS"] = "^" + ",".join(sorted(names | {"tcp"}))
    elif names & {"tcp", "all"}:
        raise TransportUnavailable(f"--require-rdma, but UCX_TLS={allowed} allows tcp")
    log.info("RDMA only", extra={"devices": ",".join(devices), "UCX_TLS": os.environ["UCX_TLS"]})


class NixlTransport:
    """See `Transport`. Registers the whole pool once."""

    def __init__(self, agent_name: str, region: PageRegion, require_rdma: bool = False) -> None:
        """Raises TransportUnavailable if NIXL or its UCX backend can't start here.

        require_rdma: never TCP; also raised if there is no RDMA device.
        """
        if require_rdma:
            _forbid_tcp()
        self.name = f"nixl/{BACKEND}"
        self.agent_name, self.region = agent_name, region
        # At INFO, NIXL's log repeats our log.
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise TransportUnavailable(f"the nixl package can't be loaded: {error}") from error
        try:
            self._agent: Any = nixl_agent(agent_name, nixl_agent_config(enable_prog_thread=False, backends=[BACKEND]))
            if BACKEND not in self._agent.backends:
                raise TransportUnavailable(f"NIXL has no {BACKEND} backend on this machine")
            self._registered: Any = self._agent.register_memory(
                [(region.base_address, region.num_pages * region.page_bytes, region.device_id, "")],
                mem_type=region.memory_type,
            )
            self._local_list: Any = self._prepare("NIXL_INIT_AGENT", region, 1)
            self._local_groups: Any = self._prepare_groups("NIXL_INIT_AGENT", region)
            self._metadata: bytes = self._agent.get_agent_metadata()
        except TransportUnavailable:
            raise
        except Exception as error:
            raise TransportUnavailable(
                f"NIXL with {BACKEND} can't start: {error} (UCX_TLS={os.environ.get('UCX_TLS', 'unset')}; "
                "leave UCX_TLS unset, or include tcp and shared memory in it)"
            ) from error
        self._peers: dict[str, _Peer] = {}

    def _prepare(self, agent_name: str, region: PageRegion, parts: int) -> Any:
        """A prepared descriptor list of all pages, each split into `parts` equal parts."""
        # [num_pages * parts, 3] of address, bytes, device
        entries = np.empty((region.num_pages * parts, 3), dtype=np.uint64)
        size = region.page_bytes // parts
        entries[:, 0] = region.base_address + np.arange(len(entries), dtype=np.uint64) * np.uint64(size)
        entries[:, 1] = size
        entries[:, 2] = region.device_id
        return self._agent.prep_xfer_dlist(agent_name, entries, region.memory_type)

    def _prepare_groups(self, agent_name: str, region: PageRegion) -> Any:
        # The writer decides how to split pages: both lists use the writer's number of groups.
        groups = self.region.num_layer_groups
        return self._prepare(agent_name, region, groups) if groups > 1 else None

    def endpoint(self) -> kv_pb2.TransferEndpoint:
        """See `Transport.endpoint`."""
        return make_endpoint("nixl", self.agent_name, self._metadata, self.region)

    def connect(self, endpoint: kv_pb2.TransferEndpoint) -> None:
        """See `Transport.connect`."""
        if endpoint.agent_name in self._peers:
            return
        check_page_bytes(self.region, endpoint)
        remote = PageRegion(
            endpoint.base_address,
            endpoint.num_pages + endpoint.num_test_pages,
            endpoint.page_bytes,
            endpoint.memory_type,
            endpoint.device_id,
        )
        try:
            self._agent.add_remote_agent(endpoint.agent_metadata)
            self._agent.make_connection(endpoint.agent_name)
            peer = _Peer(
                endpoint.agent_name,
                self._prepare(endpoint.agent_name, remote, 1),
                self._prepare_groups(endpoint.agent_name, remote),
            )
        except Exception as error:
            self._forget(endpoint.agent_name)
            raise TransferError(f"agent {endpoint.agent_name} can't be reached: {error}") from error
        self._peers[endpoint.agent_name] = peer

    def disconnect(self, agent_name: str) -> None:
        """See `Transport.disconnect`."""
        peer = self._peers.pop(agent_name, None)
        if peer is None:
            return
        try:
            peer.page_list.release()
            if peer.group_list is not None:
                peer.group_list.release()
        except Exception as error:
            log.debug("page list of agent %s can't be released: %s", agent_name, error)
        self._forget(agent_name)

    def _forget(self, agent_name: str) -> None:
        try:
            self._agent.remove_remote_agent(agent_name)
        except Exception as error:
            log.debug("agent %s can't be removed: %s", agent_name, error)

    def write(
        self,
        agent_name: str,
        local_pages: Seq[int],
        remote_pages: Seq[int],
        payload: bytes,
        layer_group: int | None = None,
    ) -> _NixlWrite:
        """See `Transport.write`."""
        peer = self._peer(agent_name)
        local_list, remote_list = self._local_list, peer.page_list
        local, remote = np.asarray(local_pages, dtype=np.int32), np.asarray(remote_pages, dtype=np.int32)
        if layer_group is not None:
            local_list, remote_list = self._local_groups, peer.group_list
            groups = self.region.num_layer_groups
            local, remote = local * groups + layer_group, remote * groups + layer_group
        try:
            handle = self._agent.make_prepped_xfer("WRITE", local_list, local, remote_list, remote, payload)
        except Exception as error:
            raise PeerLost(f"agent {agent_name} can't be written to: {error}") from error
        try:
            state = _STATES[self._agent.transfer(handle)]
        except Exception as error:
            # Some bytes may have been sent, so the write counts as failed, not as never posted.
            log.warning("write to agent %s failed: %s", agent_name, error)
            state = WriteState.FAILED
        return _NixlWrite(handle, self._agent, state)

    def notify(self, agent_name: str, payload: bytes) -> None:
        """See `Transport.notify`."""
        self._peer(agent_name)
        try:
            self._agent.send_notif(agent_name, payload)
        except Exception as error:
            raise PeerLost(f"agent {agent_name} can't be notified: {error}") from error

    def take_notifications(self) -> list[Notification]:
        """See `Transport.take_notifications`."""
        return [
            Notification(sender, payload)
            for sender, payloads in self._agent.get_new_notifs().items()
            for payload in payloads
        ]

    def close(self) -> None:
        """See `Transport.close`."""
        for agent_name in list(self._peers):
            self.disconnect(agent_name)
        try:
            self._local_list.release()
            if self._local_groups is not None:
                self._local_groups.release()
            self._agent.deregister_memory(self._registered)
        except Exception as error:
            log.debug("agent %s can't be closed: %s", self.agent_name, error)

    def _peer(self, agent_name: str) -> _Peer:
        peer = self._peers.get(agent_name)
        if peer is None:
            raise PeerLost(f"agent {agent_name} was never connected")
        return peer
