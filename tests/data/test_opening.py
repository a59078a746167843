"""Files of every usual kind are opened, and damaged rows are skipped and counted."""

from __future__ import annotations

import gzip
import json
import lzma
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys.data.columns import recognise_events
from recsys.data.files import Damage, read_integer_lines, read_lines
from recsys.data.item_texts import aligned, read_index, read_item_texts
from recsys.data.opening import BLOCK, find_tables, open_table
from recsys.data.raw import RawData, ReaderConfig, events_table, items_table
from recsys.data.readers import READERS
from recsys.data.sample import Sample
from recsys.data.time_formats import TimeRules
from recsys.errors import DataError

TEXT = "kunde;artikel;grösse\n1;00123;1,5\n2;00124;2\n"
ROWS = {"kunde": ["1", "2"], "artikel": ["00123", "00124"], "grösse": ["1,5", "2"]}
EVENTS = events_table(["u", "u"], ["a", "b"])
ITEMS = items_table(["a", "b"], {"a": "A"}, {}, {})


def read(path: Path, damage: Damage | None = None) -> dict[str, list[str]]:
    return open_table(path).read(damage or Damage()).to_pydict()


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_text_in_usual_encodings_is_read(tmp_path: Path, encoding: str, pack) -> None:
    assert read(write(tmp_path / "a.csv", pack(TEXT.encode(encoding)))) == ROWS


@pytest.mark.parametrize("delimiter", [",", ";", "|", "\t"])
def test_the_delimiter_is_the_one_with_most_columns(tmp_path: Path, delimiter: str) -> None:
    content = TEXT.replace(",", ".").replace(";", delimiter).encode()
    assert list(read(write(tmp_path / "a", content))) == list(ROWS)


def test_a_later_block_of_json_may_lack_fields(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recsys.data.opening.BLOCK", 32)
    lines = b'{"u": 1, "i": "a"}\n' * 9 + b'{"u": 2}\n{"u": "x", "z": 3}\n'
    found = read(write(tmp_path / "a.jsonl", lines))
    assert found["u"] == ["1"] * 9 + ["2", "x"]
    assert found["i"] == ["a"] * 9 + [None, None]


def test_a_damaged_row_is_skipped_and_counted(tmp_path: Path) -> None:
    damage = Damage()
    path = write(tmp_path / "a.csv", b"a,b\n" + b"1,2\n" * 150 + b"3\n")
    assert len(read(path, damage)["a"]) == 150
    assert (damage.rows, damage.examples) == (1, ["line 152: 3"])
    damage.check(path, 0.01)
    with pytest.raises(DataError, match="1 of 151 rows are damaged"):
        damage.check(path, 0.0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b" \n\n", "the file is empty"),
        (b"a,b\n", "no rows in it"),
        (b"[1, 2]", "one JSON list; write one object on each line"),
        (b"PK\x03\x04", "a zip file; unpack it"),
        (lzma.compress(b"a,b\n1,2\n"), "an xz file, which is not read; unpack it with xz -d"),
        (b"a,b\n\x81\xff,1\n", "neither UTF-8 nor UTF-16 nor Windows-1252"),
        (b"a\0,\0b\0\n\0", "many bytes are zero"),
        (gzip.compress(b"a,b\n1,2\n" * 99, mtime=0)[:-12], "the gzip file is cut off"),
        (b"PAR1 and no more", "cannot be read|not a parquet file"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(write(tmp_path / "a", content))


def test_a_folder_holds_tables_of_one_kind(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the folder has no tables"):
        find_tables(tmp_path)
    for name in ("b.csv.gz", "a.csv", "_SUCCESS", "notes.md", ".hidden.csv"):
        write(tmp_path / name, b"a\n")
    assert [path.name for path in find_tables(tmp_path)] == ["a.csv", "b.csv.gz"]
    write(tmp_path / "c.parquet", b"")
    with pytest.raises(DataError, match="files of several kinds"):
        find_tables(tmp_path)


ORDERS = [
    {"id": 1, "customer": {"id": "a", "place": {"city": "Rome"}},
     "lines": [{"sku": "x", "n": 1}, {"sku": "y", "n": 2}]},
    {"id": 2, "customer": None, "lines": [{"sku": "z", "n": 3}]},
    {"id": 3, "customer": {"id": "b", "place": None}, "lines": []},
]  # fmt: skip


@pytest.mark.parametrize("damaged", [False, True])
def test_records_become_columns_and_their_lists_rows(tmp_path: Path, damaged: bool) -> None:
    lines = [json.dumps(order) for order in ORDERS] + ["{damaged"] * damaged
    file = tmp_path / "orders.jsonl"
    file.write_text("\n".join(lines) + "\n")
    damage = Damage()
    found = open_table(file, explode=True).read(damage)
    assert damage.rows == damaged
    rows = [
        (row["id"], row["customer.id"], row["customer.place.city"], row["lines.sku"])
        for row in found.to_pylist()
        if row.get("lines.sku") is not None
    ]
    wanted = [(1, "a", "Rome", "x"), (1, "a", "Rome", "y"), (2, None, None, "z")]
    assert [tuple(map(str, row)) for row in rows] == [tuple(map(str, row)) for row in wanted]
    whole = open_table(file).read(Damage())
    assert whole.num_rows == 3
    assert "customer.id" in whole.column_names


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_of_several_lists_that_of_the_items_makes_the_rows(tmp_path: Path, suffix: str) -> None:
    """As in orders of Shopify."""
    file = tmp_path / f"orders.{suffix}"
    orders = [
        {"id": n, "line_items": [{"sku": f"{n}-{i}", "price": 1.5} for i in range(n)],
         "tax_lines": [{"title": "VAT", "rate": 0.2}], "notes": [{"name": "gift", "value": "no"}]}
        for n in (1, 2)
    ]  # fmt: skip
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(orders), file)
    else:
        file.write_text("".join(json.dumps(order) + "\n" for order in orders))
    found = open_table(file, explode=True).read(Damage())
    assert found["line_items.sku"].to_pylist() == ["1-0", "2-0", "2-1"]
    assert [str(n) for n in found["id"].to_pylist()] == ["1", "2", "2"]


@pytest.mark.parametrize("make", [pa.list_, pa.large_list])
def test_records_and_lists_in_parquet_are_read_as_those_in_json(tmp_path: Path, make: Any) -> None:
    file, lines = tmp_path / "orders.parquet", pa.struct({"sku": pa.string(), "n": pa.int64()})
    table = pa.Table.from_pylist(ORDERS)
    pq.write_table(table.set_column(2, "lines", table["lines"].cast(make(lines))), file)
    opened = open_table(file, explode=True)
    assert opened.columns == ("id", "customer.id", "customer.place.city", "lines.sku", "lines.n")
    assert [tuple(row.values()) for row in opened.read(Damage()).to_pylist()] == [
        (1, "a", "Rome", "x", 1), (1, "a", "Rome", "y", 2), (2, None, None, "z", 3),
    ]  # fmt: skip
    (part,) = opened.batches(["customer.id"])  # as many rows, whatever is read
    assert part.to_pydict() == {"customer.id": ["a", "a", None]}
    whole = open_table(file)
    assert whole.columns == ("id", "customer.id", "customer.place.city", "lines")
    assert whole.read(Damage())["customer.id"].to_pylist() == ["a", None, "b"]


@pytest.mark.parametrize("at", [1, "1"])  # a change of the type leads to the other reader
def test_a_list_that_few_orders_have_hides_no_line(tmp_path: Path, at: int | str) -> None:
    file = tmp_path / "orders.jsonl"
    with file.open("w") as stream:
        for n in range(9000):
            lines = [{"sku": f"{n}-{i}"} for i in range(2)]
            discounts = [{"code": "A"}] if n in (6000, 8990) else []
            order = {"id": n, "note": "x" * 200, "at": at if n == 6001 else 1}
            stream.write(json.dumps(order | {"lines": lines, "discounts": discounts}) + "\n")
    assert file.stat().st_size > 2 * BLOCK
    table = open_table(file, explode=True)
    found = [sku for part in table.batches(["lines.sku"]) for sku in part["lines.sku"].to_pylist()]
    assert found == [f"{n}-{i}" for n in range(9000) for i in range(2)]


def test_orders_in_records_are_recognised(tmp_path: Path) -> None:
    file = tmp_path / "orders.jsonl"
    orders = (
        {"pedido": {"numero": n, "fecha": f"{1 + n % 28:02}/03/2024 10:00"},
         "cliente": {"id": f"c{n % 9}", "provincia": "Madrid"},
         "lineas": [{"articulo": f"p{(n + i) % 7}", "unidades": 1} for i in (0, 1)]}
        for n in range(60)
    )  # fmt: skip
    file.write_text("".join(json.dumps(order) + "\n" for order in orders))
    table = open_table(file, explode=True)
    roles = recognise_events(
        Sample(file, table.sample(1000)), {}, None, TimeRules("auto", "UTC", True, 1.9e9)
    )
    assert {role: found.column for role, found in roles.items()} == {
        "user": "cliente.id", "item": "lineas.articulo", "timestamp": "pedido.fecha",
        "session": "pedido.numero", "quantity": "lineas.unidades",
    }  # fmt: skip


@pytest.mark.parametrize("end", ["", "{"])  # a damaged line leads to the other reader
def test_long_records_around_long_lists_are_refused(tmp_path, end):
    lines = [{}] * 30_000
    file = tmp_path / "orders.jsonl"
    file.write_text(
        json.dumps({"note": "x" * 10_000, "lines": [{"sku": "a"}, *lines]}) + "\n" + end
    )
    with pytest.raises(DataError, match="repeated for each entry of their lists"):
        open_table(file, explode=True).read(Damage())


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"\xef\xbb\xbf1 2\n")
    assert read_integer_lines(path) == [[1, 2]]
    assert next(read_lines(path)) == (1, "1 2")


def test_integer_lines_leave_out_empty_ones_and_take_any_blanks(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"1 2\t3\r\n\n 4 \n")
    assert read_integer_lines(path) == [[1, 2, 3], [4]]


def test_an_index_takes_any_letters(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", b'{"1": ["<x_0>", "<lvl_255>"], "0": ["<a_3>", "<b_4>"]}')
    assert read_index(path) == {1: (0, 255), 0: (3, 4)}


def test_codes_are_in_the_order_of_the_items(tmp_path: Path) -> None:
    codes = {0: (1,), 1: (2,), 2: (3,)}
    assert aligned(codes, np.array([2, 0, 1]), tmp_path).tolist() == [[3], [1], [2]]


def test_item_texts_lose_markup_and_written_out_lists(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.json",
        b"""{"0": {"title": "A &amp; B", "description": "['One. ', '', '<b>Two</b>']",
                  "brand": "", "categories": "Tools, Home, Tools"},
            "1": {"title": "C", "description": "['cut', 'o"}, "2": {}}""",
    )
    first, second, third = read_item_texts(path).values()
    assert (first.title, first.description) == ("A & B", "One. , Two")
    assert first.brand is None
    assert first.categories == ["Tools", "Home"]
    assert second.description == "cut', 'o"
    assert (third.title, third.categories) == ("", [])


def test_an_item_without_a_title_is_called_by_its_id() -> None:
    assert ITEMS.to_pylist() == [
        {"item_id": "a", "title": "A", "text": ""},
        {"item_id": "b", "title": "b", "text": ""},
    ]


@pytest.mark.parametrize("name", ["title", "semantic_id"])
def test_an_attribute_may_not_take_a_reserved_name(name: str) -> None:
    with pytest.raises(DataError, match=f"attribute '{name}' has a reserved name"):
        items_table(["a"], {}, {}, {name: pa.array([1])})


def test_parts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(DataError, match="items lack the columns"):
        RawData(EVENTS, ITEMS.select(["item_id"]))
    with pytest.raises(DataError, match="item 'a' is described twice"):
        RawData(EVENTS, items_table(["b", "a", "a"], {}, {}, {}))
    with pytest.raises(DataError, match="item 'b' occurs in events but"):
        RawData(EVENTS, items_table(["a"], {}, {}, {}))
    with pytest.raises(DataError, match="codes: 1 rows for 2 items"):
        RawData(EVENTS, ITEMS, np.zeros((1, 2), np.int32))


@pytest.mark.parametrize(
    ("text", "encoding", "shown"),
    [("Čajník,3", "cp1250", ", such as 'Èajník' ('Čajník' in cp1250"),
     ("Чашка,25", "cp1251", ", such as '×àøêà' ('Чашка' in cp1251"),
     ("주전자,4", "euc-kr", ", such as 'ÁÖÀüÀÚ'"), ("주전자,4", "euc-kr", "'주전자' in euc-kr"),
     ("à la Größe,4", "cp1252", ", such as 'Größe'. If"),
     ("é" * 16_000 + ",4", "cp1252", "cp1252. If"), ("Tea è,4", "cp1252", "cp1252. If")],
)  # fmt: skip
@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_a_word_is_shown_as_code_pages_read_it(tmp_path, text, encoding, shown, compress):
    rows = "".join(f"u{n % 9},p{n % 5},{1_700_000_000 + 9000 * n},{text}\n" for n in range(90))
    path = tmp_path / "my events.csv"
    path.write_bytes(compress(f"user,item,timestamp,title,size\n{rows}".encode(encoding)))
    note = READERS["table"].read(ReaderConfig(path)).report.notes[0]
    assert re.search(f"my events.csv is read as .*{re.escape(shown)}", note)
    command = re.sub("-f [^ ]+", f"-f {encoding}", note.partition("UTF-8: ")[2])
    made = subprocess.run(command.partition(" > ")[0], shell=True, check=True, capture_output=True)
    assert text in made.stdout.decode()
