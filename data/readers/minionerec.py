"""MiniOneRec: `{train,valid,test}/X.csv` of next-item examples, `index/X.{item,index}.json`.

A row has a user, the previous items (at most ten) and the next item; rows are split by global time.
The reader rebuilds the sequences: it aligns a row's history with the end of the user's known items,
appends the items that are new, and then the target. If rows are missing (for example because the
train file was not published), the oldest items are lost, and items that occur only in histories
become training events. The path is the folder; csv files may be gzipped.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from recsys.data.files import MAX_DIGITS, read_lines
from recsys.data.item_texts import numbered_items, read_item_texts
from recsys.data.raw import EventStream, RawData, ReaderConfig, events_table
from recsys.data.semantic_index import aligned, read_index
from recsys.errors import DataError
from recsys.splits import LABELS

FIELDS = ("user_id", "history_item_id", "item_id")
_NUMBER = re.compile(rf"\s*\d{{1,{MAX_DIGITS}}}\s*")
_LIST = re.compile(rf"\[(?:\s*\d{{1,{MAX_DIGITS}}}\s*(?:,|(?=\])))*\s*\]")


def files(config: ReaderConfig) -> dict[str, Path]:
    """The files by role: `train`, `valid`, `test` if found; `items`, `index` if given or found.

    Raises:
        DataError: no csv file of examples, or several for one split.
    """
    paths = {}
    for split in LABELS:
        inside = sorted(
            [*config.path.glob(f"{split}/*.csv"), *config.path.glob(f"{split}/*.csv.gz")]
        )
        if len(inside) > 1:
            raise DataError(
                f"{config.path}/{split}: holds {len(inside)} csv files; leave one there"
            )
        if inside:
            paths[split] = inside[0]
    if not paths:
        raise DataError(f"{config.path}: holds none of train, valid and test with a csv file")
    for role, explicit, kind in (("items", config.items, "item"), ("index", config.index, "index")):
        beside = sorted(config.path.glob(f"index/*.{kind}.json"))
        if explicit or len(beside) == 1:
            paths[role] = explicit or beside[0]
    return paths


def read(config: ReaderConfig) -> EventStream:
    """Read a MiniOneRec data set with its split; the semantic IDs of the index are imported.

    Raises:
        DataError: a malformed file, or an index that does not fit.
    """
    paths = files(config)
    users: dict[str, tuple[list[int], list[int]]] = {}
    rows = gaps = 0
    for split, label in LABELS.items():
        for user, history, target in _examples(paths[split]) if split in paths else ():
            rows += 1
            items, labels = users.setdefault(user, ([], []))
            known = _overlap(items, history)
            gaps += bool(items) and known == 0
            fresh = history[known:]
            # Items known only from a history precede this row: they get the label of the last row.
            items += [*fresh, target]
            labels += [labels[-1] if labels else LABELS["train"]] * len(fresh) + [label]
    described = read_item_texts(paths.get("items"))
    index = read_index(paths["index"]) if "index" in paths else {}
    seen = {item for items, _ in users.values() for item in items}
    numbers = np.asarray(sorted(seen | set(described or index)), np.int64)
    lengths = [len(items) for items, _ in users.values()]
    brands = [described[n].brand if n in described else None for n in numbers.tolist()]
    return RawData(
        events_table(
            np.repeat(np.asarray(list(users), np.str_), lengths),
            np.asarray([item for items, _ in users.values() for item in items], np.int64),
            split=np.asarray([label for _, labels in users.values() for label in labels]),
        ),
        numbered_items(
            numbers.tolist(),
            described,
            {"brand": pa.array(brands, pa.string())} if any(brands) else {},
        ),
        aligned(index, numbers, paths["index"]) if index else None,
        {
            "examples_read": rows,
            "splits_without_a_file": sum(split not in paths for split in LABELS),
            "histories_that_leave_a_gap": gaps,
            "items_without_metadata": len(set(numbers.tolist()) - set(described)),
        },
    ).stream()


def _overlap(items: list[int], history: list[int]) -> int:
    """The longest prefix of `history` that is a suffix of `items`, as a number of items."""
    for size in range(min(len(items), len(history)), 0, -1):
        if items[-size:] == history[:size]:
            return size
    return 0


def _examples(path: Path) -> Iterator[tuple[str, list[int], int]]:
    """The user, the previous items and the next item of each row."""
    line = 1

    def lines() -> Iterator[str]:
        nonlocal line
        for line, text in read_lines(path):  # noqa: B007 - errors name the line read last
            yield f"{text}\n"

    rows = csv.DictReader(lines(), strict=True)
    try:
        missing = [name for name in FIELDS if name not in (rows.fieldnames or ())]
        if missing:
            raise DataError(
                f"{path}:{line}: no column {missing[0]!r} among {str(rows.fieldnames)[:120]}; "
                f"the header needs {', '.join(FIELDS)}"
            )
        for row in rows:
            user, history, target = (row[name] or "" for name in FIELDS)
            for name, value, fits, expected in (
                ("user_id", user, bool(user), "a user"),
                ("history_item_id", history, _LIST.fullmatch(history), "a list of item numbers"),
                ("item_id", target, _NUMBER.fullmatch(target), "an item number"),
            ):
                if not fits:
                    raise DataError(
                        f"{path}:{line}: column {name!r}: expected {expected}, found "
                        f"{value[:40]!r}; the row may be cut off: correct or remove it"
                    )
            yield user, [int(n) for n in re.findall(r"\d+", history)], int(target)
    except csv.Error as error:
        raise DataError(f"{path}:{line}: {error}") from error
