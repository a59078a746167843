"""Prices of orders: several currencies in one column."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from reader_suite import table

from recsys.data.raw import ReaderConfig
from recsys.data.readers import READERS

T = 1_700_000_000
LINES = 180


def lines(head: str, *values: Callable[[int], object], day: int = 0) -> str:
    """Lines of 20 users and 11 items, an hour apart."""
    at = T + 86_400 * day
    made = (
        (f"u{n % 20}", f"p{n * 7 % 11}", at + 3600 * n, *(v(n) for v in values))
        for n in range(LINES)
    )
    return table(f"user;item;timestamp;{head}", made, ";")


def other(one: str, two: str) -> Callable[[int], str]:
    """One text with the item's price in nine of ten lines, another one in the others."""
    return lambda n: two if n % 10 == 0 else one.format(n * 7 % 11 + 9)


PRICES = [n * 7 % 11 + 9.5 for n in range(11)]


@pytest.mark.parametrize(
    ("head", "values"),
    [("price;currency", [other("{}.50", "4200"), other("EUR", "JPY")]),
     ("Preis;Währung", [other("{},50", "4.200"), other("€", "¥")]),
     ("price;order currency", [other("{}.50", "99.00"), other("EUR", "ZAR")]),
     ("Price", [other("€{}.50", "¥4,200")]),
     ("unit price", [other("{},50 EUR", "$9.90")]),
     ("price;Currency", [other("${}.50", "$99.00"), other("CAD", "USD")])],
)  # fmt: skip
def test_prices_of_several_currencies_are_told_and_those_of_one_are_read(shop, head, values):
    found = shop(lines(head, *values))
    assert found.values("price") == PRICES
    assert re.search(r"are in several currencies \(... 162, ... 18\)", found.notes)


@pytest.mark.parametrize(
    ("head", "values"),
    [("price;currency", [other("{}.50", "7.20"), other("EUR", "EUR")]),
     ("price_usd;currency", [other("{}.50", "7.20"), other("USD", "CAD")]),
     ("price", [other("{},50 €", "7,20 EUR")]), ("price", [other("${}.50", "$7.20")]),
     ("price;currency", [other("{}.50", "7.20"), other("EUR", "n/a")]),
     ("price", [other("{} kr", "7 SEK")])],
)  # fmt: skip
def test_prices_of_one_currency_are_read_without_a_word(shop, head, values):
    found = shop(lines(head, *values))
    assert "several currencies" not in found.notes
    assert None not in found.values("price")


def test_the_first_line_of_an_order_may_say_the_currency_of_all(shop):
    """As in Shopify."""
    rows = [
        (f"#{n // 2}", ["EUR" if n % 20 else "JPY", ""][n % 2], [f"u{n // 2 % 20}", ""][n % 2],
         T + 7200 * (n // 2), f"p{n * 7 % 11}", [f"{n * 7 % 11 + 9}.50", "4200"][n // 2 % 10 == 0])
        for n in range(240)
    ]  # fmt: skip
    found = shop(table("Name,Currency,Customer,Created at,Lineitem sku,Lineitem price", rows))
    assert sorted(found.values("price")) == sorted(PRICES)
    assert "(EUR 216, JPY 24)" in found.notes


def test_prices_of_the_items_file_are_in_one_currency(shop):
    rows = [
        (f"p{n}", f"Tea {n}", [f"{n}.50", 4200][n == 3], ["EUR", "JPY"][n == 3]) for n in range(4)
    ]
    items = table("id,title,price,currency", rows)
    found = shop(items=items)
    assert found.values("price") == [0.5, 1.5, 2.5, None]
    assert found.values("currency") == ["EUR", "EUR", "EUR", "JPY"]
    assert "(EUR 3, JPY 1)" in found.notes
    assert shop(items=items, clean={"skip": ["prices"]}).values("price") == [0.5, 1.5, 2.5, 4200]


def test_the_night_reads_prices_of_the_currency_of_the_first_run(shop, raw):
    found = shop(lines("price;currency", other("{}.50", "4200"), other("EUR", "JPY")))
    text = lines("price;currency", lambda n: [4200, n][n % 10 == 0], other("JPY", "EUR"), day=9)
    (raw / "new.csv").write_text(text, encoding="utf-8")
    mapping = found.info["cleaning"]["mapping"]
    config = ReaderConfig(raw / "new.csv", mapping=mapping, new_items=True)
    night = READERS["table"].read(config).gather()
    assert max(night.items["price"].to_pylist()) <= LINES
    assert "(JPY 162, EUR 18). Those in EUR" in night.report.notes[0]
