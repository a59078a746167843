"""Types of events: names, roles, and which type is predicted."""

from __future__ import annotations

import numpy as np
import pytest

from recsys.data.behaviours import choose_types
from recsys.errors import ConfigError
from recsys.event_names import is_dislike, is_return, level


def roles(counts: dict[str, int], users: int = 100, **given: str) -> dict[str, str]:
    repeated = np.array(list(counts.values()))
    return {b.name: b.role for b in choose_types(list(counts), given, repeated, users)[0]}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("view_item", 1), ("Detailansicht", 1), ("clic", 1), ("add_to_cart", 2), ("Warenkorb", 2),
        ("panier", 2), ("wishlist", 2), ("play", 2), ("like", 3), ("Bewertung", 3),
        ("review", 3), ("purchase", 4), ("Bestellung", 4), ("achat", 4), ("compra", 4),
        ("transaction", 4), ("acquisto", 4), ("aankoop", 4), ("dislike", 0), ("Retoure", 0),
        ("remove_from_cart", 0), ("refund", 0), ("cancel_order", 0), ("banner", None),
        ("Gefällt mir nicht", 0), ("no me gusta", 0), ("non mi piace", 0), ("did not like", 0),
        ("didn't like", 0), ("didn\u2019t like", 0), ("does not fit", None),
        ("je n'aime pas", 0), ("j'aime", 3), ("vind ik niet leuk", 0), ("vind ik leuk", 3),
        ("notLiked", 0), ("unfavorite", 0), ("unsubscribe", 0), ("Stornierung", 0),
        ("reklamiert", 0), ("chargeback", 0), ("nicht gekauft", None), ("purchase_failed", None),
        ("order:refunded", 0), ("cart:remove", 0), ("com.shop.action:refund", 0), ("unpaid", None),
        ("order:completed", 4), ("add_payment_info", 2), ("return_policy_view", 1),
        ("returning_visitor_view", 1), ("search_returned_results", 1), ("remove_filter", 1),
        ("payment_failed", None), ("not_viewed", None), ("note", 3), ("notification", None),
        ("Vente", 4), ("Venta", 4), ("Vendita", 4), ("Verkauf", 4), ("Verkoop", 4), ("Rechnung", 4),
        ("Invoice", 4), ("Sale", 4), ("Facture", 4), ("Factura", 4), ("Fattura", 4),
        ("en savoir plus", None), ("resource_view", 1), ("avoided", None), ("view_invoice", 1),
        ("invoice_failed", None), ("abonnement", None), ("Refundable voucher", None),
        ("stornierbar", None), ("non-returnable", None), ("rimborsabile", None),
        ("Order returned", 0), ("cancelled", 0),
    ],
)  # fmt: skip
def test_usual_names_have_a_strength(name: str, expected: int | None) -> None:
    assert level(name) == expected


RETURNS = [
    "CREDIT NOTE", "Credit note", "Credit Memo", "creditmemo", "Void", "Reversal", "Avoir",
    "Facture d'avoir", "Note de crédit", "Gutschrift", "Retoure", "Storno", "Stornorechnung",
    "Rechnungskorrektur", "Rimborso", "Reso", "Nota di credito", "Devolución", "Abono",
    "Nota de crédito", "Factura rectificativa", "Creditnota", "Rückerstattung",
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dislike", "returned"),
    [
        ("dislike", True, False), ("thumbs_down", True, False), ("hide", True, False),
        ("Gefällt mir nicht", True, False), ("notLiked", True, False), ("return", False, True),
        ("Retoure", False, True), ("remove_from_cart", False, False), ("like", False, False),
        ("not_viewed", False, False), ("refund", False, True), ("Order returned", False, True),
        ("cancelled", False, False), ("stornierbar", False, False),
        *((name, False, True) for name in RETURNS),
    ],
)  # fmt: skip
def test_negative_names_are_dislikes_returns_or_neither(name, dislike, returned) -> None:
    assert (is_dislike(name), is_return(name)) == (dislike, returned)


def test_purchases_are_the_target_if_enough_users_have_two() -> None:
    assert roles({"view": 90, "cart": 50, "purchase": 5, "return": 1}) == {
        "view": "context", "cart": "context", "purchase": "target", "return": "negative",
    }  # fmt: skip


def test_the_settings_say_the_roles() -> None:
    counts = {"view": 90, "purchase": 50, "banner": 9}
    assert roles(counts, view="target") == {
        "view": "target", "purchase": "context", "banner": "context",
    }  # fmt: skip
    assert roles(counts, purchase="negative")["view"] == "target"
    assert roles({"0": 9, "1": 9}, **{"0": "target", "1": "context"}) == {
        "0": "target", "1": "context",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"buy": "target"}, "no event is of the type 'buy'; the types are view, return"),
        ({"view": "context"}, "no type is a target"),
    ],
)
def test_settings_that_cannot_be_met_are_refused(given: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        roles({"view": 9, "return": 9}, **given)
