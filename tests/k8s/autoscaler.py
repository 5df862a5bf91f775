"""The HorizontalPodAutoscaler's arithmetic, from the manifests that are shipped (Kubernetes 1.34, autoscaling/v2)."""

from __future__ import annotations

import math
from collections import deque

SYNC_SECONDS = 15
TOLERANCE = 0.1


def parse(quantity):
    text = str(quantity)
    return float(text[:-1]) / 1000 if text.endswith("m") else float(text)


class Autoscaler:
    """One HPA object."""

    def __init__(self, manifest):
        spec = manifest["spec"]
        self._lowest, self._highest = spec["minReplicas"], spec["maxReplicas"]
        self._metrics = [metric["external"] for metric in spec["metrics"]]
        self._behavior = spec["behavior"]
        self._wanted = deque()  # (time, what the metrics asked for)
        self._sizes = deque()  # (time, replicas set)

    def decide(self, now, current, ready, values):
        """Replicas from now on. values: by metric name; None where there is none yet.

        For a target per pod, replicas as they are set count; for a target value, those that are ready.
        """
        asked = [self._asked(m, current, ready, values.get(m["metric"]["name"])) for m in self._metrics]
        known = [number for number in asked if number is not None]
        if not known:
            return current
        wanted = max(known)
        if len(known) < len(asked) and wanted < current:
            wanted = current  # with a metric missing it never scales down
        self._wanted.append((now, wanted))
        return self._within_pace(now, current, self._stabilised(now, current))

    def _asked(self, metric, current, ready, value):
        if value is None:
            return None
        target = metric["target"]
        if target["type"] == "AverageValue":
            average = parse(target["averageValue"])
            ratio = value / (average * current)
            return current if abs(ratio - 1) <= TOLERANCE else math.ceil(value / average - 1e-9)
        ratio = value / parse(target["value"])
        return current if abs(ratio - 1) <= TOLERANCE else math.ceil(ready * ratio - 1e-9)

    def _stabilised(self, now, current):
        """Up only as far as all recommendations of the window, down only as far as the highest of its window."""
        windows = {way: self._behavior[way]["stabilizationWindowSeconds"] for way in ("scaleUp", "scaleDown")}
        while self._wanted[0][0] < now - max(windows.values()):
            self._wanted.popleft()
        up = min(number for at, number in self._wanted if at >= now - windows["scaleUp"])
        down = max(number for at, number in self._wanted if at >= now - windows["scaleDown"])
        return min(max(current, up), down)

    def _within_pace(self, now, current, wanted):
        self._sizes.append((now, current))
        limits = {"scaleUp": [], "scaleDown": []}
        for way, sign in (("scaleUp", 1), ("scaleDown", -1)):
            for policy in self._behavior[way]["policies"]:
                before = next(size for at, size in self._sizes if at >= now - policy["periodSeconds"])
                step = policy["value"] if policy["type"] == "Pods" else math.ceil(before * policy["value"] / 100)
                limits[way].append(before + sign * step)
        while self._sizes[0][0] < now - 120:
            self._sizes.popleft()
        wanted = min(wanted, max(limits["scaleUp"])) if wanted > current else max(wanted, min(limits["scaleDown"]))
        return max(self._lowest, min(self._highest, wanted))
