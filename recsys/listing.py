"""Listing: requests as one epoch understands them, and lists of items from what a search finds.

A list is made in four steps: `Batch.of` looks up the items of requests, `Engine.decode` searches,
`rank` puts items in order, with those of retrieval in a blended list, and `describe` adds titles.
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
from recsys.decoding.output import Beams, Certificate, DecodeStats
from recsys.decoding.request import SearchRequest
from recsys.interactions import NEGATIVE_TYPE, Histories, count_as_seen
from recsys.live import Epoch
from recsys.modes import Trace
from recsys.requests import SOURCES, Recommendation, RecommendRequest, RecommendResult
from recsys.retrieval import Candidates, Pool, Proposals, Reranker, Retrieval
from recsys.retrieval.event_types import EventTypes
from recsys.retrieval.evidence import Evidence
from recsys.retrieval.pool import OF_MODEL, OF_POPULAR, OF_RETRIEVAL, PINNED
from recsys.retrieval.rows import blocked_items
from recsys.vocabulary import Vocabulary


@dataclass(frozen=True)
class Batch:
    """n requests that are decoded together, in the dense items and trie rows of one epoch.

    Attributes:
        epoch: the catalog.
        histories: items of the histories that the model knows, oldest first.
        excluded: items that each request must not get, or has pinned.
        masks: what each request may get; None for everything.
        boosts: what each request's items gain; None for nothing. Empty if there are none in any.
        k: length of each list.
        unknown: ids of each history that the model does not know.
        pinned: items that take the first places of each list.
        caps: how many items of one value each list may have, the pinned ones counted; None for any
            number.
        seeds: one a request, to draw samples; empty to search for the best.
        temperature: of the samples.
    """

    epoch: Epoch
    histories: Histories
    excluded: Histories
    masks: Sequence[RowMask | None]
    boosts: Sequence[Boost | None] = ()
    k: Sequence[int] = ()
    unknown: Sequence[list[str]] = ()
    pinned: Sequence[NDArray[np.int32]] = ()
    caps: Sequence[Caps | None] = ()
    seeds: Sequence[int] = ()
    temperature: float = 1.0

    @classmethod
    def of(
        cls,
        epoch: Epoch,
        requests: Sequence[RecommendRequest],
        types: EventTypes | None = None,
        exclude_seen: bool = True,
    ) -> Batch:
        """Look up the items of requests, and make their masks and boosts.

        With `types`, items that were only viewed, say, do not count as seen. `exclude_seen` is for
        requests that leave it to the bundle.

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
            seen = known[-1]
            if types is not None:
                seen = seen[count_as_seen(numbers[-1], types.behaviours)]
            if not (exclude_seen if request.exclude_seen is None else request.exclude_seen):
                seen = seen[:0]
            hidden = np.concatenate([listed[listed >= 0], seen])
            pinned.append(_pinned(epoch, request, hidden, mask, cap))
            excluded.append(np.concatenate([hidden, pinned[-1]]))
        histories = Histories.of(known)
        if types is not None and requests:
            histories = replace(histories, behaviours=np.concatenate(numbers))
        boosts = [boost_of(epoch, request) for request in requests]
        return cls(
            epoch,
            histories,
            Histories.of(excluded),
            masks,
            boosts if any(boosts) else (),
            [request.k for request in requests],
            unknown,
            pinned,
            caps,
            [request.seed for request in requests if request.seed is not None],
            requests[0].temperature if requests else 1.0,
        )

    def take(
        self,
        requests: Sequence[int],
        excluded: Sequence[NDArray[np.int32]],
        masks: Sequence[RowMask | None],
    ) -> Batch:
        """Some of the requests, with other items that they must not and may get."""
        return replace(
            self,
            histories=self.histories.take(requests),
            excluded=Histories.of(excluded),
            masks=masks,
            boosts=[self.boosts[i] for i in requests] if self.boosts else (),
            k=[self.k[i] for i in requests],
            unknown=[self.unknown[i] for i in requests],
            pinned=[self.pinned[i] for i in requests],
            caps=[self.caps[i] for i in requests],
            seeds=[self.seeds[i] for i in requests] if self.seeds else (),
        )

    def search_request(
        self, proposals: Proposals | None = None, nodes: int | None = None
    ) -> SearchRequest:
        """The request for a search, which scores proposals in at most `nodes` nodes of a pass."""
        candidates = None
        if proposals is not None:
            candidates = [self.epoch.trie.item_row[line[line >= 0]] for line in proposals.items]
        return SearchRequest(
            self.epoch.encoder.encode_all(self.histories),
            exclude=[
                self.epoch.excluded_rows(items, mask)
                for items, mask in zip(self.excluded, self.masks, strict=True)
            ],
            masks=self.masks,
            boosts=self.boosts or None,
            seeds=self.seeds or None,
            temperature=self.temperature,
            candidates=candidates,
            candidate_nodes=nodes,
        )

    def candidates(self, retrieval: Retrieval, k: int) -> Candidates:
        """The k best items by retrieval for each request, of those that it may get."""
        return retrieval.candidates(self.evidence(retrieval), k, self._blocked(len(retrieval)))

    def proposals(self, retrieval: Retrieval, k: int) -> Proposals:
        """What the sources of retrieval propose to each request (`Retrieval.propose`)."""
        known = self.evidence(retrieval)
        size = len(retrieval) + (0 if known.later is None else len(known.later))
        return retrieval.propose(known, k, self._blocked(size))

    def evidence(self, retrieval: Retrieval) -> Evidence:
        """What retrieval knows of the histories."""
        grown = len(self.epoch.catalog) > len(retrieval)
        return Evidence(retrieval, self.histories, self.epoch.catalog.later, grown)

    def _blocked(self, size: int) -> NDArray[np.bool_]:
        """(n, size) what each request may not get of the first `size` items."""
        allowed = [self._allowed(mask, size) for mask in self.masks]
        return blocked_items(size, self.excluded, allowed)

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
        allowed = self._allowed(self.masks[i], len(self.epoch.alive))
        allowed = self.epoch.alive.copy() if allowed is None else allowed.copy()
        allowed[self.excluded[i]] = False
        return allowed

    def first_of(self, items: NDArray[np.integer], i: int, k: int) -> NDArray[np.intp]:
        """Places of the first k of ranked items that request i may get; its caps count them."""
        open_positions = np.flatnonzero(self.open_items(i)[items])
        caps = self.caps[i]
        if caps is None:
            return open_positions[:k]
        at = self.epoch.trie.item_places(items[open_positions]).tolist()
        admitted = (
            p
            for p, item_row in zip(open_positions.tolist(), at, strict=True)
            if caps.admit(item_row)
        )
        return np.fromiter(islice(admitted, k), np.intp)

    @property
    def places(self) -> list[int]:
        """How many places of each list are left behind the pinned items."""
        return [k - len(first) for k, first in zip(self.k, self.pinned, strict=True)]

    def count_eligible(self, i: int) -> int:
        """Number of items that request i could get, the pinned ones among them."""
        left = self.epoch.count_eligible(self.excluded[i], self.masks[i])
        return left + len(self.pinned[i])

    def gains(self, items: NDArray[np.int32]) -> NDArray[np.float64] | None:
        """(n, w) what items gain by boosts, 0 where there is no item; None without boosts."""
        if not self.boosts:
            return None
        gains = np.zeros(items.shape)
        for i, boost in enumerate(self.boosts):
            if boost is not None:
                real = np.flatnonzero(items[i] >= 0)
                gains[i, real] = boost.items[self.epoch.trie.item_places(items[i, real])]
        return gains


@dataclass(frozen=True)
class Lists:
    """Items of n requests, best first, and how they were found.

    Attributes:
        items: (n, k) int32, -1 where there are no more.
        scores: (n, k) float32, -inf there.
        source: (n, k) int8, what proposed each (`recsys.retrieval.pool`).
        beams: the search, or the first of several; None without a model.
        proven: (n,) bool, of blended lists: whether no other item scores more than the last one of
            the list; None if retrieval took no part.
        certificates: how good each list is; of `rank`, its places that are not pinned.
        stats: counters of each request.
    """

    items: NDArray[np.int32]
    scores: NDArray[np.float32]
    source: NDArray[np.int8]
    beams: Beams | None = None
    proven: NDArray[np.bool_] | None = None
    certificates: Sequence[Certificate] = ()
    stats: Sequence[DecodeStats] = ()

    def behind(self, pinned: Sequence[NDArray[np.int32]]) -> Lists:
        """Each list behind its pinned items, which have the score 0, cut to as many columns."""
        if not any(len(first) for first in pinned):
            return self
        parts: list[NDArray[Any]] = [self.items.copy(), self.scores.copy(), self.source.copy()]
        for i, first in enumerate(pinned):
            if count := len(first):
                for line, value in zip(parts, (first, 0, PINNED), strict=True):
                    line[i, count:] = line[i, :-count].copy()
                    line[i, :count] = value
        items, scores, source = parts
        return replace(self, items=items, scores=scores, source=source)


def rank(
    batch: Batch,
    beams: Beams,
    k: int,
    proposals: Proposals | None = None,
    reranker: Reranker | None = None,
) -> Lists:
    """The k best items of each request.

    They are the search's own, or in a blended list the search's and the `proposals`, ranked by the
    reranker.
    """
    if proposals is None or reranker is None:
        items, scores = best_items(batch, beams, k)
        lists = Lists(items, scores, np.full(items.shape, OF_MODEL, np.int8), beams)
    else:
        assert beams.candidate_scores is not None  # noqa: S101 - the search got the proposals
        width = max(k, beams.rows.shape[1])
        items, scores = best_items(batch, beams, width, boosted=False)
        pool = Pool.of(items, scores, proposals, beams.candidate_scores.cpu().numpy())
        pool = replace(pool, gains=batch.gains(pool.items))
        # a search that finds less than it could has scored all that the request may get
        proven = items[:, -1] < 0
        lists = Lists(*pool.rank(reranker, k), beams, proven)
    certificates = [certificate(batch, lists, i, count) for i, count in enumerate(batch.places)]
    return replace(lists, certificates=certificates, stats=beams.stats)


def most_likely(retrieval: Retrieval, batch: Batch, k: int) -> Lists:
    """The k best items of each request by retrieval alone."""
    candidates = batch.candidates(retrieval, k)
    source = np.where(candidates.supported, OF_RETRIEVAL, OF_POPULAR).astype(np.int8)
    certificates: list[Certificate] = ["approximate" for _ in batch.masks]
    return Lists(candidates.items, candidates.log_probs, source, certificates=certificates)


def certificate(batch: Batch, lists: Lists, i: int, count: int) -> Certificate:
    """How good the first `count` items of list i are.

    A search's certificate is about leaves. A leaf that several items share is ranked by the largest
    boost of its items. So the last item may score less than the last leaf found, and less than an
    item of a leaf that was not.
    """
    beams, trie = lists.beams, batch.epoch.trie
    if beams is None or lists.proven is not None:
        return "global-exact" if lists.proven is not None and lists.proven[i] else "approximate"
    boost, row = (batch.boosts[i] if batch.boosts else None), int(beams.rows[i, -1])
    if boost is not None and row >= 0 and trie.num_rows != trie.num_items:
        most = boost.most[trie.depth_start[trie.num_levels] + row]
        last = lists.scores[i, max(count, 1) - 1]
        if last < np.float32(float(beams.scores[i, -1]) + most):
            return "approximate"
    return beams.certificates[i]


def describe(
    batch: Batch, lists: Lists, vocabulary: Vocabulary, retrieval: Retrieval | None = None
) -> list[RecommendResult]:
    """The answers: lists behind their pinned items, with titles and codes.

    With `retrieval`, each item has its reason. The `vocabulary` gives the codes of traces.
    """
    lists, beams = lists.behind(batch.pinned), lists.beams
    because = np.full(lists.items.shape, -1, np.int64)
    if retrieval is not None:
        because = retrieval.because(batch.histories, lists.items)
    results = []
    for i, (k, mask) in enumerate(zip(batch.k, batch.masks, strict=True)):
        stats: dict[str, int] = {}
        trace = None
        if beams is not None:
            stats = {"beams": beams.rows.shape[1], **vars(lists.stats[i])}
            if beams.traces:
                trace = with_items(beams.traces[i], batch.epoch.trie, vocabulary, mask)
        result = RecommendResult(
            recommendations=_described(batch.epoch, lists, i, k, because),
            unknown_items=batch.unknown[i],
            epoch=batch.epoch,
            eligible_items=batch.count_eligible(i),
            stats=stats,
            certificate=lists.certificates[i],
            trace=trace,
            blended=lists.proven is not None,
        )
        results.append(result)
    return results


def _described(
    epoch: Epoch, lists: Lists, i: int, k: int, because: NDArray[np.int64]
) -> list[Recommendation]:
    """The first k items of list i; `because` is the item of the history that explains each."""
    catalog, there = epoch.catalog, np.flatnonzero(lists.items[i, :k] >= 0)
    columns = lists.items, lists.scores, lists.source, because
    items, scores, sources, reasons = (column[i, there].tolist() for column in columns)
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


def best_items(
    batch: Batch, beams: Beams, k: int, *, boosted: bool = True
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """The k best items that a search found for each request, and their scores, (n, k) each."""
    trie, rows, scores = batch.epoch.trie, beams.rows.cpu().numpy(), beams.scores.cpu().numpy()
    boosts = batch.boosts if boosted else ()
    if trie.num_rows != len(trie.row_items) or boosts:
        return items_of_rows(
            trie, rows, scores, k, excluded=batch.excluded, masks=batch.masks, boosts=boosts
        )
    width = min(k, rows.shape[1])  # a row is an item
    items = np.full((len(rows), k), -1, np.int32)
    own = np.full(items.shape, -np.inf, np.float32)
    items[:, :width] = np.where(rows >= 0, trie.row_items[rows], -1)[:, :width]
    own[:, :width] = scores[:, :width]
    return items, own


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
    pinned: list[int] = []
    if request.pin:
        items = epoch.catalog.index(request.pin)
        for item in dict.fromkeys(items[(items >= 0) & ~np.isin(items, hidden)].tolist()):
            if len(pinned) == request.k:
                break
            if not epoch.allows(item, mask):
                continue
            (position,) = epoch.trie.item_places(np.asarray([item])).tolist()
            if caps is None or caps.admit(position):
                pinned.append(item)
    return np.array(pinned, np.int32)


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
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """(n, k) items of the rows (n, K), best first, and their scores.

    A shared leaf gives its items one by one. Those that are excluded, or that the request's mask
    hides, are left out. Boosts count for items one by one, and may change their order.
    """
    n, width = rows.shape
    items = np.full((n, k), -1, np.int32)
    scores = np.full((n, k), -np.inf, np.float32)
    real = np.flatnonzero(rows.reshape(-1) >= 0)
    which, positions = trie.places_of(rows.reshape(-1)[real])
    owner, flat = real[which] // width, trie.row_items[positions]
    flat_scores = row_scores.reshape(-1)[real[which]]
    keep = np.ones(len(flat), np.bool_)
    for request, mask in enumerate(masks):
        if mask is not None:
            here = owner == request
            keep[here] = mask.items[positions[here]]
    if len(excluded.items):
        keys = excluded.rows * trie.num_items + excluded.items
        keep &= ~np.isin(owner * trie.num_items + flat, keys)
    for request, boost in enumerate(boosts):
        if boost is not None:
            here = owner == request
            flat_scores[here] += boost.items[positions[here]]
    flat, owner, flat_scores = flat[keep], owner[keep], flat_scores[keep]
    if any(boosts):
        order = np.lexsort((-flat_scores, owner))  # stable: equal scores keep row order
        flat, flat_scores = flat[order], flat_scores[order]
    first = np.searchsorted(owner, np.arange(n))
    rank_in_row = np.arange(len(flat)) - first[owner]
    inside = rank_in_row < k
    items[owner[inside], rank_in_row[inside]] = flat[inside]
    scores[owner[inside], rank_in_row[inside]] = flat_scores[inside]
    return items, scores


def with_items(trace: Trace, trie: ItemTrie, vocabulary: Vocabulary, mask: RowMask | None) -> Trace:
    """A trace with code and number of items of each node, and of codes closed at each level."""
    starts = trie.row_item_start
    if mask is not None:
        starts = np.append(0, np.cumsum(mask.items))[starts]
    state = np.array([0, *(node.state for node in trace.nodes)], np.int64)
    items = starts[trie.row_stop[state]] - starts[trie.row_start[state]]
    codes = (node.token - vocabulary.level_offsets[node.depth - 1] for node in trace.nodes)
    more = zip(trace.nodes, codes, items[1:].tolist(), strict=True)
    nodes = [replace(node, code=code, items=count) for node, code, count in more]
    blocked = dict.fromkeys(range(1, trie.num_levels + 1), 0)
    beams = [0, *(n.state for n in nodes if n.fate != "rejected")]
    depths = [0, *(n.depth for n in nodes if n.fate != "rejected")]
    for beam, depth in zip(beams, depths, strict=True):
        first, last = trie.first_child[beam : beam + 2].tolist()
        open_ = last - first if mask is None else int(np.count_nonzero(mask.alive[first:last]))
        blocked[depth + 1] += vocabulary.level_sizes[depth] - open_
    return replace(trace, nodes=nodes, blocked=blocked)
