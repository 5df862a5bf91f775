"""Request traces as they are published, read into loads: Azure, BurstGPT, Mooncake, ShareGPT.

Published files come with byte-order marks, CRLF, blank lines, lengths as decimals, other names of columns, several time
zones, and out of order. They are read, or refused with file, line and field. Contents are synthetic: see `workload`.
"""

from __future__ import annotations

import csv
import datetime
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.workload import LoadRequest, random_tokens

MOONCAKE_BLOCK = 512
"""Tokens that one hash id of a Mooncake trace stands for."""
CHARACTERS_PER_TOKEN = 4
"""Of texts whose lengths are asked for in tokens."""
_TIME = ("TIMESTAMP", "Timestamp", "timestamp", "time", "arrival_time")
_PROMPT = ("ContextTokens", "Request tokens", "request_tokens", "input_length", "input_tokens", "prompt_tokens")
_OUTPUT = ("GeneratedTokens", "Response tokens", "response_tokens", "output_length", "output_tokens")


def read_csv(path: Path, count: int, seed: int) -> list[LoadRequest]:
    """A table with a time, a prompt length and an output length: Azure LLM traces, BurstGPT.

    Times are dates (ISO 8601; without a zone they are UTC) or seconds. Raises ValueError naming file, line and field.
    """
    random = np.random.default_rng(seed)
    requests: list[LoadRequest] = []
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = csv.DictReader(file)
        names = [_column(path, rows.fieldnames or (), wanted) for wanted in (_TIME, _PROMPT, _OUTPUT)]
        for row in rows:
            if len(requests) == count:
                break
            if not any(row.get(name) for name in names):
                continue  # a blank line
            where = f"{path}, line {rows.line_num}"
            time, num_prompt, num_output = (row.get(name) for name in names)
            prompt = random_tokens(random, _length(where, names[1], num_prompt))
            requests.append(LoadRequest(prompt, _length(where, names[2], num_output), _time(where, names[0], time)))
    return _in_order(path, requests)


def read_mooncake(path: Path, count: int, seed: int) -> list[LoadRequest]:
    """Lines of JSON with timestamp (ms), input_length, output_length and, if there are any, hash_ids, each for a block
    of 512 tokens: equal ids become equal blocks. Raises ValueError naming file, line and field."""
    blocks: dict[Any, tuple[int, ...]] = {}
    random = np.random.default_rng(seed)
    requests = []
    for where, row in _json_lines(path, count):
        prompt: tuple[int, ...] = ()
        for hash_id in row.get("hash_ids") or ():
            if hash_id not in blocks:
                number = hash_id if isinstance(hash_id, int) and hash_id >= 0 else len(blocks) + (1 << 40)
                blocks[hash_id] = random_tokens(np.random.default_rng((seed, number)), MOONCAKE_BLOCK)
            prompt += blocks[hash_id]
        length = _length(where, "input_length", row.get("input_length"))
        prompt = (prompt + random_tokens(random, max(0, length - len(prompt))))[:length]
        time = _time(where, "timestamp", row.get("timestamp")) / 1e3
        requests.append(LoadRequest(prompt, _length(where, "output_length", row.get("output_length")), time))
    return _in_order(path, requests)


def read_sharegpt(path: Path, count: int, seed: int) -> list[LoadRequest]:
    """Lengths of real conversations with `conversations: [{from, value}, ...]`, as lines of JSON or one JSON array: the
    first question, with what stands before it, and its answer. Conversations without both are left out.

    Raises ValueError naming file, line (or place in the array) and field.
    """
    random = np.random.default_rng(seed)
    requests: list[LoadRequest] = []
    for where, row in _json_lines(path, None):
        turns = row.get("conversations") or row.get("messages") or []
        if not isinstance(turns, list):
            raise ValueError(f"{where}, field conversations: must be a list")
        asked = answered = 0
        for turn in turns:
            who = str(turn.get("from") or turn.get("role")) if isinstance(turn, dict) else ""
            said = (turn.get("value") or turn.get("content") or "") if isinstance(turn, dict) else ""
            if who in ("gpt", "assistant", "chatgpt", "model", "bard") and asked:
                answered = len(str(said))
                break
            asked += len(str(said))
        if asked and answered:
            prompt = random_tokens(random, max(1, asked // CHARACTERS_PER_TOKEN))
            requests.append(LoadRequest(prompt, max(1, answered // CHARACTERS_PER_TOKEN)))
        if len(requests) == count:
            break
    if not requests:
        raise ValueError(f"{path}: has no conversation with a question and an answer")
    return requests


def _json_lines(path: Path, count: int | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where it stands, object) for each object of a file of lines, or of one array."""
    text = path.read_text(encoding="utf-8-sig")
    if text.lstrip().startswith("["):
        try:
            rows = [(f"{path}, entry {number}", row) for number, row in enumerate(json.loads(text), 1)]
        except ValueError as error:
            raise ValueError(f"{path}: is no JSON array: {error}") from error
    else:
        rows = []
        # Not splitlines: texts may hold separators of other kinds, such as U+2028.
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                try:
                    rows.append((f"{path}, line {number}", json.loads(line)))
                except ValueError as error:
                    raise ValueError(f"{path}, line {number}: is no JSON: {error}") from error
                if len(rows) == count:
                    break
    for where, row in rows[:count]:
        if not isinstance(row, dict):
            raise ValueError(f"{where}: is no JSON object")
        yield where, row


def _column(path: Path, names: Any, wanted: tuple[str, ...]) -> str:
    found = [name for name in names if name is not None and name.strip() in wanted]
    if not found:
        raise ValueError(f"{path}, line 1: no column of {', '.join(wanted)}; there are {', '.join(map(str, names))}")
    return str(found[0])


def _length(where: str, field: str, value: Any) -> int:
    """A length in tokens, at least 1. Some traces have decimals, and 0 for answers that failed."""
    try:
        number = float(value)
        if not 0 <= number < 1e9:
            raise ValueError
    except (TypeError, ValueError):
        raise ValueError(f"{where}, field {field}: {value!r} is no length") from None
    return max(1, int(number))


def _time(where: str, field: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = _date(where, field, str(value).strip())
    if not np.isfinite(number):
        raise ValueError(f"{where}, field {field}: {value!r} is no time")
    return number


def _date(where: str, field: str, text: str) -> float:
    # Azure writes seven digits of a second; datetime reads six.
    head, dot, rest = text.partition(".")
    digits = len(rest) - len(rest.lstrip("0123456789"))
    try:
        date = datetime.datetime.fromisoformat(
            f"{head}{dot}{rest[: min(6, digits)]}{rest[digits:]}".replace("Z", "+00:00")
        )
    except ValueError:
        raise ValueError(f"{where}, field {field}: {text!r} is no time") from None
    return (date if date.tzinfo else date.replace(tzinfo=datetime.UTC)).timestamp()


def _in_order(path: Path, requests: list[LoadRequest]) -> list[LoadRequest]:
    """By time, from 0 on."""
    if not requests:
        raise ValueError(f"{path}: has no requests")
    ordered = sorted(requests, key=lambda request: request.arrival or 0.0)
    first = ordered[0].arrival or 0.0
    return [replace(request, arrival=(request.arrival or 0.0) - first) for request in ordered]
