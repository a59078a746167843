"""Retraining: new events and items become a new version of the bundle that is served.

The versions of run NAME are the runs NAME.2, NAME.3 and so on, each with the run that it continues
as its parent. A version is made in these steps, each of which leaves an artifact or nothing:

    events     what is new is taken from the store and from files, once (`news`)
    run        the stages of `recsys run`, with a parent: data, sasrec, ids, ... bundle
    sending    after `data`: the running service is told the events of files (`service`)
    gate       challenger against champion (`recsys.evaluation.gate`)
    promotion  the alias of the service is swapped

A retraining that was stopped continues with the step that it had not finished. `retraining.jsonl`
in the folder of the run NAME has a line for each verdict and each promotion (`versions`).
"""

from __future__ import annotations

import dataclasses
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc

from recsys.artifacts import Workspace
from recsys.bundle import Bundle
from recsys.config import SHIPPED, Settings
from recsys.data import growth
from recsys.dataset import Dataset
from recsys.errors import ArtifactError
from recsys.evaluation.verdict import GateConfig
from recsys.pipeline import RECIPE, SECTIONS, STAGES, Context, check, section_classes
from recsys.pipeline import run as run_stages
from recsys.progress import say
from recsys.retraining import versions
from recsys.retraining.news import Sources, erased_since, settings_of_data, take
from recsys.retraining.service import promote_version, send_events, unsent
from recsys.retraining.versions import CHAMPION, LOG

if TYPE_CHECKING:
    from recsys.serving.client import Client

__all__ = ["CHAMPION", "LOG", "Outcome", "Sources", "retrain"]

CHANGES = SHIPPED / "retrain.yaml"
"""What retraining changes of the settings of the parent."""
# Of the parent's settings, what the models must have in common with it.
INHERITED = ("sasrec", "ids", "target", "teacher", "draft", "retrieval", "bundle")


@dataclass(frozen=True)
class Outcome:
    """The outcome of a retraining.

    Attributes:
        version: name of the new version, or of the last one if nothing is new; None without any.
        parent: name of the champion that it continues.
        offered: whether the gate offers it; None if nothing was decided.
        promoted: whether the service answers with it now.
        reasons: why it is not offered, or why nothing was done, or what else to know of it.
        report: folder of the report.
    """

    version: str | None
    parent: str
    offered: bool | None = None
    promoted: bool = False
    reasons: tuple[str, ...] = ()
    report: Path | None = None


def retrain(
    settings: Settings,
    sources: Sources,
    *,
    clients: Sequence[Client] = (),
    promote: bool = False,
    force: bool = False,
    done: Callable[[str], None] = lambda step: None,
) -> Outcome:
    """Make and judge the next version of a run, or continue the one that was not finished.

    Args:
        settings: of the run NAME: what differs from those of the parent.
        sources: of new events and items.
        clients: of the processes of the service. The first one says what the champion is; without
            any it is the version that was promoted last.
        promote: let the alias `champion` of each process stand for a version that is offered.
        force: begin a new version even if one is not finished.
        done: called after each step with its name: `events`, the stages, `gate` and `swap`.

    Raises:
        ConfigError: wrong settings, or parent's data without times.
        ArtifactError: the champion's bundle, data or run are not in the workspace.
        LockedError: another process runs or retrains this run.
    """
    base = Workspace.of(settings.name)
    with base.locked():
        champion = versions.champion_of(base, clients)
        versions.remove_begun(base)
        last = versions.newest(base)
        taken = None if last is None else versions.events_of(last, champion)
        verdict = None if last is None or taken is None else versions.verdict_of(last)
        if last is not None and last.name == champion.name:
            versions.log_promotion(base, last)  # if it was stopped after the swap
        # What was promoted and rolled back is not promoted again.
        known = last is not None and last.name in versions.promoted(base)
        if last and taken and not known and (erased := erased_since(last, champion, sources)):
            say(f"{last.name} is not used: {erased} of its users were erased since")
            taken = verdict = None
        judged = verdict if promote and not (known or force) else None
        if last and judged and not judged["offered"] and "gate" in settings.values:
            verdict = _make(settings, last, champion, lambda step: None)
        waits = promote and verdict is not None and verdict["offered"] and not known
        why = None
        if force or taken is None or (verdict is not None and not waits):
            newest = None if taken is None or force else taken.info["newest"]
            new = replace(base, name=f"{base.name}.{1 + max([1, *versions.numbers(base)])}")
            window = settings.section("gate", GateConfig).window
            form = settings.values.get("data") or {}
            why = take(new, champion, replace(sources, form=form), window, newest)
            if why is None:
                last, known = new, False
            else:
                say(why)
        if last is None or (why is not None and taken is None):
            name = None if last is None else last.name
            return Outcome(name, champion.name, reasons=(str(why),))
        done("events")
        few = _prepare(settings, last, champion)
        if promote and clients:
            send_events(last, clients)
        elif count := unsent(last):
            file = "" if sources.events is None else f" {shlex.quote(str(sources.events))}"
            store = " --store none" if sources.store is None else ""
            command = f"recsys retrain{file} --name {base.name}{store} --promote"
            say(f"The service does not know {count} events of the file; this sends them: {command}")
        if few is not None:
            versions.remove(last)
            say(few)
            last = versions.newest(base)
            name = None if last is None else last.name
            return Outcome(name, champion.name, reasons=(few,))
        done("data")
        verdict = _make(settings, last, champion, done)
        swapped = clients if promote and not known else ()
        outcome = _finish(base, last, champion, verdict, swapped, done)
        if outcome.promoted and (erased := erased_since(last, champion, sources)):
            late = (
                f"{erased} of its users were erased while it was made; the next version is without "
                "them"
            )
            say(late)
            outcome = replace(outcome, reasons=(*outcome.reasons, late))
        versions.remove_old(base, last, champion, clients)
        return outcome if why is None else replace(outcome, reasons=(*outcome.reasons, why))


def _prepare(settings: Settings, version: Workspace, champion: Workspace) -> str | None:
    """Run the stage `data` of a version; why it is too early to train, or None.

    Of too few users nothing is learned, and too few in the window of the gate decide nothing. A
    version whose bundle is made is judged in any case.
    """
    from recsys.evaluation.gate import count_compared

    if versions.is_made(version):
        if others := ", ".join(name for name in STAGES if name in settings.values):
            say(f"{version.name} is made, and only judged; {others}: --force makes a new version.")
        return None
    context = _context(settings, version, champion)
    run_stages(context, ["data"])
    least = context.settings.section("gate", GateConfig).least_users
    before = Bundle.load(champion.bundle).catalog.items
    compared = count_compared(Dataset.load(version.dataset), before, int(time.time()))
    events, _ = growth.read(version.path(growth.KIND))
    users = len(pc.unique(events["user"]))
    if min(users, compared) >= least:
        return None
    return (
        f"{events.num_rows} events of {users} users are new, and {compared} users can be compared "
        f"in the window of the gate; {least} are needed of each (gate.least_users), so nothing is "
        "trained yet."
    )


def _make(
    settings: Settings, version: Workspace, champion: Workspace, done: Callable[[str], None]
) -> dict[str, Any]:
    """Run the stages after `data` and the gate, as far as they are not current; the verdict.

    A version that is made is judged again if the settings of the gate differ; nothing is trained.
    """
    from recsys.evaluation import gate

    context = _context(settings, version, champion)
    stages = STAGES[STAGES.index("data") + 1 : STAGES.index("bundle") + 1]
    for name in () if versions.is_made(version) else stages:
        run_stages(context, [name])
        done(name)
    verdict = gate.read_verdict(context.run(gate.stage))
    done("gate")
    return verdict


def _context(settings: Settings, version: Workspace, champion: Workspace) -> Context:
    """The run of a version: the parent's settings, the changes of retraining, then `settings`."""
    values: dict[str, Any] = {}
    for name in INHERITED:
        if not champion.path(name).is_dir():
            continue
        made_with = champion.manifest(name).config
        names = {f.name for f in dataclasses.fields(section_classes()[name])}
        values[name] = {key: value for key, value in made_with.items() if key in names}
    if "target" not in values:
        raise ArtifactError(
            f"{champion.run('target')} is not there; the settings of {champion.name} are read from "
            "the folder of its run"
        )
    values["target"].pop("base", None)  # the parent's target contains it
    values["data"] = settings_of_data(champion)
    changes = Settings.load(CHANGES, known=SECTIONS).values
    if "sasrec" not in values:
        changes.pop("sasrec")
    for over in (changes, settings.values):
        values = _merged(values, over)
    values.pop(RECIPE, None)  # the settings that it chose are the parent's
    values |= {"name": version.name, "parent": champion.name}
    made = Settings(values, settings.explicit_keys)
    check(made)
    return Context(made, version)


def _merged(values: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings with the values of another one on top."""
    merged = dict(values)
    for key, value in over.items():
        old = merged.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        merged[key] = _merged(old, value) if both and old is not None else value
    return merged


def _finish(
    base: Workspace,
    version: Workspace,
    champion: Workspace,
    verdict: dict[str, Any],
    clients: Sequence[Client],
    done: Callable[[str], None],
) -> Outcome:
    """Write the verdict down; with clients, promote the version if it is offered."""
    about = {"version": version.name, "parent": champion.name}
    reasons, offered = tuple(verdict["reasons"]), bool(verdict["offered"])
    versions.log(base, {"step": "judged", **about, "offered": offered, "reasons": list(reasons)})
    say(f"Report: {version.report / 'report.html'}")
    promoted = offered and bool(clients)
    if promoted:
        for client in reversed(clients):  # the first one is asked what the champion is
            promote_version(version, champion, client)
        say(f"{CHAMPION!r} stands for {version.name}; a rollback returns to {champion.name}.")
        done("swap")
        versions.log_promotion(base, version)
    return Outcome(version.name, champion.name, offered, promoted, reasons, version.report)
