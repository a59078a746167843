"""Makes texts of Arrow's other types, digit for digit and with one spelling of each letter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

from recsys.data.column_words import WORDS
from recsys.data.report import sentence
from recsys.errors import DataError

UUID_BYTES = 16
OF_SPREADSHEETS = r"""^\s*="([^"]*)"\s*$|^'(\d+)$"""
"""Digits that are to stay text, as spreadsheets write them: ="00042" and '00042."""
MISSING = pa.array(["", "null", "none", "nan", "undefined", r"\n", "<na>"])
"""Texts that programs write for no value, in lower case."""
NOTHING = pa.array(WORDS["nothing"].split("|"))
"""Texts that people write for no value, in lower case; `NA` may be a code."""


def in_nfc(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    """Texts in the usual form of Unicode (NFC), in which each letter has one spelling."""
    if pc.all(pc.string_is_ascii(texts)).as_py() in (None, True):
        return texts
    return pc.utf8_normalize(texts, form="NFC")


def as_text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Plain values as strings in NFC; large whole numbers stored as floats keep their digits.

    A column of whole ids with one missing value is a column of floats in pandas.

    >>> as_text(pa.chunked_array([[4006381333931.0, 2.0, 0.5]])).to_pylist()
    ['4006381333931', '2', '0.5']
    >>> as_text(pa.chunked_array([['="00042"', "'7", "'s"]])).to_pylist()
    ['00042', '7', "'s"]
    """
    texts = pc.cast(column, pa.string())
    if not pa.types.is_floating(column.type):
        if pc.any(pc.match_substring_regex(texts, OF_SPREADSHEETS)).as_py():
            texts = pc.replace_substring_regex(texts, OF_SPREADSHEETS, r"\1\2")
        return in_nfc(texts)
    size = pc.abs(column)
    large = pc.and_(pc.greater_equal(size, 1e10), pc.less(size, 2.0**63))
    large = pc.and_(large, pc.equal(pc.floor(size), size))
    if not pc.any(large).as_py():
        return texts
    whole = pc.cast(pc.cast(pc.if_else(large, column, None), pa.int64(), safe=False), pa.string())
    return pc.coalesce(whole, texts)


def each_value(
    texts: pa.ChunkedArray, read: Callable[[Any], Any], kind: pa.DataType
) -> pa.ChunkedArray:
    """(rows,) what a function makes of each value, of which it sees each distinct one once."""
    encoded = texts.combine_chunks().dictionary_encode()
    values = pa.array(map(read, encoded.dictionary.to_pylist()), kind)
    return pa.chunked_array([values.take(encoded.indices)])


def examples(texts: pa.ChunkedArray | pa.Array) -> str:
    """The first three distinct texts, for a message.

    >>> examples(pa.chunked_array([["a", "b", "a"]]))
    "'a', 'b'"
    """
    return ", ".join(map(repr, pc.unique(texts).to_pylist()[:3]))


def as_strings(column: pa.ChunkedArray, name: str, path: Path) -> pa.ChunkedArray:
    """Values as strings without blanks around them; null stays null.

    Raises:
        DataError: a column of lists or records.
    """
    try:
        return pc.utf8_trim_whitespace(as_text(column))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        said = sentence("no_plain_values", path=path, name=name, kind=column.type)
        raise DataError(said) from error


def with_plain_texts(table: pa.Table) -> pa.Table:
    """Texts, bytes and ids of other types, which other programs write, as strings.

    So are numbers of a type that DuckDB lacks, or they have another one.
    """
    columns = [_plain_texts(column) for column in table.columns]
    return pa.table(columns, table.column_names)


def _plain_texts(column: pa.ChunkedArray) -> pa.ChunkedArray:
    types, kind = pa.types, column.type
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
        column = column.cast(kind)
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return _plain_texts(column.cast(kind.value_type))
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind):
        return each_value(column.cast(pa.binary()), bytes_as_text, pa.string())
    if types.is_fixed_size_binary(kind):
        return each_value(column, bytes_as_text, pa.string())
    if types.is_large_string(kind) or types.is_string_view(kind) or types.is_decimal256(kind):
        return column.cast(pa.string())
    if types.is_float16(kind):
        return column.cast(pa.float32())
    return column


def bytes_as_text(value: bytes) -> str:
    """Bytes that are printable UTF-8 as they are, 16 other bytes as a UUID, the rest as hex digits.

    >>> bytes_as_text(b"sku-1"), bytes_as_text(bytes([0, 255]))
    ('sku-1', '00ff')
    """
    try:
        text = value.decode()
    except UnicodeDecodeError:
        text = "\0"
    if text.isprintable():
        return text
    return str(UUID(bytes=value)) if len(value) == UUID_BYTES else value.hex()
