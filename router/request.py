"""One request in the router: which tokens it has, which workers serve it, when each stage was reached.

queued ── a pair has room ──> reserving ── ticket ──> running ── last token ──> finished
   ^                             │                       │
   └── refused, or a leg failed ─┴── or handed back ─────┘     (a new attempt, from the next token index)

An attempt has two legs: prefill (open until the transfer is over) and decode. When one fails or the request is
cancelled, the other is told at once.
"""

from __future__ import annotations

import enum
import math
import secrets
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from protos import inference_pb2, worker_pb2
from router.output_stream import OutputStream
from router.validation import CheckedRequest
from router.worker_pool import WorkerLink

MAX_DEADLINE_SECONDS = 1e9
"""A later deadline is told to workers as this one: some have no end, and the wire has 64 bits."""
MAX_FRUITLESS_ATTEMPTS = 5
"""A request is given up after this many attempts in a row that brought no token."""


class RequestState(enum.Enum):
    """Where a request is. For people and metrics; decisions look at the legs."""

    QUEUED = "queued"
    RESERVING = "reserving"
    RUNNING = "running"
    FINISHED = "finished"


class Order(NamedTuple):
    """A request's place: smaller goes first."""

    negative_priority: int
    is_new: bool
    """Those that a worker had before go ahead of new ones."""
    rank: int
    """The policy's; 0 for order of arrival."""
    arrival: int


FIRST = Order(0, True, 0, 0)


def stage_name(stage: worker_pb2.Stage.ValueType) -> str:
    """As in `Timings`, without the unit."""
    return worker_pb2.Stage.Name(stage).removeprefix("STAGE_").lower()


STAGES = tuple(stage_name(stage) for stage in worker_pb2.Stage.values()[1:])
"""In order."""


@dataclass
class AttemptStages:
    """What an attempt reached and when, on the clock of time.monotonic()."""

    began: float = field(default_factory=lambda: time.monotonic())
    workers: tuple[str, str] = ("", "")
    """Names of those that it was bound to last, for prefill and decode."""
    reached: dict[str, float] = field(default_factory=dict)
    """By stage."""
    ended: float | None = None
    """It was given up for another attempt."""
    why: str = ""

    def moments(self) -> list[tuple[str, float]]:
        """Stages in order, from "queued" on. A stage is known from a message's age when it came, so it can only seem
        too late."""
        found: list[tuple[str, float]] = []
        latest = math.inf
        for stage in reversed(STAGES):
            if (moment := self.reached.get(stage)) is not None:
                latest = min(latest, moment)
                found.append((stage, max(latest, self.began)))
        return [("queued", self.began), *((s, m) for s, m in reversed(found) if s != "queued")]


@dataclass(eq=False)
class Request:
    """A request on its way."""

    checked: CheckedRequest
    deadline: float | None
    """time.monotonic() at which the client gives up; None: never."""
    received: float = field(default_factory=time.monotonic)
    state: RequestState = RequestState.QUEUED
    order: Order = FIRST
    attempt: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    prefill: WorkerLink | None = None
    """The open prefill leg."""
    decode: WorkerLink | None = None
    """The open decode leg."""
    is_answered: bool = False
    """The last token is known."""
    attempts: list[AttemptStages] = field(default_factory=lambda: [AttemptStages()])
    """Of this attempt and those before, for traces."""
    num_bound_tokens: int = 0
    """Tokens that the prefill worker it is bound to has to compute, as far as known."""
    prompt_number: int | None = None
    """The prompts that worker was sent before this attempt's, and this one; None: it was not sent yet."""
    unservable_since: float | None = None
    """time.monotonic() since when no present pair could serve it."""
    failures: list[tuple[str, float]] = field(default_factory=list)
    """Failed attempts since the last token: how each counts, and its time.monotonic()."""
    submitted: float = 0.0
    """time.monotonic() when it was queued first."""
    may_expire: bool = True
    """It may be refused for waiting too long for its first worker."""
    num_retries: int = 0
    """Further attempts since the last token."""
    model_hashes: tuple[str, str] | None = None
    """Which model it is bound to, or was last. Once there are tokens, no other may go on with them."""
    was_preempted: bool = False
    """A decode worker handed it back."""
    num_cached_tokens: int = 0
    timings: inference_pb2.Timings = field(default_factory=inference_pb2.Timings)
    kv_transfer: inference_pb2.KvTransfer = field(default_factory=inference_pb2.KvTransfer)
    output: OutputStream = field(default_factory=OutputStream)
    """What the client is to get."""
    _attempt_start: int = 0
    _early: dict[int, worker_pb2.TokenOutput] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Clients choose request ids; workers need ids that no other router and no later request has.
        self.wire_id = f"{self.checked.request_id}/{secrets.token_hex(6)}"

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output so far: what the next attempt computes."""
        return [*self.checked.prompt_token_ids, *self.output_token_ids]

    @property
    def sampling(self) -> worker_pb2.SamplingConfig:
        """How the next attempt chooses tokens. Log-probabilities of the prompt are made once."""
        config = worker_pb2.SamplingConfig()
        config.CopyFrom(self.checked.sampling)
        config.prompt_logprobs &= not self.output_token_ids
        return config

    @property
    def is_reserving(self) -> bool:
        """Its decode worker was asked for pages and has not answered yet."""
        return self.state is RequestState.RESERVING

    @property
    def max_num_tokens(self) -> int:
        """Most tokens this request can reach."""
        return len(self.checked.prompt_token_ids) + self.checked.stop.max_tokens

    @property
    def num_attempt_tokens(self) -> int:
        """Tokens that the current attempt has brought."""
        return len(self.output_token_ids) - self._attempt_start

    def remaining_ms(self) -> int:
        """Time left until the deadline, at least 1; 0: no deadline."""
        if self.deadline is None:
            return 0
        return max(1, int(min(self.deadline - time.monotonic(), MAX_DEADLINE_SECONDS) * 1e3))

    def stamp(self, stamps: list[worker_pb2.StageStamp]) -> None:
        """Takes note of stages that a worker reached. A later attempt overwrites an earlier one."""
        now = time.monotonic()
        for stamp in stamps:
            self._reach(stage_name(stamp.stage), now - stamp.age_us / 1e6)

    def stamp_now(self, stage: str) -> None:
        """Takes note of a stage that the router reached."""
        self._reach(stage, time.monotonic())

    def _reach(self, stage: str, moment: float) -> None:
        setattr(self.timings, f"{stage}_ms", (moment - self.received) * 1e3)
        self.attempts[-1].reached[stage] = moment

    def ordered_timings(self) -> inference_pb2.Timings:
        """The stages in order. A stage is known from a message's age when it came, so it can only seem too late."""
        ordered = inference_pb2.Timings()
        ordered.CopyFrom(self.timings)
        latest = math.inf
        for stage in reversed(STAGES):
            name = f"{stage}_ms"
            if reached := getattr(ordered, name):
                latest = min(latest, reached)
                setattr(ordered, name, latest)
        return ordered

    def take_output(self, output: worker_pb2.TokenOutput) -> None:
        """Takes new tokens of the current attempt.

        The second token may come before the first, since they come from two workers; repeated ones are dropped.
        """
        self.stamp(list(output.stamps))
        if not self.output_token_ids:  # what a resumed prompt finds is in part its own output
            self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        self.kv_transfer.decode_computed_prompt_tokens += output.num_computed_prompt_tokens
        if output.first_index >= len(self.output_token_ids):
            self._early[output.first_index] = output
        while (ready := self._early.pop(len(self.output_token_ids), None)) is not None:
            if not self.output_token_ids:
                self.stamp_now("first_token")
            self.output_token_ids += ready.token_ids
            self.num_retries = 0
            self.is_answered |= ready.finish_reason != inference_pb2.FINISH_REASON_UNSPECIFIED
            self.output.add(ready)

    def take_preempted(self, output_token_ids: Seq[int], counts: bool = True) -> None:
        """Takes the tokens of a request that was handed back, if its first one is still on its way from prefill.

        counts: pages were short, so it is not the next to be handed back.
        """
        self.was_preempted |= counts
        missing = output_token_ids[len(self.output_token_ids) :]
        wants_more = self.sampling.HasField("num_logprobs") or self.sampling.prompt_logprobs
        if missing and not wants_more:
            # Else they are computed again, with their log-probabilities: the same tokens.
            first = len(self.output_token_ids)
            self._early.clear()
            self.take_output(worker_pb2.TokenOutput(first_index=first, token_ids=missing))

    def take_transfer(self, moved: inference_pb2.KvTransfer) -> None:
        """Takes note of what a prefill leg moved; those of attempts that ended well add up."""
        total = self.kv_transfer
        total.bytes += moved.bytes
        total.bytes_while_computing += moved.bytes_while_computing
        total.num_chunks += moved.num_chunks
        total.transport = moved.transport
        total.gb_per_s = moved.gb_per_s

    def begin_attempt(self, reason: str = "") -> None:
        """Back to the queue, ahead of new requests, with the tokens so far. reason: why the one before has ended."""
        self.attempt += 1
        last = self.attempts[-1]
        last.ended, last.why = time.monotonic(), reason
        self.attempts.append(AttemptStages())
        self.prompt_number = None
        self.order = self.order._replace(is_new=False)
        self.state = RequestState.QUEUED
        self._attempt_start = len(self.output_token_ids)
        self._early.clear()
