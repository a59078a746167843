"""Recognises columns that say how much of a line was taken back, or by which document."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc

from recsys.data import returns
from recsys.data.availability import answers, each, is_missing, plain_answer
from recsys.data.column_words import EVENT_WORDS, all_of, is_of_a_user, rank, words
from recsys.data.sample import NO_COLUMN, Found, Roles, Sample, free_columns
from recsys.data.texts import as_strings
from recsys.event_names import normalised

MOST_FILLED = 0.5  # share of the rows that may have the number of a return
SHARE_OF_NUMBERS = 0.9


def refunds(sample: Sample, roles: Roles, chosen: Mapping[str, str | None]) -> Roles:
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


def lines_of_returns(sample: Sample, chosen: Mapping[str, str | None]) -> Roles:
    """The role of the lines that are returns by what the settings say of `taken_back`.

    `Sign=-` and `Order=*-RET` are the values of a column. Of a column without values, an amount is
    `taken_back below` 0, and a number in `taken_back document` is that of a credit note.
    """
    name, names = chosen.get("taken_back") or NO_COLUMN, sample.table.column_names
    column, _, value = name.partition("=")
    if value and column in names and name not in names:
        return {f"taken_back ={value}": Found(column, "named in the settings")}
    form = returns.marks_of_lines(sample.texts(name)) if name in names else None
    return {f"taken_back {form}": Found(name, "named in the settings")} if form else {}


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
