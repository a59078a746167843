"""Orders and their lines: equal lines, those that leave out what the first one has, and joins."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recsys.data import returns
from recsys.data.advice import call_of
from recsys.data.cleaning import is_no_id
from recsys.data.column_words import (
    EVENT_FIELDS,
    EVENT_WORDS,
    has_role,
    is_of_later,
    order,
    rank,
    words,
)
from recsys.data.day_orders import share_of_times
from recsys.data.files import Damage
from recsys.data.json_lines import is_of_items, list_of_items
from recsys.data.opening import TableFile, open_table
from recsys.data.report import Report, sentence
from recsys.data.sample import SAMPLE_ROWS, SURE_SHARE, Sample, share_of
from recsys.data.texts import as_text, examples
from recsys.data.time_formats import TimeRules
from recsys.errors import DataError
from recsys.event_names import normalised, words_of

LINE = "\x1f line"  # the name of the column `line`
DATE, CLOCK = r"\d[-/.:]\d", r":|^\d{9,}"
MOST_FURTHER, LEAST_FIRST = 0.1, 0.5  # shares of the further and of the first lines with a value
STATES = ("order_status", "taken_back")
OF_ITEMS = (*EVENT_FIELDS.values(), *(EVENT_WORDS[role] for role in ("item", "quantity", "rating")))
LEAST_BLANK = 0.2  # share of the rows that are below the first line of their order


class OfOrders(NamedTuple):
    """The columns that are filled in the first line of each order alone.

    Attributes:
        names: of the columns; empty without such.
        number: the columns that tell the first lines: one has another value there than before, or
            the only one is filled there alone.
        is_full: whether each line has such values.
    """

    names: list[str]
    number: tuple[str, ...] = ()
    is_full: bool = False

    def first_lines(self, rows: pa.Table) -> NDArray[np.bool_]:
        """(rows,) whether each is the first line of an order."""
        if not self.is_full:
            return _filled(rows[self.number[0]])
        parts = [pc.fill_null(as_text(rows[name]), "") for name in self.number]
        order = pc.binary_join_element_wise(*parts, "\x1f").combine_chunks().dictionary_encode()
        order = order.indices.to_numpy()
        return np.append(True, order[1:] != order[:-1])[: len(order)]


def columns_of_orders(rows: pa.Table) -> OfOrders:
    """Find such columns, but for those of items, such as the price.

    They are filled in many first lines and hardly any other, and all columns of times are such,
    unless each line has a number and a state of orders is such, which few first lines may have.
    Without a number in each line, those of users and orders are too, and no other line has one.
    The user and a time of day stand for the number in a file without any.
    """
    once = [name for name, count in Counter(rows.column_names).items() if count == 1]
    filled = {n: _filled(rows[n]) for n in once if not pa.types.is_nested(rows[n].type)}
    times = [name for name in filled if _has_times(rows, name) and not is_of_later(name)]
    users = [name for name in filled if has_role("user", [name])]
    orders = [name for name in filled if has_role("session", [name])]
    states = [
        n for n in filled if returns.is_taken_back(n) or any(has_role(r, [n]) for r in STATES)
    ]
    of_orders = [n for n in orders if rank(n, EVENT_WORDS["session"][:2]) is not None]
    of_items = {n for n in filled if any(rank(n, words) is not None for words in OF_ITEMS)}
    of_items |= {n for n in states if any(word in normalised(n) for word in words("quantities"))}
    of_items -= {*times, *users, *orders}
    numbers: list[tuple[str, ...]] = [(name,) for name in orders + users]
    if users and not of_orders:
        fullest = sorted(times, key=lambda name: -filled[name].mean())
        clocks = (
            n for n in fullest if pc.any(pc.match_substring_regex(as_text(rows[n]), CLOCK)).as_py()
        )
        numbers += [(users[0], name) for name in clocks]
    for number in numbers if times else ():
        is_full = len(number) > 1 or bool(filled[number[0]].all())
        first = OfOrders([], number, is_full).first_lines(rows)
        further = ~first
        if not first[:1].any() or not further.any():
            continue
        names = []
        for name, mine in filled.items():
            in_first, in_further = mine[first].mean(), mine[further].mean()
            is_such = in_further <= MOST_FURTHER * (in_first if name in states else 1)
            is_such = is_such and (name in states or in_first > LEAST_FIRST)
            names += [name] if is_such and in_first and name not in of_items else []
        if not is_full:
            few = first.mean() > 1 - LEAST_BLANK
            other = any((filled[name] & further).any() for name in (*users, *of_orders, *times))
            names = [] if few or other else names
        is_order = len(number) > 1 or number[0] in of_orders
        has_state = is_full and is_order and not {*states}.isdisjoint(names)
        if has_state or ({*times} <= {*names} and (is_full <= (number[0] in orders))):
            return OfOrders(names, number, is_full)
    return OfOrders([])


def _has_times(rows: pa.Table, name: str) -> bool:
    """Whether a column has times, by its name or by most of its values."""
    texts = as_text(rows[name])
    rules = TimeRules("auto", "UTC", None, 0)
    return has_role("timestamp", [name]) or (
        share_of(texts.filter(_filled(texts)), DATE) >= SURE_SHARE
        and share_of_times(texts, rules)[1] >= SURE_SHARE
    )


def filled_down(
    parts: Iterable[pa.Table], of_orders: OfOrders, report: Report
) -> Iterator[pa.Table]:
    """The rows of a file, in order, each with the values of the first line of its order."""
    last = None
    for rows in parts if of_orders.names else ():
        every = rows if last is None else pa.concat_tables([last, rows])
        first = of_orders.first_lines(every)
        report.add("further_lines_of_orders", int(np.count_nonzero(~first)))
        source = pa.array(np.maximum.accumulate(np.where(first, np.arange(len(first)), 0)))
        for name in {*of_orders.names} & {*every.column_names}:
            own = pa.array(_filled(every[name]))
            made = pc.if_else(own, every[name], every[name].take(source))
            every = every.set_column(every.column_names.index(name), name, made)
        last = every.slice(every.num_rows - 1)
        yield every.slice(every.num_rows - rows.num_rows)
    yield from () if of_orders.names else parts


def number_of_orders(names: Iterable[str], used: Set[str]) -> str:
    """The column with the numbers of orders, one that is used if there is; empty without any."""
    groups = EVENT_WORDS["session"][:2]
    orders = [name for name in names if rank(name, groups) is not None]
    return min(orders, key=lambda name: (name not in used, order(name, groups)), default="")


def with_lines(parts: Iterable[pa.Table], used: Set[str], file: TableFile) -> Iterator[pa.Table]:
    """The used columns of rows with all columns, and `line`, as in `RawData.events`."""
    order = number_of_orders(file.names, used)
    with duckdb.connect(":memory:") as engine:
        for rows in parts:
            columns = [f"c{number}" for number in range(rows.num_columns)]
            own = [f"CAST(c{rows.column_names.index(order)} AS VARCHAR)"] if order else []
            engine.register("rows", rows.rename_columns(columns))
            line = engine.execute(
                f"SELECT (hash({', '.join(['0', *own])}) >> 32 << 32) "  # noqa: S608
                f"| (hash($1, {', '.join(columns)}) >> 32) AS line FROM rows",
                [str(file.path)],
            ).to_arrow_table()
            rows = rows.select([name for name in rows.column_names if name in used])
            yield rows.append_column(LINE, line["line"])


def _filled(column: pa.ChunkedArray) -> NDArray[np.bool_]:
    filled = column.is_valid()
    if pa.types.is_string(column.type):
        filled = pc.fill_null(pc.not_equal(pc.utf8_trim_whitespace(column), ""), False)
    return np.asarray(filled)


def refuse_orders_beside_lines(files: Sequence[TableFile], items: str = "") -> None:
    """Refuse a file of lines of orders beside one that says who made each order, and when.

    Raises:
        DataError: they are such files; the message has the command that joins them.
    """
    for lines, orders in permutations(files, 2):
        of_lines, of_orders = (
            {role for role in ("item", "user", "timestamp") if has_role(role, file.names)}
            for file in (lines, orders)
        )
        keys = [n for n in lines.names if rank(n, EVENT_WORDS["session"][:2]) is not None]
        pairs = [(own, own) for own in keys if own in orders.names]
        pairs += [(own, name) for own in keys for name in orders.names if name.lower() == "id"]
        is_listed = any(rank(n, EVENT_WORDS["item"][:2]) is not None for n in orders.names)
        if pairs and "item" in of_lines and of_orders - of_lines and not is_listed:
            command = call_of(print_lines, lines.path, "joined.csv", orders.path, *pairs[0])
            command += f" --items {shlex.quote(items)}" * bool(items)
            said = {"path": lines.path, "other": orders.path.name, "command": command}
            raise DataError(sentence("orders_and_lines", **said))


def print_lines(lines: str, orders: str, own: str, other: str) -> None:
    """Print lines with the columns of their orders, as `refuse_orders_beside_lines` advises."""
    made, every = (_texts(path).to_pandas() for path in (lines, orders))
    every = every[every[other].fillna("") != ""].drop_duplicates(other).rename(columns={other: own})
    made.merge(every, "left", own, suffixes=("", " of order")).to_csv(sys.stdout, index=False)


def refuse_returns_beside_orders(files: Sequence[TableFile], items: str = "") -> None:
    """Refuse a file of what was taken back beside one of orders with other columns, or with items.

    Raises:
        DataError: they are such files; the message has the command that writes one of both.
    """
    for orders, back in permutations(files, 2):
        kind = returns.kind_of_file(back.path.stem)
        is_numbered = has_role("session", back.names) or has_role("item", back.names)
        if kind is not None and is_numbered and returns.kind_of_file(orders.path.stem) is None:
            command = call_of(print_returns, orders.path, "with-returns.csv", back.path)
            command += f" --items {shlex.quote(items)}" * bool(items)
            said = {"path": back.path, "other": orders.path.name, "command": command, "kind": kind}
            if parts := _columns_of_parts(back, kind):
                raise DataError(sentence("parts_taken_back", columns=", ".join(parts), **said))
            raise DataError(sentence("returns_beside_orders", **said))


def _columns_of_parts(back: TableFile, kind: str) -> list[str]:
    """The columns of a file of what was taken back by which not all of it need be.

    They have pieces of cancelled lines, amounts of orders whose items are not named, answers and
    states that do not say that a row was taken back, or an item or a date in some rows only.
    """
    sample, parts = Sample(back.path, back.sample(SAMPLE_ROWS)), []
    of_items = has_role("item", back.names)
    for name in sample.counts:
        values = sample.texts(name)
        filled = len(values.filter(pc.invert(is_no_id(values))))
        some = 0 < filled < sample.table.num_rows
        if has_role("item", [name]):
            keeps = filled < sample.table.num_rows
        elif has_role("order_status", [name]):
            keeps = returns.read_order_status(values).null_count > 0
        elif has_role("quantity", [name]):
            keeps = kind != "returns" or not of_items
        elif any(has_role(role, [name]) for role in ("session", "user", "timestamp")):
            continue
        else:
            says = returns.share_of_taken_back(values, sample.table.num_rows) >= SURE_SHARE
            keeps = some and says and returns.is_taken_back(name)
            keeps = keeps or returns.says_kept(name, values)
            keeps = keeps or not (of_items or words("amounts").isdisjoint(words_of(name)))
        if keeps:
            parts.append(f"{name!r} ({examples(values)}{', or empty' * (not filled or some)})")
    return parts


def print_returns(orders: str, returned: str) -> None:
    """Print the rows of both files, as `refuse_returns_beside_orders` advises.

    Columns of returns are called as those with the same role among the orders, and what they lack
    is taken from the order of their number, whose own lines say it without items or if cancelled.
    """
    made, back, of_order = _texts(orders), _texts(returned), list[str | None]()
    for role in ("session", "user", "item", "quantity", "timestamp"):
        own, theirs = (
            next((n for n in table.column_names if has_role(role, [n])
                  or (role == "timestamp" and _has_times(table, n))), None)
            for table in (made, back)
        )  # fmt: skip
        if role == "timestamp" and not theirs:
            of_order.append(own)
        if own and theirs and own not in back.column_names and theirs not in made.column_names:
            names = [own if name == theirs else name for name in back.column_names]
            back = back.rename_columns(names)
    every, rows = made.to_pandas(), back.to_pandas()
    numbers = [n for n in rows if n in every and has_role("session", [n])]
    if numbers:
        missing = [n for n in every if n in of_order or (n not in rows and has_role("user", [n]))]
        users = every.loc[every[numbers[0]].fillna("") != "", [numbers[0], *missing]]
        rows = rows.merge(users.drop_duplicates(numbers[0]), "left", numbers[0])
    mark = "is_return" if returns.kind_of_file(Path(returned).stem) == "returns" else "is_cancelled"
    keys = [n for n in rows if n in every and (n in numbers[:1] or has_role("item", [n]))]
    if numbers and (mark == "is_cancelled" or len(keys) == 1):
        numbered = rows[rows[numbers[0]].fillna("") != ""]
        lines, gone = (pd.MultiIndex.from_frame(table[keys]) for table in (every, numbered))
        mark = "is_returned" if mark == "is_return" else mark
        every[mark] = np.where(lines.isin(gone), "yes", "no")
        rows = rows[:0]
    else:
        every, rows = every.assign(**{mark: "no"}), rows.assign(**{mark: "yes"})
    pd.concat([every, rows]).to_csv(sys.stdout, index=False)


def print_pieces_returned(path: str) -> None:
    """Print JSON lines of orders, each line with the pieces that lists such as `refunds` take back.

    Refunds of the whole amount are of all lines; others that name no line are counted.
    """
    unknown = 0
    for row in (row for batch in open_table(Path(path)).batches() for row in batch.to_pylist()):
        for name, cells in row.items():  # of which a reader of JSON lines leaves records as texts
            if isinstance(cells, list) and all(isinstance(c, dict) and "json" in c for c in cells):
                row[name] = [json.loads(cell["json"], parse_float=str) for cell in cells]
        lists = {name: cells for name, cells in row.items() if isinstance(cells, list)}
        refunds = [r for name in lists if returns.is_taken_back(name) for r in row.pop(name)]
        name = list_of_items({n: [f"{n}.{key}" for r in lists[n] for key in r] for n in lists})
        lines: list[dict[str, Any]] = [row] if name is None else lists[name]
        pieces = [
            next((k for k in line if has_role("quantity", [k])), "quantity") for line in lines
        ]
        for line, key in zip(lines, pieces, strict=True):
            line |= {key: line.get(key, 1), "qty_returned": 0}
        for refund in refunds:
            taken = list(_pieces_of(refund, lines))
            if not taken and 0 < _amount(row) <= _amount(refund):
                taken = [(number, None) for number in range(len(lines))]
            unknown += not taken
            for at, number in taken:
                own = lines[at][pieces[at]] if number is None else number
                lines[at]["qty_returned"] += abs(float(own or 0))
        sys.stdout.write(f"{json.dumps(row, ensure_ascii=False, default=str)}\n")
    if unknown:
        sys.stderr.write(sentence("refunds_without_lines", count=unknown))


def _amount(record: dict[str, Any]) -> float:
    """The largest amount in a record, such as the total, without its sign."""
    texts = [str(record[key]) for key in record if not words("amounts").isdisjoint(words_of(key))]
    numbers = (abs(float(text)) for text in texts if re.fullmatch(r"-?\d+(\.\d+)?", text))
    return max(numbers, default=0.0)


def _pieces_of(record: Any, lines: Sequence[Any], pieces: Any = None) -> Iterator[tuple[Any, Any]]:
    """The lines that a record of a refund names, inside it too, and how many pieces of each."""
    if not isinstance(record, dict):
        for part in record if isinstance(record, list) else ():
            yield from _pieces_of(part, lines, pieces)
        return
    if pieces is None:
        pieces = next((record[key] for key in record if has_role("quantity", [key])), None)
    ids = {str(record[key]) for key in record if re.search("(?i)(line|item).*id$", key)}
    items = [key for key in record if is_of_items(key) and record[key]]
    same = [
        len(items) + 1
        if str(line.get("id")) in ids
        else sum(record[k] == line.get(k) for k in items)
        for line in lines
    ]
    if any(same):
        yield same.index(max(same)), pieces
        return
    for part in record.values():
        yield from _pieces_of(part, lines, pieces)


def _texts(path: str) -> pa.Table:
    table = open_table(Path(path)).read(Damage())
    return pa.table([*map(as_text, table.columns)], table.column_names)
