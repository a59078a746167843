"""LC-Rec and LETTER: `X.inter.json` (user -> items by time), `X.item.json`, `X.index.json`.

The path is the interactions file, or a folder with one such file; the other two files are optional.
Item numbers start at 0 in all three.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from recsys.data.files import MAX_DIGITS, read_json
from recsys.data.item_texts import ItemText, aligned, numbered_items, read_index, read_item_texts
from recsys.data.raw import EventStream, RawData, ReaderConfig, events_table
from recsys.data.report import sentence
from recsys.errors import DataError

SUFFIX = ".inter.json"


def files(config: ReaderConfig) -> dict[str, Path]:
    """The files by role: `interactions`, and `items` and `index` if given or found.

    Raises:
        DataError: a folder with no or with several interactions files.
    """
    inside = sorted(config.path.glob(f"*{SUFFIX}")) if config.path.is_dir() else [config.path]
    if len(inside) != 1:
        said = f"holds {len(inside)} files *{SUFFIX}; name one as data.path"
        raise DataError(f"{config.path}: {said}")
    path = inside[0]
    paths = {"interactions": path}
    for role, explicit, kind in (("items", config.items, "item"), ("index", config.index, "index")):
        beside = path.with_name(f"{path.name.removesuffix(SUFFIX)}.{kind}.json")
        if explicit or beside.is_file():
            paths[role] = explicit or beside
    return paths


def read(config: ReaderConfig) -> EventStream:
    """Read an LC-Rec data set; the semantic IDs of the index are imported.

    Raises:
        DataError: a malformed file, or an index that does not fit.
    """
    paths = files(config)
    histories = read_json(paths["interactions"])
    for user, history in histories.items():
        if not isinstance(history, list) or not all(
            type(item) is int and 0 <= item < 10**MAX_DIGITS for item in history
        ):
            said = {"path": paths["interactions"], "user": user, "shown": str(history)[:60]}
            raise DataError(sentence("no_list_of_numbers", **said))
    lengths = np.asarray([len(history) for history in histories.values()], np.int64)
    items = np.asarray([item for history in histories.values() for item in history], np.int64)
    described = read_item_texts(paths.get("items"))
    index = read_index(paths["index"]) if "index" in paths else {}
    # The file of texts lists the catalog; without it the index does.
    numbers = np.unique([*np.unique(items).tolist(), *(described or index)]).astype(np.int64)
    return RawData(
        events_table(np.repeat(np.asarray(list(histories), np.str_), lengths), items),
        numbered_items(
            numbers.tolist(), described, _attribute_columns(numbers.tolist(), described)
        ),
        aligned(index, numbers, paths["index"]) if index else None,
        {
            "users_without_items": int((lengths == 0).sum()),
            "items_without_metadata": int(np.isin(numbers, list(described), invert=True).sum()),
        },
    ).stream()


def _attribute_columns(numbers: list[int], described: dict[int, ItemText]) -> dict[str, pa.Array]:
    """The columns `brand` and `categories`, if any item has one."""
    rows = [described.get(n) for n in numbers]
    brands = [row.brand if row else None for row in rows]
    categories = [row.categories if row else [] for row in rows]
    columns = {}
    if any(brands):
        columns["brand"] = pa.array(brands, pa.string())
    if any(categories):
        columns["categories"] = pa.array(categories, pa.list_(pa.string()))
    return columns
