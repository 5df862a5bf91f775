"""The requests that a worker has. They begin and end here and nowhere else.

    command ── admit ──> in the table ── end(FINISHED | ABORTED | ended_by(cause)) ──> forgotten
                  └──> refused: the router is told why, nothing is kept

Every request ends exactly once. `RequestTable.end` counts it, tells the scheduler, tells the router where the router
does not know, and has the tier let go of what only the tier has. A request that is *finished* is told to the router by
its last token or, at a prefill worker, by TransferFinished.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple

from engine.sequence import Sequence
from kv_transfer.request_ref import RequestRef
from protos import kv_pb2, worker_pb2
from worker_runtime.parts import WorkerParts
from worker_runtime.request import WorkerRequest, check_spec
from worker_runtime.step import Scheduler

log = logging.getLogger(__name__)


class Refusal(NamedTuple):
    """Why a worker does not take a request."""

    cause: worker_pb2.Cause.ValueType
    message: str = ""


class End(NamedTuple):
    """How a request ends at a worker."""

    name: str
    """As it is counted."""
    cause: worker_pb2.Cause.ValueType = worker_pb2.CAUSE_UNSPECIFIED
    """Set if the router is to be told."""
    message: str = ""


FINISHED = End("finished", message="finished")
"""The worker has done its part: the output is complete or, at a prefill worker, all pages are sent."""
ABORTED = End("aborted", message="aborted by its router")
ORPHANED = End("aborted", message="its router is gone")


def ended_by(cause: worker_pb2.Cause.ValueType, message: str) -> End:
    """The worker ends it before its last token."""
    names = {worker_pb2.CAUSE_NO_PAGES: "preempted", worker_pb2.CAUSE_DRAINING: "requeued"}
    return End(names.get(cause, "failed"), cause, message)


class RequestTable:
    """Lives on the engine thread."""

    def __init__(self, parts: WorkerParts, scheduler: Scheduler, on_end: Callable[[WorkerRequest, str], None]) -> None:
        """on_end: called with each request that has ended, and why in words; for what only the tier has of it."""
        self._parts, self._scheduler, self._on_end = parts, scheduler, on_end
        self._by_ref: dict[RequestRef, WorkerRequest] = {}
        self._by_sequence: dict[str, WorkerRequest] = {}
        self.is_draining = False
        """Takes nothing new."""

    def __len__(self) -> int:
        return len(self._by_ref)

    def __iter__(self) -> Iterator[WorkerRequest]:
        return iter(list(self._by_ref.values()))

    def __repr__(self) -> str:
        return f"<RequestTable {', '.join(map(repr, self)) or 'empty'}>"

    def admit(
        self,
        session_id: int,
        ref: kv_pb2.RequestRef,
        spec: worker_pb2.SequenceSpec,
        enqueue: Callable[[WorkerRequest], Refusal | None],
    ) -> WorkerRequest | None:
        """Takes a request, or tells its router why not and returns None.

        enqueue: gives the request to the scheduler, or says why that can't be done and keeps nothing of the request.
        """
        name = RequestRef.from_proto(ref)
        refusal = self._refusal(name, spec)
        request = None
        if refusal is None:
            request = WorkerRequest.from_spec(session_id, name, spec, self._parts.clock.now)
            refusal = enqueue(request)
        if refusal is not None or request is None:
            assert refusal is not None
            self._refuse(session_id, name, refusal)
            return None
        self._by_ref[name] = self._by_sequence[request.sequence.sequence_id] = request
        return request

    def find(self, ref: kv_pb2.RequestRef, session_id: int) -> WorkerRequest | None:
        """The request of a router, or None if it has no such request here."""
        request = self.get(RequestRef.from_proto(ref))
        return request if request is not None and request.session_id == session_id else None

    def get(self, ref: RequestRef) -> WorkerRequest | None:
        """The request with this name, whoever sent it."""
        return self._by_ref.get(ref)

    def of_sequence(self, sequence: Sequence) -> WorkerRequest | None:
        """The request that this very sequence belongs to; None if the request has ended."""
        request = self._by_sequence.get(sequence.sequence_id)
        return request if request is not None and request.sequence is sequence else None

    def scheduled(self, sequence: Sequence) -> WorkerRequest:
        """The request of a sequence that its scheduler still knows."""
        request = self.of_sequence(sequence)
        assert request is not None, f"{sequence.sequence_id} is scheduled, but its request has ended"
        return request

    def of_session(self, session_id: int) -> list[WorkerRequest]:
        """All requests of a router."""
        return [request for request in self._by_ref.values() if request.session_id == session_id]

    def end(self, request: WorkerRequest, end: End) -> None:
        """Ends a request. Harmless if it has ended."""
        if self._by_ref.get(request.ref) is not request:
            return
        del self._by_ref[request.ref], self._by_sequence[request.sequence.sequence_id]
        if end.cause:
            self._tell_router(request, end)
        if end == FINISHED:
            self._scheduler.finish(request.sequence)
        else:
            self._scheduler.abort(request.sequence)
        self._parts.metrics.count_end(end.name)
        self._on_end(request, end.message)

    def _tell_router(self, request: WorkerRequest, end: End) -> None:
        level = logging.WARNING if end.name == "failed" else logging.INFO
        ref = request.ref
        about = {"request_id": ref.request_id, "attempt": ref.attempt, "reason": end.message}
        log.log(level, "request %s", end.name, extra=about)
        event = worker_pb2.RequestEndedEvent(
            ref=ref.to_proto(),
            cause=end.cause,
            message=end.message,
            output_token_ids=request.output_token_ids,
        )
        self._parts.sessions.add(request.session_id, worker_pb2.SessionResponse(request_ended=event))

    def _refusal(self, ref: RequestRef, spec: worker_pb2.SequenceSpec) -> Refusal | None:
        if self.is_draining:
            # The command and the news that this worker drains have crossed.
            return Refusal(worker_pb2.CAUSE_DRAINING, "the worker is draining")
        if ref in self._by_ref:
            message = f"request {ref.request_id}, attempt {ref.attempt}, is known already"
            return Refusal(worker_pb2.CAUSE_INVALID, message)
        wrong = check_spec(spec, self._parts.vocab_size)
        return Refusal(worker_pb2.CAUSE_INVALID, wrong) if wrong is not None else None

    def _refuse(self, session_id: int, ref: RequestRef, refusal: Refusal) -> None:
        if refusal.message:
            log.warning(
                "request refused",
                extra={"request_id": ref.request_id, "attempt": ref.attempt, "reason": refusal.message},
            )
        self._parts.metrics.count_end("refused")
        event = worker_pb2.RefusedEvent(ref=ref.to_proto(), cause=refusal.cause, message=refusal.message)
        self._parts.sessions.add(session_id, worker_pb2.SessionResponse(refused=event))
