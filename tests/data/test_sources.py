"""Where a shop's tables come from: files, folders, tables in memory."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys.data.sources import Tables, export_tables, find_tables, name_of
from recsys.errors import ConfigError


@pytest.fixture
def folder(home: Path, tmp_path: Path) -> Path:
    """A folder for the files of a shop."""
    (tmp_path / "shop").mkdir()
    return tmp_path / "shop"


def put(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).write_text("user,item\nu,i\n", encoding="utf-8")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("events.csv", "events"),
        ("exports/My Shop 2024.csv.gz", "my-shop-2024"),
        ("Große Käufe.csv", "grosse-kaufe"),
        ("注文.csv", "shop"),
        ("exports/shop/", "shop"),
    ],
)
def test_a_run_is_named_after_its_source(source: str, name: str) -> None:
    assert name_of(source) == name


def test_a_folder_of_events_is_one_source_but_for_named_items(folder: Path) -> None:
    put(folder, "events-01.csv", "events-02.csv", "notes.md")
    assert find_tables(str(folder)) == Tables(folder)
    first, other = folder / "events-01.csv", folder / "events-02.csv"
    assert find_tables(str(folder), str(other)) == Tables(first, other), "named items"
    with pytest.raises(ConfigError, match=r"EVENTS: 'gone\.csv' is no file"):
        find_tables("gone.csv")


@pytest.mark.parametrize(
    ("events", "items"),
    [
        ("orders.csv", "products.csv"),
        ("product_views.csv.gz", "products.parquet"),
        ("2024.tsv", "catalog.jsonl"),
    ],
)
def test_names_tell_events_from_items(folder: Path, events: str, items: str) -> None:
    put(folder, events, items)
    assert find_tables(str(folder)) == Tables(folder / events, folder / items)


def test_a_file_of_neither_kind_is_left_out_aloud(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(folder, "orders.csv", "products.csv", "customers.csv")
    assert find_tables(str(folder)).events == folder / "orders.csv"
    assert "not read: customers.csv" in capsys.readouterr().err


def test_files_that_cannot_be_told_apart_are_refused(folder: Path) -> None:
    put(folder, "orders-1.csv", "orders-2.csv", "products.csv")
    with pytest.raises(ConfigError, match=r"name the file of events and the file of items"):
        find_tables(str(folder))


FRAME = pd.DataFrame({"user": ["u", "v"], "item": ["001", "002"]})


def test_frames_are_written_as_files(home: Path) -> None:
    indexed = FRAME.sort_values("user", ascending=False)  # the index is not 0, 1, ... any more
    found = export_tables(indexed, pa.table({"item": ["001"]}), "s")
    assert found == Tables(home / "raw/s/events.parquet", home / "raw/s/items.parquet")
    assert pq.read_table(found.events).to_pylist() == [
        {"user": "v", "item": "002"}, {"user": "u", "item": "001"},
    ]  # fmt: skip


def test_other_frames_under_a_used_name_are_not_taken_silently(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export_tables(FRAME, None, "s")
    export_tables(FRAME, None, "s")
    assert capsys.readouterr().err == ""
    other = FRAME.rename(columns={"item": "song"})
    with pytest.raises(ConfigError, match=r"columns user, item, .* user, song; .* force=True"):
        export_tables(other, None, "s")
    assert pq.read_schema(home / "raw/s/events.parquet").names == ["user", "item"]
    export_tables(pd.concat([FRAME, FRAME]), None, "s")
    assert "4 rows replace the 2 that were given as 's'" in capsys.readouterr().err
    export_tables(other, None, "s", force=True)
    assert pq.read_schema(home / "raw/s/events.parquet").names == ["user", "song"]


@pytest.mark.parametrize("url", ["s3://shop/e.csv?key=hush", "postgresql://me:hush@host/shop"])
def test_a_url_is_refused_with_the_tools_that_export_and_copy(url: str) -> None:
    with pytest.raises(ConfigError, match=r"(?s)psql URL --csv .* aws s3 cp") as caught:
        find_tables(url)
    assert "hush" not in str(caught.value)
