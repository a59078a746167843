"""Soft labels: what other users took after such a history, beside the item that did come next.

A training event is asked of the item-item model that retrieval uses too (`ItemItem.directional`),
with the user's own part taken out of its counts: the very pair that is to be learned is among them,
and a teacher that has seen the answer teaches to learn by heart. Dense items alone; no codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy import sparse

from recsys.interactions import Histories
from recsys.retrieval import ItemItem
from recsys.retrieval.item_item import best_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

WINDOW, DAMPING = 5, 0.5  # of the item-item model
EVENTS_AT_A_TIME = 2048  # bounds memory: a few hundred neighbours for each of them
LEAST = 1e-6  # evidence; what is below is what the subtraction leaves of nothing


@dataclass(frozen=True)
class SoftLabels:
    """A distribution over a few items for each training event.

    Attributes:
        items: (events, k) int32, best first, -1 where there are no more.
        shares: (events, k) float32 that add up to 1, or to 0 where other users say nothing.
    """

    items: NDArray[np.int32]
    shares: NDArray[np.float32]

    @classmethod
    def of(cls, histories: Histories, num_items: int, k: int = 32) -> SoftLabels:
        """Of every event of training histories: the k best items after the events before it.

        Args:
            histories: training events; nothing else may come in.
            num_items: items of the catalogue.
            k: items kept of each event.
        """
        model = ItemItem.directional(
            histories, num_items, window=WINDOW, source_damping=DAMPING, target_damping=0.0
        )
        events = len(histories.items)
        items = np.full((events, k), -1, np.int32)
        shares = np.zeros((events, k), np.float32)
        for start in range(0, events, EVENTS_AT_A_TIME):
            asked = np.arange(start, min(start + EVENTS_AT_A_TIME, events))
            evidence = _without_own(model, histories, asked)
            line, place, item, score = best_of(evidence, k)
            items[asked[line], place], shares[asked[line], place] = item, score
        total = shares.sum(axis=1, keepdims=True)
        return cls(items, np.divide(shares, total, out=shares, where=total > 0))


def _without_own(
    model: ItemItem, histories: Histories, asked: NDArray[np.int64]
) -> sparse.csr_array:
    """(asked, items) evidence before each event, of unseen items, as if its user were not there.

    What is left of the user among unseen items are pairs of an event before and one from the asked
    one on, at most `WINDOW` apart, counted 1/gap.
    """
    user = histories.rows
    first = histories.offsets[user[asked]]
    before = asked - first
    line = np.repeat(np.arange(len(asked)), before)
    offsets = np.append(0, np.cumsum(before))
    place = np.arange(len(line)) - offsets[line]
    event, age = first[line] + place, before[line] - 1 - place
    taken = Histories(offsets, histories.items[event])
    evidence = model.score(taken, exclude_seen=True)
    counts = np.bincount(histories.items, minlength=evidence.shape[1]).clip(1)
    weight = model.decay**age * counts[histories.items[event]].astype(np.float64) ** -DAMPING
    gap = np.arange(1, WINDOW + 1)[:, None]
    later = np.minimum(event + gap, len(user) - 1)
    own = (event + gap < len(user)) & (user[later] == user[event]) & (age < gap)
    places = (np.broadcast_to(line, own.shape)[own], histories.items[later[own]])
    part = sparse.csr_array(((weight / gap)[own], places), shape=evidence.shape)
    evidence = sparse.csr_array(evidence - part.astype(np.float32))
    evidence.data[evidence.data < LEAST] = 0
    evidence.eliminate_zeros()
    return evidence
