"""Lines of orders whose order, or whose return, says what the lines themselves leave out."""

from __future__ import annotations

import random
from datetime import datetime, timedelta

import pytest


def moment(n: int) -> str:
    return f"{datetime(2025, 1, 1) + timedelta(hours=3 * n):%Y-%m-%d %H:%M:%S}"


def table(head, rows, mark=","):
    return "\n".join([head, *(mark.join(map(str, row)) for row in rows)]) + "\n"


def lines_of_orders(share, number="{}"):
    """Lines of which a share are further ones of their orders, and the items of each user."""
    draw, lines, items, order = random.Random(7), [], {}, 0
    while len(lines) < 300:
        user, line = f"u{order % 25}@x.org", 0
        while not line or draw.random() < share:
            item = f"p{order // 25 * 12 + line}"
            first = ("", "", "") if line else (user, moment(order), "paid")
            lines.append((number.format(1000 + order), *first, item, 1))
            items.setdefault(user, []).append(item)
            line += 1
        order += 1
    return lines, items


@pytest.mark.parametrize("share", [0.03, 0.2, 0.25, 0.5, 0.67])
@pytest.mark.parametrize(
    ("names", "number"),
    [("Order ID,Email,Paid at,Financial Status,Lineitem sku,Lineitem quantity", "{}"),
     ("Bestellnummer,Kunden-E-Mail,Bestellt am,Status,Artikelnummer,Menge", "B-{}"),
     ("Name,Email,Created at,Financial Status,Lineitem sku,Lineitem quantity", "#{}"),
     ("Numéro de commande,Client,Date,Statut,SKU,Quantité", "{}")],
)  # fmt: skip
def test_further_lines_of_an_order_have_its_time_and_user(shop, share, names, number):
    rows, bought = lines_of_orders(share, number)
    found = shop(table(names, rows))
    assert found.histories == bought
    assert found.counts["further_lines_of_orders"] == sum(not row[2] for row in rows)
    assert "rows_with_unreadable_times_dropped" not in found.counts


def test_the_state_of_an_order_is_that_of_its_further_lines(shop):
    rows, _ = lines_of_orders(0.5)
    refunded = {row[0] for row in rows if int(row[0]) % 6 == 0}
    rows = [
        (*row[:3], "refunded" if row[0] in refunded and row[3] else row[3], *row[4:])
        for row in rows
    ]
    found = shop(table("Order ID,Email,Paid at,Financial Status,Lineitem sku,Quantity", rows))
    assert found.counts["negative_events_dropped"] == sum(row[0] in refunded for row in rows)


def test_orders_without_a_time_stay_without(shop):
    """What was never paid has no time in any line."""
    rows, _ = lines_of_orders(0.5)
    unpaid = {row[0] for row in rows if int(row[0]) % 8 == 5}
    rows = [(*row[:2], "" if row[0] in unpaid else row[2], *row[3:]) for row in rows]
    found = shop(table("Order ID,Email,Paid at,Financial Status,Lineitem sku,Quantity", rows))
    dropped = found.counts["rows_with_unreadable_times_dropped"]
    assert dropped == sum(row[0] in unpaid for row in rows)
