"""Exports as shop systems write them: one command, no flag, and every row accounted for."""

from __future__ import annotations

import csv
import json
import shlex
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterable
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from reader_suite import write_xlsx
from typer.testing import CliRunner

from recsys import cli
from recsys.artifacts import read_manifest
from recsys.data.service_lines import says
from recsys.dataset import Dataset

Rows = list[dict[str, Any]]


class Run:
    """`recsys run EVENTS ... --until data`, and what it wrote; a refusal is a ValueError."""

    def __init__(self, home: Path) -> None:
        self.home, self.info = home, {}

    def __call__(self, events: Path, *options: str) -> Dataset:
        name = f"n{len(list(self.home.glob('datasets/*')))}"
        command = ["run", str(events), "--until", "data", "--name", name, *options]
        result = CliRunner().invoke(cli.app, command)
        if result.exit_code:
            raise ValueError(str(result.exception))
        self.info = read_manifest(self.home / "datasets" / name).info["cleaning"]
        return Dataset.load(self.home / "datasets" / name)


@pytest.fixture
def run(home: Path) -> Run:
    return Run(home)


def write(path: Path, rows: Rows) -> Path:
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def counts(run: Run) -> dict[str, int]:
    return {row["rule"]: row["count"] for row in run.info["findings"]}


def check_accounts(run: Run, read: int, dataset: Dataset) -> None:
    """What was read, minus what each rule removed, is what is used."""
    first, *others, last = run.info["accounts"]
    assert first["events"] == read
    assert read + sum(row["events"] for row in others) == last["events"]
    assert last["events"] == len(dataset.interactions)


def bought(dataset: Dataset, user: str) -> list[str]:
    events = dataset.interactions
    place = events.user_ids.tolist().index(user)
    return [str(events.item_ids[i]) for i in events.item[events.user == place]]


def titles(dataset: Dataset) -> dict[str, str]:
    return dict(
        zip(dataset.items["item_id"].to_pylist(), dataset.items["title"].to_pylist(), strict=True)
    )


def baskets(orders: int) -> Iterable[tuple[int, int, list[int]]]:
    """Order, customer and products; every fifth order is of a guest."""
    for order in range(orders):
        yield order, order % 37, [(order * 7 + n * 11) % 40 for n in range(1 + order % 3)]


# Shopify, WooCommerce and Online Retail: real names of columns, invented rows


def shopify(orders: int = 200, *, email: bool = True) -> Rows:
    rows: Rows = []
    for order, customer, products in baskets(orders):
        when = (
            f"2026-0{1 + order % 6}-{1 + order % 28:02d} {order % 24:02d}:{order % 60:02d}:00 +0200"
        )
        lines = [(f"Shirt {p} - M", f"SH-{p:03d}" if p % 8 else "", 10 + p) for p in products]
        if order % 4 == 0:
            lines.append(("Express shipping", "", 4.9))
        for place, (name, sku, price) in enumerate(lines):
            first = place == 0
            rows.append(
                {
                    "Name": f"#{1001 + order}",
                    "Email": f"c{customer}@shop.example.org" if email and order % 5 else "",
                    "Financial Status": ("refunded" if order % 20 == 1 else "paid")
                    if first
                    else "",
                    "Paid at": when if first else "",
                    "Fulfillment Status": "fulfilled" if first else "",
                    "Currency": "EUR" if first else "",
                    "Total": "30.00" if first else "",
                    "Created at": when,
                    "Lineitem quantity": 1,
                    "Lineitem name": name,
                    "Lineitem price": f"{price:.2f}",
                    "Lineitem sku": sku,
                    "Lineitem requires shipping": "true",
                    "Vendor": "Acme" if place % 2 else "Umbra",
                    "Cancelled at": "",
                    "Billing Name": f"Person {customer}" if first else "",
                    "Id": 9_000_000 + order if first else "",
                }
            )
    return rows


def test_an_export_of_shopify(run: Run, raw: Path) -> None:
    rows = shopify()
    data = run(write(raw / "orders_export.csv", rows))
    check_accounts(run, len(rows), data)
    assert titles(data)["SH-007"] == "Shirt 7 - M"
    assert titles(data)["Shirt 8 - M"] == "Shirt 8 - M"  # there is no SKU
    assert "#1001" in data.interactions.user_ids  # a guest is an order
    assert "c1@shop.example.org" in data.interactions.user_ids
    assert not [item for item in titles(data).values() if "shipping" in item.lower()]
    found = counts(run)
    assert found["rows_of_no_products_dropped"] == 50
    assert found["sessions_without_user"] == sum(not row["Email"] for row in rows)
    assert found["negative_events_dropped"] > 0
    assert run.info["no_products"] == {"Express shipping": 50}
    prices = dict(
        zip(data.items["item_id"].to_pylist(), data.items["price"].to_pylist(), strict=True)
    )
    assert prices["SH-007"] == 17


def woocommerce(orders: int = 200) -> Rows:
    """One row for each product, as the plugin Advanced Order Export writes them."""
    return [
        {
            "Order Number": 5000 + order,
            "Order Status": "Refunded" if order % 20 == 1 else "Completed",
            "Order Date": f"2026-0{1 + order % 6}-{1 + order % 28:02d} {order % 24:02d}:07",
            "First Name (Billing)": f"F{customer}",
            "Email (Billing)": f"c{customer}@shop.example.org" if order % 5 else "",
            "Payment Method Title": "Card",
            "Order Total Amount": 30,
            "SKU": f"W{p:03d}" if p >= 0 else "",
            "Item #": place + 1,
            "Item Name": f"Tea {p}" if p >= 0 else "Versandkosten DHL",
            "Category": f"Drinks > Kind {p % 3}" if p >= 0 else "",
            "Quantity (- Refund)": 1,
            "Item Cost": 3 + p,
        }
        for order, customer, products in baskets(orders)
        for place, p in enumerate(products + [-1] * (order % 3 == 0))
    ]


def test_an_export_of_woocommerce(run: Run, raw: Path) -> None:
    rows = woocommerce()
    data = run(write(raw / "orders.csv", rows))
    check_accounts(run, len(rows), data)
    assert titles(data)["W007"] == "Tea 7"
    assert set(titles(data)) == {f"W{n:03d}" for n in range(40)}
    assert "5000" in data.interactions.user_ids
    assert "c1@shop.example.org" in data.interactions.user_ids
    assert run.info["no_products"] == {"Versandkosten DHL": 67}
    assert data.items["category"][0].as_py()[0] == "Drinks"


def online_retail(orders: int = 300) -> Rows:
    """With guests, returns, and lines that are no products."""
    rows: Rows = []
    special = [
        ("POST", "POSTAGE"),
        ("DOT", "DOTCOM POSTAGE"),
        ("M", "Manual"),
        ("D", "Discount"),
        ("BANK CHARGES", "Bank Charges"),
        ("AMAZONFEE", "AMAZON FEE"),
        ("S", "SAMPLES"),
    ]
    for order, customer, products in baskets(orders):
        lines = [(f"{22000 + p}", f"TEA LIGHT {p}", 6, 1 + p) for p in products]
        if order % 4 == 0:
            lines.append((*special[order // 4 % len(special)], 1, 18))
        back = order % 23 == 7
        rows += [
            {
                "InvoiceNo": f"{'C' if back else ''}{536365 + order}",
                "StockCode": code,
                "Description": "damaged?" if back and order % 2 else text,
                "Quantity": -6 if back else count,
                "InvoiceDate": f"{1 + order % 12}/{1 + order % 28}/2025 {8 + order % 9}:26",
                "UnitPrice": price,
                "CustomerID": 12346 + customer if order % 4 != 1 else "",
                "Country": "United Kingdom" if customer % 2 else "France",
            }
            for code, text, count, price in lines
        ]
    return rows


def test_an_export_like_online_retail(run: Run, raw: Path) -> None:
    rows = online_retail()
    data = run(write(raw / "retail.csv", rows))
    check_accounts(run, len(rows), data)
    assert titles(data)["22007"] == "TEA LIGHT 7"
    assert set(titles(data)) == {str(22000 + n) for n in range(40)}
    assert sum(run.info["no_products"].values()) == 75
    assert "536366" in data.interactions.user_ids  # a guest's invoice
    assert counts(run)["negative_events_dropped"] > 0


# Rules that would remove most of the data


def clicks(users: int = 20, **columns: Callable[[int], object]) -> Rows:
    """Twelve clicks of each user, an hour apart."""
    made = {
        "user_id": lambda n: f"u{n // 12}",
        "item_id": lambda n: f"i{n * 5 % 17}",
        "timestamp": lambda n: 1_700_000_000 + 3600 * n,
    } | columns
    return [{name: value(n) for name, value in made.items()} for n in range(12 * users)]


STOPPED = {
    "counts up to ten": (
        {"rating": lambda n: (1, 1, 1, 1, 2, 2, 2, 3, 4, 6, 8, 10)[n % 12]},
        "data.clean.skip=negative_feedback",
    ),
    "guests without sessions": (
        {"user_id": lambda n: "NA" if n % 2 else f"u{n // 12}"},
        "data.clean.skip=placeholder_users",
    ),
    "two of five orders cancelled": (
        {"status": lambda n: ("cancelled", "cancelled", "paid", "paid", "paid")[n % 5]},
        "data.clean.skip=cancelled_orders",
    ),
    "a year without a time": (
        {"timestamp": lambda n: "soon" if n % 5 < 2 else 1_700_000_000 + n},
        "data.clean.skip=unreadable_times",
    ),
    "no user in two of five rows": (
        {"user_id": lambda n: "" if n % 5 < 2 else f"u{n // 12}"},
        "data.clean.most_removed=1",
    ),
    "users who returned all they had": (
        {
            "user_id": lambda n: f"u{n // 12}" if n < 180 else f"v{n // 2}",
            "item_id": lambda n: f"i{n * 5 % 17}" if n < 180 else f"i{n // 2 % 17}",
            "event": lambda n: "return" if n >= 180 and n % 2 else "purchase",
        },
        "data.clean.skip=negative_feedback",
    ),
}


@pytest.mark.parametrize("case", STOPPED)
def test_a_rule_that_would_remove_much_stops_and_asks(run: Run, raw: Path, case: str) -> None:
    columns, flag = STOPPED[case]
    file = write(raw / "events.csv", clicks(**columns))
    with pytest.raises(ValueError, match=r"would be removed, more than") as caught:
        run(file)
    assert f"--set {flag}" in str(caught.value)
    removed = run(file, "--set", "data.clean.most_removed=1")
    assert 0 < len(removed.interactions) < 240
    check_accounts(run, 240, removed)


# Lines that are no products


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("SHIPPING", "sure"), ("Standard shipping", "sure"), ("Versandkostenpauschale", "sure"),
        ("Frachtkostenanteil", "sure"), ("Transportkosten", "sure"), ("Kranentladung", "weak"),
        ("Frais de port", "sure"), ("Gastos de envío", "sure"), ("Spedizione express", "sure"),
        ("Verzendkosten", "sure"), ("Rabatt", "sure"), ("Adjust bad debt", "sure"),
        ("Nachnahmegebühr", "sure"), ("Samples", "weak"), ("Porto", "weak"), ("Gutschein", "weak"),
        ("Porto und Verpackung", "weak"),
        ("Versand nach Österreich", "sure"), ("Livraison en Belgique", "sure"),
        ("Shipping to Germany", "sure"), ("Expresszuschlag", "sure"),
        ("Mindermengenzuschlag", "sure"), ("Portokosten", "sure"),
        ("Postage and packing", "sure"), ("Verpackung", "weak"), ("Delivery truck", "part"),
        ("Porto u. Verpackung", "weak"), ("Core deposit", "weak"), ("Flaschenpfand", "weak"),
        ("Shipping container model", "part"), ("Toffee", None),
        ("Coffee", None), ("Gift voucher holder", "some"), ("85123A", None), ("", None),
    ],
)  # fmt: skip
def test_words_of_lines_that_are_no_products(text: str, said: str | None) -> None:
    assert says(text) == said


def with_a_line(name: str, share: int = 4) -> Rows:
    rows: Rows = []
    for order, customer, products in baskets(200):
        named = [f"P{p:02d}" for p in products] + [name] * (order % share == 0)
        rows += [
            {"order_id": order, "customer": f"c{customer}", "sku": sku, "kind": sku[:1],
             "ordered_at": f"2026-01-{1 + order % 28:02d} {order // 28:02d}:00"}
            for sku in named
        ]  # fmt: skip
    return rows


def test_shipping_is_in_no_history_and_in_no_list(run: Run, raw: Path) -> None:
    items = [{"sku": f"P{n:02d}", "name": f"Thing {n}"} for n in range(40)]
    items.append({"sku": "V1", "name": "Standard shipping"})
    file = write(raw / "orders.csv", with_a_line("V1"))
    own = write(raw / "products.csv", items)
    data = run(file, "--items", str(own))
    assert "V1" not in data.item_ids
    assert counts(run)["rows_of_no_products_dropped"] == 50
    for option in (("--drop-items", "none"), ("--set", "data.clean.drop_items=[none]")):
        kept = run(file, "--items", str(own), *option)
        assert "V1" in kept.item_ids
        assert len(kept.interactions) == len(data.interactions) + 50


def test_a_doubtful_line_is_asked_about(run: Run, raw: Path) -> None:
    file = write(raw / "orders.csv", with_a_line("Shipping box blue"))
    message = r"'Shipping box blue' is in 25% of the orders.*drop_items=.*Shipping box blue"
    with pytest.raises(ValueError, match=message):
        run(file)
    assert "Shipping box blue" not in run(file, "--drop-items", "Shipping box blue").item_ids
    assert "Shipping box blue" in run(file, "--drop-items", "none").item_ids


@pytest.mark.parametrize("option", ["P0*", "kind=X"])
def test_lines_are_dropped_by_patterns_and_columns(run: Run, raw: Path, option: str) -> None:
    options = ["--drop-items", option, *["--drop-items", "!X-ray"] * (option == "P0*")]
    data = run(write(raw / "orders.csv", with_a_line("X-ray")), *options)
    gone = {"P0*": {f"P0{n}" for n in range(10)}, "kind=X": {"X-ray"}}[option]
    every = {f"P{n:02d}" for n in range(40)} | {"X-ray"}
    assert set(data.item_ids.tolist()) == every - gone


def test_a_column_of_the_items_file_names_what_is_no_product(run: Run, raw: Path) -> None:
    items = [{"sku": f"P{n:02d}", "name": f"Thing {n}", "type": "goods"} for n in range(40)]
    items.append({"sku": "X-ray", "name": "Help", "type": "service"})
    own = write(raw / "products.csv", items)
    orders = write(raw / "orders.csv", with_a_line("X-ray"))
    data = run(orders, "--items", str(own), "--drop-items", "type=service")
    assert "X-ray" not in data.item_ids


# Fields of items in the events


def test_the_events_fill_gaps_of_the_items_file(run: Run, raw: Path) -> None:
    rows = clicks(
        item_id=lambda n: f"i{n % 8}",
        product_name=lambda n: f"Name {n % 8}" if n % 5 else f"Name {n % 8} (old)",
        price=lambda n: 10 * (n % 8) + n // 100,
        brand=lambda n: f"B{n % 8 % 3}",
    )
    items = [{"item_id": f"i{n}", "title": "" if n % 2 else f"Own {n}"} for n in range(6)]
    data = run(write(raw / "e.csv", rows), "--items", str(write(raw / "i.csv", items)))
    assert titles(data) == {
        f"i{n}": f"Own {n}" if n % 2 == 0 and n < 6 else f"Name {n}" for n in range(8)
    }
    found = {row["item_id"]: row for row in data.items.to_pylist()}
    assert (found["i1"]["price"], found["i1"]["brand"]) == (12, "B1")
    assert found["i7"]["available"] is False  # the items file does not have it


def test_the_most_frequent_text_and_the_latest_price_describe_an_item(run: Run, raw: Path) -> None:
    rows = clicks(
        item_id=lambda n: f"i{n % 8}",
        description=lambda n: "?" if n % 48 == 0 else f"Thing {n % 8}",
        price=lambda n: n % 8 + 0.5 if n >= 232 else 5,
    )
    data = run(write(raw / "e.csv", rows[::-1]))
    assert titles(data) == {f"i{n}": f"Thing {n}" for n in range(8)}
    prices = dict(zip(data.item_ids.tolist(), data.items["price"].to_pylist(), strict=True))
    assert prices == {f"i{n}": n + 0.5 for n in range(8)}
    assert "the title is the most frequent 'description'" in " ".join(run.info["notes"])
    assert "the price is the latest 'price' above 0 of a line" in " ".join(run.info["notes"])


@pytest.mark.parametrize("returned", ["-12.90", "12.90-", "12.90"])
def test_returns_and_gifts_do_not_set_the_price(run: Run, raw: Path, returned: str) -> None:
    """The last lines of an item are a return, with a price of another sign or not, and a gift."""
    rows = clicks(
        item_id=lambda n: f"i{n % 8}",
        price=lambda n: (
            {0: "9.50", 1: returned, 2: "0.00"}[max(0, (n - 216) // 8)] if n % 8 else "0.00"
        ),
        quantity=lambda n: -1 if 224 <= n < 232 else 1,
    )
    data = run(write(raw / "e.csv", rows))
    prices = dict(zip(data.item_ids.tolist(), data.items["price"].to_pylist(), strict=True))
    assert prices == {f"i{n}": 9.5 if n else 0 for n in range(8)}


def test_names_in_lists_of_lines_are_titles(run: Run, raw: Path) -> None:
    rows = [
        {
            "customer": f"c{n % 5}",
            "created_at": f"2026-01-{1 + n % 28:02d}T10:{n % 60:02d}:00Z",
            "line_items": [
                {"sku": f"s{i}", "name": f"Thing {i}", "price": "9.50"} for i in (n % 7, n % 4 + 7)
            ],
        }
        for n in range(60)
    ]
    (raw / "e.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = run(raw / "e.jsonl")
    assert titles(data) == {f"s{n}": f"Thing {n}" for n in range(11)}


# Baskets


def labels(data: Dataset) -> list[tuple[str, int, int]]:
    """User, time and label of each basket."""
    events = data.interactions
    return sorted(
        {
            (str(events.user_ids[u]), int(t), int(s))
            for u, t, s in zip(events.user, events.timestamp, data.split, strict=True)
        }
    )


def test_a_basket_is_held_out_as_a_whole(run: Run, raw: Path) -> None:
    rows = [
        {"customer": f"c{n}", "sku": f"P{(n + 3 * day + line) % 9}", "date": f"2026-01-{day:02d}"}
        for n in range(25)
        for day in (1, 9, 17, 25)
        for line in range(3)
    ]
    file = write(raw / "orders.csv", rows)
    data = run(file, "--set", "data.split=leave-one-out")
    assert data.baskets
    assert any("accident of the file" in note for note in run.info["notes"])
    found = labels(data)
    assert len(found) == 100  # no basket is divided
    assert [label for _, _, label in found] == [0, 0, 1, 2] * 25
    assert set(data.examples("test", "all").targets.lengths.tolist()) == {3}


# Layouts


def test_several_items_in_a_cell_are_one_basket(run: Run, raw: Path) -> None:
    rows = [
        {"customer": f"u{n % 4}", "items": f"p{n % 4},p{(n + 1) % 4}" if n % 2 else f"p{n % 4}",
         "order_date": f"2024-01-{1 + n:02d}"}
        for n in range(28)
    ]  # fmt: skip
    file = write(raw / "e.csv", rows)
    items = write(raw / "i.csv", [{"item": f"p{n}", "title": f"Thing {n}"} for n in range(4)])
    for options in ((), ("--items", str(items))):
        data = run(file, *options)
        assert set(data.item_ids.tolist()) == {"p0", "p1", "p2", "p3"}
        assert bought(data, "u1")[:2] == ["p1", "p2"]
        check_accounts(run, 28, data)
    kept = run(file, "--set", "data.clean.item_separator=none")
    assert "p1,p2" in kept.item_ids


RATINGS = [
    f"{n // 9 + 1},{100 + n * 7 % 23},{5 - n % 9 // 3},{978_300_000 + 9000 * n}" for n in range(180)
]
WITHOUT_A_TABLE = {
    "ratings.dat": [row.replace(",", "::") for row in RATINGS],
    "u.csv": RATINGS,
    "pairs.csv": [f"anna{n % 9},tea{n % 7}" for n in range(90)],
}  # fmt: skip


@pytest.mark.parametrize("name", WITHOUT_A_TABLE)
def test_the_command_in_a_refusal_works(run: Run, raw: Path, name: str) -> None:
    lines = WITHOUT_A_TABLE[name]
    file = raw / name
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"recsys run |column_names") as caught:
        run(file)
    if "column_names" in str(caught.value):
        options = shlex.split(str(caught.value).partition("columns with ")[2].partition(" (")[0])
        data = run(file, *options)
    else:
        command, _, again = str(caught.value).partition(" && recsys run ")
        subprocess.run(["sh", "-c", command[command.index(sys.executable) :]], check=True)
        path, *options = again.split()
        data = run(Path(path), *options)
    expected = {"ratings.dat": 180, "u.csv": 180, "pairs.csv": 90}
    assert run.info["accounts"][0]["events"] == expected[name]
    assert not [item for item in data.item_ids.tolist() if ":" in item]
    assert len(data.interactions) > 60


def test_the_command_for_a_json_list_works(
    run: Run, raw: Path, follow: Callable[[str], str]
) -> None:
    rows = [row | {"price": 8.5 + (row["item_id"] == "i1")} for row in clicks()]
    (raw / "e.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    with pytest.raises(ValueError, match="one JSON list") as caught:
        run(raw / "e.json")
    follow(str(caught.value))
    data = run(raw / "e-lines.jsonl")
    assert len(data.interactions) == 240
    assert set(data.items["price"].to_pylist()) == {8.5, 9.5}


def test_a_spreadsheet_is_read_with_all_its_sheets_of_events(run: Run, raw: Path) -> None:
    header: list[object] = ["Invoice", "StockCode", "Description", "InvoiceDate", "Customer ID"]
    rows = [
        [536365 + n // 3, f"P{n % 9}" if n % 9 else 22000, f"Thing {n % 9}",
         45_000.5 + n // 3, 12346 + n // 9]
        for n in range(180)
    ]  # fmt: skip
    sheets = {"notes": [["read me"]], "2024": [header, *rows[:90]], "2025": [header, *rows[90:]]}
    data = run(write_xlsx(raw / "orders.xlsx", sheets))
    assert run.info["accounts"][0]["events"] == 180
    assert set(titles(data)) == {"22000", *(f"P{n}" for n in range(1, 9))}
    assert titles(data)["22000"] == "Thing 0"
    assert "12346" in data.interactions.user_ids
    assert data.interactions.timestamp[0] == 1_678_881_600  # 2023-03-15 12:00


@pytest.mark.parametrize(
    ("name", "state"), [("old", "hidden"), ("old", "veryHidden"), ("Retouren", "hidden")]
)
def test_hidden_sheets_are_not_read(run: Run, raw: Path, name: str, state: str) -> None:
    head: list[object] = ["user", "item", "timestamp"]
    rows = [[f"u{n % 9}", f"p{n % 7}", 1_700_000_000 + 5000 * n] for n in range(120)]
    old = [[*row[:2], 45_292.5 if n % 2 else "13/03/2024"] for n, row in enumerate(rows)]  # swapped
    path = write_xlsx(raw / "o.xlsx", {name: [head, *old], "now": [head, *rows[::2]]})
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name).decode() for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for part, text in parts.items():
            archive.writestr(part, text.replace(f'"{name}"', f'"{name}" state="{state}"'))
    if name == "Retouren":
        with pytest.raises(ValueError, match=r"taken back, .*: Retouren\. Save them"):
            run(path)
        return
    run(path)
    assert run.info["accounts"][0]["events"] == 60


@pytest.mark.parametrize("above", [[], [["Orders of May"]], [["Orders"], ["of May"], [""]]])
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_lines_above_the_names_and_the_order_of_columns_do_not_matter_in_sheets(
    run: Run, raw: Path, above: list[list[object]], order: list[int]
) -> None:
    header: list[object] = ["Customer ID", "StockCode", "InvoiceDate"]
    rows = [header, *([n % 9, f"P{n % 7}", 45_000.5 + n] for n in range(90))]
    other = [[row[place] for place in order] for row in rows]
    data = run(write_xlsx(raw / "orders.xlsx", {"a": [*above, *rows], "b": [*above, *other]}))
    assert run.info["accounts"][0]["events"] == 180
    assert sorted(set(data.interactions.user_ids)) == [str(n) for n in range(9)]


@pytest.mark.parametrize(
    "name",
    ["Products", "Return reasons", "Deleted products", "Rückgaben", "RMA", "Refunds 1", "Void"],
)
def test_a_sheet_before_the_orders_is_not_read(run: Run, raw: Path, name: str) -> None:
    header: list[object] = ["Customer ID", "StockCode", "InvoiceDate"]
    rows = [header, *([n % 9, f"P{n % 7}", 45_000.5 + n] for n in range(90))]
    summary: list[list[object]] = [["Total", 90], ["Customers", 9]]
    path = write_xlsx(raw / "orders.xlsx", {name: summary, "orders": rows})
    if name[0] in "PD" or name.endswith("reasons"):
        run(path)
        assert run.info["accounts"][0]["events"] == 90
    else:
        with pytest.raises(ValueError, match=f"taken back, .*: {name}\\. Save them"):
            run(path)
    with pytest.raises(ValueError, match="write a line of names above the rows, such as user,item"):
        run(write_xlsx(raw / "bare.xlsx", {"orders": rows[1:]}))


@pytest.mark.parametrize(
    ("name", "back", "cancelled"),
    [("returns", 9, 0), ("Retouren", 9, 0), ("Refunds 2026", 9, 0), ("more", 0, 0),
     ("sales and returns", 0, 0), ("cancelled_orders", 0, 9), ("orders annulés", 0, 9),
     ("returns:returned:Yes:No", 6, 3), ("Retouren:Retoure:Ja:Nein", 6, 3), ("resi:reso:1:0", 6, 3),
     ("retours:status:refunded:return rejected:paid", 6, 3), ("devoluciones:devuelto::no", 6, 3)],
)  # fmt: skip
@pytest.mark.parametrize("is_folder", [False, True])
def test_a_sheet_or_a_file_called_returns_beside_sales_holds_returns(
    run: Run, raw: Path, name: str, back: int, cancelled: int, is_folder: bool
) -> None:
    name, column, yes, no, usual = [*name.split(":"), "", "", "", ""][:5]
    header: list[object] = ["Customer ID", "StockCode", "InvoiceDate", column or "reason"]
    told = [usual if n < 180 else yes if n % 3 else no for n in range(189)]
    rows = [[n % 9, f"P{n % 7}", 1_700_000_000 + 9000 * n, text] for n, text in enumerate(told)]
    sheets = {"all sales": [header, *rows[:180]], name: [header, *rows[180:]]}
    path = raw / "shop"
    if is_folder:
        path.mkdir()
        for sheet, lines in sheets.items():
            text = "\n".join(",".join(map(str, line)) for line in lines)
            (path / f"{sheet}.csv").write_text(text, "utf-8")
    run(path if is_folder else write_xlsx(raw / "shop.xlsx", sheets))
    assert counts(run).get("negative_events_dropped", 0) == back
    assert counts(run).get("rows_of_cancelled_orders_dropped", 0) == cancelled


@pytest.mark.parametrize("swapped", [True, False])
def test_dates_that_a_spreadsheet_has_swapped_are_refused(
    run: Run, raw: Path, swapped: bool
) -> None:
    """Of the days of March in the form of Europe, a program for America reads the first twelve."""
    rows: list[list[object]] = [["Customer ID", "StockCode", "InvoiceDate"]]
    for n in range(60):
        day = 1 + n % 28
        month, of_cell = (day, 3) if swapped else (3, day)
        is_cell = day <= 12 if swapped else n % 2 == 1
        serial = date(2024, month, of_cell).toordinal() - 693_594 + 0.5 if is_cell else 0
        rows.append([n % 9, f"P{n * 7 % 11}", serial or f"{day:02}/03/2024"])
    file = write_xlsx(raw / "orders.xlsx", {"a": rows})
    if swapped:
        with pytest.raises(
            ValueError, match="'InvoiceDate', texts such as '13/03/2024' have a day"
        ):
            run(file)
    else:
        last = run(file).interactions.timestamp.max()
        assert time.gmtime(int(last))[:3] == (2024, 3, 28)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut off", b"a,b\n1,2\n"])
def test_a_damaged_spreadsheet_is_refused_with_words(run: Run, raw: Path, content: bytes) -> None:
    (raw / "orders.xlsx").write_bytes(content)
    with pytest.raises(ValueError, match=r"orders.xlsx: .*(spreadsheet|empty)"):
        run(raw / "orders.xlsx")


@pytest.mark.parametrize("column", ["Customer ID", "StockCode", "Order ID"])
@pytest.mark.parametrize("digits", [15, 16, 18])
def test_long_numbers_of_a_spreadsheet_are_no_ids(
    run: Run, raw: Path, column: str, digits: int
) -> None:
    header: list[object] = ["Customer ID", "StockCode", "InvoiceDate", "Order ID"]
    number = {name: 10 ** (digits - 1) if name == column else 0 for name in header}

    def rows(kind: type) -> list[list[object]]:
        ids = [(n // 2 % 9, n % 7, None, n // 2) for n in range(120)]
        return [
            [kind(number[header[k]] + one) if one is not None else 45_000.5 + n // 2
             for k, one in enumerate(row)] for n, row in enumerate(ids)
        ]  # fmt: skip

    if digits == 15:
        run(write_xlsx(raw / "orders.xlsx", {"a": [header, *rows(int)]}))
    else:
        with pytest.raises(ValueError, match=f"{column}.* last digits of ids are lost"):
            run(write_xlsx(raw / "orders.xlsx", {"a": [header, *rows(int)]}))
    if digits < 18:
        return
    run(write_xlsx(raw / "texts.xlsx", {"a": [header, *rows(str)]}))
    assert run.info["accounts"][0]["events"] == 120
