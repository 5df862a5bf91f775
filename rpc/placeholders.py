"""Types of optional command-line flags, with readable placeholders for `--help`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

MaybeNumber = Annotated[int | None, tyro.conf.arg(metavar="N")]
MaybeFloat = Annotated[float | None, tyro.conf.arg(metavar="X")]
MaybeSeconds = Annotated[float | None, tyro.conf.arg(metavar="SECONDS")]
MaybeMs = Annotated[float | None, tyro.conf.arg(metavar="MS")]
MaybePort = Annotated[int | None, tyro.conf.arg(metavar="PORT")]
MaybeFile = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]
MaybeFolder = Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")]
MaybeText = Annotated[str | None, tyro.conf.arg(metavar="TEXT")]
