"""The commands that send requests to a running router: generate, chat, status."""

from __future__ import annotations

import dataclasses
import json
import sys

from rich.console import Console
from rich.table import Table

from kvferry.client import Client, ClientTls, KvferryError
from kvferry.commands import ChatCommand, GenerateCommand, StatusCommand


def _failed(error: Exception, address: str) -> int:
    """Prints the error, and a hint if nothing listens at the address. Returns the exit code."""
    message = str(error)
    if "Trying to connect an http1.x server" in message:
        message = f"UNAVAILABLE: {address} serves HTTP; give the gRPC port as --address (50051 with `kvferry up`)"
    if message.startswith("UNAVAILABLE: failed to connect") and "refused" in message:
        message = f"UNAVAILABLE: no router listens at {address}; start one with `kvferry up`, or give --address"
    print(f"kvferry: error: {message}", file=sys.stderr)
    return 1


def _connect(command: GenerateCommand | ChatCommand | StatusCommand) -> Client:
    files = (command.tls_ca, command.tls_cert, command.tls_key)
    tls = ClientTls(*files, server_name=command.tls_name) if any((*files, command.tls_name)) else None
    return Client(command.address, tls)


def run_generate(command: GenerateCommand) -> int:
    """Sends the prompt and streams the output. Returns the exit code."""
    text = command.prompt
    if text == "-":
        if sys.stdin.isatty():
            print("kvferry: type the prompt, then press Ctrl-D on an empty line", file=sys.stderr)
        # The newline that `echo` adds does not belong to the prompt, and makes the output of small models worse.
        text = sys.stdin.buffer.read().decode("utf-8", "replace").rstrip("\r\n")
    try:
        with _connect(command) as client:
            stream = client.generate(
                [{"role": "user", "content": text}] if command.chat else text,
                timeout=command.timeout,
                max_tokens=command.max_tokens,
                temperature=command.temperature,
                top_p=command.top_p,
                top_k=command.top_k,
                min_p=command.min_p,
                repetition_penalty=command.repetition_penalty,
                presence_penalty=command.presence_penalty,
                frequency_penalty=command.frequency_penalty,
                seed=command.seed,
                n=command.n,
                num_logprobs=command.num_logprobs,
                min_tokens=command.min_tokens,
                stop=command.stop,
                return_token_ids=command.json,
            )
            if not command.json and command.n == 1:
                for piece in stream:
                    print(piece.text, end="", flush=True)
                print()
            results = stream.results()
    except (KvferryError, ValueError, OSError) as error:
        # OSError: the CA's file can't be read. ValueError: a number does not fit its protobuf field.
        return _failed(error, command.address)
    except KeyboardInterrupt:
        return 130
    if command.json:
        completions = [dataclasses.asdict(result) for result in results]
        shown = completions[0] if command.n == 1 else completions
        # The bytes of a token may be invalid UTF-8, which JSON can't hold.
        print(json.dumps(shown, ensure_ascii=False, indent=2, default=lambda raw: raw.decode("utf-8", "replace")))
    elif command.n > 1:
        for result in results:
            print(f"[{result.index}] {result.text}")
    return 0


def run_chat_command(command: ChatCommand) -> int:
    """Runs a chat until the user ends it. Returns the exit code."""
    from kvferry.chat import Conversation, run_chat

    options = {
        "max_tokens": command.max_tokens,
        "temperature": command.temperature,
        "top_p": command.top_p,
        "seed": command.seed,
    }
    with _connect(command) as client:
        return run_chat(client, Conversation(command.system), options)


def run_status(command: StatusCommand) -> int:
    """Shows the cluster of a router. Returns the exit code."""
    try:
        with _connect(command) as client:
            status = client.cluster_status()
    except (KvferryError, OSError) as error:
        return _failed(error, command.address)
    print(f"{status.ready_pairs} ready pairs, {status.queued_requests} queued, {status.running_requests} running")
    table = Table(box=None, pad_edge=False)
    for column in ("worker", "tier", "address", "state", "pages", "queued", "runs", "hits", "seen"):
        table.add_column(column, no_wrap=True)
    for worker in status.workers:
        table.add_row(
            worker.worker_id or "?",
            worker.tier,
            worker.address,
            worker.state,
            f"{worker.free_pages}+{worker.cached_pages}/{worker.total_pages}",
            f"{worker.queued_seconds:.1f} s",
            str(worker.running_sequences),
            f"{worker.hit_rate:.0%}",
            f"{worker.last_seen_ms / 1e3:.1f} s",
        )
    # Output to a pipe is not cut to a terminal's width.
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    for worker in status.workers:
        if worker.reason:
            print(f"{worker.worker_id or worker.address}: {worker.reason}")
    print("pages: free + cached / total; queued: time for its prompts; hits: prompt tokens found in its prefix cache")
    return 0
