"""What loops that generate answers share: launch a step, deliver the tokens of the one before, choose the new ones.

With overlap a device does not wait for the host: while it computes step n, step n + 1 is planned and launched, with the
tokens of step n as they are on the device, and only then the host waits for them, ends what they end, and tells the
routers. Without overlap, which is for devices that compute while they are called, each step is delivered before the
next is planned.

    plan n+1 ── launch n+1 ── wait for tokens of n, deliver ── choose tokens of n+1 (needs those of n: penalties)

Three things make the host wait for step n + 1 before its turn ends: filters (see `sample`), log-probabilities of
prompts, and, before it plans, a lack of pages, which the tokens of step n may end.

A sequence whose end the host learns of while the next step is computed is computed once too often; that row is thrown
away. Its pages are freed at once all the same. For a later step they are safe, since a device computes in order. To a
foreign writer they can be given in the next turn at the earliest, and no event of that turn goes out before the step
is over: whatever sends events there comes after `_deliver` or `run`, which wait for it.
"""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import grpc

from engine.model_runner import PromptLogits, StepLogits, StepRunner
from engine.sampler import Choice, SampledTokens, sample
from engine.sequence import ScheduledSequence, Sequence
from protos import worker_pb2
from worker_runtime.config import Overlap
from worker_runtime.engine_loop import EngineLoop
from worker_runtime.parts import WorkerParts
from worker_runtime.process import MAX_FAILED_STEPS

log = logging.getLogger(__name__)


class Step(Protocol):
    """What a scheduler plans."""

    @property
    def batch(self) -> tuple[ScheduledSequence, ...]:
        """What is computed; nothing, if the plan is only that some have to go."""
        ...


class Request(Protocol):
    """What a worker knows of a sequence."""

    @property
    def session_id(self) -> int:
        """Whose it is."""
        ...

    @property
    def sequence(self) -> Sequence:
        """Its tokens."""
        ...


StepT = TypeVar("StepT", bound=Step)
RequestT = TypeVar("RequestT", bound=Request)


@dataclass(frozen=True, eq=False)
class _Launched(Generic[StepT]):
    """A step between its launch and its delivery."""

    step: StepT
    at: float
    sequences: list[Sequence]
    """Those that get a token, in the order of `tokens`."""
    tokens: SampledTokens | None
    """None if no sequence gets one."""
    is_over: bool
    """Whether it is known to be computed once it is delivered."""


class AnsweringLoop(EngineLoop, Generic[StepT, RequestT]):
    """Base of the loops of decode and colocated workers."""

    def __init__(self, parts: WorkerParts, runner: StepRunner, overlap: Overlap) -> None:
        super().__init__(parts)
        self._runner = runner
        self._overlaps = runner.runs_ahead if overlap == "auto" else overlap == "on"
        self._by_sequence: dict[str, RequestT] = {}
        self._under_way: _Launched[StepT] | None = None
        self._delivered_at = 0.0
        self._failed_steps = 0

    @abstractmethod
    def _plan(self) -> StepT | None:
        """The next step; those who have to go for it are gone. None: there is nothing to do."""

    @abstractmethod
    def _begin(self, step: StepT) -> None:
        """A step is about to be launched."""

    @abstractmethod
    def _advance(self, step: StepT, logits: StepLogits) -> None:
        """A step was launched: what it computes counts as computed."""

    @abstractmethod
    def _append_token(self, request: RequestT, token: int, choice: Choice) -> worker_pb2.TokenOutput:
        """A request's next token, which may end it."""

    @abstractmethod
    def _fail(self, request: RequestT, code: grpc.StatusCode, message: str, retryable: bool) -> None:
        """Ends a request and tells the router why."""

    @abstractmethod
    def _note_time(self, step: StepT, seconds: float, is_over: bool) -> None:
        """How long a step took; is_over: it was waited for."""

    def _take_prompt_logits(self, prompts: Seq[PromptLogits]) -> None:
        """Logits of prompts, of a step that may still be computed."""

    def _step(self) -> bool:
        had_one_under_way = self._has_step_under_way()  # to plan may be to deliver it, and to find nothing left to run
        step = self._plan()
        if step is not None and step.batch:
            self._run(step)
            return True
        self._deliver_under_way()
        return step is not None or had_one_under_way

    def _has_step_under_way(self) -> bool:
        return self._under_way is not None

    def _deliver_under_way(self) -> bool:
        """Waits for the step under way and delivers its tokens. False if there is none."""
        launched, self._under_way = self._under_way, None
        if launched is None:
            return False
        try:
            self._deliver(launched)
        except Exception as error:
            self._on_failure(error, launched.step.batch)
        return True

    def _run(self, step: StepT) -> None:
        started = time.monotonic()
        self._begin(step)
        before, self._under_way = self._under_way, None
        try:
            logits = self._runner.run(step.batch, previous=before.tokens if before is not None else None)
            self._advance(step, logits)
            if before is not None:
                self._deliver(before)
                if logits.prompts or any(entry.sequence.sampling.has_filter for entry in logits.scheduled):
                    self._parts.sessions.flush()  # rather than after waiting for this step
            self._take_prompt_logits(logits.prompts)
            launched = self._choose(step, logits, started)
            if self._overlaps and launched.tokens is not None:
                self._under_way = launched
            else:
                self._deliver(launched)
        except Exception as error:
            self._on_failure(error, step.batch if before is None else before.step.batch + step.batch)

    def _choose(self, step: StepT, logits: StepLogits, started: float) -> _Launched[StepT]:
        """Has the next tokens chosen. What came before them is known by now."""
        sequences = [entry.sequence for entry in logits.scheduled]
        tokens = sample(logits.logits, sequences) if logits.logits is not None else None
        for sequence in sequences:
            sequence.num_pending_tokens = 1
        return _Launched(step, started, sequences, tokens, logits.is_written is None or bool(sequences))

    def _deliver(self, launched: _Launched[StepT]) -> None:
        """One message per router with the new tokens of all of its sequences."""
        choices = launched.tokens.choices() if launched.tokens is not None else []
        outputs: dict[int, list[worker_pb2.TokenOutput]] = defaultdict(list)
        try:
            for sequence, choice in zip(launched.sequences, choices, strict=True):
                sequence.num_pending_tokens = 0
                request = self._by_sequence.get(sequence.sequence_id)
                if request is None or request.sequence is not sequence:
                    continue  # it ended while this was computed
                if choice.token_id is None:
                    self._fail(request, grpc.StatusCode.INTERNAL, "the model's logits are not finite", retryable=False)
                else:
                    outputs[request.session_id].append(self._append_token(request, choice.token_id, choice))
        finally:
            # Also if a later one fails: these have their tokens, and some have ended with them.
            for session_id, of_session in outputs.items():
                event = worker_pb2.SessionResponse(step_output=worker_pb2.StepOutput(outputs=of_session))
                self._parts.sessions.add(session_id, event)
        if launched.is_over:
            self._failed_steps = 0
        now = time.monotonic()
        self._note_time(launched.step, now - max(launched.at, self._delivered_at), launched.is_over)
        self._delivered_at = now

    def _on_failure(self, error: Exception, batch: Seq[ScheduledSequence]) -> None:
        """These can't be computed: the requests go on elsewhere."""
        log.error("a step failed", exc_info=error)
        self._runner.settle()  # what was launched may still write to pages that are freed now
        for entry in batch:
            failed = self._by_sequence.get(entry.sequence.sequence_id)
            if failed is not None and failed.sequence is entry.sequence:
                self._fail(failed, grpc.StatusCode.INTERNAL, f"the step failed: {error}", retryable=True)
        self._failed_steps += 1
        if self._failed_steps >= MAX_FAILED_STEPS:
            # Broken for good: a dead worker's requests go on elsewhere, a broken one would attract more of them.
            self._parts.sessions.flush()
            raise error
