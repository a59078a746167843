"""Reads whether items are available: yes and no in several languages, or the number in stock."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from recsys.event_names import normalised

YES_WORDS = (
    "true t yes y ja j oui o si s 1 instock available active aktiv actif activo attivo actief "
    "live online enabled published publish visible lieferbar verfugbar verfuegbar "
    "sofortlieferbar auflager lagernd vorratig disponible enstock disponibile beschikbaar "
    "opvoorraad leverbaar limited lowstock preorder backorder onsale "
)
YES = frozenset(YES_WORDS.split())
PLAIN_YES = frozenset(["true", "t", "yes", "y", "ja", "j", "oui", "o", "si", "s", "1"])
PLAIN_NO = frozenset(["false", "f", "no", "n", "nein", "non", "nee", "0"])
NO_WORDS = (
    "false f no n nein non nee 0 outofstock unavailable notavailable inactive inaktiv inactif "
    "inactivo inattivo inactief offline disabled draft entwurf archived hidden deleted "
    "soldout discontinued ausverkauft vergriffen nichtlieferbar nichtverfugbar "
    "nichtverfuegbar nichtauflager epuise indisponible rupture enrupture agotado nodisponible "
    "esaurito nondisponibile uitverkocht nietbeschikbaar nietopvoorraad unpublished removed "
    "ended "
)
NO = frozenset(NO_WORDS.split())
NUMBER = r"^-?\d{1,9}([.,]\d+)?$"


def share_of_answers(texts: pa.ChunkedArray) -> float:
    """The share of values that say whether an item is available; 0 if no item is.

    A shop that has everything today may sell out tomorrow, so one answer for all items is enough.
    """
    answers = read_available(texts).drop_null()
    some = pc.any(answers).as_py() or len(texts) < 2
    return len(answers) / len(texts) if len(texts) and some else 0.0


def share_of_plain_answers(texts: pa.ChunkedArray, rows: int) -> float:
    """The share of filled values that are yes or no; 0 if all of several `rows` say yes."""
    said = [normalised(word) for word in pc.unique(texts).to_pylist()]
    if 1 < rows == len(texts) and all(word in PLAIN_YES for word in said):
        return 0.0
    plain = [word in PLAIN_YES or word in PLAIN_NO for word in said]
    counts = pc.value_counts(texts).field("counts")
    share = pc.sum(counts.filter(pa.array(plain, pa.bool_()))).as_py() or 0
    return float(share / len(texts)) if len(texts) else 0.0


def read_plain_yes(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    """Whether values say yes: (items,) bool; false where they are missing or say something else."""
    encoded = texts.combine_chunks().dictionary_encode()
    yes = [normalised(word) in PLAIN_YES for word in encoded.dictionary.to_pylist()]
    values = pa.array(yes, pa.bool_()).take(encoded.indices)
    return pa.chunked_array([pc.fill_null(values, False)])


def read_available(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    """Whether items are available: (items,) bool, null where the value does not say.

    Args:
        texts: words, or numbers of items in stock.
    """
    encoded = texts.combine_chunks().dictionary_encode()
    words = encoded.dictionary
    known = []
    for word in words.to_pylist():
        key = normalised(word)
        known.append(True if key in YES else False if key in NO else None)
    number = pc.match_substring_regex(words, NUMBER)
    digits = pc.replace_substring(pc.if_else(number, words, None), ",", ".")
    stock = pc.greater(pc.cast(digits, pa.float64()), 0.0)
    values = pc.coalesce(stock, pa.array(known, pa.bool_()))
    return pa.chunked_array([values.take(encoded.indices)])
