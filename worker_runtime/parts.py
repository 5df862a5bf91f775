"""What the loops of workers are built from."""

from __future__ import annotations

from dataclasses import dataclass

from engine.page_pool import PagePool
from kv_transfer.transfer_thread import TransferThread
from rpc.clock import Clock
from worker_runtime.health import Health
from worker_runtime.inbox import Inbox, InboxMessage
from worker_runtime.metrics import WorkerMetrics
from worker_runtime.pair_test_pages import PairTestPages
from worker_runtime.session import Sessions


@dataclass(frozen=True)
class WorkerParts:
    """Everything around a loop. The engine thread uses it, unless the part says otherwise."""

    pool: PagePool
    page_size: int
    transfers: TransferThread
    transport_name: str
    page_bytes: int
    vocab_size: int
    inbox: Inbox
    sessions: Sessions
    metrics: WorkerMetrics
    clock: Clock
    health: Health
    test_pages: PairTestPages
    worker_id: str
    incarnation_id: str
    agent_name: str
    address: str
    """host:port at which other workers reach this one."""
    token_budget: int = 0
    """Prompt tokens per step; 0: this worker computes no prompts."""
    num_layer_groups: int = 1
    """Parts in which pages can be sent; see `KvCache.num_layer_groups`."""

    def deliver_later(self, seconds: float, message: InboxMessage) -> None:
        """From any thread: a message to the engine thread after some time."""
        self.clock.call_soon_threadsafe(self.clock.call_later, seconds, self.inbox.put, message)
