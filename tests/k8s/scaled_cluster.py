"""Two tiers in simulated time: what autoscalers see of them, and what users do.

A prefill worker computes prompts one after another at a rate; a decode worker's step takes longer the more sequences it
has, and it takes a request only if its pages hold prompt and answer. Requests wait in the router and are bound late.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from rpc.metrics import STEP_BUCKETS

TURN = 0.5
"""Seconds of simulated time per turn."""
PREFILL_RATE = 8000.0
"""Prompt tokens per second of a worker."""
PAGE_TOKENS, DECODE_PAGES = 16, 12_500
"""A decode worker holds 200,000 tokens ..."""
MAX_SEQUENCES = 256
"""... of so many sequences at most."""
FIRST_STEP, STEP_PER_SEQUENCE = 0.02, 0.0006
"""Seconds of a decode step, and what each sequence adds: 133 sequences make 0.1."""
START_SECONDS = 45.0
"""Until a new pod is ready."""
WINDOW = 60.0
"""Of `rate()` in the recording rules."""
TTFT_OBJECTIVE, ITL_OBJECTIVE = 3.0, 0.1


def histogram_quantile(share, observed):
    """As Prometheus guesses it from the buckets that we export; 0 without observations."""
    rank, below, low = share * len(observed), 0, 0.0
    for high in STEP_BUCKETS:
        count = sum(low < value <= high for value in observed)
        if count and below + count >= rank:
            return low + (high - low) * (rank - below) / count
        below, low = below + count, high
    return 0.0


@dataclass(eq=False)
class Request:
    arrived: float
    prompt: int
    answer: int
    computed: float = 0.0
    made: float = 0.0
    first_token: float | None = None
    slow_time: float = 0.0
    decode_time: float = 0.0


@dataclass(eq=False)
class Worker:
    ready_at: float
    is_draining: bool = False
    requests: deque = field(default_factory=deque)
    busy: float = 0.0
    """Seconds of steps since the start."""

    def tokens(self):
        """Held and promised."""
        return sum(r.prompt + r.answer for r in self.requests)


class ScaledCluster:
    """The state of both tiers."""

    def __init__(self, seed, prefill=1, decode=1, most_pods=1000):
        self.rng, self.now, self.most_pods = random.Random(seed), 0.0, most_pods
        self.tiers = {"prefill": [Worker(0.0) for _ in range(prefill)], "decode": [Worker(0.0) for _ in range(decode)]}
        self.wanted = {"prefill": prefill, "decode": decode}
        self.queue = deque()
        self.done = []
        self.pod_seconds = 0.0
        self.history = deque()
        """(time, busy seconds of prefill, queued token-seconds by cause) for rates."""
        self.waited = {"prefill": 0.0, "decode": 0.0}
        self.gone_busy = 0.0
        self.steps = deque()

    def running(self, tier):
        """Ready workers that take work."""
        return [w for w in self.tiers[tier] if w.ready_at <= self.now and not w.is_draining]

    def turn(self, arrivals):
        """Half a second: arrivals are (prompt tokens, answer tokens)."""
        self.now += TURN
        self.queue.extend(Request(self.now, *sizes) for sizes in arrivals)
        self._follow_wanted()
        tokens = sum(r.prompt for r in self.queue)
        match self._bind():
            case "prefill":
                self.waited["prefill"] += TURN * min(tokens, self.decode_room())
            case "decode":
                self.waited["decode"] += TURN * tokens
        for worker in self.tiers["prefill"]:
            self._compute(worker)
        for worker in self.tiers["decode"]:
            self._generate(worker)
        self.pod_seconds += TURN * sum(map(len, self.tiers.values()))
        busy = self.gone_busy + sum(w.busy for w in self.tiers["prefill"])
        self.history.append((self.now, busy, dict(self.waited)))
        while self.history[0][0] < self.now - WINDOW:
            self.history.popleft()
        while self.steps and self.steps[0][0] < self.now - WINDOW:
            self.steps.popleft()

    def decode_room(self):
        open_workers = [w for w in self.running("decode") if len(w.requests) < MAX_SEQUENCES]
        return sum(max(0, DECODE_PAGES * PAGE_TOKENS - w.tokens()) for w in open_workers)

    def values(self):
        """What the recording rules say; the same formulas, which promtool compares on samples."""
        prefill = self.running("prefill")
        decode = [w for w in self.tiers["decode"] if w.ready_at <= self.now]  # those that drain are scraped too
        first, last = self.history[0], self.history[-1]
        seconds = max(last[0] - first[0], TURN)
        waiting = {cause: (last[2][cause] - first[2][cause]) / seconds for cause in self.waited}
        busy = (last[1] - first[1]) / seconds
        need = {"kvferry_prefill_workers_needed": busy + waiting["prefill"] / (30 * PREFILL_RATE)} if prefill else {}
        if decode:
            taken = sum(max(w.tokens() / (DECODE_PAGES * PAGE_TOKENS), len(w.requests) / MAX_SEQUENCES) for w in decode)
            need["kvferry_decode_workers_needed"] = taken + waiting["decode"] / (DECODE_PAGES * PAGE_TOKENS)
            need["kvferry_decode_itl_share"] = histogram_quantile(0.95, [step for _, step in self.steps]) / 0.1
        return need

    def attainment(self):
        """Share of ended requests within both objectives."""
        good = sum(
            r.first_token - r.arrived <= TTFT_OBJECTIVE and r.decode_time <= ITL_OBJECTIVE * max(1, r.answer)
            for r in self.done
        )
        return good / max(1, len(self.done))

    def _follow_wanted(self):
        for tier, workers in self.tiers.items():
            active = [w for w in workers if not w.is_draining]
            room = self.most_pods - sum(map(len, self.tiers.values()))
            for _ in range(min(self.wanted[tier] - len(active), room)):
                workers.append(Worker(self.now + START_SECONDS))
            for worker in sorted(active, key=lambda w: -w.ready_at)[: max(0, len(active) - self.wanted[tier])]:
                worker.is_draining = True
            for worker in [w for w in workers if w.is_draining and not w.requests]:
                workers.remove(worker)
                self.gone_busy += worker.busy if tier == "prefill" else 0.0

    def _bind(self):
        """As the router does. What the head of the queue waits for, or None."""
        while self.queue:
            head = self.queue[0]
            decode = [
                w for w in self.running("decode")
                if len(w.requests) < MAX_SEQUENCES
                and w.tokens() + head.prompt + head.answer <= DECODE_PAGES * PAGE_TOKENS
            ]  # fmt: skip
            prefill = [w for w in self.running("prefill") if not w.requests]
            if not decode:
                return "decode"
            if not prefill:
                return "prefill"
            self.queue.popleft()
            self.rng.choice(prefill).requests.append(head)
            min(decode, key=Worker.tokens).requests.append(head)
        return None

    def _compute(self, worker):
        left = TURN if worker.ready_at <= self.now else 0.0
        while left > 1e-9 and worker.requests:
            head = worker.requests[0]
            seconds = min(left, (head.prompt - head.computed) / PREFILL_RATE)
            head.computed += seconds * PREFILL_RATE
            worker.busy, left = worker.busy + seconds, left - seconds
            if head.computed >= head.prompt - 1e-6:
                head.first_token = self.now - left
                worker.requests.popleft()
                bound = self._bind()  # within the turn, as an event would
                if bound == "decode":
                    return

    def _generate(self, worker):
        active = [r for r in worker.requests if r.first_token is not None]
        if not active:
            return
        step = FIRST_STEP + STEP_PER_SEQUENCE * len(active)
        self.steps.append((self.now, step))
        for request in active:
            request.made += TURN / step
            request.decode_time += TURN
            if request.made >= request.answer:
                worker.requests.remove(request)
                self.done.append(request)
