"""Drafters that need no model of their own: given candidates, and the union of several drafters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from recsys.decoding.draft import Drafter, Proposal, split_nodes
from recsys.decoding.expand import Frontier, Step, stable_top

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike

    from recsys.decoding.tree import Prompts


class CandidateDrafter:
    """The prefixes of given rows, best first: what a retriever thinks comes next.

    The target scores every candidate exactly in the pass that verifies the tree.
    """

    def __init__(self, rows: Sequence[ArrayLike], nodes: int = 256) -> None:
        """Draft `rows` (trie rows of each request, best first), at most `nodes` a tree.

        Raises:
            ValueError: fewer nodes than one.
        """
        if nodes < 1:
            raise ValueError(f"nodes must be at least 1, got {nodes}")
        self.rows, self.nodes = [np.asarray(r, np.int64).reshape(-1) for r in rows], nodes

    def propose(
        self, prompts: Prompts, step: Step, num_beams: int, *, prompt_slots: int
    ) -> Proposal:
        """See `Drafter`.

        Raises:
            ValueError: rows of another number of requests, or that the trie does not have.
        """
        if len(self.rows) != len(prompts):
            raise ValueError(f"candidates of {len(self.rows)} requests for {len(prompts)} prompts")
        source, device = step.trie.source, prompts.tokens.device
        for request, rows in enumerate(self.rows):
            if len(rows) and (rows.min() < 0 or rows.max() >= source.num_rows):
                raise ValueError(
                    f"candidates of request {request}: rows must lie in 0 .. {source.num_rows - 1}"
                )
        if step.levels == 1:
            return Proposal([])
        # A row needs a node a level at most; those that share prefixes need fewer.
        most = max(1, self.nodes // (step.levels - 1))
        width = min(most, max(map(len, self.rows), default=0))
        rows_ = np.full((len(self.rows), max(1, width)), -1, np.int64)
        for line, rows in zip(rows_, self.rows, strict=True):
            line[: min(len(rows), width)] = rows[:width]
        row = torch.from_numpy(rows_).to(device)
        rank = torch.arange(row.shape[1], device=device).expand_as(row)
        levels: list[Frontier] = []
        for depth in range(1, step.levels):
            first, last = source.depth_start[depth : depth + 2]
            starts = step.trie.row_start[first:last]
            held = torch.searchsorted(starts, row.clamp(min=0).to(starts.dtype), right=True)
            state = first + held - 1
            # By state, and by rank among equals, of which the first stays.
            order = (state * row.shape[1] + rank).argsort(dim=1)
            state = state.gather(1, order)
            score = -rank.gather(1, order).float()
            again = torch.zeros_like(state, dtype=torch.bool)
            again[:, 1:] = state[:, 1:] == state[:, :-1]
            score = score.masked_fill(again | (row.gather(1, order) < 0), -torch.inf)
            # Equal prefixes lie together: the parent is the first place of the parent's state.
            above = levels[-1].states if levels else torch.zeros_like(state)
            parent = torch.searchsorted(above, step.trie.parents_of(state), right=False)
            token = step.trie.tokens_of(state)
            levels.append(Frontier.proposed(state, score, token, parent))
        return Proposal(levels)


class UnionDrafter:
    """What several drafters propose, each node once, under one budget.

    Where the budget of a level runs short, earlier drafters come first, and their better nodes.
    """

    def __init__(self, drafters: Sequence[Drafter], nodes: int = 256) -> None:
        """Unite `drafters`, `nodes` a tree.

        Raises:
            ValueError: no drafters, or fewer nodes than one.
        """
        if not drafters:
            raise ValueError("drafters: want at least one")
        if nodes < 1:
            raise ValueError(f"nodes must be at least 1, got {nodes}")
        self.drafters, self.nodes = list(drafters), nodes

    def propose(
        self, prompts: Prompts, step: Step, num_beams: int, *, prompt_slots: int
    ) -> Proposal:
        """See `Drafter`."""
        proposals = [
            d.propose(prompts, step, num_beams, prompt_slots=prompt_slots) for d in self.drafters
        ]
        passes = sum(p.passes for p in proposals)
        above = torch.zeros((len(prompts), 1), dtype=torch.int64, device=prompts.tokens.device)
        merged: list[Frontier] = []
        for depth, width in enumerate(split_nodes(self.nodes, step.trie, num_beams)):
            found = [p.levels[depth] for p in proposals if len(p.levels) > depth]
            if not found:
                break
            level = _merge(found, above, width, step)
            merged.append(level)
            above = level.states.masked_fill(
                level.scores == -torch.inf, step.trie.source.num_states
            )
        return Proposal(merged, passes)


def _merge(found: list[Frontier], above: torch.Tensor, width: int, step: Step) -> Frontier:
    """The best nodes of one level, each once, whose parent is in the level above."""
    states = torch.cat([level.states for level in found], dim=1)
    alive = torch.cat([level.scores for level in found], dim=1) > -torch.inf
    # Rank: place in the order (drafter, falling score).
    ranks, before = [], 0
    for level in found:
        ranks.append(level.scores.argsort(dim=1, descending=True, stable=True).argsort(1) + before)
        before += level.scores.shape[1]
    rank = torch.cat(ranks, dim=1)
    # Ascending by state, the dead behind all; the best ranked of equals first, and alone.
    key = torch.where(alive, states, step.trie.source.num_states) * before + rank
    order = key.argsort(dim=1)
    states, alive, rank = (x.gather(1, order) for x in (states, alive, rank))
    again = torch.zeros_like(alive)
    again[:, 1:] = (states[:, 1:] == states[:, :-1]) & alive[:, :-1]
    wanted = step.trie.parents_of(states)
    ordered = above.sort(dim=1)
    at = torch.searchsorted(ordered.values, wanted).clamp(max=above.shape[1] - 1)
    known = ordered.values.gather(1, at) == wanted
    score = (-rank.double()).masked_fill(~alive | again | ~known, -torch.inf)
    best, _ = stable_top(score, min(width, score.shape[1]))
    states = states.gather(1, best)
    return Frontier.proposed(
        states,
        score.gather(1, best),
        step.trie.tokens_of(states),
        ordered.indices.gather(1, at).gather(1, best),
    )
