"""Reads whether the event of a row was taken back: returned, refunded, cancelled, or not paid.

What was returned was bought, and is negative feedback. What was cancelled or not paid says nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from recsys.data.availability import answers, each, is_missing, plain_answer
from recsys.data.column_words import EVENT_WORDS, has_role, rank, words
from recsys.data.numbers import EITHER, FORMS, read_amounts
from recsys.data.service_lines import wildcard
from recsys.data.texts import each_value
from recsys.event_names import (
    ASKED,
    DENIED,
    NOT,
    PURCHASE,
    is_denied,
    is_partial,
    is_return,
    level,
    normalised,
    words_of,
)

DATE = re.compile(r"\d{4}-\d{1,2}-\d{1,2}|\d{1,2}[./-]\d{1,2}[./-]\d{2,4}|\d{8,13}$")
CANCELLED, RETURNED, PAID, KEPT, NO_EVENTS, IN_FULL = map(
    words, ("cancelled", "returned", "paid", "kept", "no_events", "in_full")
)
SALE_CODES, RETURN_CODES, TAKEBACKS = map(words, ("sale_codes", "return_codes", "takebacks"))
PIECES = (
    r"(?i)^\+?(?P<less>[-\x{2012}\x{2013}\x{2212}(]|minus|moins|menos|meno|min)?\s*(?:x\s*)?"
    r"(?P<n>\d{1,3}(?:[\s\x{A0}\x{202F}'\x{2019}]\d{3})+(?:[.,]\d+)?|[\d.,]{0,12}\d)"
    r"\s*(?:[x\x{D7}]|\pL+\.?)?\s*(?P<end>[-)])?$"  # perhaps with a unit, as 2 Stk and 2x
)
BELOW_1000 = r"^[1-9]\d{0,2}$"
MARKED = FORMS[1:]  # numbers with a mark before decimals or between thousands
MOST_KINDS = 20  # distinct values of a column that says what kind of document a line is of
SURE_KINDS = 0.9  # share of the rows with a kind of a known strength
PARTS = r" [-\u2013\u2014/|] |[:,;()\[\]]"  # between the parts of a state
SIGN = r"[^\pL\d]*(?:\pL{1,3}\.?\s|(?i:eur|usd|gbp|chf))?"  # EUR -5 and -EUR 5; SO-5 is a code
BELOW_0 = rf"^\(\D*\d.*\)$|^{SIGN}[-−](?:\pL{{1,3}}\.?)?{SIGN}\d|\d\s*([-−]|(?i:cr))$"
CREDIT_NOTE = rf"(?i)^({'|'.join(sorted(words('credit_numbers')))})([-_/ ]|\d)"
MARKS_OF_LINES = {"below": BELOW_0, "document": CREDIT_NOTE}


def read_taken_back(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    """Whether a column such as `cancelled_at` says yes or has a date: (rows,) bool."""
    return each(texts, lambda text: _says(text) is True)


def unread_marks(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    """The values of a column such as `returned` that may say more than is read of them."""
    return texts.filter(each(texts, lambda text: may_be_yes(text) and _says(text) is not True))


def share_of_taken_back(texts: pa.ChunkedArray, rows: int) -> float:
    """The share of filled values that are yes, no or a date; 0 if all of several `rows` say yes."""
    return answers(texts, rows, _says)


def is_cancellation(name: str) -> bool:
    """Whether a column such as `cancelled_at`, by its name, says what was cancelled.

    >>> is_cancellation("Storno-Datum"), is_cancellation("returned")
    (True, False)
    """
    key = normalised(name).replace("estorn", "")  # Portuguese: paid back
    return any(
        word in key for word in ("cancel", "storn", "annul", "anul", "void", "delet", "skip")
    )


def is_taken_back(name: str) -> bool:
    """Whether a name is that of a return or a cancellation."""
    return (
        is_return(name) or "rma" in words_of(name) or (level(name) == 0 and is_cancellation(name))
    )


def values_of_returns(name: str, texts: pa.ChunkedArray) -> pa.ChunkedArray:
    """The values that may say yes, of a column that the name says to be of what was taken back."""
    is_named = is_taken_back(name) or is_denied(name)
    return texts.filter(each(texts, may_be_yes)) if is_named else texts[:0]


def may_be_yes(text: str) -> bool:
    """Whether a value is there, and is neither no nor 0."""
    return plain_answer(text) is not False and not is_missing(text)


def kind_of_file(name: str, columns: Sequence[str] | None = None) -> str | None:
    """What a file or a sheet holds by its name, if that was taken back and it holds nothing else.

    >>> [kind_of_file(name) for name in ("Retouren 2026", "cancelled orders", "orders and returns")]
    ['returns', 'cancelled orders', None]
    """
    if not (NOT | words("beside_returns")).isdisjoint(words_of(name)):
        return None
    orders = any(rank(n, EVENT_WORDS["session"][:2]) is not None for n in columns or ())
    sure = columns is None or orders or all(has_role(role, columns) for role in ("user", "item"))
    if not sure and any(word in normalised(name) for word in words("no_returns")):
        return None  # such as reasons of returns
    if is_return(name) or "rma" in words_of(name):
        return "returns"
    return "cancelled orders" if is_cancellation(name) else None


def says_no(text: str) -> bool:
    """Whether an answer or a state says that a row was not taken back.

    >>> [says_no(text) for text in ("nein", "Return rejected", "abgelehnt", "yes", "refunded", "")]
    [True, True, True, False, False, False]
    """
    refused = is_denied(text) or not DENIED.isdisjoint(words_of(text))
    return refused or plain_answer(text) is False


def says_kept(name: str, texts: pa.ChunkedArray) -> bool:
    """Whether some values of a column beside returns say that a row was not taken back.

    >>> said = map(pa.chunked_array, ([["yes", "no"]], [["refund rejected"]], [["not as shown"]]))
    >>> [says_kept("x", values) for values in said]
    [True, True, False]
    """
    said = {text: plain_answer(text) for text in pc.unique(texts).to_pylist()}
    if None not in said.values():
        return False in said.values() and (True in said.values() or is_taken_back(name))
    known = NOT | DENIED | ASKED | RETURNED | CANCELLED
    states = (set(words_of(text)) for text in said)
    return any(words <= known and not words.isdisjoint(NOT | DENIED) for words in states)


def is_return_line(name: str) -> bool:
    """Whether a column such as `is_return`, by its name, marks lines that are returns."""
    return normalised(name) in words("return_lines")


def is_mark(form: str) -> bool:
    """Whether a form of `taken_back` marks lines of returns by the values of the column."""
    return form.startswith("=") or form in MARKS_OF_LINES


def read_marks(texts: pa.ChunkedArray, form: str) -> pa.ChunkedArray:
    """Whether the values of a column have a mark (`is_mark`): (rows,) bool.

    The mark `=A|*-RET` is one of some values, in which `*` stands for any characters; `=*` is any.
    """
    if form == "=*":
        return pc.invert(each(texts, is_missing))
    pattern = MARKS_OF_LINES.get(form) or "|".join(map(wildcard, form[1:].split("|")))
    return pc.fill_null(pc.match_substring_regex(texts, pattern), False)


def names_of_returns(texts: pa.ChunkedArray) -> list[str]:
    """The values of a column with few distinct ones that name a return or a cancellation."""
    kinds = pc.unique(texts)
    if len(kinds) > MOST_KINDS:
        return []
    return [kind for kind in kinds.to_pylist() if kind and is_taken_back(kind)]


def are_kinds(texts: pa.ChunkedArray) -> bool:
    """Whether the values of a column are kinds of lines: sales and returns, as in a ledger.

    States of orders, such as paid and refunded, are not: there, a sale was taken back itself.
    """
    if not names_of_returns(texts):
        return False
    kinds = pc.unique(texts).to_pylist()
    if any(not KEPT.isdisjoint(words_of(kind)) for kind in kinds):
        return False
    sold = any(level(kind) == PURCHASE for kind in kinds)
    return sold and share_of_events(texts) >= SURE_KINDS


def with_meanings(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    """Types of events, with what they mean if all are codes, or if they take back others."""
    codes = {text: normalised(text) for text in pc.unique(texts).to_pylist() if text}
    are_all = (SALE_CODES | RETURN_CODES).issuperset(codes.values())
    for text, code in codes.items():
        back = code in TAKEBACKS or (are_all and code in RETURN_CODES)
        if level(text) is None and (are_all or back):
            named = f"{text} ({'return' if back else 'sale'})"
            texts = pc.if_else(pc.equal(texts, text), named, texts)
    return texts


def take_back_others(texts: pa.ChunkedArray) -> bool:
    """Whether some kinds of events take back the others, which need have no usual names."""
    kinds = [kind for kind in pc.unique(texts).to_pylist() if kind]
    others = [kind for kind in kinds if normalised(kind) not in TAKEBACKS]
    known = {word for kind in others for word in words_of(kind)} & (KEPT | NO_EVENTS)
    return 0 < len(others) < len(kinds) <= MOST_KINDS and not known


def are_codes(texts: pa.ChunkedArray) -> bool:
    """Whether the values of a column are codes of both sales and returns, such as S and R."""
    codes = {normalised(text) for text in pc.unique(texts).to_pylist()}
    both = codes & SALE_CODES and codes & RETURN_CODES
    return bool(both) and codes <= SALE_CODES | RETURN_CODES


def share_of_events(texts: pa.ChunkedArray) -> float:
    """The share of values that name an event, such as `purchase`, and nothing else."""
    known = each(texts, lambda t: level(t) is not None and NO_EVENTS.isdisjoint(words_of(t)))
    return float(pc.mean(pc.cast(known, pa.float64())).as_py() or 0.0)


def read_order_status(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    """What the state of an order says: "cancelled", also if it was not paid, or "returned".

    Others, and orders of which a part was taken back, are null: (rows,) string.
    """
    return each_value(texts, _state, pa.string())


def unread_states(texts: pa.ChunkedArray, *, unknown: bool = False) -> list[str]:
    """The states that seem to say that an order was taken back, but are not known as such.

    With `unknown`, these are all states of which a part does not say that the order was kept.
    """
    states = names_of_returns(texts)
    if unknown:
        every = [text for text in pc.unique(texts).to_pylist() if not is_missing(text)]
        states += [text for text in every if text not in states and not _is_kept(text)]
    refusing, back = NOT | DENIED, RETURNED | CANCELLED | ASKED
    quiet = [
        t for t in states if not any(some.isdisjoint(words_of(t)) for some in (refusing, back))
    ]
    return [t for t in states if t not in quiet and _state(t) is None and not is_partial(t)]


def strange_states(texts: pa.ChunkedArray) -> list[str]:
    """The states of few that do not say in any part whether an order was kept or taken back."""
    known = KEPT | CANCELLED | RETURNED | ASKED | DENIED | NO_EVENTS
    few = pc.count_distinct(texts).as_py() <= MOST_KINDS
    unread = unread_states(texts, unknown=True) if few else []
    return [t for t in unread if known.isdisjoint(words_of(t)) and not is_taken_back(t)]


def knows_order_status(texts: pa.ChunkedArray) -> bool:
    """Whether most values are known states of orders."""
    known = each(texts, lambda t: not KEPT.isdisjoint(words_of(t)) or _state(t) is not None)
    return bool(len(texts)) and 2 * pc.sum(known).as_py() >= len(texts)


def is_refunded_in_full(refunded: pa.ChunkedArray, total: pa.ChunkedArray) -> pa.ChunkedArray:
    """Whether an amount is above 0 and the total: (rows,) bool."""
    amounts = [pc.replace_substring_regex(texts, r"[^\d.,]", "") for texts in (refunded, total)]
    above = pc.match_substring_regex(amounts[0], "[1-9]")
    return pc.fill_null(pc.and_(above, pc.equal(*amounts)), False)


def pieces_taken_back(
    texts: Mapping[str, pa.ChunkedArray], shown: Sequence[str]
) -> tuple[pa.Array, pa.Array]:
    """How many pieces of each row were returned, and how many cancelled: (rows,) float32 each.

    The names of the columns (`texts`) say which. Of several, such as those of returned and of
    refunded pieces, the largest counts.
    """
    taken: dict[bool, Any] = dict.fromkeys((False, True), pa.scalar(0, pa.float32()))
    for name, values in texts.items():
        kind, pieces = is_cancellation(name), pc.abs(read_pieces(values, shown))
        taken[kind] = pc.max_element_wise(taken[kind], pc.fill_null(pieces, 0))
    return taken[False], taken[True]


def read_pieces(texts: pa.ChunkedArray, shown: Sequence[str] = ()) -> pa.ChunkedArray:
    """Numbers of pieces, negative ones in the usual forms: (rows,) float32, null for no number.

    The forms are -1, also with Unicode's minus, 1- of SAP, and (1) of accounting. Marks of
    thousands are those of `numbers.read_amounts`, also by what is `shown` by `forms_of_pieces`.
    """
    encoded = texts.combine_chunks().dictionary_encode()
    words = encoded.dictionary
    every = pa.concat_arrays([_bare_pieces(words), _bare_pieces(pa.array(shown, pa.string()))])
    thousand = pc.any(pc.match_substring_regex(every, BELOW_1000)).as_py() or False
    pieces = read_amounts(every, thousand=thousand)[: len(words)]
    parts = pc.extract_regex(words, PIECES)
    signs = [pc.struct_field(parts, name) for name in ("less", "end")]
    less = pc.or_(pc.not_equal(signs[0], ""), pc.equal(signs[1], "-"))
    pieces = pc.cast(pc.if_else(less, pc.negate(pieces), pieces), pa.float32())
    return pa.chunked_array([pieces.take(encoded.indices)])


def _bare_pieces(texts: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """The digits and marks of numbers of pieces; null where there is no number."""
    number = pc.struct_field(pc.extract_regex(texts, PIECES), "n")
    return pc.replace_substring_regex(number, r"[^\d.,]", "")


def forms_of_pieces(batches: Iterable[pa.ChunkedArray]) -> list[str]:
    """Texts, one of each form, that show what the marks in numbers of pieces mean."""
    forms: dict[str, str] = {}
    for texts in batches:
        bare = _bare_pieces(texts)
        clear = pc.fill_null(pc.invert(pc.match_substring_regex(bare, EITHER)), False)
        for name, form in (*MARKED, ("below 1000", BELOW_1000)):
            if name not in forms:
                fitting = bare.filter(pc.and_(clear, pc.match_substring_regex(bare, form)))
                forms |= {name: fitting[0].as_py()} if len(fitting) else {}
    return list(forms.values())


def unclear_pieces(texts: pa.ChunkedArray, shown: Sequence[str]) -> pa.ChunkedArray:
    """The numbers of pieces such as 1.200, if no form in `shown` says what their marks mean."""
    if any("." in text or "," in text for text in shown):
        return texts[:0]
    bare = _bare_pieces(texts)
    return texts.filter(pc.fill_null(pc.match_substring_regex(bare, EITHER), False))


def pieces_of_events(
    pieces: pa.ChunkedArray | None,
    types: pa.ChunkedArray | None,
    back: pa.ChunkedArray,
    lines: pa.ChunkedArray | pa.Scalar,
) -> pa.ChunkedArray:
    """The column `quantity` of events (`recsys.data.raw.RawData`): (rows,) float32.

    Args:
        pieces: of each row; None for a file that does not say them.
        types: names of the events' types; None for a file of purchases.
        back: (rows,) whether the row says itself that it was taken back, so that its own pieces
            are bought and returned; negative pieces are a line beside that of the purchase.
        lines: (rows,) whether the row is such a line by a column such as `is_return`, so that its
            pieces are negative, whatever their sign.
    """
    if pieces is None:
        pieces = pa.chunked_array([pa.nulls(len(back), pa.float32())])
    pieces = pc.if_else(lines, pc.negate(pc.abs(pieces)), pieces)
    back = pc.and_(back, pc.invert(lines))
    counted: Any = pieces
    if types is not None:
        levels = {name: level(name) for name in pc.unique(types).drop_null().to_pylist()}
        negative, bought = (
            pc.is_in(types, pa.array([n for n, at in levels.items() if at == sign], pa.string()))
            for sign in (0, PURCHASE)
        )
        counted = pc.if_else(negative, pc.negate(pc.abs(pieces)), None)
        counted = pc.if_else(bought, pieces, counted)
    less = pc.fill_null(pc.less(pieces, 0), False)
    return pc.if_else(less, pieces, pc.if_else(back, 0, counted)).cast(pa.float32())


def _is_kept(state: str) -> bool:
    """Whether a part of a state says that an order was kept, and the others that, or who paid."""
    parts = [part for part in re.split(PARTS, state) if part.strip()]
    said = [{*words_of(part), "".join(words_of(part))} for part in parts]
    kept = any(not KEPT.isdisjoint(words) for words in said)
    kept = kept and (NOT.isdisjoint(words_of(state)) or "".join(words_of(state)) in KEPT)
    return kept and all(not (KEPT | NO_EVENTS).isdisjoint(words) for words in said)


def _says(text: str) -> bool | None:
    answer = True if normalised(text) in RETURN_CODES else plain_answer(text)
    if answer is not None or is_partial(text):
        return answer or False
    is_full = not IN_FULL.isdisjoint(words_of(text))
    return True if is_full or (DATE.match(text) and not is_missing(text)) else None


def _state(text: str) -> str | None:
    words = words_of(text)
    if "".join(words) in CANCELLED:
        return "cancelled"
    if "reversal" in words or is_partial(text):
        return None
    if is_denied(text):
        return None
    state = None
    parts = [text] if words[-1] in NOT else re.split(PARTS, text)
    for part in map(words_of, parts):
        for number, word in enumerate(part):
            if not NOT.isdisjoint(part[:number]) or part[-1] in NOT:
                said = "cancelled" if word in PAID else None
            elif word in CANCELLED:
                said = "cancelled"
            else:
                said = "returned" if word in RETURNED else None
            if said == "cancelled":
                return said
            state = said or state
    return state
