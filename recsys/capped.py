"""Capped lists: the best items of which at most n share a value of an attribute.

Each place gets the best item that no cap forbids. With one cap and at most one value an item, no
other list of this length that keeps to the cap has a larger sum of scores (a partition matroid). If
a search does not fill the list, the next one is constrained to the items that may still follow, so
that a list is short only if nothing more may follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from recsys.constraint.caps import Caps
from recsys.constraint.mask import RowMask
from recsys.decoding.output import DecodeStats
from recsys.interactions import Histories
from recsys.listing import Batch, Found, Lists

MOST_BEAMS = 256
Search = Callable[[Batch, int, Sequence[int]], Found]
"""Searches a batch with a width, for the requests at these places of the whole batch."""


@dataclass
class Capped:
    """The list of one request, while it grows.

    Attributes:
        places: number of places to fill.
        items: dense items.
        scores: of the items; those of a later search follow those of an earlier one.
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

    def take(self, found: Found, place: int, caps: Caps) -> bool:
        """Add items of the list at a place of `found`; returns whether there were any."""
        lists, trie, before = found.lists, found.trie, len(self.items)
        count = int((lists.items[place] >= 0).sum())
        listed = lists.items[place, :count]
        seen = 0
        # one after another, since what is left out does not count; a list is at most 256 long
        for item, at in zip(listed.tolist(), trie.item_places(listed).tolist(), strict=True):
            if len(self.items) == self.places:
                break
            if caps.admit(at):
                self.items.append(item)
                self.scores.append(float(lists.scores[place, seen]))
                self.source.append(int(lists.source[place, seen]))
            seen += 1
        self.proven &= found.certificate(place, seen) == "global-exact"
        if found.beams is not None:
            more = found.beams.stats[place]
            self.stats = more if self.stats is None else self.stats.plus(more)
        return len(self.items) > before


def fill(batch: Batch, places: Sequence[int], width: int, search: Search) -> list[Capped]:
    """Fill the lists of requests that all have caps, which then count the items of the lists.

    The first search has the given width; each further one is twice as wide, up to 256.
    """
    lists = [Capped(count) for count in places]
    rows = list(range(len(lists)))
    # Pinned items may have closed values already, of which a search would then find nothing else.
    part = replace(batch, masks=[_left(batch, row) for row in rows])
    while rows:
        found, following = search(part, width, rows), []
        for place, row in enumerate(rows):
            one, caps = lists[row], batch.caps[row]
            assert caps is not None  # noqa: S101 - all requests have caps
            if one.take(found, place, caps) and len(one.items) < one.places:
                following.append(row)
        masks = [_left(batch, row) for row in following]
        excluded = [
            np.append(batch.excluded[row], lists[row].items).astype(np.int32) for row in following
        ]
        left = [
            place
            for place, (mask, items) in enumerate(zip(masks, excluded, strict=True))
            if batch.epoch.count_eligible(items, mask)
        ]
        rows = [following[place] for place in left]
        part = replace(
            batch,
            histories=batch.histories.take(rows),
            excluded=Histories.of([excluded[place] for place in left]),
            masks=[masks[place] for place in left],
            boosts=[batch.boosts[row] for row in rows],
        )
        width = max(width, min(2 * width, MOST_BEAMS))
    return lists


def as_lists(capped: Sequence[Capped], k: int) -> Lists:
    """The lists as arrays of k columns."""
    items = np.full((len(capped), k), -1, np.int32)
    scores = np.full(items.shape, -np.inf, np.float32)
    source = np.zeros(items.shape, np.int8)
    for i, one in enumerate(capped):
        count = len(one.items)
        items[i, :count], scores[i, :count], source[i, :count] = one.items, one.scores, one.source
    return Lists(items, scores, source)


def _left(batch: Batch, row: int) -> RowMask | None:
    """What a request may still get; None for all items."""
    caps, mask = batch.caps[row], batch.masks[row]
    assert caps is not None  # noqa: S101 - as in `fill`
    items: NDArray[np.bool_] = ~caps.closed()
    if items.all():
        return mask
    return RowMask.of(batch.epoch.trie, items if mask is None else items & mask.items)
