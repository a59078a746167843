"""Shared search: requests with equal prompts, searched over one tree.

Requests that differ only in what they may get, such as an evaluation's with and without the items
of the history, mostly keep the same beams. Here each distinct prompt is run once, and each prefix
that any of its requests needs, as a beam or on the way to a candidate, is one node. The answers are
`beam_search`'s; scores may differ in their last bits, because nodes lie in other slots. The host
waits for the device to know how many nodes a level has: right for work offline, where batches are
large.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from recsys import arguments
from recsys.constraint import ItemTrie
from recsys.constraint.transitions import DeviceTrie
from recsys.constraint.trie import NO_STATE
from recsys.decoding.beam import finish, no_answers
from recsys.decoding.expand import Frontier, Step, TokenLogits
from recsys.decoding.output import Beams
from recsys.decoding.request import Search, SearchRequest
from recsys.decoding.row_tree import RowTree
from recsys.decoding.tree import NO_TOKEN, ROOT, TokenTree, require_finite


@torch.inference_mode()
def shared_beam_search(
    model: Any,
    request: Search | SearchRequest | Sequence[ArrayLike],
    trie: ItemTrie | DeviceTrie,
    num_beams: int = 20,
) -> Beams:
    """`beam_search` for R requests of which several have the same prompt; equal ones are run once.

    Memory grows with the largest number of requests that have one prompt. The tokens and slots in
    the stats are those of the whole tree.

    Raises:
        ValueError: as `beam_search`; a sample, or `normalize` other than `vocabulary`.
        NonFiniteError: as `beam_search`.
    """
    num_beams = arguments.whole_number("num_beams", num_beams)
    search = Search.of(request, model, trie)
    step, rows = search.step, search.rows
    if step.noise is not None or step.normalize != "vocabulary":
        raise ValueError("a shared search has no seeds and normalizes over the 'vocabulary'")
    if not len(search):
        return no_answers(search, num_beams)
    search.send()
    prompts, owner = search.prompts.distinct()
    widths = search.widths(num_beams)
    room = sum(widths[:-1])
    if rows is not None:  # each depth is as wide as the prompt with most there
        of_depth = (rows.real & (rows.depth == depth) for depth in range(1, step.levels))
        room += sum(int(here.sum(1).max()) for here in of_depth)
    frontier = Frontier.root(len(search), search.model.score_dtype, search.model.device)
    with TokenTree(search.model, prompts, room * int(np.bincount(owner).max())) as tree:
        level = _Level(tree, step, torch.from_numpy(owner).to(search.model.device))
        scores = None if rows is None else level.scores(rows, 0)
        for depth, width in enumerate(widths):
            frontier = step.expand(frontier, level.logits(frontier.states, depth), depth, width)
            if depth + 1 < step.levels:
                level.descend(frontier, rows, depth + 1)
                if rows is not None and scores is not None:
                    scores = scores + level.scores(rows, depth + 1)
        if rows is not None and scores is not None:
            scores = scores.masked_fill(~rows.known, -torch.inf)
        require_finite(tree.finite[level.owner.squeeze(-1)])
        stats = [tree.stats(i) for i in owner.tolist()]
        return finish(frontier, step, num_beams, stats, scores)


class _Level:
    """The nodes of one depth: a state of a prompt's tree is one node for all its requests."""

    def __init__(self, tree: TokenTree, step: Step, owner: torch.Tensor) -> None:
        """Begin at the prompts, which are run."""
        self.owner = owner.unsqueeze(-1)
        self._tree, self._step = tree, step
        # One integer is the key of a state of a prompt's tree.
        self._stride = step.trie.source.num_states
        self._begins = torch.arange(len(tree.lengths) + 1, device=owner.device)
        self._keys = _closed(self._begins[:-1] * self._stride)
        self._start = self._begins
        self._first = ROOT
        self._logits = TokenLogits.run(tree, step.trie)

    def logits(self, states: torch.Tensor, depth: int) -> TokenLogits:
        """(R, W) of the states at `depth`; of any node of the prompt if a beam does not exist.

        Only logits of symbols that follow this depth are set: the rest is most of the memory.
        """
        place, (logits, total) = self._place(states), self._logits
        found = logits.new_empty((*place.shape, logits.shape[-1]))
        follows = self._step.trie.source.symbol_ranges[depth]
        found.narrow(-1, *follows).copy_(logits.narrow(-1, *follows)[self.owner, place])
        return TokenLogits(found, total[self.owner, place])

    def scores(self, rows: RowTree, depth: int) -> torch.Tensor:
        """(R, C) log-probabilities of the rows' tokens behind `depth` others."""
        states = torch.nn.functional.pad(rows.states, (1, 0)).gather(1, rows.places[..., depth])
        place, (logits, total) = self._place(states), self._logits
        symbols = rows.symbols[..., depth]
        steps = logits[self.owner, place, symbols] - total[self.owner, place]
        return steps if rows.free is None else steps.masked_fill(rows.free[..., depth], 0.0)

    def descend(self, frontier: Frontier, rows: RowTree | None, depth: int) -> None:
        """Go on to the states of the live beams at `depth`, and of the rows' prefixes there."""
        wanted = [self._keys_of(frontier.states)[frontier.states != NO_STATE]]
        if rows is not None:
            wanted.append(self._keys_of(rows.states)[rows.real & (rows.depth == depth)])
        keys = torch.unique(torch.cat(wanted))
        start = torch.searchsorted(keys, self._begins * self._stride)
        prompt, state = keys // self._stride, keys % self._stride
        place = torch.arange(len(keys), device=keys.device) - start[prompt]
        shape = (len(start) - 1, max(1, int(start.diff().max())))
        tokens = keys.new_full(shape, NO_TOKEN)
        tokens[prompt, place] = self._step.trie.tokens_of(state)
        parents = torch.full_like(tokens, ROOT)
        if depth > 1:
            above = prompt * self._stride + self._step.trie.parents_of(state)
            at = torch.searchsorted(self._keys, above) - self._start[prompt]  # each is a node
            parents[prompt, place] = self._first + at
        self._first = self._tree.add(tokens, parents, depth)
        self._keys, self._start = _closed(keys), start
        self._logits = TokenLogits.run(self._tree, self._step.trie)

    def _keys_of(self, states: torch.Tensor) -> torch.Tensor:
        return self.owner * self._stride + states

    def _place(self, states: torch.Tensor) -> torch.Tensor:
        """(R, W) of the states among the nodes of their prompt; 0 for states that are no node."""
        keys = self._keys_of(states)
        at = torch.searchsorted(self._keys, keys)
        found = (self._keys[at] == keys) & (states != NO_STATE)
        return (at - self._start[self.owner]).masked_fill_(~found, 0)


def _closed(keys: torch.Tensor) -> torch.Tensor:
    """Ascending keys, then one that is greater than any: a search ends at a place that exists."""
    return torch.cat([keys, keys.new_tensor([torch.iinfo(keys.dtype).max])])
