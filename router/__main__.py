"""A router as a process: `kvferry router` or `python -m router`."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path

import tyro

from protos import inference_pb2_grpc, worker_pb2
from router.config import DNS_PREFIX, RouterConfig, split_addresses
from router.dispatch import Dispatcher
from router.generation import Generator
from router.http_api import HttpApi
from router.http_server import HttpServer
from router.metrics import RouterMetrics
from router.servicer import ADMIN_SERVICE_NAME, SERVICE_NAME, AdminServicer, InferenceServicer
from router.tokenizer import Tokenizer, TokenizerError
from router.tracing import Tracing
from rpc.addresses import join_address, normal_address
from rpc.config import ConfigError
from rpc.metrics import serve_metrics
from rpc.process import install_stop_signals, prepare_process, run_process, write_ready_file
from rpc.server import PortInUse, RpcServer, try_port, try_ports
from rpc.tls import tls_files

log = logging.getLogger(__name__)

EXPECTED_ERRORS = (TokenizerError, PortInUse, ConfigError)
READINESS_POLL_SECONDS = 0.05


def serve(config: RouterConfig) -> int:
    """Runs the router until it is told to stop."""
    prepare_process(config.process)
    try_ports(config.process)
    try_port("--http-port", config.process.host, config.http_port)
    # transformers imports torch wherever it is installed: 300 MB and two seconds for a process that only tokenizes.
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    folder = Path(config.model)
    return asyncio.run(_serve(config, Tokenizer(folder), config.served_model_name or folder.name))


async def _serve(config: RouterConfig, tokenizer: Tokenizer, model_name: str) -> int:
    stop = asyncio.Event()
    install_stop_signals(stop)
    metrics = RouterMetrics()
    server = RpcServer(
        config.process.host,
        config.process.port,
        [SERVICE_NAME, ADMIN_SERVICE_NAME],
        tls_files(config.process),
        verify_clients=config.tls_clients == "verified",
        health_port=config.process.health_port,
    )
    dispatcher = Dispatcher(config, tokenizer.file_hash, metrics)
    tracing = None
    if config.otlp_endpoint:
        tracing = Tracing.to_collector(config.otlp_endpoint, config.router_id, model_name)
    generator = Generator(dispatcher, tokenizer, model_name, metrics, tracing)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(
        InferenceServicer(generator, dispatcher, tokenizer, metrics), server.server
    )
    inference_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(dispatcher), server.server)
    http_api = HttpApi(
        generator,
        metrics.registry,
        why_not_ready=lambda: "" if dispatcher.pool.ready_pairs() else dispatcher.pool.why_not_ready(),
        count_end=lambda status: metrics.ended.labels(status).inc(),
        cors_origins=config.cors_origins,
    )
    tls = tls_files(config.process)
    https = tls.https(config.tls_clients == "verified") if tls is not None and config.http_tls else None
    host = config.process.host
    http = HttpServer(http_api.app, host, config.http_port, config.drain_seconds, https, config.http_keepalive_seconds)
    metrics_port = serve_metrics(metrics.registry, host, config.process.metrics_port)
    await server.start()
    http.start()
    for addresses, tier in (
        (config.prefill, worker_pb2.TIER_PREFILL),
        (config.decode, worker_pb2.TIER_DECODE),
        (config.colocated, worker_pb2.TIER_COLOCATED),
    ):
        for address in split_addresses(addresses):
            if address.startswith(DNS_PREFIX):
                dispatcher.pool.watch(address.removeprefix(DNS_PREFIX), tier)
            else:
                dispatcher.pool.add(normal_address(address), tier)
    urls = {
        "http": f"{http.scheme}://{join_address(host, http.port)}",
        "metrics": f"http://{join_address(host, metrics_port)}/metrics",
    }
    log.info("router listens", extra={"address": server.address, "model": model_name, **urls})
    ready_content: dict[str, object] = {
        "address": server.address,
        **urls,
        "health_port": server.health_port,
        "pid": os.getpid(),
        "model": model_name,
    }
    was_ready = announced = False
    while not stop.is_set():
        http.renew_certificate()
        pairs = len(dispatcher.pool.ready_pairs())
        metrics.ready_pairs.set(pairs)
        if (pairs > 0) != was_ready:
            was_ready = pairs > 0
            await server.set_ready(was_ready)
            log.info("router is ready" if was_ready else "router is not ready", extra={"pairs": pairs})
        if was_ready and not announced:
            announced = True
            write_ready_file(config.process.ready_file, ready_content)
        try:
            await asyncio.wait_for(stop.wait(), READINESS_POLL_SECONDS)
        except TimeoutError:
            continue
    log.info("router drains", extra={"running": dispatcher.num_running, "queued": dispatcher.num_queued})
    await server.set_ready(False)
    # Clients are told to connect elsewhere (GOAWAY, closed listeners); what runs goes on.
    await asyncio.gather(server.stop(config.drain_seconds), http.stop())
    await dispatcher.pool.close()
    if tracing is not None:
        await asyncio.to_thread(tracing.close)
    return 0


def main() -> None:
    """Reads the command line and runs."""
    config = tyro.cli(tyro.conf.OmitArgPrefixes[RouterConfig], description=RouterConfig.__doc__)
    run_process(lambda: serve(config), EXPECTED_ERRORS)


if __name__ == "__main__":
    main()
