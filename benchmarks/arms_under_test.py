"""What a comparison measures: clusters that it starts, or servers that run already. Both take a load and return
the records of its client."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.arms import Arm
from benchmarks.driver import GeneratorLoad, open_loop, watched
from benchmarks.records import RequestRecord
from benchmarks.targets import GrpcTarget, OpenAiTarget, Target
from benchmarks.workload import HIGHEST_TOKEN, LoadRequest, cut, fitted
from local_cluster.cluster import LocalCluster
from router_client.clients import Client
from router_client.errors import KvferryError

Say = Callable[[str], object]
Kind = Literal["colocated", "two-tier", "server"]


@dataclass(frozen=True)
class Offered:
    """Result of one load."""

    records: list[RequestRecord]
    busy: dict[str, float]
    """Share of the time that each worker's engine was in a step; empty for servers that do not report it."""
    generator: GeneratorLoad = field(default_factory=GeneratorLoad)


class ArmUnderTest:
    """One way to serve, running."""

    name: str
    kind: Kind
    max_model_len: int | None = None
    """Longest sequence in tokens, if known."""
    dtype: str = ""
    """Element type of weights and pages, if that is known."""

    def offer(self, requests: list[LoadRequest], timeout: float) -> Offered:
        """Runs a load. timeout: deadline of each request in seconds."""
        raise NotImplementedError

    def greedy_tokens(self, request: LoadRequest) -> tuple[int, ...] | None:
        """The tokens of a short greedy output; None if the server does not return token ids."""
        return None

    def _offer(self, target: Target, requests: list[LoadRequest]) -> tuple[list[RequestRecord], GeneratorLoad]:
        fitting = requests if self.max_model_len is None else cut(requests, self.max_model_len)

        async def run() -> tuple[list[RequestRecord], GeneratorLoad]:
            async with target, watched() as generator:
                records = await open_loop(target, fitting, lambda: None)
            return records, generator

        return asyncio.run(run())


class RouterArm(ArmUnderTest):
    """A kvferry router that runs already."""

    def __init__(self, name: str, address: str, client: Client, kind: Kind = "server") -> None:
        """Raises KvferryError if the router does not respond."""
        self.name, self.kind = name, kind
        self._address, self._client = address, client
        info = client.model_info()
        self.max_model_len, self._vocab_size, self.dtype = info.max_model_len, info.vocab_size, info.dtype

    def offer(self, requests: list[LoadRequest], timeout: float) -> Offered:
        """See `ArmUnderTest.offer`. Begins with empty prefix caches."""
        with suppress(KvferryError):  # needs the admin service; prompts are salted too
            self._client.flush_prefix_cache()
        records, generator = self._offer(GrpcTarget(self._address, timeout), requests)
        return Offered(records, {}, generator)

    def greedy_tokens(self, request: LoadRequest) -> tuple[int, ...] | None:
        """See `ArmUnderTest.greedy_tokens`."""
        prompt, max_tokens = fitted(request.prompt, self._vocab_size), min(request.max_tokens, 24)
        options: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "return_token_ids": True}
        try:
            return self._client.generate(prompt, max_tokens=max_tokens, **options).result().token_ids
        except KvferryError:
            return (-1, id(self))  # equal to no other arm's


class LocalArm(RouterArm):
    """A cluster of an arm, started by the comparison."""

    def __init__(self, arm: Arm, cluster: LocalCluster, client: Client) -> None:
        super().__init__(arm.name, cluster.address, client, "two-tier" if arm.is_two_tier else "colocated")
        self.arm, self.cluster = arm, cluster

    def _busy_seconds(self) -> dict[str, float]:
        """Seconds that each worker spent in steps so far."""
        found = {}
        for process in self.cluster.processes:
            if process.name != "router":
                with urllib.request.urlopen(process.info["metrics"], timeout=10) as response:
                    families = text_string_to_metric_families(response.read().decode())
                    samples = {s.name: s.value for family in families for s in family.samples}
                found[process.name] = samples["kvferry_step_seconds_sum"]
        return found

    def offer(self, requests: list[LoadRequest], timeout: float) -> Offered:
        """See `ArmUnderTest.offer`."""
        before, started = self._busy_seconds(), time.perf_counter()
        offered = super().offer(requests, timeout)
        seconds = time.perf_counter() - started
        busy = {name: min(1.0, (total - before[name]) / seconds) for name, total in self._busy_seconds().items()}
        return replace(offered, busy=busy)


class OpenAiArm(ArmUnderTest):
    """Any server with OpenAI's completions."""

    kind = "server"

    def __init__(self, name: str, url: str, model: str, ignore_eos: bool, chat: bool, api_key: str) -> None:
        self.name = name
        self._arguments = (url, model), {"ignore_eos": ignore_eos, "chat": chat, "api_key": api_key}

    def offer(self, requests: list[LoadRequest], timeout: float) -> Offered:
        """See `ArmUnderTest.offer`."""
        (url, model), options = self._arguments
        records, generator = self._offer(OpenAiTarget(url, model, timeout, **options), requests)  # type: ignore[arg-type]
        return Offered(records, {}, generator)


@contextmanager
def running_arms(arms: list[Arm], say: Say) -> Iterator[list[ArmUnderTest]]:
    """The clusters of all arms, started and warmed up."""
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as logs, ExitStack() as stack:
        running: list[ArmUnderTest] = []
        for number, arm in enumerate(arms):
            say(f"starting {arm.name}")
            config = replace(arm.cluster, log_dir=Path(logs) / str(number))
            cluster = stack.enter_context(LocalCluster(config))
            client = stack.enter_context(Client(cluster.address))
            info = client.model_info()
            for length in (16, 300):  # warm-up; these prompts share nothing with measured ones
                length = min(length, info.max_model_len - 4)
                prompt = random.Random(length).choices(range(HIGHEST_TOKEN, HIGHEST_TOKEN + 9000), k=length)
                client.generate([token % info.vocab_size for token in prompt], max_tokens=4).result()
            running.append(LocalArm(arm, cluster, client))
        yield running


@contextmanager
def running_servers(
    servers: tuple[str, ...], model: str, ignore_eos: bool, chat: bool, api_key: str
) -> Iterator[list[ArmUnderTest]]:
    """Servers that run already, warmed up. Raises ValueError for one that is not NAME=ADDRESS or does not respond."""
    with ExitStack() as stack:
        running: list[ArmUnderTest] = []
        for text in servers:
            name, separator, address = text.partition("=")
            if not (name and separator and address):
                raise ValueError(
                    f"--servers has {text!r}; it must look like NAME=host:port or NAME=http://host:port/v1"
                )
            if address.startswith(("http://", "https://")):
                arm: ArmUnderTest = OpenAiArm(name, address, model, ignore_eos, chat, api_key)
            else:
                try:
                    arm = RouterArm(name, address, stack.enter_context(Client(address)))
                except KvferryError as error:
                    raise ValueError(f"--servers {text}: {error}") from error
            warm_up = LoadRequest(tuple(range(HIGHEST_TOKEN - 64, HIGHEST_TOKEN)), 4, 0.0)
            [record] = arm.offer([warm_up], timeout=60).records
            if not record.is_ok:
                raise ValueError(f"--servers {text}: a first request failed: {record.status} {record.error}")
            running.append(arm)
        if len({arm.name for arm in running}) < len(running):
            raise ValueError("--servers: two have the same name")
        yield running
