"""How a worker process comes up and goes down: model, pool, transport, engine thread, gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from grpc import aio

from engine.attention.choice import choose_attention
from engine.config import EngineConfig
from engine.cuda_graphs import graph_sizes
from engine.kv_cache import PAGE_AXES, KvCache, page_bytes
from engine.loader import LoadedModel, load_model, set_threads
from engine.memory import pages_that_fit
from engine.model_runner import ModelRunner
from engine.page_pool import PagePool
from engine.sequence import num_pages_for
from kv_transfer.base import PageRegion, Transport
from kv_transfer.layout import Fingerprint
from kv_transfer.local_transport import LocalHub, LocalTransport
from kv_transfer.nixl_transport import NixlTransport
from kv_transfer.transfer_thread import TransferThread
from protos import worker_pb2, worker_pb2_grpc
from rpc.addresses import join_address, normal_address
from rpc.config import ConfigError
from rpc.metrics import serve_metrics
from rpc.process import install_stop_signals, prepare_process, write_ready_file
from rpc.server import RpcServer, try_ports
from rpc.tls import tls_files
from worker_runtime.config import WorkerConfig, default_worker_id, new_incarnation_id
from worker_runtime.engine_loop import EngineLoop
from worker_runtime.health import TRANSFERS, Health
from worker_runtime.inbox import Drain, Inbox, Stop
from worker_runtime.metrics import WorkerMetrics
from worker_runtime.parts import WorkerParts
from worker_runtime.probe import KvProbePages
from worker_runtime.session import Sessions, SessionServicer

log = logging.getLogger(__name__)

STOP_GRACE_SECONDS = 2.0
"""For sessions to send what waits, once the engine has ended."""
HANDOVER_SECONDS = 10.0
"""For what is handed over at the end: transfers that are open towards or from it have to end well."""
LAST_EVENTS_SECONDS = 0.5
"""For sessions to send what waits, where they can't be waited for."""
WATCH_SECONDS = 0.25
MAX_FAILED_STEPS = 3
"""A worker whose steps fail so many times in a row ends itself."""
CGROUP = Path("/sys/fs/cgroup")
DEFAULT_SEQUENCES = 8
"""The default pool holds this many sequences of full length, memory permitting."""

BuildLoop = Callable[[WorkerParts], EngineLoop]
AddServices = Callable[[aio.Server, WorkerParts], None]


def no_services(server: aio.Server, parts: WorkerParts) -> None:
    """For a tier that serves sessions only."""


def run_worker(
    config: WorkerConfig,
    tier: worker_pb2.Tier.ValueType,
    limits: worker_pb2.WorkerLimits,
    build_loop: BuildLoop,
    service_names: list[str],
    add_services: AddServices = no_services,
) -> int:
    """Runs a worker process until SIGTERM or SIGINT. Returns the exit code.

    limits: those of the tier; the rest is filled in from model and pool.

    Raises ModelLoadError, TransferError, PortInUse or ConfigError if it can't start.
    """
    prepare_process(config.process)
    try_ports(config.process)
    threads = set_threads(config.engine.threads)
    started = time.monotonic()
    loaded = load_model(config.engine)
    log.info(
        "model loaded",
        extra={
            "model": config.engine.model,
            "dtype": _dtype_name(loaded.dtype),
            "device": str(loaded.device),
            "threads": threads,
            "seconds": round(time.monotonic() - started, 2),
        },
    )
    if loaded.device.type == "cuda":
        torch.cuda.set_device(loaded.device)
    if config.engine.num_pages != "auto":
        num_pages = config.engine.num_pages
    elif loaded.device.type == "cuda":
        step_tokens = limits.token_budget or config.max_num_sequences
        num_pages = pages_that_fit(loaded, config.engine, step_tokens, config.max_num_sequences)
    else:
        num_pages = _default_num_pages(config.engine, loaded)
    _check_memory(num_pages, config.engine, loaded)
    kv_cache = KvCache(num_pages, config.engine.page_size, loaded.kv_shape, loaded.dtype, loaded.device)
    serve = functools.partial(_serve, config, tier, limits, loaded, kv_cache, build_loop, service_names, add_services)
    return asyncio.run(serve())


async def _serve(
    config: WorkerConfig,
    tier: worker_pb2.Tier.ValueType,
    limits: worker_pb2.WorkerLimits,
    loaded: LoadedModel,
    kv_cache: KvCache,
    build_loop: BuildLoop,
    service_names: list[str],
    add_services: AddServices,
) -> int:
    stop = asyncio.Event()
    install_stop_signals(stop)
    tier_name = worker_pb2.Tier.Name(tier).removeprefix("TIER_").lower()
    names = ["kvferry.v1.WorkerService", *service_names]
    tls, health_port = tls_files(config.process), config.process.health_port
    server = RpcServer(config.process.host, config.process.port, names, tls, health_port=health_port)
    worker_id = config.worker_id or default_worker_id(server.port)
    incarnation_id = new_incarnation_id()
    agent_name = f"{worker_id}/{incarnation_id}"
    address = normal_address(config.advertise_address) if config.advertise_address else server.address
    inbox = Inbox()
    device = kv_cache.tensor.device
    region = PageRegion(
        kv_cache.base_address,
        kv_cache.num_pages + kv_cache.num_probe_pages,
        kv_cache.page_bytes,
        "DRAM" if device.type == "cpu" else "VRAM",
        device.index or 0,
        kv_cache.num_probe_pages,
        kv_cache.num_layer_groups,
    )
    # A colocated worker moves nothing, so it runs where NIXL does not.
    is_alone = tier == worker_pb2.TIER_COLOCATED
    transport: Transport = (
        LocalTransport(LocalHub(), agent_name, region)
        if is_alone
        else NixlTransport(agent_name, region, config.require_rdma)
    )
    transfers = TransferThread(transport, inbox.put, functools.partial(_use_device, device))
    pool = PagePool(kv_cache.num_pages)
    metrics = WorkerMetrics(tier_name, pool, kv_cache.page_size, config.max_num_sequences)
    loop = asyncio.get_running_loop()
    sessions = Sessions(loop, inbox)
    parts = WorkerParts(
        runner=_make_runner(config, tier, limits, loaded, kv_cache),
        pool=pool,
        page_size=kv_cache.page_size,
        transfers=transfers,
        transport_name=transport.name,
        page_bytes=kv_cache.page_bytes,
        vocab_size=loaded.vocab_size,
        inbox=inbox,
        sessions=sessions,
        metrics=metrics,
        loop=loop,
        probe_pages=KvProbePages(kv_cache),
        worker_id=worker_id,
        incarnation_id=incarnation_id,
        agent_name=agent_name,
        address=address,
        num_layer_groups=kv_cache.num_layer_groups,
    )
    limits.num_pages, limits.page_size = kv_cache.num_pages, kv_cache.page_size
    limits.max_model_len, limits.vocab_size = loaded.max_model_len, loaded.vocab_size
    limits.max_num_sequences = config.max_num_sequences
    info = worker_pb2.WorkerInfo(
        worker_id=worker_id,
        incarnation_id=incarnation_id,
        tier=tier,
        fingerprint=_fingerprint(loaded, kv_cache).to_proto(),
        limits=limits,
        endpoint=transport.endpoint(),
        address=address,
    )
    worker_loop = build_loop(parts)
    health = parts.health
    health.on_change = lambda: _call_on(loop, publish_health)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(SessionServicer(info, inbox, sessions, health), server.server)
    add_services(server.server, parts)
    metrics_port = serve_metrics(metrics.registry, config.process.host, config.process.metrics_port)

    engine_failed = threading.Event()
    engine_ended = asyncio.Event()

    def publish_health() -> None:
        event = health.event()
        sessions.tell_all(worker_pb2.SessionResponse(state=event))
        is_ready = event.state == worker_pb2.WORKER_STATE_READY
        metrics.ready.set(is_ready)
        background.add(loop.create_task(server.set_ready(is_ready)))
        if event.reason:
            # That it was told to end is nothing to worry about.
            level = logging.INFO if stop.is_set() else logging.WARNING
            log.log(level, "the worker takes no work", extra={"worker": worker_id, "reason": event.reason})

    def run_engine() -> None:
        try:
            _use_device(device)
            worker_loop.run()
        except BaseException:
            log.exception("the engine loop died")
            engine_failed.set()
            _call_on(loop, stop.set)
        _call_on(loop, engine_ended.set)

    engine_thread = threading.Thread(target=run_engine, name="engine", daemon=True)
    transfers.start()
    engine_thread.start()
    await server.start()
    await server.set_ready(True)
    background = {
        loop.create_task(sessions.beat_for_ever()),
        loop.create_task(_watch(health, engine_thread, transfers, config.wedge_seconds)),
    }
    write_ready_file(
        config.process.ready_file,
        {
            "address": server.address,
            "metrics": f"http://{join_address(config.process.host, metrics_port)}/metrics",
            "health_port": server.health_port,
            "pid": os.getpid(),
            "worker_id": worker_id,
        },
    )
    log.info(
        "worker ready",
        extra={
            "tier": tier_name,
            "worker": worker_id,
            "address": server.address,
            "pages": kv_cache.num_pages,
            "page_size": kv_cache.page_size,
            "transport": transport.name,
        },
    )
    await stop.wait()
    log.info("draining", extra={"tier": tier_name, "worker": worker_id, "mode": config.drain})
    health.drain()
    await _drain(config, inbox, engine_ended)
    # The port closes last: that it refuses connections tells others that this process writes nothing any more.
    await asyncio.to_thread(engine_thread.join, STOP_GRACE_SECONDS)
    await asyncio.to_thread(transfers.stop, STOP_GRACE_SECONDS)
    for task in background:
        task.cancel()
    sessions.end_all()
    is_stuck = engine_thread.is_alive() or transfers.is_alive
    if is_stuck:
        # Something may still write, so the port must not close before this process ends.
        log.error("a thread does not end", extra={"engine": engine_thread.is_alive(), "transfers": transfers.is_alive})
        await asyncio.sleep(LAST_EVENTS_SECONDS)
        os._exit(1)
    await server.stop(STOP_GRACE_SECONDS)
    log.info("ended", extra={"tier": tier_name, "worker": worker_id})
    return 1 if engine_failed.is_set() else 0


async def _drain(config: WorkerConfig, inbox: Inbox, engine_ended: asyncio.Event) -> None:
    """Lets the engine finish, then hand over; at last it is told to stop."""
    waits = [(Drain(hand_over=True), HANDOVER_SECONDS)]
    if config.drain == "finish":
        waits.insert(0, (Drain(hand_over=False), config.drain_seconds))
    for message, seconds in waits:
        inbox.put(message)
        try:
            await asyncio.wait_for(engine_ended.wait(), seconds)
            return
        except TimeoutError:
            log.warning("requests still run", extra={"seconds": seconds, "handed_over": message.hand_over})
    inbox.put(Stop())


async def _watch(health: Health, engine: threading.Thread, transfers: TransferThread, limit_seconds: float) -> None:
    """Sees threads that stand still."""
    while True:
        slept_at = time.monotonic()
        await asyncio.sleep(WATCH_SECONDS)
        if time.monotonic() - slept_at > 4 * WATCH_SECONDS:
            continue  # this process itself was stopped: the others have not had their turn yet either
        stack = health.watch_engine(engine, limit_seconds)
        if stack is not None:
            log.error("the engine makes no progress; it stands here:\n%s", stack)
        standing = transfers.standing_seconds()
        if standing > limit_seconds:
            health.set_fault(TRANSFERS, f"the transfer thread has stood for {standing:.0f} s in the transport")
        else:
            health.clear_fault(TRANSFERS)


def _call_on(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    """From any thread; the loop may have ended."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function)


def _make_runner(
    config: WorkerConfig,
    tier: worker_pb2.Tier.ValueType,
    limits: worker_pb2.WorkerLimits,
    loaded: LoadedModel,
    kv_cache: KvCache,
) -> ModelRunner:
    most_decoded = 0 if tier == worker_pb2.TIER_PREFILL else config.max_num_sequences
    sizes = graph_sizes(config.engine.cuda_graph_sizes, most_decoded, limits.token_budget, loaded.max_model_len)
    return ModelRunner(loaded, kv_cache, choose_attention(loaded, kv_cache, config.engine.attention), sizes)


def _use_device(device: torch.device) -> None:
    """For threads other than the first, which the driver's calls are made for."""
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
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _default_num_pages(config: EngineConfig, loaded: LoadedModel) -> int:
    wanted = DEFAULT_SEQUENCES * num_pages_for(loaded.max_model_len, config.page_size)
    per_page = page_bytes(loaded.kv_shape, config.page_size, loaded.dtype)
    return max(1, min(wanted, _free_memory(loaded.device) // 8 // per_page))


def _check_memory(num_pages: int, config: EngineConfig, loaded: LoadedModel) -> None:
    needed = num_pages * page_bytes(loaded.kv_shape, config.page_size, loaded.dtype)
    free = _free_memory(loaded.device)
    if needed > free:
        raise ConfigError(
            f"--num-pages is {num_pages}, which takes {needed / 1e9:.1f} GB; "
            f"free are {free / 1e9:.1f} GB on {loaded.device}"
        )


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    free = int(psutil.virtual_memory().available)
    try:
        # Of a container: what its limit leaves, whatever the machine has.
        limit = int((CGROUP / "memory.max").read_text())
        return min(free, limit - int((CGROUP / "memory.current").read_text()))
    except (OSError, ValueError):
        return free  # no limit ("max"), or no cgroup v2
