"""Recognises columns that say how much of a line was taken back, or by which document.

`TakenBack` finds the rows that were.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recsys.data import returns
from recsys.data.availability import answers, each, is_missing, plain_answer
from recsys.data.column_words import EVENT_WORDS, all_of, is_of_a_user, is_of_later, rank, words
from recsys.data.event_table import connected
from recsys.data.report import Report, sentence
from recsys.data.sample import NO_COLUMN, Chosen, Found, Roles, Sample, free_columns, share_of
from recsys.data.texts import as_strings
from recsys.event_names import normalised

MOST_FILLED = 0.5  # share of the rows that may have the number of a return
SHARE_OF_NUMBERS = 0.9
SORTING_GB = 2.0  # memory for the states of all lines; what does not fit goes to a file
FEW_CHANGED = 5  # lines with several states, below which they may be equal lines of an order
# A file has a row for each state of a line if most lines that were taken back have another row, and
# nearly all with several rows several states. There, the first row is the latest if most lines are
# taken back before they are sold. In others, equal lines are pieces, of which some were returned.
EARLIER_STATES = f"""
    WITH of_files AS (
        SELECT
            file, line, count(*) AS rows, min(state) <> max(state) AS several,
            bool_or(back) AS back, arg_min(back, place) AS back_first,
            arg_min(state, place) AS first, arg_max(state, place) AS last
        FROM lines GROUP BY file, line
    ), logs AS (
        SELECT
            file,
            2 * count(*) FILTER (several AND back_first) > count(*) FILTER (several AND back)
                AS is_newest_first
        FROM of_files GROUP BY file HAVING
            count(*) FILTER (several AND back)
                >= greatest({FEW_CHANGED}, 0.8 * count(*) FILTER (back))
            AND count(*) FILTER (several) >= 0.95 * count(*) FILTER (rows > 1)
    ), latest AS (
        SELECT line, max(file) AS last_file FROM lines GROUP BY line
        HAVING min(state) <> max(state)
    )
    SELECT file, place
    FROM lines JOIN latest USING (line) JOIN of_files USING (file, line) LEFT JOIN logs USING (file)
    WHERE file < last_file
        OR state <> CASE is_newest_first WHEN true THEN first WHEN false THEN last END
    ORDER BY ALL
"""  # noqa: S608


def refunds(sample: Sample, roles: Roles, chosen: Chosen) -> Roles:
    """All roles, with those of such columns, whose second word is what they hold.

    `taken_back pieces` are a part of the quantity, `taken_back amount` is one of `taken_back total`
    of the same line, and `taken_back number` is filled where a line was returned. Lines
    that are returns have a mark (`lines_of_returns`). The states of `order_status closed` are those
    of Magento, where a refunded order is closed, and those of `order_status paid` say yes or no.
    """
    refund_roles: Roles = {}
    for role, match in roles.items():
        names = [match.column] if role.startswith("order_status") else []
        states = {text.lower() for n in names for text in pc.unique(sample.texts(n)).to_pylist()}
        refund_roles[f"{role} closed" if {"complete", "closed"} <= states else role] = match
    if chosen.get("taken_back") == NO_COLUMN:
        return refund_roles
    if lines := lines_of_returns(sample, chosen):
        return refund_roles | lines
    counted = "quantity" in roles and not returns.is_taken_back(roles["quantity"].column)
    marks = [role for role in refund_roles if re.fullmatch(r"taken_back( \d+)?", role)]
    for role in marks if chosen.get("taken_back") is None else ():
        values = sample.texts(refund_roles[role].column)
        more = returns.unread_marks(values)
        numbers = len(more) and not returns.read_pieces(values).null_count
        if numbers or (counted and _are_pieces(sample, roles, refund_roles[role].column)):
            del refund_roles[role]
    for name in free_columns(sample, refund_roles):
        values = sample.texts(name)
        if sample.counts[name] > 1 or not len(values) or is_of_a_user(name):
            continue
        kind = None
        if normalised(name).removeprefix("is") in words("paid"):
            said = answers(values, sample.table.num_rows, plain_answer)
            if said >= SHARE_OF_NUMBERS and chosen.get("order_status") != NO_COLUMN:
                refund_roles["order_status paid"] = Found(name, "by name and content")
            continue
        if rank(name, EVENT_WORDS["return_number"]) is not None:
            filled = pc.sum(each(values, lambda text: not is_missing(text))).as_py()
            kind = "number" if 0 < filled <= MOST_FILLED * sample.table.num_rows else None
        elif not returns.is_taken_back(name):
            continue
        elif any(word in normalised(name) for word in words("quantities")) or (
            counted and _are_pieces(sample, roles, name)
        ):
            numbers = 1 - returns.read_pieces(values).null_count / len(values)
            kind = "pieces" if counted and numbers >= SHARE_OF_NUMBERS else None
        elif "taken_back amount" not in refund_roles and (
            total := _total(sample, refund_roles, name)
        ):
            refund_roles["taken_back total"] = Found(total, "its values are those of whole refunds")
            kind = "amount"
        if kind is not None:
            number = len([role for role in refund_roles if role.startswith(f"taken_back {kind}")])
            role = f"taken_back {kind}" + (f" {number + 1}" if number else "")
            refund_roles[role] = Found(name, "by name and content")
    return refund_roles


def lines_of_returns(sample: Sample, chosen: Chosen) -> Roles:
    """The role of the lines that are returns by what the settings say of `taken_back`.

    `Sign=-` and `Order=*-RET` are the values of a column. Of a column without values, an amount is
    `taken_back below` 0, and a number in `taken_back document` is that of a credit note.
    """
    name, names = chosen.get("taken_back") or NO_COLUMN, sample.table.column_names
    column, _, value = name.partition("=")
    if value and column in names and name not in names:
        return {f"taken_back ={value}": Found(column, "named in the settings")}
    for form, pattern in returns.MARKS_OF_LINES.items() if name in names else ():
        if share_of(sample.texts(name), pattern):
            return {f"taken_back {form}": Found(name, "named in the settings")}
    return {}


def _are_pieces(sample: Sample, roles: Roles, name: str) -> bool:
    """Whether the numbers of a column such as `refunded` are a part of the quantity of each row."""
    values = sample.texts(name)
    digits = pc.all(pc.match_substring_regex(values, r"^\d{1,3}$")).as_py()
    is_mark = normalised(name).startswith("is") or returns.is_return_line(name)
    if not len(values) or not digits or is_mark:
        return False
    names = (name, roles["quantity"].column)
    taken, pieces = (
        returns.read_pieces(as_strings(sample.table[n], "quantity", sample.path)) for n in names
    )
    return bool(pc.all(pc.less_equal(taken, pieces)).as_py())


def _total(sample: Sample, roles: Roles, name: str) -> str | None:
    """The column of amounts that whole refunds are equal to; a price is one if there is no other.

    Of lines with several pieces, a price is not all that was paid.
    """
    refunded = as_strings(sample.table[name], name, sample.path)
    prices = [match.column for match in all_of("price", roles)]
    if "quantity" in roles:
        pieces = returns.read_pieces(sample.texts(roles["quantity"].column))
        prices = prices if pc.all(pc.equal(pieces, 1)).as_py() else []
    amounts = [
        column
        for column in free_columns(sample, roles)
        if column != name
        and sample.counts[column] == 1
        and not returns.is_taken_back(column)
        and not pa.types.is_nested(sample.table[column].type)
        and any(word in normalised(column) for word in words("amounts"))
    ]
    equal = dict[str, int]()
    for column in amounts + prices:
        amount = as_strings(sample.table[column], column, sample.path)
        equal[column] = pc.sum(returns.is_refunded_in_full(refunded, amount)).as_py()
    best = max(equal, key=lambda column: equal[column], default=None)
    return best if best is not None and equal[best] else None


@dataclass
class TakenBack:
    """Finds such rows, part by part.

    Attributes:
        roles: of the columns.
        report: is increased by the pieces that were taken back.
        shown: texts that show what marks in numbers of pieces mean.
        files: those that hold returns, by their names, and those of cancelled orders.
    """

    roles: Roles
    report: Report
    shown: Sequence[str]
    files: dict[Path, str] = field(default_factory=dict)

    def find_files(self, paths: Sequence[Path], *, new: bool) -> None:
        """Find the files that hold returns or cancelled orders; of `new` ones, others may not."""
        kinds = {path: returns.kind_of_file(path.stem) for path in paths}
        self.files = {path: kind for path, kind in kinds.items() if kind is not None}
        if len(self.files) == len(paths) and not new:
            self.files = {}
        for path, kind in self.files.items():
            self.report.note(sentence("file_of_returns", name=path.name, kind=kind))

    def marks(
        self, column: Mapping[str, pa.ChunkedArray], path: Path
    ) -> tuple[list[pa.ChunkedArray], list[pa.ChunkedArray], pa.ChunkedArray | pa.Scalar]:
        """Masks of rows that were returned, and cancelled, and the lines of returns themselves."""
        returned: list[pa.ChunkedArray] = []
        cancelled: list[pa.ChunkedArray] = []
        lines: Any = pa.scalar(False)
        refused = agreed = lines
        for role, match in self.roles.items():
            kind, _, form = role.partition(" ")
            if kind not in ("taken_back", "order_status") or form.startswith(("pieces", "total")):
                continue
            said = as_strings(column[role], kind, path)
            if form.endswith("closed"):
                said = pc.if_else(pc.equal(pc.utf8_lower(said), "closed"), "refunded", said)
            elif form == "paid":
                unpaid = each(said, lambda text: plain_answer(text) is False)
                said = pc.if_else(unpaid, "unpaid", said)
            elif form == "amount":
                total = as_strings(column["taken_back total"], kind, path)
                in_full = returns.is_refunded_in_full(said, total)
                said = pc.if_else(in_full, "yes", pc.if_else(pc.equal(said, ""), "", "no"))
            elif form.startswith("number") or returns.is_mark(form):
                mark = form if returns.is_mark(form) else "=*"
                said = pc.if_else(returns.read_marks(said, mark), "yes", "")
            is_state = rank(match.column, EVENT_WORDS["order_status"]) is not None
            is_line = returns.is_mark(form) or form.endswith("line")
            is_line = is_line or (form != "amount" and returns.is_return_line(match.column))
            if kind == "taken_back" and is_line and not is_state:
                returned.append(returns.read_taken_back(said))
                lines = pc.or_(lines, returned[-1])
                agreed = pc.or_(agreed, returned[-1]) if returns.is_mark(form) else agreed
                continue
            rows = cancelled if returns.is_cancellation(match.column) else returned
            if kind == "taken_back":
                rows.append(returns.read_taken_back(said))
            else:
                state = returns.read_order_status(said)
                for name, rows in (("cancelled", cancelled), ("returned", returned)):
                    rows.append(pc.fill_null(pc.equal(state, name), False))
                lines = pc.or_(lines, returned[-1]) if form.endswith("line") else lines
            if rows is returned and not form.startswith(("amount", "number")):
                refused = pc.or_(refused, each(said, returns.says_no))
                agreed = pc.or_(agreed, returned[-1])
        for kind, rows in (("returns", returned), ("cancelled orders", cancelled)):
            if kind in self.files.values():
                is_kind = self.files.get(path) == kind
                rows.append(pa.chunked_array([np.full(len(column["item"]), is_kind)]))
        if "returns" in self.files.values():
            lines = pc.or_(lines, returned[-1])
        # A line of a return that was refused is none, and no purchase either.
        refused = pc.and_(lines, pc.and_not(refused, agreed))
        if pc.any(refused).as_py():
            returned = [pc.and_not(rows, refused) for rows in returned]
            cancelled, lines = [*cancelled, refused], pc.and_not(lines, refused)
        return returned, cancelled, lines

    def pieces_left(
        self,
        pieces: pa.ChunkedArray,
        column: Mapping[str, pa.ChunkedArray],
        path: Path,
        returned: list[pa.ChunkedArray],
        cancelled: list[pa.ChunkedArray],
    ) -> pa.ChunkedArray:
        """The pieces that are left; rows of which none is are added to one of the lists."""
        texts = {
            match.column: as_strings(column[role], "quantity", path)
            for role, match in self.roles.items()
            if role.startswith("taken_back pieces")
        }
        if not texts:
            return pieces
        of_returns, of_cancellations = returns.pieces_taken_back(texts, self.shown)
        alone = pc.and_(pc.fill_null(pc.equal(pieces, 0), False), pc.greater(of_returns, 0))
        pieces = pc.if_else(alone, pc.negate(of_returns), pieces)  # a row of its own
        taken = pc.add(of_returns, of_cancellations)
        some = pc.fill_null(pc.and_(pc.greater(taken, 0), pc.greater(pieces, 0)), False)
        all_of_row = pc.and_(some, pc.fill_null(pc.greater_equal(taken, pieces), False))
        was_returned = pc.and_(all_of_row, pc.greater(of_returns, 0))
        returned.append(was_returned)
        cancelled.append(pc.and_not(all_of_row, was_returned))
        part = pc.and_not(some, all_of_row)
        self.report.add("pieces_taken_back", pc.sum(part).as_py() or 0)
        return pc.if_else(part, pc.subtract(pieces, taken), pieces)


def earlier_states(
    files: Mapping[Path, Iterable[pa.Table]], roles: Roles, order: str, taken: TakenBack
) -> dict[Path, NDArray[np.int64]]:
    """The places of rows with a line of an order that a later row or file has in another state.

    A line has one order, user, item, time and number of pieces. The last file decides, in the order
    of names and of the numbers in them, and in one with a row for each state of a line, the last
    row.

    Args:
        files: the rows of each file.
        roles: of the columns.
        order: the column with the numbers of orders; empty without any.
        taken: finds what was taken back.
    """
    same = [roles[role] for role in ("user", "item", "title", "quantity") if role in roles]
    time = roles.get("timestamp")
    has_time = time is not None and not is_of_later(time.column)  # not such as `updated_at`
    if time is not None and has_time:
        same += [time, *all_of("clock", roles)]
    names = [*dict.fromkeys([match.column for match in same] + [order] * bool(order))]
    states = [
        match.column
        for role, match in roles.items()
        if role.startswith(("order_status", "taken_back")) and not role.endswith((" line", "total"))
        and not returns.is_mark(role.partition(" ")[2])
        and not (role.startswith("taken_back") and returns.is_return_line(match.column))
    ]  # fmt: skip
    rows = {path: files[path] for path in sorted(files, key=_by_number) if path not in taken.files}
    found = dict.fromkeys(files, np.zeros(0, np.int64))
    if not states or not order:  # equal purchases of one day may be of two shops
        return found
    with (
        tempfile.TemporaryDirectory(prefix="recsys-data-") as folder,
        connected(Path(folder), SORTING_GB) as engine,
    ):
        engine.execute(
            "CREATE TABLE lines (file INTEGER, place BIGINT, line UBIGINT, state UBIGINT, "
            "back BOOLEAN)"
        )
        for number, (path, parts) in enumerate(rows.items()):
            place = 0
            for part in parts:
                column = {role: part[match.column] for role, match in roles.items()}
                returned, cancelled, lines = taken.marks(column, path)
                for role in (role for role in roles if role.startswith("taken_back pieces")):
                    pieces = returns.read_pieces(as_strings(column[role], role, path))
                    returned.append(pc.fill_null(pc.not_equal(pieces, 0), False))
                texts = {
                    f"c{n}": pc.fill_null(as_strings(part[name], name, path), "")
                    for n, name in enumerate([*names, *states])
                }
                back = pc.and_not(reduce(pc.or_, returned + cancelled), lines)
                engine.register("rows", pa.table({**texts, "back": back}))
                keys, said = [*texts][: len(names)], [*texts][len(names) :]
                engine.execute(
                    f"INSERT INTO lines SELECT {number}, {place} + row_number() OVER () - 1, "  # noqa: S608
                    f"hash({', '.join(keys)}), hash({', '.join(said)}), back FROM rows"
                )
                place += part.num_rows
        earlier = engine.sql(EARLIER_STATES).to_arrow_table()
    for number, path in enumerate(rows):
        found[path] = earlier["place"].filter(pc.equal(earlier["file"], number)).to_numpy()
    return found


def _by_number(path: Path) -> list[tuple[int, str]]:
    """A key that puts `orders-9` and `orders` before `orders-10`."""
    return [(int(part) if part.isdecimal() else 0, part) for part in re.split(r"(\d+)", path.stem)]
