"""Prepares data that do not fit in memory: applies the rules of `recsys.data.memory` part by part.

Rows arrive numbered and sorted from `recsys.data.shuffle`. The filters of `recsys.data.filtering`
process whole users. Memory holds a part of the rows, a few numbers per user and item, the
catalog, and one byte per row that says whether the row is kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from recsys.data import filtering
from recsys.data.histories import Facts, HistoryCleaner, disliked_table, pieces_table
from recsys.data.raw import EventStream, RawData, events_table
from recsys.data.rules import Rules, Split, by_time, decided_rules, in_baskets, too_few
from recsys.data.shuffle import shuffle
from recsys.data.stats import Tally
from recsys.dataset import (
    DISLIKED,
    DISLIKED_COLUMNS,
    PIECES,
    PIECES_COLUMNS,
    Events,
    write_catalog,
    write_events,
)
from recsys.errors import ConfigError
from recsys.progress import track
from recsys.splits import (
    ENOUGH_USERS,
    dates_of_shares,
    label_baskets,
    label_ends,
    label_last_targets,
    label_times,
    starts_session,
    tied_events,
    users_to_ask,
)

PART_ROWS = 1 << 22  # rows of an output part before filtering; a long user may exceed it
TIES = "ties"  # events of a user at one time
REPEATED = "repeated"  # rows that the policy for duplicates drops
ADDED = "pieces_of_equal_rows_added"
BLOCK_ROWS = 1 << 22  # rows read at a time where users may be divided


@dataclass
class _Rows:
    """Columns of rows on disk, one file per column; first all rows are appended, then read.

    Attributes:
        folder: of the files.
        kinds: type of each column.
        count: rows so far.
    """

    folder: Path
    kinds: dict[str, Any] = field(default_factory=dict)
    count: int = 0

    def append(self, columns: dict[str, NDArray[Any]]) -> None:
        for name, values in columns.items():
            self.kinds[name] = values.dtype
            with (self.folder / name).open("ab") as stream:
                values.tofile(stream)
        self.count += len(columns["user"])

    def read(self, name: str, place: slice) -> NDArray[Any]:
        kind = self.kinds[name]
        return np.fromfile(
            self.folder / name,
            kind,
            count=place.stop - place.start,
            offset=place.start * kind.itemsize,
        )

    @property
    def has_time(self) -> bool:
        """Whether rows have timestamps."""
        return "timestamp" in self.kinds

    def remove(self) -> None:
        """Delete the files."""
        for file in self.folder.iterdir():
            file.unlink()
        self.folder.rmdir()

    def pairs(self) -> Iterator[tuple[slice, NDArray[np.int64], NDArray[np.int64]]]:
        """Read the slices of rows with their users and items, block by block."""
        for start in range(0, self.count, BLOCK_ROWS):
            place = slice(start, min(start + BLOCK_ROWS, self.count))
            yield place, self.read("user", place), self.read("item", place)


class Written(NamedTuple):
    """What was written.

    Attributes:
        stats: as from `recsys.data.stats.describe`.
        decisions: the count of each decision.
        split: the kind of split that was used.
    """

    stats: dict[str, Any]
    decisions: dict[str, int]
    split: Split


class _Numbers(NamedTuple):
    """Numbers of users and items in the output, by their numbers in the rows."""

    user: NDArray[np.int32]
    item: NDArray[np.int32]  # -1 for items that are not in the catalog


def prepare(source: EventStream, rules: Rules, folder: Path, memory_gb: float) -> Written:
    """Write the data set of a source into `folder` (an artifact being written), in parts.

    Args:
        source: its events are read once.
        rules: how rows are filtered and split.
        folder: gets `interactions/part-*.parquet`, `users.parquet`, `items.parquet` and, with
            imported semantic IDs, `codes.npy`; temporary files are written here too.
        memory_gb: memory limit of the process, in GiB.

    Raises:
        ConfigError: a rule that cannot be applied to this source, or DuckDB is not installed.
        DataError: a malformed source, or no rows are left.
    """
    work = folder / "rows"
    work.mkdir()
    disliked, pieces = (_Rows(folder / name) for name in ("negative", "left"))
    disliked.folder.mkdir()
    pieces.folder.mkdir()
    (folder / "shuffle").mkdir()
    counts: Counter[str] = Counter()
    cleaner = None
    cleaned = source.report is not None
    with shuffle(source.events, folder / "shuffle", memory_gb, turn=cleaned) as shuffled:
        if source.report is not None:
            names = source.behaviours
            facts = Facts.of(shuffled.users, shuffled.pairs, shuffled.ratings, len(names))
            cleaner = HistoryCleaner(facts, rules.clean, names, rules.roles, source.report)
        users = len(shuffled.users)
        batches = shuffled.batches
        rows, of_user = _cleaned(batches, users, rules, work, counts, cleaner, disliked, pieces)
        if source.report is not None:
            if shuffled.turned and counts[TIES]:
                source.report.note(filtering.NEWEST_FIRST)
            source.report.remove("duplicate_rows_dropped", counts.pop(REPEATED, 0), items=None)
            source.report.add(ADDED, counts.pop(ADDED, 0))
            source.report.check_removed(
                shuffled.users, rules.clean.most_removed, decided_rules(rules)
            )
    ids = (shuffled.users, shuffled.items)
    _write_side(folder / DISLIKED, disliked, DISLIKED_COLUMNS, lambda c: disliked_table(c, *ids))
    _write_side(folder / PIECES, pieces, PIECES_COLUMNS, lambda c: pieces_table(c, *ids))
    catalog, codes, decided = source.read_items(pa.table({"item": shuffled.items}))
    # The same checks as in memory: each item is described exactly once.
    RawData(events_table(shuffled.items, shuffled.items), catalog, codes)
    counts.update(source.counts | decided)
    if source.report is not None:
        source.report.add("events_at_the_same_time", counts.pop(TIES, 0))

    alive = np.ones(rows.count, bool)
    if rules.k_core:
        alive = filtering.core(rows.pairs, rows.count, users, len(shuffled.items), rules.k_core)
        counts["rows_outside_core_dropped"] = _gone(alive, "rows_outside_core_dropped")
        stays = _described(catalog, shuffled.items, rows, alive)
        counts["items_outside_core_dropped"] = pc.sum(pc.invert(stays)).as_py() or 0
        catalog = catalog.filter(stays)
        codes = None if codes is None else codes[stays.to_numpy()]
    left = _events_of_users(rows, alive, users)
    if rules.min_length:
        counts["rows_of_short_users_dropped"] = _drop_short(rows, alive, left, rules.min_length)

    item_ids = catalog["item_id"].combine_chunks()
    numbers = _Numbers(
        (np.cumsum(left > 0) - 1).astype(np.int32),
        np.asarray(pc.fill_null(pc.index_in(shuffled.items, value_set=item_ids), -1), np.int32),
    )
    behaviours = cleaner.behaviours if cleaner else ()
    target = np.array([b.role == "target" for b in behaviours] or [True])
    dates = _split_dates(rows, alive, of_user, rules, target, source)
    baskets = _in_baskets(rows, alive, of_user, source)
    whole = baskets and not behaviours and not source.sessions
    tally = Tally(catalog.num_rows)
    for part, events in enumerate(_parts(rows, alive, of_user, numbers, dates, target, whole)):
        write_events(
            folder,
            events,
            has_time=rows.has_time,
            behaviours=behaviours,
            sessions=source.sessions,
            baskets=baskets,
            part=part,
        )
        tally.add(events)
    ids = shuffled.users.filter(pa.array(left > 0))
    write_catalog(folder, ids, catalog, codes)
    rows.remove()
    stats = tally.describe(users=len(ids), items=catalog, codes=codes, has_time=rows.has_time)
    if source.report is not None:
        source.report.finish(counts, stats["interactions"], stats["items_with_events"])
    every = dict(counts) | (source.report.counts if source.report else {})
    decisions = {name: count for name, count in every.items() if count}
    return Written(stats, decisions, "leave-one-out" if dates is None else "global-temporal")


def _cleaned(
    batches: Iterator[dict[str, NDArray[Any]]],
    users: int,
    rules: Rules,
    work: Path,
    counts: Counter[str],
    cleaner: HistoryCleaner | None,
    disliked: _Rows,
    left_over: _Rows,
) -> tuple[_Rows, NDArray[np.int64]]:
    """Write the rows without duplicates and low ratings to files; count the rows of each user.

    Negative events are appended to `disliked`, and the pieces that are left to `left_over`.
    """
    rows, of_user = _Rows(work), np.zeros(users, np.int64)
    left = "rows_below_min_rating_dropped" if cleaner is None else "negative_events_dropped"
    for columns in _by_whole_users(batches):
        if cleaner is not None:
            columns = _where(columns, cleaner.wanted(columns))
            if not len(columns["user"]):
                continue
        if rules.min_rating is not None and "rating" not in columns:
            raise filtering.no_ratings(rules.min_rating)
        others = [columns["rating"].view(np.int32).astype(np.int64)] if "rating" in columns else []
        others += [columns[name] for name in ("behaviour", "nanosecond") if name in columns]
        others += [columns["quantity"].view(np.int32)] if "quantity" in columns else []
        keep, dropped = filtering.duplicates(
            rules.duplicates,
            columns["user"],
            columns["item"],
            columns.get("timestamp"),
            others,
            columns.pop("content", None),
        )
        counts.update(dropped)
        if "quantity" in columns:
            summed, added = filtering.added_pieces(
                rules.duplicates, columns, others, columns["quantity"]
            )
            columns = columns | {"quantity": summed}
            counts[ADDED] += added
        if cleaner is not None:
            counts[REPEATED] += int((~keep).sum())
            columns = _where(columns, keep)
            counts[TIES] += filtering.ties(columns)
            columns, keep, negative, pieces = cleaner.clean(columns)
            disliked.append(negative)
            left_over.append(pieces)
            if not keep.any():
                continue
            left = "rows_below_min_rating_dropped"
        if rules.min_rating is not None:
            high = columns["rating"] >= rules.min_rating
            counts["rows_below_min_rating_dropped"] += int((keep & ~high).sum())
            keep &= high
        rows.append({name: values[keep] for name, values in columns.items()})
        first = int(columns["user"][0])
        here = np.bincount(columns["user"][keep] - first)
        of_user[first : first + len(here)] += here
    if not rows.count:
        raise filtering.nothing_left(left)
    return rows, of_user


def _write_side(
    file: Path, rows: _Rows, schema: pa.Schema, make: Callable[[dict[str, Any]], pa.Table]
) -> None:
    """Write a table beside the events, if it has rows, and delete its temporary files."""
    if rows.count:
        with pq.ParquetWriter(file, schema) as writer:
            for start in range(0, rows.count, BLOCK_ROWS):
                place = slice(start, min(start + BLOCK_ROWS, rows.count))
                columns = {name: rows.read(name, place) for name in rows.kinds}
                writer.write_table(make(columns))
    rows.remove()


def _where(columns: dict[str, NDArray[Any]], keep: NDArray[np.bool_]) -> dict[str, NDArray[Any]]:
    return {name: values[keep] for name, values in columns.items()}


def _by_whole_users(
    batches: Iterator[dict[str, NDArray[Any]]],
) -> Iterator[dict[str, NDArray[Any]]]:
    """Regroup the rows so that no user is in two batches."""
    waiting: list[dict[str, NDArray[Any]]] = []  # one user's rows, and its number

    def joined() -> dict[str, NDArray[Any]]:
        return {name: np.concatenate([part[name] for part in waiting]) for name in waiting[0]}

    for batch in batches:
        user = batch["user"]
        if not len(user):
            continue
        last = int(np.searchsorted(user, user[-1]))
        if last:
            waiting.append({name: values[:last] for name, values in batch.items()})
        if waiting and (last or waiting[-1]["user"][-1] != user[-1]):
            yield joined()
            waiting.clear()
        waiting.append({name: values[last:] for name, values in batch.items()})
    if waiting:
        yield joined()


def _whole_users(of_user: NDArray[np.int64]) -> Iterator[slice]:
    """Slices of about `PART_ROWS` rows that do not divide users."""
    ends = np.cumsum(of_user)
    wanted = np.arange(PART_ROWS, ends[-1] + PART_ROWS, PART_ROWS).clip(max=ends[-1])
    start = 0
    for stop in np.unique(ends[np.searchsorted(ends, wanted)]).tolist():
        yield slice(start, stop)
        start = stop


def _events_of_users(rows: _Rows, alive: NDArray[np.bool_], users: int) -> NDArray[np.int64]:
    left = np.zeros(users, np.int64)
    for place, user, _ in rows.pairs():
        left += np.bincount(user[alive[place]], minlength=users)
    return left


def _described(
    catalog: pa.Table, items: pa.Array, rows: _Rows, alive: NDArray[np.bool_]
) -> pa.ChunkedArray:
    """Whether each row of the catalog has an event that is kept."""
    wanted = np.zeros(len(items), bool)
    for place, _, item in rows.pairs():
        wanted[item[alive[place]]] = True
    return pc.is_in(catalog["item_id"], value_set=items.filter(pa.array(wanted)))


def _drop_short(
    rows: _Rows, alive: NDArray[np.bool_], left: NDArray[np.int64], minimum: int
) -> int:
    """Drop users with fewer events from `alive` and `left`; return the number of dropped rows."""
    before = int(alive.sum())
    for place, user, _ in rows.pairs():
        alive[place] &= left[user] >= minimum
    if not alive.any():
        raise filtering.nothing_left("rows_of_short_users_dropped")
    left[left < minimum] = 0
    return before - int(alive.sum())


def _split_dates(
    rows: _Rows,
    alive: NDArray[np.bool_],
    of_user: NDArray[np.int64],
    rules: Rules,
    target: NDArray[np.bool_],
    source: EventStream,
) -> tuple[int, int] | None:
    """The times at which validation and test begin; None to split by each user's last events."""
    if rules.split == "global-temporal":
        return _dates(rows, alive, rules)
    report = source.report
    if rules.split is not None or report is None or not rows.has_time:
        return None
    dates = _dates(rows, alive, rules)
    asked = _users_to_ask(rows, alive, of_user, dates, target, source.sessions)
    if asked.min() >= ENOUGH_USERS:
        report.note(by_time(asked, dates, source.sessions))
        return dates
    report.note(too_few(asked))
    return None


def _in_baskets(
    rows: _Rows, alive: NDArray[np.bool_], of_user: NDArray[np.int64], source: EventStream
) -> bool:
    """Whether events come in baskets, which a report of the source then says."""
    if source.report is None or not rows.has_time:
        return False
    tied = 0
    for place in _whole_users(of_user):
        keep = alive[place]
        names = [name for name in ("user", *filtering.TIME) if name in rows.kinds]
        tied += tied_events(*(rows.read(name, place)[keep] for name in names))
    note = in_baskets(tied, int(alive.sum()))
    if note:
        source.report.note(note)
    return bool(note)


def _dates(rows: _Rows, alive: NDArray[np.bool_], rules: Rules) -> tuple[int, int]:
    """The times at which validation and test begin."""
    if not rows.has_time:
        raise ConfigError(
            "data.split: a global-temporal split needs timestamps; this data set has only order"
        )
    if rules.dates is not None:
        return rules.dates
    times = [rows.read("timestamp", place)[alive[place]] for place, *_ in rows.pairs()]
    return dates_of_shares(np.concatenate(times), rules.ratio)


def _users_to_ask(
    rows: _Rows,
    alive: NDArray[np.bool_],
    of_user: NDArray[np.int64],
    dates: tuple[int, int],
    target: NDArray[np.bool_],
    sessions: bool,
) -> NDArray[np.int64]:
    """`recsys.splits.users_to_ask` for a split at `dates`."""
    asked = np.zeros(2, np.int64)
    for place in _whole_users(of_user):
        keep = alive[place]
        user = rows.read("user", place)[keep].astype(np.int32)
        labels = label_times(rows.read("timestamp", place)[keep], dates)
        wanted = _targets(rows, place, keep, target) & ~starts_session(user, sessions)
        asked += users_to_ask(user, labels, wanted)
    return asked


def _targets(
    rows: _Rows, place: slice, keep: NDArray[np.bool_], target: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """(n,) whether each of the kept rows is a target; (types,) `target` says which types are."""
    if "behaviour" not in rows.kinds:
        return np.ones(int(keep.sum()), bool)
    return np.asarray(target[rows.read("behaviour", place)[keep]])


def _parts(
    rows: _Rows,
    alive: NDArray[np.bool_],
    of_user: NDArray[np.int64],
    numbers: _Numbers,
    dates: tuple[int, int] | None,
    target: NDArray[np.bool_],
    whole: bool,
) -> Iterator[Events]:
    """The kept events in parts of whole users, split at `dates` or by each user's last events.

    With `whole`, a user's events of one time count as one.
    """
    with track("writing parts", rows.count) as bar:
        for place in _whole_users(of_user):
            bar.advance(place.stop - place.start)
            keep = alive[place]
            if not keep.any():
                continue
            user = numbers.user[rows.read("user", place)[keep]]
            item = numbers.item[rows.read("item", place)[keep]]
            if rows.has_time:
                timestamp = rows.read("timestamp", place)[keep]
            else:
                timestamp = np.arange(len(user)) - np.searchsorted(user, user)
            if "rating" in rows.kinds:
                rating = rows.read("rating", place)[keep]
            else:
                rating = np.full(len(user), np.nan, np.float32)
            typed = "behaviour" in rows.kinds
            behaviour = rows.read("behaviour", place)[keep] if typed else None
            nanosecond = None
            if "nanosecond" in rows.kinds:
                nanosecond = rows.read("nanosecond", place)[keep]
            if dates is not None:
                split = label_times(timestamp, dates)
            elif typed:
                split = label_last_targets(user, _targets(rows, place, keep, target))
            elif whole:
                split = label_baskets(user, timestamp, nanosecond)
            else:
                split = label_ends(user)
            yield Events(user, item, timestamp, rating, split, behaviour, nanosecond)


def _gone(alive: NDArray[np.bool_], reason: str) -> int:
    if not alive.any():
        raise filtering.nothing_left(reason)
    return int((~alive).sum())
