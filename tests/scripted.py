"""Stand-ins for a worker's surroundings, so that its loop can be turned by hand."""

from __future__ import annotations

import hashlib
from collections import defaultdict

import torch

from engine.model_runner import PromptLogits, StepLogits
from engine.page_pool import PagePool
from engine.sampler import sample
from protos import kv_pb2, worker_pb2
from worker_runtime.health import Health
from worker_runtime.inbox import Inbox
from worker_runtime.metrics import WorkerMetrics
from worker_runtime.parts import WorkerParts

PAGE_SIZE, VOCAB = 4, 50


class ScriptedRunner:
    """Samples token 7, or what a test asks for."""

    def __init__(self, runs_ahead=False):
        self.fail = False
        self.broken = set()
        self.steps = []
        self.is_written = None
        self.runs_ahead = bool(runs_ahead)
        self.layer_groups = 1
        self.on_group = lambda group: None
        self.on_run = lambda: None
        self.sampler = sample

    def sample(self, logits, sequences):
        return self.sampler(logits, sequences)

    def settle(self):
        pass

    def run(self, batch, on_layer_group=None, previous=None):
        self.on_run()
        for group in range(self.layer_groups if on_layer_group else 0):
            self.on_group(group)
            on_layer_group(group, self.is_written)
        self.steps.append([(e.sequence.sequence_id, e.num_new_tokens) for e in batch])
        if self.fail:
            raise RuntimeError("out of luck")
        sampled = [entry for entry in batch if entry.is_sampled]
        logits = torch.zeros(len(sampled), VOCAB)
        logits[:, 7] = 1.0
        for row, entry in enumerate(sampled):
            if entry.sequence.token_ids[0] in self.broken:
                logits[row] = float("nan")
        prompts = [
            PromptLogits(entry.sequence, entry.sequence.num_computed_tokens, torch.zeros(entry.num_new_tokens, VOCAB))
            for entry in batch
            if entry.sequence.sampling.prompt_logprobs
        ]
        return StepLogits(sampled, logits if sampled else None, prompts, self.is_written)


class FakeSessions:
    """Keeps what would go to routers."""

    def __init__(self):
        self.events = defaultdict(list)

    def add(self, session_id, event):
        self.events[session_id].append(event)

    def add_output(self, session_id, output):
        self.add(session_id, worker_pb2.SessionResponse(step_output=worker_pb2.StepOutput(outputs=[output])))

    def flush(self):
        pass

    def all_ids(self):
        return [1]

    def of(self, kind, session_id=1):
        return [getattr(e, kind) for e in self.events[session_id] if e.HasField(kind)]


class FakeTestPages:
    """Two test pages behind a pool of 8 pages or what a test says; what is in them is what `content` says."""

    def __init__(self, page_ids=(8, 9), content=b"noise"):
        self.page_ids, self.content = page_ids, content

    def digest(self):
        return hashlib.sha256(self.content).digest()

    def clear(self):
        self.content = b""


class FakeClock:
    """Stands until a test moves it, or moves by a tick whenever it is read.

    What is handed to the event loop runs at once; what is for later waits.
    """

    def __init__(self, now=1000.0, tick=0.0):
        self._now, self.tick, self.later = now, tick, []

    def now(self):
        self._now += self.tick
        return self._now

    def call_soon_threadsafe(self, function, *arguments):
        return function(*arguments)

    def call_later(self, seconds, function, *arguments):
        timer = FakeTimer(self, self._now + seconds, function, arguments)
        self.later.append(timer)
        return timer

    def advance(self, seconds):
        end = self._now + seconds
        while due := [timer for timer in self.later if timer.due <= end]:
            timer = min(due, key=lambda timer: timer.due)
            self.later.remove(timer)
            self._now = max(self._now, timer.due)
            timer.function(*timer.arguments)
        self._now = end


class FakeTimer:
    def __init__(self, clock, due, function, arguments):
        self.clock, self.due, self.function, self.arguments = clock, due, function, arguments

    def cancel(self):
        if self in self.clock.later:
            self.clock.later.remove(self)


def make_parts(tier, name, num_pages, transfers=None, **options):
    """The parts of a worker: real pool, inbox, health and metrics; the rest stands in for what is around them."""
    pool, clock = PagePool(num_pages), FakeClock()
    defaults = {
        "pool": pool, "page_size": PAGE_SIZE, "transfers": transfers, "transport_name": "local", "page_bytes": 64,
        "vocab_size": VOCAB, "inbox": Inbox(), "sessions": FakeSessions(), "metrics": WorkerMetrics(tier, pool),
        "clock": clock, "health": Health(clock, lambda: None), "test_pages": FakeTestPages(), "worker_id": name,
        "incarnation_id": "1", "agent_name": f"{name}/1", "address": f"{name}:1",
    }  # fmt: skip
    return WorkerParts(**(defaults | options))


def make_ref(name="r", attempt=0):
    return kv_pb2.RequestRef(request_id=name, attempt=attempt)


def make_spec(token_ids=(1,) * 10, max_tokens=4, **options):
    """What to compute: greedy, unless a test says otherwise."""
    defaults = {
        "num_prompt_tokens": len(token_ids),
        "stop": worker_pb2.StopConfig(max_tokens=max_tokens),
        "sampling": worker_pb2.SamplingConfig(top_p=1.0, repetition_penalty=1.0),
    }
    return worker_pb2.SequenceSpec(token_ids=token_ids, **(defaults | options))


def num_ended(metrics, tier, end):
    """How many requests have ended so at a worker."""
    return metrics.registry.get_sample_value("kvferry_worker_requests_total", {"tier": tier, "end": end})
