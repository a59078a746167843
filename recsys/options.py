"""Command-line options that commands share. Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="YAML file of settings; see configs/ for commented examples."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override one setting, as section.key=value. Repeatable."),
]
Seed = Annotated[int | None, typer.Option("--seed", help="Seed of everything random (default 0).")]
Name = Annotated[
    str | None,
    typer.Option("--name", help="Name of the run; names the folders under $RECSYS_HOME (var/)."),
]
Force = Annotated[bool, typer.Option("--force", help="Make it again even if it is up to date.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document for programs.")]
Quick = Annotated[
    bool, typer.Option("--quick", help="A smoke run in seconds; its figures mean nothing.")
]
