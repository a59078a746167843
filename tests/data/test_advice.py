"""Exports in forms that programs for orders, halls and books write: read, or refused with a way."""

from __future__ import annotations

import json
import re
import shlex
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pytest
from reader_suite import table

from recsys.data.dialect import lines_above
from recsys.data.grouped_rows import print_returns
from recsys.data.sources import find_tables
from recsys.errors import DataError

T = 1_767_225_600  # 2026-01-01
ROWS = range(180)


def day(n):
    return 1 + n % 28


ORDERS = table("customer,sku,date", [(f"c{n % 20}", f"p{n * 7 % 11}", T + 5000 * n) for n in ROWS])


# Lines above the names of the columns


@pytest.mark.parametrize(
    "above",
    ["Orders of May", "Orders of May\n", "Orders of May\nExported 2026-05-05", "sep=,",
     "Orders of May,,\n,,", "Report,Orders\nPeriod,2026", '"Orders, of May"', "# by Ann\n\n# 2026"],
)  # fmt: skip
def test_lines_above_the_names_of_the_columns_are_named_and_not_read(shop, above):
    for mark in (";", "\t"):
        other = above.replace(",", mark)
        text = f"{other}\n{ORDERS.replace(',', mark)}"
        assert lines_above(text) == tuple(other.split("\n"))
    found = shop(f"{above}\n{ORDERS}")
    assert found.roles == {"item": "sku", "timestamp": "date", "user": "customer"}
    assert found.info["cleaning"]["accounts"][0]["events"] == 180
    assert "lines above the names of the columns are not read" in found.notes


def test_names_of_groups_of_columns_stand_above_their_names(shop):
    rows = [(f"N{n % 20}", f"c{n % 20}@x.de", f"p{n * 7 % 11}", T + 5000 * n) for n in ROWS]
    found = shop("Customer,,Order,\n" + table("Name,E-mail,SKU,Date", rows))
    assert found.roles == {"item": "SKU", "timestamp": "Date", "user": "E-mail"}


def test_a_name_of_two_lines_is_one_name(shop):
    assert shop(ORDERS.replace("customer", '"customer\nid"')).roles["user"] == "customer\nid"


@pytest.mark.parametrize(
    "text",
    [ORDERS, "\n\n" + ORDERS, "customer,,\ncustomer,sku,x\n", "alpha\nuser;item\n",
     "1,2,3\nsale,item,user\n"],
)  # fmt: skip
def test_a_first_line_with_names_is_no_title(text):
    is_title = text.startswith(("customer,,", "alpha"))
    assert lines_above(text) == (tuple(text.splitlines()[:1]) if is_title else ())


@pytest.mark.parametrize("mark", ["\x01", "^", "~"])
def test_marks_of_other_programs_divide_columns(shop, mark):
    assert shop(ORDERS.replace(",", mark)).data.item_ids.size == 11


def test_values_in_single_quotes_are_without_them(shop):
    text = re.sub(r"[^,\n]+", r"'\g<0>'", ORDERS).replace("'p0'", "'p,0'")
    found = shop(text)
    assert found.roles == {"item": "sku", "timestamp": "date", "user": "customer"}
    assert {"p,0", "p1"} < {*found.data.item_ids.tolist()}
    assert "c0" in found.histories


# Lists of items that are no records


def test_a_list_of_ids_is_a_row_for_each(shop):
    rows = [{"order": n, "customer": f"c{n % 20}", "date": T + 5000 * n,
             "items": [f"p{n * 7 % 11}", f"p{n * 3 % 11}"]} for n in range(1, 181)]  # fmt: skip
    lists = shop("".join(json.dumps(row) + "\n" for row in rows), file="events.jsonl")
    assert lists.roles["item"] == "items"
    assert lists.info["cleaning"]["accounts"][0]["events"] == 360
    columns = shop(pa.Table.from_pylist(rows), file="events.parquet")
    assert columns.histories == lists.histories
    beside = shop(pa.Table.from_pylist([row | {"sku": row["items"][0]} for row in rows]),
                  file="events.parquet")  # fmt: skip
    assert beside.roles["item"] == "sku"
    assert beside.info["cleaning"]["accounts"][0]["events"] == 180


@pytest.mark.parametrize("more", [{}, {"qty": 2}, {"qty": 2, "price": 1.5}])
def test_lists_of_lines_with_quantities_are_read(shop, more):
    rows = [{"order": n, "customer": f"c{n % 20}", "date": T + 5000 * n,
             "lines": [{"sku": f"p{n * k % 11}", **more} for k in (3, 7)][: n % 3]}
            for n in range(1, 181)]  # fmt: skip
    found = shop(pa.Table.from_pylist(rows), file="events.parquet")
    assert found.info["cleaning"]["accounts"][0]["events"] == 180
    assert ("quantity" in found.roles) == ("qty" in more)


@pytest.mark.parametrize("name", ["refunds", "returned_items", "order.returns"])
def test_lists_of_what_was_taken_back_are_asked_about(shop, follow, name):
    record, _, field = name.rpartition(".")
    rows = []
    for n in range(1, 181):
        lines = [{"sku": f"p{n * 7 % 11}", "qty": 1}]
        back = {field: lines[: n % 9 == 0]}
        rows.append({"customer": f"c{n % 20}", "date": T + 5000 * n, "lines": lines,
                     **({record: back} if record else back)})  # fmt: skip
    text = "".join(json.dumps(row) + "\n" for row in rows)
    with pytest.raises(
        DataError, match=f"column '{name}' lists what was taken back in 20 of"
    ) as no:
        shop(text, file="events.jsonl")
    found = shop(text, file="events.jsonl", columns={"taken_back": "none"})
    assert f"{name} (lists)" in found.notes
    found = shop(Path(follow(str(no.value))).read_bytes(), file="lines.jsonl")
    assert found.counts["negative_events_dropped"] == 20


@pytest.mark.parametrize(
    ("back", "whole", "part"),
    [({"lines": [{"line_item_id": 7, "quantity": 2, "line_item": {"sku": "p1"}}]}, 1, 0),
     ({"lines": [{"line_item_id": 7, "quantity": 1}]}, 0, 1),
     ({"line_items": [{"id": 99, "sku": "p1", "quantity": -2}]}, 1, 0),
     ({"total": "-44.50"}, 2, 0), ({"total": "-4.50"}, 0, 0), ({"transactions": [{}]}, 0, 0)],
)  # fmt: skip
def test_the_command_for_refunds_writes_pieces(shop, follow, capsys, back, whole, part):
    rows = []
    for n in range(1, 181):
        items = (f"r{n}", f"s{n}") if n % 9 == 0 else (f"p{n * 7 % 11}", f"q{n * 7 % 11}")
        text = json.dumps([back] * (n % 9 == 0)).replace("p1", items[0])
        rows.append({"id": n, "name": f"#{n}", "customer": f"c{n % 20}", "date": T + 5000 * n,
                     "items": [{"id": 7 + k, "sku": items[k], "quantity": 2} for k in range(2)],
                     "total": "44.50", "refunds": json.loads(text)})  # fmt: skip
    with pytest.raises(DataError, match="column 'refunds' lists") as no:
        shop("".join(json.dumps(row) + "\n" for row in rows), file="events.jsonl")
    found = shop(Path(follow(str(no.value))).read_bytes(), file="lines.jsonl")
    assert found.counts.get("negative_events_dropped", 0) == 20 * whole
    assert found.counts.get("pieces_taken_back", 0) == 20 * part
    assert ("20 refunds do not name" in capsys.readouterr().err) == (whole + part == 0)


PARTS = {
    "order,returned": ("No", "Yes"), "order,zurueckgegeben": ("nein", "ja"), "order,qty": (1, 2),
    "order,item_state": ("not returned", "returned"), "order,sku,accepted": (0, 1),
    "order,amount": ("9.90", "19.80"), "order,refunded_at": ("", "2026-02-01"),
    "order,sku": ("p1", "N/A"), "order,sku,status": ("refunded", "return rejected"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("head", "name"),
    [(head, ("returns", "Stornos")[n % 2])
     for n, head in enumerate([*PARTS, "order,sku,reason", "order,status"])],
)  # fmt: skip
def test_what_was_not_taken_back_as_a_whole_has_no_command(shop, raw, name, head):
    values = PARTS.get(head, ("refunded", "refunded"))
    rows = [(n, *["p1"] * (head.count(",") - 1), values[n % 2]) for n in range(20)]
    (raw / "shop").mkdir()
    (raw / f"shop/{name}.csv").write_text(table(head, rows))
    orders = "".join(f"{n},{row}\n" for n, row in enumerate(ORDERS.splitlines()[1:]))
    with pytest.raises(DataError) as no:
        shop(f"order,customer,sku,date\n{orders}", file="shop/orders.csv")
    by = f"taken back, by {head.rpartition(',')[2]!r}" in str(no.value)
    assert by == (head in PARTS) != (" && recsys run " in str(no.value))


@pytest.mark.parametrize("name", ["deleted_users", "cancellation_reasons"])
@pytest.mark.parametrize("with_items", [False, True])
def test_a_file_of_no_orders_takes_nothing_back(shop, raw, name, with_items):
    (raw / "shop").mkdir()
    (raw / "shop" / f"{name}.csv").write_text("customer,reason\nc1,gdpr\n")
    if with_items:
        (raw / "shop/products.csv").write_text("sku,name\np1,T\n")
        (raw / "shop/events.csv").write_text(ORDERS)
        assert find_tables(str(raw / "shop")).events.name == "events.csv"
    else:
        with pytest.raises(DataError, match=r"or read one file: recsys run .*events\.csv"):
            shop(ORDERS, file="shop/events.csv")


# Orders of which only the first line has the number, the customer and the date


@pytest.mark.parametrize(
    "head",
    ["Order Reference,Customer,Order Date,Order Lines/Product,Order Lines/Quantity",
     "Rechnungsnr.,Kunde,Datum,Artikel,Menge", "Note,Customer,Date,SKU,Qty"],
)  # fmt: skip
@pytest.mark.parametrize("nothing", ["", "  "])
def test_lines_below_the_first_of_an_order_are_of_it(shop, head, nothing):
    rows, whole = [], []
    for n in range(60):
        of_order = [f"S{n:05}", "" if n % 10 == 3 and "Note" not in head else f"c{n % 13}",
                    f"2026-01-{day(n):02} 10:{n % 60:02}:00"]  # fmt: skip
        for line in range(3):
            own = [f"p{(n * 3 + line) * 7 % 11}", 1]
            rows.append([*(of_order if line == 0 else [nothing] * 3), *own])
            whole.append([*of_order, *own])
    found, plain = shop(table(head, rows)), shop(table(head, whole))
    assert found.histories == plain.histories
    assert found.counts == plain.counts | {"further_lines_of_orders": 120}


def test_an_order_number_in_each_row_shows_that_rows_are_not_grouped(shop):
    rows = [(o, f"c{o % 13}" if o % 4 else "", T + o * 9000 if o % 4 else "", f"p{n * 7 % 11}")
            for n in range(2, 180) for o in [n // 2]]  # fmt: skip
    found = shop(table("order_id,customer,date,sku", rows), clean={"most_removed": 1})
    assert found.counts["rows_with_unreadable_times_dropped"] == 44


@pytest.mark.parametrize(
    ("head", "order"),
    [("Auftrag;Kunde;Material;Menge;Datum", "Auftrag"),
     ("Verkaufsbeleg;Auftraggeber;Materialnummer;Auftragsmenge;Angelegt am", "Verkaufsbeleg"),
     ("Sales Document;Sold-to Party;Material;Order Quantity;Created On", "Sales Document")],
)  # fmt: skip
@pytest.mark.parametrize("position", [None, "Item", "Position"])
def test_orders_of_an_erp_system_are_read(roles, head, order, position):
    names = head.split(";")
    rows = [
        (4_500_000_000 + n // 3, 100_000 + n // 3 % 25, 10_000_000 + n * 7 % 31, 1 + n % 3,
         f"{day(n // 3):02d}.01.2026", *([10 * (n % 3 + 1)] if position else []))
        for n in ROWS
    ]  # fmt: skip
    found = roles(table(";".join([*names, *([position] if position else [])]), rows, ";"))
    wanted = ("session", "user", "item", "quantity", "timestamp")
    assert found == dict(zip(wanted, [order, *names[1:]], strict=True))


def test_a_material_that_products_are_made_of_is_no_item(shop):
    rows = [
        (f"c{n % 20}", f"Tea pot {'ABCDEFG'[n % 7]}", ["cotton", "steel"][n % 2], T + 5000 * n)
        for n in ROWS
    ]
    assert shop(table("customer,product name,material,date", rows)).roles["item"] == "product name"


@pytest.mark.parametrize("event", ["Event Name", "Event", "Event Title", "Veranstaltung"])
def test_the_advice_for_attendees_names_the_event_and_works(shop, event):
    person = "Vorname,Nachname" if event in ("Event", "Veranstaltung") else "First Name,Last Name"
    names = ["Ann", "Bob", "Cid", "Dora", "Eva"]
    rows = [
        (900_000 + n, f"2026-01-{day(n):02d} 10:{n % 60:02d}", names[n % 5], names[n % 4],
         f"a{n % 20}@x.org", 1, ["General", "VIP"][n % 2], f"Concert {n * 7 % 13}") for n in ROWS
    ]  # fmt: skip
    text = table(f"Order #,Order Date,{person},Email,Quantity,Ticket Type,{event}", rows)
    with pytest.raises(DataError) as refused:
        shop(text)
    option = str(refused.value).partition("Say it with --column ")[2].partition(" (data.")[0]
    role, name = shlex.split(option)[0].split("=")
    assert (role, name) == ("item", event)
    found = shop(text, columns={role: name})
    assert found.data.item_ids.size == 13
    assert found.roles["user"] == "Email"


# One order on each line


@pytest.fixture
def read_as_advised(shop, follow):
    """What the command reads with which a file is refused."""

    def read(text, why, file="wide.csv"):
        with pytest.raises(DataError, match=why) as refused:
            shop(text, file=file)
        copy, *options = shlex.split(follow(str(refused.value)))
        columns = dict(option.split("=") for option in options[1::2])
        return shop(Path(copy).read_text("utf-8"), columns=columns)

    return read


WIDE = {  # the values of an item, and the most items of an order
    "Order ID,Customer,Date,Item 1,Item 2,Item 3": (1, 3),
    "Order ID,Customer,Date,Product1,Product2": (1, 2),
    "Order ID,Customer,Date,Item 1,Qty 1,Item 2,Qty 2,Item 3,Qty 3": (2, 3),
    "Order ID,Customer,Date,Item 1 SKU,Item 1 Name,Item 2 SKU,Item 2 Name": (2, 2),
}


@pytest.mark.parametrize("head", WIDE)
@pytest.mark.parametrize("status", [False, True])
def test_orders_with_an_item_in_each_of_several_columns_have_a_command(
    read_as_advised, head, status
):
    rows, items, (size, most) = [], 0, WIDE[head]
    for n in ROWS:
        cells = [[f"p{(n * 7 + 3 * j) % 19}", 2][:size] for j in range(most)]
        cells = [cell if j <= n % 4 else [""] * size for j, cell in enumerate(cells)]
        order = [1000 + n, f"c{n % 20}", f"2026-01-{day(n):02d} 10:00", *chain.from_iterable(cells)]
        rows.append([*order, *([["paid", "cancelled"][n % 9 == 0]] if status else [])])
        items += min(most, n % 4 + 1)
    text = table(head + ",Status" * status, rows)
    found = read_as_advised(text, "hold the items of an order")
    assert found.info["cleaning"]["accounts"][0]["events"] == items
    assert found.roles["session"] == "Order ID"
    assert ("quantity" in found.roles) == ("Qty" in head)
    assert ("rows_of_cancelled_orders_dropped" in found.counts) == status


@pytest.mark.parametrize(
    ("head", "signs", "form"),
    [("", ("0", "1"), "{}"), ("Transaction,", ("0", "1"), "Product {}"),
     ("customer,date,", ("False", "True"), "{}"), ("", ("False", "True"), "Product {}"),
     ("Transaction,", ("", "2"), "{}"), ("customer,date,", ("", "2"), "Product {}"),
     ("", ("no", "yes"), "{}"), ("Transaction,", ("no", "yes"), "Product {}"),
     ("customer,date,", ("", "t"), "{}"), ("", ("", "t"), "Product {}")],
)  # fmt: skip
def test_a_table_with_a_column_for_each_item_is_refused(shop, head, signs, form):
    names = ["milk", "tea", "bread", "jam", "book", "rice", "ink"]  # the last is in no basket
    names = names if form == "{}" else [form.format(n) for n in range(7)]
    before = {"": [], "Transaction,": [1], "customer,date,": ["c", f"2026-01-{day(3)} 10:00"]}[head]
    rows = [[f"{before[0]}{n % 90}", *before[1:]] if before else [] for n in ROWS]
    rows = [[*row, *(signs[(n * 7 + k * 3) % 5 < 2] for k in range(6)), signs[0]]
            for n, row in enumerate(rows)]  # fmt: skip
    with pytest.raises(DataError, match=r"no column is recognised as the item|name|book"):
        shop(table(head + ",".join(names), rows))


def test_items_without_anything_else_are_refused(shop):
    rows = [[f'"{",".join(f"p{(n + k) % 11}" for k in range(1 + n % 3))}"'] for n in ROWS]
    with pytest.raises(DataError, match="no column is recognised as the user"):
        shop(table("items", rows))


@pytest.mark.parametrize("mark", ["|", " | "])
@pytest.mark.parametrize("more", ["", ", Product Variation Details: , Product Unit Price: 2.50"])
def test_items_as_texts_in_a_cell_are_refused(shop, mark, more):
    line = "Product ID: {0}, Product Qty: 2, Product SKU: A{0}, Product Name: Tea {0}, loose" + more
    cells = [f'"{line.format(n * 3 % 11)}{mark}{line.format(n * 7 % 11)}"' for n in ROWS]
    rows = [(n, n % 20, f"2026-01-{day(n):02d}", cells[n]) for n in ROWS]
    with pytest.raises(DataError, match="no column is recognised as the item"):
        shop(table("Order ID,Customer ID,Order Date,Product Details", rows))


def test_xml_has_a_command_and_pages_are_refused(shop, read_as_advised):
    row = "<row><user>u{}</user><item>0{}</item><time>{}</time></row>"
    rows = (row.format(n % 20, n * 7 % 11, T + 5000 * n) for n in ROWS)
    text = "<?xml version='1.0'?>\n<orders>" + "\n".join(rows) + "</orders>"
    assert {"00", "010"} < {*read_as_advised(text, "this is XML", "o.xml").data.item_ids.tolist()}
    with pytest.raises(DataError, match="this is a page"):
        shop("<!DOCTYPE html><table><tr><td>1</td></tr></table>")


def test_two_numbered_columns_of_something_else_are_no_baskets(shop):
    rows = [(f"c{n % 20}", f"p{n * 7 % 11}", T + 5000 * n, "a", "b") for n in ROWS]
    assert shop(table("customer,sku,date,address 1,address 2", rows)).data.item_ids.size == 11


def lines(value, name="createdAt"):
    rows = ({"user": f"u{n % 20}", "item": f"p{n * 7 % 11}", name: value(n)} for n in ROWS)
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize(
    ("zone", "hours", "blank"),
    [("UTC+1", 1, "\u202f"), ("UTC-5", -5, " "), ("GMT+5:30", 5.5, "\u202f"), ("UTC+01:00", 1, " "),
     ("UTC", 0, " "), ("UTC", 0, "\u202f")],
)  # fmt: skip
def test_times_in_words_with_a_short_zone(shop, zone, hours, blank):
    text = lambda n: f"January {day(n)}, 2026 at 3:04:05{blank}PM {zone}"  # noqa: E731
    found = shop(lines(text), file="events.jsonl")
    assert found.data.events.timestamp.min() == T + 15 * 3600 + 4 * 60 + 5 - 3600 * hours
    assert found.counts["times_with_a_zone"] == 180


@pytest.mark.parametrize(
    ("form", "below"),
    [("{d}T{h}{m}{s}.{f:03d}Z", 1_000_000), ("/Date({ms})/", 1_000_000),
     ("{d:%d-%b-%y} {h}.{m}.{s}.{f:06d} AM", 1_000)],
)  # fmt: skip
def test_times_of_calendars_databases_and_frameworks_keep_their_precision(shop, form, below):
    def text(n):
        at = datetime.fromtimestamp(T + 36_000 + n // 4, UTC)
        parts = {"h": f"{at:%H}", "m": f"{at:%M}", "s": f"{at:%S}", "f": n % 4}
        date = at if "%" in form else f"{at:%Y%m%d}"
        return form.format(d=date, ms=int(at.timestamp()) * 1000 + n % 4, **parts)

    events = shop(lines(text), file="events.jsonl").data.events
    assert {*events.nanosecond.tolist()} == {n * below for n in range(4)}
    assert events.timestamp.min() == T + 36_000


CLOCKS = {
    "{h:02d}:{m:02d}": 60, "{h}{m:02d}": 60, "{h:02d}{m:02d}": 60, "{h:02d}{m:02d}17": 1,
    "{h}h{m:02d}": 60, "{h:02d}:{m:02d}:17": 1,
}  # fmt: skip


DATES = [("2026-01-{:02d}", "order date,order time"), ("{:02d}.01.2026", "Datum,Uhrzeit"),
         ("2026-01-{:02d} 00:00:00", "date,time")]  # fmt: skip


@pytest.mark.parametrize(
    ("form", "date", "head"),
    [*((form, *DATES[n % 3]) for n, form in enumerate(CLOCKS)),
     *(("{h:02d}:{m:02d}", *date) for date in DATES[1:])],
)  # fmt: skip
def test_a_time_of_day_beside_a_date_is_joined(shop, form, date, head):
    rows = [
        (f"u{n % 20}", f"p{n * 7 % 11}", date.format(day(n)), form.format(h=n % 24, m=n % 60))
        for n in ROWS
    ]
    found = shop(table(f"user,item,{head}", rows))
    n = 17 if CLOCKS[form] == 1 else 0
    wanted = {T + 86_400 * (day(k) - 1) + 3600 * (k % 24) + 60 * (k % 60) + n for k in ROWS}
    assert {*found.data.events.timestamp.tolist()} == wanted


def test_the_half_of_the_day_may_have_a_column_of_its_own(shop):
    rows = [(f"u{n % 20}", f"p{n * 7 % 11}", f"2026-01-{day(n):02d}", f"{n % 12 or 12}:05",
             ("AM", "p.m.")[n % 24 > 11]) for n in ROWS]  # fmt: skip
    found = shop(table("user,item,date,time,half", rows)).data.events.timestamp
    assert {*found.tolist()} == {T + 86_400 * (day(n) - 1) + 3600 * (n % 24) + 300 for n in ROWS}


@pytest.mark.parametrize("ean", ["4.00638E+12", "4,00638e+12"])
def test_ids_that_a_spreadsheet_shortened_are_refused(shop, ean):
    rows = [(f"c{n % 7}", ean if n % 3 else f"40063810000{n % 20:02}", T + 5000 * n) for n in ROWS]
    with pytest.raises(DataError, match="keeps 6 digits, so that last digits of ids are lost"):
        shop(table("customer;ean;date", rows, ";"))


@pytest.mark.parametrize("at", ["properties", None])
def test_events_of_one_item_and_of_whole_orders_are_beside_lists_of_items(shop, at):
    """Of the 60 orders of two items, the 5 that are refunded name none."""
    rows = []
    for n in range(60):
        items = [{"product_id": f"p{(2 * n + k) * 7 % 13}", "quantity": 1} for k in range(2)]
        order = {"order_id": f"O{n}"}
        for name, more in (
            ("Product Viewed", items[0]),
            ("Order Completed", order | {"products": items}),
            *[("Order Refunded", order | {"products": []})] * (n % 12 == 0),
        ):
            time = f"2026-01-{day(n):02}T{len(name)}:00:00Z"
            row = {"userId": f"u{n}", "event": name, "timestamp": time}
            rows.append(row | ({at: more} if at else more))
    found = shop("".join(json.dumps(row) + "\n" for row in rows), file="events.jsonl")
    assert found.counts["negative_events_dropped"] == 10
    assert len(found.data.interactions) == 60 - 5 + 120 - 10  # views of what was refunded go, too


def test_an_item_beside_lists_in_the_same_lines_is_asked_about(shop):
    lists = [{"product_id": f"r{k}"} for k in range(3)]
    rows = [{"user": f"u{n % 9}", "product_id": f"p{n * 7 % 11}", "products": lists,
             "time": f"2026-01-{day(n):02}"} for n in ROWS]  # fmt: skip
    text = "".join(json.dumps(row) + "\n" for row in rows)
    with pytest.raises(DataError, match="product_id"):
        shop(text, file="events.jsonl")
    found = shop(text, file="events.jsonl", columns={"item": "product_id"}).data
    assert set(found.item_ids) == {f"p{n}" for n in range(11)}


@pytest.mark.parametrize(
    ("names", "values"),
    [("hour,minute", lambda n: (n % 24, n % 60)), ("time,x", lambda n: (n / 181, 1)),
     ("start,end", lambda n: (f"{n % 24}:00", f"{n % 24}:30"))],
)  # fmt: skip
def test_a_time_of_day_that_is_not_read_is_named(shop, names, values):
    rows = [(f"u{n % 20}", f"p{n * 7 % 11}", f"2026-01-{day(n):02d}", *values(n)) for n in ROWS]
    found = shop(table(f"user,item,date,{names}", rows))
    first = names.partition(",")[0]
    assert re.search(f"Column '{first}' of events.csv seems to have the time of day", found.notes)


@pytest.mark.parametrize(
    ("name", "zones"),
    [
        ("utc_offset", ("-0500", "+0900")),
        ("Time Zone", ("Eastern Time (US & Canada)", "Asia/Tokyo")),
    ],
)
@pytest.mark.parametrize("clock", [" 14:{:02}", ",14:{:02}", " 14:{:02} +01:00"])
def test_zones_in_a_column_of_their_own_are_named(shop, name, zones, clock):
    rows = [(f"u{n % 20}", f"p{n * 7 % 11}", zones[n % 2],
             f"2026-01-{day(n):02}{clock.format(n % 60)}") for n in ROWS]  # fmt: skip
    head = f"customer,sku,{name},Date{',Time' if ',' in clock else ''}"
    said = f"Column {name!r} of events.csv has the zones of times ({zones[0]!r}, {zones[1]!r})"
    assert (said in shop(table(head, rows)).notes) == ("+01" not in clock)


def test_lines_between_cells_divide_them_whatever_is_in_them(shop):
    head, *rows = ORDERS.replace(",", "|").splitlines()
    found = shop("\n".join([f"{head}|title", "|p0|2026-01-01|Jam  pot", *(f"{r}|" for r in rows)]))
    assert found.info["cleaning"]["accounts"][0]["events"] == 181


def test_a_return_without_a_number_is_of_no_order(tmp_path, capsys):
    orders, returned = tmp_path / "orders.csv", tmp_path / "returns.csv"
    orders.write_text("order id,customer,sku\n1,a,p1\n,b,p2\n")
    returned.write_text("order id,sku\n1,p1\n,p9\n")
    print_returns(str(orders), str(returned))
    assert capsys.readouterr().out.splitlines()[-2:] == ["1,a,p1,yes", ",,p9,yes"]


@pytest.mark.parametrize("names", [("_seconds", "_nanoseconds"), ("seconds", "nanos")])
def test_seconds_and_nanoseconds_of_one_record_are_one_time(shop, names):
    value = lambda n: dict(zip(names, (T + n // 4, n % 4 * 250_000_000), strict=True))  # noqa: E731
    found = shop(lines(value), file="events.jsonl")
    events = found.data.events
    assert "events_at_the_same_time" not in found.counts
    assert {*events.nanosecond.tolist()} == {0, 250_000_000, 500_000_000, 750_000_000}
    assert events.timestamp.max() == T + 44
