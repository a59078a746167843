"""The first rows of a file, and the roles of its columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from recsys.data.texts import as_text

SAMPLE_ROWS = 100_000
FILE_ORDER = "file-order"  # the value of `columns.timestamp` for a file without times
NO_COLUMN = "none"  # the value of a setting that says that no column has the role
NAMED = "named in the settings"  # why a column has a role
SHARE_OF_TIMES = 0.5
SURE_SHARE = 0.9  # of values that must look like numbers, clocks or answers
NEEDED = {"user": "the user", "item": "the item", "timestamp": "the time", "id": "the item id"}


@dataclass(frozen=True)
class Found:
    """A column with a role, and for the report why it has it."""

    column: str
    why: str


Roles = dict[str, Found]
Chosen = Mapping[str, str | None]  # role -> the column that the settings name


@dataclass(frozen=True)
class Sample:
    """The first rows of a file, with all columns."""

    path: Path
    table: pa.Table

    @cached_property
    def counts(self) -> Counter[str]:
        """How many columns have each name."""
        return Counter(self.table.column_names)

    def texts(self, name: str) -> pa.ChunkedArray:
        """The filled values of a column as strings; none for lists and records."""
        column = self.table.column(self.table.schema.get_all_field_indices(name)[0])
        if pa.types.is_nested(column.type):
            return pa.chunked_array([], pa.string())
        try:
            column = pc.utf8_trim_whitespace(as_text(column))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            return pa.chunked_array([], pa.string())
        return column.filter(pc.fill_null(pc.not_equal(column, ""), False))

    def show(self) -> str:
        """The columns with sample values, one per line."""
        lines = []
        for column in list(self.table.schema)[:40]:
            values = pc.unique(self.texts(column.name).slice(0, 100)).to_pylist()[:3]
            is_nested = pa.types.is_nested(column.type)
            nothing = f"(no plain value: {str(column.type)[:60]})" if is_nested else "(empty)"
            lines.append(f"  {column.name}: {', '.join(v[:40] for v in values) or nothing}")
        return "\n".join(lines)


def free_columns(sample: Sample, roles: Roles) -> list[str]:
    """The columns without a role, in the order of the file."""
    taken = {match.column for match in roles.values()}
    return [name for name in sample.table.column_names if name not in taken]


def share_of(values: pa.ChunkedArray, pattern: str) -> float:
    """The share of values that match a pattern."""
    matches = pc.cast(pc.match_substring_regex(values, pattern), pa.float64())
    return float(pc.mean(matches).as_py() or 0.0)
