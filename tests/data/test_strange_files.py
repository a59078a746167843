"""Files that an engineer who did not know the reader made, each kind with several inputs."""

from __future__ import annotations

import calendar
import gzip
import json
import shlex
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from reader_suite import table, write_xlsx
from typer.testing import CliRunner

from recsys import cli
from recsys.config import Settings
from recsys.data.time_formats import TimeRules, read_moments
from recsys.dataset import Dataset
from recsys.errors import DataError

T = 1_700_000_000


# Files of the night


@pytest.fixture
def night(shop, raw):
    """Read the file of a night after a first run whose dates have a form; its events."""

    def run(first: str, rows: Iterable[Iterable[object]], **form: Any) -> Any:
        dates = [first.format(d=1 + n % 28, m=1 + n // 28) for n in range(84)]
        old = [(f"u{n % 10}", f"p{n * 7 % 11}", date) for n, date in enumerate(dates)]
        made = shop(table("user,item,date", old))
        (raw / "new.csv").write_text(table("user,item,date", rows))
        return made.night(raw / "new.csv", **form)

    return run


DAY_FIRST, MONTH_FIRST = "{d:02}/{m:02}/2026 10:00", "{m:02}/{d:02}/2026 10:00"
DOTS = "{d:02}.{m:02}.2026 10:00"


def of_april(form: str, days: Iterable[int] = range(1, 29)) -> list[tuple[str, str, str]]:
    return [(f"u{n % 10}", f"p{n % 11}", form.format(d=n, m=4)) for n in days]


@pytest.mark.parametrize(
    ("first", "new", "setting"),
    [(DAY_FIRST, MONTH_FIRST, "false"), (DOTS, MONTH_FIRST, "false"),
     (MONTH_FIRST, DAY_FIRST, "true"), (MONTH_FIRST, DOTS, "true")],
)  # fmt: skip
def test_another_order_of_day_and_month_than_in_the_first_run_stops_the_night(
    night, first, new, setting
):
    with pytest.raises(DataError, match=f"first run.*--set data.day_first={setting}"):
        night(first, of_april(new))
    assert night(first, of_april(new), day_first=setting == "true").num_rows == 28


def test_both_orders_in_one_file_of_the_night_are_refused(night):
    rows = of_april(DAY_FIRST, range(14, 29)) + of_april(MONTH_FIRST, range(14, 29))
    with pytest.raises(DataError, match="have no one reading"):
        night(DAY_FIRST, rows)


@pytest.mark.parametrize(
    ("bad", "why"),
    [(("", "p1", "2026-04-01 10:00"), "no user or no item"),
     (("u1", "p1", "soon"), "no time"), (("u1", "p1", "2039-01-01"), "in the future")],
)  # fmt: skip
def test_a_night_that_loses_most_of_its_rows_stops(night, bad, why):
    good = [("u1", f"p{n % 11}", f"2026-04-{n + 1:02} 10:00") for n in range(20)]
    with pytest.raises(DataError, match=rf"12 of 32 events.*{why}.*data.clean.most_removed=1"):
        night(DOTS, good + [bad] * 12)
    assert night(DOTS, good + [bad] * 12, clean={"most_removed": 1}).num_rows == 20
    assert night(DOTS, good[:5] + [bad] * 4).num_rows == 5  # a share of so few says little


@pytest.mark.parametrize(
    "name",
    ["E-mail client", "Adresse e-mail", "Correo electrónico", "E-mail cliente", "Klantnaam (@)",
     "E-mailadres klant", "E-mail do cliente", "Indirizzo e-mail del cliente", "Kontakt", "Käufer"],
)  # fmt: skip
def test_addresses_of_mail_are_users_and_orders_are_none(roles, name):
    order = ["order_id", "Bestellnummer", "Pedido"][len(name) % 3]
    rows = [(f"B{n // 2}", f"c{n % 17}@shop.example", f"p{n * 7 % 11}",
             f"2026-01-{1 + n % 28:02} 10:00") for n in range(120)]  # fmt: skip
    found = roles(table(f"{order};{name};sku;date", rows, ";"))
    assert (found["user"], found["session"]) == (name, order)


@pytest.mark.parametrize(
    ("code", "title"),
    [("Código", "Produto"), ("Réf.", "Désignation"), ("Code", "Article"), ("Nr.", "Bezeichnung"),
     ("Codice", "Descrizione"), ("Ref", "Product name"), ("Kod", "Nazwa"), ("ID", "Item")],
)  # fmt: skip
def test_a_code_beside_a_title_is_the_item(shop, roles, code, title):
    names = ["Café", "Açúcar", "Pão", "Leite", "Queijo", "Arroz", "Feijão", "Azeite", "Sal", "Chá"]
    rows = [(f"c{n % 17}", f"{n * 7 % 10:03}", names[n * 7 % 10], f"2026-01-{1 + n % 28:02}")
            for n in range(120)]  # fmt: skip
    text = table(f"customer;{code};{title};date", rows, ";")
    found = roles(text)
    assert (found["item"], found["title"]) == (code, title)
    if code == "Código":
        assert "000" in shop(text).data.item_ids


def test_ids_of_a_spreadsheet_have_the_zeros_that_it_shows(shop, tmp_path):
    rows = [[f"u{n % 9}", b"%d" % (42 + n % 7), 45_000.5 + n] for n in range(90)]
    path = write_xlsx(tmp_path / "a.xlsx", {"a": [["Customer ID", "SKU", "Date"], *rows]})
    found = shop(path.read_bytes(), file="a.xlsx")
    assert sorted(found.data.item_ids) == [f"000{n}" for n in range(42, 49)]


# Times


@pytest.mark.parametrize(
    ("last", "is_open"),
    [(["{} 00:00:00"], True), (["{}T00:00"], True), (["{} 00:00:00.000"], True), (["{}"], True),
     (["{} 00:00:00", "2026-01-01 12:00:00"], False), (["{} 00:00:00Z"], False)],
)  # fmt: skip
def test_a_last_day_that_is_written_as_midnight_ends_with_the_day(shop, last, is_open):
    rows = [(f"p{n}", last[n % len(last)].format("2026-01-01")) for n in range(11)]
    found = shop(items=table("item,valid_until", rows))
    assert found.values("available_until")[0] == 1_767_225_600 + 86_400 * is_open


@pytest.mark.parametrize(
    ("zone", "moment", "before"),
    [("Europe/Berlin", "2026-03-29 02:{:02}:00", "2026-03-29 01:00:00"),
     ("America/New_York", "2026-03-08 02:{:02}:00", "2026-03-08 07:00:00")],
)  # fmt: skip
def test_times_in_an_hour_that_is_skipped_stay_apart(zone, moment, before):
    texts = pa.chunked_array([[moment.format(n) for n in range(60)]])
    seconds = read_moments(texts, TimeRules("auto", zone, None, 0)).second.to_pylist()
    start = calendar.timegm(time.strptime(before, "%Y-%m-%d %H:%M:%S"))
    assert seconds == [start + 60 * n for n in range(60)]


@pytest.mark.parametrize(
    ("moment", "told"),
    [("1.77232E+12", True), ("1.7723E+9", True),
     ("1.772320000E+9", False), ("1772320000", False)],
)  # fmt: skip
def test_times_that_a_spreadsheet_has_shortened_are_told_of(shop, moment, told):
    rows = [(f"u{n % 10}", f"p{n % 7}", moment) for n in range(40)]
    assert ("different times become one" in shop(table("user,item,ts", rows)).notes) == told


# Advice that works


def advised(text: str, start: str = "--set ") -> list[str]:
    """The settings that a message names, as a shell reads them."""
    return [shlex.split(part)[0].rstrip(".,;") for part in text.split(start)[1:]]


@pytest.mark.parametrize("bad", [1, 3, 10, 40])
def test_the_share_of_damaged_rows_that_is_advised_is_enough(shop, bad):
    rows = [(f"u{n % 10}", f"p{n % 7}", f"2026-01-{1 + n % 28:02}") for n in range(60)]
    text = table("user,item,date", [*rows, *[("u1", "p1", "2026-01-01", "x")] * bad])
    with pytest.raises(DataError, match="damaged") as refused:
        shop(text)
    share = float(advised(str(refused.value))[0].removeprefix("data.clean.damaged_rows="))
    assert shop(text, clean={"damaged_rows": share}).counts["damaged_rows_skipped"] == bad


@pytest.mark.parametrize("item", ["Delivery Doll", "T2", "Baker's delivery 1"])
def test_one_item_that_is_named_like_a_fee_can_be_kept_or_left_out(shop, item):
    title = "Delivery Doll" if item == "T2" else item
    rows = [(n // 3, f"c{n // 3 % 17}", item if n % 12 == 0 else f"P{n * 7 % 11}",
             title if n % 12 == 0 else "Tea", f"2026-01-{1 + n // 3 % 28:02}")
            for n in range(300)]  # fmt: skip
    rows += [(999, "c1", "S1", "Shipping", "2026-01-01")] * 2
    text = table("order_id,customer,sku,title,date", rows)
    with pytest.raises(DataError, match="may be no product") as refused:
        shop(text, clean={"drop_items": ["none of these"]})
    for setting, stays in zip(advised(str(refused.value)), (False, True), strict=True):
        clean = Settings.load(overrides=[setting]).values["data"]["clean"]
        found = shop(text, clean=clean)
        assert (item in found.data.item_ids) == stays
        assert "S1" not in found.data.item_ids
        assert clean["drop_items"][0] == "none of these"


@pytest.mark.parametrize(
    ("name", "before", "indent"),
    [("orders", {}, None), ("it's data", {"shop": "x", "count": 2, "next": None}, 1)],
)
def test_a_list_in_one_json_object_is_refused_with_a_command_that_works(
    shop, raw, follow, name, before, indent
):
    orders = [
        {"userId": f"u{n % 9}", "placedAt": f"2026-01-{1 + n % 28:02}T00:00:00Z",
         "items": [{"sku": f"P{(n + m) % 7}", "qty": 1} for m in range(2)]}
        for n in range(60)
    ]  # fmt: skip
    with pytest.raises(DataError, match="one JSON object around the list") as refused:
        shop(json.dumps({**before, name: orders}, indent=indent), file="w.json")
    follow(str(refused.value))
    found = shop((raw / "w-lines.jsonl").read_text(), file="w-lines.jsonl")
    assert found.data.interactions.item.size == 120


# Files without names of columns


def prepared(path: str, *options: str) -> Any:
    """The outcome of `recsys data prepare`."""
    command = ["data", "prepare", "--source", "table", "--path", path, "--name", "p", *options]
    return CliRunner().invoke(cli.app, command)


def last_dataset(home: Path) -> Dataset:
    return Dataset.load(home / "datasets/p")


@pytest.mark.parametrize(
    ("mark", "encoding", "packed"),
    [(",", "utf-8", False), (";", "cp1252", True), ("\t", "utf-16", False), ("|", "utf-8", True),
     (" ", "utf-8", False), (",", "utf-16", False)],
)  # fmt: skip
def test_the_advised_names_read_a_file_without_a_header(home, raw, mark, encoding, packed):
    rows = [mark.join(("2026", f"jürgen{n % 9}", f"P{n % 7}", str(T + 9000 * n), "9.50"))
            for n in range(60)]  # fmt: skip
    content = "\n".join([*rows, ""]).encode(encoding)
    name = "e.csv.gz" if packed else "e.csv"
    (raw / name).write_bytes(gzip.compress(content) if packed else content)
    refused = prepared(name)
    assert isinstance(refused.exception, DataError)
    advice = str(refused.exception).partition("columns with ")[2].partition(" (")[0]
    assert advice == "--set 'data.column_names=[column1, user, item, timestamp, column5]'"
    assert prepared(name, *shlex.split(advice)).exit_code == 0
    data = last_dataset(home)
    assert data.interactions.item.size == 60
    assert "jürgen0" in data.interactions.user_ids


def test_the_advised_names_read_a_folder_without_headers(home, raw):
    for part in range(3):
        rows = [(f"u{n % 9}", f"P{n % 7}", T + 9000 * n) for n in range(part, 60, 3)]
        head, *others = rows
        (raw / "parts").mkdir(exist_ok=True)
        text = table(";".join(map(str, head)), others, ";")
        (raw / f"parts/{part}.csv").write_text(text)
    advice = str(prepared("parts").exception).partition("columns with ")[2].partition(" (")[0]
    assert prepared("parts", *shlex.split(advice)).exit_code == 0
    assert last_dataset(home).interactions.item.size == 60


@pytest.mark.parametrize(
    ("mark", "encoding", "before", "packed", "sizes"),
    [(",", "utf-8", [], False, "1234"), (",", "utf-8", [], True, "3"),
     (";", "cp1252", ["T{}", "K{}"], True, "3"), (" ", "utf-8", [], False, "52345555"),
     ("\t", "utf-16", ["K{}"], False, "1234"), ("\t", "utf-16", ["K{}"], True, "3"),
     ("|", "utf-8", ["T{}"], False, "52345555")],
)  # fmt: skip
def test_the_command_for_baskets_reads_them(
    home, raw, follow, mark, encoding, before, packed, sizes
):
    goods = ["Käse", "Brot", '"Ei, groß"' if mark == "," else "Ei", "Öl", "Tee", "Salz"]
    rows = []
    for n in range(60):
        own = [form.format(n if form[0] == "T" else n % 7) for form in before]
        rows.append(
            mark.join([*own, *(goods[(n + k) % 6] for k in range(int(sizes[n % len(sizes)])))])
        )
    content = "\n".join([*rows, ""]).encode(encoding)
    name = "b.txt.gz" if packed else "b.txt"
    (raw / name).write_bytes(gzip.compress(content) if packed else content)
    refused = str(prepared(name).exception)
    path, *options = shlex.split(follow(refused))
    assert prepared(path, *options).exit_code == 0
    data = last_dataset(home)
    assert {*data.item_ids} == {good.strip('"') for good in goods}
    people = 7 if any("K" in form for form in before) else 60
    assert len(data.interactions.user_ids) == people


def test_a_file_of_the_night_without_a_header_is_refused_with_advice_that_works(shop, raw):
    rows = [(f"u{n % 10}", f"p{n * 7 % 11}", T + 9000 * n) for n in range(180)]
    made = shop(table("Kunde;Artikel;Datum", rows, ";"))

    def read(columns: dict[str, str], **form: Any) -> int:
        (raw / "new").mkdir(exist_ok=True)
        for name, (first, *others) in (("1.csv", rows[:-1]), ("2.csv", rows[-1:])):
            (raw / "new" / name).write_text(table(";".join(map(str, first)), others, ";"))
        return made.night(raw / "new", named=columns, **form).num_rows

    for columns in ({}, {"user": "u0", "item": "p0", "timestamp": str(T)}):
        with pytest.raises(DataError, match="no names of columns") as refused:
            read(columns)
    (setting,) = [one for one in advised(str(refused.value)) if "column_names" in one]
    assert setting == "data.column_names=[Kunde, Artikel, Datum]"
    assert read({}, column_names=("Kunde", "Artikel", "Datum")) == 180


@pytest.mark.parametrize(
    ("name", "up", "down"),
    [("thumbs", "up", "down"), ("Vote", "Upvote", "Downvote"), ("reaction", "like", "dislike"),
     ("feedback", "👍", "👎"), ("Bewertung", "gut", "schlecht")],
)  # fmt: skip
def test_votes_in_words_are_ratings(shop, name, up, down):
    rows = [(f"u{n % 20}", f"p{n * 7 % 11}", T + 5000 * n, up if n % 3 else down)
            for n in range(180)]  # fmt: skip
    found = shop(table(f"customer,sku,bought_at,{name}", rows))
    assert (found.roles["rating"], found.counts["low_ratings_dropped"]) == (name, 60)


@pytest.mark.parametrize(
    ("role", "names"),
    [("rating", ["star_rating", "Book-Rating", "My Rating", "movie_rating", "Customer Rating",
                 "Kundenbewertung", "review_stars", "Film Rating"]),
     ("quantity", ["Net quantity", "Stück", "Stk.", "Anz.", "Units Sold", "Total Qty",
                 "tickets", "pcs", "seats", "copies", "Packungen", "Anzahl Karten",
                   "Bestellmenge", "Net items sold", "Menge (- Erstattung)",
                   "Quantité (- Remboursement)", "Packs", "Items sold", "Net units", "Nombre",
                   "Qty Shipped"]),
     ("user", ["household_key", "Loyalty card", "Kundenkarte", "Debitorennummer", "Guest ID",
               "Reader ID", "Account Number", "Buyer Username", "Mitgliedsnummer"])],
)  # fmt: skip
def test_a_role_has_many_names(roles, role, names):
    rows = [
        (n // 3, f"m{n // 3 % 13}", f"p{n * 7 % 11}", 1 + n % 5, T + n * 90_000) for n in range(120)
    ]
    for name in names:
        usual = {"user": "customer", "value": "price"}
        columns = usual | {"user" if role == "user" else "value": name}
        found = roles(table(f"receipt_id,{columns['user']},sku,{columns['value']},date", rows))
        assert found[role] == name


@pytest.mark.parametrize(
    ("name", "sold", "back", "role"),
    [("Price", "9.99", "-9.99", "taken_back"), ("Umsatz", "9,99", "9,99-", "taken_back"),
     ("Gross Sales", "$9.99", "($9.99)", "taken_back"),
     ("Line Total", "9.99", "-$9.99", "taken_back"),
     ("Exemplar", "1", "-1", "quantity"), ("Number", "1", "-1", "quantity"),
     ("Count", "2", "-2", "quantity"), ("Price;Qty", "9.99;2", "-9.99;2", "taken_back"),
     ("Total;Qty", "9.99;1", "-9.99;1", "taken_back"),
     ("Montant TTC;Qté", "9,99;1", "-9,99;1", "taken_back"),
     ("Invoice", "INV-O{}", "CN-O{}", "taken_back"), ("Receipt;Qty", "{};1", "R{};1", "taken_back"),
     ("Sum total;Status", "9;paid", "-9;paid", "taken_back"),
     ("Total;returned", "9;no", "-9;no", "taken_back"),
     ("Belegnummer;Menge", "RE2024{};1", "GS2024{};1", "taken_back"),
     ("Order number", "US-{}", "RMA-{}", "taken_back"), ("Total", "9 DR", "9 CR", "taken_back"),
     ("N° facture;Qté", "FA{};1", "AV{};1", "taken_back")],
)  # fmt: skip
def test_lines_that_only_look_like_returns_are_asked_about(shop, raw, name, sold, back, role):
    """One of the eight is of an item that the customer had bought."""
    head = ["customer", "email"][len(name) % 2]  # some by one name of the users, some by the other
    rows = [
        (f"u{n % 10}", f"p{n % 11}", (back if n % 15 == 14 else sold).format(100 + n), T + n)
        for n in range(120)
    ]
    text = table(f"{head};sku;{name};date", rows, ";")
    name = name.partition(";")[0]
    with pytest.raises(DataError, match=f"column {name!r} .* in 8 of the first rows") as asked:
        shop(text)
    ways = shlex.split(str(asked.value).replace(",", " ").replace("--column", ""))
    other = "returned" if text.startswith(f"{head};sku;Total;returned") else "none"
    assert {f"{role}={name}", f"{role}={other}"} <= {*ways}
    found = shop(text, columns={role: name})
    assert found.data.interactions.item.size == 111
    assert found.counts["negative_events_dropped"] == 8
    if name == "Price":
        assert found.roles["price"] == "Price"
    if name not in ("Price", "Invoice", "Exemplar", "Total"):  # one of each kind
        return
    (raw / "new.csv").write_text(text)
    assert found.night(raw / "new.csv")["type"].to_pylist().count("return") == 8
    assert shop(text, columns={role: other}).data.interactions.item.size == 120
    made = shop(text.replace(back.partition("{}")[0], sold.partition("{}")[0]))
    with pytest.raises(DataError, match=f"column {name!r} .* in 8 of the first rows"):
        made.night(raw / "new.csv")
    for column, returns in ((name, 8), (other, 0)):
        types = made.night(raw / "new.csv", named={role: column})["type"].to_pylist()
        assert types.count("return") == returns


@pytest.mark.parametrize(
    ("name", "states", "asked"),
    [("Status", ("XYZ1", "Delivered", "Delivered"), True),
     ("Статус", ("XYZ1", "Delivered", "Delivered"), False),
     ("order_state", ("ohne", "mit", "mit"), True), ("state", ("CA", "NY", "TX"), False),
     ("Status", ("Дa", "Доставлен", "完了"), True), ("status", ("R", "A", "A"), True),
     ("order_status", ("5", "2", "2"), True), ("Status", ("XYZ1",) * 3, False),
     ("Status", ("Delivered", "Ausgebucht", "Ausgebucht"), False),
     ("Status", ("Erledigt",) * 3, False), ("status", ("open", "closed", "closed"), False),
     ("Status", ("Sales Order", "Locked", "Delivered"), False)],
)  # fmt: skip
def test_states_that_nobody_knows_are_asked_about(shop, name, states, asked):
    state = lambda n: states[n % 20 % 3 if "NY" in states else n % 3]  # noqa: E731
    rows = [(f"u{n % 20}", f"p{n * 7 % 11}", T + 5000 * n, state(n)) for n in range(180)]
    text = table(f"customer;sku;date;{name}", rows, ";")
    if not asked:
        assert shop(text).data.interactions.item.size == 180
        return
    with pytest.raises(DataError, match=f"nobody knows in .* \\('{states[0]}'") as refused:
        shop(text)
    yes, no = (shlex.split(way)[0].strip(",") for way in str(refused.value).split("--column ")[1:])
    assert yes.startswith(f"taken_back={name}={states[0]}")
    assert no == f"order_status={name}"
    assert shop(text, columns={"order_status": name}).data.interactions.item.size == 180
    found = shop(text, columns={"taken_back": f"{name}={states[0]}"}, clean={"most_removed": 1})
    assert found.data.interactions.item.size == 120


# Column, value of a sale, value of a return, and the mark that the question names.
MARKS_OF_RETURNS = [
    ("Sign", "+", "-", "-"), ("S/H", "S", "H", "H"), ("Dr Cr", "DR", "CR", "CR"),
    ("Direction", "OUT", "IN", "IN"), ("Type", "Abgang", "Zugang", "Zugang"),
    ("Code", "601", "653", "653"), ("Remark", "", "torn", "*"), ("Flag", "A|B", "B?", "B?"),
    ("Return of", "", "O{}", "*"), ("Qty in", "0", "1", "1"),
    ("Order", "{}", "{}-RET", "*-RET"), ("Receipt", "{}", "{}/CN", "*/CN"),
    ("SKU", "A{item}", "A{item}-RET", "*-RET"), ("SKU", "A{item}", "A{item}_retour", "*_retour"),
    ("SKU", "A{item}", "RET-A{item}", "RET-*"), ("SKU", "T{item}", "Void: T{item}", "Void: *"),
    ("Title", "Tea {item}", "(RETURNED) Tea {item}", "(RETURNED) *"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "sold", "back", "mark"), MARKS_OF_RETURNS)
def test_marks_of_returns_without_usual_names_are_asked_about(shop, raw, name, sold, back, mark):
    """Each sixth purchase is returned a day later."""
    bought = [(n, f"u{n * 5 % 23}", n * 7 % 31, T + 5000 * n, sold) for n in range(240)]
    rows = bought + [(n, u, i, at + 90_000, back) for n, u, i, at, _ in bought if n % 6 == 1]
    head = f"customer;{name}{'' if name == 'SKU' else ';SKU'};date"
    cells = [(u, text.format(n, item=i), i, at) for n, u, i, at, text in rows]
    text = table(head, [(u, c, at) if name == "SKU" else (u, c, i, at) for u, c, i, at in cells],
                 ";")  # fmt: skip
    with pytest.raises(DataError, match=f"column {name!r} .* in 40 of the first rows") as asked:
        shop(text)
    yes, no = (shlex.split(way)[0].strip(",") for way in str(asked.value).split("--column ")[1:])
    assert (yes, no) == (f"taken_back={name}={mark}", "taken_back=none")
    found = shop(text, columns={"taken_back": yes.partition("=")[2]})
    assert found.counts["negative_events_dropped"] == 40
    assert found.data.interactions.item.size == 200
    assert found.data.item_ids.size == 31
    if name not in ("Sign", "Remark", "Order", "Title"):  # one of each kind
        return
    (raw / "new.csv").write_text(text)
    assert found.night(raw / "new.csv")["type"].to_pylist().count("return") == 40
    assert shop(text, columns={"taken_back": "none"}).data.interactions.item.size == 280


@pytest.mark.parametrize(
    ("name", "sold", "back"),
    [("Retoure", "nein", "ja"), ("Rückgabe", "0", "1"), ("retour", "", "oui"),
     ("credit_note", "0", "1"), ("Gutschrift-Nr", "", "CN-{}"), ("return_flag", "N", "R"),
     ("returned_at", "", "2024-01-05"), ("status", "delivered", "returned")],
)  # fmt: skip
@pytest.mark.parametrize("own", [False, True])
def test_rows_that_repeat_what_they_take_back_are_lines_of_returns(
    shop, raw, name, sold, back, own
):
    """Each sixth purchase is returned, which its own row says, or one a day later."""
    rows = [(f"u{n * 5 % 23}", n * 7 % 31, T + 5000 * n, sold) for n in range(240)]
    if own:
        rows[1::6] = [(*row[:3], back.format(n)) for n, row in enumerate(rows[1::6])]
    else:
        rows += [(u, i, at + 90_000, back.format(at)) for u, i, at, _ in rows[1::6]]
    text = table(f"customer,sku,date,{name}", rows)
    found = shop(text)
    assert [role.endswith("line") for role, column in found.roles.items() if column == name] == [
        not own
    ]
    assert found.counts["negative_events_dropped"] == 40
    assert found.counts.get("events_before_negative_dropped", 0) == 40 * (not own)
    assert found.data.interactions.item.size == 200
    if name not in ("retour", "Gutschrift-Nr"):
        return
    (raw / "new.csv").write_text(text)
    night = found.night(raw / "new.csv")
    assert night["type"].to_pylist().count("return") == 40


@pytest.mark.parametrize(
    ("name", "value"),
    [("reordered", lambda n, times: min(times, 1)), ("channel", lambda n, times: "ab"[n % 5 == 1]),
     ("order in month", lambda n, times: times), ("colour", lambda n, times: n * 7 % 11 % 3)],
)  # fmt: skip
def test_what_users_buy_again_is_no_return(shop, name, value):
    times: dict[tuple[int, int], int] = {}
    rows = []
    for n in range(400):
        pair = n % 20, n * 7 % 11
        rows.append((f"u{pair[0]}", f"p{pair[1]}", T + 5000 * n, value(n, times.get(pair, 0))))
        times[pair] = times.get(pair, 0) + 1
    for n in range(90):
        rows.append((f"u{n % 3}", f"p{n % 5}", T + 5000 * (n + 400), value(n % 3 + n % 5 * 8, 2)))
    assert shop(table(f"user;item;date;{name}", rows, ";")).data.interactions.item.size == 490


@pytest.mark.parametrize("again", [False, True])
def test_a_country_before_the_number_of_an_order_is_no_credit_note(shop, again):
    rows = [
        (f"u{n % 10}", f"p{n % 11 if n < 110 or again else n}", "CR-" if n > 109 else "US-", n)
        for n in range(120)
    ]
    text = table("customer;sku;Order;date", [(u, p, f"{c}{n}", T + n) for u, p, c, n in rows], ";")
    if again:
        with pytest.raises(DataError, match="begins like a credit note in 10 of"):
            shop(text)
    else:
        assert shop(text).data.interactions.item.size == 120


@pytest.mark.parametrize(
    "name", ["Discount Amount", "Rabattbetrag", "Montant de la remise", "Steuerbetrag", "Total tip"]
)
def test_amounts_beside_those_of_a_sale_may_be_below_0(shop, name):
    rows = [
        (f"u{n % 10}", f"p{n % 11}", "-2.00" if n % 9 < 3 else "0.00", T + n) for n in range(120)
    ]
    assert shop(table(f"customer;sku;{name};date", rows, ";")).data.interactions.item.size == 120


def test_codes_with_a_hyphen_are_no_amounts_below_0(shop):
    rows = [(f"u{n % 10}", f"p{n % 11}", f"SO-{n:05d}", 1, T + 5000 * n) for n in range(120)]
    found = shop(table("customer;sku;Sales order reference;quantity;date", rows, ";"))
    assert "below 0" not in found.notes


@pytest.mark.parametrize("last", ["Drinks|Tea|Green", "Drinks"])
def test_lists_in_a_file_without_names_are_no_baskets(shop, last):
    rows = [f"p{n};Tea {n};{last if n % 3 else 'A|B|C|D'}" for n in range(20)]
    with pytest.raises(DataError, match="no names of columns; write a line of names"):
        shop(items="\n".join(rows) + "\n")


@pytest.mark.parametrize("role", ["valid_until", "available_from"])
def test_an_unclear_day_in_the_items_file_is_asked_about(shop, role):
    rows = [(f"p{n}", f"T{n}", f"0{3 + n % 2}/04/2099") for n in range(4)]
    items = table(f"item,title,{role}", rows)
    with pytest.raises(DataError, match=f"{role!r} shows whether .*data.day_first=true"):
        shop(items=items)
    name = {"valid_until": "available_until"}.get(role, role)
    moments = [shop(items=items, day_first=first).values(name)[0] for first in (True, False)]
    assert [time.gmtime(moment - 1)[1:3] for moment in moments] == (
        [(4, 3), (3, 4)] if role == "valid_until" else [(4, 2), (3, 3)]
    )


def test_an_unknown_item_in_nearly_every_order_is_named_at_night(shop, raw, capsys):
    """Nobody can be asked."""
    rows = [(f"u{n % 10}", f"p{n * 7 % 31}", 1_700_000_000 + 9999 * n) for n in range(180)]
    made = shop(table("user,item,date", rows))
    bags = [(user, "BAG", at) for user, _, at in rows]
    (raw / "new.csv").write_text(f"Orders of May\n\n{table('user,item,date', [*rows, *bags])}")
    assert made.night(raw / "new.csv").num_rows == 360
    told = " ".join(capsys.readouterr().err.split())
    assert "'BAG' is in 100% of the orders" in told
    assert "lines above the names of the columns are not read: 'Orders of May'" in told
