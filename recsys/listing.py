"""Listing: requests as one epoch understands them, and lists of items from what a search finds.

A blended list is the union of the beams and of retrieval's candidates, ranked by the reranker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recsys.constraint import ItemTrie
from recsys.constraint.boost import Boost
from recsys.constraint.caps import Caps
from recsys.constraint.mask import RowMask
from recsys.decoding.output import Beams, Certificate, Trace
from recsys.decoding.request import SearchRequest
from recsys.interactions import NEGATIVE_TYPE, Histories, count_as_seen
from recsys.live import Epoch
from recsys.live_catalog import EpochCatalog
from recsys.requests import SOURCES, Recommendation, RecommendRequest
from recsys.retrieval import Candidates, Proposals, Reranker, Retrieval
from recsys.retrieval.event_types import EventTypes
from recsys.retrieval.native import NativeRetrieval, covers
from recsys.retrieval.reranker import MODEL as MODEL_SOURCE

MODEL, RETRIEVAL, POPULAR, PINNED = 0, 1, 2, 3


@dataclass(frozen=True)
class Batch:
    """n requests that are decoded together, in the dense items and trie rows of one epoch.

    Attributes:
        epoch: the catalog.
        histories: items of the histories that the model knows, oldest first.
        excluded: items that each request must not get, or has pinned.
        masks: what each request may get; None for everything.
        boosts: what each request's items gain; None for nothing.
        unknown: ids of each history that the model does not know.
        pinned: items that take the first places of each list; empty if there are none in any.
        caps: how many items of one value each list may have, the pinned ones counted; None for any
            number.
    """

    epoch: Epoch
    histories: Histories
    excluded: Histories
    masks: Sequence[RowMask | None]
    boosts: Sequence[Boost | None]
    unknown: Sequence[list[str]] = ()
    pinned: Sequence[NDArray[np.int32]] = ()
    caps: Sequence[Caps | None] = ()

    @classmethod
    def of(
        cls, epoch: Epoch, requests: Sequence[RecommendRequest], types: EventTypes | None = None
    ) -> Batch:
        """Look up the items of requests, and make their masks and boosts.

        With `types`, items that were only viewed, say, do not count as seen.

        Raises:
            FilterError: a filter, boost or cap does not fit the items' attributes.
        """
        known, unknown, excluded, numbers, pinned = [], [], [], [], []
        masks = [mask_of(epoch, request) for request in requests]
        caps = [caps_of(epoch, request) for request in requests]
        for request, mask, cap in zip(requests, masks, caps, strict=True):
            items = epoch.catalog.known(request.history)
            there = items >= 0
            unknown.append([request.history[i] for i in np.flatnonzero(~there).tolist()])
            if types is not None:
                own = types.number(list(request.history_types) or [None] * len(items))
                there &= own != NEGATIVE_TYPE
                numbers.append(own[there])
            known.append(items[there])
            listed = epoch.catalog.index(request.exclude_items)
            seen = known[-1] if request.exclude_seen else known[-1][:0]
            if types is not None:
                counted = count_as_seen(numbers[-1], types.behaviours)
                seen = known[-1][counted] if request.exclude_seen else seen
            hidden = np.concatenate([listed[listed >= 0], seen])
            pinned.append(_pinned(epoch, request, hidden, mask, cap))
            excluded.append(np.concatenate([hidden, pinned[-1]]))
        histories = Histories.of(known)
        if types is not None and requests:
            histories = replace(histories, behaviours=np.concatenate(numbers))
        return cls(
            epoch,
            histories,
            Histories.of(excluded),
            masks,
            [boost_of(epoch, request) for request in requests],
            unknown,
            pinned,
            caps,
        )

    def search_request(
        self,
        candidates: Proposals | None = None,
        candidate_nodes: int | None = None,
        *,
        seeds: Sequence[int] | None = None,
        temperature: float = 1.0,
    ) -> SearchRequest:
        """The search request for this batch; `candidates` are scored in the first pass."""
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

    def proposals(self, retrieval: Retrieval, k: int) -> Proposals:
        """What the sources of retrieval propose to each request (`Retrieval.propose`)."""
        later = self.epoch.catalog.later
        size = len(retrieval) + (0 if later is None else len(later))
        return retrieval.propose(self.histories, k, **self._limits(size), later=later)

    def _limits(self, size: int) -> dict[str, Any]:
        """What each request may get of the first `size` items, which retrieval knows."""
        return {
            "exclude_seen": False,
            "excluded": self.excluded,
            "allowed": [self._allowed(mask, size) for mask in self.masks],
        }

    def _allowed(self, mask: RowMask | None, size: int) -> NDArray[np.bool_] | None:
        """(size,) bool, which of the catalog's first items a request may get; None for all."""
        alive = self.epoch.alive
        if mask is None:
            return None if alive[:size].all() else alive[:size]
        allowed = np.zeros(len(alive), np.bool_)
        allowed[self.epoch.trie.row_items] = mask.items
        return (allowed & alive)[:size]

    def open_items(self, i: int) -> NDArray[np.bool_]:
        """(items,) bool, which items of the catalog request i may get, the pinned ones not."""
        found = self._allowed(self.masks[i], len(self.epoch.alive))
        found = self.epoch.alive.copy() if found is None else found.copy()
        found[self.excluded[i]] = False
        return found

    def first_of(self, items: NDArray[np.integer], i: int, k: int) -> NDArray[np.intp]:
        """Places of the first k of ranked items that request i may get; its caps count them."""
        places = np.flatnonzero(self.open_items(i)[items])
        caps = self.caps[i]
        if caps is None:
            return places[:k]
        at = self.epoch.trie.item_places(items[places]).tolist()
        admitted = (p for p, place in zip(places.tolist(), at, strict=True) if caps.admit(place))
        return np.fromiter(islice(admitted, k), np.intp)

    def places(self, requests: Sequence[RecommendRequest]) -> list[int]:
        """How many places of each request's list are left behind the pinned items."""
        return [one.k - len(first) for one, first in zip(requests, self.pinned, strict=True)]

    def count_eligible(self, i: int) -> int:
        """Number of items that request i could get, the pinned ones among them."""
        left = self.epoch.count_eligible(self.excluded[i], self.masks[i])
        return left + len(self.pinned[i])

    def lists(self, beams: Beams, k: int, *, boosted: bool = True) -> Lists:
        """The k best items that the search found for each request."""
        trie, rows, scores = self.epoch.trie, beams.rows.cpu().numpy(), beams.scores.cpu().numpy()
        boosted = boosted and any(self.boosts)
        if trie.num_rows == len(trie.row_items) and not boosted:  # a row is an item
            width = min(k, rows.shape[1])
            items = np.full((len(rows), k), -1, np.int32)
            own = np.full(items.shape, -np.inf, np.float32)
            items[:, :width] = np.where(rows >= 0, trie.row_items[rows], -1)[:, :width]
            own[:, :width] = scores[:, :width]
            return Lists.of_model(items, own)
        return items_of_rows(
            trie,
            rows,
            scores,
            k,
            excluded=self.excluded,
            masks=self.masks,
            boosts=self.boosts if boosted else (),
        )

    def blended(
        self, beams: Beams, k: int, candidates: Proposals, retrieval: Retrieval, reranker: Reranker
    ) -> tuple[Lists, Lists]:
        """The k best of the search's and retrieval's items, and the model's own, without boosts."""
        assert beams.candidate_scores is not None  # noqa: S101 - the search got the candidates
        own = self.lists(beams, max(k, beams.rows.shape[1]), boosted=False)
        scored = beams.candidate_scores.cpu().numpy()
        # An item that was added may be among the beams, though retrieval knows nothing of it.
        grown = len(self.epoch.catalog) > len(retrieval)
        native = None if grown else candidates.evidence.native
        if native is not None and covers(reranker):
            return self._best(native, own, k, candidates, scored, reranker), own.first(k)
        union = Union.of(
            own,
            candidates,
            scored,
            retrieval,
            self.histories,
            trie=self.epoch.trie,
            boosts=self.boosts,
            sources=reranker.sources,
        )
        return union.best(reranker, k), own.first(k)

    def _best(
        self,
        native: NativeRetrieval,
        own: Lists,
        k: int,
        candidates: Proposals,
        scored: NDArray[np.floating[Any]],
        reranker: Reranker,
    ) -> Lists:
        """`Union.best` in the native library."""
        first, evidence = own.items.shape[1], candidates.evidence
        items = np.concatenate([own.items, candidates.items], axis=1)
        log_probs = np.full(items.shape, -np.inf, np.float32)
        log_probs[:, :first] = own.scores
        log_probs[:, first : first + scored.shape[1]] = scored
        source = np.full(items.shape, MODEL, np.int8)
        source[:, first:] = np.where(candidates.supported, RETRIEVAL, POPULAR)
        found = native.rank(
            reranker,
            k,
            self.histories,
            None if evidence.retrieval.sasrec is None else evidence.states,
            items=items,
            log_probs=log_probs,
            source=source,
            gains=_gains(items, self.boosts, self.epoch.trie) if any(self.boosts) else None,
        )
        return Lists(*found)


@dataclass(frozen=True)
class Lists:
    """Items of n requests, best first.

    Attributes:
        items: (n, k) int32, -1 where there are no more.
        scores: (n, k) float32, -inf there.
        source: (n, k) int8, what proposed each: `MODEL`, `RETRIEVAL`, `POPULAR` or `PINNED`.
    """

    items: NDArray[np.int32]
    scores: NDArray[np.float32]
    source: NDArray[np.int8]

    @classmethod
    def of_model(cls, items: NDArray[np.int32], scores: NDArray[np.float32]) -> Lists:
        """Lists of the model's own items."""
        return cls(items, scores, np.full(items.shape, MODEL, np.int8))

    def first(self, k: int) -> Lists:
        """The first k places."""
        return Lists(self.items[:, :k], self.scores[:, :k], self.source[:, :k])

    def behind(self, pinned: Sequence[NDArray[np.int32]]) -> Lists:
        """Each list behind its pinned items, which have the score 0, cut to as many columns."""
        if not any(len(first) for first in pinned):
            return self
        made = Lists(self.items.copy(), self.scores.copy(), self.source.copy())
        for i, first in enumerate(pinned):
            if count := len(first):
                for line, value in ((made.items, first), (made.scores, 0), (made.source, PINNED)):
                    line[i, count:] = line[i, :-count].copy()
                    line[i, :count] = value
        return made


@dataclass(frozen=True)
class Found:
    """What one search found for the requests of a batch.

    Attributes:
        lists: their items.
        trie: the catalog.
        boosts: what each request's items gain.
        beams: the search; None without a model.
        blended: whether retrieval took part.
    """

    lists: Lists
    trie: ItemTrie
    boosts: Sequence[Boost | None] = ()
    beams: Beams | None = None
    blended: bool = False

    def certificate(self, i: int, places: int) -> Certificate:
        """How good the first places of list i are."""
        if self.beams is None or self.blended:
            return "approximate"
        last = self.lists.scores[i, max(places, 1) - 1]
        exact = covers_items(self.trie, self.beams, i, self.boosts[i], last)
        return self.beams.certificates[i] if exact else "approximate"


@dataclass(frozen=True)
class Union:
    """The items of the model's beams and of retrieval, with the values that each source gives them.

    Attributes:
        items: (n, w) int32, -1 for padding and repeated items.
        values: source -> (n, w), for `Reranker.score`.
        gains: (n, w) float64 of the requests' boosts.
        source: (n, w) int8, as in `Lists`.
    """

    items: NDArray[np.int32]
    values: dict[str, NDArray[np.float64]]
    gains: NDArray[np.float64]
    source: NDArray[np.int8]

    @classmethod
    def of(
        cls,
        model: Lists,
        candidates: Proposals,
        candidate_scores: NDArray[np.floating[Any]],
        retrieval: Retrieval,
        histories: Histories,
        *,
        trie: ItemTrie,
        boosts: Sequence[Boost | None] = (),
        sources: Sequence[str] | None = None,
    ) -> Union:
        """Put both together.

        Args:
            model: items that the search found, with log-probabilities without boosts.
            candidates: items that retrieval proposes.
            candidate_scores: (n, c) the model's log-probabilities of the first c candidates; -inf
                for those that were not scored.
            retrieval: gives the values of all sources but the model.
            histories: the n histories.
            trie: the catalog, for the boosts.
            boosts: what each request's items gain; empty for nothing.
            sources: what is computed about the items; None for all that there is.
        """
        proposed = candidates.items
        again = (proposed[:, :, None] == model.items[:, None, :]).any(-1)
        items = np.concatenate([model.items, np.where(again, -1, proposed)], axis=1)
        missing = proposed.shape[1] - candidate_scores.shape[1]
        scored = np.pad(candidate_scores, ((0, 0), (0, missing)), constant_values=-np.inf)
        log_probs = np.concatenate([model.scores, scored], axis=1).astype(np.float64)
        values = retrieval.values(candidates.evidence, items, sources or retrieval.sources)
        values[MODEL_SOURCE] = np.where(log_probs > -np.inf, log_probs, np.nan)
        source = np.concatenate(
            [model.source, np.where(candidates.supported, RETRIEVAL, POPULAR)], axis=1
        )
        return cls(items, values, _gains(items, boosts, trie), source.astype(np.int8))

    def best(self, reranker: Reranker, k: int) -> Lists:
        """The k best items; ties keep the model's order, with the model's items first."""
        scores = reranker.score(self.values, self.items >= 0) + self.gains
        order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        items = np.take_along_axis(self.items, order, axis=1)
        source = np.take_along_axis(self.source, order, axis=1)
        scores = np.take_along_axis(scores, order, axis=1)
        missing = ((0, 0), (0, k - items.shape[1]))
        return Lists(
            np.pad(np.where(scores > -np.inf, items, -1), missing, constant_values=-1),
            np.pad(scores, missing, constant_values=-np.inf).astype(np.float32),
            np.pad(source, missing),
        )


def _gains(
    items: NDArray[np.int32], boosts: Sequence[Boost | None], trie: ItemTrie
) -> NDArray[np.float64]:
    """(n, w) what items gain by the requests' boosts; 0 where there is no item."""
    gains = np.zeros(items.shape)
    for i, boost in enumerate(boosts):
        if boost is not None:
            real = np.flatnonzero(items[i] >= 0)
            gains[i, real] = boost.items[trie.item_places(items[i, real])]
    return gains


def candidate_rows(trie: ItemTrie, candidates: Proposals) -> list[NDArray[np.int32]]:
    """Trie rows of each request's candidates, in their order."""
    return [trie.item_row[items[items >= 0]] for items in candidates.items]


def mask_of(epoch: Epoch, request: RecommendRequest) -> RowMask | None:
    """Mask of the items that a request may get, None for all; FilterError as `Batch.of`."""
    return epoch.allowed(None if request.filter is None else request.item_filter)


def caps_of(epoch: Epoch, request: RecommendRequest) -> Caps | None:
    """New caps of a request's list, None without any; FilterError as `Batch.of`."""
    return Caps(epoch.filters.attributes, request.max_per) if request.max_per else None


def _pinned(
    epoch: Epoch,
    request: RecommendRequest,
    hidden: NDArray[np.integer],
    mask: RowMask | None,
    caps: Caps | None,
) -> NDArray[np.int32]:
    """The pinned items that the request may get, at most k; the caps count them."""
    found: list[int] = []
    if request.pin:
        items = epoch.catalog.index(request.pin)
        for item in dict.fromkeys(items[(items >= 0) & ~np.isin(items, hidden)].tolist()):
            if len(found) == request.k:
                break
            if not epoch.allows(item, mask):
                continue
            (place,) = epoch.trie.item_places(np.asarray([item])).tolist()
            if caps is None or caps.admit(place):
                found.append(item)
    return np.array(found, np.int32)


def boost_of(epoch: Epoch, request: RecommendRequest) -> Boost | None:
    """What a request's items gain, None without boosts; FilterError as `Batch.of`."""
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
    """The first k items of the request at a place in `found`, as recommendations.

    `because` is (n, k), the item of the history with the most evidence for each, -1 for none.
    """
    there = np.flatnonzero(found.items[request, :k] >= 0)
    items, scores, sources = (
        part[request, there].tolist() for part in (found.items, found.scores, found.source)
    )
    reasons = [-1] * len(items) if because is None else because[request, there].tolist()
    codes = map(tuple, catalog.codes[items].tolist())
    parts = zip(catalog.described(items), scores, codes, sources, reasons, strict=True)
    return [
        Recommendation(
            item_id,
            score,
            title,
            code,
            SOURCES[source],
            catalog.item_id(reason) if reason >= 0 else None,
        )
        for (item_id, title), score, code, source, reason in parts
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
