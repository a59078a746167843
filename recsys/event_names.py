"""Names of types of events in six languages: how strong a sign of interest they usually mean.

A purchase is stronger than a rating or a like, these are stronger than a cart, and that is stronger
than a view.
"""

from __future__ import annotations

import re
import tomllib
import unicodedata
from functools import lru_cache
from importlib.resources import files
from itertools import pairwise

_TABLE = tomllib.loads(files("recsys").joinpath("event_names.toml").read_text("utf-8"))
_WORDS: dict[str, list[str]] = {name: words.split() for name, words in _TABLE["words"].items()}
LEVELS: list[tuple[int, list[str]]] = [
    (row["level"], row["words"].split()) for row in _TABLE["levels"]
]
NOT = frozenset(_WORDS["not"])
ASKED, DENIED = frozenset(_WORDS["asked"]), frozenset(_WORDS["denied"])
PURCHASE, LIKE = 4, 3
# Words such as `refundable`, `stornierbar` and `rimborsabile` say what may happen, not what did.
MAY_HAPPEN = re.compile(
    r"\w{4}(ables?|ibles?|abil[ei]|ibil[ei]|bar|bare[nmrs]?|baar|a?e?hige?[nmrs]?)$"
)
RECBOLE = re.compile(r":(token|float)(_seq)?$")
LETTERS = str.maketrans({"ß": "ss", "ł": "l", "Ł": "l", "ø": "o", "æ": "ae", "œ": "oe"})
WEIGHTS = (0.0, 0.2, 0.5, 0.8, 1.0)  # by level


def normalised(name: str) -> str:
    """A name in lower case, only letters and digits, without accents and the types of RecBole.

    >>> normalised("Kunden-Nr."), normalised("userId:token"), normalised("order:refunded")
    ('kundennr', 'userid', 'orderrefunded')
    """
    plain = unicodedata.normalize("NFKD", RECBOLE.sub("", name)).translate(LETTERS)
    return re.sub(r"[^a-z0-9]", "", plain.lower())


@lru_cache(4096)  # histories repeat few names
def level(name: str) -> int | None:
    """The strength of a type from 0 (negative) to 4 (purchase); None for an unknown name.

    What is not liked is negative; what is not bought, a payment that failed and a return that was
    only asked for (`is_denied`) are unknown.

    >>> [level(name) for name in ("view_item", "Add to cart", "remove_from_cart", "Kauf", "x")]
    [1, 2, 0, 4, None]
    >>> [level(name) for name in ("Gefällt mir nicht", "notLiked", "nicht gekauft", "order_failed")]
    [0, 0, None, None]
    """
    key, parts = _key(name), set(words_of(name))
    for number, words in LEVELS:
        if not any(word in key for word in words) and not (
            number == 0 and not parts.isdisjoint(_WORDS["return_words"])
        ):
            continue
        if number == 0 and is_denied(name):
            return None
        if number == 0 or not _is_negated(name):
            failed = number == PURCHASE and any(word in key for word in _WORDS["failed"])
            return None if failed else number
        return 0 if number == LIKE else None
    failed = any(word in key for word in _WORDS["failed"]) or _is_negated(name)
    return None if failed or parts.isdisjoint(_WORDS["sales"]) else PURCHASE


def is_dislike(name: str) -> bool:
    """Whether a negative type says that the user does not want the item, and not, say, a return.

    >>> [is_dislike(name) for name in ("thumbs_down", "did not like", "Retoure", "view")]
    [True, True, False, False]
    """
    key = _key(name)
    unwanted = any(word in key for word in _WORDS["dislikes"]) or _is_negated(name)
    return level(name) == 0 and unwanted


def is_return(name: str) -> bool:
    """Whether a negative type says that a purchase was taken back.

    >>> [is_return(name) for name in ("refund", "Credit memo", "thumbs_down", "remove_from_cart")]
    [True, True, False, False]
    """
    key = _key(name)
    taken = any(word in key for word in _WORDS["returns"])
    taken = taken or not set(words_of(name)).isdisjoint(_WORDS["return_words"])
    return level(name) == 0 and taken


def takes_back(name: str) -> bool:
    """Whether a negative type says that a purchase was returned or cancelled.

    >>> [takes_back(name) for name in ("refund", "order_cancelled", "thumbs_down")]
    [True, True, False]
    """
    key = _key(name)
    return is_return(name) or (level(name) == 0 and any(w in key for w in _WORDS["cancels"]))


def is_denied(name: str) -> bool:
    """Whether a name says that a return was asked for, and not that it was made.

    >>> [is_denied(name) for name in ("return rejected", "refundRequested", "cancelled, refunded")]
    [True, True, False]
    """
    words = words_of(name)
    denied = not ASKED.isdisjoint(words) and not DENIED.isdisjoint(words)
    return denied or any(
        (noun in ASKED or noun in _WORDS["asked_also"])
        and (said in DENIED or said in _WORDS["undone"])
        for noun, said in pairwise(words)
    )


def is_partial(name: str) -> bool:
    """Whether a name says that a part was taken back, so that the rest was kept.

    >>> [is_partial(name) for name in ("partial_return", "partiallyRefunded", "refund")]
    [True, True, False]
    """
    words = words_of(name)
    return "part" in words or any(word.startswith(tuple(_WORDS["part"])) for word in words)


def _key(name: str) -> str:
    """A name as `normalised`, without the words that say what may happen.

    >>> _key("Refundable voucher"), _key("add_to_cart")
    ('voucher', 'addtocart')
    """
    return "".join(word for word in words_of(name) if not MAY_HAPPEN.search(word))


@lru_cache(4096)
def words_of(name: str) -> tuple[str, ...]:
    """The words of a name such as `partialRefund` or `Facture d'avoir`, each `normalised`.

    Words in other letters are in lower case.
    """
    parted = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).replace("charge back", "chargeback")
    words = re.split(r"[\W_]+", parted)
    return tuple(w.lower() if w.isascii() else normalised(w) or w.lower() for w in words)


def _is_negated(name: str) -> bool:
    """Whether a word of a name, such as `notLiked` or `no me gusta`, is a negation."""
    plain = unicodedata.normalize("NFKD", name.replace("\u2019", "'"))
    plain = plain.encode("ascii", "ignore").decode()
    parted = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", plain.replace("n't", " not"))
    return not NOT.isdisjoint(re.split(r"[^a-z]+", parted.lower()))
