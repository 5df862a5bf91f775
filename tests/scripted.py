"""Stand-ins for a worker's surroundings, so that its loop can be turned by hand."""

from __future__ import annotations

import hashlib
from collections import defaultdict

import torch

from engine.model_runner import PromptLogits, StepLogits

PAGE_SIZE, VOCAB = 4, 50


class ScriptedRunner:
    """Chooses token 7, or what a test asks for."""

    def __init__(self):
        self.fail = False
        self.broken = set()
        self.steps = []
        self.is_written = None
        self.runs_ahead = False
        self.layer_groups = 1
        self.on_group = lambda group: None

    def settle(self):
        pass

    def run(self, batch, on_layer_group=None, previous=None):
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

    def flush(self):
        pass

    def all_ids(self):
        return [1]

    def of(self, kind, session_id=1):
        return [getattr(e, kind) for e in self.events[session_id] if e.HasField(kind)]


class FakeProbePages:
    """Two test pages behind a pool of 8 pages or what a test says; what is in them is what `content` says."""

    def __init__(self, page_ids=(8, 9), content=b"noise"):
        self.page_ids, self.content = page_ids, content

    def digest(self):
        return hashlib.sha256(self.content).digest()

    def clear(self):
        self.content = b""


class ImmediateLoop:
    """Runs what is handed to an event loop at once, and keeps what is for later."""

    def __init__(self):
        self.later = []

    def call_soon_threadsafe(self, function, *arguments):
        function(*arguments)

    def call_later(self, seconds, function, *arguments):
        self.later.append((seconds, function, arguments))

    def pass_time(self):
        later, self.later = self.later, []
        for _, function, arguments in later:
            function(*arguments)
