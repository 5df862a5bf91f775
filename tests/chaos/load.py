"""Steady load whose every answer is known, and what faults cost it."""

from __future__ import annotations

import asyncio
import random
import secrets
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from kvferry.client import AsyncClient, KvferryError

OPTIONS = {"temperature": 0.0, "ignore_eos": True, "return_token_ids": True}


@dataclass
class Done:
    """One request, on this process's clock."""

    prompt: int
    started: float
    ended: float


@dataclass
class Load:
    """Clients that ask again and again; each answer is compared with that of the same request alone."""

    address: str
    prompts: list[list[int]]
    max_tokens: int
    expected: list[tuple[int, ...]] = field(default_factory=list)
    done: list[Done] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    async def learn(self) -> None:
        """The answers, one by one."""
        async with AsyncClient(self.address) as client:
            for prompt in self.prompts:
                result = await client.generate(prompt, max_tokens=self.max_tokens, **OPTIONS).result()
                self.expected.append(result.token_ids)

    async def run(self, num_clients: int, stop: asyncio.Event) -> None:
        """Asks until told to stop; what runs then comes to its end."""
        rng = random.Random(len(self.done))
        async with AsyncClient(self.address) as client:

            async def keep_asking() -> None:
                while not stop.is_set():
                    await self._ask(client, rng.randrange(len(self.prompts)))

            await asyncio.gather(*(keep_asking() for _ in range(num_clients)))

    async def _ask(self, client: AsyncClient, number: int) -> None:
        started = time.monotonic()
        # Half of them find nothing in any cache, so that there is always something to compute and to send.
        salt = secrets.token_hex(4) if random.random() < 0.5 else ""
        stream = client.generate(
            self.prompts[number],
            max_tokens=self.max_tokens,
            wait_for_ready=True,
            timeout=120,
            cache_salt=salt,
            **OPTIONS,
        )
        try:
            result = await stream.result()
        except KvferryError as error:
            self.lost.append(f"{error.code.name}: {error}")
            await asyncio.sleep(0.1)
            return
        if result.token_ids != self.expected[number]:
            self.wrong.append(f"prompt {number}: {result.token_ids[:8]}... instead of {self.expected[number][:8]}...")
        self.done.append(Done(number, started, time.monotonic()))

    def added_seconds(self, quiet_until: float, faults: list[tuple[float, str]]) -> dict[str, list[float]]:
        """By kind of fault: how much longer requests took that ran when it happened, than the same ones before."""
        quiet: dict[int, list[float]] = defaultdict(list)
        for done in self.done:
            if done.ended < quiet_until:
                quiet[done.prompt].append(done.ended - done.started)
        usual = {prompt: statistics.median(seconds) for prompt, seconds in quiet.items()}
        fallback = statistics.median(usual.values())
        added: dict[str, list[float]] = defaultdict(list)
        for at, kind in faults:
            added[kind] += [
                done.ended - done.started - usual.get(done.prompt, fallback)
                for done in self.done
                if done.started < at < done.ended
            ]
        return added

    def report(self, quiet_until: float, faults: list[tuple[float, str]]) -> str:
        """Numbers for people."""
        lines = [f"{len(self.done)} answered, {len(self.lost)} lost, {len(self.wrong)} wrong; {len(faults)} faults"]
        for kind, seconds in self.added_seconds(quiet_until, faults).items():
            if seconds:
                p50, p99 = np.percentile(seconds, [50, 99])
                lines.append(f"  {kind}: {len(seconds)} requests met one; added {p50:.2f} s p50, {p99:.2f} s p99")
        return "\n".join(lines)
