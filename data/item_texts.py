"""Items in the formats of research: texts, keywords and semantic IDs.

Texts of LC-Rec are `{"0": {"title": ..., "description": ...}, ...}`, and its semantic IDs
`{"0": ["<a_47>", "<b_103>", ...], ...}`.

IDGenRec (Tan et al., 2024) has the users of S3-Rec's Beauty and Sports in the same order, with
ASINs for items, and a file of keywords for each ASIN. A language model made them of the item's
text. In the authors' code those of `phase_0` are made before that model is trained on histories. An
item and an ASIN are the same if they have the same users. Nothing here knows of splits.
"""

from __future__ import annotations

import ast
import html
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recsys.data.files import number, read_json, read_lines
from recsys.data.raw import items_table
from recsys.data.report import sentence
from recsys.errors import DataError

_MARKUP = re.compile(r"<!--.*?-->|<[A-Za-z/][^>]*>", re.DOTALL)
_BLANKS = re.compile(r"\s+")


@dataclass(frozen=True)
class ItemText:
    """The texts of one item, of which each may be empty; `brand` is None then."""

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
        fields = ("title", "description", "brand", "categories")
        title, description, brand, paths = (plain(entry.get(name), where) for name in fields)
        texts[number(key, path)] = ItemText(title, description, brand or None, names(paths))
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


_CODE = re.compile(r"<[A-Za-z]+_([0-9]{1,9})>")


def read_index(path: Path) -> dict[int, tuple[int, ...]]:
    """Read the codes of each item, by its number in the file.

    Raises:
        DataError: a key that is not a number, a malformed code, or rows of unequal length.
    """
    codes: dict[int, tuple[int, ...]] = {}
    levels = None
    for key, row in read_json(path).items():
        item = number(key, path)
        if not isinstance(row, list) or not row:
            raise DataError(f"{path}: item {key!r}: expected a list of codes, found {row!r}")
        matches = [_CODE.fullmatch(code) if isinstance(code, str) else None for code in row]
        if None in matches:
            odd = row[matches.index(None)]
            raise DataError(sentence("no_code", path=path, key=key, shown=odd))
        levels = levels or len(row)
        if len(row) != levels:
            said = {"count": len(row), "levels": levels}
            raise DataError(sentence("other_levels", path=path, key=key, **said))
        codes[item] = tuple(int(match[1]) for match in matches if match)
    if not codes:
        raise DataError(f"{path}: no items in it")
    return codes


def aligned(
    codes: dict[int, tuple[int, ...]], numbers: NDArray[np.int64], path: Path
) -> NDArray[np.int32]:
    """(items, L) codes in the order of `numbers`.

    Raises:
        DataError: the index lacks an item, or has one that is not among `numbers`.
    """
    known = set(numbers.tolist())
    if missing := sorted(known - codes.keys()):
        said = {"item": str(missing[0]), "count": len(missing)}
        raise DataError(sentence("without_codes", path=path, **said))
    if strange := sorted(codes.keys() - known):
        said = {"item": str(strange[0]), "count": len(strange)}
        raise DataError(sentence("out_of_range", path=path, **said))
    return np.asarray([codes[item] for item in numbers.tolist()], np.int32)


T = TypeVar("T")
KEYWORDS = (".txt", ".txt.gz")
SEQUENCES = ("user_sequence.txt", "user_sequence.txt.gz")


def read_keywords(
    path: Path, sequences: Path, lengths: NDArray[np.integer], events: NDArray[np.integer]
) -> dict[int, ItemText]:
    """Titles by item number; items with the same users as another item get none.

    An item of one file is the ASIN of the other that exactly the same users had.

    Args:
        path: lines of an ASIN and keywords; some ASINs have none.
        sequences: lines of a user and ASINs.
        lengths: (users,) number of events of each user, in the order of the source.
        events: their items, one user after another.

    Raises:
        DataError: the sequences do not have as many events of each user, or no keywords of any ASIN
            in them.
    """
    lines = (text.partition(" ") for _, text in read_lines(path))
    words = {asin: title for asin, _, title in lines if title}
    if not len(events):
        return {}
    users = [text.split()[1:] for _, text in read_lines(sequences)]
    if [len(user) for user in users] != lengths.tolist():
        raise DataError(sentence("users_in_another_order", path=sequences))
    asins, asin_number = np.unique([asin for user in users for asin in user], return_inverse=True)
    items, number = np.unique(events, return_inverse=True)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    item_of = _by_users(number, owner, items.tolist())
    asin_of = _by_users(asin_number, owner, asins.tolist())
    texts = {
        item_of[own]: ItemText(words[asin], "", None, [])
        for own, asin in asin_of.items()
        if asin in words and own in item_of
    }
    if not texts:
        raise DataError(sentence("no_keywords", path=path, sequences=sequences))
    return texts


def _by_users(
    items: NDArray[np.integer], users: NDArray[np.integer], names: list[T]
) -> dict[bytes, T]:
    """Names of the items 0, 1, ... by their users; without items that have the same users."""
    order = np.lexsort((users, items))
    ends = np.cumsum(np.bincount(items))[:-1]
    owners = [part.tobytes() for part in np.split(users[order], ends)]
    times = Counter(owners)
    return {own: name for own, name in zip(owners, names, strict=True) if times[own] == 1}
