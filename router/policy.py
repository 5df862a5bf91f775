"""Which pair serves a request: filter, score, pick. Plain functions; the state is that of the links."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from router.config import Routing
from router.request import Request
from router.worker_link import WorkerLink
from router.worker_pool import Pair

Scored = tuple[tuple[float, float], Pair]
"""A pair with its score, of which lower is better."""


def choose_pair(
    request: Request, pairs: Seq[Pair], rng: random.Random, routing: Routing = "cache_aware"
) -> Pair | None:
    """The pair to bind a request to, or None: it stays in the router's queue, where it can still be bound to any."""
    fitting = filter_pairs(request, pairs)
    return pick(score_turns(fitting) if routing == "round_robin" else score(request, fitting), rng)


def can_serve(request: Request, pair: Pair) -> bool:
    """Whether a pair, when idle, could serve a request: the model of its tokens, and enough of everything."""
    prefill, decode = pair
    assert prefill.info is not None and decode.info is not None
    if request.output_token_ids and request.model_hashes != model_hashes(prefill):
        return False
    prefill_limits, decode_limits = prefill.info.limits, decode.info.limits
    # Checked already, but maybe with the limits of another generation of workers.
    if request.max_num_tokens > prefill_limits.max_model_len or request.checked.vocab_size > prefill_limits.vocab_size:
        return False
    return (
        _pages(request.num_tokens, prefill_limits.page_size) <= prefill_limits.num_pages
        and _pages(request.max_num_tokens - 1, decode_limits.page_size) <= decode_limits.num_pages
    )


def model_hashes(prefill: WorkerLink) -> tuple[str, str, str]:
    """Tells models apart: config, weights and their quantization."""
    assert prefill.info is not None
    of = prefill.info.fingerprint
    return of.model_config_hash, of.weights_hash, of.quantization


def filter_pairs(request: Request, pairs: Seq[Pair]) -> list[Pair]:
    """Pairs whose prefill worker has less than a step of work and whose decode worker has room."""
    return [pair for pair in pairs if _has_little_work_before(pair.prefill, request) and not pair.decode.is_full]


def decode_room(pairs: Iterable[Pair]) -> int:
    """Tokens that decode workers have pages for, without expected growth; 0 if none takes another sequence."""
    room = 0
    for decode in {id(decode): decode for _, decode in pairs}.values():
        assert decode.info is not None
        if not decode.is_full and decode.load.num_sequences < decode.info.limits.max_num_sequences:
            pages = decode.load.free_pages + decode.load.cached_pages - decode.load.expected_growth_pages
            room += max(1, pages) * decode.info.limits.page_size
    return room


def score(request: Request, pairs: Iterable[Pair]) -> list[Scored]:
    """Prompt tokens to compute before the first token, then the share of pages taken at decode.

    Cached pages need not be computed, or not be sent. Affinity of sessions follows from that, and a worker that is gone
    is forgotten with its cache.
    """
    pairs = list(pairs)
    tokens = {p: pending_tokens(p) + uncached_tokens(p, request) for p in {p for p, _ in pairs}}
    pages = {d: _pages_after(d, request) for d in {d for _, d in pairs}}
    return [((tokens[pair.prefill], pages[pair.decode]), pair) for pair in pairs]


def score_turns(pairs: Iterable[Pair]) -> list[Scored]:
    """Who was bound longest ago, whatever a worker has to do or has cached."""
    return [((pair.prefill.last_bound, pair.decode.last_bound), pair) for pair in pairs]


def pick(scored: Seq[Scored], rng: random.Random) -> Pair | None:
    """One of the best; among equals a random one."""
    if not scored:
        return None
    best = min(rank for rank, _ in scored)
    return rng.choice([pair for rank, pair in scored if rank == best])


def cached_tokens(worker: WorkerLink, request: Request) -> int:
    """Tokens of a prompt that a worker's prefix cache has, as far as its events tell."""
    checked = request.checked
    if worker.info is None or checked.page_size != worker.info.limits.page_size:
        return 0
    known = itertools.takewhile(worker.cached_pages.__contains__, checked.page_keys)
    return sum(1 for _ in known) * checked.page_size


def uncached_tokens(prefill: WorkerLink, request: Request) -> int:
    """Tokens that a prefill worker would have to compute; the last one always."""
    return max(1, request.num_tokens - cached_tokens(prefill, request))


def pending_tokens(prefill: WorkerLink) -> int:
    """Prompt tokens that a worker has to compute: those it reports, and those it did not know of yet."""
    load = prefill.load
    unreported = (
        leg.num_uncached_tokens
        for leg in prefill.legs.values()
        if not leg.has_token and (leg.prompt_number is None or leg.prompt_number > load.num_prompts_received)
    )
    return load.queued_tokens + load.running_tokens + sum(unreported)


def seconds_to_first_token(num_tokens: int, queued_tokens: int, pairs: Iterable[Pair]) -> float | None:
    """How long a new prompt behind `queued_tokens` waiting ones will take, at the rates that workers report.

    None while no rate is known.
    """
    computing = {id(prefill): prefill for prefill, _ in pairs}.values()
    rates = [prefill.load.tokens_per_second for prefill in computing]
    if sum(rates) <= 0:
        return None
    # Those before it are shared out, the prompt itself is computed by one.
    return (queued_tokens + sum(map(pending_tokens, computing))) / sum(rates) + num_tokens / max(rates)


def pages_taken(decode: WorkerLink) -> float:
    """Share of a decode worker's pages that are not to be had."""
    assert decode.info is not None
    available = decode.load.free_pages + decode.load.cached_pages
    return 1 - (available - decode.load.expected_growth_pages) / decode.info.limits.num_pages


def work_before(prefill: WorkerLink, request: Request) -> int:
    """Prompt tokens bound to a worker that it will compute before a request's."""
    assert prefill.info is not None
    if not prefill.info.limits.slowdown:
        return pending_tokens(prefill)
    # The worker takes them in the same order as our queue. Those of other routers are not known one by one.
    before = (leg for leg in prefill.legs.values() if not leg.has_token and leg.order < request.order)
    return sum(leg.num_uncached_tokens for leg in before)


def _has_little_work_before(prefill: WorkerLink, request: Request) -> bool:
    assert prefill.info is not None
    limits = prefill.info.limits
    # A leg that generates counts until it ends; a leg that only computes its prompt counts until that is done.
    num_bound = sum(1 for leg in prefill.legs.values() if leg.generates or not leg.has_token)
    return work_before(prefill, request) < limits.token_budget and num_bound < limits.max_num_sequences


def _pages_after(decode: WorkerLink, request: Request) -> float:
    """Share of a decode worker's pages that are not to be had, less what it has of the prompt already.

    Those that were asked for a moment ago count, though the worker has not reported them yet.
    """
    assert decode.info is not None
    page_size, num_pages = decode.info.limits.page_size, decode.info.limits.num_pages
    asked = sum(_pages(leg.num_tokens, page_size) for leg in decode.legs.values() if leg.is_reserving)
    reused = cached_tokens(decode, request) // max(1, page_size)
    return pages_taken(decode) + (asked - reused) / num_pages


def _pages(num_tokens: int, page_size: int) -> int:
    return -(-num_tokens // page_size)
