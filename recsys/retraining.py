"""Retraining: new events and items become a new version of the bundle that is served.

The versions of run NAME are the runs NAME.2, NAME.3 and so on, each with the run that it continues
as its parent. A version is made in these steps, each of which leaves an artifact or nothing:

    events     what is new is taken from the store and from files, once
    run        the stages of `recsys run`, with a parent: data, sasrec, ids, ... bundle
    gate       challenger against champion (`recsys.evaluation.gate`)
    promotion  the alias of the service is swapped

A retraining that was stopped continues with the step that it had not finished. `retraining.jsonl`
in the folder of the run NAME has a line for each verdict and each promotion.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recsys.artifacts import Manifest, Workspace, write_artifact
from recsys.bundle import Bundle
from recsys.config import SHIPPED, Settings, as_dict
from recsys.data import growth
from recsys.data.filtering import in_time_order
from recsys.data.prepare import DataConfig
from recsys.data.readers import READERS
from recsys.dataset import AVAILABILITY, ITEM_COLUMNS, Dataset
from recsys.errors import ArtifactError, ConfigError
from recsys.evaluation.verdict import GateConfig
from recsys.live_catalog import AddedItems, NewItem
from recsys.pipeline import RECIPE, SECTIONS, STAGES, Context, check
from recsys.pipeline import run as run_stages
from recsys.progress import say
from recsys.splits import TRAIN
from recsys.training.settings import (
    DraftConfig,
    IdsConfig,
    RetrievalConfig,
    SasRecConfig,
    TargetConfig,
    TeacherConfig,
)

if TYPE_CHECKING:  # imported where they are used
    from recsys.serving.client import Client
    from recsys.serving.stores.store import Store

CHANGES = SHIPPED / "retrain.yaml"
"""What retraining changes of the settings of the parent."""
CHAMPION = "champion"
LOG = "retraining.jsonl"
VALIDATION = 500  # least events of validation, if the parent has not been trained on them
KEPT = 3  # the newest versions, whose data and models are kept beside those that aliases need
# Of the parent's settings, what the models must have in common with it.
INHERITED: dict[str, type] = {
    "sasrec": SasRecConfig,
    "ids": IdsConfig,
    "target": TargetConfig,
    "teacher": TeacherConfig,
    "draft": DraftConfig,
    "retrieval": RetrievalConfig,
}
OWN_COLUMNS = {"user": "user", "item": None, "timestamp": "timestamp", "behaviour": None}
"""Columns of the events that are written here, beside which a file of items is read."""
OF_DATA = ("clean", "behaviours", "duplicates", "columns", "time_unit", "time_zone", "day_first")


@dataclass(frozen=True)
class Sources:
    """Where new events and items come from.

    Attributes:
        store: of the running service; None for none.
        not_history: types of the store's events that are no part of a history.
        events: a file or folder of events, as `recsys run` reads it, or None. Events that are not
            newer than the parent's are left out, so a full export can be given.
        items: a file of items, or None.
        columns: role -> name of a column of these files; by default those of the parent's files.
    """

    store: str | Path | None = None
    not_history: tuple[str, ...] = ()
    events: Path | None = None
    items: Path | None = None
    columns: Mapping[str, str] = field(default_factory=dict)


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
        champion = _champion(base, clients)
        _remove_begun(base)
        last = _last(base)
        taken = None if last is None else _taken(last, champion)
        verdict = None if last is None or taken is None else _verdict(last)
        if last is not None and last.name == champion.name:
            _log_promotion(base, last)  # if it was stopped after the swap
        # What was promoted and rolled back is not promoted again.
        known = last is not None and last.name in _promoted(base)
        if last and taken and not known and (erased := _erased_since(last, champion, sources)):
            say(f"{last.name} is not used: {erased} of its users were erased since")
            taken = verdict = None
        judged = verdict if promote and not (known or force) else None
        if last and judged and not judged["offered"] and _judged_otherwise(settings, last):
            verdict = _make(settings, last, champion, lambda step: None)
        waits = promote and verdict is not None and verdict["offered"] and not known
        why = None
        if force or taken is None or (verdict is not None and not waits):
            newest = None if taken is None or force else taken.info["newest"]
            new = replace(base, name=f"{base.name}.{1 + max([1, *_versions(base)])}")
            window = settings.section("gate", GateConfig).window
            why = _take(new, champion, sources, window, newest)
            if why is None:
                last, known = new, False
            else:
                say(why)
        if last is None or (why is not None and taken is None):
            name = None if last is None else last.name
            return Outcome(name, champion.name, reasons=(str(why),))
        done("events")
        few = _prepare(settings, last, champion)
        if few is not None:
            _remove(last)
            say(few)
            last = _last(base)
            name = None if last is None else last.name
            return Outcome(name, champion.name, reasons=(few,))
        done("data")
        verdict = _make(settings, last, champion, done)
        swapped = clients if promote and not known else ()
        outcome = _finish(base, last, champion, verdict, swapped, done)
        if outcome.promoted and (erased := _erased_since(last, champion, sources)):
            late = (
                f"{erased} of its users were erased while it was made; the next version is without "
                "them"
            )
            say(late)
            outcome = replace(outcome, reasons=(*outcome.reasons, late))
        _remove_old(base, last, champion, clients)
        return outcome if why is None else replace(outcome, reasons=(*outcome.reasons, why))


def _prepare(settings: Settings, version: Workspace, champion: Workspace) -> str | None:
    """Run the stage `data` of a version; why it is too early to train, or None.

    Too few users in the window of the gate decide nothing, so nothing is trained for them. A
    version whose bundle is made is judged in any case.
    """
    from recsys.evaluation.gate import count_compared

    context = _context(settings, version, champion)
    run_stages(context, ["data"])
    if context.made("bundle") is not None:
        return None
    least = context.settings.section("gate", GateConfig).least_users
    before = Bundle.load(champion.bundle).catalog.items
    users = count_compared(Dataset.load(version.dataset), before, int(time.time()))
    if users >= least:
        return None
    events = version.manifest(growth.KIND).info["events"]
    return (
        f"{events} events are new, and {users} users can be compared on those in the window of the "
        f"gate; {least} are needed (gate.least_users), so nothing is trained yet."
    )


def _make(
    settings: Settings, version: Workspace, champion: Workspace, done: Callable[[str], None]
) -> dict[str, Any]:
    """Run the stages after `data` and the gate, as far as they are not current; the verdict.

    A version is judged again if the settings of the gate differ.
    """
    from recsys.evaluation import gate

    context = _context(settings, version, champion)
    for name in STAGES[STAGES.index("data") + 1 : STAGES.index("bundle") + 1]:
        run_stages(context, [name])
        done(name)
    verdict = gate.read_verdict(context.run(gate.stage))
    done("gate")
    return verdict


def _versions(base: Workspace) -> list[int]:
    """Numbers of the versions of a run of which anything is there, ascending."""
    found = set()
    for place in ("runs", "datasets", "bundles", "reports"):
        for path in (base.home / place).glob(f"{base.name}.*"):
            number = path.name.removeprefix(f"{base.name}.")
            if number.isdecimal() and path.is_dir():
                found.add(int(number))
    return sorted(found)


def _last(base: Workspace) -> Workspace | None:
    """The newest version for which events were taken."""
    for number in reversed(_versions(base)):
        version = replace(base, name=f"{base.name}.{number}")
        try:
            version.manifest(growth.KIND)
        except ArtifactError:
            continue
        return version
    return None


def _taken(version: Workspace, champion: Workspace) -> Manifest | None:
    """The manifest of the events of a version; None if they were taken for another champion."""
    manifest = version.manifest(growth.KIND)
    same = manifest.parents["bundle"] == champion.manifest("bundle").digest
    return manifest if same else None


def _verdict(version: Workspace) -> dict[str, Any] | None:
    """The gate's verdict on a version's bundle; None if there is none yet."""
    from recsys.evaluation import gate

    try:
        judged, made = version.manifest("evaluation"), version.manifest("bundle")
    except ArtifactError:
        return None
    return gate.read_verdict(version.report) if judged.parents["bundle"] == made.digest else None


def _judged_otherwise(settings: Settings, version: Workspace) -> bool:
    """Whether settings of the gate are given, and a version was judged with others.

    Without any, as at night, a refused version is not judged again.
    """
    if "gate" not in settings.values:
        return False
    judged = version.manifest("evaluation").config
    changes = Settings.load(CHANGES, known=SECTIONS).values
    values = _merged(changes, settings.values).get("gate")
    config = as_dict(Settings({"gate": values}).section("gate", GateConfig))
    return any(judged.get(key) != value for key, value in config.items())


def _champion(base: Workspace, clients: Sequence[Client]) -> Workspace:
    """The run whose bundle is served.

    Raises:
        ArtifactError: the service has a bundle that is not in the workspace.
    """
    if not clients:
        promoted = _promoted(base)
        return replace(base, name=promoted[-1]) if promoted else base
    found = clients[0].alias(CHAMPION)
    champion = replace(base, name=str(found.bundle))
    manifest = champion.manifest("bundle")
    if manifest.digest != found.version:
        raise ArtifactError(
            f"the service answers with version {found.version} of bundle {found.bundle!r}, and "
            f"{champion.bundle} is {manifest.digest}; retrain in the service's $RECSYS_HOME"
        )
    return champion


# What is new


def _take(
    version: Workspace,
    champion: Workspace,
    sources: Sources,
    window: float,
    newest: int | None,
) -> str | None:
    """Write the artifact `events` of a version, or return why there is nothing to do.

    The newest share `window` of the events becomes the window of the gate.
    """
    bundle, before = Bundle.load(champion.bundle), Dataset.load(champion.dataset)
    digest = champion.manifest("dataset").digest
    if bundle.manifest.parents.get("dataset") != digest:
        raise ArtifactError(
            f"{champion.dataset} is not the data set that {champion.bundle} was made from"
        )
    if not before.interactions.has_time:
        raise ConfigError(
            f"{champion.dataset} has no times, so it is not known which events are new; run again "
            "with all events: recsys run"
        )
    events, items, erased = _read(sources, champion, bundle, before)
    since, now = int(before.interactions.timestamp.max(initial=0)), int(time.time())
    events = _newer(events, since, now)
    known = pa.array([*before.item_ids.tolist(), *items["item_id"].to_pylist()], pa.string())
    described = pc.is_in(events["item"], value_set=known)
    strange = events.filter(pc.invert(described))
    events = events.filter(described)
    if strange.num_rows:
        say(
            f"{strange.num_rows} new events are on {len(strange['item'].unique())} items that "
            "nothing describes, and are left out; --items gives the descriptions"
        )
    times = np.sort(events["timestamp"].to_numpy())
    if not len(times) or (newest is not None and times[-1] <= newest):
        return f"Nothing is new since {champion.name if newest is None else 'the last version'}."
    test = int(times[int(len(times) * (1 - window))])
    info = {
        "events": len(times),
        "items": items.num_rows,
        "newest": int(times[-1]),
        "dates": [_validation_start(before, times, test, window), test],
    }
    parents = {"bundle": bundle.manifest.digest, "dataset": digest}
    path = version.path(growth.KIND)
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_artifact(path, growth.KIND, parents=parents, info=info) as folder:
        growth.write(folder, events, items, erased)
    say(f"{version.name}: {len(times)} new events since {champion.name}")
    return None


def _newer(events: pa.Table, since: int, now: int) -> pa.Table:
    """The events after a time and not after now; says how many are left out.

    An event of the future, taken today, would make all events before it old tomorrow.
    """
    times = events["timestamp"]
    early, late = pc.less_equal(times, since), pc.greater(times, now)
    if count := pc.sum(early).as_py():
        say(f"{count} events are left out: the champion's data end on {_shown(since)}")
    if count := pc.sum(late).as_py():
        last = _shown(pc.max(times).as_py())
        say(
            f"{count} events are left out because they are in the future, up to {last}; give them "
            "again later. If the file has local times, name their zone when you run `recsys run`: "
            "--set data.time_zone=Europe/Berlin"
        )
    return events.filter(pc.invert(pc.or_(early, late)))


def _shown(seconds: int) -> str:
    """A time to read, in UTC."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def _validation_start(before: Dataset, times: Any, test: int, window: float) -> int:
    """When validation begins: a window before the test, and earlier if that has few events.

    It never reaches back to events that the parent was trained on.
    """
    start = int(times[int(len(times) * (1 - 2 * window))])
    held = before.interactions.timestamp[before.split != TRAIN]
    trained = before.interactions.timestamp[before.split == TRAIN]
    least = int(trained.max(initial=0)) + 1  # with a split by time, before all of `held`
    both = np.sort(np.concatenate([held[held >= least], times[times < test]]))
    if len(both) > VALIDATION:
        return min(start, int(both[-VALIDATION]))
    return min(start, int(both[0])) if len(both) else start


def _read(
    sources: Sources, champion: Workspace, bundle: Bundle, before: Dataset
) -> tuple[pa.Table, pa.Table, growth.Erased]:
    """Events, new and old, described items, and what of `before` was erased since."""
    schema = before.items.schema.remove_metadata()
    parts = [growth.COLUMNS.empty_table()]
    items = [schema.empty_table()]
    erased: dict[str, int] = {}
    if sources.events is not None:
        events, described = _read_files(sources.events, None, sources.columns, champion, schema)
        parts.append(events)
        items.append(described)
    if sources.store is not None:
        from recsys.serving.stores import open_store

        with closing(open_store(sources.store)) as store:
            typed = bool(before.behaviours)
            since = int(before.interactions.timestamp.max(initial=0))
            parts.append(_stored_events(store, since, sources.not_history, typed=typed))
            items.append(_live_items(store, bundle, schema))
            erased = store.erased(_users(before, *parts))
    events = pa.concat_tables(parts)
    if sources.items is not None:
        with tempfile.TemporaryDirectory() as folder:  # the reader recognises items by events
            file = Path(folder) / "events.parquet"
            ids = before.interactions
            old = pa.table(
                {
                    "user": ids.user_ids[ids.user],
                    "item": ids.item_ids[ids.item],
                    "timestamp": ids.timestamp,
                }
            )
            pq.write_table(pa.concat_tables([old, events.select(old.column_names)]), file)
            columns = {**sources.columns, **OWN_COLUMNS}
            found = _read_files(file, sources.items, columns, champion, schema, time_unit="s")
            items.append(found[1])
    events = events.filter(pc.invert(_gone(events, erased)))
    described = growth.stacked(items)
    rows = {item_id: row for row, item_id in enumerate(described["item_id"].to_pylist())}
    described = described.take(pa.array(list(rows.values()), pa.int64()))
    return events, described, growth.Erased.of(before, erased)


def _erased_since(version: Workspace, champion: Workspace, sources: Sources) -> int:
    """Number of users who were erased from the store after the events of a version were taken.

    Only those count of whom the version's data have something.
    """
    from recsys.serving.stores import open_store

    if sources.store is None:
        return 0
    before = Dataset.load(champion.dataset)
    events, left_out = growth.read(version.path(growth.KIND))
    with closing(open_store(sources.store)) as store:
        erased = store.erased(_users(before, events))
    places = growth.Erased.of(before, erased)
    users = np.setdiff1d(places.users, left_out.users)
    rows = np.setdiff1d(places.dislikes, left_out.dislikes)
    found = {*events.filter(_gone(events, erased))["user"].to_pylist()}
    found.update(before.interactions.user_ids[users].tolist())
    if before.disliked is not None:
        found.update(before.disliked.table["user_id"].take(pa.array(rows)).to_pylist())
    return len(found)


def _users(before: Dataset, *events: pa.Table) -> set[str]:
    """The ids of all users of a data set and of events."""
    users = {*before.interactions.user_ids.tolist()}
    users.update(*(part["user"].unique().to_pylist() for part in events))
    if before.disliked is not None:
        users.update(before.disliked.table["user_id"].to_pylist())
    return users


def _gone(events: pa.Table, erased: Mapping[str, int]) -> pa.ChunkedArray:
    """Whether each event is not newer than the erasure of its user (unix milliseconds)."""
    users = pa.array(list(erased), pa.string())
    times = pa.array(list(erased.values()), pa.int64())
    until = times.take(pc.index_in(events["user"], value_set=users).combine_chunks())
    return pc.fill_null(pc.less_equal(pc.multiply(events["timestamp"], 1000), until), False)


def _stored_events(
    store: Store, since: int, not_history: tuple[str, ...], *, typed: bool
) -> pa.Table:
    """The events after a time that arrived at the service, without those of its data set.

    Where the data have no types, events that are no part of a history are left out.
    """
    rows = [
        (event.user, event.item, *_seconds(event.time_ms), None, event.type if typed else None)
        for event in store.export()
        if event.seed is None
        and event.time_ms // 1000 > since
        and (typed or event.type not in not_history)
    ]
    columns = list(zip(*rows, strict=True)) or [()] * len(growth.COLUMNS)
    return pa.table([pa.array(c, f.type) for c, f in zip(columns, growth.COLUMNS, strict=True)],
                    schema=growth.COLUMNS)  # fmt: skip


def _seconds(time_ms: int) -> tuple[int, int]:
    """Unix seconds, and nanoseconds after the second."""
    second, below = divmod(time_ms, 1000)
    return second, below * 1_000_000


def _live_items(store: Store, bundle: Bundle, schema: pa.Schema) -> pa.Table:
    """The items that were added to the running service or changed there, as they are now."""
    from recsys.serving.catalog_changes import JOURNAL

    records = asyncio.run(store.journal(JOURNAL)).records
    added, rows = AddedItems(bundle.catalog), []
    for record in {record["item_id"]: record for record in records}.values():
        if record["op"] != "upsert":
            continue
        item = NewItem(*(record[name] for name in ("item_id", "title", "text", "attributes")))
        row = {**added.completed(item).attributes}
        rows.append(row | {"item_id": item.item_id, "title": item.title, "text": item.text})
    known = {field.name: field for field in (*growth.STANDING, *schema)}
    table = pa.Table.from_pylist(rows, schema=pa.schema(list(known.values())))
    return growth.conform(table, schema)


def _read_files(
    path: Path,
    items: Path | None,
    columns: Mapping[str, str | None],
    champion: Workspace,
    schema: pa.Schema,
    **other: Any,
) -> tuple[pa.Table, pa.Table]:
    """Events and described items of files, read as those of the first run but for `other`."""
    made_with = champion.manifest("dataset").config
    known = {key: made_with[key] for key in OF_DATA if key in made_with} | other
    section = {
        **known, "source": "table", "path": str(path.absolute()),
        "clean": {**known.get("clean", {}), "constant_columns": False},
        "columns": {**known.get("columns", {}), **columns},
        "items": None if items is None else str(items),
    }  # fmt: skip
    config = Settings({"data": section}).section("data", DataConfig)
    raw = READERS["table"].read(replace(config.reader(), new_items=True))
    found = in_time_order(raw).events
    if "timestamp" not in found.column_names:
        raise ConfigError(f"{path}: the events have no times, so it is not known which are new")
    events = pa.table(
        {
            "user": found["user"].cast(pa.string()),
            "item": found["item"].cast(pa.string()),
            "timestamp": found["timestamp"],
            "nanosecond": found["nanosecond"] if "nanosecond" in found.column_names
            else pa.nulls(found.num_rows, pa.int32()),
            "rating": found["rating"] if "rating" in found.column_names
            else pa.nulls(found.num_rows, pa.float32()),
            "type": pa.array(raw.behaviours, pa.string()).take(found["behaviour"])
            if "behaviour" in found.column_names
            else pa.nulls(found.num_rows, pa.string()),
        }
    )  # fmt: skip
    return events.cast(growth.COLUMNS), growth.conform(_described(raw.items), schema)


def _described(items: pa.Table) -> pa.Table:
    """The items of which more is known than the id."""
    told = pc.and_(pc.not_equal(items["title"], ""), pc.not_equal(items["title"], items["item_id"]))
    told = pc.or_(pc.fill_null(told, False), pc.fill_null(pc.not_equal(items["text"], ""), False))
    for name in items.column_names:
        if name not in (*ITEM_COLUMNS, *AVAILABILITY):
            told = pc.or_(told, items[name].is_valid())
    return items.filter(told)


# The run of a version


def _context(settings: Settings, version: Workspace, champion: Workspace) -> Context:
    """The run of a version: the parent's settings, the changes of retraining, then `settings`."""
    values: dict[str, Any] = {}
    for name, config in INHERITED.items():
        if not champion.run(name).is_dir():
            continue
        made_with = champion.manifest(name).config
        names = {f.name for f in dataclasses.fields(config)}
        values[name] = {key: value for key, value in made_with.items() if key in names}
    if "target" not in values:
        raise ArtifactError(
            f"{champion.run('target')} is not there; the settings of {champion.name} are read from "
            "the folder of its run"
        )
    values["target"].pop("base", None)  # the parent's target contains it
    made_with = champion.manifest("dataset").config
    values["data"] = {key: made_with[key] for key in OF_DATA if key in made_with}
    changes = Settings.load(CHANGES, known=SECTIONS).values
    if "sasrec" not in values:
        changes.pop("sasrec")
    for over in (changes, settings.values):
        values = _merged(values, over)
    values.pop(RECIPE, None)  # the settings that it chose are the parent's
    values |= {"name": version.name, "parent": champion.name}
    made = Settings(values, settings.given)
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


# The end


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
    _log(base, {"step": "judged", **about, "offered": offered, "reasons": list(reasons)})
    say(f"Report: {version.report / 'report.html'}")
    promoted = offered and bool(clients)
    if promoted:
        for client in reversed(clients):  # the first one is asked what the champion is
            _promote(version, champion, client)
        say(f"{CHAMPION!r} stands for {version.name}; a rollback returns to {champion.name}.")
        done("swap")
        _log_promotion(base, version)
    return Outcome(version.name, champion.name, offered, promoted, reasons, version.report)


def _promote(version: Workspace, champion: Workspace, client: Client) -> None:
    """Let the alias stand for the version; a repetition changes nothing.

    Raises:
        ConfigError: the alias was changed meanwhile.
    """
    found = client.alias(CHAMPION)
    ours = {w.manifest("bundle").digest for w in (version, champion)}
    if found.version not in ours:
        raise ConfigError(
            f"the alias {CHAMPION!r} was changed to {found.bundle} ({found.version}) meanwhile; "
            "run `recsys retrain` again"
        )
    client.set_alias(CHAMPION, version.name)


def _promoted(base: Workspace) -> list[str]:
    """The versions that were promoted, in this order."""
    return [line["version"] for line in _read_log(base) if line["step"] == "promoted"]


def _log_promotion(base: Workspace, version: Workspace) -> None:
    _log(base, {"step": "promoted", "version": version.name})


def _read_log(base: Workspace) -> list[dict[str, Any]]:
    file = base.run(LOG)
    if not file.is_file():
        return []
    lines = []
    for text in file.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue  # the last line of a process that was killed
    return lines


def _log(base: Workspace, line: dict[str, Any]) -> None:
    """Append a line to the log of a run, unless it has it."""
    if any({**old, "time": None} == {**line, "time": None} for old in _read_log(base)):
        return
    file = base.run(LOG)
    torn = file.is_file() and not file.read_bytes().endswith(b"\n")
    with file.open("a", encoding="utf-8") as stream:
        stream.write(("\n" if torn else "") + json.dumps({"time": int(time.time()), **line}) + "\n")
        stream.flush()
        os.fsync(stream.fileno())


def _remove_old(
    base: Workspace, version: Workspace, champion: Workspace, clients: Sequence[Client]
) -> None:
    """Remove data and models of old versions that no alias and no rollback needs; reports stay.

    Without a client it is not known what aliases need, and nothing is removed.
    """
    if not clients:
        return
    needed = {base.name, version.name, champion.name}
    for client in clients:
        for alias in client.aliases():
            needed |= {str(alias.bundle), str(alias.previous)}
    for number in _versions(base)[:-KEPT]:
        old = replace(base, name=f"{base.name}.{number}")
        if old.name not in needed:
            _remove(old)


def _remove_begun(base: Workspace) -> None:
    """Remove what is left of versions that were stopped while their events were written.

    It may be events of users, which nothing would remove later.
    """
    for number in _versions(base):
        version = replace(base, name=f"{base.name}.{number}")
        run = version.path(growth.KIND).parent
        made = (version.bundle, version.dataset, version.report, version.path(growth.KIND))
        if run.is_dir() and not any(path.exists() for path in made):
            _remove(version)


def _remove(version: Workspace) -> None:
    for folder in (version.bundle, version.dataset, version.home / "runs" / version.name):
        shutil.rmtree(folder, ignore_errors=True)
