"""The pipeline from raw data to a report: stages are found among entry points and run in order.

A stage is a function `(Context) -> Path | None`. It names its output (`Context.output`: settings
and parents), returns at once if that is current, and otherwise writes it. It returns None if the
settings ask for no artifact. This module knows the stages' names and order, not their work.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar, cast

from recsys.artifacts import Manifest, Output, Workspace
from recsys.config import Settings
from recsys.errors import ArtifactError, ConfigError
from recsys.progress import say, working

T = TypeVar("T")
GROUP = "recsys.stages"
SECTION_GROUP = "recsys.sections"
RECIPE = "recipe"
STAGES = (
    "data", "sasrec", "recipe", "ids", "target", "draft", "retrieval", "bundle", "evaluate",
)  # fmt: skip
SECTIONS = (*STAGES, "teacher", "gate", "serve")
"""Sections that a configuration file may have."""


SHARES = {
    "sasrec": 0.21, "recipe": 0.16, "ids": 0.05, "target": 0.33, "draft": 0.05, "retrieval": 0.08,
    "bundle": 0.03, "evaluate": 0.09,
}  # fmt: skip
"""Shares of a run's time after the data are prepared, in the order of the stages."""
NEEDS = {
    "data": (1.8, 147, 0.3, 3.5), "sasrec": (10, 140, 1.0, 8), "ids": (6, 230, 1.2, 11),
    "target": (1, 20, 1.9, 4), "retrieval": (8, 210, 2.2, 13), "bundle": (1, 21, 1.9, 4),
    "evaluate": (8, 81, 1.9, 10),
}  # fmt: skip
"""Of a stage, however little it trains: seconds of a processor, the same for each million items of
twelve events each, GiB, the same for each million items (`benchmarks/results/scale_cpu.txt`). The
time is kept for the stage and not shared."""
CALIBRATION_S = 0.215  # of a processor, for `slowness`, where these needs were measured
LEAST_MINUTES = 0.05  # of a stage that trains, even if the budget is spent
# Users of a sample for each minute of the budget, by the setting of its size.
USERS_A_MINUTE = {"users": 250, "eval_users": 100}


def default_minutes(events: int) -> float:
    """Time budget of a run by the size of its data: 5 minutes, 15 for 200,000 events, at most 60.

    >>> default_minutes(0), default_minutes(200_000), default_minutes(10_000_000)
    (5.0, 15.0, 60.0)
    """
    return round(min(5 + 10 * events / 200_000, 60.0), 1)


@dataclass(frozen=True)
class Context:
    """The input of a stage.

    Attributes:
        settings: all sections; a stage reads its own (and `seed`).
        workspace: where its parents lie and its output goes.
        force: make the artifact again even if it is current.
        start: moment at which the run started, by `time.monotonic`.
        ends: stage -> when it should end, for the stage that has begun.
        needs: stage -> minutes that it needs however little it trains.
    """

    settings: Settings
    workspace: Workspace
    force: bool = False
    start: float = field(default_factory=time.monotonic)
    ends: Mapping[str, float] = field(default_factory=dict)
    needs: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, settings: Settings, *, force: bool = False) -> Context:
        """The context of the run that `settings` names."""
        return cls(settings, Workspace.of(settings.name), force)

    @property
    def parent(self) -> Workspace | None:
        """The workspace of the run whose bundle this run continues; None for a first run."""
        name = self.settings.parent
        return None if name is None else replace(self.workspace, name=name)

    def made(self, kind: str) -> Manifest | None:
        """The manifest of the run's artifact of a kind, or None if there is none."""
        try:
            return self.workspace.manifest(kind)
        except ArtifactError:
            return None

    def with_recipe(self) -> Context:
        """This context with the settings that the stage `recipe` chose, if it is asked for."""
        recipe = self.made(RECIPE) if self.settings.sets(RECIPE, "trials") else None
        if recipe is None:
            return self
        return replace(self, settings=self.settings.overridden(recipe.info["chosen"]))

    @property
    def minutes(self) -> float | None:
        """Time budget of the whole run, or None; `auto` needs the prepared data."""
        minutes = self.settings.minutes
        if minutes != "auto":
            return minutes
        stats = self.workspace.manifest("dataset").info["stats"]
        return default_minutes(stats["interactions"])

    def remaining(self) -> float | None:
        """Minutes until the budget of the run is spent, or None for no budget."""
        if self.minutes is None:
            return None
        return self.minutes - (time.monotonic() - self.start) / 60

    def share(self, stage: str) -> float | None:
        """Minutes that a stage may take now: its share of what remains, or None for no budget.

        Time that earlier stages did not need goes to the later ones. What a stage that has begun
        has taken, for loading and for labels, counts as well.
        """
        remaining = self.remaining()
        if remaining is None:
            return None
        if stage in self.ends:
            return max((self.ends[stage] - time.monotonic()) / 60, LEAST_MINUTES)
        names = list(SHARES)[list(SHARES).index(stage) :]
        shared = remaining - sum(self.needs.get(name, 0) for name in names)
        rest = sum(SHARES[name] for name in names)
        own = self.needs.get(stage, 0) + max(shared, 0) * SHARES[stage] / rest
        return max(own, LEAST_MINUTES)

    def deadline(self, stage: str) -> float:
        """When a stage that begins now should end, by `time.monotonic`; infinite for no budget."""
        share = self.share(stage)
        return math.inf if share is None else time.monotonic() + 60 * share

    def sample(self, stage: str, users: int, key: str = "users") -> int:
        """Size of a stage's sample of users, which a budget limits unless the settings name it.

        Args:
            stage: whose section may set it.
            users: the size without a budget.
            key: of the setting, one of `USERS_A_MINUTE`.
        """
        if self.minutes is None or self.settings.sets(stage, key):
            return users
        return min(users, max(int(USERS_A_MINUTE[key] * self.minutes), 100))

    def run(self, stage: Callable[[Context], T]) -> T:
        """Run a stage, as the only run of this name.

        Raises:
            LockedError: another process runs a stage of this name.
        """
        with self.workspace.locked(), working(self.workspace.name):
            return stage(self)

    def output(self, kind: str, config: Mapping[str, Any], parents: Mapping[str, str]) -> Output:
        """The artifact of a kind that this run makes with `config` from `parents`."""
        return Output(self.workspace.path(kind), kind, config, parents, self.force)


def slowness() -> float:
    """How many times the processor time of `NEEDS` this machine takes now, by a short trial."""
    import numpy as np

    begun = time.thread_time()  # products of matrices would count threads that wait for a core
    np.unique(np.random.default_rng(0).random(3_000_000))
    sorted(map(str, range(1_000_000)))
    return (time.thread_time() - begun) / CALIBRATION_S


def estimate(events: int, items: int) -> dict[str, dict[str, float]]:
    """`minutes` of an idle core and `gib` that each stage needs, however little it trains."""
    size, slow = (items + events / 12) / 2e6, slowness()
    return {
        name: {"minutes": slow * (n[0] + n[1] * size) / 60, "gib": n[2] + n[3] * size}
        for name, n in NEEDS.items()
    }


def foresee(events: int, items: int, minutes: float, *, said: bool = True) -> dict[str, float]:
    """Say what stages need however little they train; a busy machine takes longer than is `said`.

    Returns:
        the minutes that are kept for each stage, together at most half of the budget.
    """
    needs = estimate(events, items)
    total = sum(need["minutes"] for need in needs.values())
    share = min(1.0, minutes / (2 * total))
    kept = {name: need["minutes"] * share for name, need in needs.items()}
    if not said:
        return kept
    each = [f"{name} {need['minutes']:.1f}, {need['gib']:.1f}" for name, need in needs.items()]
    say(f"Besides training, an idle core takes {total:.1f} of {minutes:.3g} minutes")
    say(f"Minutes and GiB of each stage: {'; '.join(each)}")
    if minutes < 1.5 * total:
        say(
            "[bold yellow]That is too short[/bold yellow] (--minutes): models hardly train, trials "
            "of the recipe are left out, and few users are sampled"
        )
    return kept


def check(settings: Settings) -> None:
    """Read the sections of all stages, so that a mistake is refused before the first stage.

    The class of a section is an entry point that imports no torch. If it has a method
    `check_with(settings)`, that method checks the section against the other ones.

    Raises:
        ConfigError: an unknown key, a wrong value, or sections that do not fit each other.
    """
    sections = {name: settings.section(name, cls) for name, cls in section_classes().items()}
    for section in sections.values():
        if hasattr(section, "check_with"):
            section.check_with(settings)
    _ = settings.name, settings.parent, settings.seed, settings.minutes  # reading checks them


@cache
def section_classes() -> dict[str, Any]:
    """The class of each section; installed packages are searched once, which takes a while."""
    classes = {point.name: point.load() for point in entry_points(group=SECTION_GROUP)}
    if not classes:
        raise ConfigError("the settings of the stages are not installed; run `pip install -e .`")
    return classes


@cache
def load_stage(name: str) -> Callable[[Context], Path | None]:
    """Find and import one stage.

    Raises:
        ConfigError: no such stage is installed.
    """
    matches = entry_points(group=GROUP, name=name)
    if not matches:
        raise ConfigError(f"stage {name!r} is not installed; run `pip install -e .` again")
    return cast("Callable[[Context], Path | None]", next(iter(matches)).load())


def run(context: Context, stages: Iterable[str] = STAGES) -> dict[str, tuple[Path, float]]:
    """Check the settings of all stages, then run stages in order.

    The time that made an artifact which is up to date counts as spent, so that a run that was
    stopped and continued takes no more than its budget.

    Returns:
        name -> (artifact, seconds).

    Raises:
        ConfigError: wrong settings; no stage has run then.
        LockedError: another process runs under the same name; no stage has run then.
    """
    check(context.settings)
    results = {}
    with context.workspace.locked():
        for name in stages:
            start = time.perf_counter()
            if STAGES.index(name) > STAGES.index(RECIPE):
                context = context.with_recipe()
            before, dataset = context.made(name), context.made("dataset")
            if name != "data" and not context.needs and dataset and context.minutes is not None:
                stats, said = dataset.info["stats"], "data" in results
                needs = foresee(stats["interactions"], stats["items"], context.minutes, said=said)
                context = replace(context, needs=needs)
            ends = {name: context.deadline(name)} if name in SHARES else {}
            context = replace(context, ends=ends)
            with working(name):
                path = load_stage(name)(context)
            if path is None:
                continue
            results[name] = (path, time.perf_counter() - start)
            if before is not None and context.made(name) == before:
                context = replace(context, start=context.start - before.info.get("seconds", 0))
            say(f"[bold]{name}[/bold] → {path}  ({results[name][1]:.1f} s)")
    return results
