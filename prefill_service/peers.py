"""The decode workers that a prefill worker is connected to, and the test pages that it sends them.

    connect ──> connected ── one test page (latency) ──> all test pages (rate, with their hash) ──> routers are told
       ^            └── a write failed, or no router wants it any more ──> disconnected

Several routers may want the same peer. Each has test pages sent for itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.transfer_thread import PageWrite, WriteEnded
from protos import kv_pb2, worker_pb2
from worker_runtime.parts import WorkerParts


@dataclass(eq=False)
class PairTest:
    """Test pages on their way to a peer, for one router."""

    session_id: int
    test_id: str
    agent_name: str
    first_remote_page: int
    page_us: float | None = None
    """Time of the first write, which is of one page. The second write is of all test pages."""


class Peers:
    """Lives on the engine thread."""

    def __init__(self, parts: WorkerParts) -> None:
        self._parts, self._digest = parts, parts.test_pages.digest()
        self._sessions: dict[str, set[int]] = {}
        """Which routers want which peer connected."""
        self._connecting: dict[str, list[PairTest]] = {}
        """Tests to begin once their peer is connected."""

    def __repr__(self) -> str:
        return f"<Peers {', '.join(self._sessions) or 'none'}>"

    def connect(self, session_id: int, command: worker_pb2.ConnectPeerCommand) -> None:
        """A router wants a peer connected and tested."""
        endpoint = command.endpoint
        self._sessions.setdefault(endpoint.agent_name, set()).add(session_id)
        test = PairTest(session_id, command.test_id, endpoint.agent_name, endpoint.num_pages)
        self._connecting.setdefault(endpoint.agent_name, []).append(test)
        self._parts.transfers.connect(endpoint)

    def connected(self, agent_name: str) -> None:
        """A peer can be written to."""
        for test in self._connecting.pop(agent_name, []):
            self._send_test_pages(test, num_pages=1, sha256=b"")

    def test_pages_written(self, test: PairTest, ended: WriteEnded) -> None:
        """A write of test pages has ended well."""
        seconds = ended.ended - ended.started
        if test.page_us is None:
            test.page_us = seconds * 1e6
            self._send_test_pages(test, len(self._parts.test_pages.page_ids), self._digest)
            return
        num_bytes = len(ended.write.local_pages) * self._parts.page_bytes
        event = worker_pb2.PeerEvent(
            agent_name=test.agent_name,
            ready=True,
            test_id=test.test_id,
            page_us=test.page_us,
            gb_per_s=num_bytes / max(seconds, 1e-9) / 1e9,
        )
        self._parts.sessions.add(test.session_id, worker_pb2.SessionResponse(peer=event))

    def failed(self, agent_name: str, reason: str) -> None:
        """A peer can't be written to: the routers that want it are told."""
        self._connecting.pop(agent_name, None)
        event = worker_pb2.PeerEvent(agent_name=agent_name, ready=False, reason=reason)
        for session_id in self._sessions.get(agent_name, set()) & set(self._parts.sessions.all_ids()):
            self._parts.sessions.add(session_id, worker_pb2.SessionResponse(peer=event))

    def forget(self, session_id: int, agent_name: str) -> None:
        """A router does not want a peer any more. Other routers may."""
        self._sessions.get(agent_name, set()).discard(session_id)

    def forget_session(self, session_id: int) -> list[str]:
        """A router is gone. Returns all peers, some of which nobody may want any more."""
        for wanted_by in self._sessions.values():
            wanted_by.discard(session_id)
        return list(self._sessions)

    def disconnect_if_unwanted(self, agent_name: str) -> None:
        """Lets go of a peer that no router wants. To be called when nothing is open towards it."""
        if self._sessions.get(agent_name) == set():
            del self._sessions[agent_name]
            self._connecting.pop(agent_name, None)
            self._parts.transfers.disconnect(agent_name)

    def _send_test_pages(self, test: PairTest, num_pages: int, sha256: bytes) -> None:
        told = kv_pb2.PairTest(test_id=test.test_id, sha256=sha256, writer_address=self._parts.address)
        write = PageWrite(
            tag=test,
            agent_name=test.agent_name,
            local_pages=self._parts.test_pages.page_ids[:num_pages],
            remote_pages=tuple(range(test.first_remote_page, test.first_remote_page + num_pages)),
            payload=kv_pb2.KvNotification(pair_test=told).SerializeToString(),
        )
        self._parts.transfers.write(write)
