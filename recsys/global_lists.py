"""Global lists: the best items of a blended list, of all that a request may get.

An item scores r + c log(1 + p / FLOOR) (`recsys.retrieval.reranker`). Retrieval knows r and c of
each item, and no item has a larger probability p than a prefix of its codes. So the model runs
the prefixes below which an item could score as much as the last one of the list, level by level,
until only items are left: a threshold algorithm (Fagin, Lotem and Naor, 2003) over the trie.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from recsys.constraint.boost import most_below
from recsys.constraint.restrictions import Gains
from recsys.decoding.beam import finish, grow
from recsys.decoding.completion import above
from recsys.decoding.engine import Engine
from recsys.decoding.expand import Frontier
from recsys.decoding.output import Beams
from recsys.decoding.request import Search
from recsys.errors import NonFiniteError
from recsys.listing import Batch, Lists, certificate, items_of_rows
from recsys.retrieval import Pool, Reranker, Retrieval
from recsys.retrieval.evidence import Evidence
from recsys.retrieval.pool import OF_MODEL, score_items
from recsys.retrieval.reranker import FLOOR

MOST_NODES = 2048  # prefixes that the model runs for a request
_AT_A_TIME = 1 << 14  # items, which bounds memory
_NEVER = -1e4  # log-probability whose exponential is 0
_ROUNDINGS = 64  # by so many the score of an item may differ from its bound


@dataclass(frozen=True, eq=False)
class Bounds(Gains):
    """The most that an item below a state can score, in the search of one request.

    Attributes:
        most: (S,) float64 largest r and boost of an item, -inf where the request may get none.
        slope: the largest c.
    """

    slope: float

    def scores(self, log_probs: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """(B, W, C) bounds of states with these log-probabilities."""
        bounds = self.at(states) + self.slope * torch.log1p(log_probs.double().exp() / FLOOR)
        return bounds.masked_fill(log_probs == -torch.inf, -torch.inf)


def complete_lists(engine: Engine, batch: Batch, lists: Lists, retrieval: Retrieval) -> Lists:
    """The blended lists of a batch with the best items of all, where the budget suffices.

    The others stay as they are.
    """
    reranker, k = retrieval.reranker, lists.items.shape[1]
    assert lists.proven is not None and reranker is not None  # noqa: S101, PT018 - they are blended
    # caps may leave out any item of a list
    counts = [k if cap else most for cap, most in zip(batch.caps, batch.places, strict=True)]
    items, scores, source = lists.items.copy(), lists.scores.copy(), lists.source.copy()
    proven, stats = lists.proven.copy(), list(lists.stats)
    for i in np.flatnonzero(~proven).tolist():
        own = batch.take([i], [batch.excluded[i]], [batch.masks[i]])
        least = float(scores[i, max(counts[i], 1) - 1])
        try:
            proven[i], pool, beams = _search(engine, own, retrieval, reranker, least)
        except NonFiniteError:
            raise NonFiniteError([i]) from None
        stats[i] = stats[i].plus(beams.stats[0])
        if proven[i]:
            known = pool.items[0][:, None] == lists.items[i]
            pool.source[0] = np.where(known.any(1), lists.source[i][known.argmax(1)], OF_MODEL)
            (items[i],), (scores[i],), (source[i],) = pool.rank(reranker, k)
    lists = replace(lists, items=items, scores=scores, source=source, proven=proven, stats=stats)
    certificates = [certificate(batch, lists, i, count) for i, count in enumerate(counts)]
    return replace(lists, certificates=certificates)


@torch.inference_mode()
def _search(
    engine: Engine, batch: Batch, retrieval: Retrieval, reranker: Reranker, least: float
) -> tuple[bool, Pool, Beams]:
    """All items of one request that score at least `least`, and whether the budget sufficed."""
    trie, request = batch.epoch.trie, batch.search_request().reserving(engine.prompt_slots)
    search, evidence = Search.of(request, engine.target, trie), batch.evidence(retrieval)
    eps = max(torch.finfo(kind).eps for kind in (torch.float32, search.model.dtype))
    size = max(1.0, abs(least), reranker.most_of_model)
    limit = least - _ROUNDINGS * eps * min(size, 1e9)
    step = replace(search.step, gains=_bounds(batch, evidence, reranker, search.model.device))
    prune = partial(above, torch.full((1,), limit, dtype=torch.float64, device=search.model.device))
    # room for a node in each level, even if those before it need all others
    widths, room = search.widths(MOST_NODES), MOST_NODES + trie.num_levels
    with search.tree(room) as tree:

        def afford(frontier: Frontier) -> Frontier:
            return prune(frontier, max(1, room - trie.num_levels - tree.nodes))

        *_, last = grow(tree, step, [*widths[:-1], widths[-1] + 1], prune=afford)
        missed = float(torch.maximum(last.rest, last.scores.amin(1, keepdim=True)))
        last = prune(last)
        beams = finish(last, step, last.scores.shape[1], [tree.stats(0)], tree=tree)
    rows = beams.rows.numpy()
    width = int(np.diff(trie.row_item_start)[rows[rows >= 0]].sum())
    items, log_probs = items_of_rows(
        trie, rows, beams.scores.numpy(), width, excluded=batch.excluded, masks=batch.masks
    )
    pool = Pool(items, log_probs, np.zeros(items.shape, np.int8), evidence, batch.gains(items))
    return missed < limit or missed == -np.inf, pool, beams


def _bounds(batch: Batch, evidence: Evidence, reranker: Reranker, device: torch.device) -> Bounds:
    """The bounds of one request; r is the score of an item whose probability is 0."""
    trie, free = batch.epoch.trie, np.flatnonzero(batch.open_items(0)).astype(np.int32)
    most, places = np.full(trie.num_items, -np.inf), trie.item_places(free)
    for start in range(0, len(free), _AT_A_TIME):
        part = slice(start, start + _AT_A_TIME)
        some = free[None, part]
        never, gains = np.full(some.shape, _NEVER, np.float32), batch.gains(some)
        # rounded together: a boost may be as large as a score, and of the other sign
        most[places[part]] = score_items(evidence, list(some), never, gains)[0]
    below = torch.from_numpy(most_below(trie, most)).to(device)
    line = torch.zeros(1, dtype=torch.int64, device=device)
    return Bounds((below,), line, reranker.most_of_model)
