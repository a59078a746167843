"""The pipeline from raw data to a report: stages are found among entry points and run in order.

A stage is a function `(Context) -> Path | None`. It names its output (`Context.output`: settings
and parents), returns at once if that is current, and otherwise writes it. It returns None if the
settings ask for no artifact. This module knows the stages' names and order, not their work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, cast

from recsys.artifacts import Output, Workspace
from recsys.config import Settings
from recsys.errors import ConfigError
from recsys.progress import say

GROUP = "recsys.stages"
SECTION_GROUP = "recsys.sections"
STAGES = ("data", "sasrec", "ids", "target", "draft", "retrieval", "bundle", "evaluate")
SECTIONS = (*STAGES, "teacher", "serve")
"""Sections that a configuration file may have."""


@dataclass(frozen=True)
class Context:
    """The input of a stage.

    Attributes:
        settings: all sections; a stage reads its own (and `seed`).
        workspace: where its parents lie and its output goes.
        force: make the artifact again even if it is current.
    """

    settings: Settings
    workspace: Workspace
    force: bool = False

    @classmethod
    def of(cls, settings: Settings, *, force: bool = False) -> Context:
        """The context of the run that `settings` names."""
        return cls(settings, Workspace.of(settings.name), force)

    def output(self, kind: str, config: Mapping[str, Any], parents: Mapping[str, str]) -> Output:
        """The artifact of a kind that this run makes with `config` from `parents`."""
        return Output(self.workspace.path(kind), kind, config, parents, self.force)


def check(settings: Settings) -> None:
    """Read the sections of all stages, so that a mistake is refused before the first stage.

    The class of a section is an entry point that imports no torch. If it has a method
    `check_with(settings)`, that method checks the section against the other ones.

    Raises:
        ConfigError: an unknown key, a wrong value, or sections that do not fit each other.
    """
    classes = {point.name: point.load() for point in entry_points(group=SECTION_GROUP)}
    if not classes:
        raise ConfigError("the settings of the stages are not installed; run `pip install -e .`")
    sections = {name: settings.section(name, cls) for name, cls in classes.items()}
    for section in sections.values():
        if hasattr(section, "check_with"):
            section.check_with(settings)
    _ = settings.name, settings.seed  # reading them checks them


def load_stage(name: str) -> Callable[[Context], Path | None]:
    """Find and import one stage.

    Raises:
        ConfigError: no such stage is installed.
    """
    found = entry_points(group=GROUP, name=name)
    if not found:
        raise ConfigError(f"stage {name!r} is not installed; run `pip install -e .` again")
    return cast("Callable[[Context], Path | None]", next(iter(found)).load())


def run(context: Context, stages: Iterable[str] = STAGES) -> dict[str, tuple[Path, float]]:
    """Check the settings of all stages, then run stages in order.

    Returns:
        name -> (artifact, seconds).

    Raises:
        ConfigError: wrong settings; no stage has run then.
    """
    check(context.settings)
    results = {}
    for name in stages:
        start = time.perf_counter()
        path = load_stage(name)(context)
        if path is None:
            continue
        results[name] = (path, time.perf_counter() - start)
        say(f"[bold]{name}[/bold] → {path}  ({results[name][1]:.1f} s)")
    return results
