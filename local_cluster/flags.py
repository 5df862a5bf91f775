"""Settings as command-line flags, which tyro with `OmitArgPrefixes` parses to the same settings."""

from __future__ import annotations

import dataclasses
from pathlib import PurePath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def flags_of(config: DataclassInstance, defaults: DataclassInstance) -> list[str]:
    """Flags for everything in which `config` differs from `defaults`, nested dataclasses included.

    defaults: of the same type; the settings without flags. Raises TypeError for a value that no flag can express.
    """
    flags: list[str] = []
    for field in dataclasses.fields(config):
        value, default = getattr(config, field.name), getattr(defaults, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            flags += flags_of(value, default)
        elif value != default:
            flags += _flag(field.name.replace("_", "-"), value)
    return flags


def _flag(name: str, value: object) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, tuple):
        return [f"--{name}", *map(str, value)]
    if value is None or isinstance(value, (int, float, str, PurePath)):
        return [f"--{name}={value}"]  # one argument, since a value may begin with a dash
    raise TypeError(f"{name} is {value!r}, which no flag can express")
