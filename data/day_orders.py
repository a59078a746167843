"""Whether the day or the month comes first in the dates of a file, by its values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from recsys.data.opening import TableFile
from recsys.data.report import Report, sentence
from recsys.data.time_formats import EARLIEST, TimeRules, read_moments
from recsys.errors import DataError

# In dates like 26-01-05, so few first and so many last numbers show that the year is the first.
FEW_YEARS, MANY_DAYS = 3, 10
NO_TEXTS = pa.chunked_array([], pa.string())
ABOVE_12 = r"(1[3-9]|2\d|3[01])(\D|$)"
DAY_SECOND, DAY_THIRD = (r"^\s*\d{4}[-/.]" + part + ABOVE_12 for part in ("", r"\d{1,2}[-/.]"))


class DayOrder(NamedTuple):
    """What the dates like 03/04/2024 of a column show.

    Attributes:
        seen: whether there are such dates.
        day: a value that begins with the day, such as 13/04/2024; None without any.
        month: a value that begins with the month, such as 04/13/2024; None without any.
        year_first: whether the dates are like 26-01-05 and begin with the year.
        day_second: whether they are like 2026-31-01, with the day before the month.
    """

    seen: bool
    day: str | None
    month: str | None
    year_first: bool = False
    day_second: bool = False

    @property
    def day_first(self) -> bool | None:
        """Whether the day comes first; None if no value shows it, or values of both kinds."""
        return None if (self.day is None) == (self.month is None) else self.day is not None


def show_day_first(columns: Iterable[pa.ChunkedArray]) -> DayOrder:
    """Find out whether dates like 03/04/2024 begin with the day.

    Args:
        columns: texts, part by part; reading stops at a first part without such dates, and where
            values of both kinds are known.
    """
    seen, day, month = False, None, None
    form = (
        r"^\s*(?:\pL\pL+\.?,? +)?"
        r"(?P<one>\d{1,2})(?P<mark>[-/.])(?P<two>\d{1,2})[-/.](?P<end>\d{2,4})"
    )
    for column in columns:
        every = pc.fill_null(column, "") if pa.types.is_string(column.type) else NO_TEXTS
        parts = pc.extract_regex(every, form)
        fitting = pc.is_valid(parts)
        texts, parts = every.filter(fitting), parts.filter(fitting)
        if not len(parts):
            if not seen:
                second, third = (pc.any(pc.match_substring_regex(every, one)).as_py()
                                 for one in (DAY_SECOND, DAY_THIRD))  # fmt: skip
                return DayOrder(False, None, None, day_second=bool(second and not third))
            continue
        first, mark, two, end = (pc.struct_field(parts, n) for n in ("one", "mark", "two", "end"))
        years, days_of_month = (pc.unique(part).to_pylist() for part in (first, end))
        if len(years) <= FEW_YEARS < MANY_DAYS <= len(days_of_month) and {
            len(text) for text in (*years, *days_of_month)
        } == {2}:
            return DayOrder(True, None, None, True)
        dotted = pc.equal(mark, ".")
        if not seen and pc.all(dotted).as_py():
            return DayOrder(True, texts[0].as_py(), None)
        seen = True
        # A date with dots begins with the day, whatever its numbers.
        days = pc.or_(dotted, pc.greater(pc.cast(first, pa.int64()), 12))
        months = pc.and_(pc.greater(pc.cast(two, pa.int64()), 12), pc.invert(days))
        day = day or next(iter(texts.filter(days).slice(0, 1).to_pylist()), None)
        month = month or next(iter(texts.filter(months).slice(0, 1).to_pylist()), None)
        if day and month:
            break
    return DayOrder(seen, day, month)


def orders_of_days(
    files: Sequence[TableFile],
    name: str | None,
    rules: TimeRules,
    report: Report,
    before: bool | None = None,
) -> dict[Path, TimeRules]:
    """The rules of times of each file, with the order of day and month that it shows.

    A file that shows none has the order of the others.

    Args:
        files: of a source.
        name: of the column of times; None without times.
        rules: from the settings.
        report: is told of files with different orders.
        before: whether the day came first in the files of the first run; None if that is not known.

    Raises:
        DataError: dates of both orders in one file, another order than in the first run, or no
            order that is shown.
    """
    orders: dict[Path, DayOrder] = {}
    if rules.day_first is None and name is not None:
        for file in files:
            order = show_day_first(batch[name] for batch in file.batches([name]))
            if order.day and order.month:
                where = f"{file.path}: column {name!r}"
                raise DataError(sentence("two_orders_of_days", where=where, order=order))
            if before is not None and order.day_first is (not before):
                words = ("day", "month") if order.day_first else ("month", "day")
                said = {"shown": order.day or order.month, "setting": str(order.day_first).lower()}
                raise DataError(
                    sentence("other_order_of_days", path=file.path, name=name, words=words, **said)
                )
            orders[file.path] = order
    if any(order.year_first for order in orders.values()):
        report.note(sentence("years_first", name=name))
    day_second = rules.day_second or any(order.day_second for order in orders.values())
    if day_second:
        report.note(sentence("days_second", name=name))
    shown = {order.day_first: path for path, order in orders.items()}
    shown.pop(None, None)
    if len(shown) > 1:
        day, month = shown[True], shown[False]
        values = {"of_day": orders[day].day, "of_month": orders[month].month}
        report.note(sentence("orders_of_days", name=name, day=day, month=month, **values))
    common = next(iter(shown)) if len(shown) == 1 else before
    for path, order in orders.items():
        if order.seen and order.day_first is None and common is None and not order.year_first:
            beside = ", and the other files contradict each other" if shown else ""
            raise DataError(sentence("no_order_of_days", path=path, name=name, beside=beside))
    own = {path: order.day_first for path, order in orders.items()}
    usual = common if rules.day_first is None else rules.day_first
    return {
        file.path: replace(
            rules,
            day_first=usual if own.get(file.path) is None else own[file.path],
            year_first=file.path in orders and orders[file.path].year_first,
            day_second=day_second,
        )
        for file in files
    }


def share_of_times(column: pa.ChunkedArray, rules: TimeRules) -> tuple[float, float]:
    """The share of the values that are times, and the share that are possible times of events."""
    filled = column.filter(pc.is_valid(column))
    if pa.types.is_string(filled.type):
        filled = filled.filter(pc.not_equal(filled, ""))
    if not len(filled):
        return 0.0, 0.0
    if rules.day_first is None:
        order = show_day_first([filled])
        day_second = rules.day_second or order.day_second
        rules = replace(rules, day_first=order.day_first is not False, year_first=order.year_first,
                        day_second=day_second)  # fmt: skip
    seconds = read_moments(filled, rules).second
    possible = pc.greater_equal(seconds, EARLIEST)
    return 1 - seconds.null_count / len(filled), (pc.sum(possible).as_py() or 0) / len(filled)
