"""Interactions and Histories: the types of user events that all packages share.

`Interactions` holds the events of all users over dense indices, in canonical order. `Histories` is
a ragged list of item sequences in CSR form. NumPy only; no file formats.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Role = Literal["target", "context", "negative"]


class Behaviour(NamedTuple):
    """A type of event, such as `view` or `purchase`.

    Attributes:
        name: as the source calls it.
        role: `target` events are predicted and count as hits; `context` events only appear in
            histories; `negative` events are never positives.
        weight: strength as a sign of interest, from 0 to 1.
    """

    name: str
    role: Role
    weight: float


UNKNOWN_TYPE, OTHER_TYPE, NEGATIVE_TYPE = 255, 254, 253
"""Numbers of an event whose type is not known, of a type that the data set does not have, and of a
return or a dislike, which is no event of a history."""


def count_as_seen(types: NDArray[np.uint8], behaviours: Sequence[Behaviour]) -> NDArray[np.bool_]:
    """(n,) whether the item of an event counts as seen: not for context, such as a view.

    Args:
        types: (n,) places among the behaviours; `UNKNOWN_TYPE` counts, `OTHER_TYPE` does not.
        behaviours: the types of a data set.
    """
    context = np.zeros(UNKNOWN_TYPE + 1, np.bool_)
    context[OTHER_TYPE] = True
    context[: len(behaviours)] = [b.role == "context" for b in behaviours]
    return ~context[types]


@dataclass(frozen=True)
class Histories:
    """Ragged item sequences, stored one after another.

    Attributes:
        offsets: (n + 1,) int64; sequence i is `items[offsets[i]:offsets[i + 1]]`.
        items: (total,) int32 dense items.
        behaviours: (total,) uint8 type of the event of each item, a place in `Dataset.behaviours`;
            None if the data set has no types.
        seen: (total,) bool, whether each item counts as seen and is left out of a list without seen
            items; None for all. With types, an item that was only viewed can still be bought.
        hidden: items that must not be recommended to each sequence's user, such as disliked ones;
            None for none.

    >>> histories = Histories.of([[3, 1], [], [4]])
    >>> len(histories), histories.lengths.tolist(), histories[0].tolist()
    (3, [2, 0, 1], [3, 1])
    >>> histories.take([2, 0]).padded().tolist()
    [[4, -1], [3, 1]]
    """

    offsets: NDArray[np.int64]
    items: NDArray[np.int32]
    behaviours: NDArray[np.uint8] | None = None
    seen: NDArray[np.bool_] | None = None
    hidden: Histories | None = None

    def __post_init__(self) -> None:
        if self.offsets.ndim != 1 or len(self.offsets) == 0 or self.offsets[0] != 0:
            raise ValueError("Histories.offsets must be 1-D and start with 0")
        if (np.diff(self.offsets) < 0).any() or self.offsets[-1] != len(self.items):
            raise ValueError("Histories.offsets must rise to len(items)")
        for name in ("behaviours", "seen"):
            if (part := getattr(self, name)) is not None and len(part) != len(self.items):
                raise ValueError(f"Histories.{name} must be as long as items")
        if self.hidden is not None and len(self.hidden) != len(self):
            raise ValueError("Histories.hidden must have as many sequences")

    @classmethod
    def of(cls, sequences: Iterable[ArrayLike]) -> Histories:
        """Histories from any sequences of dense items."""
        arrays = [np.asarray(s, np.int32).reshape(-1) for s in sequences]
        offsets = np.zeros(len(arrays) + 1, np.int64)
        np.cumsum([len(a) for a in arrays], out=offsets[1:])
        return cls(offsets, np.concatenate(arrays) if arrays else np.zeros(0, np.int32))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> NDArray[np.int32]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"history {index} of {len(self)}")
        index %= len(self)
        return self.items[self.offsets[index] : self.offsets[index + 1]]

    def __iter__(self) -> Iterator[NDArray[np.int32]]:
        return (self[i] for i in range(len(self)))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """(n,) items in each sequence."""
        return np.diff(self.offsets)

    @property
    def rows(self) -> NDArray[np.int64]:
        """(total,) index of the sequence of each item."""
        return np.repeat(np.arange(len(self)), self.lengths)

    @property
    def positions(self) -> NDArray[np.int64]:
        """(total,) place of each item in its sequence."""
        return np.arange(len(self.items)) - np.repeat(self.offsets[:-1], self.lengths)

    def take(self, indices: ArrayLike) -> Histories:
        """The sequences at `indices`, in that order; vectorised."""
        indices = np.asarray(indices).reshape(-1)
        if indices.dtype == bool:
            raise TypeError("Histories.take wants indices; use np.flatnonzero on a mask")
        indices = indices.astype(np.int64)
        indices = np.where(indices < 0, indices + len(self), indices)
        hidden = None if self.hidden is None else self.hidden.take(indices)
        return self.prefixes(indices, self.lengths[indices], hidden)

    def prefixes(
        self, rows: NDArray[np.int64], lengths: NDArray[np.int64], hidden: Histories | None = None
    ) -> Histories:
        """The first `lengths` items of the sequences at `rows`."""
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        shift = np.repeat(self.offsets[rows] - offsets[:-1], lengths)
        return self._of(offsets, np.arange(offsets[-1]) + shift, hidden)

    def where(self, keep: NDArray[np.bool_]) -> Histories:
        """The same number of sequences with only the items where `keep` (total,) is true."""
        offsets = np.zeros(len(self) + 1, np.int64)
        np.cumsum(np.bincount(self.rows[keep], minlength=len(self)), out=offsets[1:])
        return self._of(offsets, keep, self.hidden)

    def _of(
        self, offsets: NDArray[np.int64], events: NDArray[Any], hidden: Histories | None
    ) -> Histories:
        """Sequences with new offsets of the chosen events (indices, or a mask)."""
        types = None if self.behaviours is None else self.behaviours[events]
        seen = None if self.seen is None else self.seen[events]
        return Histories(offsets, self.items[events], types, seen, hidden)

    def left_out(self, exclude_seen: bool) -> Histories:
        """What a list must not contain: hidden items and, if wanted, the items that are seen."""
        if exclude_seen:
            seen = self if self.seen is None else self.where(self.seen)
        else:
            seen = self.where(np.zeros(len(self.items), np.bool_))
        if self.hidden is None:
            return seen
        rows = np.concatenate([seen.rows, self.hidden.rows])
        items = np.concatenate([seen.items, self.hidden.items])
        offsets = seen.offsets + self.hidden.offsets
        return Histories(offsets, items[np.argsort(rows, kind="stable")])

    def hiding(self, items: NDArray[np.integer]) -> Histories:
        """The same sequences, each with these items among its hidden ones."""
        own = self.hidden or Histories(np.zeros(len(self) + 1, np.int64), np.zeros(0, np.int32))
        rows = np.concatenate([own.rows, np.repeat(np.arange(len(self)), len(items))])
        hidden = np.concatenate([own.items, np.tile(items.astype(np.int32), len(self))])
        offsets = own.offsets + len(items) * np.arange(len(self) + 1)
        return replace(self, hidden=Histories(offsets, hidden[np.argsort(rows, kind="stable")]))

    def padded(self, fill: int = -1, width: int | None = None) -> NDArray[np.int32]:
        """(n, width) array with one left-aligned sequence per row, filled up with `fill`.

        Longer sequences are cut at `width`; by default it is the longest length.
        """
        width = int(self.lengths.max(initial=0)) if width is None else width
        out = np.full((len(self), width), fill, np.int32)
        column = self.positions
        inside = column < width
        out[self.rows[inside], column[inside]] = self.items[inside]
        return out


@dataclass(frozen=True)
class Interactions:
    """One row per event, sorted by user, then time; equal times keep the source's order.

    Attributes:
        user: (n,) int32 dense users, ascending.
        item: (n,) int32 dense items.
        timestamp: (n,) int64 unix seconds; the position in the user's sequence if not `has_time`.
        rating: (n,) float32, NaN where the source has none.
        user_ids: (users,) str, the outside ids.
        item_ids: (items,) str.
        has_time: whether timestamps of different users can be compared.
        behaviour: (n,) uint8 type of each event, a place in `Dataset.behaviours`; None without
            types.
        nanosecond: (n,) int32 after the second of each time; None if all times are whole seconds.
    """

    user: NDArray[np.int32]
    item: NDArray[np.int32]
    timestamp: NDArray[np.int64]
    rating: NDArray[np.float32]
    user_ids: NDArray[np.str_]
    item_ids: NDArray[np.str_]
    has_time: bool
    behaviour: NDArray[np.uint8] | None = None
    nanosecond: NDArray[np.int32] | None = None

    def __post_init__(self) -> None:
        n = len(self.user)
        for name in ("item", "timestamp", "rating", "behaviour", "nanosecond"):
            column = getattr(self, name)
            if column is not None and len(column) != n:
                raise ValueError(f"Interactions.{name} has {len(column)} rows, not {n}")
        for name, ids in (("user", self.user_ids), ("item", self.item_ids)):
            column = getattr(self, name)
            if n and (column.min() < 0 or column.max() >= len(ids)):
                raise ValueError(f"Interactions.{name} must lie in [0, {len(ids)})")
            if len(np.unique(ids)) != len(ids):
                raise ValueError(f"Interactions.{name}_ids repeat")
        step = np.diff(self.user)
        if (step < 0).any() or ((step == 0) & (np.diff(self.timestamp) < 0)).any():
            raise ValueError("Interactions must be sorted by user, then timestamp")

    def __len__(self) -> int:
        return len(self.user)

    @property
    def histories(self) -> Histories:
        """All events in time order, one sequence per user."""
        offsets = np.searchsorted(self.user, np.arange(len(self.user_ids) + 1))
        return Histories(offsets.astype(np.int64), self.item, self.behaviour)

    def where(self, keep: NDArray[np.bool_]) -> Interactions:
        """The same users and items with only the events where `keep` (n,) is true."""
        return replace(
            self,
            user=self.user[keep],
            item=self.item[keep],
            timestamp=self.timestamp[keep],
            rating=self.rating[keep],
            behaviour=None if self.behaviour is None else self.behaviour[keep],
            nanosecond=None if self.nanosecond is None else self.nanosecond[keep],
        )
