"""Cleaning of histories against loops written from scratch; names and roles of types of events."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsys.data.behaviours import choose_types
from recsys.data.cleaning import CleanConfig
from recsys.data.histories import (
    Facts,
    HistoryCleaner,
    negative_rating,
    pieces_left,
    unwanted_by_rule,
)
from recsys.data.prepare import DataConfig, build
from recsys.data.report import Report
from recsys.errors import ConfigError, DataError
from recsys.event_names import is_dislike, is_return, level

NAMES = ("view", "cart", "purchase", "return")


def facts(ids: list[str], events: list[int]) -> Facts:
    none = np.zeros(0, np.int64)
    return Facts(pa.array(ids), np.array(events), none, none, np.zeros(0, np.float32))


def unwanted(known: Facts, config: CleanConfig, report: Report) -> list[int]:
    """The users that any rule drops."""
    rules = unwanted_by_rule(known, config, report)
    return sorted(user for users in rules.values() for user in np.flatnonzero(users).tolist())


def cleaner(names: tuple[str, ...] = NAMES, **config: Any) -> tuple[HistoryCleaner, Report]:
    report = Report()
    many = np.full(len(names), 100)
    known = replace(facts(["u"] * 100, [3] * 100), events_of_type=many, repeated=many)
    return HistoryCleaner(known, CleanConfig(**config), names, {}, report), report


def columns(rows: list[tuple[int, int, int, str]]) -> dict[str, Any]:
    """Columns of (user, item, minute, type)."""
    user, item, minute, kind = zip(*rows, strict=True)
    return {
        "user": np.array(user),
        "item": np.array(item),
        "timestamp": np.array(minute) * 60,
        "behaviour": np.array([NAMES.index(name) for name in kind], np.uint8),
    }


def steps(rows: list[tuple[int, int, int, str]], **config: Any) -> list[tuple[int, int, int, str]]:
    made, _ = cleaner(**config)
    found, keep, *_ = made.clean(columns(rows))
    names = [b.name for b in made.behaviours]
    return [
        (int(u), int(i), int(t) // 60, names[b])
        for u, i, t, b, kept in zip(*found.values(), keep, strict=True)
        if kept
    ]


def test_a_view_a_cart_and_a_purchase_are_one_step() -> None:
    rows = [(0, 7, 0, "view"), (0, 7, 5, "cart"), (0, 7, 9, "purchase"), (0, 7, 12, "view")]
    assert steps(rows) == [(0, 7, 12, "purchase")]
    assert steps(rows, skip=("near_duplicates",)) == rows


def test_a_return_drops_what_came_before_it() -> None:
    rows = [(0, 7, 0, "purchase"), (0, 8, 99, "view"), (0, 7, 999, "return"),
            (0, 7, 5000, "purchase"), (1, 7, 0, "purchase")]  # fmt: skip
    assert steps(rows) == [rows[1], rows[3], rows[4]]
    assert len(steps(rows, skip=("negative_feedback",))) == 5


def test_a_dislike_stands_until_the_item_is_chosen_again() -> None:
    rows = [(0, 7, 0, "purchase"), (0, 7, 99, "return"), (0, 7, 999, "purchase"),
            (0, 8, 1000, "return"), (1, 7, 0, "return")]  # fmt: skip
    disliked = cleaner()[0].clean(columns(rows)).disliked
    assert [disliked[name].tolist() for name in ("user", "item", "timestamp", "stands")] == [
        [0, 0, 1], [7, 8, 7], [99 * 60, 1000 * 60, 0], [False, True, True],
    ]  # fmt: skip
    assert not len(cleaner(skip=("negative_feedback",))[0].clean(columns(rows)).disliked["user"])


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2), st.integers(0, 2), st.integers(0, 200), st.sampled_from(NAMES)
        ),
        min_size=1,
        max_size=25,
    )
)
def test_cleaning_equals_a_loop(rows: list[tuple[int, int, int, str]]) -> None:
    rows = sorted(rows, key=lambda row: (row[0], row[2]))
    merged: list[tuple[int, int, int, str]] = []
    last: tuple[int, int, int, str] | None = None
    for row in rows:
        bad = row[3] == "return"
        same = last is not None and last[:2] == row[:2] and row[2] - last[2] <= 30
        if same and last is not None and bad == (last[3] == "return"):
            kind = max(merged[-1][3], row[3], key=NAMES.index) if not bad else "return"
            merged[-1] = (*row[:3], kind)
        else:
            merged.append(row)
        last = row
    expected = [
        row
        for place, row in enumerate(merged)
        if row[3] != "return"
        and not any(later[:2] == row[:2] and later[3] == "return" for later in merged[place:])
    ]
    assert steps(rows) == expected


def bought(rows: list[tuple[str, float]], **config: Any) -> tuple[list[int], list[float], int]:
    """Rows kept of one user's (type, pieces) of one item, the pieces left, and dislikes."""
    names = ("purchase", "return", "dislike", "partial_refund")
    made, _ = cleaner(names, **config)
    kinds = np.array([names.index(name) for name, _ in rows], np.uint8)
    table = {
        "user": np.zeros(len(rows), int), "item": np.zeros(len(rows), int),
        "timestamp": 86_400 * np.arange(len(rows)), "behaviour": kinds,
        "quantity": np.array([pieces for _, pieces in rows], np.float32),
    }  # fmt: skip
    found = made.clean(table)
    assert "quantity" not in found.columns
    kept = np.flatnonzero(found.keep).tolist()
    return kept, found.pieces["pieces"].tolist(), len(found.disliked["user"])


UNKNOWN = float("nan")


@pytest.mark.parametrize(
    ("rows", "kept", "left", "disliked"),
    [
        # Three of ten come back: the purchase stays, and seven pieces are left.
        ([("purchase", 10), ("return", -3)], [0], [7], 0),
        ([("purchase", 10), ("return", -3), ("return", -7)], [], [], 1),
        ([("purchase", 10), ("return", -12)], [], [], 1),
        # After everything came back, a new purchase counts from nothing.
        ([("purchase", 2), ("return", -5), ("purchase", 3), ("return", -1)], [2], [2], 1),
        ([("purchase", 1), ("purchase", 1), ("return", -1)], [0, 1], [1], 0),
        # A row that was taken back as a whole (0) leaves an earlier purchase as it is.
        ([("purchase", UNKNOWN), ("return", 0)], [0], [], 0),
        ([("return", 0)], [], [], 1),
        # A return of unknown size is of everything, and so is a dislike.
        ([("purchase", 10), ("return", UNKNOWN)], [], [], 1),
        ([("purchase", 10), ("dislike", UNKNOWN)], [], [], 1),
        ([("purchase", 10), ("partial_refund", UNKNOWN)], [0], [10], 0),
        ([("return", -1), ("purchase", 2)], [1], [2], 1),
    ],
)
def test_a_purchase_goes_when_all_of_its_pieces_are_returned(rows, kept, left, disliked) -> None:
    assert bought(rows) == (kept, left, disliked)


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 2), st.sampled_from([1, 2, 5, -1, -4, -np.inf]))
    )
)
def test_pieces_left_equal_a_loop(rows: list[tuple[int, int, float]]) -> None:
    rows = sorted(rows, key=lambda row: row[0])
    if not rows:
        return
    stock: dict[tuple[int, int], float] = {}
    expected = []
    for user, item, pieces in rows:
        stock[user, item] = max(0.0, stock.get((user, item), 0.0) + pieces)
        expected.append(stock[user, item])
    user, item, signed = (np.array(column) for column in zip(*rows, strict=True))
    assert pieces_left(user, item, signed.astype(float)).tolist() == expected


@pytest.mark.parametrize(
    ("column", "sale", "back"),
    [("is_return", "0", "1"), ("Belegart", "Rechnung", "Gutschrift"), ("Type", "Sale", "Void")],
)
@pytest.mark.parametrize("pieces", ["", ",quantity"])
def test_lines_that_are_returns_by_a_column(tmp_path, column, sale, back, pieces) -> None:
    """By hand: b returns p1 as a whole; c, where there are pieces, one of the three of p2."""
    rows = [(f"u{n}", f"i{n % 5}", f"2026-01-{1 + n % 9:02} 10:00", sale, "1") for n in range(40)]
    rows += [("b", "p1", "2026-02-01 10:00", sale, "2"), ("b", "p1", "2026-02-03 10:00", back, "2")]
    rows += [("c", "p2", "2026-02-01 10:00", sale, "3"), ("c", "p2", "2026-02-03 10:00", back, "1")]
    lines = [",".join(row if pieces else row[:-1]) for row in rows]
    file = tmp_path / "orders.csv"
    file.write_text("\n".join([f"customer,sku,date,{column}{pieces}", *lines]))
    data = build(DataConfig(source="table", path=str(file))).dataset
    user, item = data.interactions.user_ids, data.item_ids
    pairs = {(user[u], item[i]) for u, i in zip(data.events.user, data.events.item, strict=True)}
    assert ("b", "p1") not in pairs
    assert (("c", "p2") in pairs) == bool(pieces)


def test_bots_have_far_more_events_than_others() -> None:
    report = Report()
    known = facts([f"u{n}" for n in range(200)] + ["bot"], [10] * 200 + [501])
    assert unwanted(known, CleanConfig(), report) == [200]
    assert report.counts == {"events_of_bots_dropped": 501}
    assert report.examples["events_of_bots_dropped"] == ["bot: 501 events"]
    assert not unwanted(known, CleanConfig(bots=0), Report())
    assert not unwanted(known, CleanConfig(bots=502), Report())


@pytest.mark.parametrize(
    ("name", "events", "dropped"),
    [("guest", 100, True), ("Gast", 100, True), ("guest", 5, False), ("0", 100, True),
     ("0", 30, False), ("00000", 100, True), ("000", 30, False), ("9999", 100, True),
     ("99", 100, False), ("anna", 100, False)],
)  # fmt: skip
def test_a_placeholder_is_no_person(name: str, events: int, dropped: bool) -> None:
    known = facts([f"u{n}" for n in range(200)] + [name], [10] * 200 + [events])
    assert unwanted(known, CleanConfig(), Report()) == [200] * dropped


@pytest.mark.parametrize(
    ("ratings", "bound"),
    [([1, 2, 3, 4, 5], 2), ([0.5, 1, 2, 2.5, 3, 5], 2), (list(range(1, 11)), 4),
     ([3, 4, 4.5, 5], None), ([0, 1], 0), ([-1, 1], -1), ([-1, 0, 1], -1), ([1, 2], None),
     ([0], None), ([1], None), ([], None), (list(range(1, 61)), None),
     (list(range(1, 21)), 8), (list(range(0, 101)), 40)],
)  # fmt: skip
def test_the_low_end_of_a_scale_is_negative(ratings: list[float], bound: float | None) -> None:
    assert negative_rating(np.array(ratings, np.float32), CleanConfig()) == bound
    assert negative_rating(np.float32([]), CleanConfig(negative_rating=3)) == 3


def test_a_rating_is_kept_when_steps_are_merged() -> None:
    made, _ = cleaner(())
    rows = {
        "user": np.zeros(3, int), "item": np.zeros(3, int), "timestamp": np.array([0, 60, 120]),
        "rating": np.float32([2, 5, np.nan]),
    }  # fmt: skip
    found, keep, *_ = made.clean(rows)
    assert keep.tolist() == [False, False, True]
    assert found["rating"][2] == 5


def test_where_nobody_is_a_person_the_error_names_the_rule_that_says_so(tmp_path) -> None:
    file = tmp_path / "events.csv"
    users = ("guest", "anonymous")
    rows = [f"{user},s{n % 7},{1_700_000_000 + 86_400 * n}" for n in range(60) for user in users]
    file.write_text("\n".join(["user,item,timestamp", *rows]))
    says = r"no events are left\. 120 events belong to a user"
    with pytest.raises(DataError, match=says) as error:
        build(DataConfig(source="table", path=str(file)))
    assert "'guest'" in str(error.value)
    assert "--set data.clean.skip=placeholder_users keeps them" in str(error.value)
    assert "bots" not in str(error.value)


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
