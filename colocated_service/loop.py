"""The colocated worker's loop: receive, schedule, run, deliver. Both phases, one page pool, nothing to transfer.

The life of a request here:

1. *waiting*    GenerateCommand came.
2. *prompt*     its chunks are computed, in steps that also give running answers their tokens.
3. *answer*     one token per step. If pages run out it waits again, with the tokens it has, and is computed again.
4. *released*   it ended. Its pages stay as cache.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import grpc

from colocated_service.config import ColocatedConfig
from colocated_service.scheduler import ColocatedScheduler, ColocatedStep
from engine.model_runner import PromptLogits, StepLogits, StepRunner
from engine.prefix_cache import PrefixCache
from engine.sampler import Choice, TokenLogprobs
from engine.sequence import Sequence
from protos import inference_pb2, worker_pb2
from worker_runtime.answering_loop import AnsweringLoop
from worker_runtime.engine_loop import PageOwners
from worker_runtime.inbox import InboxMessage, SessionClosed, SessionCommand, SessionOpened
from worker_runtime.load_reporter import LoadReporter
from worker_runtime.parts import WorkerParts
from worker_runtime.rate import Rate
from worker_runtime.request import (
    StopRule,
    check_command,
    failure_event,
    logprobs_message,
    prompt_logprobs,
    sampling_params,
)
from worker_runtime.stamps import Stamps

log = logging.getLogger(__name__)

RequestKey = tuple[str, int]
"""(request id, attempt)"""


@dataclass(eq=False)
class _Request:
    """One sequence and what its router is still to hear."""

    session_id: int
    key: RequestKey
    sequence: Sequence
    stop: StopRule
    stamps: Stamps = field(default_factory=Stamps)
    num_chunks: int = 0
    was_preempted: bool = False
    is_first_output: bool = True
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the prompt tokens after the first, so far; if asked for."""


class ColocatedLoop(AnsweringLoop[ColocatedStep, _Request]):
    """Owns scheduler, page pool and requests; only its thread touches them."""

    def __init__(self, parts: WorkerParts, runner: StepRunner, config: ColocatedConfig) -> None:
        super().__init__(parts, runner, config.overlap)
        self._vocab_size = parts.vocab_size
        self._cache = PrefixCache(parts.pool, parts.page_size, config.prefix_cache)
        self._reporter = LoadReporter(parts.sessions, self._cache)
        self._scheduler = ColocatedScheduler(
            parts.pool,
            self._cache,
            parts.page_size,
            config.token_budget,
            config.max_num_sequences,
            config.step_policy,
            config.prompt_order,
        )
        self._rate, self._token_budget = Rate(), config.token_budget
        self._prompt_tokens = self._hit_tokens = 0
        self._requests: dict[RequestKey, _Request] = {}

    def _plan(self) -> ColocatedStep | None:
        step = self._scheduler.schedule(
            time.monotonic(), self._rate.tokens_per_second, find_pages=self._deliver_under_way
        )
        if step is not None:
            self._let_go(step)
        return step

    def _has_open_work(self) -> bool:
        return bool(self._requests) or self._has_step_under_way()

    def _hand_over(self) -> None:
        self._deliver_under_way()
        for request in list(self._requests.values()):
            sequence = request.sequence
            event = worker_pb2.PreemptedEvent(
                request_id=request.key[0],
                attempt=request.key[1],
                output_token_ids=sequence.token_ids[sequence.num_prompt_tokens :],
                is_draining=True,
            )
            self._parts.sessions.add(request.session_id, worker_pb2.SessionResponse(preempted=event))
            self._abort(request)

    def _page_owners(self) -> PageOwners:
        return PageOwners(tables=[r.sequence.page_table for r in self._requests.values()])

    def _let_go(self, step: ColocatedStep) -> None:
        """Those that this step has no time or no pages for."""
        for sequence in step.expired:
            reason = "the deadline passed, or can't be met any more, before the prompt was computed"
            self._fail(self._by_sequence[sequence.sequence_id], grpc.StatusCode.DEADLINE_EXCEEDED, reason, False)
        for sequence in step.preempted:
            request = self._by_sequence[sequence.sequence_id]
            self._parts.metrics.count_preemption(is_repeated=request.was_preempted)
            request.was_preempted = True

    def _begin(self, step: ColocatedStep) -> None:
        for entry in step.answers:
            self._by_sequence[entry.sequence.sequence_id].stamps.reach(worker_pb2.STAGE_DECODE_STARTED)
        for entry in step.prompts:
            self._begin_chunk(self._by_sequence[entry.sequence.sequence_id])

    def _advance(self, step: ColocatedStep, logits: StepLogits) -> None:
        self._scheduler.update(step)

    def _note_time(self, step: ColocatedStep, seconds: float, is_over: bool) -> None:
        self._rate.add(step.num_prompt_tokens, seconds, is_over, self._token_budget // 2)
        self._parts.metrics.step_seconds.observe(seconds)
        self._parts.metrics.prompt_tokens.inc(step.num_prompt_tokens)

    def _begin_chunk(self, request: _Request) -> None:
        sequence = request.sequence
        request.stamps.reach(worker_pb2.STAGE_PREFILL_STARTED)
        if request.num_chunks == 0:
            self._prompt_tokens += sequence.num_tokens
            self._hit_tokens += sequence.num_cached_tokens
            self._parts.metrics.cached_tokens.inc(sequence.num_cached_tokens)
        request.num_chunks += 1

    # receive

    def _handle(self, message: InboxMessage) -> None:
        match message:
            case SessionOpened(session_id):
                self._reporter.tell_newcomer(session_id)
            case SessionCommand(session_id, request):
                self._handle_command(session_id, request)
            case SessionClosed(session_id):
                self._reporter.session_closed(session_id)
                for orphan in [r for r in self._requests.values() if r.session_id == session_id]:
                    self._abort(orphan)

    def _handle_command(self, session_id: int, request: worker_pb2.SessionRequest) -> None:
        match request.WhichOneof("command"):
            case "generate":
                self._reporter.prompt_received(session_id)
                self._submit(session_id, request.generate)
            case "abort":
                found = self._requests.get((request.abort.request_id, request.abort.attempt))
                if found is not None and found.session_id == session_id:
                    if request.abort.is_complete:
                        self._scheduler.finish(found.sequence)
                    self._abort(found)
            case "flush_cache":
                self._cache.flush()
            case other:
                log.warning("ignored a command that is not for a colocated worker", extra={"command": other})

    def _submit(self, session_id: int, command: worker_pb2.GenerateCommand) -> None:
        key = (command.request_id, command.attempt)
        sequence = Sequence(
            sequence_id=f"{command.request_id}#{command.attempt}",
            token_ids=list(command.token_ids),
            num_prompt_tokens=command.num_prompt_tokens,
            sampling=sampling_params(command.sampling, command.stop),
            cache_salt=command.cache_salt,
        )
        request = _Request(session_id, key, sequence, StopRule(command.stop))
        if self._is_draining:
            # It crossed the news on its way; the router has heard it by now.
            self._send_failure(request, grpc.StatusCode.UNAVAILABLE, "the worker is draining", retryable=True)
            return
        max_num_tokens = command.num_prompt_tokens + command.stop.max_tokens
        refusal = check_command(command, self._vocab_size)
        if key in self._requests:
            refusal = f"request {command.request_id}, attempt {command.attempt}, is known already"
        elif not self._scheduler.can_ever_fit(max_num_tokens):
            refusal = f"prompt and answer of {max_num_tokens} tokens do not fit {self._parts.pool.num_pages} pages"
        if refusal is not None:
            self._send_failure(request, grpc.StatusCode.INVALID_ARGUMENT, refusal, retryable=False)
            return
        self._requests[key] = request
        self._by_sequence[sequence.sequence_id] = request
        deadline = time.monotonic() + command.deadline_ms / 1e3 if command.deadline_ms else None
        self._scheduler.add(sequence, command.stop.max_tokens, command.priority, deadline)

    # deliver

    def _take_prompt_logits(self, prompts: Seq[PromptLogits]) -> None:
        for prompt in prompts:
            # At its place, since a prompt that gave its pages back is computed again.
            of_prompt = self._by_sequence[prompt.sequence.sequence_id].prompt_logprobs
            of_prompt[prompt.start :] = prompt_logprobs(prompt)

    def _append_token(self, request: _Request, token: int, choice: Choice) -> worker_pb2.TokenOutput:
        sequence = request.sequence
        sequence.token_ids.append(token)
        self._parts.metrics.output_tokens.inc()
        request.stamps.reach(worker_pb2.STAGE_PREFILL_FINISHED)
        finish_reason = request.stop.finish_reason(sequence)
        if finish_reason:
            request.stamps.reach(worker_pb2.STAGE_FINISHED)
        output = worker_pb2.TokenOutput(
            request_id=request.key[0],
            attempt=request.key[1],
            first_index=sequence.num_output_tokens - 1,
            token_ids=[token],
            finish_reason=finish_reason,
            stamps=request.stamps.take(),
        )
        if choice.logprobs is not None:
            output.logprobs.CopyFrom(logprobs_message([choice.logprobs]))
        if request.is_first_output:
            request.is_first_output = False
            output.num_cached_tokens = sequence.num_cached_tokens
            if sequence.sampling.prompt_logprobs:
                output.prompt_logprobs.CopyFrom(logprobs_message(request.prompt_logprobs))
        if finish_reason:
            self._scheduler.finish(sequence)
            self._forget(request)
            self._parts.metrics.count_end("finished")
            moved = inference_pb2.KvTransfer(num_chunks=request.num_chunks)
            event = worker_pb2.TransferFinishedEvent(
                request_id=request.key[0], attempt=request.key[1], kv_transfer=moved
            )
            self._parts.sessions.add(request.session_id, worker_pb2.SessionResponse(transfer_finished=event))
        return output

    # ends

    def _abort(self, request: _Request) -> None:
        """Nobody wants it any more."""
        self._forget(request)
        self._parts.metrics.count_end("aborted")

    def _fail(self, request: _Request, code: grpc.StatusCode, message: str, retryable: bool) -> None:
        """Ends a request and tells the router why."""
        self._send_failure(request, code, message, retryable)
        self._forget(request)
        self._parts.metrics.count_end("failed")

    def _forget(self, request: _Request) -> None:
        self._scheduler.abort(request.sequence)
        del self._requests[request.key]
        del self._by_sequence[request.sequence.sequence_id]

    def _send_failure(self, request: _Request, code: grpc.StatusCode, message: str, retryable: bool) -> None:
        log.warning("request failed", extra={"request_id": request.key[0], "reason": message})
        event = failure_event(*request.key, code, message, retryable, is_draining=retryable and self._is_draining)
        self._parts.sessions.add(request.session_id, event)

    # load

    def _report_load(self) -> None:
        prompts, answers, counts = self._scheduler.prompts, self._scheduler.answers, self._parts.pool.counts()
        self._parts.metrics.set_sequences(
            waiting=prompts.num_waiting, prompt=prompts.num_running, running=answers.num_running
        )
        load = worker_pb2.LoadReport(
            free_pages=counts.free,
            cached_pages=counts.cached,
            held_pages=counts.held,
            promised_pages=answers.expected_growth_pages,
            queued_tokens=prompts.queued_tokens,
            running_tokens=prompts.running_tokens,
            queued_seconds=self._rate.seconds_for(prompts.queued_tokens + prompts.running_tokens),
            num_sequences=len(self._requests),
            step_ms=self._rate.step_seconds * 1e3,
            tokens_per_second=self._rate.tokens_per_second or 0.0,
            hit_rate=self._hit_tokens / self._prompt_tokens if self._prompt_tokens else 0.0,
        )
        self._parts.metrics.queued_seconds.set(load.queued_seconds)
        self._parts.metrics.tokens_per_second.set(load.tokens_per_second)
        self._parts.metrics.expected_growth_pages.set(load.promised_pages)
        self._parts.metrics.set_refusals(prompts.refusals)
        self._parts.metrics.prompt_restarts.set(prompts.num_restarts)
        self._reporter.report(load)
