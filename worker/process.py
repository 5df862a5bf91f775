"""How a worker process comes up and goes down: model, pool, transport, engine thread, gRPC."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import psutil
import torch
from grpc import aio

from engine.config import EngineConfig
from engine.kv_cache import PAGE_AXES, KvCache, page_bytes
from engine.loader import LoadedModel, load_model, set_threads
from engine.model_runner import ModelRunner
from engine.page_pool import PagePool
from engine.sequence import num_pages_for
from kv_transfer.base import PageRegion, Transport
from kv_transfer.layout import Fingerprint
from kv_transfer.local_transport import LocalHub, LocalTransport
from kv_transfer.nixl_transport import NixlTransport
from kv_transfer.transfer_thread import TransferThread
from protos import worker_pb2, worker_pb2_grpc
from rpc.config import ConfigError
from rpc.metrics import serve_metrics
from rpc.process import install_stop_signals, prepare_process, write_ready_file
from rpc.server import RpcServer
from worker.config import WorkerConfig, default_worker_id, new_incarnation_id
from worker.inbox import Inbox, Stop
from worker.metrics import WorkerMetrics
from worker.session import Sessions, SessionServicer

log = logging.getLogger(__name__)

STOP_GRACE_SECONDS = 2.0
MAX_FAILED_STEPS = 3
"""A worker whose steps fail so many times in a row ends itself."""
DEFAULT_SEQUENCES = 8
"""The default pool holds this many sequences of full length, memory permitting."""


@dataclass(frozen=True)
class WorkerParts:
    """What a tier's loop is built from."""

    runner: ModelRunner
    pool: PagePool
    page_size: int
    transfers: TransferThread
    transport_name: str
    page_bytes: int
    vocab_size: int
    inbox: Inbox
    sessions: Sessions
    metrics: WorkerMetrics
    loop: asyncio.AbstractEventLoop
    worker_id: str
    incarnation_id: str
    agent_name: str


class WorkerLoop(Protocol):
    """A tier's engine loop."""

    def run(self) -> None:
        """Runs until a Stop message."""
        ...


BuildLoop = Callable[[WorkerParts], WorkerLoop]
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
    threads = set_threads(config.engine.threads)
    started = time.monotonic()
    loaded = load_model(config.engine)
    log.info(
        "model loaded",
        extra={
            "model": config.engine.model,
            "dtype": _dtype_name(loaded.dtype),
            "threads": threads,
            "seconds": round(time.monotonic() - started, 2),
        },
    )
    num_pages = config.engine.num_pages or _default_num_pages(config.engine, loaded)
    _check_memory(num_pages, config.engine, loaded)
    kv_cache = KvCache(num_pages, config.engine.page_size, loaded.kv_shape, loaded.dtype, config.engine.device)
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
    server = RpcServer(config.process.host, config.process.port, ["kvferry.v1.WorkerService", *service_names])
    worker_id = config.worker_id or default_worker_id(server.port)
    incarnation_id = new_incarnation_id()
    agent_name = f"{worker_id}/{incarnation_id}"
    inbox = Inbox()
    device = kv_cache.tensor.device
    region = PageRegion(
        kv_cache.base_address,
        kv_cache.num_pages,
        kv_cache.page_bytes,
        "DRAM" if device.type == "cpu" else "VRAM",
        device.index or 0,
    )
    # A colocated worker moves nothing, so it runs where NIXL does not.
    is_alone = tier == worker_pb2.TIER_COLOCATED
    transport: Transport = (
        LocalTransport(LocalHub(), agent_name, region) if is_alone else NixlTransport(agent_name, region)
    )
    transfers = TransferThread(transport, inbox.put)
    pool = PagePool(kv_cache.num_pages)
    metrics = WorkerMetrics(tier_name, pool)
    loop = asyncio.get_running_loop()
    sessions = Sessions(loop, inbox)
    parts = WorkerParts(
        runner=ModelRunner(loaded, kv_cache),
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
        worker_id=worker_id,
        incarnation_id=incarnation_id,
        agent_name=agent_name,
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
        address=config.advertise_address or server.address,
    )
    worker_loop = build_loop(parts)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(SessionServicer(info, inbox, sessions), server.server)
    add_services(server.server, parts)
    metrics_port = serve_metrics(metrics.registry, config.process.host, config.process.metrics_port)

    engine_failed = threading.Event()

    def run_engine() -> None:
        try:
            worker_loop.run()
        except BaseException:
            log.exception("the engine loop died")
            engine_failed.set()
            loop.call_soon_threadsafe(stop.set)

    engine_thread = threading.Thread(target=run_engine, name="engine", daemon=True)
    transfers.start()
    engine_thread.start()
    await server.start()
    await server.set_ready(True)
    write_ready_file(
        config.process.ready_file,
        {
            "address": server.address,
            "metrics": f"http://{config.process.host}:{metrics_port}/metrics",
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
    log.info("stopping", extra={"tier": tier_name, "worker": worker_id})
    await server.set_ready(False)
    # The port closes last: that it refuses connections tells others that this process writes nothing any more.
    inbox.put(Stop())
    await asyncio.to_thread(engine_thread.join)
    await asyncio.to_thread(transfers.stop)
    await server.stop(STOP_GRACE_SECONDS)
    return 1 if engine_failed.is_set() else 0


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
    return max(1, min(wanted, _free_memory(config) // 8 // per_page))


def _check_memory(num_pages: int, config: EngineConfig, loaded: LoadedModel) -> None:
    needed = num_pages * page_bytes(loaded.kv_shape, config.page_size, loaded.dtype)
    free = _free_memory(config)
    if needed > free:
        raise ConfigError(
            f"--num-pages is {num_pages}, which takes {needed / 1e9:.1f} GB; "
            f"free are {free / 1e9:.1f} GB on {config.device}"
        )


def _free_memory(config: EngineConfig) -> int:
    if torch.device(config.device).type == "cuda":
        free, _ = torch.cuda.mem_get_info(config.device)
        return int(free)
    return int(psutil.virtual_memory().available)
