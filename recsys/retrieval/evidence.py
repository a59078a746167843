"""Evidence: what a retrieval knows of some histories, and the values of items given them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from recsys.interactions import Histories
from recsys.retrieval.again import Chosen, that_count
from recsys.retrieval.content import cosines
from recsys.retrieval.later import LaterItems
from recsys.retrieval.native import NativeRetrieval
from recsys.retrieval.reranker import (
    AGAIN,
    AGAIN_VALUES,
    MODEL,
    MOST_RANK,
    NEW,
    POPULARITY,
    RANKED,
    RECENT,
    SASREC,
    SEEN,
    SHARES,
    TARGET_POPULARITY,
    rank_of,
)
from recsys.retrieval.rows import Entries, WeightedItems
from recsys.retrieval.vectors import largest, product
from recsys.semantic_ids.words import unit_rows

if TYPE_CHECKING:
    from recsys.retrieval.retrieval import Retrieval


@dataclass(frozen=True, eq=False)
class Evidence:
    """The evidence of n histories; each part is computed once, when it is first used.

    Attributes:
        retrieval: the fitted parts, a `Retrieval`.
        histories: n sequences, oldest first. Items beyond the catalog count for content alone, and
            only if they are among the later items.
        later: the items that follow those of the catalog, if anything is known of them.
        grown: whether the catalog has items that the fitted parts do not know.
    """

    retrieval: Retrieval
    histories: Histories
    later: LaterItems | None = None
    grown: bool = False

    @property
    def native(self) -> NativeRetrieval | None:
        """The fitted parts in the native library; None where it does not cover what is asked."""
        if self.grown or (self.later is not None and len(self.later)):
            return None
        return self.retrieval.native

    @cached_property
    def recency(self) -> WeightedItems:
        """The items of the histories, decayed."""
        source = self.retrieval
        return WeightedItems.decayed(self.histories, len(source), source.item_item.decay)

    @cached_property
    def chosen(self) -> Chosen:
        """The items of the histories; with types, those that count as seen."""
        types = self.retrieval.types
        return Chosen.of(that_count(self.histories, () if types is None else types.behaviours))

    @cached_property
    def shares(self) -> Entries:
        """(n, items) share of each item in the evidence of each history."""
        return self.recency.sums(self.retrieval.item_item.weights).normalised()

    @cached_property
    def to_targets(self) -> Entries:
        """(n, items) share of each item in the evidence of the next target event."""
        assert self.retrieval.types is not None  # noqa: S101 - the caller has looked
        return self.recency.sums(self.retrieval.types.to_targets.weights).normalised()

    @cached_property
    def states(self) -> NDArray[np.float32]:
        """(n, D) last states of SASRec."""
        assert self.retrieval.sasrec is not None  # noqa: S101 - the caller has looked
        return self.retrieval.sasrec.states(self.histories)

    @cached_property
    def logits(self) -> NDArray[np.float32]:
        """(n, items) logits of SASRec."""
        assert self.retrieval.sasrec is not None  # noqa: S101 - the caller has looked
        return product(self.states, self.retrieval.sasrec.vectors)

    @cached_property
    def best(self) -> dict[str, NDArray[np.float32]]:
        """For each of the `RANKED` sources that there are, (n, `MOST_RANK`) its largest values.

        They are of all items of the catalog that are not in the history, whatever a request allows,
        descending, and -inf where there are no more.
        """
        known = self.histories.items < len(self.retrieval)
        rows, seen = self.histories.rows[known], self.histories.items[known]
        item_item, to_targets = SHARES
        parts = {item_item: self.shares.toarray()}
        if self.retrieval.types is not None:
            parts[to_targets] = self.to_targets.toarray()
        if self.retrieval.sasrec is not None:
            parts[SASREC] = self.logits.copy()
        best = {}
        for source, values in parts.items():
            values[rows, seen] = -np.inf
            columns = largest(values, MOST_RANK)
            missing = ((0, 0), (0, MOST_RANK - columns.shape[1]))
            top = np.take_along_axis(values, columns, axis=1)
            best[source] = np.pad(top, missing, constant_values=-np.inf)
        return best

    @cached_property
    def native_best(self) -> NDArray[np.float32]:
        """(n, 2, `MOST_RANK`) those of `item_item` and SASRec by the native library."""
        assert self.native is not None  # noqa: S101 - the caller has looked
        blocked = np.ones((len(self.histories), len(self.retrieval)), np.bool_)
        return self.native.propose(self, 0, blocked)[2]

    @cached_property
    def vectors(self) -> NDArray[np.float32]:
        """(n, D) unit vectors of the histories."""
        assert self.retrieval.vectors is not None  # noqa: S101 - the caller has looked
        return self.recency.mean(self.retrieval.vectors.vectors)

    @cached_property
    def content(self) -> NDArray[np.float32]:
        """(n, terms) unit vectors of the contents of the histories."""
        retrieval, later, size = self.retrieval, self.later, len(self.retrieval)
        assert retrieval.content is not None  # noqa: S101 - the caller has looked
        scores = self.recency.dense(retrieval.content.rows)
        is_later = self.histories.items >= size
        if later is not None and is_later.any():
            decay, most = retrieval.item_item.decay, size + len(later)
            own = WeightedItems.decayed(self.histories, most, decay, is_later)
            scores = scores + replace(own, items=own.items - size).dense(later.content)
        return unit_rows(scores)

    @cached_property
    def cosines(self) -> NDArray[np.float32]:
        """(n, items) their cosines with the catalog's contents."""
        assert self.retrieval.content is not None  # noqa: S101 - the caller has looked
        return self.retrieval.content.cosines(self.content)

    @cached_property
    def later_cosines(self) -> NDArray[np.float32] | None:
        """(n, later) the same with the contents of the later items."""
        return None if self.later is None else cosines(self.later.content, self.content)

    def values(
        self, items: NDArray[np.integer], sources: Sequence[str]
    ) -> dict[str, NDArray[np.float64]]:
        """The values that sources of retrieval give to items.

        Args:
            items: (n, c) dense items; -1 for none.
            sources: the sources that are wanted; the model is left out.

        Returns:
            source -> (n, c) values, the ranks by those of `RANKED`, up to `MOST_RANK`, and of the
            source `again` the values in `AGAIN_VALUES`. Later
            items have no evidence and no events (0). Their cosines and logits are those of
            `Evidence.later`; a cosine is NaN where nothing is known of them, and a logit counts as
            the least of `best`. A source that this retrieval does not have is NaN everywhere.
        """
        retrieval = self.retrieval
        known = np.where((items >= 0) & (items < len(retrieval)), items, len(retrieval))
        counts, later = np.append(retrieval.counts, 0.0), self.later
        compute: dict[str, Callable[[], NDArray[Any]]] = {
            "item_item": lambda: self.shares.at(known),
            POPULARITY: lambda: np.log1p(counts[known]),
            NEW: lambda: counts[known] == 0,
        }
        if (recent := retrieval.recent) is not None:
            compute[RECENT] = lambda: np.log1p(np.append(recent, 0.0)[known])
        if (types := retrieval.types) is not None:
            compute["to_targets"] = lambda: self.to_targets.at(known)
            compute[TARGET_POPULARITY] = lambda: np.log1p(np.append(types.counts, 0.0)[known])
            for name in types.numbers:
                seen = partial(types.recency, self.histories, name)
                compute[f"{SEEN}{name}"] = partial(lambda seen: seen().at(known), seen)
        if retrieval.vectors is not None:
            rows = None if later is None else later.vectors
            compute["vectors"] = partial(self._of_vectors, items, rows)
        if retrieval.content is not None:
            compute["content"] = partial(self._alike, items)
        if retrieval.sasrec is not None:
            rows = None if later is None else later.sasrec
            compute[SASREC] = partial(self._logits_of, items, rows)
        values_by_source = {}
        for source in sources:
            if source in compute:
                values_by_source[source] = compute[source]().astype(np.float64)
            elif source != MODEL:
                values_by_source[source] = np.full(items.shape, np.nan)
            if source in RANKED:
                values_by_source[rank_of(source)] = self._ranks(source, values_by_source[source])
        if AGAIN in sources:
            values_by_source |= self.again(items)
        return values_by_source

    def again(self, items: NDArray[np.integer]) -> dict[str, NDArray[np.float64]]:
        """The values in `AGAIN_VALUES` of (n, c) items; 0 where the history has no such item."""
        if (repeats := self.retrieval.repeats) is None:
            return {name: np.zeros(items.shape) for name in AGAIN_VALUES}
        return repeats.values(self.chosen, items)

    def _ranks(self, source: str, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """(n, c) how many of `best` are larger than each value."""
        ranks = np.zeros(values.shape)
        if source in self.best:
            for rank, line, best in zip(ranks, values, self.best[source], strict=True):
                rank[:] = MOST_RANK - np.searchsorted(best[::-1], line, side="right")
        return ranks

    def _logits_of(
        self, items: NDArray[np.integer], later: NDArray[np.float32] | None
    ) -> NDArray[np.float32]:
        """(n, c) logits of SASRec; the least of `best` for items that it does not know."""
        inside = (items >= 0) & (items < len(self.retrieval))
        known = np.take_along_axis(self.logits, np.where(inside, items, 0), axis=1)
        logits = self._with_later(np.where(inside, known, np.nan), self.states, items, later)
        best = self.best[SASREC]
        least = np.where(best > -np.inf, best, np.inf).min(axis=1, keepdims=True)
        return np.where(np.isnan(logits), np.where(least < np.inf, least, 0), logits)

    def _alike(self, items: NDArray[np.integer]) -> NDArray[np.float32]:
        """(n, c) cosines of contents; NaN outside the items."""
        size = len(self.retrieval)
        inside = (items >= 0) & (items < size)
        near = np.take_along_axis(self.cosines, np.where(inside, items, 0), axis=1)
        cosines = np.where(inside, near, np.float32(np.nan))
        if (later := self.later_cosines) is not None:
            row, column = np.nonzero((items >= size) & (items < size + later.shape[1]))
            cosines[row, column] = later[row, items[row, column] - size]
        return cosines

    def _of_vectors(
        self, items: NDArray[np.integer], later: NDArray[np.float32] | None
    ) -> NDArray[np.float32]:
        """(n, c) cosines of the items' vectors with the histories; NaN for items without any."""
        assert self.retrieval.vectors is not None  # noqa: S101 - the caller has looked
        inside = (items >= 0) & (items < len(self.retrieval))
        own = self.retrieval.vectors.vectors[np.where(inside, items, 0)]
        cosines = np.einsum("nd,ncd->nc", self.vectors, own)
        return self._with_later(np.where(inside, cosines, np.nan), self.vectors, items, later)

    def _with_later(
        self,
        scores: NDArray[np.float32],
        queries: NDArray[np.float32],
        items: NDArray[np.integer],
        later: NDArray[np.float32] | None,
    ) -> NDArray[np.float32]:
        """The (n, c) scores, those of later items as products of their vectors with the queries."""
        if later is not None:
            size = len(self.retrieval)
            row, column = np.nonzero((items >= size) & (items < size + len(later)))
            theirs = later[items[row, column] - size]
            scores[row, column] = np.einsum("md,md->m", queries[row], theirs)
        return scores
