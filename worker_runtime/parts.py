"""What a tier's loop is built from."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from engine.model_runner import ModelRunner
from engine.page_pool import PagePool
from kv_transfer.transfer_thread import TransferThread
from worker_runtime.health import Health
from worker_runtime.inbox import Inbox, InboxMessage
from worker_runtime.metrics import WorkerMetrics
from worker_runtime.probe import ProbePages
from worker_runtime.session import Sessions


@dataclass(frozen=True)
class WorkerParts:
    """Everything around a loop; each is used by the engine thread unless its methods say otherwise."""

    runner: ModelRunner
    pool: PagePool
    page_size: int
    transfers: TransferThread
    transport_name: str
    page_bytes: int
    vocab_size: int
    inbox: Inbox
    sessions: Sessions
    metrics: WorkerMetrics
    loop: asyncio.AbstractEventLoop
    probe_pages: ProbePages
    worker_id: str
    incarnation_id: str
    agent_name: str
    address: str
    """host:port at which other workers reach this one."""
    num_layer_groups: int = 1
    """Parts in which pages can be sent; see `KvCache.num_layer_groups`."""
    health: Health = field(default_factory=Health)

    def deliver_later(self, seconds: float, message: InboxMessage) -> None:
        """From any thread: a message to the engine thread after some time."""
        self.loop.call_soon_threadsafe(self.loop.call_later, seconds, self.inbox.put, message)
