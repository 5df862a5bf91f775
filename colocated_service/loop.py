"""What a colocated worker does besides the engine loop: both phases, one page pool, nothing to transfer.

The life of a request here:

1. *waiting*    GenerateCommand came.
2. *prompt*     its chunks are computed, in steps that also give decoding sequences their tokens.
3. *running*    one token per step. If it is preempted it waits again, with the tokens it has, and is computed again.
4. *ended*      its pages stay cached.
"""

from __future__ import annotations

from colocated_service.config import ColocatedConfig
from colocated_service.scheduler import ColocatedScheduler
from engine.model_runner import StepRunner
from engine.prefix_cache import PrefixCache
from protos import worker_pb2
from worker_runtime.engine_loop import EngineLoop
from worker_runtime.parts import WorkerParts
from worker_runtime.request import WorkerRequest
from worker_runtime.request_table import Refusal, RequestTable
from worker_runtime.tier_hooks import TierHooks


class ColocatedLoop(TierHooks):
    """A colocated worker's engine loop and what belongs to this tier. `run` and `turn` are the loop's."""

    def __init__(self, parts: WorkerParts, runner: StepRunner, config: ColocatedConfig) -> None:
        self._parts = parts
        cache = PrefixCache(parts.pool, parts.page_size, config.prefix_cache)
        self.scheduler = ColocatedScheduler(
            parts.pool,
            cache,
            parts.page_size,
            parts.token_budget,
            config.max_num_sequences,
            config.step_policy,
            config.prompt_order,
        )
        self.requests = RequestTable(parts, self.scheduler, lambda request, reason: None)
        self._loop = EngineLoop(parts, runner, cache, self.scheduler, self.requests, self, config.overlap)
        self.run, self.turn = self._loop.run, self._loop.turn

    def __repr__(self) -> str:
        return f"<ColocatedLoop {self._loop!r}>"

    @property
    def is_busy(self) -> bool:
        """See `EngineLoop.is_busy`."""
        return self._loop.is_busy

    def handle_command(self, session_id: int, request: worker_pb2.SessionRequest) -> bool:
        """See `TierHooks.handle_command`."""
        if request.WhichOneof("command") != "generate":
            return False
        self.requests.admit(session_id, request.generate.ref, request.generate.spec, self._enqueue)
        return True

    def _enqueue(self, request: WorkerRequest) -> Refusal | None:
        max_num_tokens = request.sequence.num_prompt_tokens + request.stop.max_tokens
        if not self.scheduler.can_ever_fit(max_num_tokens):
            message = f"prompt and output of {max_num_tokens} tokens do not fit {self._parts.pool.num_pages} pages"
            return Refusal(worker_pb2.CAUSE_INVALID, message)
        max_tokens = request.stop.max_tokens
        self.scheduler.add(request.sequence, max_tokens, request.priority, request.deadline, request.is_resumed)
        return None

    def preempt(self, request: WorkerRequest) -> None:
        """See `TierHooks.preempt`. The request stays here: its scheduler has queued it as a prompt again."""
        self._parts.metrics.count_preemption(is_repeated=request.was_preempted)
        request.was_preempted = True
