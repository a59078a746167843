"""Soft labels: distributions over further items for each training event, from another model.

One source is the item-item model `DIRECTIONAL`. The counts of the user are
subtracted from it, because they contain the pair to be learned, and a teacher that has seen the
answer teaches memorisation. The other source is SASRec, whose dropout of 0.5 limits memorisation.
Labels are over dense items, not codes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from recsys.interactions import Histories
from recsys.progress import track
from recsys.retrieval import ItemItem, SasRec
from recsys.retrieval.item_item import DIRECTIONAL, best_of

EVENTS_AT_A_TIME = 2048  # limits memory: each event has a few hundred neighbours
LARGE = 1 << 15  # items of a catalogue from which SASRec's labels are searched in an inverted file
PROBED = 16  # of its lists, of which there are four times the root of the items
LEAST = 1e-6  # smaller evidence is a rounding error of the subtraction


@dataclass(frozen=True)
class SoftLabels:
    """A distribution over a few items for each training event.

    Attributes:
        items: (events, k) int32, best first, filled up with -1.
        shares: (events, k) float32 that add up to 1, or to 0 without evidence.
    """

    items: NDArray[np.int32]
    shares: NDArray[np.float32]

    @classmethod
    def of(
        cls,
        histories: Histories,
        num_items: int,
        k: int = 32,
        minutes: float | None = None,
        events: NDArray[np.int64] | None = None,
    ) -> SoftLabels:
        """Labels by item-item: for each event, the k best items given the events before it.

        The arguments are those of `of_sasrec`; `num_items` are those of the catalog.
        """
        end = _end(minutes)
        model = ItemItem.count(histories, num_items, DIRECTIONAL)
        total = len(histories.items)
        items = np.full((total, k), -1, np.int32)
        shares = np.zeros((total, k), np.float32)
        events = np.arange(total, dtype=np.int64) if events is None else events
        for asked in parts_until(end, events, "soft labels", EVENTS_AT_A_TIME):
            evidence = _without_own(model, histories, asked)
            line, column, item, score = best_of(evidence, k)
            items[asked[line], column], shares[asked[line], column] = item, score
        return cls(items, _normalise(shares))

    @classmethod
    def of_sasrec(
        cls,
        model: SasRec,
        histories: Histories,
        k: int = 32,
        minutes: float | None = None,
        events: NDArray[np.int64] | None = None,
    ) -> SoftLabels:
        """Labels by a trained SASRec: its k most probable unseen items.

        In a large catalogue they are approximate: an inverted file finds nearly all of them, in
        time that grows with the root of the items.

        Args:
            model: has learned from the same histories.
            histories: training events only.
            k: items of each label.
            minutes: time limit; events that it leaves no time for get no label. Which ones those
                are is random.
            events: numbers of those that need a label; None for all.
        """
        end = _end(minutes)
        rank = _indexed(model) if len(model) >= LARGE else partial(model.rank, exclude_seen=True)
        total, k = len(histories.items), min(k, len(model))
        items = np.full((total, k), -1, np.int32)
        shares = np.zeros((total, k), np.float32)
        events = np.arange(total, dtype=np.int64) if events is None else events
        position = histories.positions[events]
        order = np.argsort(position, kind="stable")  # equal lengths are computed together
        order = order[position[order] > 0]
        for asked in parts_until(end, events[order], "soft labels", EVENTS_AT_A_TIME):
            items[asked], scores = rank(_before(histories, asked)[0], k)
            likely = np.exp(scores - scores[:, :1])
            shares[asked] = np.where(items[asked] >= 0, likely, 0)
        return cls(items, _normalise(shares))


Rank = Callable[[Histories, int], tuple[NDArray[np.int32], NDArray[np.float32]]]


def _indexed(model: SasRec) -> Rank:
    """`model.rank` without seen items, by an inverted file of faiss over the item vectors.

    All vectors have one length, so the largest products are the nearest items.
    """
    import faiss

    size, width = model.vectors.shape
    quantizer = faiss.IndexFlatIP(width)
    index = faiss.IndexIVFFlat(quantizer, width, int(4 * size**0.5), faiss.METRIC_INNER_PRODUCT)
    index.cp.niter, index.cp.max_points_per_centroid = 8, 40  # clusters need not be the best ones
    index.cp.min_points_per_centroid = 1
    index.nprobe = PROBED
    index.train(model.vectors)
    index.add(model.vectors)

    def rank(histories: Histories, k: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        seen = histories.left_out(exclude_seen=True)
        most = min(k + int(seen.lengths.max(initial=0)), size)
        scores, items = index.search(model.states(histories), most)
        row = np.arange(len(items))[:, None] * size
        left_out = np.isin(row + items, seen.rows * size + seen.items) | (items < 0)
        scores[left_out], items[left_out] = -np.inf, -1
        best = np.argsort(left_out, axis=1, kind="stable")[:, :k]
        return (
            np.take_along_axis(items, best, axis=1).astype(np.int32),
            np.take_along_axis(scores, best, axis=1),
        )

    return rank


def _end(minutes: float | None) -> float:
    """When a time limit that begins now is over, by `time.monotonic`."""
    return time.monotonic() + 60 * (math.inf if minutes is None else minutes)


def parts_until(
    end: float, rows: NDArray[np.int64], name: str, size: int, least: int = 0
) -> Iterator[NDArray[np.int64]]:
    """Parts of `size` rows in their order; with a time limit, in random order until it is over.

    At `end`, by `time.monotonic`, parts with `least` rows have been yielded nevertheless.
    """
    starts = np.arange(0, len(rows), size)
    if not math.isinf(end):
        starts = np.random.default_rng(0).permutation(starts)
    with track(name, len(rows)) as bar:
        for number, start in enumerate(starts.tolist()):
            if number * size >= least and time.monotonic() > end:
                break
            part = rows[start : start + size]
            yield part
            bar.advance(len(part))


def _normalise(shares: NDArray[np.float32]) -> NDArray[np.float32]:
    """Normalise rows to add up to 1; rows of zeros remain."""
    total = shares.sum(axis=1, keepdims=True)
    np.divide(shares, total, out=shares, where=total > 0)
    return shares


def _before(histories: Histories, asked: NDArray[np.int64]) -> tuple[Histories, NDArray[np.int32]]:
    """The sequence of events before each asked event: their items, and their numbers."""
    numbers = Histories(histories.offsets, np.arange(len(histories.items), dtype=np.int32))
    rows = np.searchsorted(histories.offsets, asked, side="right") - 1
    taken = numbers.prefixes(rows, asked - histories.offsets[rows])
    return Histories(taken.offsets, histories.items[taken.items]), taken.items


def _without_own(
    model: ItemItem, histories: Histories, asked: NDArray[np.int64]
) -> sparse.csr_array:
    """(asked, items) evidence for unseen items before each event, without the user's own counts.

    The user's own counts of unseen items come from pairs of an earlier event and the asked or a
    later event, at most `DIRECTIONAL.window` apart, which count 1/gap.
    """
    user = histories.rows
    taken, event = _before(histories, asked)
    line, age = taken.rows, asked[taken.rows] - 1 - event
    evidence = model.score(taken, exclude_seen=True)
    source, _ = DIRECTIONAL.scales(np.bincount(histories.items, minlength=evidence.shape[1]))
    weight = model.decay**age * source[histories.items[event]]
    gap = np.arange(1, DIRECTIONAL.window + 1)[:, None]
    later = np.minimum(event + gap, len(user) - 1)
    own = (event + gap < len(user)) & (user[later] == user[event]) & (age < gap)
    positions = (np.broadcast_to(line, own.shape)[own], histories.items[later[own]])
    part = sparse.csr_array(((weight / gap)[own], positions), shape=evidence.shape)
    evidence = sparse.csr_array(evidence - part.astype(np.float32))
    evidence.data[evidence.data < LEAST] = 0
    evidence.eliminate_zeros()
    return evidence
