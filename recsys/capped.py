"""Capped lists: the best items of which at most n share a value of an attribute.

Each place gets the best item that no cap forbids. With one cap and at most one value an item, no
other list of this length that keeps to the cap has a larger sum of scores (a partition matroid). If
a search does not fill the list, the next one is constrained to the items that may still follow, so
that a list is short only if nothing more may follow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from recsys.constraint.caps import Caps
from recsys.constraint.mask import RowMask
from recsys.decoding.output import DecodeStats
from recsys.listing import Batch, Lists, certificate

MOST_BEAMS = 256


@dataclass
class CappedList:
    """The list of one request, while it grows.

    Attributes:
        places: number of places to fill.
        items: dense items.
        scores: of the items, search after search.
        source: as in `Lists`.
        stats: counters of all searches; None without a model.
        proven: whether no other item could be at a place of the list.
    """

    places: int
    items: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    source: list[int] = field(default_factory=list)
    stats: DecodeStats | None = None
    proven: bool = True

    def take(self, batch: Batch, lists: Lists, i: int, caps: Caps) -> bool:
        """Add items of list i, one of a search of `batch`; returns whether there were any."""
        before, count = len(self.items), int((lists.items[i] >= 0).sum())
        listed = lists.items[i, :count]
        seen = 0
        # one after another, since what is left out does not count; a list is at most 256 long
        order = batch.epoch.trie.item_places(listed).tolist()
        for item, at in zip(listed.tolist(), order, strict=True):
            if len(self.items) == self.places:
                break
            if caps.admit(at):
                self.items.append(item)
                self.scores.append(float(lists.scores[i, seen]))
                self.source.append(int(lists.source[i, seen]))
            seen += 1
        self.proven &= certificate(batch, lists, i, seen) == "global-exact"
        if lists.stats:
            self.stats = lists.stats[i] if self.stats is None else self.stats.plus(lists.stats[i])
        return len(self.items) > before


def fill_lists(batch: Batch, width: int, search: Callable[[Batch, int], Lists]) -> Lists:
    """The lists of requests that all have caps, by as many searches as it takes.

    Args:
        batch: the requests.
        width: of the first search.
        search: finds the best items of a batch, as many as its width.
    """
    capped = CappedLists(batch, width)
    while capped:
        capped.take(search(capped.part, capped.width))
    return capped.lists()


class CappedLists:
    """The lists of requests that all have caps, which then count the items of the lists.

    While `part` has requests, it is to be searched with a `width`, and `take` gets what is found.
    The first search has the given width; each further one is twice as wide, up to 256.
    """

    def __init__(self, batch: Batch, width: int) -> None:
        """Begin without items."""
        self.width = width
        self._batch = batch
        self._lists = [CappedList(size) for size in batch.places]
        self._requests = list(range(len(self._lists)))  # those of `part`, by their place
        # Pinned items may have closed values already, of which a search would find nothing else.
        self.part = replace(batch, masks=[_left(batch, i) for i in self._requests])
        self._first: Lists | None = None

    def __bool__(self) -> bool:
        """Whether there is more to search for."""
        return bool(self._requests)

    def take(self, lists: Lists) -> None:
        """Add what a search of `part` found, and make the next part."""
        batch, following = self._batch, []
        self._first = self._first or lists
        for row, request in enumerate(self._requests):
            capped, caps = self._lists[request], batch.caps[request]
            assert caps is not None  # noqa: S101 - all requests have caps
            if capped.take(self.part, lists, row, caps) and len(capped.items) < capped.places:
                following.append(request)
        self._requests, excluded, masks = [], [], []
        for request in following:
            mask, own = _left(batch, request), self._lists[request].items
            hidden = np.append(batch.excluded[request], own).astype(np.int32)
            if batch.epoch.count_eligible(hidden, mask):
                self._requests.append(request)
                excluded.append(hidden)
                masks.append(mask)
        self.part = batch.take(self._requests, excluded, masks)
        self.width = max(self.width, min(2 * self.width, MOST_BEAMS))

    def lists(self) -> Lists:
        """The lists, as many columns as the longest may have, in the order of scores."""
        first = self._first
        items = np.full((len(self._lists), max(self._batch.k)), -1, np.int32)
        scores = np.full(items.shape, -np.inf, np.float32)
        source = np.zeros(items.shape, np.int8)
        for i, capped in enumerate(self._lists):
            columns, found = slice(len(capped.items)), np.array(capped.scores)
            order = np.argsort(-found, kind="stable")
            items[i, columns] = np.array(capped.items, np.int32)[order]
            scores[i, columns] = found[order]
            source[i, columns] = np.array(capped.source, np.int8)[order]
        return Lists(
            items,
            scores,
            source,
            None if first is None else first.beams,
            blended=first is not None and first.blended,
            certificates=[
                "global-exact" if capped.proven else "approximate" for capped in self._lists
            ],
            stats=[capped.stats for capped in self._lists if capped.stats is not None],
        )


def _left(batch: Batch, i: int) -> RowMask | None:
    """What a request may still get; None for all items."""
    caps, mask = batch.caps[i], batch.masks[i]
    assert caps is not None  # noqa: S101 - all requests have caps
    items: NDArray[np.bool_] = ~caps.closed()
    if items.all():
        return mask
    return RowMask.of(batch.epoch.trie, items if mask is None else items & mask.items)
