"""Reads JSON lines block by block with Arrow, and line by line where a block is damaged."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.json

from recsys.data.damage import Damage

NAME = re.compile(rb'"([^"\\]*)"\s*:')
CELLS_PER_BYTE, FEW_CELLS = 16, 1_000_000


def line_blocks(stream: Any, size: int) -> Iterator[tuple[bytes, int]]:
    """Blocks of whole lines of about `size` bytes, with the number of their first line."""
    line, rest = 1, stream.read(3)
    rest = b"" if rest == codecs.BOM_UTF8 else rest
    while block := bytes(stream.read(size)):
        whole, newline, end = (rest + block).rpartition(b"\n")
        rest = end
        if newline:
            yield whole + newline, line
            line += whole.count(b"\n") + 1
    if rest.strip():
        yield rest, line


def json_table(block: bytes, first: int, damage: Damage) -> pa.Table:
    """The objects of a block of lines, the first of which has the number `first`.

    Raises:
        pa.ArrowInvalid: so many names that most cells of the table would be empty.
    """
    names, lines = len(set(NAME.findall(block))), block.count(b"\n") + 1
    if names * lines > max(FEW_CELLS, CELLS_PER_BYTE * len(block)):
        raise pa.ArrowInvalid(
            f"lines {first} to {first + lines - 1} have {names} different names; put what differs "
            "from line to line into one field, as a list"
        )
    options = pa.json.ReadOptions(use_threads=False, block_size=len(block) + 1)
    try:
        return pa.json.read_json(pa.BufferReader(block), options)
    except pa.ArrowInvalid:  # a damaged line, or a column of mixed types: read line by line
        rows = []
        for number, line in enumerate(block.splitlines(), first):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise TypeError("not an object")
                rows.append({name: _plain(value) for name, value in row.items()})
            except (ValueError, TypeError, RecursionError):
                damage.add(number, line[:60].decode(errors="replace"))
        names = dict.fromkeys(name for row in rows for name in row)
        return pa.table(
            {name: pa.array([row.get(name) for row in rows], pa.string()) for name in names}
        )


def _plain(value: Any) -> str | None:
    """A value as it stands in the file, as a string; null is None."""
    if value is None or isinstance(value, str):
        (value or "").encode()  # half of a surrogate pair is an error
        return value
    return "|".join(map(str, value)) if isinstance(value, list) else json.dumps(value)
