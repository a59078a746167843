"""Recognises columns that say how much of a line was taken back, or by which document.

`TakenBack` finds the rows that were.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsys.data import returns
from recsys.data.availability import answers, each, is_missing, plain_answer
from recsys.data.column_words import EVENT_WORDS, all_of, is_of_a_user, rank, words
from recsys.data.report import Report, sentence
from recsys.data.sample import NO_COLUMN, Chosen, Found, Roles, Sample, free_columns, share_of
from recsys.data.texts import as_strings
from recsys.event_names import normalised

MOST_FILLED = 0.5  # share of the rows that may have the number of a return
SHARE_OF_NUMBERS = 0.9


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
