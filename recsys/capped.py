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
        width: of the first search; each further one is twice as wide, up to `MOST_BEAMS`.
        search: finds the best items of a batch, as many as its width.

    Returns:
        Lists in the order of scores.
    """
    capped = [CappedList(size) for size in batch.places]
    requests, first = list(range(len(capped))), None
    # Pinned items may have closed values already, of which a search would find nothing else.
    part = replace(batch, masks=[_left(batch, i) for i in requests])
    while requests:
        lists = search(part, width)
        first, width = first or lists, max(width, min(2 * width, MOST_BEAMS))
        going_on: list[tuple[int, NDArray[np.int32], RowMask | None]] = []
        for row, request in enumerate(requests):
            own = capped[request]
            has_more = own.take(part, lists, row, _caps(batch, request))
            if not has_more or len(own.items) == own.places:
                continue
            mask = _left(batch, request)
            hidden = np.append(batch.excluded[request], own.items).astype(np.int32)
            if batch.epoch.count_eligible(hidden, mask):
                going_on.append((request, hidden, mask))
        requests = [request for request, *_ in going_on]
        part = batch.take(
            requests, [hidden for _, hidden, _ in going_on], [mask for *_, mask in going_on]
        )
    items = np.full((len(capped), max(batch.k)), -1, np.int32)
    scores, source = np.full(items.shape, -np.inf, np.float32), np.zeros(items.shape, np.int8)
    for i, own in enumerate(capped):
        order = np.argsort(-np.array(own.scores), kind="stable")
        columns = slice(len(order))
        items[i, columns] = np.array(own.items, np.int32)[order]
        scores[i, columns] = np.array(own.scores)[order]
        source[i, columns] = np.array(own.source, np.int8)[order]
    return Lists(
        items,
        scores,
        source,
        None if first is None else first.beams,
        proven=None if first is None else first.proven,
        certificates=["global-exact" if own.proven else "approximate" for own in capped],
        stats=[own.stats for own in capped if own.stats is not None],
    )


def _caps(batch: Batch, i: int) -> Caps:
    caps = batch.caps[i]
    assert caps is not None  # noqa: S101 - all requests have caps
    return caps


def _left(batch: Batch, i: int) -> RowMask | None:
    """What a request may still get; None for all items."""
    items: NDArray[np.bool_] = ~_caps(batch, i).closed()
    mask = batch.masks[i]
    if items.all():
        return mask
    return RowMask.of(batch.epoch.trie, items if mask is None else items & mask.items)
