"""The loop of every worker: receive, schedule, run, deliver.

`EngineLoop` is composed of a scheduler, a runner of the model, the table of requests, and what its tier adds
(`tier_hooks.py`). Its own thread turns it, or a test or the simulator does (`turn`). Only that thread changes
scheduler, page pool and requests.

With async scheduling a device does not wait for the host: while step n is computed, step n + 1 is scheduled and
launched with the tokens of step n as they are on the device. Only then does the host wait for the tokens of step n, end
the requests that end with them, and tell the routers. Without async scheduling, which is for devices that compute while
they are called, each step is delivered before the next one is scheduled.

    receive ── schedule n+1 ── launch n+1 ── wait for tokens of n, deliver them ── sample n+1 (penalties need them)

`overlap` is the setting for async scheduling. `StepRunner.runs_ahead` says whether the device can do it. Prefill
workers never use it. The host must wait for step n + 1 before the turn ends if a sequence uses top_p, top_k or min_p
(see `engine/sampler.py`), or wants log-probabilities of its prompt. If pages are short, step n is delivered before
step n + 1 is scheduled, since its tokens may free pages.

If the host learns that a sequence has ended while the next step already runs, that step contains one row too many. Its
token is discarded. The pages of the sequence are freed at once all the same. For a later step that is safe, since a
device computes in order. For a foreign writer it is safe because of two orderings (`test_orderings.py`):

* Pages that are freed while a turn delivers are offered to a foreign writer in the next turn at the earliest, because
  messages are received before anything else in a turn.
* No event of a turn goes out before the step in flight at its beginning is over, because events are flushed after
  `_deliver`.

A third ordering: after a step that failed, the device is settled before any page is freed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from engine.model_runner import StepLogits, StepRunner
from engine.prefix_cache import PrefixCache
from engine.sampler import SampledBatch, SampledToken
from engine.sequence import ScheduledSequence, Sequence
from protos import worker_pb2
from worker_runtime.config import Overlap
from worker_runtime.health import PAGES
from worker_runtime.inbox import Drain, InboxMessage, SessionClosed, SessionCommand, SessionOpened, Stop
from worker_runtime.load_reporter import LoadReporter
from worker_runtime.parts import WorkerParts
from worker_runtime.rate import Rate
from worker_runtime.request import WorkerRequest
from worker_runtime.request_table import ABORTED, FINISHED, ORPHANED, RequestTable, ended_by
from worker_runtime.step import Scheduler, Step, StepLimits
from worker_runtime.tier_hooks import TierHooks

log = logging.getLogger(__name__)

CHECK_SECONDS = 1.0
"""Least time between two checks of all pages."""
MAX_FAILED_STEPS = 3
"""A worker ends itself after this many steps in a row that failed."""


@dataclass(frozen=True, eq=False)
class _StepInFlight:
    """A step between its launch and its delivery."""

    step: Step
    launched_at: float
    sequences: list[Sequence]
    """Those that get a token, in the order of `tokens`."""
    tokens: SampledBatch | None
    """None if no sequence gets a token."""
    delivery_proves_done: bool
    """The device computes while it is called, or to wait for the tokens is to wait for the whole step. A chunk without
    tokens on a GPU proves nothing."""


class EngineLoop:
    """See the module. `run` is for the engine thread, `turn` for tests and the simulator."""

    def __init__(
        self,
        parts: WorkerParts,
        runner: StepRunner,
        cache: PrefixCache,
        scheduler: Scheduler,
        requests: RequestTable,
        tier: TierHooks,
        overlap: Overlap = "off",
    ) -> None:
        """overlap: whether to use async scheduling."""
        self._parts, self._runner, self._cache = parts, runner, cache
        self._scheduler, self._requests, self._tier = scheduler, requests, tier
        self._reporter = LoadReporter(parts.sessions, cache)
        self._overlaps = runner.runs_ahead if overlap == "auto" else overlap == "on"
        self._in_flight: _StepInFlight | None = None
        self._delivered_at = 0.0
        self._num_failed_steps = 0
        self._rate, self._least_rated_tokens = Rate(), max(1, parts.token_budget // 2)
        self.is_busy = False
        """The last turn had something to compute, so the next one must not wait for messages."""
        self._checked_at = 0.0
        self._has_wrong_pages = False
        """Found once; they stay wrong."""

    def __repr__(self) -> str:
        in_flight = f", a step of {len(self._in_flight.step.batch)} in flight" if self._in_flight is not None else ""
        return f"<{'draining ' if self._requests.is_draining else ''}EngineLoop {self._requests!r}{in_flight}>"

    def run(self) -> None:
        """Runs until a Stop message, or until everything is done after a Drain message."""
        while self.turn(wait=not self.is_busy):
            pass

    def turn(self, wait: bool = False) -> bool:
        """Once through the loop. wait: for a message, if there is none. False: the loop has ended."""
        if not self._receive(wait):
            return False
        self._parts.health.reached("scheduling and computing a step")
        had_step_in_flight = self._in_flight is not None
        step = self._schedule()
        if step is not None and step.batch:
            self._run(step)
        else:
            self._deliver_in_flight()
        self.is_busy = step is not None or had_step_in_flight
        self._parts.health.reached("reporting")
        self._report_load()
        self._parts.sessions.flush()
        return True

    # receive

    def _receive(self, wait: bool) -> bool:
        """Handles the messages that have arrived. False: the loop has ended."""
        if self._requests.is_draining and not self._has_open_work():
            return False
        if wait:
            self._check_pages()
            self._parts.health.waits()
        for message in self._parts.inbox.take(wait):
            self._parts.health.reached(f"handling {type(message).__name__}")
            if isinstance(message, Stop):
                self._parts.sessions.flush()
                return False
            self._handle(message)
        return True

    def _has_open_work(self) -> bool:
        return len(self._requests) > 0 or self._in_flight is not None or self._tier.has_open_transfers()

    def _handle(self, message: InboxMessage) -> None:
        match message:
            case SessionOpened(session_id):
                self._reporter.tell_newcomer(session_id)
            case SessionCommand(session_id, request):
                self._handle_command(session_id, request)
            case SessionClosed(session_id):
                self._reporter.session_closed(session_id)
                for orphan in self._requests.of_session(session_id):
                    self._requests.end(orphan, ORPHANED)
            case Drain(hand_over):
                self._requests.is_draining = True
                if hand_over:
                    self._hand_over()
        self._tier.handle(message)

    def _handle_command(self, session_id: int, request: worker_pb2.SessionRequest) -> None:
        match request.WhichOneof("command"):
            case "abort":
                found = self._requests.find(request.abort.ref, session_id)
                if found is not None:
                    self._requests.end(found, FINISHED if request.abort.is_complete else ABORTED)
            case "flush_cache":
                self._cache.flush()
            case command:
                if command in ("prefill", "generate"):
                    self._reporter.prompt_received(session_id)
                if not self._tier.handle_command(session_id, request):
                    log.warning("ignored a command that this tier does not know", extra={"command": command})

    def _hand_over(self) -> None:
        """Gives everything that still computes back to the routers."""
        self._deliver_in_flight()
        for request in self._requests:
            if not request.is_sending:
                self._requests.end(request, ended_by(worker_pb2.CAUSE_DRAINING, "the worker is draining"))

    def note_cached(self, sequence: Sequence) -> None:
        """A prompt has begun: how much of it the prefix cache had is counted."""
        self._reporter.prompt_begun(sequence.num_tokens, sequence.num_cached_tokens)
        self._parts.metrics.cached_tokens.inc(sequence.num_cached_tokens)

    # schedule

    def _schedule(self) -> Step | None:
        """The next step. Requests that have to go for it are gone. None: there is nothing to do."""
        step = self._ask_scheduler(may_preempt=self._in_flight is None)
        if step is not None and step.is_short_of_pages:
            self._deliver_in_flight()
            step = self._ask_scheduler(may_preempt=True)
        return step

    def _ask_scheduler(self, may_preempt: bool) -> Step | None:
        limits = StepLimits(self._parts.clock.now(), self._rate.tokens_per_second, may_preempt)
        step = self._scheduler.schedule(limits)
        if step is None:
            return None
        for sequence in step.expired:
            reason = "the deadline passed, or can't be met any more, before the prompt was computed"
            self._requests.end(self._requests.scheduled(sequence), ended_by(worker_pb2.CAUSE_DEADLINE, reason))
        for sequence in step.preempted:
            self._tier.preempt(self._requests.scheduled(sequence))
        return step

    # run

    def _run(self, step: Step) -> None:
        """Launches a step, delivers the one before it, and samples."""
        launched_at = self._parts.clock.now()
        before, self._in_flight = self._in_flight, None
        try:
            self._note_begin(step)
            on_layer_group = self._tier.before_run(step)
            logits = self._runner.run(step.batch, on_layer_group, before.tokens if before is not None else None)
            self._scheduler.update(step)
            self._tier.after_launch(step, logits.is_written)
            if before is not None:
                self._deliver(before)
                if _must_wait_for(logits):
                    self._parts.sessions.flush()  # rather than after waiting for this step
            for prompt in logits.prompts:
                request = self._requests.of_sequence(prompt.sequence)
                if request is not None:
                    request.take_prompt_logits(prompt)
            in_flight = self._sample(step, logits, launched_at)
            if self._overlaps and in_flight.tokens is not None:
                self._in_flight = in_flight
            else:
                self._deliver(in_flight)
        except Exception as error:
            self._fail_step(error, step.batch if before is None else before.step.batch + step.batch)

    def _note_begin(self, step: Step) -> None:
        for entry in step.decodes:
            self._requests.scheduled(entry.sequence).begin_decode(entry.num_new_tokens)
        for entry in step.prompts:
            request = self._requests.scheduled(entry.sequence)
            if request.num_chunks == 0:
                self.note_cached(entry.sequence)
            request.begin_chunk(entry.num_new_tokens)

    def _sample(self, step: Step, logits: StepLogits, launched_at: float) -> _StepInFlight:
        """Has the next tokens sampled. All tokens before them are known by now."""
        sequences = [entry.sequence for entry in logits.scheduled]
        tokens = self._runner.sample(logits.logits, sequences) if logits.logits is not None else None
        for sequence in sequences:
            sequence.num_pending_tokens = 1
        return _StepInFlight(step, launched_at, sequences, tokens, logits.is_written is None or bool(sequences))

    # deliver

    def _deliver_in_flight(self) -> None:
        """Waits for the step in flight, if there is one, and delivers its tokens."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is None:
            return
        try:
            self._deliver(in_flight)
        except Exception as error:
            self._fail_step(error, in_flight.step.batch)

    def _deliver(self, in_flight: _StepInFlight) -> None:
        """Gives each sequence its token. Sequences that have ended meanwhile get none."""
        tokens = in_flight.tokens.wait() if in_flight.tokens is not None else []
        for sequence, token in zip(in_flight.sequences, tokens, strict=True):
            sequence.num_pending_tokens = 0
            request = self._requests.of_sequence(sequence)
            if request is not None:
                self._append(request, token)
        if in_flight.delivery_proves_done:
            self._num_failed_steps = 0
        self._note_time(in_flight)

    def _append(self, request: WorkerRequest, token: SampledToken) -> None:
        if token.token_id is None:
            reason = "the model's logits are not finite"
            self._requests.end(request, ended_by(worker_pb2.CAUSE_NOT_FINITE, reason))
            return
        output = request.append(token.token_id, token)
        self._parts.metrics.output_tokens.inc()
        self._parts.sessions.add_output(request.session_id, output)
        self._tier.after_token(request, token.token_id, output)

    def _note_time(self, in_flight: _StepInFlight) -> None:
        now, num_tokens = self._parts.clock.now(), in_flight.step.num_prompt_tokens
        seconds = now - max(in_flight.launched_at, self._delivered_at)
        self._delivered_at = now
        self._rate.add(num_tokens, seconds, in_flight.delivery_proves_done, self._least_rated_tokens)
        self._parts.metrics.step_seconds.observe(seconds)
        self._parts.metrics.prompt_tokens.inc(num_tokens)

    def _fail_step(self, error: Exception, batch: Seq[ScheduledSequence]) -> None:
        """The sequences of a batch can't be computed here: their requests are retried."""
        log.error("a step failed", exc_info=error)
        self._runner.settle()  # what was launched may still write to pages that are freed now
        for entry in batch:
            request = self._requests.of_sequence(entry.sequence)
            if request is not None and not request.is_sending:
                self._requests.end(request, ended_by(worker_pb2.CAUSE_STEP_FAILED, f"the step failed: {error}"))
        if self._runner.runs_ahead:
            self._cache.flush()  # pages of launched steps are cached, and nobody knows what is in them
        self._num_failed_steps += 1
        if self._num_failed_steps >= MAX_FAILED_STEPS:
            # A dead worker's requests continue elsewhere. A broken worker that lives would attract more requests.
            self._parts.sessions.flush()
            raise error

    # report

    def _report_load(self) -> None:
        load, metrics, counts = self._scheduler.load(), self._parts.metrics, self._parts.pool.counts()
        num_sequences = sum(load.sequences.values())
        metrics.set_sequences(load.sequences, num_sending=len(self._requests) - num_sequences)
        report = worker_pb2.LoadReport(
            free_pages=counts.free,
            held_pages=counts.held,
            cached_pages=counts.cached,
            pinned_pages=counts.pinned,
            quarantined_pages=counts.quarantined,
            expected_growth_pages=load.expected_growth_pages,
            num_sequences=num_sequences,
            queued_tokens=load.queued_tokens,
            running_tokens=load.running_tokens,
            queued_seconds=self._rate.seconds_for(load.queued_tokens + load.running_tokens),
            tokens_per_second=self._rate.tokens_per_second or 0.0,
            step_ms=self._rate.step_seconds * 1e3,
            hit_rate=self._reporter.hit_rate,
        )
        metrics.set_load(report, load.refusals, load.num_restarts)
        self._reporter.report(report)

    def _check_pages(self) -> None:
        """At rest every page must belong to whom the requests say. If not, this worker must take no more requests."""
        now = self._parts.clock.now()
        if now - self._checked_at < CHECK_SECONDS or self._has_wrong_pages:
            return
        self._checked_at = now
        owners = self._tier.page_owners()
        faults = self._parts.pool.check(owners.tables, owners.reads, owners.writes)
        if faults:
            self._has_wrong_pages = True
            reason = "pages do not add up: " + "; ".join(faults)
            log.error("%s\nlast changes: %s", reason, "\n".join(self._parts.pool.history()))
            self._parts.health.set_fault(PAGES, reason)


def _must_wait_for(logits: StepLogits) -> bool:
    """Whether the host must wait for a step before the turn ends."""
    return bool(logits.prompts) or any(entry.sequence.sampling.has_filter for entry in logits.scheduled)
