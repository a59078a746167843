"""Any export, however damaged, is read or refused in words; no other error is raised."""

from __future__ import annotations

import gzip
import io
import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.data.cleaning import CleanConfig
from recsys.data.prepare import DataConfig, build
from recsys.errors import RecsysError

EXAMPLES = int(os.environ.get("RECSYS_DAMAGED_EXPORTS", "80"))
ROWS = 60
EVENTS = [
    {
        "customer_id": str(row % 7),
        "sku": f"{row * 5 % 11:03d}",
        "ts": f"2024-0{1 + row % 9}-{1 + row % 28:02d}T10:00:00{('', 'Z', '+02:00')[row % 3]}",
        "event": ("view", "cart", "purchase", "return")[row % 4],
        "rating": str(1 + row % 5),
    }
    for row in range(ROWS)
]
ITEMS = [
    {
        "sku": f"{item:03d}",
        "name": f"Thing &amp; <b>{item}</b>",
        "category": ("A > B", "A > C", "")[item % 3],
        "price": f"{item},50 €",
        "in_stock": ("yes", "no")[item % 2],
    }
    for item in range(11)
]
PIECES = [
    b"", b" ", b",", b";", b"\t", b"\n", b"\r", b"\0", b'"', b"'", b"\xff", b"\xfe\xff", b"\x81",
    b"NaN", b"null", b"-1", b"9" * 30, b"1e400", b"2087-01-01", b"31/12/2024", b"{", b"}", b"[1]",
    b"PAR1", b"\x1f\x8b", b"guest", "é€".encode(), b"\xef\xbb\xbf", b"0000-00-00", b"<b>", b"&#0;",
]  # fmt: skip
damage = st.lists(
    st.tuples(
        st.floats(0, 1),
        st.integers(0, 40),
        st.one_of(st.sampled_from(PIECES), st.binary(max_size=4)),
        st.sampled_from([1, 1, 1, 2, 30]),
    ),
    max_size=3,
)
tables = st.fixed_dictionaries(
    {
        "columns": st.permutations(range(5)),
        "kept": st.sampled_from([5, 5, 5, 5, 4, 1]),
        "format": st.sampled_from(["csv", "semicolon", "tsv", "jsonl", "csv.gz", "parquet"]),
        "orders": st.sampled_from([False, False, True]),  # JSON and Parquet: records, lists of them
        "encoding": st.sampled_from(["utf-8", "utf-8", "utf-8-sig", "cp1252", "utf-16"]),
        "header": st.sampled_from([True] * 9 + [False]),
        "rows": st.sampled_from([ROWS] * 7 + [3, 1, 0]),
        "damage": damage,
        "end": st.sampled_from([1.0] * 7 + [0.99, 0.5, 0.1]),
    }
)


def written(rows: list[dict[str, Any]], how: dict) -> tuple[str, bytes]:
    """The name and the damaged content of a file."""
    names = [list(rows[0])[place] for place in how["columns"]][: how["kept"]]
    rows = [{name: row[name] for name in names} for row in rows[: how["rows"]]]
    kind = how["format"]
    if how["orders"] and kind in ("jsonl", "parquet"):
        first = names[0]
        rows = [
            {"order": {first: row[first], "notes": [{"a": "b"}]}, "lines": [row] * (place % 3)}
            for place, row in enumerate(rows)
        ]
    if kind == "parquet":
        stream = io.BytesIO()
        columns = list(rows[0]) if rows else names
        pq.write_table(pa.table({n: [row[n] for row in rows] for n in columns}), stream)
        content = stream.getvalue()
    elif kind == "jsonl":
        content = "\n".join(json.dumps(row) for row in rows).encode()
    else:
        mark = {"semicolon": ";", "tsv": "\t"}.get(kind, ",")
        lines = [names] if how["header"] else []
        lines += [list(row.values()) for row in rows]
        content = "\n".join(mark.join(line) for line in lines).encode(how["encoding"])
    for place, cut, piece, times in how["damage"]:
        at = int(place * len(content))
        content = content[:at] + piece * times + content[at + cut :]
    content = content[: int(how["end"] * len(content))]
    name = {"semicolon": "csv"}.get(kind, kind)
    return name, gzip.compress(content) if kind == "csv.gz" else content


@given(events=tables, items=st.one_of(st.none(), tables))
@settings(max_examples=EXAMPLES, deadline=None)
def test_a_damaged_export_is_read_or_refused(events: dict, items: dict | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for role, rows, how in (("events", EVENTS, events), ("items", ITEMS, items)):
            if how is None:
                paths.append(None)
                continue
            name, content = written(rows, how)
            paths.append(Path(folder, f"{role}.{name}"))
            paths[-1].write_bytes(content)
        config = DataConfig(
            source="table",
            path=str(paths[0]),
            items=paths[1] and str(paths[1]),
            clean=CleanConfig(damaged_rows=0.5),
        )
        with suppress(RecsysError):
            build(config)
