"""Prompts, output lengths and, for traces, arrival times. Made from a seed, so that every arm gets the same load.

Prompts are token ids. Contents are synthetic: what matters is which prompts begin alike, so equal `hash_ids` of a
Mooncake trace become equal blocks of tokens, turns of a conversation begin with the turns before, all else is drawn.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

LengthKind = Literal["fixed", "uniform", "lognormal"]
LOWEST_TOKEN, HIGHEST_TOKEN = 300, 30_000
"""Range of synthetic token ids: no special tokens, and in every common vocabulary."""
SALT_TOKENS = 3
"""Less than any page holds: prompts that begin alike with these alone share no page."""


@dataclass(frozen=True)
class LoadRequest:
    """One request to offer."""

    prompt: tuple[int, ...]
    max_tokens: int
    """Exact length of the output: EOS is ignored."""
    arrival: float | None = None
    """Seconds from the start, if the workload has arrival times."""


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths in tokens."""

    kind: LengthKind
    mean: float
    spread: float = 0.0
    """uniform: half the width as a share of the mean; lognormal: sigma."""

    def draw(self, random: np.random.Generator, count: int) -> list[int]:
        """`count` lengths, each at least 1."""
        match self.kind:
            case "fixed":
                values = np.full(count, self.mean)
            case "uniform":
                values = random.uniform(self.mean * (1 - self.spread), self.mean * (1 + self.spread), count)
            case "lognormal":
                values = random.lognormal(np.log(self.mean) - self.spread**2 / 2, self.spread, count)
        return [max(1, round(value)) for value in values]


def synthetic(
    count: int, prompt: Lengths, output: Lengths, seed: int, shared_prefix: int = 0, num_prefixes: int = 1
) -> list[LoadRequest]:
    """Prompts of drawn lengths; each begins with one of `num_prefixes` prefixes of `shared_prefix` tokens."""
    random = np.random.default_rng(seed)
    prefixes = [random_tokens(random, shared_prefix) for _ in range(num_prefixes)]
    lengths = zip(prompt.draw(random, count), output.draw(random, count), strict=True)
    return [
        LoadRequest(prefixes[int(random.integers(num_prefixes))] + random_tokens(random, num_prompt), num_output)
        for num_prompt, num_output in lengths
    ]


def conversations(count: int, turns: int, message: Lengths, output: Lengths, seed: int) -> list[LoadRequest]:
    """`count` requests of conversations of `turns` turns, one turn of each after the other.

    A turn's prompt is the conversation so far; outputs in it are synthetic, so that prompts do not depend on the model.
    """
    random = np.random.default_rng(seed)
    talks: list[tuple[int, ...]] = [()] * -(-count // turns)
    requests: list[LoadRequest] = []
    for _ in range(turns):
        for index, talk in enumerate(talks):
            [num_message], [num_output] = message.draw(random, 1), output.draw(random, 1)
            prompt = talk + random_tokens(random, num_message)
            requests.append(LoadRequest(prompt, num_output))
            talks[index] = prompt + random_tokens(random, num_output)
    return requests[:count]


def salted(requests: Iterable[LoadRequest], salt: int) -> list[LoadRequest]:
    """The same load with other beginnings, so that no server hits pages that an earlier run left in its cache.

    All prompts get the same few first tokens: what was shared within the run stays shared, and nothing else is.
    """
    first = random_tokens(np.random.default_rng((salt, 2)), SALT_TOKENS)
    return [
        replace(request, prompt=(first + request.prompt[SALT_TOKENS:])[: len(request.prompt)]) for request in requests
    ]


def scaled(requests: Iterable[LoadRequest], factor: float, max_prompt: int, max_output: int) -> list[LoadRequest]:
    """Lengths times `factor`, cut to what a model takes. Prompts keep their beginnings, so what was shared stays so."""
    return [
        replace(
            request,
            prompt=request.prompt[: max(1, min(max_prompt, round(len(request.prompt) * factor)))],
            max_tokens=max(1, min(max_output, round(request.max_tokens * factor))),
        )
        for request in requests
    ]


def with_arrivals(requests: Iterable[LoadRequest], times: Iterable[float]) -> list[LoadRequest]:
    """The requests in order, each at its time."""
    return [replace(request, arrival=time) for request, time in zip(requests, times, strict=True)]


def fitted(prompt: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    """The same prompt for a model of fewer token ids; equal beginnings stay equal."""
    if vocab_size >= HIGHEST_TOKEN:
        return prompt
    return tuple(token % vocab_size for token in prompt)


def cut(requests: Iterable[LoadRequest], max_model_len: int) -> list[LoadRequest]:
    """Prompts cut so that prompt and output fit a model."""
    return [replace(r, prompt=r.prompt[: max(1, max_model_len - r.max_tokens)]) for r in requests]


def as_text(prompt: tuple[int, ...]) -> str:
    """A text of as many words as there are tokens, for servers that take no ids; equal beginnings stay equal."""
    return " ".join(_WORDS[token % len(_WORDS)] for token in prompt)


_SOME_WORDS = """time year people way day man thing woman life child world school state family student group country
problem
hand part place case week company system program question work number night point home water room mother"""
_WORDS = tuple(_SOME_WORDS.split())


def random_tokens(random: np.random.Generator, count: int) -> tuple[int, ...]:
    """`count` random token ids."""
    return tuple(map(int, random.integers(LOWEST_TOKEN, HIGHEST_TOKEN, count)))
