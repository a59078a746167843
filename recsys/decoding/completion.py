"""Completion: from beam search's list to the model's best K sequences of all.

The log-probability of a prefix is an upper bound for all its descendants, so no prefix that scores
less than the K-th answer can lead to a better one. Beam search's answer is often global already,
and its K-th score prunes the rest of the search: one more beam search that keeps every prefix which
scores as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from numpy.typing import ArrayLike

from recsys import arguments
from recsys.constraint import ItemTrie
from recsys.constraint.transitions import DeviceTrie
from recsys.decoding.beam import finish, grow
from recsys.decoding.expand import Frontier, stable_top
from recsys.decoding.native import native_decoder, native_search
from recsys.decoding.output import Beams
from recsys.decoding.request import Search, SearchRequest
from recsys.errors import NonFiniteError

_LOGITS = 1 << 26  # values of a pass over several requests
_ROUNDING = 2  # a prefix may score less by that many roundings in a pass of another shape


@torch.inference_mode()
def complete(
    target: Any,
    beams: Beams,
    request: Search | SearchRequest | Sequence[ArrayLike],
    trie: ItemTrie | DeviceTrie,
    *,
    max_nodes: int = 2048,
) -> Beams:
    """The global top K of each request, where `beams` is not yet known to be it.

    Args:
        target: the model that gave `beams`.
        beams: of `beam_search` or `speculative_beam_search`, not sampled.
        request: that the beams answer.
        trie: that they were found over.
        max_nodes: most nodes a request; where they do not suffice, its answer stays what it was.

    Returns:
        Beams; `is_global` says which are proven, `stats` include the additional work.

    Raises:
        ValueError: as `beam_search`; approximate beams, beams of another number of prompts or of
            another trie, or fewer `max_nodes` than the beams have.
        NonFiniteError: as `beam_search`.
    """
    if beams.approximate or beams.is_global is None:
        raise ValueError("beams: only an exact search can be completed")
    max_nodes = arguments.whole_number("max_nodes", max_nodes)
    search = Search.of(request, target, trie)
    source = search.step.trie.source
    requests, width = beams.rows.shape
    if len(search) != requests:
        raise ValueError(f"beams of {requests} requests for {len(search)} prompts")
    num_beams = min(width, source.num_rows)
    beam_nodes = num_beams * (source.num_levels - 1)
    if max_nodes < beam_nodes:
        raise ValueError(
            f"max_nodes: want at least {beam_nodes} for {num_beams} beams, got {max_nodes}"
        )
    rows = beams.rows.clamp(max=source.num_rows - 1)
    if not torch.equal(search.step.trie.sequences(rows), beams.tokens):
        raise ValueError("beams: found over another trie")
    open_ = (~beams.is_global).nonzero().squeeze(1)
    widths, left = search.widths(max_nodes)[:-1], max_nodes
    for depth, states in enumerate(widths):  # levels with few states leave more to the others
        widths[depth] = min(states, left // (len(widths) - depth))
        left -= widths[depth]
    widths.append(num_beams)
    decoder = native_decoder(search)
    # The library takes one request at a time, since each may need memory for many nodes.
    of_request = max(widths) * search.model.vocabulary_size
    together = 1 if decoder is not None else max(1, _LOGITS // of_request)
    tokens, scores, rows = beams.tokens.clone(), beams.scores.clone(), beams.rows.clone()
    is_global, stats = beams.is_global.clone(), list(beams.stats)
    for start in range(0, len(open_), together):
        group = open_[start : start + together]
        part = search.take(group.to(search.model.device))
        limits = _limits(part, beams.scores[group, :num_beams], beams.rows[group, :num_beams])
        try:
            if decoder is None:
                more = _bounded(part, widths, width, limits)
            else:
                more = native_search(part, decoder, widths, width, limits)
        except NonFiniteError as error:
            raise NonFiniteError([int(group[i]) for i in error.requests]) from None
        assert more.is_global is not None  # noqa: S101 - of a plain search
        for row, which in enumerate(group.tolist()):
            stats[which] = stats[which].plus(more.stats[row])
        proven = group[more.is_global]
        for all_, some in ((tokens, more.tokens), (scores, more.scores), (rows, more.rows)):
            all_[proven] = some[more.is_global].to(all_)
        is_global[proven] = True
    return replace(beams, rows=rows, tokens=tokens, scores=scores, stats=stats, is_global=is_global)


def _limits(search: Search, scores: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """(B,) what the last of (B, K) answers scores, with its boost; -inf where there are fewer."""
    scores, step = scores.to(search.model.device), search.step
    if step.gains is not None:
        leaves = rows.to(scores.device) + step.trie.source.depth_start[step.levels]
        scores = scores + step.gains.at(leaves.unsqueeze(1)).squeeze(1)
    return scores.amin(1)


def _bounded(search: Search, widths: Sequence[int], num_beams: int, limits: torch.Tensor) -> Beams:
    """A plain beam search of at most `widths` beams a level, which score at least (B,) `limits`."""
    step, eps = search.step, torch.finfo(search.model.dtype).eps
    least = limits - _ROUNDING * eps * limits.abs().clamp(max=1e9)
    with search.tree(sum(widths[:-1])) as tree:
        *_, frontier = grow(tree, step, widths, prune=partial(above, least))
        stats = [tree.stats(i) for i in range(len(search))]
        return finish(frontier, step, num_beams, stats, tree=tree)


def above(least: torch.Tensor, frontier: Frontier, most: int | None = None) -> Frontier:
    """The beams that score at least (B,) `least`, the best `most`; the others count as pruned."""
    low = frontier.scores < least[:, None]
    # What is left out counts as pruned: scores of another pass may differ by more.
    rest = frontier.scores.masked_fill(~low, -torch.inf).amax(1, keepdim=True)
    scores = frontier.scores.masked_fill(low, -torch.inf)
    count = max(1, int((scores > -torch.inf).sum(1).max()))
    positions, cut = stable_top(scores, count if most is None else min(count, most))
    rest = torch.maximum(torch.maximum(frontier.rest, rest), cut)
    return frontier._replace(rest=rest, scores=scores).at(positions)
