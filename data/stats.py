"""What a data set looks like: sizes, lengths, repeats, cold shares, text coverage. NumPy only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.compute as pc

from recsys.splits import LABELS, TRAIN

if TYPE_CHECKING:
    import pyarrow as pa

    from recsys.dataset import Dataset


def describe(dataset: Dataset) -> dict[str, Any]:
    """Numbers about a data set, ready for JSON.

    `cold` shares are of events: those on items that no training event touches, which a model of
    ids alone cannot find.
    """
    events, split = dataset.interactions, dataset.split
    users, items = len(events.user_ids), len(events.item_ids)
    lengths = np.bincount(events.user, minlength=users)
    lengths = lengths[lengths > 0]
    trained = np.bincount(events.item[split == TRAIN], minlength=items) > 0
    pairs = events.user.astype(np.int64) * items + events.item
    splits = {}
    for name, label in LABELS.items():
        inside = split == label
        splits[name] = {
            "interactions": int(inside.sum()),
            "users": len(np.unique(events.user[inside])),
            "items": len(np.unique(events.item[inside])),
            "cold": float((~trained[events.item[inside]]).mean()) if inside.any() else 0.0,
        }
    return {
        "users": users,
        "items": items,
        "items_with_events": len(np.unique(events.item)),
        "interactions": len(events),
        "density": len(events) / (users * items) if users and items else 0.0,
        "length": {
            "mean": float(lengths.mean()) if len(lengths) else 0.0,
            **{
                name: float(np.quantile(lengths, q)) if len(lengths) else 0.0
                for name, q in (("min", 0), ("p25", 0.25), ("median", 0.5), ("p75", 0.75))
            },
            "p95": float(np.quantile(lengths, 0.95)) if len(lengths) else 0.0,
            "max": float(lengths.max(initial=0)),
        },
        "repeats": len(events) - len(np.unique(pairs)),
        "has_time": events.has_time,
        "text_coverage": _text_coverage(dataset.items),
        "attributes": {name: str(dataset.items[name].type) for name in dataset.attributes},
        "imported_codes": None if dataset.codes is None else list(dataset.codes.shape),
        "splits": splits,
    }


def _text_coverage(items: pa.Table) -> float:
    """Share of items with words of their own: a text, or a title that is more than the id."""
    titled = pc.not_equal(items["title"], items["item_id"])
    worded = pc.or_(titled, pc.not_equal(items["text"], ""))
    return float(pc.mean(worded).as_py() or 0.0)
