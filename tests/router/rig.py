"""A dispatcher over scripted workers: no process, no socket."""

from __future__ import annotations

from protos import inference_pb2 as pb
from protos import worker_pb2 as wpb
from router.config import RouterConfig
from router.dispatch import Dispatcher
from router.metrics import RouterMetrics
from router.output_stream import Tokens
from router.request import Request
from router.validation import CheckedRequest
from router.worker_pool import WorkerLink


def make_link(tier, name, num_pages=400, token_budget=64, tokenizer=""):
    link = WorkerLink(f"{name}:1", tier)
    link.info = wpb.WorkerInfo(worker_id=name, incarnation_id="1", tier=tier)
    link.info.endpoint.agent_name = f"agent-{name}"
    link.info.fingerprint.tokenizer_hash = tokenizer
    limits = link.info.limits
    limits.num_pages, limits.page_size, limits.token_budget, limits.max_model_len = num_pages, 16, token_budget, 10_000
    limits.max_num_sequences = 64
    link.load.free_pages = num_pages
    return link


class Rig:
    """A dispatcher over scripted links; `sent` takes the commands queued for a link."""

    def __init__(self, prefill=1, decode=1, loss_seconds=5.0, **options):
        config = RouterConfig(model="m", worker_loss_seconds=loss_seconds, **options)
        self.metrics = RouterMetrics()
        self.dispatcher = Dispatcher(config, "hash", self.metrics)
        self.prefill = [make_link(wpb.TIER_PREFILL, f"p{i}") for i in range(prefill)]
        self.decode = [make_link(wpb.TIER_DECODE, f"d{i}") for i in range(decode)]
        pool = self.dispatcher.pool
        pool.prefill, pool.decode = list(self.prefill), list(self.decode)
        for link in self.prefill:
            link.ready_peers = {d.agent_name for d in self.decode}

    @staticmethod
    def make_request(num_tokens=20, max_tokens=10, priority=0, **sampling):
        stop = wpb.StopConfig(max_tokens=max_tokens)
        checked = CheckedRequest(
            "r", (5,) * num_tokens, wpb.SamplingConfig(**sampling), stop, (), False, frozenset(), False, "", priority
        )
        return Request(checked, None)

    def submit(self, **options):
        request = self.make_request(**options)
        self.dispatcher.check_room(1, len(request.checked.prompt_token_ids))
        self.dispatcher.submit(request)
        return request

    @staticmethod
    def sent(link):
        commands = []
        while not link.commands.empty():
            commands.append(link.commands.get_nowait())
        return commands

    def kinds(self, link):
        return [command.WhichOneof("command") for command in self.sent(link)]

    def event(self, link, **event):
        self.dispatcher._on_event(link, wpb.SessionResponse(**event))

    def reserved(self, request, link=None):
        event = wpb.ReservedEvent(request_id=request.wire_id, attempt=request.attempt)
        self.event(link or self.decode[0], reserved=event)

    def tokens(self, request, link, first_index, *ids, finish=pb.FINISH_REASON_UNSPECIFIED):
        output = wpb.TokenOutput(
            request_id=request.wire_id,
            attempt=request.attempt,
            first_index=first_index,
            token_ids=ids,
            finish_reason=finish,
        )
        self.event(link, step_output=wpb.StepOutput(outputs=[output]))

    def preempted(self, request, *output_token_ids):
        event = wpb.PreemptedEvent(
            request_id=request.wire_id, attempt=request.attempt, output_token_ids=output_token_ids
        )
        self.event(request.decode, preempted=event)

    def transferred(self, request, link):
        event = wpb.TransferFinishedEvent(request_id=request.wire_id, attempt=request.attempt)
        event.kv_transfer.bytes = 7
        self.event(link, transfer_finished=event)

    def lose(self, link):
        link.info = None
        for prefill in self.prefill:
            prefill.ready_peers.discard(f"agent-{link.address.split(':')[0]}")
        self.dispatcher._on_lost(link)


def events(request):
    return request.output.take()


async def end_of(request):
    """The last event, once it is there."""
    while not (found := events(request)):
        await request.output.news.wait()
    return found[-1]


def ids(found):
    return [token for event in found if isinstance(event, Tokens) for token in event.token_ids]
