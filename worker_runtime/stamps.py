"""Stage stamps. They travel as ages, so that workers and routers need no common clock."""

from __future__ import annotations

from collections.abc import Callable

from protos import worker_pb2


class Stamps:
    """The stages that a request has reached at this worker, until they are sent."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._reached: dict[worker_pb2.Stage.ValueType, float] = {}
        self._sent: set[worker_pb2.Stage.ValueType] = set()

    def reach(self, stage: worker_pb2.Stage.ValueType) -> None:
        """Notes a stage; only the first time counts."""
        if stage not in self._reached:
            self._reached[stage] = self._now()

    def take(self) -> list[worker_pb2.StageStamp]:
        """The stages that were not sent before."""
        if len(self._sent) == len(self._reached):
            return []
        now = self._now()
        stamps = [
            worker_pb2.StageStamp(stage=stage, age_us=int((now - reached) * 1e6))
            for stage, reached in self._reached.items()
            if stage not in self._sent
        ]
        self._sent.update(self._reached)
        return stamps
