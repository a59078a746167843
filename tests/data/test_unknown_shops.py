"""Kinds of exports that were read wrongly once, each with several inputs and what is right."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from reader_suite import table
from typer.testing import CliRunner

from recsys import cli
from recsys.artifacts import Workspace
from recsys.data import growth
from recsys.data.cleaning import Rules
from recsys.data.columns import check_new_columns, mapped
from recsys.data.returns import forms_of_pieces, read_pieces
from recsys.data.sample import Sample
from recsys.data.service_lines import says
from recsys.data.sources import find_tables
from recsys.data.time_formats import TimeRules
from recsys.errors import DataError
from recsys.event_names import level
from recsys.retraining.news import _read_files, say_taken_back
from recsys.serving.stores.records import NOT_HISTORY, Sign, sign_of

T = 1_700_000_000


def events(n: int = 180, *more: Callable[[int], object], head: str = "user,item,timestamp") -> str:
    """Rows of 20 users and 11 items, more than an hour apart, with further columns."""
    rows = (
        (f"u{k % 20}", f"p{k * 7 % 11}", T + 5000 * k, *(value(k) for value in more))
        for k in range(n)
    )
    return table(head, rows)


def bought(
    item: Callable[[int], object], head: str = "user,item,timestamp", mark: str = ",", n: int = 180
) -> str:
    """Rows of 20 users, as in `events`, with an item of each row."""
    return table(head, ((f"u{k % 20}", item(k), T + 5000 * k) for k in range(n)), mark)


def orders(lines: int, customer: Callable[[int], object]) -> list[tuple[object, ...]]:
    """Lines of an order, a customer, an item and a time; each order has two lines."""
    places = [(line // 2, line) for line in range(lines)]
    return [(f"R{n}", customer(n), f"p{k * 7 % 11}", T + n * 5000) for n, k in places]


def of_the_night(found: Any, raw: Path, text: str, **form: Any) -> pa.Table:
    """The events of a file after a first run."""
    (raw / "new.csv").write_text(text, encoding="utf-8")
    return found.night(raw / "new.csv", **form)


@pytest.mark.parametrize(
    ("ids", "name", "title"),
    [("SKU", "Product", "Tea pot {}"), ("Artikelnummer", "Artikel", "Tea {}"),
     ("Référence", "Produit", "Tea pot {}"), ("Codice articolo", "Articolo", "Tea {}"),
     ("Código", "Producto", "Tea pot {}"), ("ID", "Towar", "Tea {}"), ("isbn", "Book", "Tea {}")],
)  # fmt: skip
def test_titles_of_the_items_file_may_be_called_product(shop, ids, name, title):
    items = table(f"{ids},{name}", [(f"p{n}", title.format("ABCDEFGHIJK"[n])) for n in range(11)])
    found = shop(events(), items)
    assert found.values("title")[:2] == [title.format("A"), title.format("B")]
    assert name not in found.data.items.column_names


def test_titles_beside_ids_in_words(shop):
    names = [f"{colour} pot" for colour in ("Red", "Blue", "Green", "Grey")]
    items = table("slug,Product", [(name.lower().replace(" ", "-"), name) for name in names])
    rows = [(f"u{n % 5}", f"{names[n % 4].lower().replace(' ', '-')}", T + n) for n in range(60)]
    assert shop(table("user,slug,timestamp", rows), items).values("title") == names


def test_the_most_frequent_of_several_names_is_the_title(shop):
    """As in Magento, where an order has a line of the shirt and one of its size M."""
    name = lambda n: f"Shirt{f' {n * 7 % 11}' * (n % 5 > 1)}"  # noqa: E731
    found = shop(events(360, name, lambda n: f"Ann {n % 20}", head="user,sku,date,name,city"))
    assert sorted(found.values("title")) == sorted(f"Shirt {n}" for n in range(11))
    assert found.counts["items_with_several_titles"] == 11
    lines = events(360, lambda n: f"Ann {n % 20}", head="user,sku,date,name")
    assert {*shop(lines).values("title")} == {f"p{n}" for n in range(11)}


@pytest.mark.parametrize("form", ["json", "parquet"])
@pytest.mark.parametrize(("record", "name"), [("item", "Np{:02}"), ("product", "Tea {}")])
def test_the_name_in_the_record_of_an_item_is_its_title(shop, form, name, record):
    rows = [
        {
            "user": f"u{n % 20}",
            record: {"id": f"p{n * 7 % 11}", "name": name.format(n * 7 % 11)},
            "timestamp": T + 5000 * n,
        }
        for n in range(180)
    ]
    made = pa.Table.from_pylist(rows)
    text = "\n".join(map(json.dumps, rows)) + "\n"
    found = shop(made if form == "parquet" else text, file=f"events.{form}")
    assert found.roles["title"] == f"{record}.name"
    assert sorted(found.values("title")) == sorted(name.format(n) for n in range(11))


@pytest.mark.parametrize(
    "head",
    ["Codice cliente;Codice articolo;Data ordine;Quantità;Prezzo",
     "Código de cliente;Código del artículo;Fecha de pedido;Cantidad;Precio unitario",
     "Numéro client;Réf. article;Date de la commande;Qté;Prix unitaire TTC",
     "N° de client;Code de l'article;Date d'achat;Quantité;Prix",
     "Kundennummer;Art.-Nr.;Bestelldatum;Menge;Einzelpreis",
     "Klantnummer;Nummer van de artikel;Besteldatum;Aantal;Stukprijs",
     "Código do cliente;Ref. produto;Data do pedido;Quantidade;Preço de venda",
     "Identyfikator klienta;Kod produktu;Data zamówienia;Ilość;Cena jednostkowa",
     "Kundnr;Artikelnr;Orderdatum;Antal;Styckpris",
     "Kundenr.;Varenummer;Ordredato;Antall;Enhetspris",
     "Kunde-ID;Varenr.;Købsdato;Antal;Pris",
     "Asiakasnumero;Tuotekoodi;Tilauspäivämäärä;Määrä;Yksikköhinta",
     "Customer No.;Item Code;Purchase Date;Qty ordered;Unit Price",
     "fk_customer_id;product_id_sold;event_time_utc;Qty;Price"],
)  # fmt: skip
def test_columns_are_recognised_in_twelve_languages(roles, head):
    rows = [
        (f"C{n % 20:03d}", f"A{n * 7 % 11:03d}", f"2026-01-{1 + n % 28:02d} {n % 24:02d}:00", 1,
         "12.50") for n in range(180)
    ]  # fmt: skip
    wanted = ("user", "item", "timestamp", "quantity", "price")
    assert roles(table(head, rows, ";")) == dict(zip(wanted, head.split(";"), strict=True))


@pytest.mark.parametrize(
    ("head", "options"),
    [
        ("Wer,Was,Preis", "user=Wer item=Was timestamp=file-order"),
        ("minutes,streamer_id,score", "user=streamer_id item=minutes timestamp=file-order"),
        ("alpha,beta,gamma", "user=alpha item=beta timestamp=file-order"),
        ("customer_id,visitor_id,thing", "user=customer_id item=visitor_id timestamp=file-order"),
        ("Patron Barcode,Item Barcode,Mark",
         "'user=Patron Barcode' 'item=Item Barcode' timestamp=file-order"),
        ("Cliente fedele,Vecchio articolo web,x",
         "'user=Cliente fedele' 'item=Vecchio articolo web' timestamp=file-order"),
    ],
)  # fmt: skip
def test_one_refusal_names_all_columns_with_a_command_that_works(home, raw, head, options):
    rows = [(f"c{n % 23}", f"a{n % 19}", f"{n % 7}.5") for n in range(120)]
    (raw / "e.csv").write_text(table(head, rows), encoding="utf-8")
    command = ["data", "prepare", "--source", "table", "--path", "e.csv", "--name", "p"]
    refused = CliRunner().invoke(cli.app, command)
    assert isinstance(refused.exception, DataError)
    said = str(refused.exception)
    advice = said.partition("Say it with ")[2].partition(" (data.columns")[0]
    assert advice == " ".join(f"--column {shlex.quote(o)}" for o in shlex.split(options))
    assert CliRunner().invoke(cli.app, [*command, *shlex.split(advice)]).exit_code == 0


# Dates and customers


@pytest.mark.parametrize("form", ["%Y-%d-%m", "%Y/%d/%m %H:%M", "%Y.%d.%m %H:%M:%S"])
def test_dates_with_the_day_before_the_month_are_noticed(shop, raw, form):
    day = lambda n: time.strftime(form, time.gmtime(T + 86_400 * n))  # noqa: E731
    rows = [(f"u{n % 20}", f"p{n * 7 % 11}", day(n)) for n in range(100)]
    found = shop(table("user,item,date", rows))
    assert found.data.events.timestamp.max() // 86_400 == T // 86_400 + 99
    assert "the day before the month" in found.notes
    night = of_the_night(found, raw, table("user,item,date", [("u1", "p1", "2026-03-04")]))
    assert night["timestamp"].to_pylist() == [1_775_174_400], "3 April, as in the first run"


@pytest.mark.parametrize(
    "ids",
    [("1.5", "1.50", "1.500"), ("1e3", "1000", "1E3"), ("007", "7", "07"), ("-1.10", "-1.1", "0.1"),
     ("12345678901234567890", "12345678901234567891", "1234567890123456.5")],
)  # fmt: skip
@pytest.mark.parametrize(
    "form", ['"item": {}', '"lines": [{{"sku": {}, "note": "a, \\"b\\": 1.50,"}}]']
)
def test_ids_of_json_are_texts_from_the_first_digit(shop, ids, form):
    rows = (f'{{"user": {ids[n // 3 % 3]}, {form.format(ids[n % 3])}, "timestamp": {T + 5000 * n}}}'
            for n in range(180))  # fmt: skip
    found = shop("\n".join(rows) + "\n", file="events.jsonl")
    assert {*found.data.item_ids.tolist()} == {*found.histories} == {*ids}


def test_a_field_beside_the_id_of_a_record_is_no_item(shop):
    form = '{{"evt": "enrolled", "at": {}, "learner": {{"id": "l{}"}}, "course": {}}}\n'
    course = '{{"id": {}, "title": "Course {}", "track": "web"}}'
    ids = [9_007_199_254_740_993 + n for n in range(11)]
    rows = (form.format((T + 5000 * n) * 1000, n % 20, course.format(ids[n % 11], n % 11))
            for n in range(180))  # fmt: skip
    found = shop("".join(rows), file="events.jsonl")
    assert found.roles["user"] == "learner.id"
    assert {*found.data.item_ids} == {*map(str, ids)}


def test_a_column_of_customers_without_values_is_named(shop):
    with pytest.raises(DataError, match="as the user: 'customer' is empty in every row"):
        shop(table("customer,sku,date", [("", f"p{n % 11}", T + 999 * n) for n in range(180)]))
    rows = [("", n // 2, f"p{n * 7 % 11}", T + n // 2 * 999) for n in range(180)]
    found = shop(table("customer,order,sku,date", rows))
    assert found.roles["user"] == "order"
    assert "not used: customer (empty in the first rows)" in found.notes


@pytest.mark.parametrize(
    "name",
    ["Customer name", "Buyer Full Name", "Kundenname", "Nom client", "Client name", "Phone",
     "Customer phone", "Customer contacts", "Bill-to Name", "Account Name", "Klantnaam"],
)  # fmt: skip
def test_names_of_buyers_beside_orders_are_asked_about(shop, name):
    order = ["Receipt number", "Bestellnummer"][len(name) % 2]
    rows = orders(240, lambda n: f"Ann{n % 20} S" * (n % 3 > 0))
    text = table(f"{order};{name};sku;date", rows, ";")
    with pytest.raises(DataError, match=f"{name!r} seems to say who bought, in 160 of") as asked:
        shop(text)
    said = str(asked.value).partition("The columns")[0]
    ways = [shlex.split(part)[0] for part in said.split("--column ")[1:]]
    assert [way.strip(",") for way in ways] == [f"user={name}", "user=none"]
    if name not in ("Customer name", "Klantnaam"):
        return
    found = shop(text, columns={"user": name})
    assert found.roles["session"] == order
    assert found.data.interactions.user_ids.size == 20 + 40
    assert shop(text, columns={"user": "none"}).data.sessions
    few = [(row[0], row[1] if n < 11 else "", *row[2:]) for n, row in enumerate(rows)]
    assert shop(table(f"{order};{name};sku;date", few, ";")).data.sessions


@pytest.mark.parametrize(
    "name",
    ["Debtor no", "Debtor", "Patient", "Customer no", "Bill-to No.", "N° carte fidélité",
     "Carta fedeltà", "Tarjeta de fidelidad", "Klantenkaart"],
)  # fmt: skip
def test_numbers_of_debtors_and_patients_are_users(roles, name):
    rows = orders(240, lambda n: n % 20)
    assert roles(table(f"receipt no,{name},sku,date", rows))["user"] == name


@pytest.mark.parametrize(
    ("forms", "rule"),
    [((" anna{}@Shop.de", "anna{}@Shop.de", " anna{}@Shop.de "), "ids_of_spreadsheets"),
     (('="000{}"', "000{}", '="000{}"'), "ids_of_spreadsheets"),
     (("'00{}", "00{}", " 00{}"), "ids_of_spreadsheets")],
)  # fmt: skip
def test_a_customer_in_several_spellings_is_one_and_counted(shop, forms, rule):
    rows = [(forms[n % 3].format(n % 20), f"p{n * 7 % 11}", T + 5000 * n) for n in range(180)]
    found = shop(table("customer;sku;date", rows, ";"))
    assert found.histories.keys() == {forms[1].format(n) for n in range(20)}
    assert found.counts[rule] == 120
    ids = shop(table("sku;customer;date", rows, ";")).data.item_ids
    assert ids.size == 20


def test_letters_of_users_stay_and_those_in_two_cases_are_named(shop):
    mail = lambda n: f"{'Ada' if n % 3 else 'ada'}{n % 20}@X.de"  # noqa: E731
    rows = [(mail(n), f"p{n * 7 % 11}", T + 5000 * n) for n in range(180)]
    found = shop(table("customer,sku,date", rows))
    assert found.histories.keys() == {mail(n) for n in range(180)}
    assert "40 users differ from another one in nothing but capital letters" in found.notes
    assert "'ada0@X.de' and 'Ada0@X.de'" in found.notes
    plain = shop(table("customer,sku,date", [("Ada" + row[0][3:], *row[1:]) for row in rows]))
    assert "capital letters" not in plain.notes
    items = shop(table("sku,customer,date", rows))
    assert "40 items differ from another one in nothing but capital letters" in items.notes


NOBODY = ["NA", "Walk-in Customer", "Guest", "Guest Customer", "Gastkunde", "Laufkundschaft",
          "POS", "Cash Customer", "POS Customer", "anonymous", "no-reply@shop.de", "Barverkauf",
          "Cliente ocasional", "Client de passage", "Consumidor final",
          "Kassaverkoop", "Theke"]  # fmt: skip


@pytest.mark.parametrize("names", [NOBODY, ["C00000"]], ids=["words", "a code of many orders"])
def test_each_order_of_nobody_is_a_user_of_its_own(shop, names):
    rows = orders(480, lambda n: f"c{n % 23}" if n % 3 else names[n // 3 % len(names)])
    found = shop(table("order,customer,sku,date", rows))
    assert found.counts["sessions_without_user"] == 160
    assert {len(found.histories[f"R{n}"]) for n in range(0, 240, 3)} == {2}
    assert {*found.info["cleaning"]["mapping"]["nobody"]} == {*names}
    assert repr(names[0]) in found.notes
    kept = shop(table("order,customer,sku,date", rows), clean={"skip": "placeholder_users"})
    assert sum(len(kept.histories[name]) for name in names) == 160


@pytest.mark.parametrize(("name", "each"), [("Hotel Adler GmbH", 3), ("Adler", 8), ("K-1007", 8)])
def test_a_customer_with_many_orders_among_many_customers_is_one(shop, name, each):
    found = shop(table("order,customer,sku,date", orders(480, lambda n: f"c{n % 23}" if n % each
                                                         else name)))  # fmt: skip
    assert len(found.histories[name]) == 2 * -(-240 // each)


def test_a_customer_with_many_orders_among_few_customers_is_one(shop):
    rows = [
        (n, f"c{n % 5 if n % 9 == 0 else 0}", f"p{n * 7 % 11}", T + n * 999) for n in range(180)
    ]
    rows += [(n, *row) for n, *row in rows]
    found = shop(table("order,customer,sku,date", rows))
    assert found.histories.keys() == {f"c{n}" for n in range(5)}


@pytest.mark.parametrize("nobody", ["", "0"])
def test_numbers_of_orders_and_of_customers_stay_apart(shop, nobody):
    rows = [(n // 2, n // 2 % 24 + 1 if n // 2 % 5 else nobody, f"p{n * 7 % 11}", T + n // 2 * 999)
            for n in range(240)]  # fmt: skip
    found = shop(table("order_id,customer_id,sku,date", rows))
    assert found.data.interactions.user_ids.size == 24 + 24
    assert len(found.histories["order_id 5"]) == 2


@pytest.mark.parametrize("column", ["customer_email", "anonymous_id"])
@pytest.mark.parametrize("order", ["order_id", "note"])
def test_guests_are_known_by_their_address_or_device(shop, column, order):
    rows = [(n, f"K{n % 24}" if n % 3 else "", f"A{n % 12}@x.de", f"p{n * 7 % 11}", T + n * 9999)
            for n in range(240)]  # fmt: skip
    found = shop(table(f"{order},customer_id,{column},sku,date", rows))
    assert found.counts["users_by_another_id"] == 80
    assert len(found.histories["A3@x.de"]) == 20


@pytest.mark.parametrize("nobody", ["", "guest"])
def test_a_row_without_a_user_belongs_to_the_user_of_its_order(shop, nobody):
    rows = [(f"O{n // 2}", f"c{n // 2 % 20}" if n // 2 % 3 else nobody, f"p{n * 7 % 11}",
             f"{n}@x.de", T + n // 2 * 999, 1) for n in range(180)]  # fmt: skip
    rows += [("Q1", "z", "p3", "", T + 90_000, 1), ("Q1", nobody, "p3", "a@x.de", T + 99_000, -1)]
    rows += [("Q2", "y", "p3", "", T + 90_000, 1), ("Q2", nobody, "p4", "", T + 99_000, 1)]
    found = shop(table("order,customer,sku,email,date,qty", rows))
    assert found.counts["users_of_their_orders"] == 2
    assert found.histories["y"] == ["p3", "p4"]
    assert found.data.disliked.table["user_id"].to_pylist() == ["z"]


@pytest.mark.parametrize("n", [20, 120])
def test_the_order_of_guests_is_what_has_several_lines(shop, n):
    """As in Etsy's `Sold order items`."""
    rows = [(7000 + k, 90 + k // 2, f"b{k % 5}" if k // 2 % 2 else "", f"Item {k % 3}", T + k // 2)
            for k in range(n)]  # fmt: skip
    found = shop(table("Transaction ID,Order ID,Buyer,Item Name,Sale Date", rows))
    assert found.roles["session"] == "Order ID"
    assert found.counts["sessions_without_user"] == n // 2
    assert len(found.histories["90"]) == 2


@pytest.mark.parametrize(
    ("head", "item"),
    [("artist,item name", "item name"), ("artist,track name", "track name"),
     ("artist,song", "song"), ("artist,item name,item url", "item url"), ("artist,x", "artist")],
)  # fmt: skip
def test_an_artist_beside_the_name_of_an_item_is_none(shop, head, item):
    rows = [(f"u{n % 20}", T + 5000 * n, f"Band {n % 11 % 3}", f"Album {n % 11}", f"/a/{n % 11}")
            for n in range(180)]  # fmt: skip
    columns = 3 + head.count(",")
    found = shop(table(f"user,timestamp,{head}", [row[:columns] for row in rows]))
    assert found.roles["item"] == item
    if item == "item name":
        assert found.values("brand")[:2] == ["Band 0", "Band 1"]


@pytest.mark.parametrize("late", [False, True])
def test_an_item_without_an_id_has_that_of_its_title(shop, late):
    titles = [*"ABCDEFGHI", "Shirt", "Shirt"]  # one title of two items, and one item without an id
    rows = [
        (f"u{n % 20}", "" if n * 7 % 11 == 0 or n % 2 == late * (n < 90) else f"p{n * 7 % 11}",
         f"Tea {titles[n * 7 % 11]}", T + 5000 * n) for n in range(180)
    ]  # fmt: skip
    found = shop(table("user,sku,product_name,timestamp", rows))
    unclear = [title for _, sku, title, _ in rows if not sku and title[4:] in ("A", "Shirt")]
    clear = [sku for _, sku, *_ in rows if not sku]
    assert found.counts["rows_named_by_title"] == len(unclear)
    assert found.counts["rows_named_by_the_id_of_their_title"] == len(clear) - len(unclear)
    ids = {"Tea A", "Tea Shirt", *(f"p{n}" for n in range(1, 11))}
    assert {*found.data.item_ids.tolist()} == ids


@pytest.mark.parametrize(
    ("column", "values"),
    [("type", ("Credit card", "Refundable voucher")), ("kind", ("simple", "bundle", "gift return")),
     ("Typ", ("PayPal", "Kreditkarte", "Storno-Versicherung")),
     ("type", ("web", "app", "Retourenportal")),
     ("kind", ("configurable", "virtual", "returnable bottle")),
     ("Typ", ("Card payment", "Refund voucher"))],
)  # fmt: skip
def test_kinds_of_products_and_payments_are_no_returns(shop, column, values):
    found = shop(
        events(180, lambda n: values[n % len(values)], head=f"user,item,timestamp,{column}")
    )
    assert "behaviour" not in found.roles
    assert found.data.interactions.item.size == 180


@pytest.mark.parametrize(
    ("column", "values", "setting"),
    [("type", ("sale", "return"), "behaviour"), ("type", ("0", "1"), "behaviour"),
     ("event", ("purchase", "refund"), "behaviour"), ("returned", ("yes", "no"), "taken_back"),
     ("status", ("paid", "refunded"), "order_status"),
     ("rating", (1, 2, 1, 2, 1, 2, 2, 5, 4, 3), "rating")],
)  # fmt: skip
def test_a_stop_names_the_column_and_a_setting_that_works(shop, column, values, setting):
    text = events(180, lambda n: values[n % len(values)], head=f"user,item,timestamp,{column}")
    with pytest.raises(DataError) as refused:
        shop(text)
    assert f"column '{column}'" in str(refused.value)
    assert f"--set data.columns.{setting}=none" in str(refused.value)
    assert shop(text, columns={setting: "none"}).data.interactions.item.size == 180


KINDS_OF_EVENTS = [
    ("type", "charge", "refund"), ("action", "enroll", "drop"), ("movement", "out", "return"),
    ("trx", "issue", "returned"), ("type", "borrow", "return"), ("Typ", "Bestellung", "Widerruf"),
    ("action", "booked", "cancelled"), ("type", "pickup", "Storno"),
]  # fmt: skip


@pytest.mark.parametrize(("column", "usual", "back"), KINDS_OF_EVENTS)
def test_known_takebacks_among_unknown_kinds_of_events(shop, column, usual, back):
    kind = lambda n: back if n % 9 == 0 else usual  # noqa: E731
    found = shop(events(180, kind, head=f"user,item,timestamp,{column}"))
    assert found.roles["behaviour"] == column
    roles = {row["name"]: row["role"] for row in found.info["cleaning"]["behaviours"]}
    assert roles == {
        usual: "target",
        (f"{back} (return)" if back in ("drop", "Widerruf") else back): "negative",
    }
    assert found.counts["negative_events_dropped"] == 20
    said = f"The event type {usual!r} has no usual name and is taken as target"
    assert (said in found.notes) == (usual != "Bestellung")


# What was taken back, in the words of eight languages


DATES_OF_RETURNS = [
    "Storniert am", "Rückgabedatum", "Retourniert am", "Annulé le", "Date de remboursement",
    "Annullato il", "Data rimborso", "Anulado el", "Fecha de devolución", "Cancelado em",
    "Data do estorno", "Devolvido em", "Geannuleerd op", "Datum van terugbetaling",
    "Data anulowania", "Data zwrotu", "Cancelled on", "Date of refund", "Refund date", "RMA Date",
]  # fmt: skip


STATES = {
    "de": ("Abgeschlossen", "Storniert", "Retourniert"),
    "fr": ("Livrée", "Annulée", "Remboursée"),
    "es": ("Completado", "Anulado", "Devuelto"),
    "pt": ("Concluído", "Cancelado", "Devolvido"),
    "br": ("Pago", "Recusado", "Estornado"),
    "it": ("Consegnato", "Annullato", "Reso"),
    "nl": ("Geleverd", "Geannuleerd", "Terugbetaald"),
    "pl": ("Zrealizowane", "Anulowane", "Zwrócone"),
    "pl2": ("Wysłane", "Nieopłacone", "Zwrot"),
    "ro1": ("Livrat", "Anulat", "Rambursat"),
    "cs": ("Delivered", "Zrušeno", "Vráceno"),
    "cs2": ("Doručeno", "Zrušena", "Vráceno"),
    "ro": ("Finalizată", "Anulată", "Returnat"),
    "tr": ("Teslim edildi", "İptal edildi", "İade edildi"),
    "ru": ("Доставлен", "Отменён", "Возврат"),
    "ru2": ("Выполнен", "Не оплачен", "Возвращен клиентом"),
    "zh": ("已完成", "已取消", "已退款"),
    "ja": ("発送済み", "キャンセル", "返品済み"),
}
NOT_PAID = [
    "RTO", "Shipped - Rejected by Buyer", "Undelivered", "Refused", "Expired", "Fraud", "Draft",
    "Nicht abgeholt", "Awaiting payment", "Payment error", "Erreur de paiement", "Zahlungsfehler",
    "Errore di pagamento", "Error en el pago", "Nie zapłacono", "Väntar på betalning", "Betaalfout",
    "En attente de paiement par chèque", "Erro de pagamento", "Eroare de plată", "Denied",
    "Disputed", "Reversed", "Quote", "Angebot", "Devis", "Отменен", "交易关闭", "未入金",
]  # fmt: skip


NAMES_OF_STATES = [
    "Status", "Stan zamówienia", "Fulfillment", "Positionsstatus", "SellerStatus",
    "transactions.stateMachineState.name", "Estado de la venta", "Delivery state", "line status",
    "reservation_status", "booking_status", "Current status", "order_status_label", "status_name",
]  # fmt: skip
NUMBERS_OF_RETURNS = {
    "RMA Number": "RMA{}", "Return ID": "{}", "Credit Memo #": "CM-{}", "N° avoir": "AV{}",
    "Retourennummer": "RT{}", "Gutschriftsnr.": "G/{}", "Nº de devolución": "D{}",
    "Return Reason": "torn {}", "Motivo da devolução": "Defeito {}", "Retourengrund": "zu klein {}",
}  # fmt: skip
# Column, usual value, the value of a cancelled row and that of a returned one, and the role.
TAKEN_BACK = [
    (DATES_OF_RETURNS[0], "", "05.04.2026", "05.04.2026", "taken_back"),
    ("line status", "SHIP", "CANC", "RTRN", "order_status"),
    ("RMA Number", "", "RMA{}", "RMA{}", "taken_back number"),
    ("Return Reason", "", "torn {}", "torn {}", "taken_back number"),
    *((name, sold, back, back, "behaviour") for name, sold, back in (("Trans Type", "S", "R"),
      ("type", "SALE", "RTN"), ("Belegart", "inv", "crn"), ("doc_type", "S", "R"))),
    ("status", "complete", "closed", "closed", "order_status closed"),
    ("deleted_at", "", "05.04.2026", "05.04.2026", "taken_back"),
    ("returned", "no", "full", "full", "taken_back"),
    ("refunded", "No", "Fully", "Fully", "taken_back"),
    ("zurückgegeben", "nein", "ganz", "ganz", "taken_back"),
    ("skipped", "false", "true", "true", "taken_back"),
    ("paid", "yes", "no", "no", "order_status paid"),
    ("is_paid", "1", "0", "0", "order_status paid"),
]  # fmt: skip


@pytest.mark.parametrize(("column", "usual", "cancelled", "returned", "role"), TAKEN_BACK)
def test_what_was_taken_back_is_no_purchase(shop, column, usual, cancelled, returned, role):
    value = lambda n: {1: cancelled, 2: returned}.get(n % 18, usual).format(7000 + n)  # noqa: E731
    found = shop(events(180, value, head=f"user,item,timestamp,{column}"))
    assert found.roles[role] == column
    gone = [found.counts.get(f"{rule}_dropped", 0)
            for rule in ("rows_of_cancelled_orders", "negative_events")]  # fmt: skip
    assert gone == [10, 10] if cancelled != returned else sum(gone) == 20


@pytest.mark.parametrize("column", [*DATES_OF_RETURNS, *NUMBERS_OF_RETURNS, *NAMES_OF_STATES])
def test_columns_of_what_was_taken_back_are_recognised(roles, column):
    if column in NAMES_OF_STATES:
        role, *values = "order_status", "shipped", "cancelled", "returned"
    else:
        back = NUMBERS_OF_RETURNS.get(column, "05.04.2026")
        role, *values = "taken_back number" if "{}" in back else "taken_back", "", back, back
    value = lambda n: values[n % 18 if n % 18 < 3 else 0].format(7000 + n)  # noqa: E731
    assert roles(events(180, value, head=f"user,item,timestamp,{column}"))[role] == column


def test_states_of_orders_are_read_in_every_language(shop):
    """Each language has 20 orders, of which one is cancelled and one returned."""
    state = lambda n: [*STATES.values()][n % 18][n // 18 if n // 18 < 3 else 0]  # noqa: E731
    found = shop(events(360, state, head="user,item,timestamp,Status"))
    assert found.counts["rows_of_cancelled_orders_dropped"] == 18
    assert found.counts["negative_events_dropped"] == 18


def test_orders_that_were_not_paid_are_no_purchases(shop):
    state = lambda n: "Delivered" if n % 6 else NOT_PAID[n // 6]  # noqa: E731
    found = shop(events(6 * len(NOT_PAID), state, head="user,item,timestamp,Status"))
    assert found.counts["rows_of_cancelled_orders_dropped"] == len(NOT_PAID)
    assert found.data.interactions.item.size == 5 * len(NOT_PAID)


@pytest.mark.parametrize("column", NUMBERS_OF_RETURNS)
def test_a_column_that_numbers_every_line_is_of_no_returns(shop, column):
    form = NUMBERS_OF_RETURNS[column]
    every = shop(events(180, form.format, head=f"user,item,timestamp,{column}"))
    assert every.data.interactions.item.size == 180


@pytest.mark.parametrize(
    ("column", "values"),
    [("Retourenmenge", ("0", "2")), ("Menge retourniert", ("0", "1")),
     ("Quantité remboursée", ("0", "3")), ("product_quantity_refunded", ("0", "2")),
     ("product_quantity_return", ("0", "1")), ("refund", ("0.00", "9.99")),
     ("Kwota zwrotu", ("", "12.50")),
     ("Return Comment", ("", "torn")), ("RMA Status", ("", "sent")),
     ("rating", ("fine", "awful")), ("Bewertung", ("edel", "mies")),
     ("order_status", ("paid", "Cancel it")), ("Status", ("Zrealizowane", "Do zwrotu")),
     ("Status", ("Delivered", "Parked")), ("returned", ("no", "partial")),
     ("refunded", ("No", "Partially")), ("cancelled", ("no", "perhaps")),
     ("returned", ("1", "3")), ("parcel_note", ("delivered", "returned to sender"))],
)  # fmt: skip
def test_what_may_say_that_rows_were_taken_back_is_never_left_out_in_silence(shop, column, values):
    text = events(180, lambda n: values[n % 9 == 0], head=f"user,item,timestamp,{column}")
    found = shop(text)
    assert f"Column {column!r}" in found.notes
    assert values[1] in found.notes
    assert "That is not read, so these events count as the others" in found.notes
    if column in ("Retourenmenge", "rating", "order_status", "parcel_note"):
        ignored = dict.fromkeys(("taken_back", "order_status", "behaviour", "rating"), "none")
        assert "That is not read" not in shop(text, columns=ignored).notes


@pytest.mark.parametrize(
    ("refund", "total", "money"),
    [("Refunded Amount", "Total", "{}.00"), ("Amount Refunded", "Amount", "${}.00"),
     ("Refunds", "Sold For", "${}.00"), ("Erstattungsbetrag", "Betrag", "EUR {},00"),
     ("Kwota zwrotu", "Kwota", "EUR {},00"), ("refund", "Total", "{}.00"),
     ("refund", "price", "EUR {},00"), ("refund", "qty;price", "${}.00")],
)  # fmt: skip
def test_a_refund_of_all_that_was_paid_is_a_return(shop, refund, total, money):
    back = lambda n: money.format({1: 20 + n % 5, 2: 3}.get(n % 9, 0))  # noqa: E731
    one = "1;" * (";" in total)
    rows = [
        (f"u{n % 20}", f"p{n * 7 % 11}", T + 5000 * n, one + money.format(20 + n % 5), back(n))
        for n in range(180)
    ]
    found = shop(table(f"user;item;timestamp;{total};{refund}", rows, ";"))
    assert found.counts["negative_events_dropped"] == 20
    assert found.roles["taken_back amount"] == refund


@pytest.mark.parametrize(
    ("refunded", "cancelled"),
    [("qty_refunded", "qty_canceled"), ("Retourenmenge", "Stornierte Menge"),
     ("Quantité remboursée", "Quantité annulée"), ("Returned quantity", "Cancelled qty"),
     ("refunded", "Cancelled qty"), ("Cant. devuelta", "Cancelled qty"),
     ("unidades_devueltas", "Cancelled qty"), ("quantità resa", "Cancelled qty")],
)  # fmt: skip
def test_pieces_that_were_taken_back_are_those_of_the_line(shop, refunded, cancelled):
    taken = {1: (3, 0), 2: (0, 3), 3: (1, 0), 4: (1, 2), 5: (0, 1)}  # of three pieces
    text = events(
        180, lambda n: "3.0000", lambda n: taken.get(n % 9, (0, 0))[0],
        lambda n: f"{taken.get(n % 9, (0, 0))[1]}.0000",
        head=f"user,item,timestamp,qty_ordered,{refunded},{cancelled}",
    )  # fmt: skip
    found = shop(text)
    assert found.counts["negative_events_dropped"] == 40
    assert found.counts["rows_of_cancelled_orders_dropped"] == 20
    assert found.counts["pieces_taken_back"] == 40
    assert {*found.data.pieces["pieces"].to_pylist()} >= {2.0, 3.0}


@pytest.mark.parametrize("sold", ["0", "0.00"])
def test_pieces_that_were_taken_back_on_a_row_of_their_own(shop, sold):
    rows = [(f"u{n % 20}", f"p{n * 7 % 11}", T + 5000 * n, 2, 0) for n in range(180)]
    rows += [(*row[:2], row[2] + 99, sold, 1 + n % 2) for n, row in enumerate(rows[::9])]
    found = shop(table("customer,sku,date,qty_sold,qty_returned", rows))
    assert found.counts["negative_events_dropped"] == found.counts["partial_returns_dropped"] == 10
    assert "rows_of_cancelled_orders_dropped" not in found.counts


@pytest.mark.parametrize("kinds", ["VR", "AB"])
def test_a_column_of_few_kinds_under_the_name_of_items_is_no_title(shop, kinds):
    found = shop(events(180, lambda n: kinds[n % 9 == 0], head="Kunde,Artikelnr,Datum,Art"))
    assert "title" not in found.roles


def test_closed_orders_without_complete_ones_are_kept(shop):
    state = lambda n: ("fulfilled", "closed")[n % 9 == 0]  # noqa: E731
    text = events(180, state, head="user,item,timestamp,status")
    assert "negative_events_dropped" not in shop(text).counts


@pytest.mark.parametrize("value", ["yes", "2026-05-01", "returned"])
def test_a_returned_line_does_not_take_its_order_with_it(shop, value):
    name = {"yes": "returned", "returned": "status"}.get(value, "refunded_at")
    rows = [
        (f"u{n // 4}", f"p{n}", f"2026-01-{1 + n // 4 % 28:02d} 10:00", value * (n % 40 in (0, 22)))
        for n in range(400)
    ]
    rows = [(user, f"p{int(item[1:]) * 7 % 31}", time, said) for user, item, time, said in rows]
    found = shop(table(f"user,item,timestamp,{name}", rows))
    assert found.counts["negative_events_dropped"] == 20


@pytest.mark.parametrize("newest", [False, True])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("is_night", [False, True])
def test_a_return_follows_a_purchase_of_its_time(shop, raw, newest, late, is_night):
    kinds, column = (("2", "-2"), "qty") if newest == late else (("Verkauf", "Storno"), "type")
    rows = [(f"u{n % 20}", f"p{n * 7 % 11}", day(n // 4), kinds[0]) for n in range(100)]
    both = [("z", "p1", day(26), kinds[0]), ("z", "p1", day(26), kinds[1])][:: 1 if late else -1]
    other = ("z", "p2", day(26), kinds[0])
    rows, new = [*rows, *(("u3", "p2", day(25), k) for k in kinds)], [*both, other]
    head = f"user,item,date,{column}"
    if is_night:
        found = shop(table(head, rows))
        types = of_the_night(found, raw, table(head, new[:: -1 if newest else 1]))
        of_pair = types.filter(pc.equal(types["item"], "p1"))["type"].to_pylist()
        assert level(of_pair[1]) == 0
        assert level(of_pair[0]) != 0
        return
    found = shop(table(head, [*rows, *new][:: -1 if newest else 1]))
    assert found.histories["z"] == ["p2"]
    disliked = found.data.disliked.table.to_pylist()
    assert [(r["item_id"], r["stands"]) for r in disliked if r["user_id"] == "z"] == [("p1", True)]


def test_a_purchase_that_is_refunded_later_is_told_of_at_night(shop, raw, capsys):
    def text(state: str) -> str:
        return events(180, lambda n: state if n == 7 else "complete", head=head)

    head = "user,item,timestamp,status"
    found = shop(text("complete"))
    for state, count in (("complete", 0), ("refunded", 1)):
        say_taken_back(of_the_night(found, raw, text(state)), found.data, "t")
        said = capsys.readouterr().err
        assert (f"{count} purchases in the data of t are returned" in said) == (count == 1)


@pytest.mark.parametrize("name", ["cancel", "order_cancelled", "unenroll", "void", "storniert"])
def test_what_takes_back_a_purchase_over_http_is_a_return(name):
    assert sign_of(name, NOT_HISTORY) is Sign.RETURN


def test_of_files_with_other_columns_the_one_with_more_may_be_read_alone(shop, raw):
    (raw / "shop").mkdir()
    (raw / "shop/orders.csv").write_text(events(180, str, head="user,item,timestamp,order"))
    with pytest.raises(DataError, match=r"or read one file: recsys run .*orders.csv"):
        shop(file="shop/a.csv", events="order,sku,ship_date\n7,p1,2026-01-05\n")


@pytest.mark.parametrize(
    ("name", "with_items", "head", "returned"),
    [("refunds", False, "user,item,timestamp", "user,item,timestamp,reason"),
     ("Retouren 2026", True, "user,item,timestamp,order,qty", "order,item,qty,refunded_at"),
     ("devoluciones", False, "order,user,item,timestamp", "order,sku,refund_date"),
     ("a-credit-notes", True, "order,user,item,timestamp", "order,sku,reason"),
     ("refund", False, "order,user,item,timestamp", "order,refund_date"),
     ("cancelled_orders", True, "order,user,item,timestamp", "order,sku,reason"),
     ("orders annulés", False, "order,user,item,timestamp", "order,refund_date"),
     ("cancelled", False, "order,user,item,timestamp,qty", "order,sku,qty"),
     ("refunds", False, "order,user,item,timestamp", "order,status"),
     ("rma", True, "user,item,timestamp,qty", "user,item,reason,Datum")],
)  # fmt: skip
def test_the_advice_for_orders_and_returns_in_one_folder_reads_both(
    shop, raw, follow, name, with_items, head, returned
):
    (folder := raw / "shop").mkdir()
    day = dict.fromkeys(("refunded_at", "refund_date", "Datum"), "2025-04-05")
    rows = [
        {"user": f"u{n % 20}", "item": f"p{n % 179}", "sku": f"p{n % 179}", "order": f"R{n}",
         "timestamp": f"2025-02-{1 + n % 28:02}", "qty": 1, "reason": "big", "status": "no", **day}
        for n in range(180)
    ]  # fmt: skip
    orders = table(head, [[row[n] for n in head.split(",")] for row in rows])
    back = table(returned, [[row[n] for n in returned.split(",")] for row in rows[3::20]])
    (folder / f"{name}.csv").write_text(back)
    (folder / "orders.csv").write_text(orders)
    read = partial(shop, orders, file="shop/orders.csv")
    if with_items:
        (folder / "products.csv").write_text(table("sku,name", [("p1", "T"), ("p2", "T")]))
        read = partial(find_tables, str(folder))
    kind = "cancelled orders" if "nul" in name or "cel" in name else "returns"
    with pytest.raises(DataError, match=f"has {kind} of what orders.csv has") as refused:
        read()
    if "status" in returned or (kind != "returns" and "qty" in returned):
        assert "'qty_returned' of orders.csv" in str(refused.value)
        return
    path, *items = shlex.split(follow(str(refused.value).partition("name no items: ")[2]))
    assert items == ["--items", str(folder / "products.csv")] * with_items
    found = shop(Path(path).read_text())
    rule = "negative_events" if kind == "returns" else "rows_of_cancelled_orders"
    assert found.counts[f"{rule}_dropped"] == 9
    assert found.data.interactions.item.size == 171
    assert not {f"p{n}" for n in range(3, 180, 20)} & {*sum(found.histories.values(), [])}  # noqa: RUF017


@pytest.mark.parametrize(
    ("names", "key"),
    [(("orders.csv", "order_items.csv"), "order_id"), (("a.csv", "b.csv"), "order_id"),
     (("orders.csv", "order_items.csv"), "id,order_id"), (("b.csv", "positionen.csv"), "Id")],
)  # fmt: skip
@pytest.mark.parametrize("with_items", [False, True])
def test_orders_and_their_lines_in_one_folder_are_joined(shop, raw, follow, names, key, with_items):
    """Two of the 180 lines are of no order, one of them without a number, as one order is."""
    (raw / "shop").mkdir()
    for name in names:
        (raw / "shop" / name).touch()
    others = [500] * key.count(",")  # in front of the number of the order
    rows = [(*others, n, f"c{n % 20}", T + 5000 * n) for n in range(90)]
    rows += [(*others, "", "nobody", T)]
    lines = [(n, "" if n == 0 else n // 2 + 7 * (n > 178), f"p{n * 7 % 11}", 2) for n in range(180)]
    (raw / "shop" / names[0]).write_text(table(f"{key},customer,created_at", rows))
    (raw / "shop" / names[1]).write_text(table("line_id,order_id,sku,quantity", lines))
    if with_items:
        (raw / "shop/products.csv").write_text(
            table("sku,name", [(f"p{n}", "T") for n in range(11)])
        )
    if names[0] == "orders.csv":
        with pytest.raises(DataError, match="has lines of orders") as refused:
            find_tables(str(raw / "shop"))
    elif with_items:
        return
    else:
        text = (raw / "shop" / names[0]).read_text()
        with pytest.raises(DataError, match="has lines of orders") as refused:
            shop(text, file=f"shop/{names[0]}")
    command = str(refused.value).partition("joins them: ")[2].partition(" (lines")[0]
    joined, *items = shlex.split(follow(command))
    assert items == ["--items", str(raw / "shop/products.csv")] * with_items
    found = shop(Path(joined).read_text())
    assert found.data.interactions.item.size == 178
    assert found.counts["rows_with_unreadable_times_dropped"] == 1
    assert found.counts["rows_without_user_or_item_dropped"] == 1
    assert found.histories.keys() == {f"c{n}" for n in range(20)}


REPEATED_LINES = {
    "a purchase in two files": (["Q1,z,s3,05,1,a"], ["Q1,z,s3,05,1,a"], 1, 1),
    "two equal lines in two files": (["Q1,z,s3,05,1,a"] * 2, ["Q1,z,s3,05,1,a"] * 2, 2, 2),
    "a line for each payment": (["Q1,z,s3,05,1,a", "Q1,z,s3,05,1,b"], [], 1, 1),
    "a line in two orders": (["Q1,z,s3,05,1,a", "Q2,z,s3,05,1,a"], [], 2, 0),
    "two equal returns": (["Q1,z,s3,05,2,a", "R1,z,s3,09,-1,a"], [], 1, 0),
    "two equal lines": (["Q1,z,s3,05,1,a"] * 2, [], 2, 0),
}  # fmt: skip


@pytest.mark.parametrize("kind", REPEATED_LINES)
@pytest.mark.parametrize("is_night", [False, True])
def test_pieces_are_added_where_whole_rows_of_one_file_are_equal(shop, raw, kind, is_night):
    """By hand: z buys s3, and returns one piece of it, in the first file or in both."""
    first, second, pieces, dropped = REPEATED_LINES[kind]
    back = "R1,z,s3,09,-1,a"
    head = "order,customer,sku,date,qty,payment"
    usual = [f"O{n},c{n % 20},s{n * 7 % 11},0{1 + n % 4},1,a" for n in range(100)]
    files = {"b": [*first, back], "c": [*second, back] if second else []}
    rows = {"a": usual, **files}
    for name, lines in rows.items():
        month = "02" if name == "a" else "03"
        lines = [re.sub(r",(\d\d),", rf",2024-{month}-\1,", line) for line in lines]
        rows[name] = "\n".join([head, *lines]) + "\n" if lines else ""
    folder = raw / "parts"
    folder.mkdir()
    for name in "bc":
        (folder / f"{name}.csv").write_text(rows[name]) if rows[name] else None
    if not is_night:
        found = shop(rows["a"], file="parts/a.csv")
        assert found.counts.get("pieces_of_equal_rows_dropped", 0) == dropped + bool(second)
        data = found.data
    else:
        before = shop(rows["a"])
        schema, mapping = before.data.items.schema, before.info["cleaning"]["mapping"]
        form = (Workspace.of("t"), schema.remove_metadata(), mapping)
        new, items = _read_files(folder, None, {}, *form)
        (raw / "new").mkdir()
        growth.write(raw / "new", new, items, growth.Erased.of(before.data, []))
        data = growth.grow(before.data, raw / "new", Rules(), mapping=mapping).dataset
    assert ("z" in data.interactions.user_ids) == (pieces > 1)
    if pieces == 1:
        assert [row["stands"] for row in data.disliked.table.to_pylist()] == [True]


def day(n: int) -> str:
    return f"2024-03-{1 + n:02}"


@pytest.mark.parametrize("bought", [1, 2])
def test_a_partial_return_of_all_pieces_returns_the_purchase(shop, bought):
    usual = [(f"u{n % 20}", f"p{n * 7 % 11}", T + 5000 * n, "sale", 1) for n in range(120)]
    rows = [("z", "p1", T, "sale", bought), ("z", "p1", T + 90_000, "partial_return", 1)]
    found = shop(table("user,item,timestamp,type,quantity", [*usual, *rows]))
    assert ("z" in found.histories) == (bought == 2)


NO_RETURNS = [
    ("return_policy", "30 days"), ("returning_customer", "yes"), ("Stornierbar", "ja"),
    ("rückgabefähig", "ja"), ("refundable", "yes"), ("Retourenmenge", "0"), ("cancelled", "no"),
]  # fmt: skip


@pytest.mark.parametrize(("column", "value"), NO_RETURNS)
def test_what_may_be_taken_back_was_not(shop, column, value):
    found = shop(events(180, lambda n: value, head=f"user,item,timestamp,{column}"))
    assert found.data.interactions.item.size == 180
    assert "That is not read" not in found.notes


NOT_MADE = [
    "return rejected", "return_requested", "Refund declined", "return cancelled",
    "Retoure abgelehnt", "Rückgabe angefragt", "devolución rechazada",
]  # fmt: skip


@pytest.mark.parametrize("column", ["type", "event"])
def test_returns_that_were_not_made_are_no_events(shop, column):
    kinds = lambda n: {1: NOT_MADE[n // 18 % 7], 2: "return"}.get(n % 18, "sale")  # noqa: E731
    found = shop(events(180, kinds, head=f"user,item,timestamp,{column}"))
    assert found.counts["rows_of_cancelled_orders_dropped"] == 10
    assert found.counts["negative_events_dropped"] == 10
    assert found.data.behaviours == ()
    for kind in NOT_MADE:
        assert kind not in found.notes
        assert sign_of(kind.lower(), NOT_HISTORY) is Sign.LEFT_OUT


@pytest.mark.parametrize(
    ("column", "usual", "back", "rule"),
    [("Status", "Delivered", "Not delivered - returned", "negative_events"),
     ("Fulfilment", "shipped", "not shipped - customer cancelled", "rows_of_cancelled_orders"),
     ("Return Status", "", "Return completed", "negative_events"),
     ("Return Status", "none", "returned", "negative_events"),
     ("refund_state", "", "refunded", "negative_events")],
)  # fmt: skip
def test_states_that_are_read_are_not_said_to_be_unread(shop, column, usual, back, rule):
    text = events(180, lambda n: usual if n % 9 else back, head=f"user,item,timestamp,{column}")
    found = shop(text)
    assert found.counts[f"{rule}_dropped"] == 20
    assert "That is not read" not in found.notes


RETURNS = {
    **dict.fromkeys(DATES_OF_RETURNS, "05.04.2026"), "Retourenmenge": "2", "Stornogrund": "zu spät",
    "Menge retourniert": "2", "Quantité remboursée": "2", "product_quantity_refunded": "2",
}  # fmt: skip
NEW_COLUMNS = [
    ("rating", ("1", "5"), "rating"), ("Bewertung", ("1", "N/A"), "rating"),
    ("liked", ("true", "false"), "rating"), ("Menge", ("-1,00", "5,00"), "quantity"),
    ("Qty", ("1", "-1 pcs"), "quantity"), ("Status", ("Wysłane", "Zwrot"), "order_status"),
    ("Typ", ("Verkauf", "Retoure"), "behaviour"), ("accepted", ("yes", "no"), "taken_back"),
    *((column, ("", value), "taken_back") for column, value in RETURNS.items()),
]  # fmt: skip


@pytest.mark.parametrize(("column", "values", "role"), NEW_COLUMNS)
def test_a_new_column_of_what_is_negative_is_refused_at_night(tmp_path, column, values, role):
    rows = [[f"u{n}", f"p{n % 3}", str(T + n), values[n % 2]] for n in range(60)]
    columns = ["user", "item", "timestamp", column]
    new = pa.table(list(map(pa.array, zip(*rows, strict=True))), columns)
    new = Sample(tmp_path / f"{'returns' if column == 'accepted' else 'new'}.csv", new)
    roles = mapped(new, {}, {name: name for name in columns[:3]}, of_items=False)
    rules = TimeRules("auto", "UTC", None, T)
    with pytest.raises(DataError, match=f"'{column}'.*, or go on .*--column {role}=none"):
        check_new_columns(new, {}, roles, [], rules)
    check_new_columns(new, {role: "none"}, roles, [], rules)
    if column in RETURNS:
        check_new_columns(new, {}, roles, [column], rules)


# Numbers of pieces


FORMS_OF_PIECES = {
    "1.200": 1200, "1,200": 1200, "1.000,00": 1000, "1,000.00": 1000, "1 200": 1200,
    "1\u202f200,5": 1200.5, "1'200": 1200, "-1.000,00": -1000, "1.000-": -1000, "(1,000)": -1000,
    "\u22121": -1, "-0,5": -0.5,
    "2 Stk": 2, "-1 Stk": -1, "2x": 2, "2,5 kg": 2.5, "-3 szt.": -3, "3 confezioni": 3,
    "minus 1": -1, "0": 0, "+4": 4, "viele": None, "5-10": None, "12 of 30": None, "": None,
}  # fmt: skip


@pytest.mark.parametrize("text", FORMS_OF_PIECES)
def test_a_number_of_pieces_is_read_whole_or_not_at_all(text):
    (pieces,) = read_pieces(pa.chunked_array([[text]]), ["3"]).to_pylist()
    assert pieces == FORMS_OF_PIECES[text]


@pytest.mark.parametrize(
    ("parts", "pieces", "unclear"),
    [([["1.200"], ["3"]], 1200, 1), ([["1.200"], ["2,5"]], 1200, 0), ([["1.200"], ["2.5"]], 1.2, 0),
     ([["1.200"], ["1.000,00"]], 1200, 0), ([["1,200"], ["3", "0,500"]], 1.2, 0),
     ([["1,200"], ["2,000", "1,000"]], 1.2, 3)],
)  # fmt: skip
def test_all_parts_show_what_a_mark_in_pieces_means(shop, raw, parts, pieces, unclear):
    columns = [pa.chunked_array([part]) for part in parts]
    shown = forms_of_pieces(columns)
    assert read_pieces(columns[0], shown).to_pylist() == [pytest.approx(pieces)]
    (raw / "parts").mkdir()
    for name, part in zip("ab", parts, strict=True):
        rows = [(f"u{n % 20}", f"p{n * 7 % 11}", T + 5000 * n + ord(name), part[n % len(part)])
                for n in range(60)]  # fmt: skip
        text = table("user;item;timestamp;Menge", rows, ";")
        (raw / f"parts/{name}.csv").write_text(text)
    found = shop(text, file="parts/b.csv")
    assert found.counts.get("pieces_of_three_digits", 0) == (0, 60, 0, 120)[unclear]
    assert found.info["cleaning"]["mapping"]["pieces"] == shown


@pytest.mark.parametrize(
    ("others", "bad"),
    [(("1.000,00", "2,00", "5,00"), 0), (("2 Stk", "1 Stk", "3 Stk"), 0), (("2x", "3x", "1x"), 0),
     (("1 200", "3", "10"), 0), (("3", "N/A", "2"), 60), (("2,5 kg", "3 kg", "1 kg"), 0),
     (("viele", "wenige", "1"), 120)],
)  # fmt: skip
def test_a_return_is_one_whatever_the_other_quantities_are(shop, others, bad):
    unit = others[0].rpartition(" ")[2] if others[0][-1].isalpha() and " " in others[0] else ""
    rows = [(f"u{n % 20}", f"p{n * 7 % 11}", T + 5000 * n, others[n % 3]) for n in range(180)] + [
        (f"u{n}", f"p{n * 7 % 11}", T + 5000 * (n + 180), f"-9.000 {unit}") for n in range(9)
    ]
    found = shop(table("user;item;timestamp;Menge", rows, ";"))
    assert found.counts["negative_events_dropped"] == 9
    assert found.counts.get("quantities_unreadable", 0) == bad


def test_lines_of_no_pieces_are_no_purchases(shop):
    found = shop(events(180, lambda n: n % 6, head="user,item,timestamp,quantity"))
    assert found.counts["rows_of_cancelled_orders_dropped"] == 30
    assert found.data.interactions.item.size == 150


def test_views_without_pieces_and_returned_lines_of_none_are_kept(shop):
    text = events(
        180, lambda n: ("view", "purchase")[n % 2], lambda n: n % 2,
        head="user,item,timestamp,event,quantity",
    )  # fmt: skip
    assert "rows_of_cancelled_orders_dropped" not in shop(text).counts
    text = events(
        180, lambda n: ("no", "yes")[n % 9 == 0], lambda n: int(n % 9 > 0),
        head="user,item,timestamp,returned,quantity",
    )  # fmt: skip
    found = shop(text)
    assert "rows_of_cancelled_orders_dropped" not in found.counts
    assert found.counts["negative_events_dropped"] == 20


def test_the_note_on_an_unknown_type_agrees_with_its_role(shop):
    names = ("banner", "bundle", "view")
    found = shop(events(180, lambda n: names[n % 3], head="user,item,timestamp,event"))
    types = {row["name"]: row["role"] for row in found.info["cleaning"]["behaviours"]}
    for name in ("banner", "bundle"):
        assert f"{name!r} has no usual name and is taken as {types[name]}" in found.notes


@pytest.mark.parametrize(
    "scale",
    [(1, 2, 3, 4, 5), range(1, 11), [n / 2 for n in range(1, 11)], (0, 25, 50, 75, 100), (1, 0)],
    ids=str,
)
def test_uniform_ratings_are_ordinary(shop, scale):
    values = list(scale)
    text = events(200, lambda n: values[n * 3 % len(values)], head="user,item,timestamp,rating")
    found = shop(text)
    low = found.counts["low_ratings_dropped"]
    assert found.data.interactions.item.size + low + found.counts.get(
        "events_before_negative_dropped", 0
    ) == 200  # fmt: skip


@pytest.mark.parametrize(
    ("nothing", "column", "values"),
    [("N/A", "rating", ("5.0", "1.0", "4.5", "3")),
     ("?", "Bewertung", ("4/5", "1/5", "5/5", "3/5")),
     ("unknown", "stars", ("★★★★☆", "★☆☆☆☆", "★★★★★", "★★★☆☆")),
     ("-", "liked", ("yes", "no", "yes", "yes")), ("?", "vote", ("1", "-1", "1", "1")),
     ("", "Gefällt", ("ja", "nein", "ja", "ja")), ("n.a.", "score", ("5", "1", "4", "3"))],
)  # fmt: skip
def test_a_rating_that_cannot_be_read_costs_one_rating(shop, nothing, column, values):
    value = lambda n: nothing if n % 5 == 4 else values[n % 4]  # noqa: E731
    found = shop(events(180, value, head=f"user,item,timestamp,{column}"))
    low = sum(n % 5 != 4 and n % 4 == 1 for n in range(180))
    assert found.counts["low_ratings_dropped"] == low
    assert found.counts.get("ratings_unreadable", 0) == 36 * bool(nothing)


def test_a_third_of_words_among_ratings_are_counted(shop):
    value = lambda n: ("awful", 1, 5, 4, 3)[n // 2 % 4 + 1 if n % 2 else 0]  # noqa: E731
    found = shop(events(180, value, head="user,item,timestamp,rating"))
    assert found.counts["ratings_unreadable"] == 90
    assert found.counts["low_ratings_dropped"] == 23


@pytest.mark.parametrize("high", [10, 8, 100])
def test_counts_of_which_nearly_all_would_vanish_still_stop(shop, high):
    counts = [1] * 29 + [2, high // 2, high]
    text = events(192, lambda n: counts[n % 32], head="user,item,timestamp,rating")
    with pytest.raises(DataError, match=r"would be removed.*data\.clean\.negative_rating"):
        shop(text)


@pytest.mark.parametrize(
    ("own", "others", "right"),
    [
        (["1.250", "2.500", "3.125"], ["0.250", "0.990"], [1.25, 2.5, 3.125]),
        (["1.250", "2.500", "3.125"], ["12.5", "7.75"], [1.25, 2.5, 3.125]),
        (["1.250", "2.500", "3.125"], ["12,50", "7,75"], [1250, 2500, 3125]),
        (["1,250", "2,500", "3,125"], ["0,25", "0,99"], [1.25, 2.5, 3.125]),
        (["1,250", "2,500", "3,125"], ["0.25", "0.99"], [1250, 2500, 3125]),
    ],
)
def test_the_prices_of_events_show_the_notation_of_the_items(shop, own, others, right):
    items = table("item;title;price", [(f"p{n}", f"T{n}", own[n % 3]) for n in range(11)], ";")
    rows = [(f"u{n % 20}", f"p{n * 7 % 11}", T + 5000 * n, others[n % 2]) for n in range(120)]
    found = shop(table("user;item;timestamp;price", rows, ";"), items)
    assert found.values("price")[:3] == right
    assert "prices_of_thousands" not in found.counts


def test_another_column_of_the_items_shows_the_notation(shop):
    items = table("item,title,price,list_price", [(f"p{n}", "T", f"{n}.250", f"{n}.5")
                                                  for n in range(1, 12)])  # fmt: skip
    assert shop(items=items).values("price")[:2] == [1.25, 2.25]


def test_prices_that_contradict_each_other_are_counted(shop):
    items = table("item;title;price", [(f"p{n}", "T", f"{n + 1}.250") for n in range(11)], ";")
    rows = [(f"u{n % 20}", f"p{n * 7 % 11}", T + n, ("0.25", "0,25")[n % 2]) for n in range(99)]
    found = shop(table("user;item;timestamp;price", rows, ";"), items)
    assert found.counts["prices_of_thousands"] == 11


@pytest.mark.parametrize(
    ("prices", "right", "guessed"),
    [(["1.299", "12.99", "8.50", "19.90"], [1299, 12.99, 8.5, 19.9], 1),
     (["1.299", "1,299", "1299", "12.99"], [1299, 1299, 1299, 12.99], 1),
     (["2,499", "12,99", "8,50", "19,90"], [2499, 12.99, 8.5, 19.9], 1),
     (["1.299", "1.349", "1.459", "12.99"], [1.299, 1.349, 1.459, 12.99], 0),
     (["1.299", "12.9", "8.5", "19.90"], [1.299, 12.9, 8.5, 19.9], 0),
     (["12€50", "3 € 05", "1.299€00", "9€"], [12.5, 3.05, 1299, 9], 0),
     (["€12", "EUR 3", "R$50", "9€90"], [12, 3, 50, 9.9], 0)],
)  # fmt: skip
def test_a_price_without_cents_among_prices_with_cents_is_a_thousand(shop, prices, right, guessed):
    items = table(
        "item;title;price", [(f"p{n}", "T", price) for n, price in enumerate(prices)], ";"
    )
    found = shop(items=items)
    assert found.values("price") == right
    assert found.counts.get("prices_of_thousands", 0) == guessed


@pytest.mark.parametrize(
    ("prices", "converted"),
    [(["1.299", "12.50", "3", "4.5"], 0), (["1,5", "12,50", "3", "4,50 €"], 3), (["1.5", "$2"], 1)],
)
def test_only_prices_in_another_notation_are_reported(shop, prices, converted):
    items = table("item;title;price", [(f"p{n}", "T", p) for n, p in enumerate(prices)], ";")
    assert shop(items=items).counts.get("prices_read", 0) == converted


# Lines that are no products, in a small catalogue


LINES = [
    "Frais de port", "Spedizione", "Versand", "Portes de envío", "Verzendkosten",
    "Koszty wysyłki", "Frete", "Gastos de envío", "Spese di spedizione", "Vorverkaufsgebühr",
    "Anfahrtspauschale", "Rundungsdifferenz", "Aufpreis", "Przesyłka kurierska InPost",
]  # fmt: skip


@pytest.mark.parametrize("head", ["user,item,timestamp", "client,produit,date"])
def test_lines_of_shipping_are_no_items_of_a_small_catalogue(shop, head):
    item = lambda n: LINES[n // 11 % 14] if n % 11 == 5 else f"Thé {'ABCDEFG'[n % 7]}"  # noqa: E731
    found = shop(bought(item, head))
    assert found.data.item_ids.size == 7
    assert found.counts["rows_of_no_products_dropped"] == 16


@pytest.mark.parametrize(
    ("column", "kind"),
    [("Positionstyp", "Versandposition"), ("line_type", "shipping"), ("Row Type", "Modifier")],
)
def test_the_kind_of_a_line_says_that_it_is_no_product(shop, column, kind):
    rows = [
        (n // 3, f"u{n // 3 % 20}", "DHL" if n % 3 == 2 else f"p{n * 7 % 13}",
         kind if n % 3 == 2 else "Artikel", T + n // 3 * 9999) for n in range(270)
    ]  # fmt: skip
    found = shop(table(f"order_id,user,item,{column},timestamp", rows))
    assert found.counts["rows_of_no_products_dropped"] == 90
    assert "'DHL'" in found.notes
    kept = shop(
        table(f"order_id,user,item,{column},timestamp", rows), clean={"drop_items": ["none"]}
    )
    assert "DHL" in kept.data.item_ids
    one = shop(
        table(f"order_id,user,item,{column},timestamp", rows), clean={"drop_items": ["!DHL"]}
    )
    assert "DHL" in one.data.item_ids


@pytest.mark.parametrize(
    "line",
    ["Gift card", "Carte cadeau", "Porto", "Tarjeta regalo", "Bag fee", "Taxa de entrega", "VAT",
     "Service charge", "Gift wrap", "Gutschein", "Loyalty points", "Extended warranty",
     "Extended warranty 2 years", "Customs duty", "Installation", "Pick & Pack",
     "HONORAIRE DE DISPENSATION", "Paczkomat InPost", "Mondial Relay", "Droits de douane",
     "Contribution DEEE", "Route package protection", "Carbon neutral order", "Plastic bag levy",
     "Tragetasche", "Anzahlung 30%", "Zuzahlung", "Diverses", "Priority processing", "Wrapping",
     "Warranty extension 2 years", "Gift message", "Please leave at the door", "Packaging"],
)  # fmt: skip
def test_a_line_that_may_be_a_product_is_kept_with_a_word(shop, line):
    assert says(line) == "weak"
    if line not in ("Gift card", "Tarjeta regalo", "Anzahlung 30%", "Packaging"):
        return
    text = bought(lambda n: line if n % 11 == 5 else f"Tea {'ABCDEFGHIJKLM'[n * 7 % 13]}")
    found = shop(text)
    assert (line in found.data.item_ids) == (f'drop_items=["{line}"]' in found.notes)
    assert repr(line) in found.notes


FEES = ["Booking fee", "Processing Fee", "Resort fee", "Credit card fee", "Small order fee",
        "Setup fee", "Cleaning fee", "Sales tax", "City tax", "Expressgebühr", "Frakt",
        "DHL Paket", "Kurier DPD", "Éco-participation", "Free sample", "Carrier bag fee",
        "Ortstaxe", "Taxe de séjour", "Tax"]  # fmt: skip


def orders_with(
    line: Callable[[int], tuple[object, ...]], share: float = 0.4, kinds: str = ""
) -> str:
    """Orders of three lines of 40 items, of which a share ends with another line."""
    head = f"order_no,customer,sku,item_name,qty,price,ordered_at{kinds and ',type'}"
    rows = []
    for n in range(180):
        own = (f"P{n * 7 % 40:03}", f"Tea {'ABCDEFGH'[n % 8]}{n * 7 % 40}", 1, "9.99", kinds)
        rows.append((n // 3, own))
        if n % 3 == 2 and n // 3 % 10 < 10 * share:
            rows.append((n // 3, line(n // 3)))
    made = []
    for order, (*own, kind) in rows:
        when = f"2026-01-{1 + order % 28:02} 10:{order % 60:02}"
        made.append((order, f"u{order % 30}", *own, when, *[kind] * bool(kinds)))
    return table(head, made)


@pytest.mark.parametrize("line", FEES)
def test_a_fee_in_many_orders_is_asked_about_or_left_out_with_a_word(shop, line):
    text = orders_with(lambda n: ("X9001", line, 1, "2.50", ""))
    if says(line) in ("sure", "weak"):
        assert "'X9001' (24 rows" in shop(text).notes
        return
    with pytest.raises(DataError, match=rf"'X9001' \({line}\) is in .*may be no product"):
        shop(text)
    if line == "Booking fee":
        assert "X9001" not in shop(text, clean={"drop_items": ["X9001"]}).data.item_ids


@pytest.mark.parametrize("product", ["Feeder", "Taxi toy"])
def test_products_in_many_orders_are_not_asked_about(shop, product):
    assert "X9001" in shop(orders_with(lambda n: ("X9001", product, 1, "2.50", ""))).data.item_ids


@pytest.mark.parametrize(
    ("sku", "line"),
    [("SUMMER24", "Coupon"), ("{}", "Gutschein"), ("", "Voucher"), ("R10", "Remise 10"),
     ("1", "Store credit"), ("", "Manual price adjustment"), ("{}", "SOMMER24")],
)  # fmt: skip
def test_an_item_whose_lines_are_all_below_0_is_no_product(shop, raw, line, sku):
    text = orders_with(lambda n: (sku.format(line), line, 1, ("-5.00", "-2.50")[n % 2], ""), 0.1)
    found = shop(text)
    assert found.counts["rows_of_no_products_dropped"] == 6
    assert found.data.item_ids.size == 40
    assert (sku.format(line) or line) in found.notes
    assert "is below 0" not in found.notes
    other = orders_with(lambda n: ("NEW24", "Herbst", 1, "-5.00", ""), 0.1)
    assert {*of_the_night(found, raw, other)["item"].to_pylist()} == {*found.data.item_ids}
    kept = shop(text, clean={"drop_items": [f"!{sku.format(line) or line}"]})
    assert kept.data.item_ids.size == 41


def test_a_refunded_product_stays_one(shop):
    text = orders_with(lambda n: (f"P{n * 7 % 40:03}", "Tea", 1, "-9.99", ""), 0.1)
    found = shop(text, columns={"taken_back": "price"})
    assert "rows_of_no_products_dropped" not in found.counts


@pytest.mark.parametrize(
    ("qty", "kind", "price"),
    [(1, "promotion", "-5.00"), (-1, "promotion", "0.00"), (-1, "credit", 5)],
)
def test_kinds_of_lines_of_shopware_are_no_products(shop, qty, kind, price):
    found = shop(orders_with(lambda n: ("SOMMER24", "x", qty, price, kind), 0.7, "product"))
    assert found.counts["rows_of_no_products_dropped"] == 42
    assert found.data.item_ids.size == 40
    assert "negative_events_dropped" not in found.counts


@pytest.mark.parametrize(
    "form",
    ['["{}"]', "['{}']", "[{}]", "{{{}}}", '{{"{}"}}', "('{}')", "{{'{}'}}", "({})", "[{}|"],
)
@pytest.mark.parametrize("single", [True, False])
def test_a_list_in_a_cell_is_several_items(shop, form, single):
    column = "sku" if not single else "items" if "[" in form else "product_ids"
    form, mark = (form[:-1] + "]", "|") if form[-1] == "|" else (form, ", ")
    quote = form.format("")[1] if form.format("")[1] in "\"'" else ""
    baskets = [[f"p{(n + k) % 11}" for k in range(1 + n % 3)] for n in range(180)]
    cells = [
        basket[0]
        if single and len(basket) == 1
        else form.format(f"{quote}{mark}{quote}".join(basket))
        for basket in baskets
    ]
    found = shop(bought(cells.__getitem__, f"user\t{column}\ttimestamp", "\t"))
    assert sorted(found.data.item_ids) == sorted(f"p{n}" for n in range(11))
    assert found.data.interactions.item.size == 360
    assert found.counts["rows_with_several_items_split"] == 120


@pytest.mark.parametrize("form", ["{{0A{}-4000}}", "[a{}]", "(a{})", "{{a{}}}", "(oak {})"])
@pytest.mark.parametrize(("column", "share"), [("item", 0.3), ("items", 1)])
def test_an_id_in_brackets_keeps_them(shop, form, column, share):
    ids = [form.format(n) if n < 11 * share else f"b{n}" for n in range(11)]
    found = shop(bought(lambda n: ids[n * 7 % 11], f"user\t{column}\ttimestamp", "\t"))
    assert {*found.data.item_ids} == {*ids}


@pytest.mark.parametrize("share", [0.5, 0.05])
def test_arrays_of_numpy_and_lists_in_few_rows(shop, share):
    rows = [(f"u{n % 20}", f"['p{n % 11}' 'p{(n + 1) % 11}']" if n < 180 * share else f"p{n % 11}",
             T + 5000 * n) for n in range(180)]  # fmt: skip
    found = shop(table("user;sku;timestamp", rows, ";"))
    assert found.data.interactions.item.size == 180 + 180 * share
    assert len(found.data.item_ids) == 11


@pytest.mark.parametrize("mark", [" und ", " and ", " & ", " / ", ", ", "<br>", "<br />"])
def test_titles_of_baskets_are_divided_under_a_plural_and_else_asked_about(shop, mark):
    cells = [
        mark.join(f"Tee {'ABCDEFG'[(n + k) % 7]}" for k in range(1 + n % 3)) for n in range(90)
    ]
    found = shop(bought(cells.__getitem__, "user;products;timestamp", ";", 90))
    assert (found.data.interactions.item.size, len(found.data.item_ids)) == (180, 7)
    with pytest.raises(DataError, match="look like several items"):
        shop(bought(cells.__getitem__, "user;product;timestamp", ";", 90))


@pytest.mark.parametrize("mark", ["|", " | ", "<br>", "<br/>", "#", ", "])
def test_titles_of_two_kinds_in_the_cells_of_a_plural_are_asked_about(shop, mark):
    cells = [f"Red Shoe {n % 5}{mark}Blue Hat {n % 7}" if n % 3 else "Red Tie" for n in range(90)]
    text = table("user;products;timestamp", [(f"u{n % 20}", cells[n], T + n) for n in range(90)],
                 ";")  # fmt: skip
    if mark in ("#", ", "):
        assert shop(text).data.interactions.item.size == 90
        return
    with pytest.raises(DataError, match="look like several items"):
        shop(text)


def test_a_comma_between_items_divides_no_numbers(shop):
    rows = [(f"u{n % 20}", f"P{n % 11},P{n % 11 + 1}", f"['Tea {n % 11}','Tea {n % 11 + 1}']",
             f"{1 + n % 7},50", "2,0", T + 5000 * n) for n in range(180)]  # fmt: skip
    text = table("user;sku;title;price;qty;date", rows, ";")
    found = shop(text, clean={"item_separator": ","}, columns={"title": "title"})
    assert found.data.interactions.item.size == 360
    assert {price % 1 for price in found.values("price")} == {0.5}
    assert sorted(found.values("title")) == sorted(f"Tea {n}" for n in range(12))


def test_projects_and_players_are_no_items_and_users_beside_others(shop):
    rows = [(f"u{n % 20}@x.de", n % 9, f"Tea {n * 7 % 11}", T + 5000 * n) for n in range(180)]
    assert shop(table("user,Projekt,Bezeichnung,date", rows)).roles["item"] == "Bezeichnung"
    assert shop(table("email,player,sku,date", rows)).roles["user"] == "email"


@pytest.mark.parametrize("several", [2, 30])
@pytest.mark.parametrize("column", ["items", "Product name", "sku"])
def test_items_on_lines_of_a_cell_are_divided_with_their_prices(shop, several, column):
    rows = []
    for n in range(180):
        items = [n + k for k in range(1 + 2 * (n % several == 0))]
        cells = ["\n".join(form.format(i * 7 % 11) for i in items) for form in ("Tea {}", "{}.5")]
        rows.append((f"u{n % 20}", *(f'"{cell}"' for cell in cells), T + 5000 * n))
    text, form = table(f"user,{column},price,date", rows), {"item_separator": "\n"}
    if column != "items":
        with pytest.raises(DataError, match="look like several items") as asked:
            shop(text)
        assert 'data.clean.item_separator="\\n"' in str(asked.value)
        assert shop(text, clean={"item_separator": "none"}).data.interactions.item.size == 180
    found = shop(text, clean=form if column != "items" else {})
    prices = dict(zip(found.values("title"), found.values("price"), strict=True))
    assert prices == {f"Tea {n}": n + 0.5 for n in range(11)}


def test_titles_with_commas_in_a_list_stay_whole(shop):
    titles = ["Tisch, rund", "Stuhl; grün", 'Brett 12"', "L'eau", "Bank"]
    cells = [json.dumps([titles[(n + k) % 5] for k in range(1 + n % 3)]) for n in range(180)]
    found = shop(bought(cells.__getitem__, "user\titems\ttimestamp", "\t"))
    assert {*found.data.item_ids} == {*titles}


@pytest.mark.parametrize(
    "cell", ['[{{"sku": "{}", "qty": 1}}]', "{{'sku': '{}'}}", '[["{}", 2]]', "{{sku={}}}"]
)
def test_records_in_cells_are_refused_with_a_command_that_works(raw, shop, follow, cell):
    text = bought(lambda n: cell.format(f"p{n % 11}"), "user\titems\ttimestamp", "\t")
    with pytest.raises(DataError, match=r"'items' hold records .*one row for each item") as refused:
        shop(text)
    if '"sku"' in cell or "'sku'" in cell:
        again = follow(str(refused.value).partition("are read: ")[2])
        found = shop((raw / "events-lines.jsonl").read_text(), file=again.rpartition("/")[2])
        assert {*found.data.item_ids} == {f"p{n}" for n in range(11)}


@pytest.mark.parametrize("mark", [",", ";", "|", " + ", " & ", " / ", "&", "/", "+", " "])
def test_codes_in_one_cell_are_asked_about(shop, mark):
    cells = [mark.join(f"P{(n + k) % 11}" for k in range(1 + n % 3)) for n in range(180)]
    text = bought(cells.__getitem__, "user\tsku\ttimestamp", "\t")
    with pytest.raises(DataError, match="'sku' look like several items") as refused:
        shop(text)
    assert f"'data.clean.item_separator=\"{mark}\"'" in str(refused.value)
    assert shop(text, clean={"item_separator": mark}).data.interactions.item.size == 360
    if mark not in (",", " "):
        return
    for n in (0, 9):  # also where few cells have several
        few = [cells[k] if k % 10 == n else f"P{k % 11}" for k in range(180)]
        with pytest.raises(DataError, match="look like several items"):
            shop(bought(few.__getitem__, "user\tsku\ttimestamp", "\t"))
    assert shop(text, clean={"item_separator": "none"}).data.interactions.item.size == 180


@pytest.mark.parametrize(
    "cell",
    [
        "Tisch, rund",
        "SHIRT,RED,42",
        "iPad 5 + Pencil",
        "Stuhl + Bank",
        "Stuhl & Bank",
        "Stuhl und Bank",
        "AB/12 R2",
        "2x Tee",
    ],
)
def test_a_mark_in_the_name_of_one_item_divides_nothing(shop, cell):
    names = (cell, "Stuhl", "Bank")
    found = shop(bought(lambda n: names[n % 3], "user;item;timestamp", ";"))
    assert found.data.item_ids.size == 3


@pytest.mark.parametrize(
    ("form", "column", "mark", "some"),
    [("{1}x {0}", "products", "|", False), ("{1} x {0}", "items", ", ", True),
     ("{0} x{1}", "skus", "[]", True), ("{0}*{1}", "products", "|", False),
     ("{1}× {0}", "items", ", ", True), ("{0} ({1})", "items", "[]", True),
     ("{0}:{1}", "items", "|", False), ("{0} (x{1})", "items", ", ", True),
     ("{0} (x{1})", "items", "|", False), ("{0}:{1}", "items", "[]", True)],
)  # fmt: skip
def test_numbers_of_pieces_beside_items_are_left_out_and_counted(shop, form, column, mark, some):
    cells = [
        [form.format(f"P{(n + k) % 11}", k + 1) if k or not some else f"P{n % 11}"
         for k in range(1 + n % 3)] for n in range(180)
    ]  # fmt: skip
    texts = [f"[{', '.join(cell)}]" if mark == "[]" else mark.join(cell) for cell in cells]
    rows = [(f"max{n % 20}", texts[n], T + 5000 * n) for n in range(180)]
    found = shop(table(f"user\t{column}\ttimestamp", rows, "\t"))
    assert {*found.data.item_ids} == {f"P{n}" for n in range(11)}
    assert found.data.interactions.item.size == 360
    assert found.counts["numbers_of_pieces_left_out"] == 360 - 180 * some


def test_numbers_that_are_part_of_ids_stay(shop):
    ids = [f"{shop}:{n}" for shop in ("de", "fr", "it", "es") for n in range(1, 9)]
    text = bought(lambda n: ids[n * 7 % 32], "user,items,timestamp")
    assert len(shop(text).data.item_ids) == 32
    packs = [f"{size}x Batterie {form}" for size in (4, 8) for form in ("AA", "AAA", "C")]
    text = bought(lambda n: packs[n * 5 % 6] if n % 7 else "Lampe")
    assert len(shop(text).data.item_ids) == 7


def test_pieces_below_1_in_a_list_are_refused(shop):
    rows = [(f"u{n % 20}", f"{n % 3 - 1}x P{n % 11}, 1x P{n % 7}", T + n) for n in range(180)]
    with pytest.raises(DataError, match=r"may be a return.*item_separator=none"):
        shop(table("user\tproducts\ttimestamp", rows, "\t"))


@pytest.mark.parametrize(
    ("encoding", "title"),
    [("cp1250", "Żółta piłka {}"), ("cp1250", "Dość żółta {} zł"), ("cp1252", "Größe 5 m³ à {}"),
     ("cp1252", "Fass 10m³x {}"), ("cp1252", "Pumpe 5 m³h {}")],
)  # fmt: skip
def test_titles_in_polish_have_their_letters(shop, encoding, title):
    items = table("item;title", [(f"p{n}", title.format(n)) for n in range(11)], ";")
    found = shop(events(), items.encode(encoding))
    assert found.values("title") == [title.format(n) for n in range(11)]
    assert found.info["cleaning"]["findings"][-1]["examples"] == [f"items.csv: {encoding}"]


def test_an_item_that_says_nothing_is_missing(shop):
    nothing = ["N/A", "null", "None", "-", "NA", "n.a.", "(not set)", "--"]
    items = table("item,title", [*((f"p{n}", f"T{n}") for n in range(11)),
                                 *((name, "Nothing") for name in nothing)])  # fmt: skip
    found = shop(bought(lambda n: nothing[n // 18 % 8] if n % 18 == 5 else f"p{n % 11}"), items)
    assert found.data.item_ids.size == 11
    assert found.counts["rows_without_user_or_item_dropped"] == 10
    assert found.counts["item_rows_without_id_dropped"] == 8


@pytest.mark.parametrize("codes", [("DE", "FR", "NA", "IT"), ("USD", "NA", "EUR", "CHF")])
def test_na_among_short_codes_is_a_code(shop, codes):
    assert "NA" in shop(bought(lambda n: codes[n % 4])).data.item_ids


def test_many_missing_items_stop_without_advice_on_columns_that_do_not_exist(shop):
    with pytest.raises(DataError, match=r"90 of 180 events.* would be removed") as refused:
        shop(bought(lambda n: "N/A" if n % 2 else f"p{n % 11}"))
    assert "=NAME" not in str(refused.value)


def with_bags(n_items: int, head: str = "order_id,user,item,timestamp", kind: str = "") -> str:
    """100 orders of two items and a bag; `kind` is of the bag in a column of kinds of lines."""
    rows = [
        (k // 3, f"u{k // 3 % 20}", "BAG" if k % 3 == 2 else f"p{k * 7 % n_items}",
         T + 9999 * (k // 3), *([kind if k % 3 == 2 else "Artikel"] if kind else []))
        for k in range(300)
    ]  # fmt: skip
    return table(head, rows)


def test_an_unknown_item_in_nearly_every_order_is_asked_about(shop):
    with pytest.raises(DataError) as refused:
        shop(with_bags(31))
    said = str(refused.value)
    assert said.startswith("'BAG' is in 100% of the orders and no items file describes it")
    settings = [part.split("'", 1)[0] for part in said.split("--set 'data.clean.drop_items=")[1:]]
    left, kept = settings
    assert shop(with_bags(31), clean={"drop_items": json.loads(left)}).data.item_ids.size == 31
    assert shop(with_bags(31), clean={"drop_items": json.loads(kept)}).data.item_ids.size == 32


def test_it_is_not_asked_about_in_shops_that_say_what_it_is_or_have_few_items(shop):
    assert "BAG" in shop(with_bags(13)).data.item_ids
    items = table("item,title", [("BAG", "Bag"), *((f"p{n}", f"T {n}") for n in range(31))])
    assert "BAG" in shop(with_bags(31), items).data.item_ids
    head = "order_id,user,item,timestamp,Positionstyp"
    found = shop(with_bags(31, head, "Versandposition"))
    assert found.counts["rows_of_no_products_dropped"] == 100


def test_the_negative_word_of_a_state_decides(shop):
    states = [
        "Shipped - Damaged", "Shipped - Returned to Seller", "Delivered - Lost in Transit",
        "Shipped - Returning to Seller", "Shipped - Rejected by Buyer", "Versendet - beschädigt",
        "Delivered (damaged)", "Livrée, endommagée", "Shipped / Missing", "Zugestellt: verloren",
    ]  # fmt: skip
    usual = ("Shipped - Delivered to Buyer", "Shipped - Picked Up", "Shipped")
    values = lambda n: usual[n % 3] if n % 9 else states[n // 9 % 10]  # noqa: E731
    text = events(180, lambda n: f'"{values(n)}"', head="user,item,timestamp,Status")
    found = shop(text)
    rules = ("rows_of_cancelled_orders_dropped", "negative_events_dropped")
    assert sum(found.counts.get(rule, 0) for rule in rules) == 20
    assert "not read" not in found.notes


@pytest.mark.parametrize(
    "state",
    ["Shipped - Xyz", "Delivered: customs", "Livrée / litige", "Delivered but not accepted",
     "Complete - do not ship", "Delivered; customer unhappy", "Return requested",
     "Return cancelled", "Cancellation requested", "Retoure storniert", "Remboursement demandé",
     "Cancel requested"],
)  # fmt: skip
def test_an_order_in_a_state_with_an_unknown_part_is_kept_and_named(shop, state):
    states = {1: state, 2: "Refunded"}
    head = "user,item,timestamp,Status"
    found = shop(events(180, lambda n: states.get(n % 9, "Shipped"), head=head))
    assert f"has '{state}' in 20 of its first rows" in found.notes
    assert found.counts["negative_events_dropped"] == 20
    assert "rows_of_cancelled_orders_dropped" not in found.counts


def test_kinds_of_lines_that_count_as_items_are_named(shop):
    kinds = ("Line Item", "Shipping Line", "Transaction")
    rows = [(n // 3, f"u{n // 3 % 20}", f"{'pxt'[n % 3]}{n * 7 % 11}", kinds[n % 3], T + n // 3)
            for n in range(270)]  # fmt: skip
    text = table("order_id,user,item,Line: Type,timestamp", rows)
    notes = shop(text).notes
    assert "lines of the kinds 'Line Item', 'Transaction' are of items" in notes
    setting = notes.partition("--set 'data.clean.drop_items=")[2].partition("'")[0]
    found = shop(text, clean={"drop_items": json.loads(setting)})
    assert {item[0] for item in found.data.item_ids.tolist()} == {"p"}


def test_the_sum_of_what_rules_remove_is_bounded(shop, tmp_path):
    """A quarter each is cancelled, returned by a type, and without a time."""
    status = ("paid", "cancelled", "paid", "paid")
    kinds = ("sale", "sale", "return", "sale")
    rows = [
        (f"u{n % 20}", f"p{n * 7 % 11}", "?" if n % 4 == 3 else T + 5000 * n, status[n % 4],
         kinds[n % 4]) for n in range(240)
    ]  # fmt: skip
    text = table("user,item,timestamp,order_status,event", rows)
    with pytest.raises(
        DataError, match="180 of 240 events would be removed by several rules"
    ) as refused:
        shop(text)
    assert "60 rows are of orders that were cancelled" in str(refused.value)
    assert "--set data.clean.skip=cancelled_orders" in str(refused.value)
    assert shop(text, clean={"most_removed": 1}).data.interactions.item.size <= 60


def priced(price: Callable[[int, int], str], head: str = "price", currency: str = "") -> str:
    """Lines of orders with 1 to 3 pieces, and perhaps a currency."""
    lines = [(f"u{n % 20}", f"p{n * 7 % 11}", T + 5000 * n, 1 + n % 3, price(n % 11, 1 + n % 3))
             for n in range(180)]  # fmt: skip
    rows = [(*row, currency.split()[n % 2]) if currency else row for n, row in enumerate(lines)]
    return table(f"customer;sku;date;quantity;{head}", rows, ";")


def test_lines_of_orders_may_be_deeper_in_the_records_of_their_list(shop):
    lines = [{"id": f"O{n}", "customer": {"id": f"c{n % 20}"}, "createdAt": T + 5000 * n,
              "lineItems": {"edges": [{"node": {"sku": f"p{(n + k) % 11}", "quantity": 1}}
                                      for k in range(1 + n % 3)]}} for n in range(90)]  # fmt: skip
    text = "".join(json.dumps(line) + "\n" for line in lines)
    found = shop(text, file="orders.jsonl")
    assert found.roles["item"] == "lineItems.edges.node.sku"
    assert len(found.data.interactions) == 180


def test_numbers_in_lists_of_items_are_texts_too(shop):
    form = '{{"user": "u{}", "order": {{"items": [1.50, {}e2]}}, "timestamp": {}}}\n'
    rows = (form.format(n % 20, n % 9, T + n) for n in range(180))
    found = shop("".join(rows), file="events.jsonl")
    assert {*found.data.item_ids.tolist()} == {"1.50", *(f"{n}e2" for n in range(9))}


@pytest.mark.parametrize(
    ("scale", "unrated"), [((-1, 1, 4, 4.5, 5), 36), ((-1, 1, 8, 9, 10), 36), ((-1, 0, 1, 2, 3), 0)]
)
def test_a_rating_below_its_scale_is_none(shop, raw, scale, unrated):
    text = events(180, lambda n: scale[n % 5], head="user,item,timestamp,rating")
    found = shop(text, clean={"most_removed": 1})
    assert found.counts.get("ratings_of_minus_1", 0) == unrated
    assert found.counts["low_ratings_dropped"] == 36 * (1 + (unrated == 0))
    night = of_the_night(found, raw, text, clean={"most_removed": 1})
    assert pc.min(night["rating"]).as_py() == scale[unrated > 0]
