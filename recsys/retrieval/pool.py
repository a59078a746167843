"""Pool: the items of a search and of retrieval for some histories, which are ranked together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recsys.interactions import Histories
from recsys.retrieval.evidence import Evidence
from recsys.retrieval.native import covers
from recsys.retrieval.reranker import MODEL, Reranker
from recsys.retrieval.rows import repeated

OF_MODEL, OF_RETRIEVAL, OF_POPULAR, PINNED = range(4)
"""What proposed an item; `recsys.requests.SOURCES` has the names."""

Ranked = tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.int8]]


class Proposals(NamedTuple):
    """Items that retrieval proposes for n histories.

    Attributes:
        items: (n, w) int32, in no order, padded with -1.
        supported: (n, w) bool, whether the history has evidence for the item or a source other than
            popularity proposes it.
        evidence: of the histories.
    """

    items: NDArray[np.int32]
    supported: NDArray[np.bool_]
    evidence: Evidence

    def best(
        self, reranker: Reranker, count: int, gains: NDArray[np.float64] | None = None
    ) -> Proposals:
        """The best of them by the reranker without the model, best first; `gains` as in `Pool`."""
        known = np.zeros(self.items.shape, np.float32)
        pool = Pool(self.items, known, self.supported.astype(np.int8), self.evidence, gains)
        items, _, supported = pool.rank(reranker.without_model, min(count, self.items.shape[1]))
        return Proposals(items, supported.astype(np.bool_), self.evidence)


@dataclass(frozen=True, eq=False)
class Pool:
    """Items for n histories.

    Attributes:
        items: (n, w) int32, -1 for none; of equal items the first that the model has scored counts.
        log_probs: (n, w) float32 of the model, -inf where it has not scored an item, which is then
            not ranked.
        source: (n, w) int8, what proposed each.
        evidence: of the histories.
        gains: (n, w) float64, what is added to the score of each; None for nothing.
    """

    items: NDArray[np.int32]
    log_probs: NDArray[np.float32]
    source: NDArray[np.int8]
    evidence: Evidence
    gains: NDArray[np.float64] | None = None

    @classmethod
    def of(
        cls,
        decoded: NDArray[np.int32],
        log_probs: NDArray[np.floating[Any]],
        proposals: Proposals,
        scored: NDArray[np.floating[Any]],
    ) -> Pool:
        """The items that a search found, and then what retrieval proposes.

        Args:
            decoded: (n, a) items, with `log_probs` (n, a) of the model.
            log_probs: of `decoded`.
            proposals: (n, w) items.
            scored: (n, c) the model's log-probabilities of the first c proposals; -inf for those
                that it has not scored.
        """
        items = np.concatenate([decoded, proposals.items], axis=1)
        values = np.full(items.shape, -np.inf, np.float32)
        values[:, : decoded.shape[1]] = log_probs
        values[:, decoded.shape[1] : decoded.shape[1] + scored.shape[1]] = scored
        source = np.full(items.shape, OF_MODEL, np.int8)
        source[:, decoded.shape[1] :] = np.where(proposals.supported, OF_RETRIEVAL, OF_POPULAR)
        return cls(items, values, source, proposals.evidence)

    def rank(self, reranker: Reranker, k: int) -> Ranked:
        """The k best items, their scores and sources, (n, k) each.

        Ties keep the order of the pool. The arrays end with -1, -inf and 0.
        """
        native = self.evidence.native
        if native is not None and covers(reranker):
            return native.rank(self, reranker, k)
        scores = reranker.score(self.values(reranker.sources), self.distinct >= 0)
        if self.gains is not None:
            scores = scores + self.gains
        order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        items = np.take_along_axis(self.distinct, order, axis=1)
        source = np.take_along_axis(self.source, order, axis=1)
        scores = np.take_along_axis(scores, order, axis=1)
        missing = ((0, 0), (0, k - items.shape[1]))
        return (
            np.pad(np.where(scores > -np.inf, items, -1), missing, constant_values=-1),
            np.pad(scores, missing, constant_values=-np.inf).astype(np.float32),
            np.pad(source, missing),
        )

    @cached_property
    def distinct(self) -> NDArray[np.int32]:
        """(n, w) the items that are ranked, -1 where one stands again."""
        known = np.where(self.log_probs > -np.inf, self.items, np.int32(-1))
        return np.where(repeated(known), np.int32(-1), known)

    def values(self, sources: Sequence[str]) -> dict[str, NDArray[np.float64]]:
        """What sources and the model say of the `distinct` items, for `Reranker.score`."""
        values = self.evidence.values(self.distinct, sources)
        values[MODEL] = np.where(self.distinct >= 0, self.log_probs, np.nan).astype(np.float64)
        return values


def score_items(
    evidence: Evidence,
    items: Sequence[NDArray[np.int32]],
    log_probs: NDArray[np.float32],
    gains: NDArray[np.float64] | None = None,
) -> NDArray[np.float32]:
    """(n, w) the scores of items in blended lists, -inf behind the end of an array.

    Args:
        evidence: of n histories, by a retrieval with a reranker.
        items: n arrays of at most w dense items.
        log_probs: (n, w) of the model, any behind the end of an array.
        gains: as in `Pool`.
    """
    reranker = evidence.retrieval.reranker
    assert reranker is not None  # noqa: S101 - the lists are blended
    places = Histories.of(items).padded()
    pool = Pool(places, log_probs, np.zeros(places.shape, np.int8), evidence, gains)
    ranked, scores, _ = pool.rank(reranker, places.shape[1])
    by_place = np.empty(places.shape, np.float32)
    for line, listed, score, asked in zip(by_place, ranked, scores, places, strict=True):
        order = np.argsort(listed)
        index = order[np.searchsorted(listed, asked, sorter=order) % max(1, len(listed))]
        line[:] = np.where(listed[index] == asked, score[index], -np.inf)
    return by_place
