"""AtSpeed: `sequential_{train,valid,test}.txt` and an index of semantic IDs, split by global time.

Each text file has a line a user (`user item item ...`); its item ids are those of the index plus
one. Item ids here are the index's. Where the texts are absent their twins `*_dict.npy` are read, by
`recsys.data.pickled`, which executes no pickle.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import numpy as np

from recsys.data.files import is_cut, read_integer_lines
from recsys.data.item_texts import read_item_texts
from recsys.data.pickled import read_pickled_dict
from recsys.data.raw import RawData, ReaderConfig, events_table, items_table
from recsys.data.semantic_index import read_index
from recsys.errors import ConfigError, DataError
from recsys.splits import LABELS

TWINS = {"train": "training", "valid": "validation", "test": "testing"}


def files(config: ReaderConfig) -> dict[str, Path]:
    """`train`, `valid`, `test`, `index`, and `items` where given."""
    found = {split: config.path / f"sequential_{split}.txt" for split in LABELS}
    twins = {split: config.path / f"{name}_dict.npy" for split, name in TWINS.items()}
    if not found["train"].is_file() and twins["train"].is_file():
        found = twins
    found["index"] = config.index or _only_json(config.path)
    if config.items is not None:
        found["items"] = config.items
    return found


def read(config: ReaderConfig) -> RawData:
    """Read an AtSpeed data set with its own split and its own codes.

    Raises:
        DataError: a malformed file, users that differ between the three files, or an item that the
            index lacks.
    """
    paths = files(config)
    index = read_index(paths["index"])
    numbers = sorted(index)
    lines = {split: _lines(paths[split]) for split in LABELS}
    users = [line[0] for line in lines["train"]]
    for split in LABELS:
        if [line[0] for line in lines[split]] != users:
            raise DataError(
                f"{paths[split]}: its users are not those of {paths['train'].name}; "
                "one of the files is incomplete"
            )
    if len(set(users)) != len(users):
        raise DataError(f"{paths['train']}: a user has more than one line")
    # One user after another, and within a user train, valid, test: the order of time.
    parts = list(chain.from_iterable(zip(*lines.values(), strict=True)))
    lengths = np.asarray([len(part) - 1 for part in parts])
    items = np.fromiter(chain.from_iterable(part[1:] for part in parts), np.int64) - 1
    strangers = ~np.isin(items, numbers)
    if strangers.any():
        row = int(strangers.argmax())
        part = int(np.searchsorted(np.cumsum(lengths), row, side="right"))
        split = list(LABELS)[part % len(LABELS)]
        raise DataError(
            f"{paths[split]}: user {parts[part][0]} has item {items[row] + 1}, "
            f"which {paths['index'].name} lacks (it has {len(numbers)} items)"
        )
    described = read_item_texts(paths["items"]) if "items" in paths else {}
    codes = np.asarray([index[number] for number in numbers], np.int32)
    _, leaf, sizes = np.unique(codes, axis=0, return_inverse=True, return_counts=True)
    return RawData(
        events_table(
            np.repeat([part[0] for part in parts], lengths),
            items,
            split=np.repeat(np.tile(list(LABELS.values()), len(users)), lengths),
        ),
        items_table(
            [str(number) for number in numbers],
            {str(n): item.title for n, item in described.items()},
            {str(n): item.description for n, item in described.items()},
            {},
        ),
        codes,
        {
            "last_line_without_end": sum(
                paths[split].suffix == ".txt" and is_cut(paths[split]) for split in LABELS
            ),
            "items_without_metadata": len(set(numbers) - set(described)),
            "items_sharing_codes": int((sizes[leaf.reshape(-1)] > 1).sum()),
        },
    )


def _lines(path: Path) -> list[list[int]]:
    """User and items of each line, or of each entry of a dict; both as a text counts them."""
    if path.suffix == ".txt":
        return read_integer_lines(path)
    entries = read_pickled_dict(path).items()
    if any(number < 0 for user, items in entries for number in (user, *items)):
        raise DataError(f"{path}: a user or an item is a negative number")
    return [[user + 1, *(item + 1 for item in items)] for user, items in entries]


def _only_json(folder: Path) -> Path:
    found = sorted(folder.glob("*.json"))
    if len(found) != 1:
        raise ConfigError(
            f"data.index: {folder} holds {len(found)} .json files; name the index, "
            "for example --set data.index=atspeed-beauty/beauty.LCRec-1e-3lr.json"
        )
    return found[0]
