"""Inputs of shops whose ids and codes must be stored digit for digit, with what is right.

The times and values of such inputs are in `test_cases_times.py` and `test_cases_values.py`.
"""

from __future__ import annotations

import json
import unicodedata
import uuid
from decimal import Decimal

import pandas as pd
import pyarrow as pa
import pytest

from recsys.data import sources
from recsys.errors import DataError

T = 1_700_000_000
UUIDS = [uuid.UUID(int=(0xA0 + n) << 120 | n) for n in range(4)]


def events(items, users=("u0", "u1", "u2"), rows=24) -> list[tuple]:
    """(user, item, time) of events in turn."""
    return [(users[n % len(users)], items[n % len(items)], T + 4000 * n) for n in range(rows)]


def csv(rows, head="user,item,timestamp") -> str:
    return "\n".join([head, *(",".join(map(str, row)) for row in rows)]) + "\n"


def items_of(shop) -> list[str]:
    """The items of events, by name."""
    return sorted({item for items in shop.histories.values() for item in items})


# JSON: numbers are read as they are written.


def json_lines(items, **more) -> str:
    return "".join(
        f'{{"user": "u{n % 3}", "item": {items[n % len(items)]}, "ts": {T + 4000 * n}'
        + "".join(f', "{name}": {value}' for name, value in more.items())
        + "}\n"
        for n in range(24)
    )


LARGE = [str(9_224_372_036_854_775_808 + 500 * n) for n in range(6)]  # beyond 63 bits


@pytest.mark.parametrize("others", [[], ["1.5"], ['"a7"', "12", "12.0"]])
def test_json_numbers_keep_their_digits(shop, others):
    found = items_of(shop(json_lines([*LARGE, *others]), file="e.jsonl"))
    assert found == sorted({*LARGE, *(text.strip('"').removesuffix(".0") for text in others)})


def test_ids_in_the_lines_of_orders_keep_their_digits(shop):
    ids = [9_224_372_036_854_775_808 + n for n in range(6)]
    orders = [
        {"customer": {"id": n % 3}, "created_at": T + 4000 * n,
         "lines": [{"sku": ids[n % 6], "price": 1.5}, {"sku": ids[(n + 1) % 6], "price": 2}]}
        for n in range(24)
    ]  # fmt: skip
    found = shop("".join(json.dumps(order) + "\n" for order in orders), file="o.jsonl")
    assert items_of(found) == sorted(map(str, ids))


def test_attributes_and_lists_of_json_keep_their_digits(shop):
    big = 18_000_000_000_000_000_000
    items = [
        {"item": f"p{n}", "title": f"T{n}", "parent": big + n // 2, "near": [big + n, 7]}
        for n in range(4)
    ]
    text = "".join(json.dumps(item) + "\n" for item in items)
    found = shop(items=text, items_file="i.jsonl")
    assert found.values("parent") == [str(big + n // 2) for n in range(4)]
    assert found.values("near") == [[str(big + n), "7"] for n in range(4)]


# A form of ids is agreed over all parts.


def month(number: int, end: str, missing: bool) -> str:
    rows = [
        (f"{n % 4}{end}", f"{100 + n % 6}{end}", f"2024-0{number}-{1 + n:02} 10:00:00")
        for n in range(24)
    ]
    first = [("", f"100{end}", f"2024-0{number}-01 09:00:00")] if missing else []
    return csv([*first, *rows], "customer,sku,bought_at")


@pytest.mark.parametrize("first", ["", ".0"], ids=["January", "February"])
def test_ids_that_pandas_wrote_as_floats_in_one_month_are_the_same(shop, raw, first):
    (raw / "exports").mkdir()
    (raw / "exports/1.csv").write_text(month(1, first, missing=bool(first)))
    second = month(2, "" if first else ".0", missing=not first)
    described = csv([(100 + n, f"Thing {n}") for n in range(6)], "sku,title")
    found = shop(second, described, file="exports/2.csv")
    assert sorted(found.histories) == ["0", "1", "2", "3"]
    assert found.data.item_ids.tolist() == [str(100 + n) for n in range(6)]
    assert found.counts["ids_with_a_decimal_place"] == 24 * 2 + 1
    assert "unknown_items" not in found.counts


def test_versions_are_no_whole_numbers(shop):
    assert items_of(shop(csv(events(["1.0", "1.5", "2.0"])))) == [
        "1.0",
        "1.5",
        "2.0",
    ]


def test_forms_of_ids_that_contradict_each_other_are_refused_with_both(shop, raw):
    (raw / "exports").mkdir()
    (raw / "exports/1.csv").write_text(csv(events(["1.0", "2.0", "3.0"])))
    with pytest.raises(DataError, match=r"(?s)1\.csv.*'1\.0'.*2\.csv.*'1\.5'"):
        shop(csv(events(["1.5", "2.0", "3.0"])), file="exports/2.csv")
    described = csv([("1.0", "A"), ("1.5", "B")], "item,title")
    with pytest.raises(DataError, match=r"(?s)'1\.0'.*i\.csv.*'1\.5'"):
        shop(csv(events(["1.0", "2.0"])), described, items_file="i.csv")


def test_ids_that_lost_their_zeros_in_one_file_are_told(shop, raw):
    (raw / "exports").mkdir()
    (raw / "exports/1.csv").write_text(csv(events(["007", "012"])))
    found = shop(csv(events(["7", "12"])), file="exports/2.csv")
    assert items_of(found) == ["007", "012", "12", "7"]
    assert "'007' and '7'" in found.notes


# Unicode: both spellings of a letter are one id.


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_spellings_of_a_letter_are_one_id(shop, form):
    other = "NFD" if form == "NFC" else "NFC"
    ids = [f"café{n}" for n in range(4)]
    written = [unicodedata.normalize(form, text) for text in ids]
    described = csv([(unicodedata.normalize(other, i), f"Cup {i}") for i in ids], "item,title")
    found = shop(csv(events(written)), described)
    assert found.data.item_ids.tolist() == ids
    assert found.counts["texts_in_another_spelling"] == (24 if form == "NFD" else 4)
    assert "unknown_items" not in found.counts


def test_spellings_of_users_and_brands_are_one(shop):
    users = ["Zoë", unicodedata.normalize("NFD", "Zoë")]
    brands = ["Café", unicodedata.normalize("NFD", "Café"), "Tea", "Tea"]
    described = csv([(f"p{n}", f"T{n}", brands[n]) for n in range(4)], "item,title,brand")
    found = shop(csv(events(["p0", "p1", "p2", "p3"], users)), described)
    assert list(found.histories) == ["Zoë"]
    assert found.values("brand") == ["Café", "Café", "Tea", "Tea"]


# Types of Parquet, of pandas and of databases.


@pytest.mark.parametrize(
    ("items", "right"),
    [
        (pa.array(UUIDS), list(map(str, UUIDS))),
        (pa.array([u.bytes for u in UUIDS], pa.binary(16)), list(map(str, UUIDS))),
        (pa.array([b"sku-1", b"sku-2", "größe".encode(), b"7"]), ["sku-1", "sku-2", "größe", "7"]),
        (pa.array([b"\x00\xff", b"\x01\xff", b"a", b"b"]), ["00ff", "01ff", "a", "b"]),
        (pa.array([b"a1", b"b2", b"c3", b"d4"]).dictionary_encode(), ["a1", "b2", "c3", "d4"]),
        (pa.array([2**60 + n for n in range(4)]).dictionary_encode(),
         [str(2**60 + n) for n in range(4)]),
        (pa.array([2**63 + n for n in range(4)], pa.uint64()), [str(2**63 + n) for n in range(4)]),
        (pa.array([Decimal(10**19 + n) for n in range(4)], pa.decimal128(20, 0)),
         [str(10**19 + n) for n in range(4)]),
        (pa.array([Decimal(7 + n) for n in range(4)], pa.decimal128(20, 2)),
         [str(7 + n) for n in range(4)]),
    ],
    ids=["uuid", "fixed", "bytes", "hex", "dictionary-bytes", "dictionary-int", "uint64",
         "decimal", "decimal-2"],
)  # fmt: skip
def test_ids_of_parquet_are_texts_of_every_type(shop, items, right):
    rows = [(f"u{n % 3}", n % 4, T + 4000 * n) for n in range(24)]
    users, places, times = zip(*rows, strict=True)
    table = pa.table({"user": users, "item": items.take(pa.array(places)), "ts": times})
    described = pa.table({"item": items, "title": ["A", "B", "C", "D"]})
    found = shop(table, described, file="e.parquet", items_file="i.parquet")
    assert found.data.item_ids.tolist() == right
    assert "unknown_items" not in found.counts


@pytest.mark.parametrize(("bits", "least"), [(pa.float64(), 2**60), (pa.float32(), 2**24)])
def test_ids_that_are_floats_beyond_their_digits_are_refused(shop, bits, least):
    ids = [float(least + n * 1024) for n in range(4)]
    users, items, times = zip(*events(ids), strict=True)
    items = pa.array(items, bits)
    with pytest.raises(DataError, match=rf"'item'.*{least}.*last digits"):
        shop(pa.table({"user": users, "item": items, "ts": times}), file="e.parquet")


@pytest.mark.parametrize("kind", [pa.float16(), pa.decimal256(60, 2)])
def test_columns_of_types_that_the_engine_lacks_are_beside_quantities(shop, kind):
    unread = pa.array(range(6), pa.int64()).cast(pa.float32()).cast(kind)
    table = pa.table({"user": ["a", "b"] * 3, "item": list("xyzxyz"), "quantity": [1] * 6,
                      "weight": unread, "ts": [T + n for n in range(6)]})  # fmt: skip
    assert len(shop(table, file="e.parquet").data.interactions.item) == 6


@pytest.mark.parametrize(
    ("ids", "right"),
    [
        (UUIDS, list(map(str, UUIDS))),
        (pd.array([1_730_000_000_000_000_007, 2, 3, None], "Int64"),
         ["1730000000000000007", "2", "3"]),
        (["007", "1E2", "10E1", "12345678901234567890"],
         ["007", "10E1", "12345678901234567890", "1E2"]),
    ],
    ids=["uuid", "Int64", "codes"],
)  # fmt: skip
def test_ids_of_pandas_are_texts(shop, home, ids, right):
    codes = pd.Series(ids)
    frame = pd.DataFrame({
        "user": [f"u{n % 3}" for n in range(24)],
        "item": codes.take([n % 4 for n in range(24)]).reset_index(drop=True),
        "ts": [T + 4000 * n for n in range(24)],
    })  # fmt: skip
    path = sources.export_tables(frame, None, "t").events
    assert items_of(shop(path.read_bytes(), file="frame.parquet")) == sorted(right)


# Attributes: a number is what survives being written again.


@pytest.mark.parametrize(
    "codes",
    [
        [str(1_730_000_000_000_000_000 + n // 2) for n in range(4)],
        ["1E2", "10E1", "2E3", "20E2"],
        ["007", "012", "100", "200"],
        ["1.1", "1.10", "1.2", "2.0"],
        ["1.9", "1.10", "1.11", "1.8"],
        ["2.00", "1.5", "3", "4"],
        ["12345678901234567.5", "12345678901234568.5", "1", "2"],
        ["0x1F", "0x20", "1", "2"],
        ["1_000", "2_000", "3", "4"],
        ["٣", "٤", "5", "6"],
        ["123", "124", "12A", "125"],
    ],
    ids=lambda codes: codes[0],
)
def test_codes_are_texts(shop, codes):
    described = csv([(f"p{n}", f"T{n}", codes[n]) for n in range(4)], "item,title,model")
    assert shop(items=described).values("model") == codes


@pytest.mark.parametrize(
    ("texts", "numbers"),
    [
        (["1.50", "2.25", "3.00", "4.75"], [1.5, 2.25, 3.0, 4.75]),
        (["1,299.00", "2,050.50", "899.00", "49.99"], [1299.0, 2050.5, 899.0, 49.99]),
        (["+1", "-2", "3", "4"], [1, -2, 3, 4]),
        (["0.30000000000000004", "0.1", ".5", "1"], [0.30000000000000004, 0.1, 0.5, 1.0]),
        (["123456789012345678", "1", "2", "3"], [123456789012345678, 1, 2, 3]),
        (["10", "10.0", "11", "12.0"], [10.0, 10.0, 11.0, 12.0]),
    ],
    ids=lambda values: str(values[0]),
)
def test_numbers_are_numbers(shop, texts, numbers):
    rows = [(f"p{n}", f"T{n}", f'"{texts[n]}"') for n in range(4)]
    assert shop(items=csv(rows, "item,title,size")).values("size") == numbers


# Forms of delimited text.


@pytest.mark.parametrize(("head", "row"), [(0, 2), (1, 0), (2, 0), (1, 1)])
def test_commas_at_the_end_of_the_header_or_of_rows_are_no_columns(shop, head, row):
    rows = [(*values, *[""] * row) for values in events(["p0", "p1"])]
    found = shop(csv(rows, "user,item,timestamp" + "," * head))
    assert items_of(found) == ["p0", "p1"]
    assert len(found.data.interactions) == 24


def test_a_value_behind_the_last_column_is_damage(shop):
    rows = [(*row, "x" if n else "") for n, row in enumerate(events(["p0", "p1"]))]
    with pytest.raises(DataError, match="as many columns as the first line"):
        shop(csv(rows))


@pytest.mark.parametrize(
    ("written", "right"),
    [
        (r'"15\" screen"', '15" screen'),
        (r'"15\", black"', '15", black'),
        (r'"a\\b \"c\""', r'a\b "c"'),
        (r'"15\" screen, \"new\""', '15" screen, "new"'),
    ],
)
def test_quotes_behind_a_backslash_are_quotes(shop, written, right):
    described = f'item,title,note\np0,{written},a\np1,"17\\" screen",b\np2,Mouse,c\np3,Cable,d\n'
    found = shop(items=described)
    assert found.values("title") == [right, '17" screen', "Mouse", "Cable"]
    assert found.values("note") == ["a", "b", "c", "d"]
