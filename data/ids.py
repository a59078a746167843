"""Brings the ids of all parts of a source to one form, or refuses forms that contradict others.

`100.0` is the id `100` where a program wrote whole numbers as decimals, often in one month only,
and a code beside `1.5`. Both spellings of a letter in Unicode are one letter. Letters stay as
they are, because requests name users as the shop does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from recsys.data.report import Report, sentence
from recsys.data.spreadsheets import is_spreadsheet
from recsys.data.texts import OF_SPREADSHEETS, as_strings, as_text, in_nfc
from recsys.errors import DataError

NUMBER = r"^\d+\.\d+$"
WHOLE = r"^\d+\.0+$"
MARKED = rf"^\s+\S|\S\s+$|{OF_SPREADSHEETS}"
LONG = r"^-?\d{16,}\.0$"  # numbers of spreadsheets, which keep 15 digits
SHORTENED = r"^\d[.,]\d+[Ee]\+\d\d$"  # and show fewer, as do the texts that they write
EXACT, EXACT_OF_32 = 2.0**53, 2.0**24  # larger floating numbers have lost digits


@dataclass
class IdForms:
    """The forms of ids seen so far, by role (`user` or `item`).

    Attributes:
        report: is increased by the ids whose form was changed.
        whole: an id that lost its decimal place, such as `1.0`, and its file.
        decimal: an id with decimals, such as `1.5`, and its file.
    """

    report: Report
    whole: dict[str, tuple[str, Path]] = field(default_factory=dict)
    decimal: dict[str, tuple[str, Path]] = field(default_factory=dict)

    def read(self, role: str, table: pa.Table, name: str, path: Path) -> pa.ChunkedArray:
        """The ids of a column as texts in the agreed form; null stays null.

        Raises:
            DataError: floating numbers that have lost digits, or a form that contradicts that of an
                earlier part.
        """
        column = table[name]
        refuse_lost_digits(column, name, path)
        texts = as_strings(column, name, path)
        if pa.types.is_string(column.type):
            other = pc.not_equal(column, in_nfc(column))
            self.report.add_rows("texts_in_another_spelling", other, column)
            marked = pc.match_substring_regex(column, MARKED)
            self.report.add_rows("ids_of_spreadsheets", marked, column)
        return self._agreed(role, texts, path)

    def _agreed(self, role: str, texts: pa.ChunkedArray, path: Path) -> pa.ChunkedArray:
        number = pc.fill_null(pc.match_substring_regex(texts, NUMBER), False)
        if not pc.any(number).as_py():
            return texts
        whole = pc.fill_null(pc.match_substring_regex(texts, WHOLE), False)
        decimal = texts.filter(pc.and_not(number, whole))
        if len(decimal) and role not in self.decimal:
            self.decimal[role] = decimal[0].as_py(), path
        if role in self.decimal:
            if role in self.whole:
                (one, first), (other, second) = self.whole[role], self.decimal[role]
                said = {"one": one, "bare": one.partition(".")[0], "other": other}
                files = {"first": first, "second": second}
                raise DataError(sentence("two_forms", role=role, **said, **files))
            return texts
        if pc.any(whole).as_py():
            self.whole.setdefault(role, (texts.filter(whole)[0].as_py(), path))
            self.report.add_rows("ids_with_a_decimal_place", whole, texts)
            texts = pc.replace_substring_regex(texts, r"^(\d+)\.0+$", r"\1")
        return texts


def refuse_lost_digits(column: pa.ChunkedArray, name: str, path: Path) -> None:
    """Refuse ids that are floating numbers, or numbers of a spreadsheet, with too many digits.

    Raises:
        DataError: there is one, and the message says how to keep the digits.
    """
    large = column.slice(0, 0)
    exact, digits = (EXACT_OF_32, 7) if column.type == pa.float32() else (EXACT, 15)
    if pa.types.is_floating(column.type):
        large = column.filter(pc.fill_null(pc.greater_equal(pc.abs(column), exact), False))
    elif pa.types.is_string(column.type):
        form = f"{LONG}|{SHORTENED}" if is_spreadsheet(path) else SHORTENED
        large = column.filter(pc.fill_null(pc.match_substring_regex(column, form), False))
    if len(large):
        shown = as_text(large[:1])[0].as_py().removesuffix(".0")
        digits = min(digits, len(re.findall(r"\d", re.sub("[Ee].*", "", shown))))
        raise DataError(sentence("lost_digits", path=path, name=name, shown=shown, digits=digits))


def note_alike(role: str, ids: pa.Array, report: Report) -> None:
    """Tell of ids that differ in case, or in zeros at their start, which spreadsheets remove."""
    digits = ids.filter(pc.match_substring_regex(ids, r"^\d+$"))
    forms = ("zeros", digits, pc.utf8_ltrim(digits, "0")), ("two_cases", ids, pc.utf8_lower(ids))
    for note, texts, bare in forms:
        counts = pc.value_counts(bare)
        several = counts.filter(pc.greater(counts.field("counts"), 1)).field("values")
        if len(several):
            one, other, *_ = texts.filter(pc.equal(bare, several[0])).to_pylist()
            count = pc.sum(pc.is_in(bare, value_set=several)).as_py()
            report.note(sentence(note, count=count, role=role, one=one, other=other))


def refuse_lost_zeros(role: str, ids: pa.Array, known: pa.Array, path: Path) -> None:
    """Refuse new ids that differ from known ones in nothing but zeros at their start.

    Raises:
        DataError: such ids, with examples.
    """
    ids, known = (pc.unique(texts.filter(pc.match_substring_regex(texts, r"^\d+$")))
                  for texts in (ids, known))  # fmt: skip
    new = ids.filter(pc.invert(pc.is_in(ids, value_set=known)))
    position = pc.index_in(pc.utf8_ltrim(new, "0"), value_set=pc.utf8_ltrim(known, "0"))
    both = new.filter(position.is_valid())
    if len(both):
        other = known[position.drop_null()[0].as_py()].as_py()
        said = {"count": len(both), "one": both[0].as_py(), "other": other}
        raise DataError(sentence("lost_zeros", path=path, role=role, **said))
