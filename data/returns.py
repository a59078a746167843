"""Reads whether the event of a row was taken back: returned, refunded, cancelled, or not paid."""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsys.data.availability import answers, each, is_missing, plain_answer
from recsys.event_names import NOT, normalised

DATE = re.compile(r"\d{4}-\d{1,2}-\d{1,2}|\d{1,2}[./-]\d{1,2}[./-]\d{2,4}|\d{8,13}$")
# States of orders. A word must be whole: a returning customer has returned nothing.
BACK_WORDS = (
    "refunded refund returned cancelled canceled voided void chargeback failed declined abandoned "
    "storniert storno retourniert retoure erstattet ruckerstattet zuruckgegeben fehlgeschlagen "
    "annule annulee annulees rembourse remboursee retourne retournee echoue echouee "
    "cancelado cancelada devuelto devuelta reembolsado reembolsada fallido fallida "
    "annullato annullata rimborsato rimborsata restituito restituita reso fallito "
    "geannuleerd terugbetaald geretourneerd mislukt"
)
BACK = frozenset(BACK_WORDS.split())
PART = ("part", "teil", "parz", "gedeelte")  # the rest of the order was kept


def read_taken_back(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    """Whether a column such as `returned` or `cancelled_at` says yes or has a date: (rows,) bool.

    >>> said = pa.chunked_array([["2024-05-01", "", "yes", "0.0", "0000-00-00", "2 pieces"]])
    >>> read_taken_back(said).to_pylist()
    [True, False, True, False, False, False]
    """
    return each(texts, lambda text: _says(text) is True)


def share_of_taken_back(texts: pa.ChunkedArray, rows: int) -> float:
    """The share of filled values that are yes, no or a date; 0 if all of several `rows` say yes."""
    return answers(texts, rows, _says)


def read_order_status(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    """Whether the state of an order says that it was taken back as a whole: (rows,) bool.

    >>> states = ["paid", "refunded", "partially_refunded", "wc-cancelled", "not refunded"]
    >>> read_order_status(pa.chunked_array([states])).to_pylist()
    [False, True, False, True, False]
    """
    return each(texts, _is_back)


def fill_orders(
    texts: pa.ChunkedArray, users: pa.ChunkedArray, times: pa.ChunkedArray
) -> pa.ChunkedArray:
    """States of orders, of which a file may fill in the first row alone, as Shopify's exports do.

    An empty state is that of the row before, if user and time are the same: (rows,) string.
    """
    row = np.arange(len(texts))
    filled = pc.fill_null(pc.not_equal(texts, ""), False).to_numpy()
    known = np.maximum.accumulate(np.where(filled, row, 0))
    user = users.combine_chunks().dictionary_encode().indices.fill_null(-1).to_numpy()
    time = pc.fill_null(times, -1).to_numpy()
    other = (user[1:] != user[:-1]) | (time[1:] != time[:-1])
    order = np.append(0, np.cumsum(other))[: len(row)]
    return texts.take(pa.array(np.where(order[known] == order, known, row)))


def _says(text: str) -> bool | None:
    answer = plain_answer(text)
    if answer is None and DATE.match(text) and not is_missing(text):
        return True
    return answer


def _is_back(text: str) -> bool:
    words = [normalised(word) for word in re.split(r"[\W_]+", text)]
    whole = not any(word.startswith(PART) or word in NOT for word in words)
    return whole and any(word in BACK for word in words)
