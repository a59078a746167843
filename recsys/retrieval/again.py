"""Buying again: what an item of a history says of its next event.

As TIFU-kNN (Hu et al., 2020) it counts how often and how recently a user chose an item. In addition
it compares the time since the last event with the usual gap, by the user and by all users, and says
how often the item is chosen again at all. Gaps are counted in events of the history, which needs no
times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recsys.interactions import Behaviour, Histories, count_as_seen

PRIOR = 10.0  # events that are added to those of an item, as usual as those of all items


def that_count(histories: Histories, behaviours: Sequence[Behaviour]) -> Histories:
    """The events that count as seen; all of them without types."""
    if histories.behaviours is None or not behaviours:
        return histories
    return histories.where(count_as_seen(histories.behaviours, behaviours))


@dataclass(frozen=True, eq=False)
class Chosen:
    """The distinct items of n histories, ordered by history and item.

    Attributes:
        row: (m,) history.
        item: (m,).
        count: (m,) events of the item.
        age: (m,) events of the history since the last of them.
        gap: (m,) mean number of events from one to the next; 0 for a single one.
    """

    row: NDArray[np.int64]
    item: NDArray[np.int64]
    count: NDArray[np.int64]
    age: NDArray[np.int64]
    gap: NDArray[np.float64]

    @classmethod
    def of(cls, histories: Histories) -> Chosen:
        """Sort the events once."""
        rows, items = histories.rows, histories.items.astype(np.int64)
        age = histories.offsets[1:][rows] - 1 - np.arange(len(rows))
        order = np.lexsort((items, rows))  # stable: the oldest event of an item comes first
        rows, items, age = rows[order], items[order], age[order]
        is_first = np.ones(len(rows), np.bool_)
        is_first[1:] = (rows[1:] != rows[:-1]) | (items[1:] != items[:-1])
        first = np.flatnonzero(is_first)
        count = np.diff(np.append(first, len(rows)))
        last = age[first + count - 1]
        gap = (age[first] - last) / np.maximum(count - 1, 1)
        return cls(rows[first], items[first], count, last, gap)

    def best(self, n: int, k: int, blocked: NDArray[np.bool_]) -> NDArray[np.int32]:
        """(n, k) items of most events, then the latest, padded with -1; not the `blocked` ones."""
        free = np.flatnonzero(self.item < blocked.shape[1])
        free = free[~blocked[self.row[free], self.item[free]]]
        order = free[np.lexsort((self.age[free], -self.count[free], self.row[free]))]
        row = self.row[order]
        rank = np.arange(len(row)) - np.searchsorted(row, row)
        best = np.full((n, k), -1, np.int32)
        best[row[rank < k], rank[rank < k]] = self.item[order[rank < k]]
        return best


@dataclass(frozen=True, eq=False)
class Repeats:
    """How items are chosen again.

    Attributes:
        rates: (items + 1,) log-odds that an event repeats an item of its user; the last one is for
            items without events.
        gaps: (items + 1,) logarithm of the usual number of events between two of the same item.
    """

    rates: NDArray[np.float64]
    gaps: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.rates) - 1

    @classmethod
    def count(cls, histories: Histories, size: int) -> Repeats | None:
        """Count training histories of `size` items; None if no item is chosen twice."""
        chosen = Chosen.of(histories)
        again, item = chosen.count - 1, chosen.item
        if not again.any():
            return None
        logs = np.log(np.maximum(chosen.gap, 1))

        def by_item(weights: NDArray[np.floating | np.integer]) -> NDArray[np.float64]:
            return np.bincount(item, weights, size + 1).astype(np.float64)

        mean_rate, mean_gap = again.sum() / chosen.count.sum(), (again * logs).sum() / again.sum()
        times = by_item(again)
        rates = (times + PRIOR * mean_rate) / (by_item(chosen.count) + PRIOR)
        gaps = (by_item(again * logs) + PRIOR * mean_gap) / (times + PRIOR)
        return cls(np.log(rates / (1 - rates)), gaps)

    def values(self, chosen: Chosen, items: NDArray[np.integer]) -> dict[str, NDArray[np.float64]]:
        """What is known of (n, c) items, -1 for none, by the histories that were chosen from.

        Returns:
            `again` (n, c), 1 for an item of the history and else 0, and where it is 1 the values by
            the names of `recsys.retrieval.reranker.AGAIN_VALUES`.
        """
        width = 1 + max(int(part.max(initial=0)) for part in (chosen.item, items))
        keys = chosen.row * width + chosen.item
        asked = np.arange(len(items))[:, None] * width + items
        index = np.searchsorted(keys, asked)
        index[index == len(keys)] = 0
        is_again = (items >= 0) & (keys[index] == asked if len(keys) else False)
        entry = index[is_again]
        known = np.minimum(chosen.item[entry], len(self))
        count, since = chosen.count[entry], np.log1p(chosen.age[entry])
        usual = (count - 1) * np.log(np.maximum(chosen.gap[entry], 1)) + self.gaps[known]
        late = since - usual / count
        values = {
            "": np.ones(len(entry)),
            ".count": np.log(count),
            ".age": since,
            ".rate": self.rates[known],
            ".late": late,
            ".overdue": np.maximum(late, 0),
        }
        columns = {}
        for name, value in values.items():
            columns[f"again{name}"] = np.zeros(items.shape)
            columns[f"again{name}"][is_again] = value
        return columns
