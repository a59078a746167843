"""Columns, answers and ids of files; what is ambiguous is refused with the flag."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from recsys.data.availability import read_available, share_of_answers
from recsys.data.column_notes import ignored_availability, unread_exclusions
from recsys.data.columns import recognise_events, recognise_items
from recsys.data.ids import refuse_lost_zeros
from recsys.data.sample import Roles, Sample
from recsys.data.time_formats import TimeRules
from recsys.errors import DataError

RULES = TimeRules("auto", "UTC", None, 1.75e9)
T = 1_700_000_000


def sample(name: str = "events.csv", rows: int = 60, /, **columns: object) -> Sample:
    """A file whose columns are made from functions of the row, or constants."""
    made = {
        key: [str(value(row)) if callable(value) else str(value) for row in range(rows)]
        for key, value in columns.items()
    }
    return Sample(Path(name), pa.table(made))


def events(given: dict[str, str] | None = None, items: Sample | None = None, **columns) -> Roles:
    return recognise_events(sample(**columns), given or {}, items, RULES)


def names(roles: Roles) -> dict[str, str]:
    return {role: found.column for role, found in roles.items()}


user, item = (lambda row: row % 9), (lambda row: f"s{row % 11}")
time, kind = (lambda row: T + row), (lambda row: ("view", "purchase")[row % 2])


def test_a_name_is_not_taken_if_the_content_contradicts() -> None:
    found = events(user_id=user, item_id=item, timestamp=lambda row: row, created_at=time)
    assert names(found)["timestamp"] == "created_at"
    found = events(user_id=user, item_id=item, ts=time, rating=lambda row: f"text {row}")
    assert "rating" not in found
    found = events(user_id=user, item_id=item, ts=time, event=lambda row: f"note {row} {row**3}")
    assert "behaviour" not in found


def test_a_time_is_recognised_by_its_content_alone() -> None:
    found = events(user_id=user, item_id=item, wann=lambda row: f"{1 + row % 28}.11.2023 10:00")
    assert found["timestamp"].column == "wann"
    assert found["timestamp"].why == "by content"


LATER = ["Cancelled at", "Refunded at", "Updated at", "Shipped at", "Versanddatum", "Expédiée le",
         "Arrival", "Delivery date", "Fecha de entrega", "Data zwrotu"]  # fmt: skip


@pytest.mark.parametrize("later", [name for name in LATER if name != "Updated at"])
def test_only_a_later_time_is_asked_about(later: str) -> None:
    date = lambda row: f"{1 + row % 28}.11.2023 10:00"  # noqa: E731
    with pytest.raises(DataError, match=f"by its name, '{later}' says") as refused:
        events(user_id=user, item_id=item, **{later: date})
    assert f"timestamp={later}" in str(refused.value)
    assert events({"timestamp": later}, user_id=user, item_id=item, **{later: date})


def test_a_time_that_is_mostly_empty_is_not_the_time() -> None:
    date = lambda row: f"{1 + row % 28}.11.2023 10:00"  # noqa: E731
    few = lambda row: date(row) if row % 5 == 0 else ""  # noqa: E731
    found = events(user_id=user, item_id=item, date=few, gekauft=date)
    assert names(found)["timestamp"] == "gekauft"
    with pytest.raises(DataError, match="'date' looks like a time, but it is empty in 80%"):
        events(user_id=user, item_id=item, date=few)
    with pytest.raises(DataError, match="'Month' looks like a time, but most of its values"):
        events(user_id=user, item_id=item, Month=lambda row: f"2025-{1 + row % 12:02}")


def test_no_time_and_no_amount_is_proposed_as_the_user() -> None:
    columns = {
        "Booking": lambda row: row,
        "Arrival": lambda row: f"2023-11-{1 + row % 28:02}",
        "Guest name": lambda row: f"Guest {row % 9}",
        "Total": lambda row: f"{row % 30}.50",
    }
    with pytest.raises(DataError, match="user=Guest name"):
        events(item_id=item, **columns)


def test_the_items_file_decides_between_two_columns() -> None:
    items = sample("items.csv", 11, sku=item, name=lambda row: f"Thing {row}")
    columns = {"user": user, "ts": time, "sku": item, "product_id": lambda row: row % 12 + 7000}
    assert events(items=items, **columns)["item"].column == "sku"
    with pytest.raises(DataError, match=r"both 'sku' and 'product_id' could be the item.*--column"):
        events(**columns)


def test_what_is_ambiguous_shows_values_and_the_flag() -> None:
    with pytest.raises(DataError) as error:
        events(customer_id=user, visitor_id=lambda row: row % 5, sku=item, ts=time)
    text = str(error.value)
    assert "both 'customer_id' and 'visitor_id' could be the user" in text
    assert "--column user=customer_id (data.columns.user)" in text
    assert "  sku: s0, s1, s2" in text


def test_settings_win_and_must_exist() -> None:
    columns = {"customer_id": user, "visitor_id": lambda row: row % 5, "sku": item, "ts": time}
    assert events({"user": "visitor_id"}, **columns)["user"].column == "visitor_id"
    with pytest.raises(DataError, match=r"no column 'kunde', which data\.columns\.user names"):
        events({"user": "kunde"}, **columns)
    given = {"user": "visitor_id", "rating": "none"}
    assert "rating" not in events(given, **columns, rating=lambda row: row % 5)


def test_sessions_are_users_where_there_are_no_users() -> None:
    found = events(session_id=user, sku=item, ts=time)
    assert found["user"].column == "session_id"
    assert "only sessions" in found["user"].why
    assert events(session_id=user, sku=item, ts=time, kunde=item)["user"].column == "kunde"
    for name in ("Transaction", "Auftragsnr"):
        assert events(Item=item, order_date=time, **{name: user})["user"].column == name


def test_the_customer_of_several_orders_is_the_user() -> None:
    ids = {"customer_id": lambda row: f"o{row}", "order_id": lambda row: f"o{row}"}
    found = events(customer_unique_id=user, product_id=item, order_date=time, **ids)
    assert found["user"].column == "customer_unique_id"


@pytest.mark.parametrize(
    ("column", "values"),
    [("rate", ("0", "7", "19")), ("score", ("0", "55", "99")), ("discount.rate", ("0", "5", "9"))],
)
def test_rates_of_taxes_and_discounts_are_no_ratings(column, values) -> None:
    rates = {column: lambda row: values[row % 3]}
    assert "rating" not in events(user=user, item=item, ts=time, **rates)


def test_the_columns_of_items_are_recognised() -> None:
    items = sample(
        "produkte.csv", 11, Artikelnummer=item, Bezeichnung=lambda row: f"Ding {row}",
        Beschreibung="Text", Preis="3,50 €", lagernd=lambda row: ("ja", "nein")[row % 2],
        Kategoriepfad="A > B", gueltig_ab="2024-01-01",
    )  # fmt: skip
    known = pa.chunked_array([[f"s{row}" for row in range(5)]])
    found = names(recognise_items(items, {}, "sku", known, RULES))
    assert found == {
        "id": "Artikelnummer", "title": "Bezeichnung", "text": "Beschreibung", "price": "Preis",
        "category": "Kategoriepfad", "available": "lagernd", "available_from": "gueltig_ab",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("value", "shown"),
    [("no", "'no'"), (0, "'0'"), (lambda row: ("no", "0")[row % 2], "'no', '0'")],
)
def test_a_column_by_which_nothing_is_in_stock_is_left_alone_and_named(value, shown) -> None:
    items = sample("items.csv", 11, sku=item, name=lambda row: f"Thing {row}", in_stock=value)
    roles = recognise_items(items, {}, "sku", pa.chunked_array([["s1", "s2"]]), RULES)
    assert "available" not in roles
    (said,) = ignored_availability(items, {}, roles)
    for part in ("'in_stock'", "items.csv", f"({shown})", "--column available=in_stock"):
        assert part in said
    chosen = {"available": "in_stock"}
    roles = recognise_items(items, chosen, "sku", pa.chunked_array([["s1", "s2"]]), RULES)
    assert roles["available"].column == "in_stock"
    assert ignored_availability(items, chosen, roles) == []
    assert ignored_availability(items, {"available": "none"}, {}) == []


@pytest.mark.parametrize(
    ("column", "value", "role"),
    [
        ("sold_out", lambda row: ("False", "True")[row % 2], "unavailable"),
        ("is_deleted", lambda row: ("0", "1")[row % 2], "unavailable"),
        ("Ausverkauft", lambda row: ("", "ja")[row % 2], "unavailable"),
        ("discontinued", lambda row: ("nan", "1.0", "0.0")[row % 3], "unavailable"),
        ("Discontinued", lambda row: ("no", "yes", "")[row % 3], "unavailable"),
        ("hidden", "yes", None),  # nothing could be recommended
        ("deleted_at", lambda row: ("", "2024-01-01")[row % 2], "available_until"),
        ("sold_out", lambda row: ("", "soon")[row % 2], None),
        ("deleted", lambda row: ("", "2024-01-01")[row % 2], None),
    ],
)
def test_columns_of_what_is_gone_have_a_role_or_are_named(column, value, role) -> None:
    items = sample("items.csv", 11, sku=item, name=lambda row: f"Thing {row}", **{column: value})
    roles = recognise_items(items, {}, "sku", pa.chunked_array([["s1", "s2"]]), RULES)
    assert [name for name, found in roles.items() if found.column == column] == [role] * bool(role)
    said = unread_exclusions(items, roles, {})
    assert len(said) == (role is None)
    shown = items.texts(column)[0].as_py()
    assert all(
        f"{column!r} of items.csv has {shown!r} in" in s and "'available'" in s for s in said
    )


@pytest.mark.parametrize(
    ("column", "values", "role"),
    [
        ("status", ("completed", "cancelled"), "order_status"),
        ("Financial Status", ("paid", "partially_refunded"), "order_status"),  # more may come
        ("customer.newsletter.status", ("completed", "cancelled"), None),
        ("returned", ("false", ""), "taken_back"),
        ("status", ("new", "returning"), None),  # of a customer
        ("status", ("approved", "rejected"), None),  # of a review
        ("returned", ("0.0", "1.0"), "taken_back"),
        ("Is Refund", ("false", "true"), "taken_back"),
        ("is_void", ("0", "1"), "taken_back"),
        ("Cancelled at", ("", "2025-05-05"), "taken_back"),
        ("cancelled", ("0000-00-00", "2025-05-05"), "taken_back"),
        ("returned", ("true", "true"), None),  # nothing would be left
        ("status", ("shipped", "paid"), "order_status"),
        ("status", ("in stock", "gone"), None),
    ],
)
def test_columns_of_what_was_taken_back_have_a_role(column, values, role) -> None:
    events = sample(user=user, item=item, ts=time, **{column: lambda row: values[row % 2]})
    roles = recognise_events(events, {}, None, RULES)
    assert [name for name, found in roles.items() if found.column == column] == [role] * bool(role)
    said = unread_exclusions(events, roles, {})
    assert [column in sentence for sentence in said] == [True] * (column == "returned" and not role)


@pytest.mark.parametrize(
    ("column", "values", "is_read"),
    [
        ("Vorgangsart", ("Verkauf", "Retoure"), True),
        ("tipo_movimento", ("Vendita", "Reso"), True),
        ("Doc Type", ("Invoice", "Credit note"), True),
        ("Kanal", ("Filiale", "Retoure"), False),  # half of the rows have an unknown kind
        ("Zahlung", ("paid", "refunded"), False),  # states of orders
        ("Kanal", ("Web", "Filiale"), None),
    ],
)
def test_values_that_name_returns_are_read_or_named(column, values, is_read) -> None:
    events = sample(user=user, item=item, ts=time, **{column: lambda row: values[row % 2]})
    roles = recognise_events(events, {}, None, RULES)
    found = [name for name, found in roles.items() if found.column == column]
    assert found == (["behaviour"] if is_read else [])
    said = unread_exclusions(events, roles, {})
    assert len(said) == (is_read is False)
    assert all(f"behaviour={column}" in sentence for sentence in said)
    assert unread_exclusions(events, roles, {"behaviour": "none"}) == []


def test_a_user_is_not_the_item_though_its_numbers_are() -> None:
    items = sample("items.csv", 11, id=lambda row: row, name=lambda row: f"Thing {row}")
    found = events(items=items, user_id=user, sku=item, ts=time)
    assert (found["user"].column, found["item"].column) == ("user_id", "sku")
    kinds = events(Kundenkarte=user, EAN=item, Datum=time, Art=lambda row: "VVS"[row % 3])
    assert kinds["item"].column == "EAN", "Art is an article or a kind"


@pytest.mark.parametrize(
    ("columns", "found"),
    [
        ({"descripcion": "Pan integral"}, {"title": "descripcion"}),
        ({"descripcion": "Pan", "texto": "largo " * 30}, {"title": "descripcion", "text": "texto"}),
        ({"description": "long " * 30}, {"text": "description"}),
        ({"name": "Bread", "description": "Rye"}, {"title": "name", "text": "description"}),
    ],
)
def test_short_texts_are_titles_if_there_are_no_others(columns, found) -> None:
    items = sample("items.csv", 11, sku=item, **columns)
    known = pa.chunked_array([pa.array([f"s{n}" for n in range(11)])])
    roles = names(recognise_items(items, {}, "sku", known, RULES))
    assert {role: roles[role] for role in ("title", "text") if role in roles} == found


def test_ids_that_lost_their_zeros_are_refused() -> None:
    known = pa.array(["00001", "00001", "00010", "7", "ab01"])
    refuse_lost_zeros("item", pa.array(["00001", "7", "11", "b01"]), known, Path("night.csv"))
    with pytest.raises(DataError) as error:
        refuse_lost_zeros("item", pa.array(["10", "1", "1", "7"]), known, Path("night.csv"))
    for part in ("night.csv: 2 ids of items", "'10' and '00010'", "export the ids as text"):
        assert part in str(error.value)
    known = pa.array(["1", "00001", "7"])  # which the data tell apart
    refuse_lost_zeros("user", pa.array(["1", "00001", "7"]), known, Path("night.csv"))
    with pytest.raises(DataError, match="'007' and '7'"):
        refuse_lost_zeros("user", pa.array(["007"]), known, Path("night.csv"))


@pytest.mark.parametrize(
    ("yes", "no"),
    [
        ("yes", "no"), ("true", "False"), ("1", "0"), ("12", "-3"), ("2,5", "0.0"),
        ("in stock", "Out of Stock"), ("active", "draft"), ("ja", "nein"), ("oui", "non"),
        ("auf Lager", "ausverkauft"), ("verfügbar", "nicht verfügbar"), ("sí", "no"),
        ("disponible", "épuisé"), ("disponibile", "esaurito"), ("op voorraad", "uitverkocht"),
    ],
)  # fmt: skip
def test_words_and_numbers_say_yes_or_no(yes: str, no: str) -> None:
    column = pa.chunked_array([[yes, no, None, "perhaps"]])
    assert read_available(column).to_pylist() == [True, False, None, None]
    assert share_of_answers(pa.chunked_array([[yes, no]])) == 1.0


def test_one_answer_for_all_items_says_nothing() -> None:
    assert share_of_answers(pa.chunked_array([["yes", "yes"]])) == 1.0
    assert share_of_answers(pa.chunked_array([["no", "no"]])) == 0.0
    assert share_of_answers(pa.chunked_array([["red", "blue"]])) == 0.0
    assert share_of_answers(pa.chunked_array([], pa.string())) == 0.0
