"""Lines of orders whose order, or whose return, says what the lines themselves leave out."""

from __future__ import annotations

import random
from datetime import datetime, timedelta

import pytest

from recsys.errors import DataError


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


def baskets(item="", title="", price=0.0, share=0.4, *, end=True, best=0.0, counted=True):
    """Lines of 400 orders of 60 things, of which some have one more line, or a best seller."""
    draw, rows = random.Random(3), []
    prices = [f"{3 + draw.random() * 40:.2f}" for _ in range(60)]
    for order in range(400):
        lines = [(f"sku{n:03}", f"Thing {n}", prices[n], draw.choice([1, 1, 1, 2]))
                 for n in draw.sample(range(60), draw.choice([1, 1, 2, 2, 3, 4]))]  # fmt: skip
        if draw.random() < best:
            lines = [
                *lines[: draw.randrange(4)],
                ("sku999", "Best seller", "9.90", draw.choice([1, 1, 2])),
            ]
        if item and draw.random() < share:
            cost = f"{draw.random() * 30:.2f}" if price is None else price
            lines.insert(
                len(lines) if end else draw.randrange(len(lines) + 1), (item, title, cost, 1)
            )
        rows += [(f"R{order}", f"c{order % 60}", moment(order), *line) for line in lines]
    head, last = "order_id,customer,created_at,sku,title,price", ",quantity" * counted
    return table(head + last, rows if counted else [row[:-1] for row in rows])


@pytest.mark.parametrize("share", [0.15, 0.5])
@pytest.mark.parametrize(
    ("item", "title", "price"),
    [("UPS", "UPS Ground", 5.9), ("CE7", "Correos Express", 6),
     ("9001", "Click & Collect", "0.00"), ("A4", "Abholung im Laden", 0), ("FL", "Flyer", "0,00 €"),
     ("K1", "Kaution", 8), ("OI", "Open item", None), ("W", "Warengruppe 19%", None)],
)  # fmt: skip
def test_lines_that_no_order_has_alone_or_twice_are_asked_about(shop, item, title, price, share):
    text = baskets(item, title, f'"{price}"' if "," in str(price) else price, share)
    with pytest.raises(DataError, match="no order has one of them alone or twice") as asked:
        shop(text)
    assert f"{item!r} ({title}, " in str(asked.value)
    found = shop(text, clean={"drop_items": (item,)})
    assert item not in found.data.item_ids
    assert found.counts["rows_of_no_products_dropped"] == text.count(f",{item},")
    assert item in shop(text, clean={"drop_items": (f"!{item}",)}).data.item_ids


def test_all_such_lines_are_asked_about_at_once(shop):
    draw = random.Random(1)
    carriers = ["UPS Ground", "Evri Standard", "Hermes"]
    text = baskets("UPS", "UPS Ground", 5.9, 0.9, end=False)
    lines = [line.replace("UPS,UPS Ground", f"C{n},{carriers[n]}") if "UPS" in line else line
             for line, n in ((line, draw.randrange(3)) for line in text.splitlines())]  # fmt: skip
    with pytest.raises(DataError) as asked:
        shop("\n".join(lines))
    assert all(f"'C{n}' ({name}, " in str(asked.value) for n, name in enumerate(carriers))


@pytest.mark.parametrize("best", [0.1, 0.25, 0.5, 0.7])
@pytest.mark.parametrize("counted", [True, False])
def test_best_sellers_are_products(shop, best, counted):
    found = shop(baskets(best=best, counted=counted))
    assert "sku999" in found.data.item_ids
