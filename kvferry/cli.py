"""The `kvferry` command. Parsing loads neither torch nor gRPC servers; each command imports what it needs."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.config import BenchCommand
from colocated_service.config import ColocatedConfig
from decode_service.config import DecodeConfig
from kvferry.commands import ChatCommand, DemoCommand, GenerateCommand, ModelsCommand, StatusCommand, UpCommand
from prefill_service.config import PrefillConfig
from router.config import RouterConfig
from worker_runtime.config import WorkerConfig

DESCRIPTION = """Serves a large language model: prefill workers compute prompts, decode workers generate the tokens.

`kvferry up` starts everything on this machine. `kvferry generate "..."` sends a prompt, `kvferry chat` starts a
conversation, `kvferry status` shows the workers. `kvferry demo` runs one example. `router`, `prefill`, `decode` and
`colocated` each start a single process."""


def main() -> None:
    """Entry point of the command."""
    commands: dict[str, Callable[..., Any]] = {
        "up": UpCommand,
        "generate": GenerateCommand,
        "chat": ChatCommand,
        "status": StatusCommand,
        "models": ModelsCommand,
        "demo": DemoCommand,
        "router": RouterConfig,
        "prefill": PrefillConfig,
        "decode": DecodeConfig,
        "colocated": ColocatedConfig,
        "bench": BenchCommand,
    }
    if sys.argv[1:] in (["--version"], ["-V"]):
        print(f"kvferry {importlib.metadata.version('kvferry')}")
        return
    try:
        command = tyro.extras.subcommand_cli_from_dict(
            commands,
            prog="kvferry",
            description=DESCRIPTION,
            config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
        )
    except ValueError as error:
        _exit_with(f"{error}")
    if isinstance(command, (RouterConfig, WorkerConfig)):
        _serve(command)
    else:
        sys.exit(_run(command))


def _serve(config: RouterConfig | WorkerConfig) -> None:
    """Runs one process until it ends."""
    if isinstance(config, RouterConfig):
        name = config.served_model_name or Path(config.model).name
        folder = _folder_of(config.model, with_weights=False)
        config = dataclasses.replace(config, model=folder, served_model_name=name)
    else:
        # Checked before torch is imported, so that a typo is reported at once.
        engine = dataclasses.replace(config.engine, model=_folder_of(config.engine.model))
        config = dataclasses.replace(config, engine=engine)
    match config:
        case RouterConfig():
            import router.__main__ as router_process

            router_process.run(config)
        case PrefillConfig():
            import prefill_service.__main__ as prefill_process

            prefill_process.run(config)
        case DecodeConfig():
            import decode_service.__main__ as decode_process

            decode_process.run(config)
        case ColocatedConfig():
            import colocated_service.__main__ as colocated_process

            colocated_process.run(config)


def _run(command: object) -> int:
    """Runs any other command. Returns the exit code."""
    match command:
        case BenchCommand():
            try:
                from benchmarks.commands import run_command
            except ModuleNotFoundError as error:
                _exit_with(f"benchmarks need {error.name}, which is not installed: pip install '.[bench]'")
            return run_command(command)
        case UpCommand():
            from kvferry.up import run_up

            return run_up(command.cluster())
        case GenerateCommand():
            from kvferry.asking import run_generate

            return run_generate(command)
        case ChatCommand():
            from kvferry.asking import run_chat_command

            return run_chat_command(command)
        case StatusCommand():
            from kvferry.asking import run_status

            return run_status(command)
        case ModelsCommand():
            return _models(command)
        case DemoCommand():
            from kvferry.demo import run_demo

            return run_demo(command.model, command.max_tokens)
    raise TypeError(f"{command!r} is not a command")


def _exit_with(message: str) -> NoReturn:
    print(f"kvferry: error: {message}", file=sys.stderr)
    sys.exit(2)


def _folder_of(model: str, with_weights: bool = True) -> str:
    from engine.model_store import ModelUnavailable, resolve_model

    try:
        return str(resolve_model(model, with_weights))
    except ModelUnavailable as error:
        _exit_with(str(error))


def _models(command: ModelsCommand) -> int:
    from engine.model_store import BUILT_IN, prepared_models

    if command.action == "prepare":
        print(_folder_of(command.model))
        return 0
    table = Table("model", "state", "MB", "folder")
    prepared = prepared_models()
    for name, folder, size in prepared:
        table.add_row(name, "prepared", f"{size / 1e6:.0f}", str(folder))
    for name in BUILT_IN.keys() - {name for name, _, _ in prepared}:
        table.add_row(name, "not prepared yet", "", "")
    Console().print(table)
    return 0
