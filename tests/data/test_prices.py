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


def other(one: str, two: str):
    """A text with the price of the item, and another text in one of ten lines."""
    return lambda n: one.format(n * 7 % 11 + 9) if n % 10 else two


@pytest.mark.parametrize(
    ("head", "values", "several"),
    [("price;currency", ["{}.50", "4200", "EUR", "JPY"], "EUR 162, JPY 18"),
     ("Preis;Währung", ["{},50", "4.200", "€", "¥"], "EUR 162, ¥ 18"),
     ("price;order currency", ["{}.50", "99.00", "EUR", "THB"], "EUR 162, THB 18"),
     ("price;Currency", ["${}.50", "$99.00", "CAD", "USD"], "CAD 162, USD 18"),
     ("price;price.currency;currency", ["{}", "9", "EUR", "JPY", "EUR", "EUR"], None),
     ("unit price", ["{},50 EUR", "$9.90"], "EUR 162, $ 18"),
     ("price", ["US$ {}.50 USD", "CA$ 9.50 CAD"], "USD 162, CAD 18"),
     ("price;currency", ["${}.50", "9.50", "", "SGD"], None),
     ("price", ["{} kr", "9 SEK"], None),
     ("price", ["{},50 €", "9,50 EUR"], None),
     ("price;currency", ["{}.50", "9.50", "eur", "Euro"], None),
     ("price;currency", ["{}.50", "9.50", "EUR", "n/a"], None),
     ("price;currency", ["{}.50", "", "EUR", "JPY"], None),
     ("price_usd;currency", ["{}.50", "9.50", "USD", "CAD"], None)],
)  # fmt: skip
def test_several_currencies_are_told_and_prices_read_as_they_are(shop, head, values, several):
    columns = [other(*pair) for pair in zip(values[::2], values[1::2], strict=True)]
    found = shop(lines(head, *columns))
    told = re.findall(r"several currencies \((.*) in the first 180 rows\)", found.notes)
    assert told == ([several] if several else [])
    assert None not in found.values("price")


def test_prices_of_several_currencies_are_read_and_left_out_as_the_note_says(shop, raw):
    head, values = "price;currency", (lambda n: n + 1, other("EUR", "JPY"))
    found = shop(lines(head, *values))
    assert max(found.values("price")) == 180
    role, name = re.search(r"--column (\w+)=(\w+)", found.notes).groups()
    without = shop(lines(head, *values), columns={role: name})
    assert "price" not in without.data.items.column_names
    assert "currencies" not in without.notes
    (raw / "new.csv").write_text(lines(head, *values, day=9), encoding="utf-8")
    assert len(without.night(raw / "new.csv", named={role: name})) == 180


def test_several_currencies_of_the_items_file_are_told(shop):
    rows = [("p0", "1.50", "EUR"), ("p1", "2.50", "EUR"), ("p2", "4200", "JPY"), ("p3", "3", "EUR")]
    found = shop(items=table("id,price,currency", rows))
    assert found.values("price") == [1.5, 2.5, 4200, 3]
    assert found.values("currency") == ["EUR", "EUR", "JPY", "EUR"]
    assert "(EUR 3, JPY 1 in the first 4 rows)" in found.notes


def test_prices_that_grow_with_the_pieces_are_told(shop, raw):
    """As in Amazon's reports of orders; more pieces may be a little cheaper."""
    total = lambda n: PRICES[n % 11] * (1 + n // 11 % 3 * 0.9)  # noqa: E731
    text = lines("quantity;price", lambda n: 1 + n // 11 % 3, lambda n: f"{total(n):.2f} €")
    found = shop(text)
    assert "Prices of 'price' grow with 'quantity'" in found.notes
    assert max(found.values("price")) == pytest.approx(max(map(total, range(169, 180))), abs=0.01)
    assert "grow with" not in shop(text, columns={"price": "none"}).notes
    (raw / "new.csv").write_text(text, encoding="utf-8")
    config = ReaderConfig(raw / "new.csv", mapping=found.info["cleaning"]["mapping"])
    assert "grow with" not in "".join(READERS["table"].read(config).report.notes)


@pytest.mark.parametrize(
    ("pieces", "price"),
    [(lambda n: 1, lambda n: PRICES[n % 11]), (lambda n: 1 + n // 11 % 3, lambda n: PRICES[n % 11]),
     (lambda n: 2 if n > 90 and n % 11 == 3 else 1, lambda n: 20 if n > 90 and n % 11 == 3 else 9)],
)  # fmt: skip
def test_prices_of_one_piece_are_read_without_a_word(shop, pieces, price):
    """Of one item, the price rose when more pieces of it were bought."""
    assert "grow with" not in shop(lines("qty;item price", pieces, price)).notes
