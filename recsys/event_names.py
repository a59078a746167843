"""Names of types of events in six languages: how strong a sign of interest they usually mean.

A purchase is stronger than a rating or a like, these are stronger than a cart, and that is stronger
than a view.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

# Words that a name contains, in the order in which they are tried: `remove_from_cart` is negative.
# English, German, French, Spanish, Italian, Dutch; of returns also Portuguese and Polish.
LEVELS: tuple[tuple[int, str], ...] = (
    # Names that contain a word of another level.
    (1, "returnpolic returning returnedresult cancelsearch removefilter"),
    (2, "paymentinfo paymentmethod"),
    (
        0,
        "dislike unlike unfavo unsave unfollow unsubscribe thumbsdown downvote remove delete return"
        " refund chargeback cancel hide block notinterested complaint storno stornier retour"
        " ruckgabe rucksend ruecksend reklamation reklamier entfern loesch naimepas nietleuk"
        " rembours annul anulow supprim devol reembols elimin restitu rimbors rimoss"
        " zwrot zwroc estorn"
        " verwijder terugbet terugges zuruckgeg erstatt creditnot creditmemo"
        " creditinvoice creditfactu notadecredito notadicredito notacredito"
        " notedecredit gutschrift rechnungskorrektur reversal reversed"
        " anulac anulad rectificativ",
    ),
    (
        4,
        "purchase buy bought order transaction payment paid sale sold conversion subscribe booking"
        " kauf bestell achat achet command compra pedido acquist ordin aankoop gekocht",
    ),
    (
        3,
        "rating rate review like favorite favourite love thumbsup upvote share bewert gefallt"
        " gefaellt favori avis note jaime megusta mipiace beoordel favoriet leuk",
    ),
    (
        2,
        "cart basket checkout wishlist watchlist bookmark save warenkorb wunschliste merkzettel"
        " panier listedesouhaits carrito carrello winkelwagen winkelmand verlanglijst addtobag play"
        " listen watch stream download install",
    ),
    (
        1,
        "view click detail visit open browse select show seen read ansicht angesehen klick aufruf"
        " vue clic consult vista visto visualizz bekijk bekeken impression display search scroll",
    ),
)
# Those of the first line that say that the user does not want the item.
DISLIKES = "dislike unlike unfavo thumbsdown downvote hide block notinterested naimepas nietleuk"
# Those that take back a purchase, as a whole or in part.
RETURNS = (
    "return refund chargeback storno stornier retour ruckgabe rucksend ruecksend reklam erstatt"
    " rembours devol reembols restitu rimbors terugbet terugges zuruckgeg zwrot zwroc estorn"
    " creditnot creditmemo"
    " creditinvoice creditfactu notadecredito notadicredito notacredito notedecredit gutschrift"
    " rechnungskorrektur reversal reversed rectificativ anulac anulad"
)
# The same as words of their own: `reso` is in `resource`, and `avoir` in `savoir plus`.
RETURN_WORDS = frozenset(["void", "voided", "avoir", "avoirs", "reso", "resi", "abono", "abonos"])
# Words of their own that are purchases where a name has no word of `LEVELS`.
SALES = frozenset(
    ["sale", "sales", "vente", "ventes", "venta", "ventas", "vendita", "vendite", "verkoop",
     "invoice", "rechnung", "facture", "factura", "fattura", "factuur", "receipt"]
)  # fmt: skip
PART = ("partial", "partiel", "partly", "teil", "parz", "parcial", "deels", "gedeelte")
# Words of their own, which turn a like into a dislike: English, German, French, Spanish, Dutch,
# Polish, Portuguese.
NOT = {"not", "never", "no", "non", "nicht", "kein", "keine", "nie", "pas", "ne", "niet", "geen",
       "nao"}  # fmt: skip
FAILED = (
    "fail declin reject expired error abandon void unpaid fehlgeschlag abgelehnt abgebroch"
    " unbezahlt echou fallid impagad fallit mislukt"
)
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

    What is not liked is negative; what is not bought, or a payment that failed, is unknown.

    >>> [level(name) for name in ("view_item", "Add to cart", "remove_from_cart", "Kauf", "x")]
    [1, 2, 0, 4, None]
    >>> [level(name) for name in ("Gefällt mir nicht", "notLiked", "nicht gekauft", "order_failed")]
    [0, 0, None, None]
    """
    key, parts = _key(name), words_of(name)
    for number, words in LEVELS:
        if not any(word in key for word in words.split()) and not (
            number == 0 and not RETURN_WORDS.isdisjoint(parts)
        ):
            continue
        if number == 0 or not _is_negated(name):
            failed = number == PURCHASE and any(word in key for word in FAILED.split())
            return None if failed else number
        return 0 if number == LIKE else None
    failed = any(word in key for word in FAILED.split()) or _is_negated(name)
    return None if failed or SALES.isdisjoint(parts) else PURCHASE


def is_dislike(name: str) -> bool:
    """Whether a negative type says that the user does not want the item, and not, say, a return.

    >>> [is_dislike(name) for name in ("thumbs_down", "did not like", "Retoure", "view")]
    [True, True, False, False]
    """
    key = _key(name)
    words = DISLIKES.split()
    return level(name) == 0 and (any(word in key for word in words) or _is_negated(name))


def is_return(name: str) -> bool:
    """Whether a negative type says that a purchase was taken back.

    >>> [is_return(name) for name in ("refund", "Credit memo", "thumbs_down", "remove_from_cart")]
    [True, True, False, False]
    """
    key = _key(name)
    taken = any(word in key for word in RETURNS.split()) or not RETURN_WORDS.isdisjoint(
        words_of(name)
    )
    return level(name) == 0 and taken


def is_partial(name: str) -> bool:
    """Whether a name says that a part was taken back, so that the rest was kept.

    >>> [is_partial(name) for name in ("partial_return", "partiallyRefunded", "refund")]
    [True, True, False]
    """
    words = words_of(name)
    return "part" in words or any(word.startswith(PART) for word in words)


def _key(name: str) -> str:
    """A name as `normalised`, without the words that say what may happen.

    >>> _key("Refundable voucher"), _key("add_to_cart")
    ('voucher', 'addtocart')
    """
    return "".join(word for word in words_of(name) if not MAY_HAPPEN.search(word))


def words_of(name: str) -> list[str]:
    """The words of a name such as `partialRefund` or `Facture d'avoir`, each `normalised`."""
    parted = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).replace("charge back", "chargeback")
    return [normalised(word) for word in re.split(r"[\W_]+", parted)]


def _is_negated(name: str) -> bool:
    """Whether a word of a name, such as `notLiked` or `no me gusta`, is a negation."""
    plain = unicodedata.normalize("NFKD", name.replace("\u2019", "'"))
    plain = plain.encode("ascii", "ignore").decode()
    parted = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", plain.replace("n't", " not"))
    return not NOT.isdisjoint(re.split(r"[^a-z]+", parted.lower()))
