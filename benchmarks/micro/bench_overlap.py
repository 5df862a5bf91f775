"""`make bench-overlap`: how much of the time a device computes, with async scheduling and without.

A worker's real loop generates for a batch of requests: schedules, lays out, samples, sends tokens to a router. The
device is a stand-in that computes a step in a fixed time (`--step-ms`, by default about that of an H200 with Llama 3
8B, see docs/gpu.md) and, as a GPU does, asynchronously. The rest of the time is the host's: all of its work when every
step is waited for, and what takes longer than a step with async scheduling.

`make gpu-check` does the same with a real GPU.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import threading
import time
from collections.abc import Sequence as Seq
from typing import Any

import torch
import tyro
from rich.console import Console
from rich.table import Table

from colocated_service.config import ColocatedConfig
from colocated_service.loop import ColocatedLoop
from engine.attention.flashinfer import lay_out
from engine.config import EngineConfig
from engine.forward import OnLayerGroup
from engine.model_runner import StepLogits, StepRunner
from engine.page_pool import PagePool
from engine.sampler import SampledBatch, sample
from engine.sequence import ScheduledSequence, Sequence, num_pages_for
from engine.step_inputs import step_inputs
from protos import kv_pb2, worker_pb2
from rpc.clock import SystemClock
from worker_runtime.config import Overlap
from worker_runtime.health import Health
from worker_runtime.inbox import Drain, Inbox, SessionCommand
from worker_runtime.metrics import WorkerMetrics
from worker_runtime.parts import WorkerParts
from worker_runtime.session import Events, Sessions

STEP_MS = {1: 7.8, 32: 9.6, 128: 14.6}
"""By sequences: recorded steps of Llama 3 8B at 1,024 tokens of context on an H200."""
PAGE_SIZE = 16
VOCAB_SIZE = 64


class StandIn:
    """A device that computes each step in `seconds`, in order, while the host continues or, if asked to, waits."""

    runs_ahead = True

    def __init__(self, seconds: float, is_waited_for: bool = False) -> None:
        self._seconds, self._is_waited_for, self._ends_at = seconds, is_waited_for, 0.0
        self._logits = torch.randn(1, VOCAB_SIZE).expand(256, -1).contiguous()

    def run(
        self,
        batch: Seq[ScheduledSequence],
        on_layer_group: OnLayerGroup | None = None,
        previous: SampledBatch | None = None,
    ) -> StepLogits:
        """See `StepRunner.run`: the host's part of it, and the step before is waited for."""
        step_inputs(batch, previous, torch.device("cpu"))
        lay_out(batch, PAGE_SIZE)
        last = self._ends_at
        self._ends_at = max(last, time.perf_counter()) + self._seconds
        self._wait_until(self._ends_at if self._is_waited_for else last)
        sampled = [entry for entry in batch if entry.is_sampled]
        return StepLogits(sampled, self._logits[: len(sampled)] if sampled else None, is_written=lambda: True)

    def sample(self, logits: torch.Tensor, sequences: Seq[Sequence]) -> SampledBatch:
        """See `StepRunner.sample`."""
        return sample(logits, sequences)

    def settle(self) -> None:
        """See `StepRunner.settle`."""
        self._wait_until(self._ends_at)

    @staticmethod
    def _wait_until(moment: float) -> None:
        time.sleep(max(0.0, moment - time.perf_counter()))


def seconds_per_step(
    runner: StepRunner, overlap: Overlap, batch: int, context: int, vocab_size: int, num_steps: int
) -> float:
    """Median time between two decode steps of a worker; see `turn_seconds`."""
    # The first turns compute prompts, the last ones have fewer sequences left.
    turns = turn_seconds(runner, overlap, batch, context, vocab_size, num_steps)
    return statistics.median(turns[-num_steps * 3 // 4 : -num_steps // 4])


def turn_seconds(
    runner: StepRunner, overlap: Overlap, batch: int, context: int, vocab_size: int, num_steps: int
) -> list[float]:
    """Time of each turn of the loop of a worker that generates for `batch` requests with prompts of `context` tokens.

    The runner's cache needs pages (of 16 tokens) for prompts and `num_steps` tokens each.
    """
    loop, inbox = asyncio.new_event_loop(), Inbox()
    clock = SystemClock(loop)
    sessions = Sessions(clock, inbox)
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    reading = asyncio.run_coroutine_threadsafe(_read(sessions.open(1)), loop)
    pool = PagePool(batch * num_pages_for(context + num_steps, PAGE_SIZE))
    surroundings: Any = None  # a colocated worker transfers nothing
    parts = WorkerParts(
        pool=pool,
        page_size=PAGE_SIZE,
        transfers=surroundings,
        transport_name="",
        page_bytes=1,
        vocab_size=vocab_size,
        inbox=inbox,
        sessions=sessions,
        metrics=WorkerMetrics("colocated", pool),
        clock=clock,
        health=Health(clock, on_change=lambda: None),
        test_pages=surroundings,
        worker_id="w",
        incarnation_id="w",
        agent_name="w",
        address="",
        token_budget=2048 + batch,
    )
    config = ColocatedConfig(EngineConfig(""), max_num_sequences=batch, prefix_cache=False, overlap=overlap)
    worker = ColocatedLoop(parts, runner, config)
    for number in range(batch):
        spec = worker_pb2.SequenceSpec(
            token_ids=[1 + number % (vocab_size - 1)] * context,
            num_prompt_tokens=context,
            sampling=worker_pb2.SamplingConfig(top_p=1.0, repetition_penalty=1.0),
            stop=worker_pb2.StopConfig(max_tokens=num_steps),
        )
        command = worker_pb2.GenerateCommand(ref=kv_pb2.RequestRef(request_id=f"request-{number}"), spec=spec)
        inbox.put(SessionCommand(1, worker_pb2.SessionRequest(generate=command)))
    inbox.put(Drain(hand_over=False))
    ended = [time.perf_counter()]
    while worker.turn():
        ended.append(time.perf_counter())
    loop.call_soon_threadsafe(sessions.end_all)
    reading.result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    return [later - earlier for earlier, later in itertools.pairwise(ended)]


async def _read(events: Events) -> None:
    """What gRPC does with a session's events, less the network."""
    while (event := await events.get()).WhichOneof("event"):
        event.SerializeToString()


def main(num_steps: int = 200) -> None:
    """Measures the loop around a stand-in for a GPU."""
    # Sampling runs on a CPU here; waking threads for such small tensors would take longer than sampling.
    torch.set_num_threads(1)
    table = Table(title="share of the time in which the device computes")
    for column in ("sequences", "step ms", "waited for", "ms lost", "async", "ms lost "):
        table.add_column(column, justify="right")
    for batch, step_ms in STEP_MS.items():
        cells = []
        choices: tuple[Overlap, ...] = ("off", "on")
        for overlap in choices:
            device = StandIn(step_ms / 1e3, is_waited_for=overlap == "off")
            took = 1e3 * seconds_per_step(device, overlap, batch, 64, VOCAB_SIZE, num_steps)
            cells += [f"{step_ms / took:.1%}", f"{took - step_ms:.2f}"]
        table.add_row(str(batch), f"{step_ms:g}", *cells)
    Console().print(table)


if __name__ == "__main__":
    tyro.cli(main)
