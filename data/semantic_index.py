"""Imported semantic IDs in the format of LC-Rec: `{"0": ["<a_47>", "<b_103>", ...], ...}`."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from recsys.data.files import number, read_json
from recsys.data.report import sentence
from recsys.errors import DataError

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
