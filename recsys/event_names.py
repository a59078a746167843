"""Names of types of events in six languages: how strong a sign of interest they usually mean.

A purchase is stronger than a rating or a like, these are stronger than a cart, and that is stronger
than a view.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

# Words that a name contains, in the order in which they are tried: `remove_from_cart` is negative.
# English, German, French, Spanish, Italian, Dutch.
LEVELS: tuple[tuple[int, str], ...] = (
    (
        0,
        "dislike unlike thumbsdown downvote remove delete return refund cancel hide block"
        " notinterested complaint storno retour ruckgabe rucksend ruecksend ruckgabe entfern loesch"
        " remboursement annul supprim devolucion reembolso elimin restitu rimborso rimoss"
        " verwijder terugbet",
    ),
    (
        4,
        "purchase buy bought order transaction payment paid sale sold conversion subscribe booking"
        " kauf bestell achat achet command compra pedido acquist ordin aankoop gekocht",
    ),
    (
        3,
        "rating rate review like favorite favourite love thumbsup upvote share bewert gefallt"
        " gefaellt favori avis note megusta mipiace beoordel favoriet",
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
WEIGHTS = (0.0, 0.2, 0.5, 0.8, 1.0)  # by level


def normalised(name: str) -> str:
    """A name in lower case, only letters and digits, without accents and the types of RecBole.

    >>> normalised("Kunden-Nr."), normalised("userId:token"), normalised("Verfügbar")
    ('kundennr', 'userid', 'verfugbar')
    """
    plain = unicodedata.normalize("NFKD", name.rpartition(":")[0] or name).replace("ß", "ss")
    return re.sub(r"[^a-z0-9]", "", plain.lower())


@lru_cache(4096)  # histories repeat few names
def level(name: str) -> int | None:
    """The strength of a type from 0 (negative) to 4 (purchase); None for an unknown name.

    >>> [level(name) for name in ("view_item", "Add to cart", "remove_from_cart", "Kauf", "x")]
    [1, 2, 0, 4, None]
    """
    key = normalised(name)
    for number, words in LEVELS:
        if any(word in key for word in words.split()):
            return number
    return None
