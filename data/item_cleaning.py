"""Cleans the items of a shop's export: ids, texts, prices, categories, availability."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import reduce
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recsys.data.availability import each, is_missing, read_available, read_plain_yes
from recsys.data.cleaning import MISSING, CleanConfig
from recsys.data.column_words import ITEM_WORDS, rank
from recsys.data.columns import Roles, all_of
from recsys.data.item_texts import plain
from recsys.data.opening import as_strings
from recsys.data.report import EXAMPLES, Report
from recsys.data.time_formats import TimeRules, read_times, show_day_first
from recsys.dataset import AVAILABILITY
from recsys.errors import DataError
from recsys.event_names import normalised

MARKUP = r"<[A-Za-z/!][^>]*>|&(#\d+|#[xX][0-9a-fA-F]+|[A-Za-z]+);"
BLANKS = r"\s+"
WHOLE = r"^\d+\.0$"  # an id that was written as a number with a decimal place
INTEGER = r"^-?(0|[1-9]\d{0,17})$"
DECIMAL = r"^-?(\d{1,18})?\.?\d{1,18}([eE][-+]?\d{1,2})?$"
ANSWER = r"(?i)^(true|false)$"
CURRENCY = r"(?i)(€|\$|£|¥|₹|zł|kr\b|\b(EUR|USD|GBP|CHF|JPY|CAD|AUD|PLN|SEK|NOK|DKK)\b)"
AMOUNT = r"^-?\d[\d.,'\s]*$"
ROW_NUMBER = re.compile(r"|Unnamed: \d+|__index_level_\d+__")  # pandas writes such columns
PATHS = (" > ", ">", " / ", "/", "|", "::")  # separators of category paths


def _is_of_magento(states: pa.ChunkedArray) -> bool:
    """Whether states of items are 1 for enabled and 2 for disabled."""
    return set(pc.unique(states.drop_null()).to_pylist()) <= {"1", "2", ""}


class ItemCleaner:
    """Makes the columns of the items table from the items file.

    Args:
        path: the file, for errors.
        roles: of its columns.
        config: the rules.
        times: how times are read.
        report: is increased by what was done.
    """

    def __init__(
        self, path: Path, roles: Roles, config: CleanConfig, times: TimeRules, report: Report
    ) -> None:
        self._path, self._config, self._times, self._report = path, config, times, report
        self._column = {role: found.column for role, found in roles.items()}

    def clean(self, table: pa.Table) -> pa.Table:
        """The described items: `item_id`, `title`, `text`, availability, and attributes.

        Raises:
            DataError: a column of ids or texts that holds no plain values.
        """
        ids = pc.fill_null(as_strings(table[self._column["id"]], "id", self._path), "")
        if pc.all(pc.match_substring_regex(ids, WHOLE)).as_py():
            ids = pc.replace_substring_regex(ids, r"\.0$", "")  # as in the events
        known = pc.invert(pc.is_in(pc.utf8_lower(ids), value_set=MISSING))
        self._count("item_rows_without_id_dropped", pc.invert(known), None)
        table, ids = table.filter(known), ids.filter(known)
        first = first_of_each(ids)
        repeated = np.ones(len(ids), bool)
        repeated[first] = False
        self._count("repeated_item_rows_dropped", pa.chunked_array([pa.array(repeated)]), ids)
        available = self._available(table, ids)
        table, ids = table.take(pa.array(first)), ids.take(pa.array(first))
        columns = {"item_id": ids, "title": self._words("title", table, ids)}
        self._count("items_without_title", pc.equal(columns["title"], ""), ids)
        columns["text"] = self._words("text", table, ids)
        columns |= available | self._dates(table)
        taken = {self._column.get(role) for role in ("id", "title", "text", *AVAILABILITY)}
        taken.update(all_of("unavailable", self._column))
        taken.update(all_of("available", self._column))
        for name in table.column_names:
            if name not in taken:
                columns |= self._attribute(name, table[name])
        return pa.table(columns)

    def _count(self, rule: str, cases: pa.ChunkedArray, shown: pa.ChunkedArray | None) -> None:
        count = pc.sum(cases).as_py() or 0
        examples = [] if shown is None else shown.filter(cases).slice(0, EXAMPLES).to_pylist()
        self._report.add(rule, count, [str(text)[:60] for text in examples])

    def _words(self, role: str, table: pa.Table, ids: pa.ChunkedArray) -> pa.ChunkedArray:
        """Titles or texts without markup; empty where missing."""
        if role not in self._column:
            return pa.chunked_array([pa.array([""] * len(ids), pa.string())])
        texts = pc.fill_null(as_strings(table[self._column[role]], role, self._path), "")
        texts = pc.if_else(pc.is_in(pc.utf8_lower(texts), value_set=MISSING), "", texts)
        if not self._config.item_texts:
            return texts
        clean = texts
        dirty = pc.match_substring_regex(texts, MARKUP)
        if pc.any(dirty).as_py():
            parts = [plain(text, "text") for text in texts.filter(dirty).to_pylist()]
            clean = pc.replace_with_mask(
                clean.combine_chunks(), dirty.combine_chunks(), pa.array(parts, pa.string())
            )
            clean = pa.chunked_array([clean])
        clean = pc.utf8_trim_whitespace(pc.replace_substring_regex(clean, BLANKS, " "))
        self._count("item_texts_cleaned", pc.not_equal(clean, texts), ids)
        return clean

    def _available(self, table: pa.Table, ids: pa.ChunkedArray) -> dict[str, pa.ChunkedArray]:
        """Whether each item, in order of its first row, can be had.

        Rows with the same id are variants: a column allows an item if it allows one of them. Each
        column must allow it.
        """
        columns = []
        for name in all_of("available", self._column):
            texts = as_strings(table[name], "available", self._path)
            if normalised(name) == "status" and _is_of_magento(texts):
                texts = pc.replace_substring(texts, "2", "0")
            columns.append(read_available(texts))
        for name in all_of("unavailable", self._column):
            texts = as_strings(table[name], "unavailable", self._path)
            columns.append(
                pc.if_else(each(texts, is_missing), None, pc.invert(read_plain_yes(texts)))
            )
        if not columns:
            return {}
        item = ids.combine_chunks().dictionary_encode().indices
        said = pa.table([item, *columns], ["item", *map(str, range(len(columns)))])
        any_row = [(str(place), "any") for place in range(len(columns))]
        items = said.group_by("item", use_threads=False).aggregate(any_row)
        allowed = (pc.fill_null(items[f"{place}_any"], True) for place in range(len(columns)))
        return {"available": reduce(pc.and_, allowed)}

    def _dates(self, table: pa.Table) -> dict[str, pa.ChunkedArray]:
        found: dict[str, pa.ChunkedArray] = {}
        for role in ("available_from", "available_until"):
            if role in self._column:
                column = table[self._column[role]]
                shown = show_day_first([column])[1]
                order = self._times.day_first if shown is None else shown
                times = replace(self._times, day_first=order is not False)
                found[role] = read_times(column, times)
        return found

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
            texts = as_strings(column, name, self._path)
        except DataError:
            self._report.note(f"Column {name!r} of {self._path.name} holds {kind}; it is left out.")
            return {}
        empty = pc.is_in(pc.utf8_lower(texts), value_set=MISSING)
        texts = pc.if_else(pc.or_kleene(empty, pc.is_null(texts)), None, texts)
        if self._config.constant_columns and self._says_nothing(name, texts):
            self._report.add("columns_without_information_dropped", 1, [name])
            return {}
        if texts.null_count == len(texts):
            return {}
        values = self._price(name, texts)
        if values is None:
            values = typed(texts)
        return self._categories(name, values) if pa.types.is_string(values.type) else {name: values}

    def _says_nothing(self, name: str, texts: pa.ChunkedArray) -> bool:
        if ROW_NUMBER.fullmatch(name):
            return True
        distinct = pc.count_distinct(texts, mode="only_valid").as_py()
        return distinct == 0 or (distinct == 1 and not texts.null_count and len(texts) > 1)

    def _price(self, name: str, texts: pa.ChunkedArray) -> pa.ChunkedArray | None:
        """Prices as numbers; None if the column holds none, or plain numbers."""
        if not self._config.prices:
            return None
        filled = texts.drop_null()
        if not pc.any(pc.match_substring_regex(filled, rf"{CURRENCY}|,\d")).as_py():
            return None
        bare = pc.replace_substring_regex(
            pc.replace_substring_regex(texts, CURRENCY, ""), r"\s|'", ""
        )
        amount = pc.match_substring_regex(pc.fill_null(bare, ""), AMOUNT)
        named = name == self._column.get("price") or rank(name, ITEM_WORDS["price"]) == 0
        money = pc.match_substring_regex(pc.fill_null(texts, ""), CURRENCY)
        share = (pc.sum(amount).as_py() or 0) / len(filled)
        if share < 0.9 or not (named or pc.sum(money).as_py() >= 0.9 * len(filled)):
            return None
        bare = pc.if_else(amount, bare, None)
        point = pc.match_substring_regex(bare, r"\.\d{1,2}$")
        comma = pc.match_substring_regex(bare, r",\d{1,2}$")
        if pc.any(comma).as_py():  # dots divide thousands, unless a row ends like 12.50
            other = pc.replace_substring(pc.replace_substring(bare, ".", ""), ",", ".")
            bare = pc.if_else(point, pc.replace_substring(bare, ",", ""), other)
        else:
            bare = pc.replace_substring(bare, ",", "")
        whole = pc.match_substring_regex(bare, DECIMAL)
        self._count("prices_read", amount, texts)
        return pc.cast(pc.if_else(whole, bare, None), pa.float64())

    def _categories(self, name: str, texts: pa.ChunkedArray) -> dict[str, pa.ChunkedArray]:
        """A list for a path of categories, with its first part; a list for a text with `|`."""
        place = rank(name, ITEM_WORDS["category"])
        named = name == self._column.get("category") or place in (0, 1)
        filled = texts.drop_null()
        for mark in PATHS if self._config.category_paths else ():
            share = pc.mean(pc.cast(pc.match_substring(filled, mark), pa.float64())).as_py()
            if share < (0.1 if named else 0.5) or (not named and mark != " > "):
                continue
            parts = pc.split_pattern(
                pc.replace_substring_regex(texts, rf"\s*{_literal(mark)}\s*", "\x1f"), "\x1f"
            )
            top = pc.list_element(parts.combine_chunks(), 0)
            self._count("category_paths_split", pc.match_substring(texts, mark), texts)
            return {name: parts, f"{name}_top": pa.chunked_array([top])}
        if pc.any(pc.match_substring(filled, "|")).as_py():
            return {name: pc.split_pattern(texts, "|")}
        return {name: texts}


def typed(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    """Texts as integers, numbers or booleans if all of them are; `007` remains a text."""
    filled = texts.drop_null()
    for pattern, kind in ((INTEGER, pa.int64()), (DECIMAL, pa.float64()), (ANSWER, pa.bool_())):
        if pc.all(pc.match_substring_regex(filled, pattern)).as_py():
            if kind == pa.float64() and pc.any(pc.match_substring_regex(filled, r"^-?0\d")).as_py():
                continue
            return pc.cast(pc.utf8_lower(texts), kind)
    return texts


def first_of_each(column: pa.ChunkedArray) -> NDArray[np.int64]:
    """The rows at which a value appears for the first time, ascending."""
    indices = column.combine_chunks().dictionary_encode().indices.to_numpy(zero_copy_only=False)
    return np.sort(np.unique(indices, return_index=True)[1])


def _literal(mark: str) -> str:
    return mark.strip().replace("|", r"\|")
