"""What is new since a bundle was made: events and items of the service's store and of files."""

from __future__ import annotations

import asyncio
import re
import tempfile
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from rich.markup import escape

from recsys.artifacts import Workspace, write_artifact
from recsys.bundle import Bundle
from recsys.config import Settings, fields_of
from recsys.data import growth
from recsys.data.cleaning import CleanConfig
from recsys.data.column_words import EVENT_FIELDS, EVENT_WORDS, ITEM_WORDS
from recsys.data.engine import in_time_order
from recsys.data.files import NoRowsError
from recsys.data.ids import refuse_lost_zeros
from recsys.data.prepare import DataConfig
from recsys.data.readers import READERS
from recsys.data.report import sentence
from recsys.data.sample import NO_COLUMN
from recsys.data.texts import examples
from recsys.dataset import AVAILABILITY, ITEM_COLUMNS, Dataset
from recsys.errors import ArtifactError, ConfigError, DataError, ItemError
from recsys.event_names import is_denied, level
from recsys.interactions import Interactions
from recsys.live_catalog import AddedItems, NewItem
from recsys.placement import table_of
from recsys.progress import say
from recsys.splits import TRAIN

if TYPE_CHECKING:  # imported where they are used
    from recsys.serving.stores.records import StoredEvent
    from recsys.serving.stores.store import Store

LEAST_IDS, MOST_UNKNOWN = 10, 0.9  # fewer ids show nothing; a larger share is asked about
DEVIATIONS, DAY = 4, 86_400  # a chance below 1 in 10,000; seconds between two visits
FEW_ROWS = 30  # a file with fewer is not refused for the share that a rule removes, only told
VALIDATION = 500  # least events of validation, if the parent has not been trained on them
OWN_COLUMNS = {"events": {"user": "user", "item": "item", "timestamp": "timestamp"}}
"""Columns of the events that are written here, beside which a file of items is read."""
SOURCE = frozenset(
    ["source", "path", "attributes", "items", "index", "min_rating", "k_core",
     "split", "ratio", "dates", "synthetic", "memory_gb"]
)  # fmt: skip
OF_DATA = tuple(one.name for one in fields(DataConfig) if one.name not in SOURCE)
"""Settings of the section `data` that hold for new files as well: the form of the files."""
KINDS = "|".join((*EVENT_WORDS, *EVENT_FIELDS, *ITEM_WORDS, "nanosecond", "millisecond"))
ROLE = re.compile(rf"({KINDS})( \d+)?|clock half|(taken_back|order_status) .+")  # that is known
COUNTS = ("quantity", "taken_back", "order_status")  # roles by which events have pieces
SENT = "file-"  # begins the ids of events that were sent to the service from a file


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
        form: settings of the section `data` that hold for these files instead of the parent's, such
            as `day_first`.
    """

    store: str | Path | None = None
    not_history: tuple[str, ...] = ()
    events: Path | None = None
    items: Path | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    form: Mapping[str, Any] = field(default_factory=dict)


def take(
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
    say_taken_back(events, before, champion.name)
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
    last = pc.max(events["timestamp"]).as_py()
    if last is None or (newest is not None and last <= newest):
        return f"Nothing is new since {champion.name if newest is None else 'the last version'}."
    negative = growth.is_negative(events["type"], roles_of(champion, before))
    # Returns are no targets, and may be the newest events; without others, nothing is compared.
    asked = events.filter(pc.invert(negative)) if not pc.all(negative).as_py() else events
    times = np.sort(asked["timestamp"].to_numpy())
    test = int(times[int(len(times) * (1 - window))])
    info = {
        "events": events.num_rows,
        "items": items.num_rows,
        "newest": last,
        "dates": [_validation_start(before, times, test, window), test],
    }
    parents = {"bundle": bundle.manifest.digest, "dataset": digest}
    path = version.path(growth.KIND)
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_artifact(path, growth.KIND, parents=parents, info=info) as folder:
        growth.write(folder, events, items, erased)
    say(f"{version.name}: {events.num_rows} new events since {champion.name}")
    return None


def roles_of(run: Workspace, dataset: Dataset) -> Mapping[str, str]:
    """Name of a type of events -> role, of a run's data set and its settings."""
    roles: dict[str, str] = {b.name: b.role for b in dataset.behaviours}
    return roles | (run.manifest("dataset").config.get("behaviours") or {})


def say_taken_back(events: pa.Table, before: Dataset, name: str) -> None:
    """Say how many purchases of a run `name` with the data `before` are returned in a newer file.

    A state such as `refunded` is in the row of the order, so that such a return is not new.
    """
    negative = growth.is_negative(events["type"], {})
    rows = events.filter(pc.and_(negative, pc.equal(events["quantity"], 0)))
    old = before.interactions
    keys = [rows[column].to_numpy() for column in ("user", "item", "timestamp")]
    mine = np.isin(old.timestamp, keys[2])
    users, items = old.user_ids[old.user[mine]], before.item_ids[old.item[mine]]
    bought = [users, items, old.timestamp[mine]]
    count = pd.MultiIndex.from_arrays(keys).isin(pd.MultiIndex.from_arrays(bought)).sum()
    if count:
        say(
            f"[bold yellow]data[/bold yellow]: {count} purchases in the data of {name} are "
            "returned or refunded in this file, in the row of the order; they stay purchases until "
            f"you run again with all events: recsys run EVENTS --name {name} --force"
        )


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
    latest = both[-VALIDATION:]
    return min(start, int(latest[0])) if len(latest) else start


def _read(
    sources: Sources, champion: Workspace, bundle: Bundle, before: Dataset
) -> tuple[pa.Table, pa.Table, growth.Erased]:
    """Events, new and old, described items, and what of `before` was erased since."""
    schema = before.items.schema.remove_metadata()
    parts = [growth.COLUMNS.empty_table()]
    items = [live := schema.empty_table()]
    erased: dict[str, int] = {}
    mapping = (champion.manifest("dataset").info.get("cleaning") or {}).get("mapping") or None
    if sources.events is not None:
        of_file, described = _read_files(
            sources.events, None, sources.columns, champion, schema, mapping, **sources.form
        )
        parts.append(of_file)
        # Events describe only what nothing else does: they have a few fields of an item.
        known = pc.is_in(described["item_id"], value_set=pa.array(before.item_ids.tolist()))
        items.append(described.filter(pc.invert(known)))
    if sources.store is not None:
        from recsys.serving.stores import open_store

        with closing(open_store(sources.store)) as store:
            since = int(before.interactions.timestamp.max(initial=0))
            counted = not {*COUNTS}.isdisjoint((mapping or {}).get("events", ()))
            parts.append(_stored_events(store, since, sources.not_history, before, counted=counted))
            items.append(live := _live_items(store, bundle, schema))
            erased = store.history.erased(_users(before, *parts))
    if sources.events is not None:
        most = (sources.form.get("clean") or {}).get("most_removed", 0)
        refuse_unknown(of_file, before.interactions, live["item_id"], sources.events, most)
    events = _once(pa.concat_tables(parts))
    if sources.items is not None:
        with tempfile.TemporaryDirectory() as folder:  # the reader recognises items by events
            file = Path(folder) / "events.parquet"
            names = [*OWN_COLUMNS["events"]]
            old = growth.old_events(
                before, growth.Erased.of(before, ()), typed=False, counted=False
            )
            as_written: dict[str, Any] = {"time_unit": "s", "column_names": ()}
            pq.write_table(pa.concat_tables([old.select(names), events.select(names)]), file)
            own = OWN_COLUMNS | {"day_first": None, "items": (mapping or {}).get("items")}
            columns = {n: c for n, c in sources.columns.items() if n not in EVENT_WORDS}
            news = _read_files(file, sources.items, columns, champion, schema, own, **as_written)
            items.append(news[1])
    events = events.filter(pc.invert(gone(events, erased)))
    return events, growth.stacked(items), growth.Erased.of(before, erased)


def refuse_unknown(
    new: pa.Table, old: Interactions, items: pa.ChunkedArray, path: Path, most: float
) -> None:
    """Refuse events of a file whose items or users are nearly all unknown, though others were not.

    Their ids have another form, or stand in another column. How many are usually known is counted
    in as many of the newest `old` events: all customers, or all used goods, may be new. Further
    known `items` are those of the service; a share of unknown ids up to `most` is let through.

    Raises:
        DataError: the message has ids of both; or ids differ in nothing but zeros at their start.
    """
    for role, ids, rows, gap in (
        ("user", old.user_ids, old.user, DAY),  # lines of an order are one visit
        ("item", old.item_ids, old.item, 0),
    ):
        found, ours = pc.unique(new[role].combine_chunks()), pa.array(ids.tolist(), pa.string())
        refuse_lost_zeros(role, found, ours, path)
        unknown = found.filter(pc.invert(pc.is_in(found, value_set=ours)))
        if role == "item":
            unknown = unknown.filter(pc.invert(pc.is_in(unknown, value_set=items)))
        count, known = len(found), len(found) - len(unknown)
        if count < LEAST_IDS or len(unknown) <= max(MOST_UNKNOWN, most) * count:
            continue
        start = np.sort(old.timestamp)[-max(1, min(new.num_rows, len(old) // 2))]
        first = np.full(len(ids), np.iinfo(np.int64).max)
        np.minimum.at(first, rows, old.timestamp)
        usual = float(np.mean(first[np.unique(rows[old.timestamp >= start])] < start - gap))
        if known < usual * count - DEVIATIONS * (usual * (1 - usual) * count) ** 0.5:
            shown = {"theirs": examples(unknown), "ours": examples(ours)}
            said = {"unknown": len(unknown), "count": count, "usual": usual, **shown}
            raise DataError(sentence("other_ids", path=path, role=role, **said))


def erased_since(version: Workspace, champion: Workspace, sources: Sources) -> int:
    """Number of users who were erased from the store after the events of a version were taken.

    Only those count of whom the version's data have something.
    """
    from recsys.serving.stores import open_store

    if sources.store is None:
        return 0
    before = Dataset.load(champion.dataset)
    events, left_out = growth.read(version.path(growth.KIND))
    with closing(open_store(sources.store)) as store:
        erased = store.history.erased(_users(before, events))
    positions = growth.Erased.of(before, erased)
    users = np.setdiff1d(positions.users, left_out.users)
    rows = np.setdiff1d(positions.dislikes, left_out.dislikes)
    gone_users = {*events.filter(gone(events, erased))["user"].to_pylist()}
    gone_users.update(before.interactions.user_ids[users].tolist())
    if before.disliked is not None:
        gone_users.update(before.disliked.table["user_id"].take(pa.array(rows)).to_pylist())
    return len(gone_users)


def _users(before: Dataset, *events: pa.Table) -> set[str]:
    """The ids of all users of a data set and of events."""
    users = {*before.interactions.user_ids.tolist()}
    users.update(*(part["user"].unique().to_pylist() for part in events))
    if before.disliked is not None:
        users.update(before.disliked.table["user_id"].to_pylist())
    return users


def gone(events: pa.Table, erased: Mapping[str, int]) -> pa.ChunkedArray:
    """Whether each event is not newer than the erasure of its user (unix milliseconds)."""
    users = pa.array(list(erased), pa.string())
    times = pa.array(list(erased.values()), pa.int64())
    until = times.take(pc.index_in(events["user"], value_set=users).combine_chunks())
    return pc.fill_null(pc.less_equal(pc.multiply(events["timestamp"], 1000), until), False)


def _once(events: pa.Table) -> pa.Table:
    """Events without the store's copy of those of the file that were sent to it before."""
    has = events["stored"].to_numpy(zero_copy_only=False)
    keys = pd.MultiIndex.from_arrays([events[n].to_numpy() for n in ("user", "item", "timestamp")])
    known = pa.array(has | keys.isin(keys[has]))
    events = events.set_column(events.column_names.index("stored"), "stored", known)
    return events.filter(pa.array(~(has & keys.isin(keys[~has]))))


def _stored_events(
    store: Store, since: int, not_history: tuple[str, ...], before: Dataset, *, counted: bool
) -> pa.Table:
    """The events after a time that arrived at the service, without those of its data set.

    Where the data have no types, events that are no part of a history are left out, unless they
    take back a purchase or are dislikes. The value of an event that was sent from a file is its
    pieces if the files are `counted`, and its rating otherwise.
    """
    names = {b.name.lower(): b.name for b in before.behaviours}  # the service has lower case
    rows = []
    for event in store.history.export():
        if event.seed is not None or event.time_ms // 1000 <= since:
            continue
        kind = _kind(event, not_history, names)
        if kind is not None:
            value = event.value if (event.event_id or "").startswith(SENT) else None
            rating, pieces = (None, value) if counted else (value, None)
            at, below = divmod(event.time_ms, 1000)
            moment = at, below * 1_000_000  # seconds, and nanoseconds after the second
            rows.append((event.user, event.item, *moment, rating, kind or None, pieces, None, True))
    columns = list(zip(*rows, strict=True)) or [()] * len(growth.COLUMNS)
    return pa.table([pa.array(c, f.type) for c, f in zip(columns, growth.COLUMNS, strict=True)],
                    schema=growth.COLUMNS)  # fmt: skip


def _kind(event: StoredEvent, not_history: tuple[str, ...], names: Mapping[str, str]) -> str | None:
    """The type of an event among those of the data, "" where these have none; None for no event.

    `names` are the data's types by their names in lower case.
    """
    from recsys.serving.stores.records import DISLIKES, Sign, sign_of

    sign = sign_of(event.type, not_history)
    if sign is Sign.DISLIKE:
        return DISLIKES[0]
    silent = sign is Sign.LEFT_OUT and level(event.type) != 0
    if silent and (not names or is_denied(event.type)):
        return None
    if sign is Sign.PART and not names:
        return ""
    return names.get(event.type, event.type)


def _live_items(store: Store, bundle: Bundle, schema: pa.Schema) -> pa.Table:
    """The items that were added to the running service or changed there, as they are now."""
    from recsys.serving.catalog_changes import JOURNAL

    place = 0
    last: dict[str, dict[str, Any]] = {}
    while page := asyncio.run(store.journal.read(JOURNAL, place)):
        last |= {record["item_id"]: record for _, record in page}
        place = page[-1][0]
    added = AddedItems(bundle.catalog)
    of_items = pa.schema(
        list({field.name: field for field in (*growth.STANDING, *schema)}.values())
    )
    tables = [of_items.empty_table()]
    for record in (one for one in last.values() if one["op"] == "upsert"):
        item = NewItem(*(record[name] for name in ("item_id", "title", "text", "attributes")))
        try:
            tables.append(table_of([added.completed(item)], of_items, ()))
        except ItemError as error:
            say(escape(f"{error}; the service leaves it out, too"))
    return growth.conform(pa.concat_tables(tables).combine_chunks(), schema)


def settings_of_data(champion: Workspace) -> dict[str, Any]:
    """The settings `OF_DATA` with which the data set of a run was prepared.

    Raises:
        ArtifactError: an earlier version of this program prepared it.
    """
    manifest = champion.manifest("dataset")
    made_with, mapping = manifest.config, (manifest.info.get("cleaning") or {}).get("mapping") or {}
    unknown = {*made_with.get("clean", {})} - fields_of(CleanConfig).keys()
    roles = [role for file in ("events", "items") for role in mapping.get(file) or ()]
    unknown |= {f"the role {role!r}" for role in roles if not ROLE.fullmatch(role)}
    if unknown:
        raise ArtifactError(
            f"{champion.dataset}: an earlier version of recsys prepared this data set, with rules "
            f"of cleaning or roles of columns in another form ({min(unknown)}); run from the "
            f"beginning with all events: recsys run EVENTS --name {champion.name} --force"
        )
    return {key: made_with[key] for key in OF_DATA if key in made_with}


def _read_files(
    path: Path,
    items: Path | None,
    columns: Mapping[str, str | None],
    champion: Workspace,
    schema: pa.Schema,
    mapping: Mapping[str, Any] | None,
    **other: Any,
) -> tuple[pa.Table, pa.Table]:
    """Events and described items of files, read as those of the first run but for `other`.

    The columns are those of the `mapping` of the first run, and nothing is guessed anew.
    """
    known = settings_of_data(champion)
    columns = {**other.pop("columns", {}), **columns}
    for key in other.keys() & {*OF_DATA}:
        is_section = isinstance(other[key], dict)
        known[key] = {**known.get(key, {}), **other[key]} if is_section else other[key]
    named = known.get("columns", {})
    if mapping is not None:
        of_items = {*ITEM_WORDS} - {*(mapping.get("items") or ())}
        named = {n: c for n, c in named.items() if c == NO_COLUMN or n in of_items}
    clean = known.get("clean", {})
    skip = clean.get("skip", ())
    skip = [skip] if isinstance(skip, str) else skip  # as it is given with --set
    section = {
        **known, "source": "table", "path": str(path.absolute()),
        "clean": {**clean, "skip": [*skip, "constant_columns"]},
        "columns": {**named, **columns},
        "items": None if items is None else str(items),
    }  # fmt: skip
    config = Settings({"data": section}).section("data", DataConfig)
    reader = replace(config.reader(), new_items=True, mapping=mapping)
    try:
        raw = READERS["table"].read(reader).gather()
    except NoRowsError as error:  # as of a day without orders; another first line is no such file
        needed = {**(mapping or {}).get("events", {}), **columns}
        names = {str(needed.get(role)).lower() for role in OWN_COLUMNS["events"]}
        is_other = error.names and not names <= {name.lower() for name in error.names}
        if is_other or error.rows >= FEW_ROWS or items is not None:  # it may be the file of items
            raise
        say(f"{escape(str(error))}. So it has no new event.")
        return growth.COLUMNS.empty_table(), schema.empty_table()
    if raw.report is not None and items is None:  # else these are the events of `OWN_COLUMNS`
        say(f"{escape(path.name)}: {raw.report.rows_in_words()}")
        if raw.report.rows >= FEW_ROWS:
            raw.report.check_removed(pc.unique(raw.events["user"]), config.clean.most_removed)
    ordered = in_time_order(raw)
    if "timestamp" not in ordered.column_names:
        raise ConfigError(f"{path}: the events have no times, so it is not known which are new")
    events = ordered.rename_columns({"user_id": "user", "item_id": "item"})
    if "behaviour" in events.column_names:
        types = pa.array(raw.behaviours, pa.string()).take(events["behaviour"])
        events = events.append_column("type", types)
    events = events.append_column("stored", pa.array(np.zeros(len(events), np.bool_)))
    return growth.new_events(events), growth.conform(_described(raw.items), schema)


def _described(items: pa.Table) -> pa.Table:
    """The items of which more is known than the id."""
    more = [
        pc.and_(*(pc.not_equal(items["title"], no) for no in ("", items["item_id"]))),
        pc.not_equal(items["text"], ""),
    ]
    others = (name for name in items.column_names if name not in (*ITEM_COLUMNS, *AVAILABILITY))
    more += [items[name].is_valid() for name in others]
    return items.filter(reduce(pc.or_, (pc.fill_null(mask, False) for mask in more)))
