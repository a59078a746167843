"""Each reader on small files written here, right ones and wrong ones."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from recsys.config import SHIPPED, Settings, fields_of
from recsys.data.cleaning import CleanConfig
from recsys.data.commands import app
from recsys.data.numbers import read_ratings
from recsys.data.prepare import DataConfig
from recsys.data.raw import RawData
from recsys.data.readers import READERS
from recsys.errors import DataError
from recsys.pipeline import Context
from recsys.pipeline import run as run_stages
from recsys.splits import TEST, TRAIN, VALID


def read(source: str, path: str, **section: Any) -> RawData:
    return READERS[source].read(DataConfig(source=source, path=path, **section).reader()).gather()


def files(source: str, path: str, **section: Any) -> dict[str, str]:
    config = DataConfig(source=source, path=path, **section).reader()
    return {role: file.name for role, file in READERS[source].files(config).items()}


def rows(data: RawData) -> list[tuple[str, str]]:
    return list(zip(data.events["user"].to_pylist(), data.events["item"].to_pylist(), strict=True))


# --- s3rec


def test_s3rec_reads_lines_and_the_attributes_beside_them(raw: Path) -> None:
    (raw / "X.txt").write_text("7 10 2\n3 2 2 30\n9\n")
    (raw / "X_item2attributes.json").write_text('{"2": [5, 6, 5], "4": [1]}')
    data = read("s3rec", "X.txt")
    assert files("s3rec", "X.txt") == {
        "interactions": "X.txt",
        "attributes": "X_item2attributes.json",
    }
    assert rows(data) == [("7", "10"), ("7", "2"), ("3", "2"), ("3", "2"), ("3", "30")]
    assert data.items.to_pylist() == [
        {"item_id": "2", "title": "2", "text": "", "attributes": ["5", "6"]},
        {"item_id": "4", "title": "4", "text": "", "attributes": ["1"]},
        {"item_id": "10", "title": "10", "text": "", "attributes": []},
        {"item_id": "30", "title": "30", "text": "", "attributes": []},
    ]
    assert data.counts == {
        "users_without_items": 1,
        "items_without_metadata": 2,
    }


def test_s3rec_shifts_the_ids_of_titles_and_codes_by_one(raw: Path) -> None:
    (raw / "X.txt").write_text("1 1 2 3\n")
    (raw / "X_item2attributes.json").write_text('{"1": [5, 6], "2": [6], "3": [7]}')
    items = {str(i): {"title": f"T{i}", "description": d} for i, d in enumerate("ab")}
    items["0"]["description"] = "Diners, Greek"
    (raw / "item.json").write_text(json.dumps(items))
    (raw / "index.json").write_text('{"2": ["<a_2>"], "0": ["<a_0>"], "1": ["<a_1>"]}')
    data = read("s3rec", "X.txt", items="item.json", index="index.json")
    assert data.items["title"].to_pylist() == ["T0", "T1", "3"]
    assert data.codes is not None
    assert data.codes.tolist() == [[0], [1], [2]]
    assert data.counts["items_without_metadata"] == 1
    # Two of three descriptions have as many parts as the item has attributes: too few to trust.
    assert "categories" not in data.items.column_names
    assert data.items["attributes"].to_pylist() == [["5", "6"], ["6"], ["7"]]
    (raw / "index.json").write_text('{"0": ["<a_0>"], "2": ["<a_1>"]}')
    with pytest.raises(DataError, match=r"index\.json: no codes for item '1'"):
        read("s3rec", "X.txt", index="index.json")


def test_s3rec_reads_names_of_attributes_from_descriptions(raw: Path) -> None:
    (raw / "X.txt").write_text("1 1 2\n")
    (raw / "X_item2attributes.json").write_text('{"1": [5, 6], "2": [6]}')
    items = {"0": {"title": "a", "description": "Bars, Pubs"}, "1": {"description": "Pubs"}}
    (raw / "item.json").write_text(json.dumps(items))
    data = read("s3rec", "X.txt", items="item.json")
    assert data.items["categories"].to_pylist() == [["Bars", "Pubs"], ["Pubs"]]


def test_s3rec_takes_keywords_of_the_items_with_the_same_users(raw: Path) -> None:
    (raw / "X.txt").write_text("1 4 2\n2 2 9\n3 4 7 8 2\n")
    (raw / "words.txt").write_text("B1 red lamp\nA2 oak chair\nC3 hose\nD4 x\nE5\nZ9 of nobody\n")
    # 7 and 8 have the same user, so nothing tells which of them is C3 and which is D4.
    sequences = gzip.compress(b"u1 A2 B1\nu2 B1 E5\nu3 D4 B1 A2 C3\n")
    (raw / "user_sequence.txt.gz").write_bytes(sequences)
    data = read("s3rec", "X.txt", items="words.txt")
    titles = {row["item_id"]: row["title"] for row in data.items.to_pylist()}
    assert titles == {"2": "red lamp", "4": "oak chair", "7": "7", "8": "8", "9": "9"}
    assert data.counts["items_without_metadata"] == 3
    assert files("s3rec", "X.txt", items="words.txt")["sequences"] == "user_sequence.txt.gz"
    (raw / "words.txt.gz").write_bytes(gzip.compress((raw / "words.txt").read_bytes()))
    assert read("s3rec", "X.txt", items="words.txt.gz").items.equals(data.items)
    (raw / "user_sequence.txt").write_text("u1 B1\n")
    with pytest.raises(DataError, match=r"user_sequence\.txt: user_sequence\.txt\.gz is beside it"):
        files("s3rec", "X.txt", items="words.txt")


@pytest.mark.parametrize(
    ("words", "sequences", "message"),
    [
        ("B1 lamp\n", "u A2 B1\nv A2\n", r"user_sequence\.txt: has other users than the file"),
        ("B1 lamp\n", "u A2\n", r"user_sequence\.txt: has other users than the file"),
        ("B1\tlamp\nC3 chair\n", "u A2 B1\n", r"words\.txt: has no keywords for any item"),
    ],
)
def test_s3rec_refuses_keywords_that_do_not_fit(
    raw: Path, words: str, sequences: str, message: str
) -> None:
    (raw / "X.txt").write_text("1 4 2\n")
    (raw / "words.txt").write_text(words)
    (raw / "user_sequence.txt").write_text(sequences)
    with pytest.raises(DataError, match=message):
        read("s3rec", "X.txt", items="words.txt")


# --- atspeed


@pytest.fixture
def atspeed(raw: Path) -> Path:
    (raw / "a").mkdir()
    (raw / "a/sequential_train.txt").write_text("1 1 2\n2 3\n")
    (raw / "a/sequential_valid.txt").write_text("1 \n2 1\n")
    (raw / "a/sequential_test.txt").write_text("1 3 4\n2\n")
    codes = {"0": [0, 0], "1": [0, 1], "2": [0, 1], "3": [1, 0]}
    index = {key: [f"<a_{a}>", f"<b_{b}>"] for key, (a, b) in codes.items()}
    (raw / "a/index.json").write_text(json.dumps(index))
    return raw / "a"


def test_atspeed_comes_with_its_split_and_its_codes(atspeed: Path) -> None:
    data = read("atspeed", "a")
    assert rows(data) == [("1", i) for i in "0123"] + [("2", "2"), ("2", "0")]
    assert data.events["split"].to_pylist() == [TRAIN, TRAIN, TEST, TEST, TRAIN, VALID]
    assert data.items["item_id"].to_pylist() == ["0", "1", "2", "3"]
    assert data.codes is not None
    assert data.codes.tolist() == [[0, 0], [0, 1], [0, 1], [1, 0]]
    assert data.counts["items_sharing_codes"] == 2


def test_games_takes_the_configuration_of_beauty(atspeed: Path) -> None:
    settings = Settings.load(SHIPPED / "atspeed-beauty.yaml", ["data.path=a"], name="games")
    context = Context.of(settings)
    run_stages(context, ["data", "ids"])
    assert np.load(context.workspace.run("ids") / "codes.npy").tolist()[3] == [1, 0]


# --- lcrec


def test_lcrec_reads_the_three_files_together(raw: Path) -> None:
    (raw / "X.inter.json").write_text('{"0": [1, 0, 1], "5": []}')
    texts = {
        "0": {"title": "A", "brand": "HP", "categories": "x,y"},
        "1": {"title": "B", "description": "b"},
        "2": {"title": "C"},
    }
    (raw / "X.item.json").write_text(json.dumps(texts))
    (raw / "X.index.json").write_text('{"0": ["<a_0>"], "1": ["<a_1>"], "2": ["<a_2>"]}')
    for path in ("X.inter.json", "."):
        data = read("lcrec", path)
        assert rows(data) == [("0", "1"), ("0", "0"), ("0", "1")]
        assert data.items.to_pylist() == [
            {"item_id": "0", "title": "A", "text": "", "brand": "HP", "categories": ["x", "y"]},
            {"item_id": "1", "title": "B", "text": "b", "brand": None, "categories": []},
            {"item_id": "2", "title": "C", "text": "", "brand": None, "categories": []},
        ]
        assert data.codes is not None
        assert data.codes.tolist() == [[0], [1], [2]]
        assert data.counts == {"users_without_items": 1, "items_without_metadata": 0}


def test_lcrec_without_texts_takes_items_from_the_index(raw: Path) -> None:
    (raw / "X.inter.json").write_text('{"0": [0]}')
    (raw / "X.index.json").write_text('{"0": ["<a_0>"], "7": ["<a_1>"]}')
    assert read("lcrec", "X.inter.json").items["item_id"].to_pylist() == ["0", "7"]


# --- movielens


def ml100k(raw: Path) -> None:
    (raw / "u.data").write_text("1\t20\t5\t100\n1\t3\t4\t90\n2\t3\t1\t80\n")
    flags = {3: [5], 20: [1, 18]}
    lines = [
        f"{i}|{title}|01-Jan-1995||http://x|" + "|".join(str(int(g in flags[i])) for g in range(19))
        for i, title in ((3, 'Cité "perdue", La (1995)'), (20, "unknown"))
    ]
    (raw / "u.item").write_text("\n".join(lines) + "\n", encoding="latin-1")


def test_movielens_100k_is_latin_1_with_flags_for_genres(raw: Path) -> None:
    ml100k(raw)
    data = read("movielens", ".")
    assert rows(data) == [("1", "20"), ("1", "3"), ("2", "3")]
    assert data.events["timestamp"].to_pylist() == [100, 90, 80]
    assert data.events["rating"].to_pylist() == [5, 4, 1]
    assert data.items.to_pylist() == [
        {
            "item_id": "3",
            "title": 'Cité "perdue", La (1995)',
            "text": "",
            "genres": ["Comedy"],
            "year": 1995,
        },
        {
            "item_id": "20",
            "title": "unknown",
            "text": "",
            "genres": ["Action", "Western"],
            "year": None,
        },
    ]


def test_movielens_csv_has_quoted_titles_and_listed_genres(raw: Path) -> None:
    (raw / "ratings.csv").write_text("userId,movieId,rating,timestamp\n1,2,3.5,100\n1,9,4.0,110\n")
    (raw / "movies.csv").write_text(
        'movieId,title,genres\n2,"Fish, The (2001)",A|B\n5,Old,(no genres listed)\n'
    )
    data = read("movielens", ".")
    assert data.items["item_id"].to_pylist() == ["2", "5", "9"]
    assert data.items["title"].to_pylist() == ["Fish, The (2001)", "Old", "9"]
    assert data.items["genres"].to_pylist() == [["A", "B"], [], []]
    assert data.items["year"].to_pylist() == [2001, None, None]
    assert data.counts == {"items_without_metadata": 1}


# --- amazon


def lines(records: Iterable[Any]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def review(user: str, item: str, time: int, text: str = "", **more: Any) -> dict[str, Any]:
    return {
        "reviewerID": user, "asin": item, "overall": 5.0, "unixReviewTime": time,
        "reviewText": text, **more,
    }  # fmt: skip


def test_reviews_of_2018_are_read_plain_and_gzipped(raw: Path) -> None:
    meta = {
        "asin": "b", "title": "Bag", "brand": "X", "category": ["Bags", "<div>", "Bags"],
        "description": ["Holds", "things"], "feature": ["Red"], "price": "$1,012.50",
    }  # fmt: skip
    content = lines([review("u", "a", 9), review("", "a", 9), review("v", "b", 7)])
    (raw / "X_5.json").write_bytes(content)
    (raw / "X_5.json.gz").write_bytes(gzip.compress(content))
    (raw / "meta_X.json").write_bytes(lines([meta, meta | {"title": "again"}, {"title": "?"}]))
    made = read("amazon", "X_5.json")
    assert made.events.select(["user", "item", "timestamp", "rating"]).to_pylist() == [
        {"user": "u", "item": "a", "timestamp": 9, "rating": 5.0},
        {"user": "v", "item": "b", "timestamp": 7, "rating": 5.0},
    ]
    assert made.items.to_pylist() == [
        {
            "item_id": "b", "title": "Bag", "text": "Holds, things Red", "brand": "X",
            "categories": ["Bags"], "price": 1012.5,
        },
        {
            "item_id": "a", "title": "a", "text": "", "brand": None, "categories": [],
            "price": None,
        },
    ]  # fmt: skip
    assert made.counts == {
        "rows_without_user_or_item_dropped": 1,
        "item_rows_without_id_dropped": 1,
        "repeated_item_rows_dropped": 1,
        "items_without_metadata": 1,
    }
    assert read("amazon", "X_5.json.gz").events.equals(made.events)


def test_metadata_of_2014_are_literals_that_nobody_runs(raw: Path) -> None:
    (raw / "X_5.json").write_bytes(lines([review("u", "a", 9)]))
    meta = raw / "meta_X.json"
    meta.write_text("{'asin': 'a', 'title': \"Chef's\", 'categories': [['A', 'B'], ['A', 'C']]}\n")
    row = read("amazon", "X_5.json").items.to_pylist()[0]
    assert (row["title"], row["categories"]) == ("Chef's", ["A", "B", "C"])
    meta.write_text("{'asin': __import__('os').mkdir('/tmp/never')}\n")
    with pytest.raises(DataError, match=r"meta_X\.json:1: neither JSON nor a Python literal"):
        read("amazon", "X_5.json")
    meta.write_text("{'asin': 'a', 'title': " + "[" * 5000 + "\n")
    with pytest.raises(DataError, match="neither JSON nor a Python literal"):
        read("amazon", "X_5.json")


def test_reviews_of_2023_have_milliseconds_and_parent_items(raw: Path) -> None:
    record = {
        "user_id": "u",
        "parent_asin": "p",
        "asin": "a",
        "rating": 4,
        "timestamp": 1588687728923,
    }
    (raw / "X.jsonl").write_bytes(lines([record]))
    (raw / "meta_X.jsonl").write_bytes(
        lines([{"parent_asin": "p", "title": "P <i>x</i>", "store": "S", "price": None}])
    )
    made = read("amazon", "X.jsonl")
    assert made.events["timestamp"].to_pylist() == [1588687728]
    assert made.counts["timestamps_in_milliseconds"] == 1
    assert made.items.to_pylist()[0]["title"] == "P x"
    assert made.items.to_pylist()[0]["brand"] == "S"
    with pytest.raises(DataError, match=r"in data row 1, .*after the year 5138.*data\.time_unit"):
        read("amazon", "X.jsonl", time_unit="s")


def test_a_gzip_file_that_is_cut_off_says_where_and_what_to_do(raw: Path) -> None:
    whole = gzip.compress(lines(review("u", f"i{i}", i, f"text {i * i}") for i in range(2000)))
    (raw / "X.json.gz").write_bytes(whole[: len(whole) // 2])
    message = rf"is cut off at byte [\d,]+ of {len(whole) // 2:,}; .* lines\) .*Get it again"
    with pytest.raises(DataError, match=message):
        read("amazon", "X.json.gz")
    table = b"user,item,ts\n" + b"".join(
        b"u%d,i%d,15000%05d\n" % (i, i * i, i) for i in range(5000)
    )
    whole = gzip.compress(table)
    (raw / "e.csv.gz").write_bytes(whole[:-2000])
    readable = zlib.decompressobj(wbits=31).decompress(whole[:-2000])
    complete = readable.count(b"\n")
    assert 1000 < complete < 5000
    message = rf"the gzip file is cut off at byte .* {len(readable):,} bytes .* head -n {complete} "
    with pytest.raises(DataError, match=message):
        read("table", "e.csv.gz")
    broken = bytearray(whole)
    broken[len(whole) // 2] ^= 0xFF
    (raw / "e.csv.gz").write_bytes(bytes(broken))
    with pytest.raises(DataError, match=r"the gzip file is (damaged|cut off)"):
        read("table", "e.csv.gz")


# --- table

T = 1_500_000_000
EVENTS = f"who,what,when,stars\nu1,007,{T + 100},4\nu1,a,{T + 90},\nu2,a,{T + 80},5\n"
COLUMNS = {"user": "who", "item": "what", "timestamp": "when", "rating": "stars"}


def columns(**names: str) -> Any:
    return COLUMNS | names


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_a_table_is_read_by_the_names_of_its_columns(raw: Path, delimiter: str) -> None:
    (raw / "e.csv").write_text(EVENTS.replace(",", delimiter))
    data = read("table", "e.csv", columns=columns())
    assert rows(data) == [("u1", "007"), ("u1", "a"), ("u2", "a")]
    assert data.events["timestamp"].to_pylist() == [T + 100, T + 90, T + 80]
    assert data.events["rating"].to_pylist() == [4, None, 5]
    assert data.items["item_id"].to_pylist() == ["007", "a"]


def test_items_bring_titles_texts_and_typed_attributes(raw: Path) -> None:
    (raw / "e.csv").write_text(EVENTS)
    (raw / "i.csv").write_text(
        "what,name,blurb,tags,price,size,new,void\n"
        "a,Apple,Red,x|y,1.5,3,true,\nb,Bean,,z,2,4,false,\n,Nobody,,,1,1,true,\na,Again,,,1,1,true,\n"
    )
    data = read("table", "e.csv", items="i.csv", columns=columns(title="name", text="blurb"))
    unknown = {"tags": None, "price": None, "size": None, "new": None}
    assert data.items.to_pylist() == [
        {"item_id": "a", "title": "Apple", "text": "Red", "tags": ["x", "y"], "price": 1.5,
         "size": 3, "new": True, "available": True},
        {"item_id": "b", "title": "Bean", "text": "", "tags": ["z"], "price": 2.0,
         "size": 4, "new": False, "available": True},
        {"item_id": "007", "title": "007", "text": "", "available": False, **unknown},
    ]  # fmt: skip
    assert data.counts == {"items_without_metadata": 1}
    assert data.report.counts == {
        "item_rows_without_id_dropped": 1,
        "repeated_item_rows_dropped": 1,
        "unknown_items": 1,
        "columns_without_information_dropped": 1,
        "unavailable_items": 1,
    }


def kinds(data: RawData) -> list[tuple[str, str]]:
    """The items and types of the events that were read, in the order of the file."""
    numbers = data.events["behaviour"].to_pylist() if data.behaviours else [0] * len(data.events)
    names = data.behaviours or ["purchase"]
    return [(i, names[n]) for i, n in zip(data.events["item"].to_pylist(), numbers, strict=True)]


@pytest.mark.parametrize(
    ("column", "values", "types"),
    [
        # An order list of a shop: no types, so what is left is a purchase.
        ("Financial Status", ("paid", "refunded", "voided, payment failed", ""),
         ["purchase", "return", None, "purchase"]),
        ("cancelled_at", ("", "2024-05-01 10:00", "", "no"),
         ["purchase", None, "purchase", "purchase"]),
        # Two columns, as in a shop's order list.
        ("Financial Status,Cancelled at", ("paid,", "refunded,", "refunded,2024-05-01", "pending,"),
         ["purchase", "return", None, "purchase"]),
        ("cancelled,returned", ("no,no", "yes,no", "no,yes", "no,"),
         ["purchase", None, "return", "purchase"]),
        # With types: a sale that was taken back is a return, and a dislike remains one.
        ("returned,event", ("yes,sale", "no,sale", "yes,dislike", ",view"),
         ["return", "sale", "dislike", "view"]),
        ("cancelled,event", ("yes,sale", "no,sale", "yes,dislike", ",view"),
         [None, "sale", "dislike", "view"]),
    ],
)  # fmt: skip
def test_orders_that_were_taken_back(raw: Path, column, values, types) -> None:
    lines = [f"u,i{row},{T + row}," for row in range(4)]
    if "," not in column:
        values = [f'"{value}"' for value in values]
    rows = "".join(f"{line}{value}\n" for line, value in zip(lines, values, strict=True))
    (raw / "e.csv").write_text(f"user,item,timestamp,{column}\n{rows}")
    data = read("table", "e.csv")
    assert kinds(data) == [(f"i{row}", name) for row, name in enumerate(types) if name]
    dropped = types.count(None)
    assert data.report.counts.get("rows_of_cancelled_orders_dropped", 0) == dropped


@pytest.mark.parametrize(
    ("state", "meaning"),
    [
        ("Cancelled - no stock", "cancelled"), ("Storniert (keine Zahlung)", "cancelled"),
        ("Annulée - non payée", "cancelled"), ("not paid", "cancelled"),
        ("nicht bezahlt", "cancelled"), ("CancelledByCustomer", "cancelled"),
        ("Anulado", "cancelled"), ("Cancelled and refunded", "cancelled"),
        ("charge back", "return"), ("Zurückerstattet", "return"), ("Refunded by partner", "return"),
        ("Remboursement", "return"),
        ("refund declined", "purchase"), ("Refund failed", "purchase"),
        ("Canceled Reversal", "purchase"), ("Cancellation declined", "purchase"),
        ("parcialmente reembolsado", "purchase"), ("deels terugbetaald", "purchase"),
        ("not refunded", "purchase"), ("Cancelled: no", "purchase"),
        ("Teilerstattung", "purchase"), ("returning", "purchase"), ("paid", "purchase"),
    ],
)  # fmt: skip
def test_states_of_orders(raw: Path, state: str, meaning: str) -> None:
    (raw / "e.csv").write_text(
        f"user,item,timestamp,order status\nu,a,{T},paid\nu,b,{T + 1},{state}\n"
        f"u,c,{T + 2},refunded\n"
    )
    middle = [] if meaning == "cancelled" else [("b", meaning)]
    assert kinds(read("table", "e.csv")) == [("a", "purchase"), *middle, ("c", "return")]


def test_rows_behind_a_quote_that_is_not_closed_are_counted(raw: Path) -> None:
    lines = [f"u{n % 9},i{n % 7},{T + n},page {n},web" for n in range(900)]
    lines[100] = f'u1,i1,{T + 100},"page 100,web'  # the next quote ends this value
    lines[103] = f'u1,i1,{T + 103},an inch is 1",web'
    lines[500] = f'u1,i1,{T + 500},"first, line\none, two, three, four, five\nlast",web'
    (raw / "e.csv").write_text("user,item,timestamp,page,source\n" + "\n".join(lines) + "\n")
    data = read("table", "e.csv")
    assert len(data.events) == 896
    assert data.report.counts["damaged_rows_skipped"] == 4


def test_a_cancelled_order_says_nothing_about_earlier_ones(raw: Path) -> None:
    (raw / "e.csv").write_text(
        "customer,product,ordered_at,status\n"
        "ann,coffee,2024-05-01 09:00,paid\nann,coffee,2024-06-01 09:00,paid\n"
        "ann,coffee,2024-07-01 09:00,cancelled\nann,tea,2024-07-02 09:00,paid\n"
        "bob,tea,2024-05-01 09:00,paid\nbob,coffee,2024-05-02 09:00,paid\n"
    )
    items = [item for item, kind in kinds(read("table", "e.csv")) if kind == "purchase"]
    assert items == ["coffee", "coffee", "tea", "tea", "coffee"]
    every = kinds(read("table", "e.csv", clean=CleanConfig(skip=("cancelled_orders",))))
    assert every.count(("coffee", "purchase")) == 4


def test_an_order_may_be_divided_between_parts_of_a_file(raw: Path, monkeypatch) -> None:
    monkeypatch.setattr("recsys.data.opening.BLOCK", 1 << 10)
    lines = []
    for order in range(40):
        state = "refunded" if order % 2 else "paid"
        for line in range(10):
            time = f"2024-05-01 10:{order:02}"
            lines.append(f"u{order % 7},i{line % 9},{time},{'' if line else state}")
    (raw / "e.csv").write_text("user,item,timestamp,Financial Status\n" + "\n".join(lines) + "\n")
    found = [kind for _, kind in kinds(read("table", "e.csv"))]
    assert found == (["purchase"] * 10 + ["return"] * 10) * 20


@pytest.mark.parametrize(
    "rows",
    [
        # dates without a time of day may be those of several orders
        ["u,a,2024-05-01,yes", "u,b,2024-05-01,", "u,c,2024-05-01,"],
        # each row has a state of its own
        ["u,a,2024-05-01 10:00,yes", "u,b,2024-05-01 10:00,", "u,c,2024-05-01 10:00,no"],
    ],
)
def test_a_return_of_one_row_is_no_return_of_others(raw: Path, rows: list[str]) -> None:
    (raw / "e.csv").write_text("user,item,timestamp,returned\n" + "\n".join(rows) + "\n")
    found = [kind for _, kind in kinds(read("table", "e.csv"))]
    assert found == ["return", "purchase", "purchase"]


@pytest.mark.parametrize(("column", "late"), [("status", "refunded"), ("returned", "yes")])
def test_returns_that_only_a_later_file_has_count(raw: Path, column: str, late: str) -> None:
    (raw / "export").mkdir()
    early = {"refunded": "paid", "yes": "no"}[late]
    for month, said in enumerate((early, late)):
        (raw / "export" / f"{month}.csv").write_text(
            f"user,item,timestamp,{column}\nu,a,{T + month},{said}\nv,b,{T + month},{early}\n"
        )
    assert kinds(read("table", "export")).count(("a", "return")) == 1


def test_fields_that_only_late_lines_have_are_read(raw: Path) -> None:
    with (raw / "e.jsonl").open("w") as stream:
        for n in range(9000):
            event = {"user": f"u{n % 50}", "item": f"i{n % 70}", "timestamp": T + n, "x": "x" * 100}
            late = {"cancelled_at": "2024-05-01"} if n in (8000, 8500) else {}
            stream.write(json.dumps(event | late) + "\n")
    found = [item for item, _ in kinds(read("table", "e.jsonl"))]
    assert found == [f"i{n % 70}" for n in range(9000) if n not in (8000, 8500)]


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin"])
def test_times_in_json_keep_their_zone(raw: Path, zone: str) -> None:
    times = ["2024-05-01T10:00:00Z", "2024-05-01T12:00:00+02:00", "2024-05-01T10:00:00.000Z"]
    (raw / "e.jsonl").write_text(
        "".join(
            json.dumps({"user": "u", "item": "i", "order": {"date": time}}) + "\n" for time in times
        )
    )
    data = read("table", "e.jsonl", time_zone=zone)
    assert data.events["timestamp"].to_pylist() == [1714557600] * 3


def test_ratings_may_have_words_and_stars() -> None:
    forms = ["{}/5", "{}.0 out of 5 stars", "{} von 5 Sternen", "{} étoiles", "{} star rating"]
    texts = [form.format(n) for form in forms for n in (1, 3, 5)]
    texts += ["1 étoile", "★★★☆☆", "★★★★★", "⭐", "⭐⭐⭐", "⭐⭐⭐⭐⭐"]
    assert read_ratings(pa.chunked_array([texts])).to_pylist() == [1, 3, 5] * 7


def test_an_item_is_available_if_one_of_its_variants_is(raw: Path) -> None:
    (raw / "e.csv").write_text(
        "user,item,timestamp\n" + f"u,a,{T}\nu,b,{T + 1}\nv,c,{T}\nv,d,{T + 1}\n"
    )
    (raw / "i.csv").write_text(
        "item,title,published,stock,hidden\n"
        "a,A,true,0,no\na,,,5,\n"  # the second size is in stock
        "b,B,false,3,no\nb,,,5,\n"  # not published
        "c,C,true,0,no\nd,D,true,2,yes\nd,,,2,\nc,,,0,\n"  # sold out, and hidden
    )
    items = read("table", "e.csv", items="i.csv").items
    found = dict(zip(items["title"].to_pylist(), items["available"].to_pylist(), strict=True))
    assert found == {"A": True, "B": False, "C": False, "D": False}


@pytest.mark.parametrize(
    ("header", "rows", "available"),
    [
        ("Published,In stock?", ["1,1", "-1,1", "1,0"], [True, False, False]),  # WooCommerce
        ("active,instock", ["1,5", "0,10", "1,0"], [True, False, False]),  # Shopware
        ("status,is_in_stock", ["1,1", "2,1", "1,0"], [True, False, False]),  # Magento
        ("Published,Status", ["true,active", "true,draft", "true,archived"], [True, False, False]),
        ("sold_out,name", [",x", "✓,y", "да,z"], [True, False, False]),
    ],
)
def test_items_are_available_if_published_and_in_stock(
    raw: Path, header: str, rows: list[str], available: list[bool]
) -> None:
    (raw / "e.csv").write_text("user,item,timestamp\n" + "".join(f"u,{i},{T}\n" for i in "abc"))
    lines = [f"{item},{row}\n" for item, row in zip("abc", rows, strict=True)]
    (raw / "i.csv").write_text(f"item,{header}\n" + "".join(lines))
    data = read("table", "e.csv", items="i.csv")
    assert data.items["available"].to_pylist() == available


def test_values_that_do_not_say_what_is_available_are_named(raw: Path) -> None:
    items = [f"i{n}" for n in range(30)]
    (raw / "e.csv").write_text("user,item,timestamp\n" + "".join(f"u,{i},{T}\n" for i in items))
    said = ["Temporarily out of stock", "out of stock", *["in stock"] * 28]
    lines = [f"{item},{one}\n" for item, one in zip(items, said, strict=True)]
    (raw / "i.csv").write_text("item,availability\n" + "".join(lines))
    data = read("table", "e.csv", items="i.csv")
    assert data.items["available"].to_pylist() == [True, False] + [True] * 28
    assert any("'Temporarily out of stock'" in note for note in data.report.notes)


@pytest.mark.parametrize("first", [True, False])
def test_dates_of_items_are_in_the_order_that_is_given(raw: Path, first: bool) -> None:
    (raw / "e.csv").write_text(f"user,item,timestamp\nu,a,{T}\nv,a,{T}\n")
    (raw / "i.csv").write_text("item,available_until\na,12/01/2026\n")
    data = read("table", "e.csv", items="i.csv", day_first=first)
    (until,) = data.items["available_until"].to_pylist()
    assert until == (1768262400 if first else 1796169600)  # the end of 12 January or 1 December


def test_rows_of_an_order_have_the_state_of_its_first_row(raw: Path) -> None:
    (raw / "e.csv").write_text(
        "user,item,timestamp,status\n"
        f"u,a,{T},refunded\nu,b,{T},\nu,c,{T},\n"  # one order of three items
        f"u,d,{T + 1},\n"  # another time
        f"v,a,{T + 1},paid\nv,b,{T + 1},\n"
        f"w,a,{T + 1},\nw,b,{T + 2},refunded\nw,b,,\n"
    )
    data = read("table", "e.csv")
    rows = data.events.select(["user", "item", "behaviour"]).to_pylist()
    found = {(row["user"], row["item"]): data.behaviours[row["behaviour"]] for row in rows}
    assert [pair for pair, kind in found.items() if kind == "return"] == [
        ("u", "a"), ("u", "b"), ("u", "c"), ("w", "b"),
    ]  # fmt: skip
    assert len(found) == 8


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_lists_that_hold_no_items_change_no_number_of_events(raw: Path, suffix: str) -> None:
    params = [[], [{"key": "a", "value": "1"}, {"key": "b", "value": "2"}], None]
    events = [
        {"user": f"u{n % 5}", "item": f"i{n % 3}", "timestamp": T + n, "params": params[n % 3]}
        for n in range(60)
    ]
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(events), raw / "e.parquet")
    else:
        (raw / "e.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    data = read("table", f"e.{suffix}")
    assert rows(data) == [(event["user"], event["item"]) for event in events]
    assert not data.report.counts.get("duplicate_rows_dropped")


def test_every_column_of_what_is_unavailable_counts(raw: Path) -> None:
    (raw / "e.csv").write_text("user,item,timestamp\n" + "".join(f"u,{i},{T}\n" for i in "abcd"))
    (raw / "i.csv").write_text(
        "item,is_deleted,sold_out,hidden\na,0,no,\nb,1,no,\nc,0,yes,\nd,0,,true\n"
    )
    data = read("table", "e.csv", items="i.csv")
    assert data.items["available"].to_pylist() == [True, False, False, False]
    assert not {"is_deleted", "sold_out", "hidden"} & set(data.items.column_names)
    assert [one["column"] for one in data.report.columns if "unavailable" in one["role"]] == [
        "sold_out", "hidden", "is_deleted",
    ]  # fmt: skip
    named = read("table", "e.csv", items="i.csv", columns={"unavailable": "hidden"})
    assert named.items["available"].to_pylist() == [True, True, True, False]
    assert any("'is_deleted'" in note and "not read" in note for note in named.report.notes)


def test_items_outside_their_dates_are_counted(raw: Path) -> None:
    (raw / "e.csv").write_text(f"user,item,timestamp\nu,a,{T}\nu,b,{T}\nu,c,{T}\n")
    (raw / "i.csv").write_text(
        "item,available_from,available_until\na,2020-01-01,2021-01-01\nb,2020-01-01,\n"
        "c,2099-01-01,\n"
    )
    counts = read("table", "e.csv", items="i.csv").report.counts
    assert counts["items_outside_dates"] == 2
    assert "unavailable_items" not in counts


def test_a_table_without_timestamps_is_in_order(raw: Path) -> None:
    (raw / "e.csv").write_text("user,item\nu,b\nu,a\nu,b\n")
    data = read("table", "e.csv", columns={"timestamp": "file-order"})
    assert rows(data) == [("u", "b"), ("u", "a"), ("u", "b")]
    assert "timestamp" not in data.events.column_names


@pytest.mark.parametrize(
    ("written", "unit", "count"),
    [
        (1_588_687_728, "s", {}),
        (1_588_687_728_923, "ms", {"timestamps_in_milliseconds": 2}),
        (1_588_687_728_923_000, "us", {"timestamps_in_microseconds": 2}),
        (1_588_687_728_923_000_000, "ns", {"timestamps_in_nanoseconds": 2}),
    ],
)
def test_units_of_time_are_told_by_size_or_said(
    raw: Path, written: int, unit: str, count: dict[str, int]
) -> None:
    (raw / "e.csv").write_text(f"user,item,timestamp\nu,a,{written}\nu,b,{written}\n")
    for asked in ("auto", unit):
        data = read("table", "e.csv", time_unit=asked)
        assert data.events["timestamp"].to_pylist() == [1_588_687_728] * 2
        assert {k: v for k, v in data.counts.items() if k.startswith("timestamps")} == count


def test_seconds_and_milliseconds_may_be_mixed_in_a_column(raw: Path) -> None:
    (raw / "e.csv").write_text("user,item,timestamp\nu,a,1588687728\nu,b,1588687728923\n")
    data = read("table", "e.csv")
    assert data.events["timestamp"].to_pylist() == [1_588_687_728] * 2
    assert data.counts["timestamps_in_milliseconds"] == 1
    unread = read("table", "e.csv", time_unit="s").report.counts
    assert unread == {"rows_with_unreadable_times_dropped": 1}


@pytest.mark.parametrize("source", [*READERS, "synthetic"])
def test_every_source_is_in_help_settings_and_docs(source):
    root = Path(__file__).parents[2]
    assert source in CliRunner(env={"COLUMNS": "200"}).invoke(app, ["prepare", "--help"]).stdout
    assert f"`{source}`" in fields_of(DataConfig)["source"].description
    assert f"`{source}`" in (root / "data" / "README.md").read_text(encoding="utf-8")


def test_an_export_of_which_nothing_is_left_names_the_rule_and_the_setting(tmp_path):
    file = tmp_path / "events.csv"
    file.write_text("customer,sku,bought_at\n" + "".join(
        f"c{row % 5},s{row % 7},{32_503_680_000 + row}\n" for row in range(40)
    ))  # fmt: skip
    says = r"events\.csv: no usable rows are left.*40 rows have a time .*in the future \(e\.g\. "
    with pytest.raises(DataError, match=says) as error:
        read("table", str(file))
    assert "--set data.clean.skip=impossible_times keeps them" in str(error.value)
