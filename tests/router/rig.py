"""A dispatcher over scripted workers: no process, no socket."""

from __future__ import annotations

import random

from protos import inference_pb2 as pb
from protos import worker_pb2 as wpb
from router.config import RouterConfig
from router.dispatch import Dispatcher
from router.metrics import RouterMetrics
from router.output_stream import Tokens
from router.request import Request
from router.validation import CheckedRequest
from router.worker_link import WorkerLink
from tests.scripted import FakeClock


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
        self.clock, self.rng = FakeClock(), random.Random(1)
        self.metrics = RouterMetrics(self.clock.now)
        self.dispatcher = Dispatcher(config, "hash", self.metrics, self.clock, self.rng)
        self.prefill = [make_link(wpb.TIER_PREFILL, f"p{i}") for i in range(prefill)]
        self.decode = [make_link(wpb.TIER_DECODE, f"d{i}") for i in range(decode)]
        pool = self.dispatcher.pool
        pool.links += [*self.prefill, *self.decode]
        for link in self.prefill:
            for peer in self.decode:
                link.peer_ready(peer.agent_name)

    def make_request(self, num_tokens=20, max_tokens=10, priority=0, **sampling):
        stop = wpb.StopConfig(max_tokens=max_tokens)
        checked = CheckedRequest(
            "r", (5,) * num_tokens, wpb.SamplingConfig(**sampling), stop, (), False, frozenset(), False, "", priority
        )
        return Request(checked, None, self.clock.now, self.rng)

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
        self.dispatcher.pool.receive(link, wpb.SessionResponse(**event))

    def refused(self, request, cause=wpb.CAUSE_NO_PAGES):
        self.event(request.decode, refused=wpb.RefusedEvent(ref=request.ref.to_proto(), cause=cause))

    def ended(self, request, cause, *output_token_ids, link=None):
        """Its worker ends a request before its last token: the one that generates, unless a test says otherwise."""
        ended = wpb.RequestEndedEvent(
            ref=request.ref.to_proto(), cause=cause, message="why", output_token_ids=output_token_ids
        )
        self.event(link or request.decode, request_ended=ended)

    def report(self, link, **load):
        """A worker says how busy it is."""
        self.event(link, load=wpb.LoadReport(**({"free_pages": link.info.limits.num_pages} | load)))

    def reserved(self, request, link=None):
        event = wpb.ReservedEvent(ref=request.ref.to_proto())
        self.event(link or self.decode[0], reserved=event)

    def tokens(self, request, link, first_index, *ids, finish=pb.FINISH_REASON_UNSPECIFIED):
        output = wpb.TokenOutput(
            ref=request.ref.to_proto(),
            first_index=first_index,
            token_ids=ids,
            finish_reason=finish,
        )
        self.event(link, step_output=wpb.StepOutput(outputs=[output]))

    def preempted(self, request, *output_token_ids):
        self.ended(request, wpb.CAUSE_NO_PAGES, *output_token_ids)

    def transferred(self, request, link):
        event = wpb.TransferFinishedEvent(ref=request.ref.to_proto())
        event.kv_transfer.bytes = 7
        self.event(link, transfer_finished=event)

    def lose(self, link):
        """Its session breaks."""
        self.dispatcher.pool.close(link)


def events(request):
    return request.output.take()


async def end_of(request):
    """The last event, once it is there."""
    while not (found := events(request)):
        await request.output.has_output.wait()
    return found[-1]


def ids(found):
    return [token for event in found if isinstance(event, Tokens) for token in event.token_ids]
