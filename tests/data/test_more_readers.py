"""Amazon on small files written here, right ones and wrong ones."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from recsys.data.prepare import DataConfig
from recsys.data.raw import RawData
from recsys.data.readers import READERS
from recsys.errors import DataError


def read(source: str, path: str, **section: Any) -> RawData:
    return READERS[source].read(DataConfig(source=source, path=path, **section).reader()).gather()


def lines(records: Iterable[Any]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def review(user: str, item: str, time: int, text: str = "", **more: Any) -> dict[str, Any]:
    return {
        "reviewerID": user, "asin": item, "overall": 5.0, "unixReviewTime": time,
        "reviewText": text, **more,
    }  # fmt: skip


# --- amazon


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
