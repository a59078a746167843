"""A shop's export with every kind of dirt: what is found, what is done, and what is kept."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys.artifacts import read_manifest
from recsys.data.cleaning import CleanConfig
from recsys.data.prepare import DataConfig, build
from recsys.dataset import Dataset
from recsys.errors import DataError
from recsys.splits import TEST, TRAIN, VALID

DAY = 86_400
T = 1_700_000_000


def write(path: Path, rows: list[str]) -> None:
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")


def clean_events(users: int = 40, events: int = 8) -> list[str]:
    """Views of users, a day apart; every fourth event is a purchase."""
    return [
        f"k{user},s{(user + 3 * n) % 12},{T + DAY * n + 60 * user},"
        f"{'purchase' if n % 4 == 3 else 'view'}"
        for user in range(users)
        for n in range(events)
    ]


def events_at_random(users: int = 120, events: int = 8) -> list[str]:
    """Views and purchases of users at any time of a year."""
    rng = np.random.default_rng(0)
    return [
        f"k{user},s{rng.integers(12)},{T + rng.integers(365 * DAY)},"
        f"{('view', 'purchase')[rng.integers(2)]}"
        for user in range(users)
        for _ in range(events)
    ]


@pytest.fixture
def export(raw: Path) -> Path:
    """Events and items with one case of each trap."""
    dirt = [
        f",s1,{T},view",  # no user
        f"k1,null,{T},view",  # no item
        "k1,s1,,view",  # no time
        "k1,s1,soon,view",
        "k1,s1,2087-01-01,view",
        "k1,s1,1970-01-01,view",
        f"k2,GONE,{T + 50 * DAY},view",
        f"k3,s5,{T + 50 * DAY},view", f"k3,s5,{T + 50 * DAY + 60},add_to_cart",
        f"k3,s5,{T + 50 * DAY + 90},purchase", f"k3,s5,{T + 50 * DAY + 90},purchase",
        f"k4,s9,{T + 50 * DAY},view", f"k4,s9,{T + 51 * DAY},Retoure",
        "k5,s6,2023-12-24T18:00:00+01:00,view",
        "k9,s1",  # damaged
    ]  # fmt: skip
    dirt += [f"robot,s{n % 12},{T + 40 * n},view" for n in range(700)]
    dirt += [f"guest,s{n % 12},{T + 900 * n},view" for n in range(60)]
    write(raw / "events.csv", ["customer_id,sku,ts,event", *clean_events(), *dirt])
    items = [
        f's{n},<b>Thing</b> {n} &amp; more,Home > Kitchen > K{n % 3},"{n},50 €",{stock},one'
        for n, stock in enumerate(["yes", "no"] * 6)
    ]
    items += ["s3,Again,Home,1,no,one", ",Nameless,Home,1,yes,one", "s99,,Garden,1,yes,one"]
    write(raw / "items.csv", ["sku,name,category,price,in_stock,shop", *items])
    return raw / "events.csv"


def test_every_kind_of_dirt_is_found(export: Path, prepare: Callable[..., Dataset]) -> None:
    data = prepare(source="table", path="events.csv", items="items.csv")
    assert len(data.interactions) > 250
    users = set(data.interactions.user_ids.tolist())
    assert users == {f"k{n}" for n in range(40)}
    info = read_manifest(export.parents[1] / "home/datasets/t").info["cleaning"]
    assert {row["rule"]: row["count"] for row in info["findings"]} == {
        "damaged_rows_skipped": 1,
        "rows_without_user_or_item_dropped": 2,
        "rows_with_unreadable_times_dropped": 2,
        "times_with_a_zone": 1,
        "rows_with_impossible_times_dropped": 2,
        "events_of_placeholder_users_dropped": 60,
        "events_of_bots_dropped": 700,
        "duplicate_rows_dropped": 1,
        "near_duplicate_events_merged": 2,
        "negative_events_dropped": 1,
        "events_before_negative_dropped": 1,
        "unknown_items": 1,
        "item_rows_without_id_dropped": 1,
        "repeated_item_rows_dropped": 1,
        "items_without_title": 1,
        "item_texts_cleaned": 12,
        "prices_read": 12,
        "category_paths_split": 12,
        "columns_without_information_dropped": 1,
        "unavailable_items": 7,
    }
    assert {row["role"]: row["column"] for row in info["columns"]} == {
        "item": "sku", "timestamp": "ts", "user": "customer_id", "behaviour": "event",
        "id": "sku", "title": "name", "price": "price", "category": "category",
        "available": "in_stock",
    }  # fmt: skip


def test_items_of_an_export_are_clean(export: Path) -> None:
    path = str(export)
    data = build(DataConfig(source="table", path=path, items=str(export.with_name("items.csv"))))
    items = {row["item_id"]: row for row in data.dataset.items.to_pylist()}
    assert items["s3"] == {
        "item_id": "s3", "title": "Thing 3 & more", "text": "", "available": False,
        "category": ["Home", "Kitchen", "K0"], "category_top": "Home", "price": 3.5,
    }  # fmt: skip
    assert items["GONE"]["available"] is False
    assert items["s99"]["title"] == "s99"
    assert data.dataset.attributes == ["category", "category_top", "price"]


def test_a_rule_that_is_off_changes_nothing(export: Path) -> None:
    clean = CleanConfig(
        bots=0,
        skip=("placeholder_users", "near_duplicates", "negative_feedback", "impossible_times",
              "unknown_items", "item_texts", "prices", "category_paths", "constant_columns"),
    )  # fmt: skip
    made = build(
        DataConfig(
            source="table", path=str(export), items=str(export.with_name("items.csv")), clean=clean,
            duplicates="keep",
        )
    )  # fmt: skip
    assert made.report is not None
    assert set(made.report.counts) == {
        "damaged_rows_skipped", "rows_without_user_or_item_dropped",
        "rows_with_unreadable_times_dropped", "times_with_a_zone",
        "item_rows_without_id_dropped",
        "repeated_item_rows_dropped", "items_without_title", "unavailable_items",
    }  # fmt: skip
    assert {"guest", "robot"} <= set(made.dataset.interactions.user_ids.tolist())
    items = {row["item_id"]: row for row in made.dataset.items.to_pylist()}
    assert items["s3"]["title"] == "<b>Thing</b> 3 &amp; more"
    assert items["GONE"]["available"] is True


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("missing_ids", "column of the user: data row 321: '' cannot be used"),
        ("unreadable_times", "column of the timestamp: data row 323: '' cannot be used"),
    ],
)
def test_a_row_can_be_refused_instead(export: Path, rule: str, message: str) -> None:
    clean = CleanConfig(skip=(rule,))
    with pytest.raises(DataError, match=message):
        build(DataConfig(source="table", path=str(export), clean=clean))


def test_the_report_is_a_page_and_a_table(
    export: Path, prepare: Callable[..., Dataset], capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(source="table", path="events.csv", items="items.csv")
    page = (export.parents[1] / "home/datasets/t/report.html").read_text(encoding="utf-8")
    for text in ("customer_id", "robot: 700 events", "--set data.clean.bots=0", "GONE"):
        assert text in page
    assert "<b>Thing" not in page
    assert "data.clean" in capsys.readouterr().err.replace("\n", "")


@pytest.mark.parametrize("dates", ["{day}.08.2025", "08/{day}/2025"])
@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.dictionary(pa.int32(), pa.large_string()),
    ],
    ids=str,
)
def test_dates_in_parquet_are_read_from_every_type_of_text(raw: Path, kind, dates) -> None:
    users = [f"u{n // 8}" for n in range(320)]
    items = [f"i{(n // 8 + 3 * n) % 24}" for n in range(320)]
    days = pa.array([dates.format(day=14 + n % 8) for n in range(320)]).cast(kind)
    pq.write_table(pa.table({"user": users, "item": items, "date": days}), raw / "e.parquet")
    found = build(DataConfig(source="table", path="e.parquet")).dataset.interactions
    first = 1_755_129_600  # 14 August 2025, midnight UTC
    assert sorted(set(found.timestamp.tolist())) == [first + DAY * n for n in range(8)]


def test_sessions_with_times_are_split_by_time(raw: Path) -> None:
    rows = [
        f"s{n:03},{T + n * DAY // 4 + 60 * event},i{(n + event) % 9}"
        for n in range(400)
        for event in range(3)
    ]
    write(raw / "s.csv", ["session_id,ts,item", *rows])
    made = build(DataConfig(source="table", path="s.csv"))
    assert made.split == "global-temporal"
    assert made.report is not None
    assert "Each session is asked for items after its first event." in made.report.notes[-1]
    test = made.dataset.examples("test")
    assert len(test) == 40  # the sessions of the last tenth
    assert set(test.histories.lengths.tolist()) == {1}
    first = made.dataset.interactions.timestamp[made.dataset.split == VALID].min()
    assert made.dataset.interactions.timestamp[made.dataset.split == TRAIN].max() < first


def test_a_session_stands_for_an_unknown_user(raw: Path) -> None:
    rows = [f"x{n % 50},{line}" for n, line in enumerate(clean_events())]
    rows += [f"anonymous-1,,s{n},{T + n * DAY},view" for n in (1, 2)]
    rows += [f",,s1,{T},view"]
    write(raw / "e.csv", ["session_id,customer_id,sku,ts,event", *rows])
    made = build(DataConfig(source="table", path="e.csv"))
    assert "anonymous-1" in made.dataset.interactions.user_ids.tolist()
    assert made.decisions["sessions_without_user"] == 2
    assert made.decisions["rows_without_user_or_item_dropped"] == 1
    without = DataConfig(source="table", path="e.csv", columns={"session": "none"})
    assert build(without).decisions["rows_without_user_or_item_dropped"] == 3


def test_numbers_of_types_need_a_setting(raw: Path) -> None:
    rows = [line.replace("purchase", "1").replace("view", "0") for line in clean_events()]
    write(raw / "e.csv", ["user,item,ts,type", *rows])
    with pytest.raises(
        DataError, match=r"column 'type' are numbers \(0, 1\).*columns.behaviour=none"
    ):
        build(DataConfig(source="table", path="e.csv"))
    ignored = build(DataConfig(source="table", path="e.csv", columns={"behaviour": "none"}))
    assert ignored.dataset.behaviours == ()
    given: Any = {0: "context", 1: "target"}
    made = build(DataConfig(source="table", path="e.csv", behaviours=given))
    assert [tuple(b) for b in made.dataset.behaviours] == [
        ("0", "context", 0.2), ("1", "target", 1.0),
    ]  # fmt: skip


def test_the_split_is_by_time_where_enough_users_remain(raw: Path) -> None:
    write(raw / "r.csv", ["user,item,ts,event", *events_at_random()])
    made = build(DataConfig(source="table", path="r.csv"))
    assert made.split == "global-temporal"
    times = [made.dataset.interactions.timestamp[made.dataset.split == s] for s in range(3)]
    assert times[0].max() < times[1].min() <= times[1].max() < times[2].min()
    write(raw / "e.csv", ["user,item,ts,event", *clean_events(users=80)])
    one = build(DataConfig(source="table", path="e.csv", split="leave-one-out")).dataset
    purchase = [b.name for b in one.behaviours].index("purchase")
    for label in (VALID, TEST):
        assert (one.interactions.behaviour[one.split == label] == purchase).sum() == 80
    assert (one.split == TRAIN).sum() == 3 * 80


def test_a_small_export_is_split_by_user(raw: Path) -> None:
    write(raw / "e.csv", ["user,item,ts,event", *clean_events(users=9)])
    made = build(DataConfig(source="table", path="e.csv"))
    assert made.split == "leave-one-out"
    assert made.report is not None
    assert "fewer than 30" in made.report.notes[-1]


def test_what_users_saw_after_their_last_purchase_is_kept(
    raw: Path, prepare: Callable[..., Dataset]
) -> None:
    told = ["view a", "purchase b", "view c", "purchase d", "view e", "view f"]
    rows = [
        f"u{user},{item}{user % 3},{T + 90 * DAY * user + 3600 * n},{kind}"
        for user in range(9)
        for n, (kind, item) in enumerate(map(str.split, told))
    ]
    write(raw / "e.csv", ["user,item,ts,event", *rows])
    made = prepare(source="table", path="e.csv", split="leave-one-out")
    for user in range(9):
        own = made.interactions.user == made.interactions.user_ids.tolist().index(f"u{user}")
        items = made.item_ids[made.interactions.item[own]].tolist()
        assert items == [f"{letter}{user % 3}" for letter in "abcdef"]
        assert made.split[own].tolist() == [0, 1, 2, 2, 2, 2]
    examples = made.examples("test", "all-future")
    assert examples.histories.lengths.tolist() == [3] * 9, "not what came after the question"
    assert examples.targets.lengths.tolist() == [1] * 9


def test_a_file_that_is_mostly_utf8_is_not_read_as_windows_1252(raw: Path) -> None:
    rows = [f"u{n % 9},Größe{n % 7},{T + n}" for n in range(60)]
    text = "\n".join(["user,item,ts", *rows]).encode()
    (raw / "e.csv").write_bytes(text + "\nu1,Größe1,1700000099\n".encode("cp1252"))
    with pytest.raises(DataError, match=r"60 lines .* UTF-8 and 1 have .* line 62\); save"):
        build(DataConfig(source="table", path="e.csv"))
    (raw / "e.csv").write_bytes(text.decode().encode("cp1252"))
    made = build(DataConfig(source="table", path="e.csv"))
    assert "Größe1" in made.dataset.item_ids
    assert made.report is not None
    assert made.report.counts["files_not_in_utf8"] == 1


def test_a_column_of_availability_that_says_maybe_is_left_out(raw: Path) -> None:
    write(raw / "e.csv", ["user,item,ts,event", *clean_events(users=9)])
    said = ("TRUE", "maybe", "", "false")
    items = [f"s{n},n{n},{said[n % 4]}" for n in range(40)]
    write(raw / "i.csv", ["item,name,available", *items])
    made = build(DataConfig(source="table", path="e.csv", items="i.csv"))
    assert "available" not in made.dataset.items.column_names
    assert made.report is not None
    assert any("'maybe'" in note for note in made.report.notes)


def test_items_that_share_no_id_are_refused(raw: Path) -> None:
    write(raw / "e.csv", ["user,item,ts,event", *clean_events()])
    write(raw / "i.csv", ["item,name", *(f"{n + 5000},Thing" for n in range(60))])
    with pytest.raises(
        DataError, match="no item of the events is in this file; the events have s0"
    ):
        build(DataConfig(source="table", path="e.csv", items="i.csv"))


def test_columns_that_say_nothing_are_dropped(raw: Path) -> None:
    write(raw / "e.csv", ["user,item,ts,event", *clean_events()])
    rows = [f"{n},s{n},{n % 3},EUR,,{'x' if n else ''},00{n},{n}.5" for n in range(12)]
    write(raw / "i.csv", [",item,size,currency,empty,flag,code,weight", *rows])
    items = build(DataConfig(source="table", path="e.csv", items="i.csv")).dataset.items
    assert items.column_names == ["item_id", "title", "text", "size", "flag", "code", "weight"]
    assert items["code"][3].as_py() == "003"
    assert items["weight"][3].as_py() == 3.5


# `ru_maxrss` would not do: a program that is started keeps that of the process that started it.
MEASURED = """
import re, sys
from pathlib import Path
from recsys.data.prepare import DataConfig, build

def peak():
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) * 1024

build(DataConfig(source="table", path=sys.argv[1]))
before = peak()
build(DataConfig(source="table", path=sys.argv[2]))
print(peak() - before)
"""


@pytest.mark.slow
def test_a_million_rows_need_memory_of_ten_times_the_file(raw: Path) -> None:
    rng = np.random.default_rng(0)
    n = 1_000_000
    users, items = rng.integers(0, 50_000, n), rng.integers(0, 20_000, n)
    times = np.datetime_as_string((T + np.sort(rng.integers(0, 300 * DAY, n))).astype("M8[s]"))
    types = np.array(["view", "cart", "purchase"])[rng.integers(0, 3, n)]
    rows = zip(users, items, times, types, strict=True)
    with (raw / "large.csv").open("w") as stream:
        stream.write("customer_id,sku,ts,event,price\n")
        stream.writelines(f"c{u:07d},sku-{i:06d},{t}Z,{k},9.99\n" for u, i, t, k in rows)
    write(raw / "small.csv", ["user,item,ts,event", *clean_events()])
    command = [sys.executable, "-c", MEASURED, str(raw / "small.csv"), str(raw / "large.csv")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 10 * (raw / "large.csv").stat().st_size
