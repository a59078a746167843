"""Listing: requests as one epoch understands them, and lists of items from what a search finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recsys.blending import Lists, Union, allowed_items, candidate_rows
from recsys.constraint import ItemTrie
from recsys.constraint.boost import Boost
from recsys.constraint.mask import RowMask
from recsys.decoding.output import Beams, Trace
from recsys.decoding.request import SearchRequest
from recsys.interactions import Histories
from recsys.live import Epoch
from recsys.live_catalog import EpochCatalog
from recsys.requests import SOURCES, Recommendation, RecommendRequest
from recsys.retrieval import Candidates, Reranker, Retrieval


@dataclass(frozen=True)
class Batch:
    """n requests that are decoded together, in the dense items and trie rows of one epoch.

    Attributes:
        epoch: the catalog.
        histories: items of the histories that the model knows, oldest first.
        excluded: items that each request must not get.
        masks: what each request may get; None for everything.
        boosts: what each request's items gain; None for nothing.
        unknown: ids of each history that the model does not know.
    """

    epoch: Epoch
    histories: Histories
    excluded: Histories
    masks: Sequence[RowMask | None]
    boosts: Sequence[Boost | None]
    unknown: Sequence[list[str]] = ()

    @classmethod
    def of(cls, epoch: Epoch, requests: Sequence[RecommendRequest]) -> Batch:
        """Look up the items of requests, and make their masks and boosts.

        Raises:
            FilterError: a filter or boost does not fit the items' attributes.
        """
        known, unknown, excluded = [], [], []
        for request in requests:
            items = epoch.catalog.known(request.history)
            known.append(items[items >= 0])
            unknown.append([i for i, item in zip(request.history, items, strict=True) if item < 0])
            listed = epoch.catalog.index(request.exclude_items)
            seen = known[-1] if request.exclude_seen else known[-1][:0]
            excluded.append(np.concatenate([listed[listed >= 0], seen]))
        return cls(
            epoch,
            Histories.of(known),
            Histories.of(excluded),
            [mask_of(epoch, request) for request in requests],
            [boost_of(epoch, request) for request in requests],
            unknown,
        )

    def search_request(
        self,
        candidates: Candidates | None = None,
        candidate_nodes: int | None = None,
        *,
        seeds: Sequence[int] | None = None,
        temperature: float = 1.0,
    ) -> SearchRequest:
        """The search request for this batch.

        Args:
            candidates: of retrieval, to be scored in the first pass; None for none.
            candidate_nodes: as in `SearchRequest`, like the other arguments.
            seeds: one a request, to sample.
            temperature: of the sample.
        """
        excluded = [
            self.epoch.excluded_rows(items, mask)
            for items, mask in zip(self.excluded, self.masks, strict=True)
        ]
        return SearchRequest(
            self.epoch.encoder.encode_all(self.histories),
            exclude=excluded,
            masks=self.masks,
            boosts=self.boosts,
            seeds=seeds,
            temperature=temperature,
            candidates=None if candidates is None else candidate_rows(self.epoch.trie, candidates),
            candidate_nodes=candidate_nodes,
        )

    def candidates(self, retrieval: Retrieval, k: int) -> Candidates:
        """The k best items by retrieval for each request, of those that it may get."""
        return retrieval.candidates(self.histories, k, **self._limits(len(retrieval)))

    def proposals(self, retrieval: Retrieval, k: int) -> Candidates:
        """The k best items of each source of retrieval, of those that each request may get."""
        return retrieval.propose(self.histories, k, **self._limits(len(retrieval)))

    def _limits(self, size: int) -> dict[str, Any]:
        """What each request may get of the `size` items that retrieval knows."""
        trie, alive = self.epoch.trie, self.epoch.alive
        return {
            "exclude_seen": False,
            "excluded": self.excluded,
            "allowed": [allowed_items(trie, alive, mask, size) for mask in self.masks],
        }

    def lists(self, beams: Beams, k: int, *, boosted: bool = True) -> Lists:
        """The k best items that the search found for each request."""
        return items_of_rows(
            self.epoch.trie,
            beams.rows.cpu().numpy(),
            beams.scores.cpu().numpy(),
            k,
            excluded=self.excluded,
            masks=self.masks,
            boosts=self.boosts if boosted else (),
        )

    def blended(
        self, beams: Beams, k: int, candidates: Candidates, retrieval: Retrieval, reranker: Reranker
    ) -> tuple[Lists, Lists]:
        """The k best of the search's and retrieval's items, and the model's own, without boosts."""
        assert beams.candidate_scores is not None  # noqa: S101 - the search got the candidates
        own = self.lists(beams, max(k, beams.rows.shape[1]), boosted=False)
        union = Union.of(
            own,
            candidates,
            beams.candidate_scores.cpu().numpy(),
            retrieval,
            self.histories,
            trie=self.epoch.trie,
            boosts=self.boosts,
            sources=reranker.sources,
        )
        return union.best(reranker, k), own.first(k)


def mask_of(epoch: Epoch, request: RecommendRequest) -> RowMask | None:
    """Mask of the items that a request may get; None if it may get all.

    Raises:
        FilterError: its filter does not fit the items' attributes.
    """
    return epoch.allowed(None if request.filter is None else request.item_filter)


def boost_of(epoch: Epoch, request: RecommendRequest) -> Boost | None:
    """What is added to the scores of a request's items; None without boosts.

    Raises:
        FilterError: a boost does not fit the items' attributes.
    """
    return epoch.filters.boost(request.item_boosts) if request.boosts else None


def items_of_rows(
    trie: ItemTrie,
    rows: NDArray[np.int64],
    row_scores: NDArray[np.floating[Any]],
    k: int,
    *,
    excluded: Histories,
    masks: Sequence[RowMask | None] = (),
    boosts: Sequence[Boost | None] = (),
) -> Lists:
    """Items of the rows (n, K), best first; a shared leaf gives its items one by one.

    Those that are excluded, or that the request's mask hides, are left out. Boosts count for items
    one by one, and may change their order.
    """
    n, width = rows.shape
    items = np.full((n, k), -1, np.int32)
    scores = np.full((n, k), -np.inf, np.float32)
    real = np.flatnonzero(rows.reshape(-1) >= 0)
    which, places = trie.places_of(rows.reshape(-1)[real])
    owner, flat = real[which] // width, trie.row_items[places]
    flat_scores = row_scores.reshape(-1)[real[which]]
    keep = np.ones(len(flat), np.bool_)
    for request, mask in enumerate(masks):
        if mask is not None:
            here = owner == request
            keep[here] = mask.items[places[here]]
    if len(excluded.items):
        keys = excluded.rows * trie.num_items + excluded.items
        keep &= ~np.isin(owner * trie.num_items + flat, keys)
    for request, boost in enumerate(boosts):
        if boost is not None:
            here = owner == request
            flat_scores[here] += boost.items[places[here]]
    flat, owner, flat_scores = flat[keep], owner[keep], flat_scores[keep]
    if any(boosts):
        order = np.lexsort((-flat_scores, owner))  # stable: equal scores keep row order
        flat, flat_scores = flat[order], flat_scores[order]
    first = np.searchsorted(owner, np.arange(n))
    place = np.arange(len(flat)) - first[owner]
    kept = place < k
    items[owner[kept], place[kept]] = flat[kept]
    scores[owner[kept], place[kept]] = flat_scores[kept]
    return Lists.of_model(items, scores)


def covers_items(trie: ItemTrie, beams: Beams, i: int, boost: Boost | None, last: float) -> bool:
    """Whether the certificate of answer i, which is about leaves, holds for its items too.

    A leaf that several items share is ranked by the largest boost of its items. The last item may
    therefore score less than the last leaf found, and less than an item of a leaf that was not.
    """
    row = int(beams.rows[i, -1])
    if boost is None or row < 0 or trie.num_rows == trie.num_items:
        return True
    most = boost.most[trie.depth_start[trie.num_levels] + row]
    return bool(last >= np.float32(float(beams.scores[i, -1]) + most))


def describe(
    catalog: EpochCatalog,
    found: Lists,
    request: int,
    k: int,
    because: NDArray[np.int64] | None = None,
) -> list[Recommendation]:
    """The first k items of one request, with their ids, titles, codes and reasons.

    Args:
        catalog: that the items are from.
        found: lists of all requests.
        request: place of the request.
        k: most items.
        because: (n, k) item of the history with the most evidence for each, -1 for none.
    """
    lines = [part[request, :k].tolist() for part in (found.items, found.scores, found.source)]
    reasons = [-1] * k if because is None else because[request, :k].tolist()
    return [
        Recommendation(
            catalog.item_id(item),
            score,
            catalog.title(item),
            tuple(catalog.codes[item].tolist()),
            SOURCES[source],
            catalog.item_id(reason) if reason >= 0 else None,
        )
        for item, score, source, reason in zip(*lines, reasons, strict=False)
        if item >= 0
    ]


def count_items(
    trace: Trace, trie: ItemTrie, level_sizes: Sequence[int], mask: RowMask | None
) -> Trace:
    """A trace with the number of items below each node, and of codes closed at each level."""
    place = trie.row_item_start
    if mask is not None:
        place = np.append(0, np.cumsum(mask.items))[place]
    state = np.array([0, *(node.state for node in trace.nodes)], np.int64)
    items = place[trie.row_stop[state]] - place[trie.row_start[state]]
    nodes = [replace(n, items=int(count)) for n, count in zip(trace.nodes, items[1:], strict=True)]
    blocked = dict.fromkeys(range(1, trie.num_levels + 1), 0)
    beams = [0, *(n.state for n in nodes if n.fate != "rejected")]
    depths = [0, *(n.depth for n in nodes if n.fate != "rejected")]
    for beam, depth in zip(beams, depths, strict=True):
        first, last = trie.first_child[beam : beam + 2].tolist()
        open_ = last - first if mask is None else int(np.count_nonzero(mask.alive[first:last]))
        blocked[depth + 1] += level_sizes[depth] - open_
    return replace(trace, nodes=nodes, blocked=blocked)
