"""Settings of a local cluster: groups of settings that it shares with its processes, and its own.

A group, such as `PromptOptions`, is a base class of the configuration of each process that has these settings, and of
the cluster's. So each setting is declared once, with its default and help text. `ClusterConfig` builds the processes'
configurations before anything is started, so that each configuration checks its settings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from colocated_service.config import ColocatedConfig, StepOptions
from decode_service.config import AdmissionOptions, DecodeConfig
from engine.config import EngineConfig, ModelOptions, PoolOptions
from engine.model_store import DEFAULT_MODEL
from prefill_service.config import PrefillConfig, PromptOptions
from router.config import RouterConfig, WatchOptions
from rpc.config import LogLevel, ProcessConfig
from rpc.placeholders import MaybeFile, MaybeFolder, MaybeNumber, MaybePort
from worker_runtime.config import BatchOptions, OverlapOptions, WorkerConfig

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Tier = Literal["prefill", "decode", "colocated"]
TIERS: tuple[Tier, ...] = ("prefill", "decode", "colocated")
HTTP_PORT = 8000


@dataclass(frozen=True, kw_only=True)
class TierSizes:
    """Number of workers of each kind."""

    prefill: MaybeNumber = None
    """Number of prefill workers. Unset: 1, or none if there are colocated workers."""
    decode: MaybeNumber = None
    """Number of decode workers. Unset: 1, or none if there are colocated workers."""
    colocated: int = 0
    """Number of workers that compute prompts and generate tokens in one process, without a transfer."""


@dataclass(frozen=True, kw_only=True)
class WorkerOptions(BatchOptions, PoolOptions, TierSizes):
    """Number of workers of each kind, and their resources."""

    memory_fraction: float = EngineConfig.memory_fraction
    """Share of a GPU's memory for all workers together."""


@dataclass(frozen=True, kw_only=True)
class SchedulingOptions(OverlapOptions, AdmissionOptions, StepOptions, PromptOptions):
    """Order and size of steps, admission and caching."""

    decode_prefix_cache: bool = DecodeConfig.prefix_cache
    """Keep pages of ended sequences on decode workers, so that follow-up turns need not transfer these pages again."""


@dataclass(frozen=True, kw_only=True)
class Ports:
    """Where the router listens."""

    port: int = 50051
    """gRPC port of the router; 0 picks a free one."""
    http_port: MaybePort = None
    """Port of the OpenAI-compatible HTTP front. Unset: 8000, or a free one with --port 0."""


@dataclass(frozen=True, kw_only=True)
class AddressOptions(WatchOptions, Ports):
    """Addresses and timeouts of the router."""

    drain_seconds: float = 10.0
    """Seconds for running requests to end when the cluster is stopped."""


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Files and logs."""

    ready_file: MaybeFile = None
    """Written as JSON (addresses, pids) when the cluster is ready."""
    log_dir: MaybeFolder = None
    """Folder for one log file per process. Unset: standard error, with a prefix."""
    log_level: LogLevel | None = None
    """Least severe messages to log. Unset: info with --log-dir, else warning."""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig(OutputOptions, AddressOptions, SchedulingOptions, WorkerOptions, ModelOptions):
    """A router and its workers on this machine: prefill and decode workers, colocated ones, or both kinds."""

    model: str = DEFAULT_MODEL

    def __post_init__(self) -> None:
        if any(self.number_of(tier) < 0 for tier in TIERS):
            raise ValueError("--prefill, --decode and --colocated can't be negative")
        if self.colocated == 0 or self.num_prefill or self.num_decode:
            for flag, number in (("--prefill", self.num_prefill), ("--decode", self.num_decode)):
                if number < 1:
                    raise ValueError(f"{flag} is {number}; at least 1 worker of each tier is needed")
        # Each process checks its settings too, but only after it has started.
        for tier in TIERS:
            if self.number_of(tier):
                self.worker(tier, self.engine(), ProcessConfig())
        self.router(ProcessConfig(port=self.port), {})

    def engine(self) -> EngineConfig:
        """Engine settings of all workers together."""
        return EngineConfig(**_settings(self, ModelOptions, PoolOptions), memory_fraction=self.memory_fraction)

    def worker(self, tier: Tier, engine: EngineConfig, process: ProcessConfig, worker_id: str = "") -> WorkerConfig:
        """One worker of a tier. Raises ValueError naming the flag of an invalid setting."""
        own: dict[str, Any] = {"worker_id": worker_id, "drain_seconds": self.drain_seconds}
        match tier:
            case "prefill":
                return PrefillConfig(engine, process, **own, **_settings(self, BatchOptions, PromptOptions))
            case "decode":
                own["prefix_cache"] = self.decode_prefix_cache
                groups = (BatchOptions, AdmissionOptions, OverlapOptions)
                return DecodeConfig(engine, process, **own, **_settings(self, *groups))
            case "colocated":
                shared = _settings(self, BatchOptions, PromptOptions, StepOptions, OverlapOptions)
                return ColocatedConfig(engine, process, **own, **shared)

    def router(self, process: ProcessConfig, workers: Mapping[Tier, tuple[str, ...]]) -> RouterConfig:
        """A router. workers: their addresses. Raises ValueError as `worker` does."""
        return RouterConfig(
            self.model,
            prefill=workers.get("prefill", ()),
            decode=workers.get("decode", ()),
            colocated=workers.get("colocated", ()),
            process=process,
            drain_seconds=self.drain_seconds,
            http_port=self.router_http_port,
            **_settings(self, WatchOptions),
        )

    @property
    def router_http_port(self) -> int:
        """Port of the HTTP front; 0 picks a free one."""
        if self.http_port is not None:
            return self.http_port
        return HTTP_PORT if self.port else 0

    @property
    def model_name(self) -> str:
        """Name that clients use."""
        return self.model if self.model == DEFAULT_MODEL else Path(self.model).name

    @property
    def process_log_level(self) -> LogLevel:
        """Log level of each process."""
        return self.log_level or ("warning" if self.log_dir is None else "info")

    def number_of(self, tier: Tier) -> int:
        """Workers of a tier."""
        number = getattr(self, tier)
        return (0 if self.colocated else 1) if number is None else int(number)

    @property
    def num_prefill(self) -> int:
        """Prefill workers."""
        return self.number_of("prefill")

    @property
    def num_decode(self) -> int:
        """Decode workers."""
        return self.number_of("decode")

    @property
    def num_colocated(self) -> int:
        """Colocated workers."""
        return self.number_of("colocated")

    @property
    def num_workers(self) -> int:
        """All workers."""
        return sum(map(self.number_of, TIERS))


def defaults_of(config: WorkerConfig | RouterConfig) -> WorkerConfig | RouterConfig:
    """Settings of a process without flags, except the model, which has no default."""
    return RouterConfig("") if isinstance(config, RouterConfig) else type(config)(EngineConfig(""))


def _settings(config: ClusterConfig, *groups: type[DataclassInstance]) -> dict[str, Any]:
    """The cluster's values of the settings of these groups, by name."""
    return {field.name: getattr(config, field.name) for group in groups for field in dataclasses.fields(group)}
