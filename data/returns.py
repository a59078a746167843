"""Reads whether the event of a row was taken back: returned, refunded, cancelled, or never paid."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from recsys.data.availability import PLAIN_NO
from recsys.data.cleaning import MISSING
from recsys.data.column_words import EVENT_WORDS, rank
from recsys.event_names import FAILED, level, normalised

NAMES = EVENT_WORDS["taken_back"]
NONE = frozenset(normalised(text) for text in MISSING.to_pylist()) | {""}
PART = ("part", "teil", "parz", "gedeelte")  # the rest of the order was kept


def read_taken_back(texts: pa.ChunkedArray, column: str) -> pa.ChunkedArray:
    """Whether events were taken back: (rows,) bool.

    A column such as `returned` or `cancelled_at` says so by any value, such as a date, but no; a
    column such as `status` by words such as `refunded`, unless they name a part of the order.

    >>> said = pa.chunked_array([["paid", "refunded", "partially_refunded", None]])
    >>> read_taken_back(said, "Financial Status").to_pylist()
    [False, True, False, False]
    >>> read_taken_back(pa.chunked_array([["2024-05-01", "", "no"]]), "Cancelled at").to_pylist()
    [True, False, False]
    """
    by_any_value = rank(column, NAMES[:1]) is not None
    encoded = texts.combine_chunks().dictionary_encode()
    said = []
    for text in encoded.dictionary.to_pylist():
        word = normalised(text)
        if by_any_value:
            said.append(word not in PLAIN_NO and word not in NONE)
        else:
            failed = any(part in word for part in FAILED.split())
            said.append((level(text) == 0 or failed) and not word.startswith(PART))
    values = pa.array(said, pa.bool_()).take(encoded.indices)
    return pa.chunked_array([pc.fill_null(values, False)])
