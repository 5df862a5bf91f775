"""Gives a request to the workers of a pair: a leg at each worker, and the commands that begin it."""

from __future__ import annotations

from protos import worker_pb2
from router.policy import model_hashes, uncached_tokens
from router.request import Request, RequestState
from router.worker_link import Leg
from router.worker_pool import Pair


def bind(request: Request, pair: Pair, number: int) -> None:
    """Binds a request. number: of the router's bindings so far."""
    assert pair.prefill.info is not None and pair.decode.info is not None
    request.attempts[-1].workers = pair.prefill.info.worker_id, pair.decode.info.worker_id
    request.model_hashes = model_hashes(pair.prefill)
    is_split = len(pair.links) > 1
    for link in pair.links:
        leg = Leg(
            link,
            request.ref,
            request.order,
            computes_prompt=link is pair.prefill,
            generates=link is pair.decode,
            num_tokens=request.num_tokens,
            num_uncached_tokens=uncached_tokens(link, request),
            is_reserving=is_split and link is pair.decode,
        )
        request.legs.append(leg)
        link.bind(leg, number)
    ref, spec = request.ref.to_proto(), request.spec()
    if is_split:
        request.state = RequestState.RESERVING
        writer = worker_pb2.PageWriter(
            agent_name=pair.prefill.agent_name,
            incarnation_id=pair.prefill.info.incarnation_id,
            address=pair.prefill.info.address,
        )
        reserve = worker_pb2.ReserveCommand(ref=ref, spec=spec, writer=writer)
        pair.decode.send(worker_pb2.SessionRequest(reserve=reserve))
    else:
        request.state = RequestState.RUNNING
        generate = worker_pb2.GenerateCommand(ref=ref, spec=spec)
        pair.prefill.send_prompt(request.legs[0], worker_pb2.SessionRequest(generate=generate))
