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
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from recsys.data import raw
from recsys.data.files import Damage, parsed, read_lines
from recsys.data.item_texts import plain
from recsys.data.opening import open_table
from recsys.data.report import sentence
from recsys.data.texts import as_strings
from recsys.data.time_formats import TimeRules, read_moments
from recsys.errors import DataError

# Fields by edition: user, item, rating and time.
REVIEWS = {
    "reviewerID": ("reviewerID", "asin", "overall", "unixReviewTime"),
    "user_id": ("user_id", "parent_asin", "rating", "timestamp"),
}
SUFFIXES = (".json", ".jsonl", ".json.gz", ".jsonl.gz")
# Badly saved pages have a script in the place of the title.
_SCRIPT = re.compile(r"getTime\(|<script|function\s*\(")
_PRICE = re.compile(r"\$?\s*([0-9][0-9,]*(?:\.[0-9]+)?)\s*$")


def files(config: raw.ReaderConfig) -> dict[str, Path]:
    """The files by role: `interactions`, and `items` if given or found."""
    paths = {"interactions": config.path}
    items = config.items or _beside(config.path)
    if items is not None:
        paths["items"] = items
    return paths


def read(config: raw.ReaderConfig) -> raw.EventStream:
    """Read reviews part by part; the metadata must fit in memory.

    Raises:
        DataError: a line that is not a record, a field of the wrong type, or a truncated file, when
            the iteration reaches the error.
    """
    paths = files(config)
    counts: Counter[str] = Counter()
    return raw.EventStream(
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


def _reviews(path: Path, config: raw.ReaderConfig, counts: Counter[str]) -> Iterator[pa.Table]:
    file, damage, rows = open_table(path), Damage(), 0
    fields = next((REVIEWS[name] for name in REVIEWS if name in file.names), None)
    if fields is None:
        said = {"names": " nor ".join(REVIEWS), "shown": ", ".join(file.names)[:80]}
        raise DataError(sentence("no_review", path=path, **said))
    rules = TimeRules(config.time_unit, "UTC", None, config.now)
    for batch in file.batches({*fields, "asin"}, damage):
        texts = {name: as_strings(batch[name], name, path) for name in batch.column_names}
        nothing = pa.chunked_array([pa.nulls(batch.num_rows, pa.string())])
        user, item, rating, time = (texts.get(name, nothing) for name in fields)
        item = pc.coalesce(item, texts.get("asin", nothing))
        times = batch[fields[3]] if fields[3] in texts else nothing
        moments = read_moments(times, rules, counts)
        number = pc.match_substring_regex(rating, r"^-?\d{1,18}(\.\d*)?$")
        for kind, name, read, values in (
            ("no_time", fields[3], pc.is_valid(moments.second), time),
            ("no_number", fields[2], pc.fill_null(number, True), rating),
        ):
            row = pc.index(read, False).as_py()
            if row >= 0:
                said = {"name": name, "unit": config.time_unit, "shown": values[row].as_py()}
                raise DataError(sentence(kind, path=path, number=rows + row + 1, **said))
        rows += batch.num_rows
        known = pc.and_(*(pc.fill_null(pc.not_equal(ids, ""), False) for ids in (user, item)))
        counts["rows_without_user_or_item_dropped"] += len(known) - pc.sum(known).as_py()
        made = raw.events_table(
            user,
            item,
            timestamp=moments.second,
            nanosecond=moments.nanosecond,
            rating=pc.cast(rating, pa.float32()),
        )
        yield made.filter(known)
    damage.check(path, 0)


def _metadata(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Place and record of each line; the first line determines the format."""
    parse: Callable[[str], Any] = json.loads
    fault = "not valid JSON"
    for line, text in read_lines(path):
        if line == 1 and text.startswith("{'"):
            parse, fault = ast.literal_eval, "neither JSON nor a Python literal"
        record = parsed(parse, text, path, line, fault)
        if not isinstance(record, dict):
            raise DataError(f"{path}:{line}: expected a record, found {str(record)[:40]!r}")
        yield f"{path}:{line}", record


def _catalog(path: Path | None, events: pa.Table) -> raw.ItemCatalog:
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
    ids, missing = raw.describe_all(titles, events)
    columns = {
        "brand": pa.array([brands.get(i) for i in ids], pa.string()),
        "categories": pa.array([categories.get(i, []) for i in ids], pa.list_(pa.string())),
        "price": pa.array([prices.get(i) for i in ids], pa.float64()),
    }
    counts["items_without_metadata"] = missing
    return raw.ItemCatalog(
        raw.items_table(ids, titles, texts, columns if path else {}), None, dict(counts)
    )


def _categories(record: dict[str, Any]) -> list[str]:
    """Names of categories without repetitions; the edition of 2014 lists several paths."""
    listed = record.get("categories") or record.get("category") or []
    names = [n for part in listed for n in (part if isinstance(part, list) else [part])]
    names = [" ".join(name.split()) for name in names if isinstance(name, str)]
    # In 2018 the last names are sometimes fragments of a page.
    return list(dict.fromkeys(name for name in names if name and "<" not in name))


def _price(value: Any) -> float | None:
    """The price in dollars, or None if it cannot be parsed."""
    if type(value) in (int, float) and abs(value) < 1 << 63:
        return float(value)
    match = _PRICE.match(value) if isinstance(value, str) else None
    return float(match[1].replace(",", "")) if match else None
