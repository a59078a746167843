"""Amazon reviews and metadata of 2014, 2018 and 2023: one record per line, possibly gzipped.

The names of the fields determine the edition. The metadata of 2014 are Python literals, not JSON;
they are parsed with `ast.literal_eval`, which runs no code. The path is the file of reviews. The
metadata are found beside it (`meta_X.json` for `X.json` or `X_5.json`), or given as `items`. In
2023 the item is the `parent_asin`, which the variants of a product have in common.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeGuard

import pyarrow as pa

from recsys.data.files import check_record, parsed, read_json_lines, read_lines
from recsys.data.item_texts import plain
from recsys.data.raw import (
    EventStream,
    ItemCatalog,
    ReaderConfig,
    describe_all,
    events_table,
    items_table,
)
from recsys.data.report import sentence
from recsys.data.time_formats import unix_seconds
from recsys.errors import DataError

BATCH = 1 << 16  # reviews at a time
# Fields by edition: user, item, rating and time.
REVIEWS = {
    "reviewerID": ("reviewerID", "asin", "overall", "unixReviewTime"),
    "user_id": ("user_id", "parent_asin", "rating", "timestamp"),
}
SUFFIXES = (".json", ".jsonl", ".json.gz", ".jsonl.gz")
# Badly saved pages have a script in the place of the title.
_SCRIPT = re.compile(r"getTime\(|<script|function\s*\(")
_PRICE = re.compile(r"\$?\s*([0-9][0-9,]*(?:\.[0-9]+)?)\s*$")


def files(config: ReaderConfig) -> dict[str, Path]:
    """The files by role: `interactions`, and `items` if given or found."""
    paths = {"interactions": config.path}
    items = config.items or _beside(config.path)
    if items is not None:
        paths["items"] = items
    return paths


def read(config: ReaderConfig) -> EventStream:
    """Read reviews part by part; the metadata must fit in memory.

    Raises:
        DataError: a line that is not a record, a field of the wrong type, or a truncated file, when
            the iteration reaches the error.
    """
    paths = files(config)
    counts: Counter[str] = Counter()
    return EventStream(
        _reviews(paths["interactions"], config, counts),
        lambda events: _catalog(paths.get("items"), events),
        counts,
    )


def _beside(path: Path) -> Path | None:
    suffix = next((s for s in reversed(SUFFIXES) if path.name.endswith(s)), "")
    stem = path.name.removesuffix(suffix)
    candidates = [
        path.with_name(f"meta_{name}{end}")
        for name in (stem, re.sub(r"_\d+$", "", stem))
        for end in (suffix, *SUFFIXES)
    ]
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def _reviews(path: Path, config: ReaderConfig, counts: Counter[str]) -> Iterator[pa.Table]:
    rows: list[tuple[str, str, Any, Any, int]] = []
    fields = None
    for line, record in read_json_lines(path):
        if fields is None:
            fields = next((REVIEWS[name] for name in REVIEWS if name in record), None)
        if fields is None:
            said = {"names": " nor ".join(REVIEWS), "shown": ", ".join(record)[:80]}
            raise DataError(sentence("no_review", path=path, line=line, **said))
        user, item, rating, time = map(record.get, fields)
        item = item or record.get("asin")
        if not user or not item:
            counts["rows_without_user_or_item_dropped"] += 1
            continue
        if not _is_number(time):
            raise DataError(f"{path}:{line}: {fields[3]!r} is {str(time)[:40]!r}, not a time")
        if rating is not None and type(rating) is not float:  # a float may be NaN
            if not _is_number(rating):
                shown = str(rating)[:40]
                raise DataError(f"{path}:{line}: {fields[2]!r} is {shown!r}, not a number")
            rating = float(rating)
        rows.append((str(user), str(item), int(time), rating, line))
        if len(rows) == BATCH:
            yield _table(rows, path, fields[3], config, counts)
            rows = []
    if rows and fields is not None:
        yield _table(rows, path, fields[3], config, counts)


def _table(
    rows: list[tuple[str, str, Any, Any, int]],
    path: Path,
    time_field: str,
    config: ReaderConfig,
    counts: Counter[str],
) -> pa.Table:
    user, item, time, rating, lines = zip(*rows, strict=True)
    times = pa.chunked_array([pa.array(time, pa.int64())])
    moments = unix_seconds(times, time_field, path, lines.__getitem__, config.time_unit, counts)
    return events_table(
        user,
        item,
        timestamp=moments.second,
        nanosecond=moments.nanosecond,
        rating=rating,
    )


def _metadata(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Place and record of each line; the first line determines the format."""
    parse: Callable[[str], Any] = json.loads
    fault = "not valid JSON"
    for line, text in read_lines(path):
        if line == 1 and text.startswith("{'"):
            parse, fault = ast.literal_eval, "neither JSON nor a Python literal"
        record = check_record(parsed(parse, text, path, line, fault), path, line)
        yield f"{path}:{line}", record


def _catalog(path: Path | None, events: pa.Table) -> ItemCatalog:
    """The described items, then those that occur only in reviews."""
    counts: Counter[str] = Counter()
    titles: dict[str, str] = {}
    texts: dict[str, str] = {}
    brands: dict[str, str | None] = {}
    categories: dict[str, list[str]] = {}
    prices: dict[str, float | None] = {}
    for where, record in _metadata(path) if path else ():
        item = record.get("parent_asin") or record.get("asin")
        if not isinstance(item, str):
            counts["item_rows_without_id_dropped"] += 1
            continue
        if item in titles:
            counts["repeated_item_rows_dropped"] += 1
            continue
        title = plain(record.get("title"), where)
        if _SCRIPT.search(title):
            counts["titles_that_are_scripts_dropped"] += 1
            title = ""
        titles[item] = title
        parts = (plain(record.get(name), where) for name in ("description", "features", "feature"))
        texts[item] = " ".join(part for part in parts if part)
        brands[item] = plain(record.get("brand") or record.get("store"), where) or None
        categories[item] = _categories(record)
        prices[item] = _price(record.get("price"))
    ids, missing = describe_all(titles, events)
    columns = {
        "brand": pa.array([brands.get(i) for i in ids], pa.string()),
        "categories": pa.array([categories.get(i, []) for i in ids], pa.list_(pa.string())),
        "price": pa.array([prices.get(i) for i in ids], pa.float64()),
    }
    counts["items_without_metadata"] = missing
    return ItemCatalog(items_table(ids, titles, texts, columns if path else {}), None, dict(counts))


def _categories(record: dict[str, Any]) -> list[str]:
    """Names of categories without repetitions; the edition of 2014 lists several paths."""
    listed = record.get("categories") or record.get("category") or []
    names = [n for part in listed for n in (part if isinstance(part, list) else [part])]
    names = [" ".join(name.split()) for name in names if isinstance(name, str)]
    # In 2018 the last names are sometimes fragments of a page.
    return list(dict.fromkeys(name for name in names if name and "<" not in name))


def _is_number(value: Any) -> TypeGuard[int | float]:
    """Whether a value is a finite number that fits in 64 bits; bool is not a number."""
    return type(value) in (int, float) and abs(value) < 1 << 63


def _price(value: Any) -> float | None:
    """The price in dollars, or None if it cannot be parsed."""
    if _is_number(value):
        return float(value)
    match = _PRICE.match(value) if isinstance(value, str) else None
    return float(match[1].replace(",", "")) if match else None
