"""Lines of orders whose order, or whose return, says what the lines themselves leave out."""

from __future__ import annotations

import random
from datetime import datetime, timedelta

import pyarrow as pa
import pytest
from reader_suite import table

from recsys.data import growth
from recsys.data.cleaning import Rules
from recsys.data.grouped_rows import columns_of_orders
from recsys.data.service_lines import ServiceLines
from recsys.errors import DataError


def moment(n: int) -> str:
    return f"{datetime(2025, 1, 1) + timedelta(hours=3 * n):%Y-%m-%d %H:%M:%S}"


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


@pytest.mark.parametrize(
    ("names", "number", "shares"),
    [("Order ID,Email,Paid at,Financial Status,Lineitem sku,Lineitem quantity", "{}", (0.2, 0.67)),
     ("Bestellnummer,Kunden-E-Mail,Bestellt am,Status,Artikelnummer,Menge", "B-{}", (0.03, 0.5)),
     ("Name,Email,Created at,Financial Status,Lineitem sku,Lineitem quantity", "#{}", (0.03, 0.25)),
     ("Numéro de commande,Client,Date,Statut,SKU,Quantité", "{}", (0.25, 0.67))],
)  # fmt: skip
@pytest.mark.parametrize("large", [False, True])
def test_further_lines_of_an_order_have_its_time_and_user(shop, names, number, shares, large):
    share = shares[large]
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


def test_lines_of_a_till_have_the_state_of_their_receipt_and_their_own_price(shop):
    """With a line for the receipt, and types of lines."""
    rows, prices = [], [f"{n}.50" for n in range(1, 12)]
    for order in range(160):
        state = "VOIDED" if order % 9 == 0 else "CLOSED"
        rows.append((moment(order), order, "Sale", "paper", f"c{order % 20}", state, "", ""))
        for line in range(2):
            item = (order * 3 + line) % 11
            price = "" if line else prices[item]
            rows.append((moment(order), order, "Sale Line", "", "", "", f"p{item}", price))
    text = table("Date,Receipt Number,Line Type,Note,Customer Code,Status,Sku,Price", rows)
    found = shop(text, clean={"most_removed": 1})
    assert found.counts["rows_of_cancelled_orders_dropped"] == 36
    assert len(found.histories) == 20
    wanted = dict(zip((f"p{n}" for n in range(11)), map(float, prices), strict=True))
    made = dict(zip(found.data.item_ids.tolist(), found.values("price"), strict=True))
    assert made == wanted


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


@pytest.mark.parametrize(
    ("item", "title", "price", "share"),
    [("UPS", "UPS Ground", 5.9, 0.25), ("CE7", "Correos Express", 6, 0.5),
     ("K1", "Kaution", 8, 0.25), ("9001", "Click & Collect", "0.00", 0.15),
     ("A4", "Abholung im Laden", 0, 0.5), ("FL", "Flyer", "0,00 €", 0.15),
     ("OI", "Open item", None, 0.15), ("W", "Warengruppe 19%", None, 0.5)],
)  # fmt: skip
def test_lines_that_no_order_has_alone_or_twice_are_asked_about(shop, item, title, price, share):
    text = baskets(item, title, f'"{price}"' if "," in str(price) else price, share)
    with pytest.raises(DataError, match="no order has one of them alone or twice") as asked:
        shop(text)
    assert f"{item!r} ({title}, " in str(asked.value)
    if item not in ("UPS", "FL"):
        return
    found = shop(text, clean={"drop_items": (item,)})
    assert item not in found.data.item_ids
    assert found.counts["rows_of_no_products_dropped"] == text.count(f",{item},")
    assert item in shop(text, clean={"drop_items": (f"!{item}",)}).data.item_ids


def test_all_such_lines_are_asked_about_at_once(shop):
    draw = random.Random(1)
    carriers = ["UPS Ground", "Evri Standard", "Hermes"]
    text = baskets("UPS", "UPS Ground", 5.9, 0.9)
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


def test_what_is_added_to_orders_is_a_product(shop):
    found = shop(baskets("BAG", "Gift bag", 2, 0.4, end=False))
    assert "BAG" in found.data.item_ids
    head, *lines = baskets("BAG", "Gift bag", "0.00", 0.4).splitlines()
    brands = ["AB"[line.split(",")[3][-1] in "13579"] for line in lines]
    text = "\n".join([f"{head},brand", *map(",".join, zip(lines, brands, strict=True))])
    assert "BAG" in shop(text).data.item_ids


# What repeats by nature


@pytest.mark.parametrize(
    ("name", "kinds"),
    [("origin", ("web", "autoship")), ("purchase_kind", ("first", "repeat")),
     ("Jahrgang", ("2024", "2025")), ("Art", ("Neukauf", "Folgekauf"))],
)  # fmt: skip
def test_where_most_is_bought_again_no_kind_marks_returns(shop, name, kinds):
    rows = [
        (f"c{n % 40}", f"p{n % 40 * 3 % 30 + n // 40}", moment(n + 900 * again), kinds[again])
        for again in (0, 1)
        for n in range(160)
    ]
    found = shop(table(f"customer,sku,bought_at,{name}", rows))
    assert found.data.interactions.item.size == 320
    marked = [
        (*row[:3], kinds[0] if n < 160 else "back" if n % 10 == 0 else "")
        for n, row in enumerate(rows)
    ]
    few = [row for row in marked if row[3]]
    with pytest.raises(DataError, match=r"marks rows that repeat a purchase .*'back'"):
        shop(table(f"customer,sku,bought_at,{name}", few))


HISTORIES = {f"u{n}": [f"p{(n * 7 + 3 * j) % 19}" for j in range(6)] for n in range(30)}
ROWS = [
    (u, p, moment(n)) for n, (u, p) in enumerate((u, p) for u in HISTORIES for p in HISTORIES[u])
]
PAGES = {
    "+----+----+----+\n| user | item | date                |\n+----+----+----+\n": (
        "| {:4} | {:4} | {} |", "rows are damaged"),
    "user      item    bought_at\n": ("{:9} {:7} {}", "no column is recognised"),
}  # fmt: skip


@pytest.mark.parametrize("head", PAGES)
def test_columns_divided_as_on_a_page_are_refused(shop, head):
    form, why = PAGES[head]
    lines = "".join(f"{form.format(*row)}\n" for row in ROWS)
    with pytest.raises(DataError, match=why):
        shop(head + lines + "+----+----+----+\n" * ("+" in head))


def test_a_person_is_advised_as_the_user_before_an_order(shop):
    rows = [
        (f"Ann {n % 20}", f"INV-{n}", f"2025-01-{1 + n % 28:02}", f"p{n * 7 % 11}", 1)
        for n in range(180)
    ]
    head = "ContactName,InvoiceNumber,InvoiceDate,InventoryItemCode,Quantity"
    with pytest.raises(DataError, match="--column user=ContactName"):
        shop(table(head, rows))


@pytest.mark.parametrize(
    ("name", "values"),
    [("visibility", ("Catalog, Search", "Not Visible Individually")),
     ("Visibility", ("Search", "Not Visible Individually")),
     ("discontinued_on", ("", "2025-01-01"))],
)  # fmt: skip
def test_items_that_the_shop_no_longer_shows_are_not_available(shop, name, values):
    items = table(f"sku;name;{name}", [(f"p{n}", f"T {n}", values[n == 3]) for n in range(19)], ";")
    found = shop(table("user,sku,date", ROWS), items)
    if name.startswith("disc"):
        assert found.counts["items_outside_dates"] == 1
    else:
        assert found.values("available") == [n != 3 for n in range(19)]


def test_columns_and_types_of_a_night_may_be_in_other_capitals(shop, raw):
    rows = [(*row, "view" if n % 3 else "purchase") for n, row in enumerate(ROWS)]
    found = shop(table("user,sku,date,event_type", rows))
    night = [(u.replace("u", "v"), p, at, kind.upper()) for u, p, at, kind in rows]
    (raw / "new.csv").write_text(table("User,SKU,Date,EVENT_TYPE", night))
    new = found.night(raw / "new.csv")
    assert new.num_rows == len(rows)
    growth.write(raw, new, found.data.items.slice(0, 0), growth.Erased.of(found.data, []))
    grown = growth.grow(found.data, raw, Rules(dates=(1_736_000_000, 1_736_500_000)))
    assert [b.name for b in grown.dataset.behaviours] == [b.name for b in found.data.behaviours]


def test_a_time_that_further_lines_lack_does_not_divide_an_order():
    rows = pa.table({
        "Email": ["a@x.de"] * 3 + ["b@x.de"] * 3,
        "Paid at": ["2025-01-01 10:00", "", "", "2025-01-02 11:00", "", ""],
        "Created at": ["2025-01-01 10:00"] * 3 + ["2025-01-02 11:00"] * 3,
        "Financial Status": ["refunded", "", "", "paid", "", ""],
        "Lineitem sku": ["1", "2", "3", "4", "5", "6"],
    })  # fmt: skip
    of_orders = columns_of_orders(rows)
    assert of_orders.first_lines(rows).tolist() == [True, False, False] * 2
    assert "Financial Status" in of_orders.names


def test_the_words_of_a_line_are_read_once_however_many_parts_it_stands_in(monkeypatch):
    read = []
    monkeypatch.setattr("recsys.data.service_lines.says", lambda text: read.append(text))
    service = ServiceLines()
    for _ in range(3):
        service.find(pa.table({"item": ["p1", "p2"], "title": ["a cup", "a pot"]}))
    assert len(read) == 8, "id and title of two lines, for both questions"


STATES_OF_LINES = [("refunded", "Status"), ("cancelled", "Status"), ("2025-03-01", "Refunded at"),
                   ("1", "Quantity refunded"), ("storniert", "Bestellstatus")]  # fmt: skip


@pytest.mark.parametrize(("last", "name"), STATES_OF_LINES)
@pytest.mark.parametrize("form", ["files", "rows", "newest first"])
def test_the_last_state_of_a_line_decides(shop, raw, last, name, form):
    first = {"Refunded at": "", "Quantity refunded": "0"}.get(name, "paid")
    names = f"Order ID,Customer,Created at,SKU,Quantity,{name}"
    sold = [(n, f"c{n % 15}", moment(n), f"p{n % 11}", 1) for n in range(60)]
    now = [(*line, first if line[0] % 4 else last) for line in sold]
    before = [(*line, first) for line in sold]
    if form == "files":
        (raw / "months").mkdir()
        (raw / "months/part-9.csv").write_text(table(names, before), encoding="utf-8")
        found = shop(table(names, now), file="months/part-10.csv")
    else:
        rows = [row for pair in zip(before, now, strict=True) for row in dict.fromkeys(pair)]
        found = shop(table(names, rows[::-1] if form == "newest first" else rows))
    assert sum(map(len, found.histories.values())) == 45
    assert "partial_returns_dropped" not in found.counts


@pytest.mark.parametrize(
    ("time", "hours", "last", "told"),
    [("time", 5, "shipped", True), ("time", 0, "shipped", False), ("time", 5, "paid", False),
     ("updated_at", 5, "shipped", True), ("updated_at", 5, "refunded", False)],
)  # fmt: skip
def test_states_of_lines_with_times_of_their_own_are_told(shop, time, hours, last, told):
    states = lambda n: enumerate(("paid", last if n % 5 == 0 or last == "paid" else "shipped"))  # noqa: E731
    rows = ((f"o{n // 3}", f"u{n // 9}", f"p{n % 7}", state, moment(3 * n + hours * later))
            for n in range(150) for later, state in states(n))  # fmt: skip
    notes = shop(table(f"order_id,customer_id,sku,status,{time}", rows)).notes
    assert ("lines of orders in the first" in notes) is told


@pytest.mark.parametrize("alone", [0, 6])
def test_equal_lines_of_an_order_in_two_states_are_pieces(shop, alone):
    """Of two pieces of an order, one is refunded; of some orders, the only one."""
    rows = [(n, f"c{n % 15}", moment(n), f"p{n % 11}", "paid") for n in range(60)]
    rows += [(*row[:-1], "refunded" if row[0] < 10 else "paid") for row in rows[:20]]
    rows += [(100 + n, f"c{n}", moment(100 + n), "p12", "refunded") for n in range(alone)]
    found = shop(table("Order ID,Customer,Created at,SKU,Status", sorted(rows)))
    assert sum(map(len, found.histories.values())) == 60
    assert "rows_of_earlier_states_dropped" not in found.counts


def test_milliseconds_in_a_column_of_their_own_order_events(shop):
    rows = [
        (f"u{n // 6}", f"p{n % 6}", "2025-01-05 10:00:00", 900 - 100 * (n % 6)) for n in range(120)
    ]
    for name in ("ms", "millis", "Millisekunden"):
        found = shop(table(f"user,item,timestamp,{name}", rows))
        assert found.histories["u3"] == ["p5", "p4", "p3", "p2", "p1", "p0"]
