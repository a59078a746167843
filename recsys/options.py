"""Command-line options that commands share, and how they become the settings of a run.

A command takes a group of options as one parameter whose type is a dataclass of options, such as
`RunOptions`; the decorator `expand_options` gives the dataclass's fields to the command line.
Imports nothing heavy: `recsys --help` reads this module.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:  # the command loads it when it runs
    from recsys.pipeline import Context

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="YAML file of settings; see configs/ for commented examples."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override one setting, as section.key=value. Repeatable."),
]
Seed = Annotated[
    int | None, typer.Option("--seed", min=0, help="Seed of everything random (default 0).")
]
Name = Annotated[
    str | None,
    typer.Option("--name", help="Name of the run; names the folders under $RECSYS_HOME (var/)."),
]
Force = Annotated[bool, typer.Option("--force", help="Make it again even if it is up to date.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document for programs.")]
ColumnNames = Annotated[
    list[str] | None,
    typer.Option("--column", help="Name of a column, as user=customer_id or item=sku. Repeatable."),
]


@dataclass(frozen=True)
class RunOptions:
    """Options of every command that runs a stage: its settings, and whether to run it again."""

    config: ConfigFile = None
    set_: Overrides = None
    name: Name = None
    seed: Seed = None
    force: Force = False

    def context(self, *, minutes: float | None = None, **sections: Mapping[str, object]) -> Context:
        """Read the settings: the file, then `--set`, then the command's own options.

        Args:
            minutes: time budget of the whole run; None keeps that of the file.
            **sections: section -> values of the command's own options; None values are not set.

        Raises:
            ConfigError: an unreadable file, an unknown section or a malformed override.
        """
        from recsys.config import Settings
        from recsys.pipeline import SECTIONS, Context

        settings = Settings.load(
            self.config,
            self.set_ or (),
            sections=sections,
            known=SECTIONS,
            name=self.name,
            seed=self.seed,
            minutes=minutes,
        )
        return Context.of(settings, force=self.force)


def read_columns(options: Sequence[str]) -> dict[str, str]:
    """Role -> name of the column, of options such as `item=sku`.

    Raises:
        ConfigError: a malformed option.
    """
    from recsys.errors import ConfigError

    columns = {}
    for text in options:
        role, sign, column = text.partition("=")
        if not (sign and role and column):
            raise ConfigError(f"--column {text!r}: expected ROLE=NAME, such as item=sku")
        columns[role.strip()] = column
    return columns


def expand_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter whose type is a dataclass by the fields of that dataclass.

    Typer sees one option for each field; the command gets the dataclass.
    """
    parameters = inspect.signature(command, eval_str=True).parameters.values()
    groups: dict[str, Any] = {
        p.name: p.annotation for p in parameters if is_dataclass(p.annotation)
    }
    fields = {
        name: inspect.signature(group, eval_str=True).parameters for name, group in groups.items()
    }

    @wraps(command)
    def run(**values: object) -> None:
        for name, group in groups.items():
            values[name] = group(**{field: values.pop(field) for field in fields[name]})
        command(**values)

    expanded = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for whole in parameters
        for parameter in (fields[whole.name].values() if whole.name in fields else [whole])
    ]
    run.__signature__ = inspect.Signature(expanded)  # type: ignore[attr-defined]
    return run
