"""The stages of a request, in order: for timings, traces and metrics alike."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from protos import inference_pb2, worker_pb2


def stage_name(stage: worker_pb2.Stage.ValueType) -> str:
    """As in `Timings`, without the unit."""
    return worker_pb2.Stage.Name(stage).removeprefix("STAGE_").lower()


STAGES = tuple(stage_name(stage) for stage in worker_pb2.Stage.values()[1:])
"""In order."""


@dataclass
class AttemptStages:
    """What an attempt has reached and when, on the router's clock."""

    began: float
    workers: tuple[str, str] = ("", "")
    """Names of the workers that it was bound to last: for prefill and for decode."""
    reached: dict[str, float] = field(default_factory=dict)
    """By stage."""
    ended: float | None = None
    """When the attempt was given up for another one."""
    why: str = ""

    def moments(self) -> list[tuple[str, float]]:
        """Stages in order, from "queued" on. A stage is known from the age of its stamp when the message came, so it
        can only seem too late."""
        found: list[tuple[str, float]] = []
        latest = math.inf
        for stage in reversed(STAGES):
            if (moment := self.reached.get(stage)) is not None:
                latest = min(latest, moment)
                found.append((stage, max(latest, self.began)))
        return [("queued", self.began), *((s, m) for s, m in reversed(found) if s != "queued")]


def in_order(timings: inference_pb2.Timings) -> inference_pb2.Timings:
    """The timings with every stage at or before the next one; see `AttemptStages.moments`."""
    ordered = inference_pb2.Timings()
    ordered.CopyFrom(timings)
    latest = math.inf
    for stage in reversed(STAGES):
        name = f"{stage}_ms"
        if reached := getattr(ordered, name):
            latest = min(latest, reached)
            setattr(ordered, name, latest)
    return ordered
