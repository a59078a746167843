"""Item texts in the format of LC-Rec: `{"0": {"title": ..., "description": ...}, ...}`."""

from __future__ import annotations

import ast
import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from recsys.data.files import number, read_json
from recsys.data.raw import items_table
from recsys.errors import DataError

_MARKUP = re.compile(r"<!--.*?-->|<[A-Za-z/][^>]*>", re.DOTALL)
_BLANKS = re.compile(r"\s+")


@dataclass(frozen=True)
class ItemText:
    """The texts of one item.

    Attributes:
        title: may be empty.
        description: free text, may be empty.
        brand: None if it has none.
        categories: names, may be empty.
    """

    title: str
    description: str
    brand: str | None
    categories: list[str]


def read_item_texts(path: Path | None) -> dict[int, ItemText]:
    """Texts by the item's number in the file; empty without a file.

    Raises:
        DataError: a key that is not a number, or an entry that is not a mapping of texts.
    """
    if path is None:
        return {}
    texts = {}
    for key, entry in read_json(path).items():
        if not isinstance(entry, dict):
            raise DataError(f"{path}: item {key!r}: expected a title and description in a mapping")
        where = f"{path}: item {key!r}"
        values = {name: plain(entry.get(name), where) for name in ("title", "description", "brand")}
        texts[number(key, path)] = ItemText(
            values["title"],
            values["description"],
            values["brand"] or None,
            names(plain(entry.get("categories"), where)),
        )
    return texts


def numbered_items(
    numbers: Sequence[int], described: Mapping[int, ItemText], attributes: Mapping[str, pa.Array]
) -> pa.Table:
    """The items table of a source whose item ids are numbers, in the order of `numbers`."""
    return items_table(
        [str(n) for n in numbers],
        {str(n): item.title for n, item in described.items()},
        {str(n): item.description for n, item in described.items()},
        attributes,
    )


def names(text: str) -> list[str]:
    """Split `"Diners, Greek"` into a list without repeated names."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def plain(value: Any, where: str) -> str:
    """A text without markup. Amazon stores lists as lists, or as the text of a Python list.

    Raises:
        DataError: not a text; the message begins with `where`.
    """
    if isinstance(value, str) and value.startswith("["):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            value = value.strip("[]'\" ")
    if isinstance(value, list):
        value = ", ".join(str(part) for part in value if str(part).strip())
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(f"{where}: expected text, found {str(value)[:60]!r}")
    return _BLANKS.sub(" ", _MARKUP.sub(" ", html.unescape(value))).strip()
