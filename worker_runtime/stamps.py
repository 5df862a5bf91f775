"""Stage stamps. They travel as ages, so that workers and routers need no common clock."""

from __future__ import annotations

import time

from protos import worker_pb2


class Stamps:
    """The stages a request reached at this worker, until they are sent."""

    def __init__(self) -> None:
        self._reached: dict[worker_pb2.Stage.ValueType, float] = {}
        self._sent: set[worker_pb2.Stage.ValueType] = set()

    def reach(self, stage: worker_pb2.Stage.ValueType) -> None:
        """Notes a stage; only the first time counts."""
        self._reached.setdefault(stage, time.monotonic())

    def take(self) -> list[worker_pb2.StageStamp]:
        """Those not sent before."""
        now = time.monotonic()
        stamps = [
            worker_pb2.StageStamp(stage=stage, age_us=int((now - reached) * 1e6))
            for stage, reached in self._reached.items()
            if stage not in self._sent
        ]
        self._sent.update(self._reached)
        return stamps
