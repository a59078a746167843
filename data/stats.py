"""Statistics of a data set: sizes, lengths, repeats, cold shares, text coverage. NumPy only."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recsys.dataset import AVAILABILITY, ITEM_COLUMNS, Dataset, Events
from recsys.splits import LABELS, TRAIN

QUANTILES = {"min": 0, "p25": 0.25, "median": 0.5, "p75": 0.75, "p95": 0.95, "max": 1}


class Tally:
    """Counts over the events of a data set, which may be added in parts.

    Args:
        items: size of the catalog.
    """

    def __init__(self, items: int) -> None:
        self._of_item = np.zeros((len(LABELS), items), np.int64)
        self._users = np.zeros(len(LABELS), np.int64)
        self._lengths: list[NDArray[np.int64]] = []
        self._repeats = 0

    def add(self, events: Events) -> None:
        """Add all events of some users."""
        items = self._of_item.shape[1]
        starts = np.flatnonzero(np.diff(events.user, prepend=-1))
        self._lengths.append(np.diff(starts, append=len(events.user)))
        for label in LABELS.values():
            inside = events.split == label
            self._of_item[label] += np.bincount(events.item[inside], minlength=items)
            self._users[label] += np.count_nonzero(np.diff(events.user[inside], prepend=-1))
        first = events.user[0] if len(events.user) else 0
        pairs = (events.user.astype(np.int64) - first) * items + events.item
        pairs.sort()  # several times faster here than np.unique
        self._repeats += int(np.count_nonzero(pairs[1:] == pairs[:-1]))

    def describe(
        self, *, users: int, items: pa.Table, codes: NDArray[np.int32] | None, has_time: bool
    ) -> dict[str, Any]:
        """The statistics as JSON values; see `describe`."""
        lengths = np.concatenate([np.zeros(0, np.int64), *self._lengths])
        total = int(self._of_item.sum())
        quantiles = np.quantile(lengths if total else [0], [*QUANTILES.values()])
        untrained = self._of_item[TRAIN] == 0
        splits = {}
        for name, label in LABELS.items():
            events = int(self._of_item[label].sum())
            cold = int(self._of_item[label][untrained].sum())
            splits[name] = {
                "interactions": events,
                "users": int(self._users[label]),
                "items": int(np.count_nonzero(self._of_item[label])),
                "cold": cold / events if events else 0.0,
            }
        return {
            "users": users,
            "items": items.num_rows,
            "items_with_events": int(np.count_nonzero(self._of_item.sum(axis=0))),
            "interactions": total,
            "density": total / (users * items.num_rows) if users and items.num_rows else 0.0,
            "length": {
                "mean": float(lengths.mean()) if len(lengths) else 0.0,
                **dict(zip(QUANTILES, quantiles.tolist(), strict=True)),
            },
            "repeats": self._repeats,
            "has_time": has_time,
            "text_coverage": _text_coverage(items),
            "attributes": {
                name: str(items[name].type)
                for name in items.column_names
                if name not in (*ITEM_COLUMNS, *AVAILABILITY)
            },
            "imported_codes": None if codes is None else list(codes.shape),
            "splits": splits,
        }


def describe(dataset: Dataset) -> dict[str, Any]:
    """The statistics of a data set, as JSON values.

    `cold` is the share of events on items without training events, which a model of ids alone
    cannot recommend.
    """
    tally = Tally(dataset.items.num_rows)
    tally.add(dataset.events)
    return tally.describe(
        users=len(dataset.interactions.user_ids),
        items=dataset.items,
        codes=dataset.codes,
        has_time=dataset.interactions.has_time,
    )


def _text_coverage(items: pa.Table) -> float:
    """Share of items with a text, or a title that is not the id."""
    titled = pc.not_equal(items["title"], items["item_id"])
    worded = pc.or_(titled, pc.not_equal(items["text"], ""))
    return float(pc.mean(worded).as_py() or 0.0)
