"""Reads whether the event of a row was taken back: returned, refunded, cancelled, or not paid.

What was returned was bought, and is negative feedback. What was cancelled or not paid says nothing.
"""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsys.data.availability import answers, each, is_missing, plain_answer
from recsys.event_names import NOT, normalised

DATE = re.compile(r"\d{4}-\d{1,2}-\d{1,2}|\d{1,2}[./-]\d{1,2}[./-]\d{2,4}|\d{8,13}$")
# States of orders. A word must be whole: a returning customer has returned nothing.
CANCELLED_WORDS = (
    "cancelled canceled cancellation void voided failed declined unpaid abandoned trash "
    "storniert storno stornierung abgebrochen fehlgeschlagen unbezahlt "
    "annule annulee annulees annulation refuse refusee echoue echouee "
    "cancelado cancelada anulado anulada rechazado rechazada impagado fallido fallida "
    "annullato annullata fallito geannuleerd mislukt"
)
RETURNED_WORDS = (
    "refunded refund returned return chargeback "
    "retourniert retoure retour erstattet ruckerstattet ruckerstattung zuruckerstattet "
    "zuruckgegeben rembourse remboursee remboursement retourne retournee "
    "devuelto devuelta reembolsado reembolsada "
    "rimborsato rimborsata rimborso restituito restituita reso terugbetaald geretourneerd"
)
# What may be asked for, and what says that it was not done.
ASKED_WORDS = (
    "refund return cancellation stornierung ruckerstattung annulation remboursement rimborso "
)
DENIED_WORDS = (
    "declined denied rejected refused failed abgelehnt fehlgeschlagen refuse refusee rechazado "
    "rifiutato geweigerd mislukt"
)
PAID_WORDS = "paid bezahlt paye payee pagado pagada pagato pagata betaald"
# States of orders that were not taken back.
KEPT_WORDS = (
    "complete completed fulfilled unfulfilled shipped delivered processing pending closed "
    "authorized versendet geliefert abgeschlossen livree expediee enviado entregado "
    "completado spedito consegnato completato verzonden geleverd afgerond"
)
CANCELLED, RETURNED, ASKED, DENIED, PAID = (
    frozenset(words.split())
    for words in (CANCELLED_WORDS, RETURNED_WORDS, ASKED_WORDS, DENIED_WORDS, PAID_WORDS)
)
KEPT = PAID | frozenset(KEPT_WORDS.split())
# The rest of the order was kept.
PART = ("partial", "partiel", "partly", "teil", "parz", "parcial", "deels", "gedeelte")
LINES = 0.1  # share of filled rows behind the first of an order: more, and a row has its own state


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


def is_cancellation(name: str) -> bool:
    """Whether a column such as `cancelled_at`, by its name, says what was cancelled.

    >>> is_cancellation("Storno-Datum"), is_cancellation("returned")
    (True, False)
    """
    return any(word in normalised(name) for word in ("cancel", "storn", "annul", "anul"))


def read_order_status(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    """What the state of an order says: "cancelled", also if it was not paid, or "returned".

    Others, and orders of which a part was taken back, are null: (rows,) string.

    >>> states = ["paid", "refunded", "partially_refunded", "wc-cancelled", "not refunded"]
    >>> read_order_status(pa.chunked_array([states])).to_pylist()
    [None, 'returned', None, 'cancelled', None]
    """
    encoded = texts.combine_chunks().dictionary_encode()
    states = pa.array([_state(text) for text in encoded.dictionary.to_pylist()], pa.string())
    return pa.chunked_array([states.take(encoded.indices)])


def knows_order_status(texts: pa.ChunkedArray) -> bool:
    """Whether most values are known states of orders."""
    known = each(texts, lambda text: not KEPT.isdisjoint(_words(text)) or _state(text) is not None)
    return bool(len(texts)) and 2 * pc.sum(known).as_py() >= len(texts)


def fill_orders(
    texts: pa.ChunkedArray, users: pa.ChunkedArray, times: pa.ChunkedArray
) -> pa.ChunkedArray:
    """States of orders, of which a file may fill in the first row alone, as Shopify's exports do.

    An empty state is that of the row before, if user and time are the same: (rows,) string. If
    later rows of orders are filled in as well, each row has its own state.
    """
    row = np.arange(len(texts))
    filled = pc.fill_null(pc.not_equal(texts, ""), False).to_numpy()
    known = np.maximum.accumulate(np.where(filled, row, 0))
    user = users.combine_chunks().dictionary_encode().indices.fill_null(-1).to_numpy()
    time = pc.fill_null(times, -1).to_numpy()
    other = (user[1:] != user[:-1]) | (time[1:] != time[:-1])
    order = np.append(0, np.cumsum(other))[: len(row)]
    later = np.append(False, ~other)[: len(row)]
    if filled[later].sum() > LINES * max(1, later.sum()):
        return texts
    return texts.take(pa.array(np.where(order[known] == order, known, row)))


def _says(text: str) -> bool | None:
    answer = plain_answer(text)
    if answer is None and DATE.match(text) and not is_missing(text):
        return True
    return answer


def _words(text: str) -> list[str]:
    parted = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text).replace("charge back", "chargeback")
    return [normalised(word) for word in re.split(r"[\W_]+", parted)]


def _state(text: str) -> str | None:
    words = _words(text)
    if "part" in words or "reversal" in words or any(word.startswith(PART) for word in words):
        return None
    if not ASKED.isdisjoint(words) and not DENIED.isdisjoint(words):
        return None
    state = None
    for place, word in enumerate(words):
        if not NOT.isdisjoint(words[:place]) or words[-1] in NOT:
            said = "cancelled" if word in PAID else None
        elif word in CANCELLED:
            said = "cancelled"
        else:
            said = "returned" if word in RETURNED else None
        if said == "cancelled":
            return said
        state = said or state
    return state
