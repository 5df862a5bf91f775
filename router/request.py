"""One request in the router: which tokens it has, which workers serve it, when each stage was reached.

queued ── a pair has room ──> reserving ── ticket ──> running ── last token ──> finished
   ^                             │                       │
   └── refused, or a leg failed ─┴── or was requeued ────┘     (a new attempt, from the next token index)

An attempt has a leg at each of its workers: one computes the prompt (until the transfer is over), one generates. A
colocated worker does both in one leg. When a leg fails or the request is cancelled, the other leg is told at once.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from kv_transfer.request_ref import RequestRef
from protos import inference_pb2, worker_pb2
from router.output_stream import OutputStream
from router.retries import Retries
from router.stages import AttemptStages, in_order, stage_name
from router.validation import CheckedRequest
from router.worker_link import Leg, WorkerLink
from rpc.prompt_order import Order

MAX_DEADLINE_SECONDS = 1e9
"""A later deadline is told to workers as this one: some have no end, and the wire has 64 bits."""
FIRST = Order(0, True, 0, 0)


class RequestState(enum.Enum):
    """What a request is doing. For people and metrics; decisions look at the legs."""

    QUEUED = "queued"
    RESERVING = "reserving"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """A request on its way. All moments are on the clock `now`."""

    checked: CheckedRequest
    deadline: float | None
    """When the client gives up; None: never."""
    now: Callable[[], float]
    rng: random.Random
    output: OutputStream = field(default_factory=OutputStream)
    """What the client is to get."""
    state: RequestState = RequestState.QUEUED
    order: Order = FIRST
    attempt: int = 0
    output_token_ids: list[int] = field(default_factory=list)
    legs: list[Leg] = field(default_factory=list)
    """Open ones of this attempt."""
    is_answered: bool = False
    """The last token is known."""
    unservable_since: float | None = None
    """Since when no present pair could serve it."""
    may_expire: bool = True
    """It may be refused for waiting too long for its first worker."""
    retries: Retries = field(default_factory=Retries)
    model_hashes: tuple[str, str, str] | None = None
    """Which model it is bound to, or was last. Once there are tokens, no other model may continue them."""
    was_preempted: bool = False
    num_cached_tokens: int = 0
    timings: inference_pb2.Timings = field(default_factory=inference_pb2.Timings)
    kv_transfer: inference_pb2.KvTransfer = field(default_factory=inference_pb2.KvTransfer)
    _attempt_start: int = 0
    _early: dict[int, worker_pb2.TokenOutput] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Clients choose request ids; workers need ids that no other router and no later request has.
        self.wire_id = f"{self.checked.request_id}/{self.rng.getrandbits(48):012x}"
        self.received = self.now()
        self.attempts = [AttemptStages(self.received)]
        """Of this attempt and those before, for traces."""

    def __repr__(self) -> str:
        return f"<{self.ref} {self.state.value}, {len(self.output_token_ids)} output tokens, {len(self.legs)} legs>"

    @property
    def ref(self) -> RequestRef:
        """Names the current attempt."""
        return RequestRef(self.wire_id, self.attempt)

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.checked.prompt_token_ids) + len(self.output_token_ids)

    @property
    def prefill(self) -> WorkerLink | None:
        """The worker that computes the prompt, while that leg is open."""
        return next((leg.link for leg in self.legs if leg.computes_prompt), None)

    @property
    def decode(self) -> WorkerLink | None:
        """The worker that generates, while that leg is open."""
        return next((leg.link for leg in self.legs if leg.generates), None)

    def leg_at(self, link: WorkerLink) -> Leg | None:
        """The open leg at a worker."""
        for leg in self.legs:
            if leg.link is link:
                return leg
        return None

    @property
    def sampling(self) -> worker_pb2.SamplingConfig:
        """How the next attempt samples. Log-probabilities of the prompt are made once."""
        config = worker_pb2.SamplingConfig()
        config.CopyFrom(self.checked.sampling)
        config.prompt_logprobs &= not self.output_token_ids
        return config

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
        return max(1, int(min(self.deadline - self.now(), MAX_DEADLINE_SECONDS) * 1e3))

    def spec(self) -> worker_pb2.SequenceSpec:
        """What the next attempt computes."""
        checked = self.checked
        return worker_pb2.SequenceSpec(
            token_ids=[*checked.prompt_token_ids, *self.output_token_ids],
            num_prompt_tokens=len(checked.prompt_token_ids),
            sampling=self.sampling,
            stop=checked.stop,
            deadline_ms=self.remaining_ms(),
            cache_salt=checked.cache_salt,
            priority=checked.priority,
            was_preempted=self.was_preempted,
        )

    # stages

    def stamp(self, stamps: list[worker_pb2.StageStamp]) -> None:
        """Takes note of stages that a worker reached. A later attempt overwrites an earlier one."""
        now = self.now()
        for stamp in stamps:
            self._reach(stage_name(stamp.stage), now - stamp.age_us / 1e6)

    def stamp_now(self, stage: str) -> None:
        """Takes note of a stage that the router reached."""
        self._reach(stage, self.now())

    def _reach(self, stage: str, moment: float) -> None:
        setattr(self.timings, f"{stage}_ms", (moment - self.received) * 1e3)
        self.attempts[-1].reached[stage] = moment

    def ordered_timings(self) -> inference_pb2.Timings:
        """The stages in order."""
        return in_order(self.timings)

    # what workers bring

    def take_output(self, output: worker_pb2.TokenOutput, leg: Leg) -> None:
        """Takes new tokens of the current attempt.

        The second token may come before the first, since they come from two workers; repeated ones are dropped.
        """
        if output.stamps:
            self.stamp(list(output.stamps))
        if output.num_chunks:
            self.kv_transfer.num_chunks += output.num_chunks
            if not self.output_token_ids:  # a resumed prompt finds part of its own output in a cache
                self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        if output.finish_reason and not leg.computes_prompt:
            self.kv_transfer.decode_computed_prompt_tokens += output.num_computed_prompt_tokens
        self._add(output)

    def _add(self, output: worker_pb2.TokenOutput) -> None:
        if output.first_index >= len(self.output_token_ids):
            self._early[output.first_index] = output
        while (ready := self._early.pop(len(self.output_token_ids), None)) is not None:
            if not self.output_token_ids:
                self.stamp_now("first_token")
            if self.num_attempt_tokens == 0:
                self.retries.brought_token()
                for leg in self.legs:
                    leg.has_token = True
            self.output_token_ids += ready.token_ids
            self.is_answered |= ready.finish_reason != inference_pb2.FINISH_REASON_UNSPECIFIED
            self.output.add(ready)

    def take_unsent(self, output_token_ids: Seq[int]) -> None:
        """Takes the tokens of a request that its decode worker has ended, if its first token is still on its way from
        prefill."""
        missing = output_token_ids[len(self.output_token_ids) :]
        wants_more = self.sampling.HasField("num_logprobs") or self.sampling.prompt_logprobs
        if missing and not wants_more:
            # Else they are computed again, with their log-probabilities: the same tokens.
            first = len(self.output_token_ids)
            self._early.clear()
            self._add(worker_pb2.TokenOutput(first_index=first, token_ids=missing))

    def take_transfer(self, moved: inference_pb2.KvTransfer) -> None:
        """Takes note of what a prefill leg moved; those of attempts that ended well add up."""
        total = self.kv_transfer
        total.bytes += moved.bytes
        total.bytes_while_computing += moved.bytes_while_computing
        total.transport = moved.transport
        total.gb_per_s = moved.gb_per_s

    def begin_attempt(self, reason: str) -> None:
        """Back to the queue, ahead of new requests, with the tokens so far. reason: why the last attempt has ended."""
        self.attempt += 1
        last = self.attempts[-1]
        last.ended, last.why = self.now(), reason
        self.attempts.append(AttemptStages(self.now()))
        self.order = self.order._replace(is_new=False)
        self.state = RequestState.QUEUED
        self._attempt_start = len(self.output_token_ids)
        self._early.clear()
