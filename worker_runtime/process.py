"""How a worker process comes up and goes down.

    build ──> start ──> ready ── SIGTERM ──> drain ──> stop

Building makes model, page pool, transport, loop and server. The engine thread loads the model and keeps it
(`engine_thread.py`). Starting starts the loop on that thread and the transfer thread, and listens. Draining finishes or
hands over what runs. Stopping ends the threads first and closes the port last: a closed port tells other workers that
this process writes nothing any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from grpc import aio

from engine.attention.choice import choose_attention
from engine.cuda_graphs import graph_sizes
from engine.kv_cache import PAGE_AXES, KvCache
from engine.loader import LoadedModel, load_model
from engine.model_runner import ModelRunner, StepRunner
from engine.page_pool import PagePool
from kv_transfer.base import PageRegion, Transport
from kv_transfer.layout import Fingerprint
from kv_transfer.local_transport import LocalHub, LocalTransport
from kv_transfer.nixl_transport import NixlTransport
from kv_transfer.transfer_thread import TransferThread
from protos import worker_pb2, worker_pb2_grpc
from rpc.addresses import join_address, normal_address
from rpc.clock import SystemClock
from rpc.metrics import serve_metrics
from rpc.process import install_stop_signals, prepare_process, write_ready_file
from rpc.server import RpcServer, try_ports
from rpc.tls import tls_files
from worker_runtime.config import WorkerConfig, default_worker_id, new_incarnation_id
from worker_runtime.engine_thread import EngineThread
from worker_runtime.health import TRANSFERS, Health
from worker_runtime.inbox import Drain, Inbox, Stop
from worker_runtime.metrics import WorkerMetrics
from worker_runtime.pair_test_pages import KvTestPages
from worker_runtime.parts import WorkerParts
from worker_runtime.pool_size import num_pool_pages
from worker_runtime.session import Sessions, SessionServicer
from worker_runtime.token_budget import measured_token_budget

log = logging.getLogger(__name__)

STOP_GRACE_SECONDS = 2.0
"""For sessions to send what waits, once the engine has ended."""
HANDOVER_SECONDS = 10.0
"""For what is handed over at the end: transfers that are open towards or from this worker have to end well."""
LAST_EVENTS_SECONDS = 0.5
"""For sessions to send what waits, where they can't be waited for."""
WATCH_SECONDS = 0.25


class Loop(Protocol):
    """The loop of a worker; see `worker_runtime.engine_loop`."""

    run: Callable[[], None]


def _no_services(server: aio.Server, parts: WorkerParts) -> None:
    """For a tier that serves sessions only."""


@dataclass(frozen=True)
class WorkerKind:
    """What a process of one tier is made of."""

    tier: worker_pb2.Tier.ValueType
    build_loop: Callable[[WorkerParts, StepRunner, random.Random], Loop]
    token_budget: int | Literal["auto"] = 0
    """Prompt tokens per step; 0 for decode workers."""
    is_mixed: bool = False
    """Whether steps contain prompts beside sequences that decode."""
    slowdown: int = 0
    """See `WorkerLimits.slowdown`."""
    moves_pages: bool = True
    """False: the worker runs where NIXL does not."""
    service_names: tuple[str, ...] = ()
    """Services beside sessions, for health checks."""
    add_services: Callable[[aio.Server, WorkerParts], None] = _no_services

    @property
    def name(self) -> str:
        """For logs and metrics."""
        return worker_pb2.Tier.Name(self.tier).removeprefix("TIER_").lower()


def run_worker(config: WorkerConfig, tier: WorkerKind) -> int:
    """Runs a worker process until SIGTERM or SIGINT. Returns the exit code.

    Raises ModelLoadError, TransferError, PortInUse or ConfigError if it can't start.
    """
    prepare_process(config.process)
    try_ports(config.process)
    engine, started = EngineThread(config.engine.threads), time.monotonic()
    loaded, kv_cache, token_budget = engine.call(lambda: _load(config, tier))
    about = {
        "model": config.engine.model,
        "dtype": _dtype_name(loaded.dtype),
        "device": str(loaded.device),
        "threads": engine.num_threads,
        "fused": loaded.fused is not None,
        "token_budget": token_budget,
        "seconds": round(time.monotonic() - started, 2),
    }
    log.info("model loaded", extra=about)
    _use_device(loaded.device)

    async def serve() -> int:
        return await WorkerProcess(config, tier, engine, loaded, kv_cache, token_budget).run()

    return asyncio.run(serve())


def _load(config: WorkerConfig, tier: WorkerKind) -> tuple[LoadedModel, KvCache, int]:
    """The model, its pool of pages, and the token budget."""
    loaded = load_model(config.engine)
    _use_device(loaded.device)
    token_budget = (
        measured_token_budget(loaded, config.engine, tier.is_mixed, config.max_num_sequences)
        if tier.token_budget == "auto"
        else tier.token_budget
    )
    num_pages = num_pool_pages(config.engine, loaded, token_budget, config.max_num_sequences)
    kv_cache = KvCache(num_pages, config.engine.page_size, loaded.kv_shape, loaded.dtype, loaded.device)
    return loaded, kv_cache, token_budget


class WorkerProcess:
    """A worker on an event loop. Built there, run once."""

    def __init__(
        self,
        config: WorkerConfig,
        tier: WorkerKind,
        engine: EngineThread,
        loaded: LoadedModel,
        kv_cache: KvCache,
        token_budget: int,
    ) -> None:
        self._config, self._tier, self._device, self._engine = config, tier, kv_cache.tensor.device, engine
        self._event_loop = asyncio.get_running_loop()
        self._stop, self._engine_ended = asyncio.Event(), asyncio.Event()
        self._engine_failed = False
        self._background: set[asyncio.Task[None]] = set()
        install_stop_signals(self._stop)
        process = config.process
        names = ["kvferry.v1.WorkerService", *tier.service_names]
        self._server = RpcServer(process.host, process.port, names, tls_files(process), health_port=process.health_port)
        self._parts = parts = self._build_parts(loaded, kv_cache, token_budget)
        runner = engine.call(lambda: _build_runner(config, tier, loaded, kv_cache, token_budget))
        self._loop = engine.call(lambda: tier.build_loop(parts, runner, random.Random()))
        info = worker_pb2.WorkerInfo(
            worker_id=parts.worker_id,
            incarnation_id=parts.incarnation_id,
            tier=tier.tier,
            fingerprint=_fingerprint(loaded, kv_cache).to_proto(),
            limits=self._limits(loaded, kv_cache),
            endpoint=self._transport.endpoint(),
            address=parts.address,
        )
        servicer = SessionServicer(info, parts.inbox, parts.sessions, parts.health)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, self._server.server)
        tier.add_services(self._server.server, parts)

    def _build_parts(self, loaded: LoadedModel, kv_cache: KvCache, token_budget: int) -> WorkerParts:
        config = self._config
        worker_id = config.worker_id or default_worker_id(self._server.port)
        incarnation_id = new_incarnation_id()
        agent_name = f"{worker_id}/{incarnation_id}"
        self._transport = _build_transport(config, self._tier, agent_name, kv_cache)
        clock, inbox, pool = SystemClock(self._event_loop), Inbox(), PagePool(kv_cache.num_pages)
        prepare_thread = functools.partial(_use_device, self._device)
        return WorkerParts(
            pool=pool,
            page_size=kv_cache.page_size,
            transfers=TransferThread(self._transport, inbox.put, prepare_thread, clock.now),
            transport_name=self._transport.name,
            page_bytes=kv_cache.page_bytes,
            vocab_size=loaded.vocab_size,
            inbox=inbox,
            sessions=Sessions(clock, inbox),
            metrics=WorkerMetrics(self._tier.name, pool, kv_cache.page_size, config.max_num_sequences),
            clock=clock,
            health=Health(clock, on_change=lambda: self._on_event_loop(self._publish_health)),
            test_pages=self._engine.call(lambda: KvTestPages(kv_cache)),
            worker_id=worker_id,
            incarnation_id=incarnation_id,
            agent_name=agent_name,
            address=normal_address(config.advertise_address) if config.advertise_address else self._server.address,
            token_budget=token_budget,
            num_layer_groups=kv_cache.num_layer_groups,
        )

    def _limits(self, loaded: LoadedModel, kv_cache: KvCache) -> worker_pb2.WorkerLimits:
        return worker_pb2.WorkerLimits(
            num_pages=kv_cache.num_pages,
            page_size=kv_cache.page_size,
            max_model_len=loaded.max_model_len,
            max_num_sequences=self._config.max_num_sequences,
            token_budget=self._parts.token_budget,
            vocab_size=loaded.vocab_size,
            slowdown=self._tier.slowdown,
        )

    async def run(self) -> int:
        """From start to end. Returns the exit code."""
        await self.start()
        await self._stop.wait()
        await self.drain()
        return await self.stop()

    async def start(self) -> None:
        """Starts the threads, listens, and says that the worker is ready."""
        parts, process = self._parts, self._config.process
        metrics_port = serve_metrics(parts.metrics.registry, process.host, process.metrics_port)
        parts.transfers.start()
        self._engine.run_last(self._run_engine)
        await self._server.start()
        await self._server.set_ready(True)
        self._run_in_background(parts.sessions.beat_for_ever())
        self._run_in_background(self._watch())
        ready: dict[str, object] = {
            "address": self._server.address,
            "metrics": f"http://{join_address(process.host, metrics_port)}/metrics",
            "health_port": self._server.health_port,
            "pid": os.getpid(),
            "worker_id": parts.worker_id,
        }
        write_ready_file(process.ready_file, ready)
        about = {
            "tier": self._tier.name,
            "worker": parts.worker_id,
            "address": self._server.address,
            "pages": parts.pool.num_pages,
            "page_size": parts.page_size,
            "transport": self._transport.name,
        }
        log.info("worker ready", extra=about)

    async def drain(self) -> None:
        """Takes nothing new. Lets the engine finish what runs, then hand over the rest; at last it is told to stop."""
        config = self._config
        about = {"tier": self._tier.name, "worker": self._parts.worker_id, "mode": config.drain}
        log.info("draining", extra=about)
        self._parts.health.drain()
        waits = [(Drain(hand_over=True), HANDOVER_SECONDS)]
        if config.drain == "finish":
            waits.insert(0, (Drain(hand_over=False), config.drain_seconds))
        for message, seconds in waits:
            self._parts.inbox.put(message)
            try:
                await asyncio.wait_for(self._engine_ended.wait(), seconds)
                return
            except TimeoutError:
                log.warning("requests still run", extra={"seconds": seconds, "handed_over": message.hand_over})
        self._parts.inbox.put(Stop())

    async def stop(self) -> int:
        """Ends the threads, then the server. Returns the exit code."""
        parts = self._parts
        await asyncio.to_thread(self._engine.thread.join, STOP_GRACE_SECONDS)
        await asyncio.to_thread(parts.transfers.stop, STOP_GRACE_SECONDS)
        for task in self._background:
            task.cancel()
        parts.sessions.end_all()
        if self._engine.thread.is_alive() or parts.transfers.is_alive:
            # Something may still write, so the port must not close before this process ends.
            about = {"engine": self._engine.thread.is_alive(), "transfers": parts.transfers.is_alive}
            log.error("a thread does not end", extra=about)
            await asyncio.sleep(LAST_EVENTS_SECONDS)
            os._exit(1)
        await self._server.stop(STOP_GRACE_SECONDS)
        log.info("ended", extra={"tier": self._tier.name, "worker": parts.worker_id})
        return 1 if self._engine_failed else 0

    def _run_engine(self) -> None:
        """The engine thread's last work."""
        try:
            self._loop.run()
        except BaseException:
            log.exception("the engine loop died")
            self._engine_failed = True
            self._on_event_loop(self._stop.set)
        self._on_event_loop(self._engine_ended.set)

    def _on_event_loop(self, function: Callable[[], object]) -> None:
        """From any thread; the event loop may have ended."""
        with contextlib.suppress(RuntimeError):
            self._event_loop.call_soon_threadsafe(function)

    def _run_in_background(self, work: asyncio._CoroutineLike[None]) -> None:
        task = self._event_loop.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _publish_health(self) -> None:
        event = self._parts.health.event()
        self._parts.sessions.tell_all(worker_pb2.SessionResponse(state=event))
        is_ready = event.state == worker_pb2.WORKER_STATE_READY
        self._parts.metrics.ready.set(is_ready)
        self._run_in_background(self._server.set_ready(is_ready))
        if event.reason:
            # That it was told to end is nothing to worry about.
            level = logging.INFO if self._stop.is_set() else logging.WARNING
            about = {"worker": self._parts.worker_id, "reason": event.reason}
            log.log(level, "the worker takes no requests", extra=about)

    async def _watch(self) -> None:
        """Sees threads that stand still."""
        health, transfers, limit_seconds = self._parts.health, self._parts.transfers, self._config.wedge_seconds
        while True:
            slept_at = time.monotonic()
            await asyncio.sleep(WATCH_SECONDS)
            if time.monotonic() - slept_at > 4 * WATCH_SECONDS:
                continue  # this process itself was stopped: the threads have not had their turn yet either
            stack = health.watch_engine(self._engine.thread, limit_seconds)
            if stack is not None:
                log.error("the engine makes no progress; it stands here:\n%s", stack)
            standing = transfers.standing_seconds()
            if standing > limit_seconds:
                health.set_fault(TRANSFERS, f"the transfer thread has stood for {standing:.0f} s in the transport")
            else:
                health.clear_fault(TRANSFERS)


def _build_transport(config: WorkerConfig, tier: WorkerKind, agent_name: str, kv_cache: KvCache) -> Transport:
    device = kv_cache.tensor.device
    region = PageRegion(
        kv_cache.base_address,
        kv_cache.num_pages + kv_cache.num_test_pages,
        kv_cache.page_bytes,
        "DRAM" if device.type == "cpu" else "VRAM",
        device.index or 0,
        kv_cache.num_test_pages,
        kv_cache.num_layer_groups,
    )
    if not tier.moves_pages:
        return LocalTransport(LocalHub(), agent_name, region)
    return NixlTransport(agent_name, region, config.require_rdma)


def _build_runner(
    config: WorkerConfig, tier: WorkerKind, loaded: LoadedModel, kv_cache: KvCache, token_budget: int
) -> ModelRunner:
    most_decoded = 0 if tier.tier == worker_pb2.TIER_PREFILL else config.max_num_sequences
    sizes = graph_sizes(config.engine.cuda_graph_sizes, most_decoded, token_budget, loaded.max_model_len)
    name = config.engine.attention
    return ModelRunner(loaded, kv_cache, None if name == "auto" else choose_attention(loaded, kv_cache, name), sizes)


def _use_device(device: torch.device) -> None:
    """For each thread that calls the driver."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _fingerprint(loaded: LoadedModel, kv_cache: KvCache) -> Fingerprint:
    return Fingerprint(
        model_config_hash=loaded.identity.config_hash,
        weights_hash=loaded.identity.weights_hash,
        tokenizer_hash=loaded.identity.tokenizer_hash,
        dtype=_dtype_name(loaded.dtype),
        page_size=kv_cache.page_size,
        num_layers=loaded.kv_shape.num_layers,
        num_kv_heads=loaded.kv_shape.num_kv_heads,
        head_dim=loaded.kv_shape.head_dim,
        page_axes=PAGE_AXES,
        rope=loaded.identity.rope,
        max_model_len=loaded.max_model_len,
        quantization=loaded.quantization,
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
