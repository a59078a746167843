"""AtSpeed: `sequential_{train,valid,test}.txt` and an index of semantic IDs, split by global time.

Each text file has one line per user (`user item item ...`). Its item ids are those of the index
plus one; the canonical item ids are the index's. The pickled files `*_dict.npy` that are published
beside the text files are not read, because reading a pickle may run any code.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import numpy as np

from recsys.data.files import read_integer_lines
from recsys.data.item_texts import numbered_items, read_index, read_item_texts
from recsys.data.raw import EventStream, RawData, ReaderConfig, events_table
from recsys.data.report import sentence
from recsys.errors import ConfigError, DataError
from recsys.splits import LABELS


def files(config: ReaderConfig) -> dict[str, Path]:
    """The files by role: `train`, `valid`, `test`, `index`, and `items` if it is given."""
    paths = {split: config.path / f"sequential_{split}.txt" for split in LABELS}
    indexes = [config.index] if config.index else sorted(config.path.glob("*.json"))
    if len(indexes) != 1:
        raise ConfigError(sentence("which_index", folder=config.path, count=len(indexes)))
    paths["index"] = indexes[0]
    if config.items is not None:
        paths["items"] = config.items
    return paths


def read(config: ReaderConfig) -> EventStream:
    """Read an AtSpeed data set with its split and its semantic IDs.

    Raises:
        DataError: a malformed file, users that differ between the three files, or an item that is
            not in the index.
    """
    paths = files(config)
    index = read_index(paths["index"])
    numbers = sorted(index)
    lines = {split: read_integer_lines(paths[split]) for split in LABELS}
    users = [line[0] for line in lines["train"]]
    for split in LABELS:
        if [line[0] for line in lines[split]] != users:
            said = {"path": paths[split], "other": paths["train"].name}
            raise DataError(sentence("other_users", **said))
    if len(set(users)) != len(users):
        raise DataError(f"{paths['train']}: a user has more than one line")
    # User by user, and within a user train, valid, test: the order of time.
    parts = list(chain.from_iterable(zip(*lines.values(), strict=True)))
    lengths = np.asarray([len(part) - 1 for part in parts])
    items = np.fromiter(chain.from_iterable(part[1:] for part in parts), np.int64) - 1
    unknown = ~np.isin(items, numbers)
    if unknown.any():
        row = int(unknown.argmax())
        part = int(np.searchsorted(np.cumsum(lengths), row, side="right"))
        split = list(LABELS)[part % len(LABELS)]
        said = {"user": parts[part][0], "item": items[row] + 1, "index": paths["index"].name}
        raise DataError(sentence("not_in_index", path=paths[split], items=len(numbers), **said))
    described = read_item_texts(paths.get("items"))
    codes = np.asarray([index[number] for number in numbers], np.int32)
    _, leaf, sizes = np.unique(codes, axis=0, return_inverse=True, return_counts=True)
    return RawData(
        events_table(
            np.repeat([part[0] for part in parts], lengths),
            items,
            split=np.repeat(np.tile(list(LABELS.values()), len(users)), lengths),
        ),
        numbered_items(numbers, described, {}),
        codes,
        {
            "items_without_metadata": len(set(numbers) - set(described)),
            "items_sharing_codes": int((sizes[leaf.reshape(-1)] > 1).sum()),
        },
    ).stream()
