"""What the items file and the events say of items, cleaned: ids, texts, prices, availability.

In the events, the title, the category and the brand of an item are their most frequent values, the
latest one among equals; its price is the latest one above 0, and 0 only if it has no other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsys.data.availability import each, is_missing, plain_answer, read_available
from recsys.data.cleaning import NO_ID, CleanConfig, are_short_codes, is_no_id, is_no_item
from recsys.data.column_words import CURRENCY_AT_END, ITEM_WORDS, all_of, rank, words
from recsys.data.day_orders import show_day_first
from recsys.data.ids import IdForms
from recsys.data.item_texts import plain
from recsys.data.numbers import ANSWER, NO_NUMBER, read_numbers
from recsys.data.report import Report, sentence
from recsys.data.sample import Roles
from recsys.data.texts import MISSING, NOTHING, as_strings, as_text, each_value
from recsys.data.time_formats import TimeRules, read_moments
from recsys.dataset import AVAILABILITY
from recsys.errors import DataError
from recsys.event_names import normalised

MARKUP = r"<[A-Za-z/!][^>]*>|&(#\d+|#[xX][0-9a-fA-F]+|[A-Za-z]+);"
BLANKS = r"\s+"
ROW_NUMBER = re.compile(r"|Unnamed: \d+|__index_level_\d+__")  # pandas writes such columns
PATHS = (" > ", ">", " / ", "/", "|", "::")  # separators of category paths
LISTS = words("lists_of_categories")
LIST = r"(?<!\\),\s*"  # a comma with a backslash is part of a name
ENDS = r"^[\s>/|:]+|[\s>/|:]+$"  # separators around a path
NO_CATEGORY = pa.array(["", "na", "none", "?", "k.a.", "tbd"])


@dataclass
class ItemCleaner:
    """Makes the columns of the items table from the items file.

    Other prices of the shop (`prices`) show what the marks in prices mean.
    """

    path: Path
    roles: Roles
    config: CleanConfig
    times: TimeRules
    report: Report
    forms: IdForms
    prices: pa.Array = field(default_factory=lambda: pa.array([], pa.string()))

    def __post_init__(self) -> None:
        self._column = {role: match.column for role, match in self.roles.items()}

    def clean(self, table: pa.Table) -> pa.Table:
        """The described items: `item_id`, `title`, `text`, availability, and attributes.

        Raises:
            DataError: a column of ids or texts that holds no plain values.
        """
        ids = pc.fill_null(self.forms.read("item", table, self._column["id"], self.path), "")
        known = pc.invert(is_no_item(ids, are_short_codes(ids)))
        self.report.add("item_rows_without_id_dropped", pc.sum(pc.invert(known)).as_py() or 0)
        table, ids = table.filter(known), ids.filter(known)
        indices = ids.combine_chunks().dictionary_encode().indices.to_numpy(zero_copy_only=False)
        first = np.sort(np.unique(indices, return_index=True)[1])
        repeated = np.ones(len(ids), bool)
        repeated[first] = False
        again = pa.chunked_array([repeated])
        self.report.add_rows("repeated_item_rows_dropped", again, ids)
        available = self._available(table, ids)
        table, ids = table.take(pa.array(first)), ids.take(pa.array(first))
        columns = {"item_id": ids, "title": self._words("title", table, ids)}
        self.report.add_rows("items_without_title", pc.equal(columns["title"], ""), ids)
        columns["text"] = self._words("text", table, ids)
        columns |= available | self._dates(table)
        columns_of_prices = (table[name] for name in table.column_names if self._is_price(name))
        prices = [pc.unique(c).drop_null() for c in columns_of_prices if pa.types.is_string(c.type)]
        self.prices = pa.concat_arrays([self.prices, *prices])
        taken = {self._column.get(role) for role in ("id", "title", "text", *AVAILABILITY)}
        taken.update(all_of("unavailable", self._column))
        taken.update(all_of("available", self._column))
        for name in table.column_names:
            if name not in taken:
                columns |= self._attribute(name, table[name])
        return pa.table(columns)

    def _words(self, role: str, table: pa.Table, ids: pa.ChunkedArray) -> pa.ChunkedArray:
        """Titles or texts without markup; empty where missing."""
        if role not in self._column:
            return pa.chunked_array([pa.array([""] * len(ids), pa.string())])
        texts = pc.fill_null(as_strings(table[self._column[role]], role, self.path), "")
        texts = pc.fill_null(self._said(texts, NO_ID.slice(1)), "")  # the first one is empty
        if not self.config.applies("item_texts"):
            return texts
        dirty = pc.match_substring_regex(texts, MARKUP)
        bare = each_value(pc.if_else(dirty, texts, None), lambda t: plain(t, "text"), pa.string())
        clean = pc.if_else(dirty, bare, texts)
        clean = pc.utf8_trim_whitespace(pc.replace_substring_regex(clean, BLANKS, " "))
        self.report.add_rows("item_texts_cleaned", pc.not_equal(clean, texts), ids)
        return clean

    def _available(self, table: pa.Table, ids: pa.ChunkedArray) -> dict[str, pa.ChunkedArray]:
        """Whether each item, in order of its first row, can be had.

        Rows with the same id are variants: a column allows an item if it allows one of them. Each
        column must allow it.
        """
        columns = []
        for name in all_of("available", self._column):
            texts = as_strings(table[name], "available", self.path)
            states = set(pc.unique(texts.drop_null()).to_pylist())
            if normalised(name) == "status" and states <= {"1", "2", ""}:  # those of Magento
                texts = pc.replace_substring(texts, "2", "0")
            columns.append(read_available(texts))
        for name in all_of("unavailable", self._column):
            texts = as_strings(table[name], "unavailable", self.path)
            answers = each(texts, lambda text: plain_answer(text) is not True)
            columns.append(pc.if_else(each(texts, is_missing), None, answers))
        if not columns:
            return {}
        item = ids.combine_chunks().dictionary_encode().indices
        said = pa.table([item, *columns], ["item", *map(str, range(len(columns)))])
        any_row = [(str(number), "any") for number in range(len(columns))]
        items = said.group_by("item", use_threads=False).aggregate(any_row)
        allowed = (pc.fill_null(items[f"{number}_any"], True) for number in range(len(columns)))
        return {"available": reduce(pc.and_, allowed)}

    def _dates(self, table: pa.Table) -> dict[str, pa.ChunkedArray]:
        """The first and the last moment of availability; a date ends when its day ends."""
        dates: dict[str, pa.ChunkedArray] = {}
        for role in ("available_from", "available_until"):
            if role not in self._column:
                continue
            name = self._column[role]
            column = table[name]
            order = show_day_first([column])
            if order.day and order.month and self.times.day_first is None:
                where = f"{self.path}: column {name!r}"
                raise DataError(sentence("two_orders_of_days", where=where, order=order))
            first = self.times.day_first if order.day_first is None else order.day_first
            if order.seen and first is None and not order.year_first:
                said = {"path": self.path, "name": name, "beside": ""}
                raise DataError(sentence("no_order_of_days", **said))
            times = replace(self.times, day_first=first, year_first=order.year_first,
                            day_second=order.day_second)  # fmt: skip
            moments = read_moments(column, times, ends=role == "available_until")
            dates[role] = moments.second
            self.report.add_rows("last_days", moments.is_date, as_text(column))
            texts = as_strings(column, role, self.path)
            said = pc.invert(each(texts, lambda text: is_missing(text) or text in NO_NUMBER))
            unread = pc.and_(pc.is_null(moments.second), pc.and_(pc.is_valid(texts), said))
            self.report.add_rows(
                "values_not_read", unread, pc.binary_join_element_wise(name, texts, ": ")
            )
        return dates

    def _attribute(self, name: str, column: pa.ChunkedArray) -> dict[str, pa.ChunkedArray]:
        """One column as attributes: none, itself, or a list of categories and its first part."""
        kind = column.type
        if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind):
            ready = pa.types.is_floating(kind.value_type)  # an embedding
            inner = pa.float32() if ready else pa.string()
            try:
                return {name: pc.cast(column, pa.list_(inner))}
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
                pass  # lists of records: reported below
        try:
            texts = as_strings(column, name, self.path)
        except DataError:
            self.report.note(f"Column {name!r} of {self.path.name} holds {kind}; it is left out.")
            return {}
        if pa.types.is_string(kind):
            texts = self._said(texts, MISSING.slice(1))  # the first one is empty
        texts = pc.if_else(pc.is_in(pc.utf8_lower(texts), value_set=MISSING), None, texts)
        if self.config.applies("constant_columns") and self._says_nothing(name, texts):
            self.report.add("columns_without_information_dropped", 1, [name])
            return {}
        if texts.null_count == len(texts):
            return {}
        marked = self.config.applies("prices") and pa.types.is_string(kind)
        named = self._is_price(name)
        numbers = read_numbers(texts, named=named, prices=marked, others=self.prices)
        if numbers is not None:
            bad = pc.binary_join_element_wise(name, texts, ": ")
            self.report.add_rows("values_not_read", numbers.bad, bad)
            self.report.add_rows("prices_of_thousands", numbers.thousands, texts)
            self.report.add_rows("prices_read", numbers.converted, texts)
            return {name: numbers.values}
        if named:
            self.report.note(sentence("price_as_text", name=name, file=self.path.name))
        answers = pc.match_substring_regex(texts, ANSWER)
        if pc.all(answers).as_py():
            return {name: pc.cast(pc.utf8_lower(texts), pa.bool_())}
        return self._categories(name, self._said(texts, NOTHING))

    def _is_price(self, name: str) -> bool:
        if name == self._column.get("price"):
            return True
        return rank(re.sub(CURRENCY_AT_END, "", name), ITEM_WORDS["price"]) in (0, 1)

    def _said(self, texts: pa.ChunkedArray, words: pa.Array) -> pa.ChunkedArray:
        """Texts, null where one of the words says that there is no value."""
        empty = pc.fill_null(pc.is_in(pc.utf8_lower(texts), value_set=words), False)
        self.report.add_rows("values_that_say_nothing", empty, texts)
        return pc.if_else(empty, None, texts)

    def _says_nothing(self, name: str, texts: pa.ChunkedArray) -> bool:
        if ROW_NUMBER.fullmatch(name):
            return True
        distinct = pc.count_distinct(texts, mode="only_valid").as_py()
        return distinct == 0 or (distinct == 1 and not texts.null_count and len(texts) > 1)

    def _categories(self, name: str, texts: pa.ChunkedArray) -> dict[str, pa.ChunkedArray]:
        """A list for a path of categories, with its first part; a list for a text with `|`."""
        named_rank = rank(name, ITEM_WORDS["category"])
        named = name == self._column.get("category") or named_rank in (0, 1)
        if named:
            texts = self._said(pc.replace_substring_regex(texts, ENDS, ""), NO_CATEGORY)
        filled = texts.drop_null()
        if not len(filled):
            return {}
        if self.config.applies("category_paths") and _has_lists(name, filled):
            self.report.add_rows("category_paths_split", pc.match_substring(texts, ">"), texts)
            lists = [None if text is None else _paths(text) for text in texts.to_pylist()]
            tops = [paths[0] if paths else None for paths in lists]
            columns = {name: pa.array(lists, pa.list_(pa.string())), f"{name}_top": pa.array(tops)}
            return {key: pa.chunked_array([column]) for key, column in columns.items()}
        for mark in PATHS if self.config.applies("category_paths") else ():
            share = pc.mean(pc.cast(pc.match_substring(filled, mark), pa.float64())).as_py()
            if share < (0.1 if named else 0.5) or (not named and mark != " > "):
                continue
            literal = mark.strip().replace("|", r"\|")
            parts = pc.replace_substring_regex(texts, rf"\s*{literal}\s*", "\x1f")
            parts = pc.split_pattern(parts, "\x1f")
            top = pc.list_element(parts.combine_chunks(), 0)
            self.report.add_rows("category_paths_split", pc.match_substring(texts, mark), texts)
            return {name: parts, f"{name}_top": pa.chunked_array([top])}
        if pc.any(pc.match_substring(filled, "|")).as_py():
            return {name: pc.split_pattern(texts, "|")}
        return {name: texts}


def _has_lists(name: str, values: pa.ChunkedArray) -> bool:
    """Whether values are lists of category paths, such as `Drinks > Tea, Sale` of WooCommerce.

    Names such as `Food, Beverages & Tobacco` have commas, too. The name of the column says that it
    is a list, or else what stands before the comma must be a path of other values.
    """
    paths, comma = pc.match_substring(values, ">"), pc.match_substring(values, ",")
    if not (pc.any(paths).as_py() and pc.any(comma).as_py()):
        return False
    if normalised(name) in LISTS:
        return True
    known = {path for text in pc.unique(values.filter(pc.invert(comma))).to_pylist()
             for path in _paths(text)}  # fmt: skip
    firsts = [re.split(LIST, text)[0] for text in pc.unique(values.filter(comma)).to_pylist()]
    return 2 * sum(_paths(first)[-1] in known for first in firsts) >= len(firsts)


def _paths(text: str) -> list[str]:
    """The paths in a list, each after the paths above it.

    >>> _paths("Drinks > Tea, Sale")
    ['Drinks', 'Drinks > Tea', 'Sale']
    """
    paths: list[str] = []
    for path in re.split(LIST, text):
        names = re.split(r"\s*>\s*", path.replace("\\,", ",").strip())
        paths += [" > ".join(names[: end + 1]) for end in range(len(names))]
    return list(dict.fromkeys(paths)) if paths else [text]


FIELDS = ("title", "price", "category", "brand")
LATEST = ("price",)  # the others are the most frequent value
NEGATIVE = r"^\D*[-\x{2212}(]\D*\d|\d-$"  # prices of lines of returns, 12,90- in those of SAP
MOST_PARTS = 32  # that wait to be merged


@dataclass
class ItemFields:
    """Gathers the fields of each item while the events are read.

    Attributes:
        columns: field -> name of its column in the events.
        parts: field -> tables with `item`, `value`, `rows` and `last`, the time of the last row.
        rows: events so far, which are times where there are no others.
    """

    columns: Mapping[str, str]
    parts: dict[str, list[pa.Table]] = field(default_factory=dict)
    rows: int = 0

    def take(self, events: pa.Table) -> pa.Table:
        """Note the columns named as `FIELDS`, and return the events without them."""
        if not self.columns:
            return events
        times = pa.array(np.arange(self.rows, self.rows + events.num_rows))
        if "timestamp" in events.column_names:
            times = events["timestamp"]
        self.rows += events.num_rows
        for name in self.columns:
            part = pa.table(
                [events["item"], events[name], pa.array(np.ones(events.num_rows, np.int64)), times],
                ["item", "value", "rows", "last"],
            )
            left_out = is_no_id(part["value"])
            if name in LATEST:
                left_out = pc.or_(left_out, pc.match_substring_regex(part["value"], NEGATIVE))
            parts = self.parts.setdefault(name, [])
            parts.append(_merged(part.filter(pc.invert(left_out))))
            if len(parts) > MOST_PARTS:
                self.parts[name] = [_merged(pa.concat_tables(parts))]
        return events.drop_columns(list(self.columns))

    def texts(self, name: str) -> pa.Array:
        """The distinct values of a field."""
        parts = [part["value"] for part in self.parts.get(name, [])]
        chunks = [chunk for part in parts for chunk in part.chunks]
        return pc.unique(pa.chunked_array(chunks, pa.string()))

    def with_several(self, name: str) -> list[str]:
        """The items with several values of a field."""
        if not (parts := self.parts.get(name)):
            return []
        values = _merged(pa.concat_tables(parts)).group_by("item", use_threads=False)
        counts = values.aggregate([("value", "count")])
        items: list[str] = counts["item"].filter(pc.greater(counts["value_count"], 1)).to_pylist()
        return items

    def of(self, ids: pa.Array) -> dict[str, pa.Array]:
        """Field -> the value of each item; null where the events have none."""
        fields_by_role = {}
        for name, parts in self.parts.items():
            rows = _merged(pa.concat_tables(parts))
            keys = ["rows", "last"]
            if name in LATEST:
                paid = pc.match_substring_regex(rows["value"], "[1-9]")
                rows = rows.append_column("paid", pc.cast(paid, pa.int8()))
                keys = ["paid", "last", "rows"]
            rows = rows.sort_by([(key, "descending") for key in keys])
            best = rows.group_by("item", use_threads=False).aggregate([("value", "first")])
            position = pc.index_in(ids, value_set=best["item"].combine_chunks())
            fields_by_role[name] = best["value_first"].combine_chunks().take(position)
        return fields_by_role


def ids_of_names(parts: Iterable[pa.Table]) -> pa.Table:
    """`name` and `id` of the names that have one id in some rows, and none in others."""
    pairs = pa.table({name: pa.array([], pa.string()) for name in ("name", "id")})
    for part in parts:
        part = part.filter(pc.invert(is_no_id(part["name"]))).select(pairs.column_names)
        part = part.set_column(1, "id", pc.if_else(is_no_id(part["id"]), None, part["id"]))
        both = pa.concat_tables([pairs, part])
        pairs = both.group_by(pairs.column_names, use_threads=False).aggregate([])
    names = pairs.group_by("name", use_threads=False)
    counted = names.aggregate([("id", "min"), ("id", "count"), ([], "count_all")])
    some = pc.and_(pc.equal(counted["id_count"], 1), pc.equal(counted["count_all"], 2))
    return counted.filter(some).select(["name", "id_min"]).rename_columns(["name", "id"])


def _merged(part: pa.Table) -> pa.Table:
    """One row for each item and value."""
    grouped = part.group_by(["item", "value"], use_threads=False)
    made = grouped.aggregate([("rows", "sum"), ("last", "max")])
    return made.select(["item", "value", "rows_sum", "last_max"]).rename_columns(part.column_names)
