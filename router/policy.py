"""Which pair serves a request: filter, score, pick. Plain functions; the state is the links'."""

from __future__ import annotations

import random
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from router.request import Request
    from router.worker_pool import WorkerLink

Pair = tuple["WorkerLink", "WorkerLink"]


def choose_pair(request: Request, pairs: Seq[Pair]) -> Pair | None:
    """The pair to bind a request to, or None: it stays in the router's queue, where it can still be bound to any."""
    return pick(score(filter_pairs(request, pairs)))


def filter_pairs(request: Request, pairs: Seq[Pair]) -> list[Pair]:
    """Pairs whose prefill worker has less than a step of work and whose decode worker has room."""
    return [(p, d) for p, d in pairs if _has_little_work(p) and _has_room(d, request)]


def score(pairs: Iterable[Pair]) -> list[tuple[tuple[float, float], Pair]]:
    """Lower is better: prompt tokens waiting at prefill, then the share of pages taken at decode."""
    return [((pending_tokens(p), pages_taken(d)), (p, d)) for p, d in pairs]


def pick(scored: Seq[tuple[tuple[float, float], Pair]]) -> Pair | None:
    """One of the best, by chance among equals."""
    if not scored:
        return None
    best = min(rank for rank, _ in scored)
    return random.choice([pair for rank, pair in scored if rank == best])


def pending_tokens(prefill: WorkerLink) -> int:
    """Prompt tokens bound to a prefill worker, by us or, as it reports, by all routers."""
    ours = sum(len(r.token_ids) for r in prefill.requests if r.num_attempt_tokens == 0)
    return max(ours, prefill.load.queued_tokens)


def pages_taken(decode: WorkerLink) -> float:
    """Share of a decode worker's pages that are not to be had."""
    assert decode.info is not None
    total = decode.info.limits.num_pages
    return 1 - (decode.load.free_pages - decode.load.promised_pages) / total


def _has_little_work(prefill: WorkerLink) -> bool:
    assert prefill.info is not None
    return pending_tokens(prefill) < prefill.info.limits.token_budget


def _has_room(decode: WorkerLink, request: Request) -> bool:
    assert decode.info is not None
    limits = decode.info.limits
    needed = -(-(request.max_num_tokens - 1) // limits.page_size)
    return not decode.is_full and needed <= limits.num_pages
