"""Makes canonical events of the rows of an export whose columns are known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recsys.data import returns
from recsys.data.availability import each
from recsys.data.cleaning import OTHER_ID, RowCleaner, is_no_id
from recsys.data.column_words import EVENT_FIELDS, all_of, rank
from recsys.data.files import Damage, NoRowsError
from recsys.data.first_rows import FirstRows
from recsys.data.grouped_rows import LINE, OfOrders, filled_down, number_of_orders, with_lines
from recsys.data.ids import IdForms, refuse_lost_digits
from recsys.data.item_cleaning import FIELDS, LATEST, ItemCleaner, ItemFields, ids_of_names
from recsys.data.numbers import read_ratings
from recsys.data.opening import TableFile
from recsys.data.raw import ReaderConfig, events_table
from recsys.data.refunds import TakenBack, earlier_states
from recsys.data.report import EXAMPLES, Report, sentence
from recsys.data.sample import Found, Roles
from recsys.data.service_lines import wildcard
from recsys.data.texts import MISSING, as_strings
from recsys.data.time_formats import CHANGES, TimeRules, find_zones, read_moments, with_clocks
from recsys.errors import DataError
from recsys.event_names import is_denied, level

MAX_TYPES = 255
BESIDE_ITEMS = ("title", "category", "brand")  # in cells of several items
NUMBERS_BESIDE_ITEMS = ("price", "quantity")  # such as 10,50, which a comma does not divide
NO_TYPE = "(empty)"
FAULTLESS = {f"rows_of_{n}_dropped" for n in ("cancelled_orders", "earlier_states", "no_products")}


@dataclass
class EventReader:
    """Reads events of which the columns are known.

    Attributes:
        config: of the reader.
        roles: of the columns.
        times: how the times of each file are read.
        report: is increased by what is dropped.
        first: what the first rows show.
        forms: of the ids.
        of_orders: the columns that only the first line of each order has (`columns_of_orders`).
        counts: conversions of times.
        types: names of the event types by number, as they appear.
        fields: of the items, as far as the events have them.
        titles: the id of each title, for rows without an id.
        owners: the user of each order, for its rows without a user.
        taken: the orders that events without items take back.
        nobody: ids that stood for nobody, in whose place other ids of the rows are the users.
    """

    config: ReaderConfig
    roles: Roles
    times: dict[Path, TimeRules]
    report: Report
    first: FirstRows
    forms: IdForms
    of_orders: OfOrders
    counts: Counter[str] = field(default_factory=Counter)
    types: list[str] = field(default_factory=list)
    nobody: dict[str, None] = field(default_factory=dict)
    titles: pa.Table = field(default_factory=lambda: ids_of_names(()))
    owners: pa.Table = field(default_factory=lambda: ids_of_names(()))
    taken: pa.Array = field(default_factory=lambda: pa.array([], pa.string()))

    def __post_init__(self) -> None:
        columns = {r: match.column for r, match in self.roles.items() if r in FIELDS}
        self.fields = ItemFields(columns)
        self.taken_back = TakenBack(self.roles, self.report, self.first.pieces)

    @property
    def sessions(self) -> str | None:
        """Whether sessions are the `users`, or stand for `anonymous` ones; None without any."""
        if not (sessions := all_of("session", self.roles)):
            return None
        columns = [match.column for match in sessions]
        return "users" if self.roles["user"].column in columns else "anonymous"

    def described(self, ids: pa.Array, times: TimeRules) -> pa.Table | None:
        """The items as the events describe them, with these rules of times; None if they do not."""
        values = self.fields.of(ids)
        if not values:
            return None
        self._say_fields("are described")
        roles = {"id": Found("item_id", ""), **{name: Found(name, "") for name in values}}
        path, clean, forms = self.config.path, self.config.clean, IdForms(self.report)
        cleaner = ItemCleaner(path, roles, clean, times, self.report, forms)
        return cleaner.clean(pa.table({"item_id": ids, **values}))

    def _say_fields(self, which: str) -> None:
        said = [
            f"the {name} is the {'latest' if name in LATEST else 'most frequent'} {column!r}"
            + " above 0 of a line that is no return" * (name in LATEST)
            for name, column in self.fields.columns.items()
        ]
        self.report.note(f"Items {which} by the events: {', '.join(said)}.")
        several = self.fields.with_several("title")
        self.report.add("items_with_several_titles", len(several), several)

    def filled(self, items: pa.Table, mine: Roles, path: Path) -> tuple[pa.Table, Roles]:
        """The items file with the fields that it lacks and the events have."""
        # The forms count each change of an id once: when the items are cleaned.
        forms = IdForms(Report(), dict(self.forms.whole), dict(self.forms.decimal))
        ids = pc.fill_null(forms.read("item", items, mine["id"].column, path), "")
        if self.fields.columns:
            self._say_fields("without such a field in the items file are described")
        for name, values in self.fields.of(ids.combine_chunks()).items():
            like = [c for c in items.column_names if rank(c, EVENT_FIELDS[name]) is not None]
            column = mine[name].column if name in mine else like[0] if like else None
            if column is None:
                if name not in items.column_names and values.null_count < len(values):
                    items = items.append_column(name, values)
                    mine = {**mine, name: Found(name, "from the events")}
                continue
            if pa.types.is_nested(items[column].type):
                continue
            texts = as_strings(items[column], name, path).combine_chunks()
            empty = pc.and_(is_no_id(texts), values.is_valid())
            if count := pc.sum(empty).as_py():
                self.report.add("item_fields_filled", count, values.filter(empty)[:3].to_pylist())
                position = items.column_names.index(column)
                items = items.set_column(position, column, pc.if_else(empty, values, texts))
        return items, mine

    def read(self, files: list[TableFile]) -> Iterator[pa.Table]:
        """Canonical events, part by part."""
        used = {match.column for match in self.roles.values()}
        used |= {column for column, _ in self.first.conditions} | {*self.of_orders.number}
        if self.first.without_id:
            self.titles = self._ids_of_names(files, "item", "title")
        if self.first.without_user:
            self.owners = self._ids_of_names(files, "user", "session")
        if "session" in self.roles and any(file.explode for file in files):
            self.taken = self._orders_taken_back(files, used)
        new = self.config.mapping is not None
        self.taken_back.find_files([file.path for file in files], new=new)
        left, counts = 0, "quantity" in self.roles
        order = number_of_orders(files[0].names, used)
        used |= {order} if order else set()
        parts = {
            f.path: filled_down(f.batches(None if counts else used), self.of_orders, Report())
            for f in files
        }
        earlier = earlier_states(parts, self.roles, order, self.taken_back)
        lines = self.first.cells.mark == "\n" or self.config.clean.item_separator == "none"
        for file in files:
            damage = Damage()
            rules = self.times[file.path]
            cleaner = RowCleaner(
                file.path, self.config.clean, rules, self.report, self.first.service
            )
            rows = file.batches(None if counts else used, damage)
            rows = filled_down(rows, self.of_orders, self.report)
            rows = with_lines(rows, used, file) if counts else rows
            for batch in _latest(rows, earlier[file.path], self.report):
                table = _without_open_quotes(batch, self.roles, file, damage, lines=lines)
                table = self._split(table)
                self.report.rows += table.num_rows
                events = self._canonical(table, file.path, cleaner, rules)
                if events.num_rows:
                    left += events.num_rows
                    yield events
            damage.check(file.path, self.config.clean.damaged_rows)
            self.report.rows += damage.rows
            self.report.remove("damaged_rows_skipped", damage.rows, damage.examples, items=None)
            time = self.roles.get("timestamp")
            cleaner.finish(time.column if time else None)
        if self.nobody:
            self.report.note(sentence("nobody", names=", ".join(map(repr, [*self.nobody][:5]))))
        if not left:
            where = files[0].path if len(files) == 1 else files[0].path.parent
            reasons = self.report.in_words()
            text = f"{where}: no usable rows are left" + (reasons and f". {reasons}")
            if self.report.removed.keys() <= FAULTLESS:
                raise NoRowsError(text, files[0].names, self.report.rows)
            raise DataError(text)

    def _split(self, table: pa.Table) -> pa.Table:
        """One row for each item, where cells hold several or numbers of pieces."""
        if self.first.cells == (None, None):
            return table
        names = BESIDE_ITEMS + NUMBERS_BESIDE_ITEMS * (self.first.cells.mark != ",")
        beside = {self.roles[role].column for role in names if role in self.roles}
        beside &= {*table.column_names} - {self.roles["item"].column}
        made, *counted = self.first.cells.split(table, self.roles["item"].column, beside)
        rules = ("rows_with_several_items_split", "numbers_of_pieces_left_out")
        for rule, texts in zip(rules, counted, strict=True):
            self.report.add(rule, len(texts), texts[:EXAMPLES].to_pylist())
        self.report.split += made.num_rows - table.num_rows
        return made

    def _canonical(
        self, table: pa.Table, path: Path, cleaner: RowCleaner, rules: TimeRules
    ) -> pa.Table:
        column = {role: table[match.column] for role, match in self.roles.items()}
        made = {
            role: self.forms.read(role, table, self.roles[role].column, path)
            for role in ("user", "item")
        }
        for role, match in self.roles.items():
            if role.startswith("taken_back =") and match.column == self.roles["item"].column:
                for mark in map(wildcard, role.partition("=")[2].split("|")):  # A7-RET is of A7
                    if ".*" in mark:
                        mark = mark.replace(".*", "(.*)", 1)
                        made["item"] = pc.replace_substring_regex(made["item"], mark, r"\1")
        if LINE in table.column_names:
            made["line"] = table[LINE]
        if self.sessions == "anonymous":
            if "session" in column:
                refuse_lost_digits(column["session"], self.roles["session"].column, path)
                sessions = as_strings(column["session"], "session", path)
                owners = _id_of(sessions, self.owners)
                made["user"] = self._or(made["user"], owners, "users_of_their_orders")
            if OTHER_ID in column:
                others = self.forms.read("user", table, self.roles[OTHER_ID].column, path)
                made["user"] = self._or(made["user"], others, "users_by_another_id")
            if "session" in column:
                named = pc.binary_join_element_wise(self.first.prefix, sessions, "")
                sessions = pc.if_else(is_no_id(sessions), sessions, named)
                made["user"] = self._or(made["user"], sessions, "sessions_without_user")
        for role in self.fields.columns:
            made[role] = as_strings(column[role], role, path)
        if "title" in made:
            made["item"] = self._or_title(made["item"], made["title"])
        if self.first.conditions:
            texts = {n: as_strings(table[n], n, path) for n, _ in self.first.conditions}
            masks = (pc.match_substring_regex(pc.fill_null(texts[name], ""), pattern)
                     for name, pattern in self.first.conditions)  # fmt: skip
            made["named"] = reduce(pc.or_, masks)
        if "timestamp" in self.roles:
            times = column["timestamp"]
            if "clock" in column:
                times = with_clocks(times, as_strings(column["clock"], "clock", path))
            if "clock half" in column:
                half = pc.fill_null(as_strings(column["clock half"], "clock", path), "")
                times = pc.binary_join_element_wise(times, half, " ")
            moments = read_moments(times, rules, self.counts)
            for rule in CHANGES:
                self.report.add(rule, self.counts.pop(rule, 0))
            made["timestamp"] = moments.second
            made["nanosecond"] = _below_seconds(column, moments.nanosecond, path)
            local, zoned, names = find_zones(times)
            self.report.add("times_with_a_zone", zoned, names)
            self.report.add("times_without_a_zone", local)
        if "rating" in self.roles:
            made["rating"] = self._ratings(as_strings(column["rating"], "rating", path))
        types = None
        if "behaviour" in self.roles:
            types = returns.with_meanings(as_strings(column["behaviour"], "behaviour", path))
            denied = each(types, is_denied)
        returned, cancelled, lines = self.taken_back.marks(column, path)
        if len(self.taken):
            orders = as_strings(column["session"], "session", path)
            returned.append(pc.is_in(orders, value_set=self.taken))
        cancelled += [] if types is None else [denied]
        pieces = None
        if "quantity" in self.roles:
            texts = pc.fill_null(as_strings(column["quantity"], "quantity", path), "")
            pieces = returns.read_pieces(texts, self.first.pieces)
            unclear = returns.unclear_pieces(texts, self.first.pieces)
            self.report.add("pieces_of_three_digits", len(unclear), unclear[:EXAMPLES].to_pylist())
            nothing = pc.is_in(pc.utf8_lower(texts), value_set=MISSING)
            odd = pc.and_(pc.is_null(pieces), pc.invert(nothing))
            self.report.add_rows("quantities_unreadable", odd, texts)
            pieces = self.taken_back.pieces_left(pieces, column, path, returned, cancelled)
            returned.append(pc.fill_null(pc.less(pieces, 0), False))
        if "price" in made:  # of lines of returns it is not the price of today
            bought = _is_positive(types)
            if pieces is not None:
                bought = pc.and_(bought, pc.fill_null(pc.greater_equal(pieces, 0), True))
            made["price"] = pc.if_else(bought, made["price"], None)
        if returned:
            back = reduce(pc.or_, returned)
            made["quantity"] = returns.pieces_of_events(pieces, types, back, lines)
            nothing = pc.fill_null(pc.equal(made["quantity"], 0), False)
            cancelled.append(pc.and_(nothing, pc.invert(back)))
        if cancelled:
            made["cancelled"] = pc.and_(reduce(pc.or_, cancelled), _is_positive(types))
        if returned:
            types = _with_returns(types, back)
        if types is not None:
            made["behaviour"] = self._types(types)
            back = pc.and_(is_no_id(made["item"]), pc.invert(_is_positive(types)))
            self.report.add_rows("returns_without_item", back, made["user"])
        rows = self.fields.take(cleaner.clean(pa.table(made), column))
        return events_table(**{name: rows[name] for name in rows.column_names})

    def _or(self, users: pa.ChunkedArray, others: pa.ChunkedArray, rule: str) -> pa.ChunkedArray:
        """The user of each row, or another id where there is none or one that stands for nobody."""
        of_nobody = pa.array(self.first.nobody, pa.string())
        nobody, nothing = (
            pc.or_(is_no_id(ids), pc.is_in(ids, value_set=of_nobody)) for ids in (users, others)
        )
        chosen = pc.and_(nobody, pc.invert(nothing))
        self.report.add_rows(rule, chosen, others)
        named = pc.unique(users.filter(pc.and_(chosen, pc.invert(is_no_id(users))))).to_pylist()
        self.nobody |= dict.fromkeys(named)
        return pc.if_else(chosen, others, users)

    def _or_title(self, items: pa.ChunkedArray, titles: pa.ChunkedArray) -> pa.ChunkedArray:
        """The item of each row; where it has no id, that of other rows with its title, or this."""
        by_title = pc.and_(is_no_id(items), pc.invert(is_no_id(titles)))
        own = _id_of(titles, self.titles)
        by_id = pc.and_(by_title, pc.is_valid(own))
        self.report.add_rows("rows_named_by_the_id_of_their_title", by_id, titles)
        self.report.add_rows("rows_named_by_title", pc.and_not(by_title, by_id), titles)
        return pc.if_else(by_title, pc.coalesce(own, titles), items)

    def _ids_of_names(self, files: list[TableFile], role: str, name: str) -> pa.Table:
        """Read the ids and names of all rows, so that those without an id may have one."""
        other = replace(self, report=Report(), forms=IdForms(Report()))
        columns = {n: self.roles[n].column for n in (role, name, "item")}
        nobody = pa.array(self.first.nobody, pa.string())

        def ids(part: pa.Table, path: Path) -> pa.ChunkedArray:
            ids = other.forms.read(role, part, columns[role], path)
            return pc.if_else(pc.is_in(ids, value_set=nobody), None, ids) if role == "user" else ids

        return ids_of_names(
            pa.table([as_strings(part[columns[name]], name, file.path), ids(part, file.path)],
                     ["name", "id"])
            for file in files
            for part in map(other._split, file.batches(columns.values()))
        )  # fmt: skip

    def _orders_taken_back(self, files: list[TableFile], used: set[str]) -> pa.Array:
        """Read the orders of returns that have no list of items, which is all of an order."""
        own: dict[str, Any] = {"counts": Counter(), "types": [], "nobody": {}}
        other = replace(self, report=Report(), forms=IdForms(Report()), **own)
        names = [self.roles[role].column for role in ("session", "item")]
        taken = [self.taken]
        for file in files:
            path, rules = file.path, self.times[file.path]
            cleaner = RowCleaner(path, self.config.clean, rules, other.report)
            for rows in file.batches(used):
                orders, items = (as_strings(rows[name], "item", path) for name in names)
                rows = rows.set_column(rows.column_names.index(names[1]), names[1], orders)
                rows = rows.filter(pc.and_not(is_no_id(items), is_no_id(orders)))
                made = other._canonical(rows, path, cleaner, rules)
                back = [n for n, name in enumerate(other.types) if returns.is_taken_back(name)]
                if back:
                    back = pc.is_in(made["behaviour"], pa.array(back, pa.uint8()))
                    taken += made["item"].filter(back).chunks
        return pc.unique(pa.concat_arrays(taken))

    def _ratings(self, texts: pa.ChunkedArray) -> pa.ChunkedArray:
        filled = pc.fill_null(pc.not_equal(texts, ""), False)
        points = read_ratings(texts)
        self.report.add_rows("ratings_unreadable", pc.and_(filled, pc.is_null(points)), texts)
        if self.report.mapping.get("unrated"):
            unrated = pc.equal(points, -1)
            self.report.add_rows("ratings_of_minus_1", unrated, texts)
            points = pc.if_else(unrated, None, points)
        return points

    def _types(self, texts: pa.ChunkedArray) -> pa.ChunkedArray:
        """The number of each event's type."""
        texts = pc.fill_null(pc.if_else(pc.equal(texts, ""), NO_TYPE, texts), NO_TYPE)
        encoded = texts.combine_chunks().dictionary_encode()
        names = encoded.dictionary.to_pylist()
        for name in names:
            if name not in self.types and not is_denied(name):  # such rows are left out
                self.types.append(name)
        if len(self.types) > MAX_TYPES:
            path, name = self.config.path, self.roles["behaviour"].column
            raise DataError(sentence("many_types", path=path, name=name, most=MAX_TYPES))
        numbers = [self.types.index(name) if name in self.types else 0 for name in names]
        codes = pa.array(numbers, pa.uint8()).take(encoded.indices)
        return pa.chunked_array([codes])


def _below_seconds(
    columns: Mapping[str, pa.ChunkedArray], nanosecond: pa.ChunkedArray, path: Path
) -> pa.ChunkedArray:
    """Nanoseconds after the second: of a column of their own, if there is one."""
    for role, size in (("nanosecond", 1), ("millisecond", 1_000_000)):
        if role in columns:
            texts = as_strings(columns[role], role, path)
            fits = pc.match_substring_regex(texts, rf"^\d{{1,{10 - len(str(size))}}}$")
            below = pc.fill_null(pc.cast(pc.if_else(fits, texts, "0"), pa.int32()), 0)
            nanosecond = pc.multiply(below, pa.scalar(size, pa.int32()))
    return nanosecond


def _latest(
    parts: Iterable[pa.Table], earlier: NDArray[np.int64], report: Report
) -> Iterator[pa.Table]:
    """The rows, without those with an earlier state of their line (`earlier_states`)."""
    start = 0
    for rows in parts:
        first, last = np.searchsorted(earlier, (start, start + rows.num_rows))
        keep = np.ones(rows.num_rows, bool)
        keep[earlier[first:last] - start] = False
        start += rows.num_rows
        report.rows += int(last - first)
        report.remove("rows_of_earlier_states_dropped", int(last - first), items=None)
        if keep.any():
            yield rows.filter(pa.array(keep))


def _without_open_quotes(
    table: pa.Table, roles: Roles, file: TableFile, damage: Damage, *, lines: bool
) -> pa.Table:
    """Drop rows in which a quote is not closed, so that a value contains other rows.

    An item may have several `lines`.
    """
    if file.kind != "delimited":
        return table
    for role in ("user", "timestamp") if lines else ("user", "item", "timestamp"):
        if role in roles:
            column = table[roles[role].column]
            long = pc.match_substring(pc.utf8_trim_whitespace(column), "\n")
            table = damage.drop(table, column, pc.fill_null(long, False))
    return table


def _with_returns(types: pa.ChunkedArray | None, back: pa.ChunkedArray) -> pa.ChunkedArray:
    """The types of events, of which those that were taken back are returns.

    A type that is negative stays.
    """
    if types is None:
        return pc.if_else(back, "return", "purchase")
    return pc.if_else(pc.and_(back, _is_positive(types)), "return", types)


def _is_positive(types: pa.ChunkedArray | None) -> pa.ChunkedArray | pa.Scalar:
    """Whether events of these types are no negative feedback: (rows,) bool; true without types."""
    if types is None:
        return pa.scalar(True)
    positive = pa.array([n for n in pc.unique(types).to_pylist() if n and level(n) != 0])
    return pc.is_in(types, value_set=positive.cast(pa.string()))


def _id_of(names: pa.ChunkedArray, ids: pa.Table) -> pa.ChunkedArray:
    """The id of each name; null where none is known."""
    places = pc.index_in(names, value_set=ids["name"].combine_chunks())
    return pa.chunked_array([ids["id"].combine_chunks().take(places.combine_chunks())])
