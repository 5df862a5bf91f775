"""Colocated workers with a simulated model, few pages, aborts, stop tokens and drains, drawn from a seed.

Each seed runs with steps that are waited for and with steps that are launched ahead, which a simulated device computes
as late as it can.
"""

from __future__ import annotations

import logging
import random
from collections import deque

import pytest

from protos import worker_pb2
from tests.colocated_service.test_loop import Rig
from tests.scripted import PAGE_SIZE
from tests.simulation.world import SimRunner, next_token
from worker_runtime.inbox import Drain

SCHEDULES = 1000
MOST_TURNS = 600


class Process:
    """The memory of a worker and the device that computes into it."""

    name = "colocated"

    def __init__(self, num_pages, runs_ahead):
        self.memory, self.launched, self.runs_ahead = [None] * num_pages, deque(), runs_ahead

    def compute_until(self, step):
        while self.launched and (step is None or step.chosen is None):
            self.launched.popleft().compute()


def answer(prompt, max_tokens, stop):
    token_ids = list(prompt)
    while len(token_ids) - len(prompt) < max_tokens:
        token_ids.append(next_token(token_ids))
        if token_ids[-1] in stop:
            break
    return token_ids[len(prompt) :]


class Schedule:
    """Everything that one seed says."""

    def __init__(self, seed, overlap):
        self.rng = rng = random.Random(seed)
        num_pages = rng.randint(6, 12)
        self.rig = Rig(
            num_pages=num_pages, token_budget=rng.choice([5, 6, 8]), overlap=overlap, prefix_cache=rng.random() < 0.7,
            step_policy=rng.choice(["mixed", "prefill_first"]), prompt_order=rng.choice(["fcfs", "bounded_slowdown"]),
            runner=SimRunner(Process(num_pages, overlap == "on")), parts={"vocab_size": 100},
        )  # fmt: skip
        for _ in range(20):
            self.rig.loop.scheduler.decodes.lengths.learn(rng.randint(1, 4), rng.randint(1, 15))
        beginning = [rng.randint(5, 90) for _ in range(24)]
        self.requests = [self._draw(num_pages, beginning) for _ in range(rng.randint(2, 8))]
        self.arrivals = sorted(rng.randint(0, 14) for _ in self.requests)
        self.aborted = set()

    def _draw(self, num_pages, beginning):
        rng = self.rng
        length, max_tokens = rng.randint(1, 20), rng.randint(1, 15)
        max_tokens = min(max_tokens, num_pages * PAGE_SIZE - length)
        prompt = beginning[: rng.randint(0, length)]
        prompt += [rng.randint(5, 90) for _ in range(length - len(prompt))]
        stop = {rng.choice(answer(prompt, max_tokens, ()))} if rng.random() < 0.5 else set()
        return prompt, max_tokens, stop

    def run(self):
        rig, rng, asked = self.rig, self.rng, 0
        is_drained = False
        for turn in range(MOST_TURNS):
            while asked < len(self.requests) and self.arrivals[asked] <= turn:
                prompt, max_tokens, stop = self.requests[asked]
                config = worker_pb2.StopConfig(max_tokens=max_tokens, stop_token_ids=stop)
                rig.generate(str(asked), token_ids=prompt, stop=config)
                asked += 1
            if rng.random() < 0.08 and asked:
                name = str(rng.randrange(asked))
                self.aborted.add(name)
                rig.abort(name, is_complete=rng.random() < 0.3)
            if rng.random() < 0.01 and asked == len(self.requests) and not is_drained:
                is_drained = True
                rig.inbox.put(Drain(hand_over=rng.random() < 0.5))
            if not rig.loop.turn():
                break
            if not rig.loop.is_busy and asked == len(self.requests) and rig.inbox._queue.empty():
                break  # it would sleep now, until somebody wants something

    def check(self):
        rig = self.rig
        assert len(rig.loop.requests) == 0, "it sleeps, and a request waits"
        assert "in flight" not in repr(rig.loop)
        handed = {e.ref.request_id: list(e.output_token_ids) for e in rig.ended(worker_pb2.CAUSE_DRAINING)}
        assert len(rig.ended()) == len(handed), "nothing failed"
        assert rig.pool.check([]) == []
        for number, request in enumerate(self.requests):
            name, got, expected = str(number), rig.tokens(str(number)), answer(*request)
            if name in self.aborted or name in handed:
                assert got == expected[: len(got)]
                assert handed.get(name, got) == got
            else:
                assert got == expected


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_no_schedule_loses_a_token_a_page_or_a_request(overlap):
    logging.disable(logging.CRITICAL)
    try:
        for seed in range(SCHEDULES):
            schedule = Schedule(seed, overlap)
            schedule.run()
            try:
                schedule.check()
            except AssertionError as error:
                raise AssertionError(f"seed {seed}") from error
    finally:
        logging.disable(logging.NOTSET)


def test_a_worker_does_not_sleep_when_planning_ended_everything():
    """Prompts are planned first and find no page; then answers need one too, and all end with the step under way."""
    schedule = Schedule(0, "on")
    rig = schedule.rig = Rig(
        num_pages=4, token_budget=20, overlap="on", step_policy="prefill_first", prefix_cache=False,
        runner=SimRunner(Process(4, True)), parts={"vocab_size": 100},
    )  # fmt: skip
    for _ in range(20):
        rig.loop.scheduler.decodes.lengths.learn(4, 9)
    first, second, waiting = (5,) * 4, (6,) * 4, (7,) * 5
    stop = {answer(first, 9, ())[4], answer(second, 9, ())[4]}
    schedule.requests = [(first, 9, stop), (second, 9, stop), (waiting, 2, set())]
    schedule.arrivals, schedule.rng = [0, 0, 2], random.Random(10)
    schedule.run()
    schedule.check()
