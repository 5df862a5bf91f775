"""A router as a process: `kvferry router` or `python -m router`."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import sys
from pathlib import Path
from typing import Any

import tyro

from protos import inference_pb2_grpc, worker_pb2
from router.config import DNS_PREFIX, RouterConfig, split_addresses
from router.dispatch import Dispatcher
from router.generation import Generator
from router.http_api import HttpApi
from router.http_server import HttpServer
from router.metrics import RouterMetrics
from router.servicer import ADMIN_SERVICE_NAME, SERVICE_NAME, AdminServicer, InferenceServicer
from router.sessions import WorkerSessions
from router.tokenizer import Tokenizer, TokenizerError
from router.tracing import Tracing
from rpc.addresses import join_address, normal_address
from rpc.clock import SystemClock
from rpc.config import ConfigError
from rpc.metrics import serve_metrics
from rpc.process import install_stop_signals, prepare_process, run_process, write_ready_file
from rpc.server import PortInUse, RpcServer, try_port, try_ports
from rpc.tls import TlsFiles, tls_files

log = logging.getLogger(__name__)

EXPECTED_ERRORS = (TokenizerError, PortInUse, ConfigError)
CERTIFICATE_LOOK_SECONDS = 1.0
"""Most time between two looks at the files of a certificate."""


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
    tokenizer, model_name = Tokenizer(folder), config.served_model_name or folder.name

    async def run_router() -> int:
        return await RouterProcess(config, tokenizer, model_name).run()

    return asyncio.run(run_router())


class RouterProcess:
    """A router on an event loop. Built there, run once."""

    def __init__(self, config: RouterConfig, tokenizer: Tokenizer, model_name: str) -> None:
        self._config, self._model_name = config, model_name
        self._stop = asyncio.Event()
        install_stop_signals(self._stop)
        self._metrics = metrics = RouterMetrics()
        tls = tls_files(config.process)
        clock, rng = SystemClock(asyncio.get_running_loop()), random.Random()
        self._dispatcher = dispatcher = Dispatcher(config, tokenizer.file_hash, metrics, clock, rng)
        self._sessions = WorkerSessions(
            dispatcher.pool, config.router_id, clock, rng, config.worker_silence_seconds, tls
        )
        self._tracing: Tracing | None = None
        if config.otlp_endpoint:
            self._tracing = Tracing.to_collector(config.otlp_endpoint, config.router_id, model_name)
        generator = Generator(dispatcher, tokenizer, model_name, metrics, self._tracing)
        self._server = RpcServer(
            config.process.host,
            config.process.port,
            [SERVICE_NAME, ADMIN_SERVICE_NAME],
            tls,
            verify_clients=config.tls_clients == "verified",
            health_port=config.process.health_port,
        )
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(
            InferenceServicer(generator, dispatcher, tokenizer, metrics), self._server.server
        )
        inference_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(dispatcher), self._server.server)
        self._http = self._build_http(generator, tls)

    def _build_http(self, generator: Generator, tls: TlsFiles | None) -> HttpServer:
        config, pool, metrics = self._config, self._dispatcher.pool, self._metrics
        api = HttpApi(
            generator,
            metrics.registry,
            why_not_ready=lambda: "" if pool.ready_pairs() else pool.why_not_ready(),
            count_end=lambda status: metrics.ended.labels(status).inc(),
            cors_origins=config.cors_origins,
        )
        https = tls.https(config.tls_clients == "verified") if tls is not None and config.http_tls else None
        host, keepalive = config.process.host, config.http_keepalive_seconds
        return HttpServer(api.app, host, config.http_port, config.drain_seconds, https, keepalive)

    async def run(self) -> int:
        """From start to end. Returns the exit code."""
        ready_content = await self.start()
        await self._follow_pairs(ready_content)
        await self.drain()
        return 0

    async def start(self) -> dict[str, object]:
        """Listens, and connects to workers. Returns what the ready file says."""
        process = self._config.process
        metrics_port = serve_metrics(self._metrics.registry, process.host, process.metrics_port)
        await self._server.start()
        self._http.start()
        self._connect_workers()
        urls = {
            "http": f"{self._http.scheme}://{join_address(process.host, self._http.port)}",
            "metrics": f"http://{join_address(process.host, metrics_port)}/metrics",
        }
        about = {"address": self._server.address, **urls, "model": self._model_name}
        log.info("router listens", extra=about)
        return {**about, "health_port": self._server.health_port, "pid": os.getpid()}

    def _connect_workers(self) -> None:
        for addresses, tier in (
            (self._config.prefill, worker_pb2.TIER_PREFILL),
            (self._config.decode, worker_pb2.TIER_DECODE),
            (self._config.colocated, worker_pb2.TIER_COLOCATED),
        ):
            for address in split_addresses(addresses):
                if address.startswith(DNS_PREFIX):
                    self._sessions.watch(address.removeprefix(DNS_PREFIX), tier)
                else:
                    self._sessions.add(normal_address(address), tier)

    async def _follow_pairs(self, ready_content: dict[str, object]) -> None:
        """Until it is told to stop: ready while a pair is."""
        was_ready = announced = False
        stop = asyncio.ensure_future(self._stop.wait())
        while not stop.done():
            changed = self._dispatcher.pairs_changed()
            self._http.renew_certificate()
            num_pairs = len(self._dispatcher.pool.ready_pairs())
            self._metrics.ready_pairs.set(num_pairs)
            if (num_pairs > 0) != was_ready:
                was_ready = num_pairs > 0
                await self._server.set_ready(was_ready)
                log.info("router is ready" if was_ready else "router is not ready", extra={"pairs": num_pairs})
            if was_ready and not announced:
                announced = True
                write_ready_file(self._config.process.ready_file, ready_content)
            waited_for: set[asyncio.Future[Any]] = {stop, changed}
            await asyncio.wait(waited_for, timeout=CERTIFICATE_LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)

    async def drain(self) -> None:
        """Takes nothing new; what runs is finished. Then everything is closed."""
        about = {"running": self._dispatcher.num_running, "queued": self._dispatcher.num_queued}
        log.info("router drains", extra=about)
        await self._server.set_ready(False)
        # Clients are told to connect elsewhere (GOAWAY, closed listeners).
        await asyncio.gather(self._server.stop(self._config.drain_seconds), self._http.stop())
        await self._sessions.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)


def run(config: RouterConfig) -> None:
    """Runs the router and ends this process."""
    run_process(lambda: serve(config), EXPECTED_ERRORS)


def main() -> None:
    """Reads the command line and runs."""
    config = tyro.cli(tyro.conf.OmitArgPrefixes[RouterConfig], description=RouterConfig.__doc__)
    run(config)


if __name__ == "__main__":
    main()
