"""Statistics of a data set: sizes, lengths, repeats, cold shares, text coverage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recsys.dataset import AVAILABILITY, ITEM_COLUMNS
from recsys.splits import LABELS, TRAIN

QUANTILES = {"min": 0, "p25": 0.25, "median": 0.5, "p75": 0.75, "p95": 0.95, "max": 1}
PARTS = """
    SELECT
        split, count(*) AS interactions, count(DISTINCT "user") AS users,
        count(DISTINCT item) AS items,
        count(*) FILTER (item NOT IN (SELECT item FROM {events} WHERE split = {train})) AS cold
    FROM {events} GROUP BY split
"""
OF_USERS = """
    SELECT sum(events) AS events, count(*) AS items FROM (
        SELECT "user", item, count(*) AS events FROM {events} GROUP BY ALL
    ) GROUP BY "user"
"""


def statistics(
    run: Callable[[str], pa.Table],
    events: str,
    *,
    users: int,
    items: pa.Table,
    codes: NDArray[np.int32] | None,
    has_time: bool,
) -> dict[str, Any]:
    """The statistics of a data set, as JSON values.

    `cold` is the share of events on items without training events, which a model of ids alone
    cannot recommend. The table `events` is one of DuckDB, of which `run` answers a query.
    """
    parts = {
        row.pop("split"): row for row in run(PARTS.format(events=events, train=TRAIN)).to_pylist()
    }
    of_users = run(OF_USERS.format(events=events))
    lengths, distinct = (np.asarray(of_users[name], np.int64) for name in ("events", "items"))
    total = int(lengths.sum())
    quantiles = np.quantile(lengths if total else [0], [*QUANTILES.values()])
    splits = {}
    for name, label in LABELS.items():
        part = parts.get(label, dict.fromkeys(("interactions", "users", "items", "cold"), 0))
        splits[name] = part | {"cold": part["cold"] / max(part["interactions"], 1)}
    titled = pc.not_equal(items["title"], items["item_id"])
    worded = pc.or_(titled, pc.not_equal(items["text"], ""))
    with_events = run(f"SELECT count(DISTINCT item) AS items FROM {events}")["items"][0]  # noqa: S608
    return {
        "users": users,
        "items": items.num_rows,
        "items_with_events": with_events.as_py(),
        "interactions": total,
        "density": total / (users * items.num_rows) if users and items.num_rows else 0.0,
        "length": {
            "mean": float(lengths.mean()) if total else 0.0,
            **dict(zip(QUANTILES, quantiles.tolist(), strict=True)),
        },
        "repeats": total - int(distinct.sum()),
        "has_time": has_time,
        "text_coverage": float(pc.mean(worded).as_py() or 0.0),
        "attributes": {
            name: str(items[name].type)
            for name in items.column_names
            if name not in (*ITEM_COLUMNS, *AVAILABILITY)
        },
        "imported_codes": None if codes is None else list(codes.shape),
        "splits": splits,
    }
