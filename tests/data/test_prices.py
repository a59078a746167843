"""Prices of orders: several currencies in one column, and those of all pieces of a line."""

from __future__ import annotations

import re

import pytest
from reader_suite import table

from recsys.data.raw import ReaderConfig
from recsys.data.readers import READERS

T = 1_700_000_000
PRICES = [n * 7 % 11 + 9.5 for n in range(11)]


def lines(head: str, *values, day: int = 0) -> str:
    """Lines of 20 users and 11 items, an hour apart."""
    rows = ((f"u{n % 20}", f"p{n * 7 % 11}", T + 86_400 * day + 3600 * n, *(v(n) for v in values))
            for n in range(180))  # fmt: skip
    return table(f"user;item;timestamp;{head}", rows, ";")


def night(raw, found, text: str):
    """What is read of a newer file in the form of the data before."""
    (raw / "new.csv").write_text(text, encoding="utf-8")
    known = {"mapping": found.info["cleaning"]["mapping"], "new_items": True}
    return READERS["table"].read(ReaderConfig(raw / "new.csv", **known)).gather()


def other(one: str, two: str):
    """A text with the price of the item, and another text in one of ten lines."""
    return lambda n: one.format(n * 7 % 11 + 9) if n % 10 else two


@pytest.mark.parametrize(
    ("head", "values", "several"),
    [("price;currency", [other("{}.50", "4200"), other("EUR", "JPY")], True),
     ("Preis;Währung", [other("{},50", "4.200"), other("€", "¥")], True),
     ("price;order currency", [other("{}.50", "99.00"), other("EUR", "THB")], True),
     ("unit price", [other("{},50 EUR", "$9.90")], True),
     ("order id;currency;price",  # as in Shopify, the first line of an order says it
      [lambda n: f"#{n // 2}", lambda n: "" if n % 2 else ["JPY", "EUR"][n % 20 > 0],
       lambda n: 4200 if n % 20 < 2 else PRICES[n % 11]], True),
     ("price;Currency", [other("${}.50", "$99.00"), other("CAD", "USD")], True),
     ("price;currency", [other("{}.50", "9.50"), other("EUR", "EUR")], False),
     ("price_usd;currency", [other("{}.50", "9.50"), other("USD", "CAD")], False),
     ("price", [other("{},50 €", "9,50 EUR")], False),
     ("price;currency", [other("{}.50", "9.50"), other("EUR", "n/a")], False)],
)  # fmt: skip
def test_prices_are_read_in_one_currency(shop, head, values, several):
    found = shop(lines(head, *values))
    assert found.values("price") == PRICES if several else None not in found.values("price")
    assert bool(re.search(r"several currencies \(... 162, ... 18\)", found.notes)) is several


def test_prices_of_the_items_file_are_in_one_currency(shop):
    rows = [("p0", "1.50", "EUR"), ("p1", "2.50", "EUR"), ("p2", "4200", "JPY"), ("p3", "3", "EUR")]
    items = table("id,price,currency", rows)
    found = shop(items=items)
    assert found.values("price") == [1.5, 2.5, None, 3]
    assert shop(items=items, clean={"skip": ["prices"]}).values("price") == [1.5, 2.5, 4200, 3]


def test_the_night_reads_prices_of_the_currency_of_the_first_run(shop, raw):
    found = shop(lines("price;currency", other("{}.50", "4200"), other("EUR", "JPY")))
    prices = lambda n: n if n % 10 == 0 else 4200  # noqa: E731
    new = night(raw, found, lines("price;currency", prices, other("JPY", "EUR"), day=9))
    assert max(new.items["price"].to_pylist()) < 4200
    assert "(JPY 162, EUR 18). Those in EUR" in new.report.notes[0]


@pytest.mark.parametrize(
    ("form", "fewest", "least"), [("{:.2f}", 1, 0.9), ("{:.2f} €", 2, 0.9), ("${:.2f}", 2, 1)]
)
def test_prices_of_all_pieces_of_a_line_are_divided(shop, raw, form, fewest, least):
    """As in Amazon's reports of orders; more pieces may be a little cheaper."""
    pieces = lambda n: fewest * (1 + (n // 11) % 3)  # noqa: E731
    cheaper = lambda n: 1 if pieces(n) == fewest else least  # noqa: E731
    total = lambda n: form.format(PRICES[n % 11] * pieces(n) * cheaper(n))  # noqa: E731
    found = shop(lines("quantity;item-price", pieces, total))
    prices = zip(found.values("price"), PRICES, strict=True)
    assert all(least * right - 0.01 <= price <= right for price, right in prices)
    assert "Prices of 'item-price' grow with 'quantity'" in found.notes
    new = night(raw, found, lines("quantity;item-price", pieces, total, day=9))
    assert new.items["price"].to_pylist() == found.values("price")


@pytest.mark.parametrize("pieces", [lambda n: 1, lambda n: 1 + n // 11 % 3, lambda n: 1 + n % 11])
def test_prices_of_one_piece_stay(shop, pieces):
    found = shop(lines("qty;item price", pieces, lambda n: PRICES[n % 11]))
    assert found.values("price") == PRICES
    assert "grow with" not in found.notes
