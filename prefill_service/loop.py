"""What a prefill worker does besides the engine loop: it computes prompts and sends their pages.

The life of a request here:

1. *waiting*    PrefillCommand came with a page ticket of a decode worker.
2. *running*    its chunks are computed; finished pages are written to the decode worker meanwhile.
3. *sending*    the last chunk is computed and the first token sampled; the last pages are on their way.
4. *ended*      every write is terminal. Our pages are free, and the router knows what was moved.

An abort, a failed write or a lost router ends a request in any state and revokes its ticket: nothing more is computed
or written. Once the open writes have ended, the decode worker hears that its pages are closed to us.
"""

from __future__ import annotations

from engine.device import IsWritten
from engine.forward import OnLayerGroup
from engine.model_runner import StepRunner
from engine.prefix_cache import PrefixCache
from engine.sequence import Sequence, num_pages_for
from kv_transfer.base import Notification
from kv_transfer.request_ref import RequestRef
from kv_transfer.transfer_thread import PeerConnected, PeerDisconnected, PeerFailed, WriteEnded
from prefill_service.config import PrefillConfig
from prefill_service.page_sender import OnRevoked, PageSender, PageTransfer
from prefill_service.peers import PairTest, Peers
from prefill_service.scheduler import PrefillScheduler
from protos import kv_pb2, worker_pb2
from worker_runtime.engine_loop import EngineLoop
from worker_runtime.inbox import InboxMessage, RevokeTicket, SessionClosed
from worker_runtime.parts import WorkerParts
from worker_runtime.request import WorkerRequest
from worker_runtime.request_table import FINISHED, End, Refusal, RequestTable, ended_by
from worker_runtime.step import Step
from worker_runtime.tier_hooks import PageOwners, TierHooks

REVOKED = End("aborted", message="its ticket was revoked by the owner of the pages")
MIN_GROUPED_BYTES = 2 << 20
"""Last pages with fewer bytes are sent whole: each write has a cost of its own."""


class PrefillLoop(TierHooks):
    """A prefill worker's engine loop and what belongs to this tier. `run` and `turn` are the loop's."""

    def __init__(self, parts: WorkerParts, runner: StepRunner, config: PrefillConfig) -> None:
        self._parts = parts
        cache = PrefixCache(parts.pool, parts.page_size, config.prefix_cache)
        self._scheduler = PrefillScheduler(
            parts.pool, cache, parts.page_size, parts.token_budget, config.max_num_sequences, config.prompt_order
        )
        self.requests = RequestTable(parts, self._scheduler, self._let_go)
        self._sender = PageSender(parts.pool, parts.transfers, parts.page_bytes, parts.num_layer_groups, parts.clock)
        self._transfers: dict[RequestRef, PageTransfer] = {}
        """Of the requests in the table."""
        self._peers = Peers(parts)
        self._is_written: IsWritten | None = None
        """Of the last step: the pages of all steps are written once it says so."""
        self._loop = EngineLoop(parts, runner, cache, self._scheduler, self.requests, self)
        self.run, self.turn = self._loop.run, self._loop.turn

    def __repr__(self) -> str:
        return f"<PrefillLoop {self._loop!r} {self._sender!r} {self._peers!r}>"

    @property
    def is_busy(self) -> bool:
        """See `EngineLoop.is_busy`."""
        return self._loop.is_busy

    # messages

    def handle(self, message: InboxMessage) -> None:
        """See `TierHooks.handle`."""
        match message:
            case SessionClosed(session_id):
                for agent_name in self._peers.forget_session(session_id):
                    self._disconnect_if_unused(agent_name)
            case WriteEnded():
                self._on_write_ended(message)
            case PeerConnected(agent_name):
                self._peers.connected(agent_name)
            case PeerFailed(agent_name, reason):
                self._on_peer_failed(agent_name, reason)
            case PeerDisconnected(agent_name):
                self._sender.peer_disconnected(agent_name)
            case RevokeTicket(asked, on_revoked):
                self._on_revoked_by_owner(asked, on_revoked)
            case Notification():
                # Nobody writes to a prefill worker.
                self._parts.metrics.ignored_notifications.inc()

    def handle_command(self, session_id: int, request: worker_pb2.SessionRequest) -> bool:
        """See `TierHooks.handle_command`."""
        match request.WhichOneof("command"):
            case "prefill":
                self._submit(session_id, request.prefill)
            case "connect_peer":
                self._peers.connect(session_id, request.connect_peer)
            case "forget_peer":
                self._peers.forget(session_id, request.forget_peer.agent_name)
                self._disconnect_if_unused(request.forget_peer.agent_name)
            case _:
                return False
        return True

    def _submit(self, session_id: int, command: worker_pb2.PrefillCommand) -> None:
        def enqueue(request: WorkerRequest) -> Refusal | None:
            refusal = self._never_fits(request, command.ticket)
            if refusal is not None:
                return Refusal(worker_pb2.CAUSE_INVALID, refusal)
            transfer = self._sender.open(session_id, command.ticket)
            if transfer is None:
                # Its owner took the pages back while the command was on its way.
                reason = f"the ticket of request {request.ref} was used or revoked before"
                return Refusal(worker_pb2.CAUSE_TRANSFER_FAILED, reason)
            self._transfers[request.ref] = transfer
            self._scheduler.add(request.sequence, request.priority, request.deadline, request.is_resumed)
            return None

        self.requests.admit(session_id, command.ref, command.spec, enqueue)

    def _never_fits(self, request: WorkerRequest, ticket: kv_pb2.PageTicket) -> str | None:
        """Why a prompt can never be computed and sent, or None."""
        num_pages = num_pages_for(request.sequence.num_tokens, self._parts.page_size)
        if ticket.first_page_index + len(ticket.page_ids) != num_pages:
            return f"the ticket has {len(ticket.page_ids)} pages, the prompt needs {num_pages}"
        if not self._scheduler.can_ever_fit(request.sequence.num_tokens):
            return f"the prompt needs {num_pages} pages, the prefill worker has {self._parts.pool.num_pages}"
        return None

    # steps

    def before_run(self, step: Step) -> OnLayerGroup | None:
        """See `TierHooks.before_run`. Cached pages of a prompt are sent while its first chunk is computed."""
        now, page_size = self._parts.clock.now(), self._parts.page_size
        for entry in step.prompts:
            request, transfer = self._transfer_of(entry.sequence)
            if request.num_chunks == 1 and not transfer.is_lease_over(now):  # if it is, `after_launch` tells
                num_pages = entry.sequence.num_cached_tokens // page_size
                self._sender.send(transfer, entry.sequence.page_table, num_pages, self._is_written)
        return self._layer_group_sender(step)

    def _layer_group_sender(self, step: Step) -> OnLayerGroup | None:
        """Sends the last pages of prompts that end with this step layer by layer, except the last layers, which go
        with the first token. None if there are no such pages, or too few to be worth it.

        Pages of earlier chunks travel while later chunks are computed. Pages of the last chunk can only travel while
        the later layers of the same chunk are computed.
        """
        num_groups, page_bytes = self._parts.num_layer_groups, self._parts.page_bytes
        if num_groups == 1:
            return None
        ending = [entry.sequence for entry in step.prompts if entry.is_sampled]
        grouped = [
            (transfer, sequence)
            for sequence, (_, transfer) in ((s, self._transfer_of(s)) for s in ending)
            if len(transfer.ticket.unsent_pages) * page_bytes >= MIN_GROUPED_BYTES and not transfer.ticket.is_stopped
        ]
        if not grouped:
            return None

        def send(layer_group: int, is_written: IsWritten | None) -> None:
            for transfer, sequence in grouped if layer_group < num_groups - 1 else ():
                if not transfer.is_lease_over(self._parts.clock.now()):  # if it is, `after_token` tells
                    self._sender.send_layer_group(transfer, sequence.page_table, layer_group, is_written)

        return send

    def after_launch(self, step: Step, is_written: IsWritten | None) -> None:
        """See `TierHooks.after_launch`. Finished pages of prompts that are not computed to their end are sent."""
        self._is_written = is_written
        for entry in step.prompts:
            if entry.sequence.num_uncomputed_tokens:
                request, transfer = self._transfer_of(entry.sequence)
                self._send(request, transfer, entry.sequence.num_computed_tokens // self._parts.page_size)

    def after_token(self, request: WorkerRequest, token_id: int, output: worker_pb2.TokenOutput) -> None:
        """See `TierHooks.after_token`. The first token is this worker's last: the remaining pages are sent with it."""
        transfer, ended = self._transfers[request.ref], None
        transfer.computed_at = self._parts.clock.now()
        if output.finish_reason:
            request.is_sending = True
            ended = self._sender.stop(transfer, "the output ended with its first token", ended_with_first_token=True)
        else:
            num_pages = num_pages_for(request.sequence.num_computed_tokens, self._parts.page_size)
            request.is_sending = self._send(request, transfer, num_pages, first_token=token_id)
        self._scheduler.finish(request.sequence)
        self._on_transfer_ended(ended)

    def _send(
        self, request: WorkerRequest, transfer: PageTransfer, num_pages: int, first_token: int | None = None
    ) -> bool:
        """Sends finished pages. False: the lease is over, and so is the request."""
        if transfer.is_lease_over(self._parts.clock.now()):
            self.requests.end(request, ended_by(worker_pb2.CAUSE_DEADLINE, "the page ticket's lease ended"))
            return False
        self._sender.send(transfer, request.sequence.page_table, num_pages, self._is_written, first_token)
        return True

    def _transfer_of(self, sequence: Sequence) -> tuple[WorkerRequest, PageTransfer]:
        request = self.requests.scheduled(sequence)
        return request, self._transfers[request.ref]

    # ends

    def _on_write_ended(self, message: WriteEnded) -> None:
        tag, ended = message.write.tag, None
        if isinstance(tag, PairTest):
            if message.ok:
                self._peers.test_pages_written(tag, message)
        else:
            if message.ok:
                self._parts.metrics.kv_bytes.inc(self._sender.num_bytes(message.write))
            else:
                self._parts.metrics.kv_write_failures.inc()
            ended = self._sender.write_ended(message)
        if not message.ok:
            self._on_peer_failed(message.write.agent_name, message.reason)
        self._on_transfer_ended(ended)

    def _on_transfer_ended(self, transfer: PageTransfer | None) -> None:
        """Nothing of a transfer is open any more. If its request is still in the table, everything went well.

        The router always hears of it: it may wait for nothing else, if it ended the output itself (a stop string).
        """
        if transfer is None:
            return
        moved = transfer.moved(self._parts.transport_name)
        event = worker_pb2.TransferFinishedEvent(ref=transfer.ticket.ref.to_proto(), kv_transfer=moved)
        self._parts.sessions.add(transfer.session_id, worker_pb2.SessionResponse(transfer_finished=event))
        if (request := self._request_of(transfer)) is not None:
            self.requests.end(request, FINISHED)
        self._disconnect_if_unused(transfer.ticket.agent_name)

    def _let_go(self, request: WorkerRequest, reason: str) -> None:
        """A request has ended. Its ticket is not used any more; harmless if everything is sent."""
        self._on_transfer_ended(self._sender.stop(self._transfers.pop(request.ref), reason))

    def _on_revoked_by_owner(self, asked: kv_pb2.RevokeTicketRequest, on_revoked: OnRevoked) -> None:
        transfer = self._sender.revoked_by_owner(asked, on_revoked)
        if transfer is None:
            return
        if (request := self._request_of(transfer)) is not None:
            self.requests.end(request, REVOKED)
        else:
            self._on_transfer_ended(self._sender.stop(transfer, "revoked by its owner"))

    def _on_peer_failed(self, agent_name: str, reason: str) -> None:
        """After one transport error a writer gives up every ticket of that peer."""
        # Routers hear of the peer first, so that they do not bind a failed request to the same pair again.
        self._peers.failed(agent_name, reason)
        for transfer in list(self._transfers.values()):
            if transfer.ticket.agent_name == agent_name and (request := self._request_of(transfer)) is not None:
                self.requests.end(request, ended_by(worker_pb2.CAUSE_TRANSFER_FAILED, reason))

    def _request_of(self, transfer: PageTransfer) -> WorkerRequest | None:
        """The request whose pages are sent; None if it has ended."""
        is_current = self._transfers.get(transfer.ticket.ref) is transfer
        return self.requests.get(transfer.ticket.ref) if is_current else None

    def _disconnect_if_unused(self, agent_name: str) -> None:
        if not self._sender.is_sending_to(agent_name):
            self._peers.disconnect_if_unwanted(agent_name)

    def has_open_transfers(self) -> bool:
        """See `TierHooks.has_open_transfers`."""
        return bool(self._sender)

    def page_owners(self) -> PageOwners:
        """See `TierHooks.page_owners`."""
        return PageOwners(
            tables=[request.sequence.page_table for request in self.requests], reads=self._sender.pages_read()
        )
