"""What only one tier of workers does: the hooks that the engine loop calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.device import IsWritten
from engine.forward import OnLayerGroup
from protos import worker_pb2
from worker_runtime.inbox import InboxMessage
from worker_runtime.request import WorkerRequest
from worker_runtime.request_table import FINISHED, RequestTable
from worker_runtime.step import Step


@dataclass(frozen=True)
class PageOwners:
    """Who should own pages, according to the requests and not to the pool."""

    tables: Iterable[Iterable[int]]
    """Pages of sequences."""
    reads: Iterable[Iterable[int]] = ()
    """Pages of our own open writes."""
    writes: Iterable[Iterable[int]] = ()
    """Pages open to foreign writers."""


class TierHooks:
    """Hooks, with what most tiers do."""

    requests: RequestTable

    def handle_command(self, session_id: int, request: worker_pb2.SessionRequest) -> bool:
        """Acts on a router's command that only this tier knows. False: it does not."""
        return False

    def handle(self, message: InboxMessage) -> None:
        """Acts on a message that is of no concern to the other tiers; ignores all others."""

    def before_run(self, step: Step) -> OnLayerGroup | None:
        """A step is about to run. Returns what is to be told while its layers are computed."""
        return None

    def after_launch(self, step: Step, is_written: IsWritten | None) -> None:
        """A step was launched, and the scheduler has taken note. is_written: see `StepLogits.is_written`."""

    def after_token(self, request: WorkerRequest, token_id: int, output: worker_pb2.TokenOutput) -> None:
        """A request has its next token. If `output.finish_reason` is set, its output is complete."""
        if output.finish_reason:
            self.requests.end(request, FINISHED)

    def preempt(self, request: WorkerRequest) -> None:
        """The scheduler took a sequence's pages, since older sequences needed them."""
        raise AssertionError(f"{request!r} was preempted by a scheduler that preempts nobody")

    def has_open_transfers(self) -> bool:
        """Whether a page may still be touched by a transfer."""
        return False

    def page_owners(self) -> PageOwners:
        """Who should own pages now."""
        return PageOwners(tables=[request.sequence.page_table for request in self.requests])
