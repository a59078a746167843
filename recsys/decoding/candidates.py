"""A drafter that needs no model: it drafts the prefixes of given candidates."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike

from recsys import arguments
from recsys.constraint.transitions import read
from recsys.constraint.trie import NO_STATE
from recsys.decoding.draft import Proposal
from recsys.decoding.expand import Frontier, Step
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
        self.rows, self.nodes = list(rows), arguments.whole_number("nodes", nodes)

    def propose(
        self, prompts: Prompts, step: Step, num_beams: int, *, prompt_slots: int
    ) -> Proposal:
        """See `Drafter`.

        Raises:
            ValueError: rows of another number of requests, or that the trie does not have.
        """
        source, device = step.trie.source, prompts.tokens.device
        lists = arguments.rows_of_requests("candidates", self.rows, len(prompts), source.num_rows)
        if step.levels == 1:
            return Proposal([])
        # A row needs a node a level at most; those that share prefixes need fewer.
        most = max(1, self.nodes // (step.levels - 1))
        width = max(1, min(most, max(map(len, lists), default=0)))
        rows = np.full((len(lists), width), source.num_rows, np.int64)  # no row, behind the last
        for line, listed in zip(rows, lists, strict=True):
            line[: min(len(listed), width)] = listed[:width]
        row, rank = (part.to(device) for part in torch.from_numpy(rows).sort(dim=1, stable=True))
        real = row < source.num_rows
        levels: list[Frontier] = []
        above = torch.zeros_like(row)  # place of each row's prefix in the level above
        for depth in range(1, step.levels):
            first, last = source.depth_start[depth : depth + 2]
            starts = step.trie.row_start[first:last]
            held = torch.searchsorted(starts, row.to(starts.dtype), right=True)
            # rows ascend, so rows of one prefix lie together; the first of them is its node
            state = torch.where(real, first + held - 1, NO_STATE)
            new = real.clone()
            new[:, 1:] &= state[:, 1:] != state[:, :-1]
            place = new.cumsum(1) - 1
            number = torch.arange(width, device=device)
            at = torch.where(new, number, width).sort(dim=1).values  # the nodes' places, ascending
            states = read(state, at, NO_STATE)
            token = step.trie.tokens_of(states.masked_fill(states == NO_STATE, 0))
            best = torch.full_like(rank, width).scatter_reduce(
                1, place.clamp(min=0), torch.where(real, rank, width), "amin"
            )
            score = (-best.float()).masked_fill(states == NO_STATE, -torch.inf)
            levels.append(Frontier.proposed(states, score, token, read(above, at, 0)))
            above = place
        return Proposal(levels)
