"""Best-first completion: from beam search's list to the model's best K sequences of all.

The log-probability of a prefix is an upper bound for all its descendants, so the search may stop
when no prefix that was left out scores as much as the K-th answer. Beam search's answer is often
global already, and its K-th score prunes the rest of the search.
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
from recsys.decoding.beam import finish
from recsys.decoding.expand import Frontier, stable_top
from recsys.decoding.native import native_decoder, native_search
from recsys.decoding.output import Beams
from recsys.decoding.request import Search, SearchRequest
from recsys.decoding.row_tree import RowTree
from recsys.decoding.table import Table
from recsys.decoding.tree import TokenTree, require_finite


@torch.inference_mode()
def complete(
    target: Any,
    beams: Beams,
    request: Search | SearchRequest | Sequence[ArrayLike],
    trie: ItemTrie | DeviceTrie,
    *,
    pass_nodes: int = 128,
    max_nodes: int = 2048,
) -> Beams:
    """The global top K of each request, where `beams` is not yet known to be it.

    Args:
        target: the model that gave `beams`.
        beams: of `beam_search` or `speculative_beam_search`, not sampled.
        request: that the beams answer.
        trie: that they were found over.
        pass_nodes: prefixes expanded in one pass, except with a native decoder.
        max_nodes: most nodes a request; where they do not suffice, its answer stays what it was.

    Returns:
        Beams; `is_global` says which are proven, `stats` include the additional work.

    Raises:
        ValueError: as `beam_search`; approximate beams, beams of another number of prompts or of
            another trie, or fewer `max_nodes` than one pass needs.
        NonFiniteError: as `beam_search`.
    """
    if beams.approximate or beams.is_global is None:
        raise ValueError("beams: only an exact search can be completed")
    pass_nodes = arguments.whole_number("pass_nodes", pass_nodes)
    max_nodes = arguments.whole_number("max_nodes", max_nodes)
    search = Search.of(request, target, trie)
    source = search.step.trie.source
    requests, width = beams.rows.shape
    if len(search) != requests:
        raise ValueError(f"beams of {requests} requests for {len(search)} prompts")
    num_beams = min(width, source.num_rows)
    beam_nodes = num_beams * (source.num_levels - 1)
    if max_nodes < pass_nodes + beam_nodes:
        raise ValueError(
            f"max_nodes: want at least {pass_nodes + beam_nodes} for {num_beams} beams, got "
            f"{max_nodes}"
        )
    rows = beams.rows.clamp(max=source.num_rows - 1)
    if not torch.equal(search.step.trie.sequences(rows), beams.tokens):
        raise ValueError("beams: found over another trie")
    if bool(beams.is_global.all()):
        return beams
    beams = beams.to(search.model.device)
    assert beams.is_global is not None  # noqa: S101 - checked above
    open_ = (~beams.is_global).nonzero().squeeze(1)
    if native_decoder(search) is not None and search.step.gains is None:
        return _bounded(beams, search, open_.tolist(), num_beams, max_nodes)
    part = search.take(open_)
    known = [r[r >= 0].cpu().numpy() for r in beams.rows[open_]]
    answers = _Answers(beams, search, num_beams)
    with TokenTree(search.model, part.prompts, max_nodes) as tree:
        table = Table(tree, part.step)
        table.add_rows(RowTree.of(part.step.trie, known))
        request_of = open_  # place in `beams` of each request of the table
        while len(request_of):
            table.run()
            answers.require_finite(request_of, tree.finite)
            complete_beams, frontier = _look(table, num_beams, pass_nodes)
            proven = ~(frontier.scores > -torch.inf).any(1)
            leave = proven if tree.nodes + pass_nodes <= max_nodes else torch.ones_like(proven)
            answers.take(request_of[proven], complete_beams.take(proven))
            answers.count(request_of[leave], table.request[leave], tree)
            going_on = (~leave).nonzero().squeeze(1)
            if len(going_on) < len(leave):
                request_of, frontier = request_of[going_on], frontier.take(going_on)
                table.keep(going_on)
            if len(going_on):
                real = frontier.scores > -torch.inf
                depth = table.depth.gather(1, frontier.parents) + 1
                table.add(frontier.states, frontier.tokens, frontier.parents, depth, real)
    return answers.beams(beams).to(torch.device("cpu"))


def _bounded(
    beams: Beams, search: Search, requests: Sequence[int], num_beams: int, max_nodes: int
) -> Beams:
    """`complete` by one more native beam search of each request, which computes far faster.

    It keeps every prefix that scores as much as the K-th known answer: no other can lead to a
    better one.
    """
    decoder = native_decoder(search)
    assert decoder is not None  # noqa: S101 - checked by the caller
    assert beams.is_global is not None  # noqa: S101 - checked by the caller
    width = beams.rows.shape[1]
    widths, left = search.widths(max_nodes)[:-1], max_nodes
    for depth, states in enumerate(widths):  # levels with few states leave more to the others
        widths[depth] = min(states, left // (len(widths) - depth))
        left -= widths[depth]
    widths.append(num_beams)
    rows, tokens, scores = beams.rows.clone(), beams.tokens.clone(), beams.scores.clone()
    is_global, stats = beams.is_global.clone(), list(beams.stats)
    for request in requests:  # one at a time: each may need memory for many nodes
        part = search.take(torch.tensor([request]))
        limit = scores[request, num_beams - 1 : num_beams]
        beams_of_part = native_search(part, decoder, widths, width, limit)
        assert beams_of_part.is_global is not None  # noqa: S101 - of a plain search
        stats[request] = stats[request].plus(beams_of_part.stats[0])
        if bool(beams_of_part.is_global[0]):
            rows[request], tokens[request], scores[request] = (
                part[0] for part in (beams_of_part.rows, beams_of_part.tokens, beams_of_part.scores)
            )
            is_global[request] = True
    return replace(beams, rows=rows, tokens=tokens, scores=scores, stats=stats, is_global=is_global)


class _Answers:
    """What the completion has found, by place in the batch of `beams`."""

    def __init__(self, beams: Beams, search: Search, num_beams: int) -> None:
        """Nothing is proven beyond `beams`."""
        model, requests = search.model, len(beams.rows)
        none = Frontier.root(requests, model.score_dtype, model.device).padded(num_beams)
        self._frontier = Frontier(*(part.clone() for part in none))  # written to in `take`
        self._finite = torch.ones(requests, dtype=torch.bool, device=model.device)
        self._proven = torch.zeros_like(self._finite)
        self._stats, self._step = list(beams.stats), search.step

    def require_finite(self, requests: torch.Tensor, finite: torch.Tensor) -> None:
        """Raise NonFiniteError unless the logits of all requests are finite so far."""
        self._finite[requests] = finite
        require_finite(self._finite)

    def take(self, requests: torch.Tensor, frontier: Frontier) -> None:
        """The global top K of these requests."""
        for all_, some in zip(self._frontier, frontier, strict=True):
            all_[requests] = some
        self._proven[requests] = True

    def count(self, requests: torch.Tensor, positions: torch.Tensor, tree: TokenTree) -> None:
        """Add the work done for requests, which have these places in the tree's first batch."""
        for request, position in zip(requests.tolist(), positions.tolist(), strict=True):
            self._stats[request] = self._stats[request].plus(tree.stats(position))

    def beams(self, before: Beams) -> Beams:
        """The answers that are proven now, and those of `before` for the others."""
        best = finish(self._frontier, self._step, before.rows.shape[1], [])
        best = best.to(before.rows.device)
        assert before.is_global is not None  # noqa: S101 - for the type checker
        mask = self._proven[:, None]
        return replace(
            before,
            tokens=torch.where(mask[..., None], best.tokens, before.tokens),
            scores=torch.where(mask, best.scores, before.scores),
            rows=torch.where(mask, best.rows, before.rows),
            stats=self._stats,
            is_global=before.is_global | self._proven,
        )


def _look(table: Table, num_beams: int, pass_nodes: int) -> tuple[Frontier, Frontier]:
    """The best K complete sequences of a table that has been run, and the prefixes to expand."""
    nodes, (*above, last) = table.expand()
    pick = partial(table.step.pick, rest=nodes.rest)
    order = last.children.states.flatten(1).argsort(dim=1)  # row order settles ties
    ranked = last.scores.flatten(1).gather(1, order)
    best, _ = stable_top(ranked, min(num_beams, ranked.shape[1]))
    best = torch.nn.functional.pad(order, (0, 1), value=order.shape[1]).gather(1, best)
    answer = pick(best, last.children, last.scores, last.log_probs).padded(num_beams)
    limit = answer.scores.amin(1)[:, None, None]  # the known answers are in from the first pass
    open_ = []
    for level in above:
        # keep equal scores: one may lead to an answer of a lower row
        scores = level.open_scores()
        scores = scores.masked_fill(scores < limit, -torch.inf)
        chosen, _ = stable_top(scores.flatten(1), min(pass_nodes, scores[0].numel()))
        open_.append(pick(chosen, level.children, scores, level.log_probs))
    if not open_:
        return answer, Frontier.nothing(answer, pass_nodes)
    every = Frontier.joined(open_)
    most, _ = stable_top(every.scores, min(pass_nodes, every.scores.shape[1]))
    return answer, every.at(most)
