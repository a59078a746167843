"""S3-Rec: `Beauty.txt`, one line per user (`user item item ...` in order of time, ids from 1).

Item attributes are read from `Beauty_item2attributes.json` beside it, if it exists; their names are
not published. Titles and semantic IDs may come from LC-Rec files of the same data set, in which
every id is smaller by one (`Yelp.item.json`, `Beauty.index.json`), and keywords for titles from
IDGenRec (`recsys.data.item_texts`).
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa

from recsys.data import item_texts
from recsys.data.files import number, read_integer_lines, read_json
from recsys.data.raw import EventStream, RawData, ReaderConfig, events_table
from recsys.errors import DataError

# Share of items whose description lists one category per attribute; all but one in the Yelp file.
CATEGORY_AGREEMENT = 0.95


def files(config: ReaderConfig) -> dict[str, Path]:
    """The files by role: `interactions`, and `attributes`, `items`, `index` if given or found.

    Keywords of IDGenRec as `items` need its `sequences`.

    Raises:
        DataError: the sequences are there plain and packed, so it is not known which are meant.
    """
    beside = config.path.with_name(f"{config.path.stem}_item2attributes.json")
    paths = {
        "interactions": config.path,
        "attributes": config.attributes or (beside if beside.is_file() else None),
        "items": config.items,
        "index": config.index,
    }
    if config.items is not None and config.items.name.endswith(item_texts.KEYWORDS):
        bare, packed = (config.items.with_name(name) for name in item_texts.SEQUENCES)
        if bare.is_file() and packed.is_file():
            raise DataError(f"{bare}: {packed.name} is beside it, so move one of them elsewhere")
        paths["sequences"] = packed if packed.is_file() else bare
    return {role: path for role, path in paths.items() if path is not None}


def read(config: ReaderConfig) -> EventStream:
    """Read an S3-Rec data set.

    Raises:
        DataError: a malformed file, a user on two lines, or an index or keywords that do not fit.
    """
    paths = files(config)
    lines = read_integer_lines(paths["interactions"])
    users = np.asarray([line[0] for line in lines])
    values, times = np.unique(users, return_counts=True)
    if (times > 1).any():
        repeated, path = values[times > 1][0], paths["interactions"]
        raise DataError(f"{path}: user {repeated} has more than one line")
    lengths = np.asarray([len(line) - 1 for line in lines])
    events = np.fromiter(chain.from_iterable(line[1:] for line in lines), np.int64)
    numbered = _read_attributes(paths["attributes"]) if "attributes" in paths else {}
    if "sequences" in paths:
        described = item_texts.read_keywords(paths["items"], paths["sequences"], lengths, events)
    else:
        described = {
            n + 1: item for n, item in item_texts.read_item_texts(paths.get("items")).items()
        }
    numbers = np.unique([*np.unique(events).tolist(), *numbered, *described])
    metadata = described or numbered
    counts = {
        "users_without_items": int((lengths == 0).sum()),
        "items_without_metadata": sum(n not in metadata for n in numbers.tolist()),
    }
    codes = None
    if "index" in paths:
        index = item_texts.read_index(paths["index"])
        codes = item_texts.aligned(index, numbers - 1, paths["index"])
    return RawData(
        events_table(np.repeat(users, lengths), events),
        item_texts.numbered_items(
            numbers.tolist(), described, _attribute_columns(numbers.tolist(), numbered, described)
        ),
        codes,
        counts,
    ).stream()


def _read_attributes(path: Path) -> dict[int, list[str]]:
    """Read item -> attribute numbers, without the repetitions that LastFM has."""
    attributes = {}
    for key, values in read_json(path).items():
        if not isinstance(values, list):
            raise DataError(f"{path}: item {key!r}: expected a list of attribute numbers")
        attributes[number(key, path)] = list(dict.fromkeys(str(value) for value in values))
    return attributes


def _attribute_columns(
    numbers: list[int], numbered: dict[int, list[str]], described: dict[int, item_texts.ItemText]
) -> dict[str, pa.Array]:
    """The column `categories` if the names are known, else `attributes` with their numbers."""
    listed = {
        n: item.categories or item_texts.names(item.description) for n, item in described.items()
    }
    agreeing = sum(len(listed.get(n, [])) == len(values) for n, values in numbered.items())
    has_names = any(item.categories for item in described.values())
    if described and (has_names or (numbered and agreeing >= CATEGORY_AGREEMENT * len(numbered))):
        name, values_of = "categories", listed
    elif numbered:
        name, values_of = "attributes", numbered
    else:
        return {}
    return {name: pa.array([values_of.get(n, []) for n in numbers], pa.list_(pa.string()))}
