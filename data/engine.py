"""Prepares the events of a source: cleans, filters, splits, counts and writes them.

Everything that needs all events at once is done by DuckDB (`recsys.data.event_table`); the rules
for histories and the splits see whole users, part by part. Memory holds a part of the rows, a few
numbers per user and item, and the catalog, so that data of any size take the same path.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recsys import dataset as datasets
from recsys import splits
from recsys.data import event_table
from recsys.data.cleaning import Rules, Split, decided_rules
from recsys.data.event_table import EventTable, connected
from recsys.data.histories import Cleaned, Facts, HistoryCleaner
from recsys.data.ids import note_alike
from recsys.data.raw import EVENT_COLUMNS, EventStream, ItemCatalog, RawData, check_items
from recsys.data.report import Report, sentence
from recsys.data.returns import is_taken_back
from recsys.dataset import AVAILABILITY, ITEM_COLUMNS
from recsys.errors import ConfigError
from recsys.interactions import Behaviour
from recsys.progress import track
from recsys.splits import LABELS, TRAIN

MEMORY_GB = 8.0
SIDES = {
    "disliked": (
        datasets.DISLIKED,
        datasets.DISLIKED_COLUMNS,
        {"timestamp": "BIGINT", "stands": "BOOLEAN"},
    ),
    "pieces": (datasets.PIECES, datasets.PIECES_COLUMNS, {"pieces": "FLOAT"}),
}
"""Tables beside the events: file, columns, and types of those in DuckDB besides the ids."""


class Written(NamedTuple):
    """What was written.

    Attributes:
        stats: as from `statistics`.
        decisions: the count of each decision that was taken; zero counts are omitted.
        split: the kind of split that was used.
    """

    stats: dict[str, Any]
    decisions: dict[str, int]
    split: Split


class Prepared(NamedTuple):
    """A data set in memory with what was `Written`, and the report of a source that was cleaned."""

    dataset: datasets.Dataset
    stats: dict[str, Any]
    decisions: dict[str, int]
    split: Split
    report: Report | None = None


def collect(source: EventStream, rules: Rules) -> Prepared:
    """Prepare a source as `prepare` does, and read the data set into memory."""
    with tempfile.TemporaryDirectory(prefix="recsys-data-") as folder:
        written = prepare(source, rules, Path(folder), MEMORY_GB)
        dataset = datasets.Dataset.read(Path(folder))
    return Prepared(dataset, *written, source.report)


def in_time_order(raw: RawData) -> pa.Table:
    """The events of an export by user, then time, with `user_id` and `item_id`."""
    with (
        tempfile.TemporaryDirectory(prefix="recsys-data-") as folder,
        connected(Path(folder), MEMORY_GB) as connection,
    ):
        events = EventTable(connection, [raw.events])
        _sort(events, raw.behaviours, raw.report or Report())
        others = [name for name in EVENT_COLUMNS if name in events.columns][2:]
        return events.with_ids("events", others).read_all()


def prepare(source: EventStream, rules: Rules, folder: Path, memory_gb: float) -> Written:
    """Write the data set of a source into `folder` (an artifact being written).

    Args:
        source: its events are read once.
        rules: how rows are filtered and split.
        folder: gets the files of a data set (`recsys.dataset`), with more than one file of events
            if there are many; temporary files are written here too.
        memory_gb: memory limit of the process, in GiB.

    Raises:
        ConfigError: a rule that cannot be applied to this source.
        DataError: a malformed source, or no rows are left.
    """
    with connected(folder / "spilled", memory_gb) as connection:
        events = EventTable(connection, source.events)
        if source.report is not None:
            for role, ids in (("user", events.users), ("item", events.items)):
                note_alike(role, ids, source.report)
        catalog = source.read_items(pa.table({"item": events.items}))
        check_items(events.items, catalog.items, catalog.codes)
        if rules.min_rating is not None and "rating" not in events.columns:
            raise ConfigError(sentence("no_ratings", least=rules.min_rating))
        behaviours = _histories(events, source, rules, folder)
        if rules.min_rating is not None:
            events.drop_ratings_below(rules.min_rating)
        if rules.k_core:
            events.k_core(rules.k_core)
            known = events.items.filter(pa.array(events.events_of("item") > 0))
            stays = pc.is_in(catalog.items["item_id"], value_set=known)
            counts = {"items_outside_core_dropped": pc.sum(pc.invert(stays)).as_py() or 0}
            codes = None if catalog.codes is None else catalog.codes[stays.to_numpy()]
            catalog = ItemCatalog(catalog.items.filter(stays), codes, catalog.counts | counts)
        return _Writer(events, catalog, source, rules, behaviours).write(folder)


def _histories(
    events: EventTable, source: EventStream, rules: Rules, folder: Path
) -> tuple[Behaviour, ...]:
    """Sort the events and drop duplicates; apply the rules for whole histories to exports.

    Returns:
        the types of events that are left.
    """
    report = source.report
    if report is None:
        events.sort()
        events.drop_duplicates(rules.duplicates)
        events.check("duplicate_rows_dropped")
        return ()
    report.rows = report.rows or events.rows
    _sort(events, source.behaviours, report)
    names = source.behaviours
    of_types = events.of_types(len(names))
    facts = Facts(events.users, events.events_of("user"), *of_types, events.ratings())
    cleaner = HistoryCleaner(facts, rules.clean, names, rules.roles, report)
    for rule, users in cleaner.unwanted.items():
        if users.any():
            items = events.drop_users(np.flatnonzero(users))
            report.removed[rule].items = set(items.tolist())
    events.check("events_of_bots_dropped")
    before = events.rows
    events.drop_duplicates(rules.duplicates)
    report.remove("duplicate_rows_dropped", before - events.rows, items=None)
    for rule in ("pieces_of_equal_rows_added", "pieces_of_equal_rows_dropped"):
        report.add(rule, events.counts.pop(rule, 0))
    report.add("events_at_the_same_time", events.ties)
    for name, (_, _, kinds) in SIDES.items():
        events.create(name, user="INTEGER", item="INTEGER", **kinds)
    columns = events.columns - {"behaviour", "quantity"}
    columns |= {"behaviour"} if cleaner.behaviours else set()
    events.replace(_cleaned(events, cleaner), columns)
    report.check_removed(events.users, rules.clean.most_removed, decided_rules(rules))
    events.check("negative_events_dropped")
    for name, (file, schema, _) in SIDES.items():
        if events.value(f"SELECT count(*) FROM {name}"):  # noqa: S608
            with pq.ParquetWriter(folder / file, schema) as writer:
                for batch in events.with_ids(name, schema.names[2:]):
                    writer.write_table(pa.Table.from_batches([batch]).cast(schema))
    return cleaner.behaviours


def _sort(events: EventTable, types: Sequence[str], report: Report) -> None:
    """Sort the events of an export, which may be newest first; returns come last of one time."""
    turned = events.newest_first
    last = [number for number, name in enumerate(types) if is_taken_back(name)]
    events.sort(turned=turned, last=last)
    if turned and events.ties:
        report.note(sentence("newest_first"))


def _cleaned(events: EventTable, cleaner: HistoryCleaner) -> Iterator[dict[str, NDArray[Any]]]:
    """The rows that are kept, part by part; disliked items and pieces go to their tables."""
    for part in events.parts():
        cleaned: Cleaned = cleaner.clean(part)
        events.insert("disliked", pa.table(cleaned.disliked))
        events.insert("pieces", pa.table(cleaned.pieces))
        yield {name: values[cleaned.keep] for name, values in cleaned.columns.items()}


@dataclass
class _Writer:
    """Splits and writes events that are cleaned and filtered."""

    events: EventTable
    catalog: ItemCatalog
    source: EventStream
    rules: Rules
    behaviours: tuple[Behaviour, ...]

    def __post_init__(self) -> None:
        self.has_time = "timestamp" in self.events.columns
        self.is_target = np.array([b.role == "target" for b in self.behaviours] or [True])

    def write(self, folder: Path) -> Written:
        """Write the files of the data set."""
        left = self.events.events_of("user")
        ids = self.catalog.items["item_id"].combine_chunks()
        user_numbers = (np.cumsum(left > 0) - 1).astype(np.int32)
        item_numbers = np.asarray(
            pc.fill_null(pc.index_in(self.events.items, value_set=ids), -1), np.int32
        )
        split, dates = self._split()
        baskets = self._in_baskets()
        several = self.events.rows > event_table.PART_ROWS
        with track("writing events", self.events.rows) as bar:
            for number, columns in enumerate(self.events.parts()):
                columns["user"] = user_numbers[columns["user"]]
                columns["item"] = item_numbers[columns["item"]]
                part = self._events(columns, split, dates, baskets)
                datasets.write_events(
                    folder,
                    part,
                    has_time=self.has_time,
                    behaviours=self.behaviours,
                    sessions=self.source.sessions,
                    baskets=baskets,
                    part=number if several else None,
                )
                bar.advance(len(part.user))
        users = self.events.users.filter(pa.array(left > 0))
        datasets.write_catalog(folder, users, self.catalog.items, self.catalog.codes)
        files = [str(file) for file in datasets.event_files(folder)]
        stats = statistics(
            self.events.table,
            f"read_parquet({files})",
            users=len(users),
            items=self.catalog.items,
            codes=self.catalog.codes,
            has_time=self.has_time,
        )
        return Written(stats, self._decisions(stats), split)

    def _decisions(self, stats: dict[str, Any]) -> dict[str, int]:
        """The counts of the reader, the rules and the report, which is finished."""
        counts = Counter(self.source.counts) | self.catalog.counts | self.events.counts
        report = self.source.report
        if report is not None:
            report.finish(counts, stats["interactions"], stats["items_with_events"])
        every = dict(counts) | (report.counts if report else {})
        return {name: count for name, count in every.items() if count}

    def _split(self) -> tuple[Split, tuple[int, int] | None]:
        """The kind of the split, and of one by time the times of validation and test.

        By default it is the split of the source; else by time for an export with enough users to
        ask; else leave-one-out.
        """
        split, report = self.rules.split, self.source.report
        if split is None and "split" in self.events.columns:
            return "own", None
        if split == "own" and "split" not in self.events.columns:
            raise ConfigError("data.split: this source has no split of its own")
        if split == "global-temporal":
            return split, self._dates()
        if split is not None or report is None or not self.has_time:
            return split or "leave-one-out", None
        dates, sessions = self._dates(), self.source.sessions
        asked = np.zeros(2, np.int64)
        for columns in self.events.parts():
            user, target = columns["user"], self._targets(columns)
            target &= ~splits.starts_session(user, sessions)
            asked += splits.users_to_ask(
                user, splits.label_times(columns["timestamp"], dates), target
            )
        if asked.min() < splits.ENOUGH_USERS:
            report.note(sentence("too_few", asked=asked, least=splits.ENOUGH_USERS))
            return "leave-one-out", None
        valid, test = (
            datetime.fromtimestamp(date, UTC).strftime("%Y-%m-%d %H:%M") for date in dates
        )
        whole = "Each session is asked for items after its first event. " if sessions else ""
        report.note(sentence("by_time", valid=valid, test=test, asked=asked, whole=whole))
        return "global-temporal", dates

    def _dates(self) -> tuple[int, int]:
        """The times at which validation and test begin."""
        if not self.has_time:
            raise ConfigError(sentence("split_without_times"))
        try:
            dates = self.rules.dates or splits.dates_of_shares(
                self.events.times(), self.rules.ratio
            )
            splits.label_times(np.zeros(0, np.int64), dates)  # checks their order
        except ValueError as error:
            raise ConfigError(f"data.split: {error}") from error
        return dates

    def _in_baskets(self) -> bool:
        """Whether events come in baskets, which a report of the source then says."""
        report = self.source.report
        if report is None or not self.has_time:
            return False
        tied = 0
        for columns in self.events.parts():
            tied += splits.tied_events(
                columns["user"], columns["timestamp"], columns.get("nanosecond")
            )
        baskets = 0 < splits.BASKETS * self.events.rows <= tied
        if baskets:
            report.note(sentence("in_baskets", share=tied / self.events.rows))
        return baskets

    def _targets(self, columns: dict[str, NDArray[Any]]) -> NDArray[np.bool_]:
        """(n,) whether each event is a target."""
        if not self.behaviours:
            return np.ones(len(columns["user"]), bool)
        return np.asarray(self.is_target[columns["behaviour"]])

    def _events(
        self,
        columns: dict[str, NDArray[Any]],
        split: Split,
        dates: tuple[int, int] | None,
        baskets: bool,
    ) -> datasets.Events:
        """Events of whole users with their labels; with baskets, those of one time count as one."""
        user = columns["user"]
        nanosecond, behaviour = columns.get("nanosecond"), columns.get("behaviour")
        if self.has_time:
            timestamp = columns["timestamp"]
        else:
            timestamp = np.arange(len(user)) - np.searchsorted(user, user)
        if split == "own":
            labels = columns["split"]
        elif dates is not None:
            labels = splits.label_times(timestamp, dates)
        elif self.behaviours:
            labels = splits.label_last_targets(user, self._targets(columns))
        elif baskets and not self.source.sessions:
            labels = splits.label_baskets(user, timestamp, nanosecond)
        else:
            labels = splits.label_ends(user)
        rating = columns.get("rating", np.full(len(user), np.nan, np.float32))
        return datasets.Events(
            user, columns["item"], timestamp, rating, labels, behaviour, nanosecond
        )


QUANTILES = {"min": 0, "p25": 0.25, "median": 0.5, "p75": 0.75, "p95": 0.95, "max": 1}
PARTS = """
    SELECT
        split, count(*) AS interactions, count(DISTINCT "user") AS users,
        count(DISTINCT item) AS items,
        count(*) FILTER (item NOT IN (SELECT item FROM {events} WHERE split = {train})) AS cold
    FROM {events} GROUP BY split
"""
OF_USERS = """
    SELECT sum(events) AS events, count(*) AS items FROM (
        SELECT "user", item, count(*) AS events FROM {events} GROUP BY ALL
    ) GROUP BY "user"
"""


def statistics(
    run: Callable[[str], pa.Table],
    events: str,
    *,
    users: int,
    items: pa.Table,
    codes: NDArray[np.int32] | None,
    has_time: bool,
) -> dict[str, Any]:
    """The statistics of a data set, as JSON values.

    `cold` is the share of events on items without training events, which a model of ids alone
    cannot recommend. The table `events` is one of DuckDB, of which `run` answers a query.
    """
    parts = {
        row.pop("split"): row for row in run(PARTS.format(events=events, train=TRAIN)).to_pylist()
    }
    of_users = run(OF_USERS.format(events=events))
    lengths, distinct = (np.asarray(of_users[name], np.int64) for name in ("events", "items"))
    total = int(lengths.sum())
    quantiles = np.quantile(lengths if total else [0], [*QUANTILES.values()])
    splits = {}
    for name, label in LABELS.items():
        part = parts.get(label, dict.fromkeys(("interactions", "users", "items", "cold"), 0))
        splits[name] = part | {"cold": part["cold"] / max(part["interactions"], 1)}
    titled = pc.not_equal(items["title"], items["item_id"])
    worded = pc.or_(titled, pc.not_equal(items["text"], ""))
    with_events = run(f"SELECT count(DISTINCT item) AS items FROM {events}")["items"][0]  # noqa: S608
    return {
        "users": users,
        "items": items.num_rows,
        "items_with_events": with_events.as_py(),
        "interactions": total,
        "density": total / (users * items.num_rows) if users and items.num_rows else 0.0,
        "length": {
            "mean": float(lengths.mean()) if total else 0.0,
            **dict(zip(QUANTILES, quantiles.tolist(), strict=True)),
        },
        "repeats": total - int(distinct.sum()),
        "has_time": has_time,
        "text_coverage": float(pc.mean(worded).as_py() or 0.0),
        "attributes": {
            name: str(items[name].type)
            for name in items.column_names
            if name not in (*ITEM_COLUMNS, *AVAILABILITY)
        },
        "imported_codes": None if codes is None else list(codes.shape),
        "splits": splits,
    }
