"""Answers of a way of decoding, how far they agree, and a draft that proposes the best tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from huggingface import Ranking, same_ranking

from recsys.constraint.trie import NO_STATE
from recsys.decoding import Beams, DecodeStats, ModelDrafter, Proposal, Search
from recsys.decoding.expand import Frontier, Step
from recsys.decoding.tree import TokenTree
from recsys.models.tree_forward import TreeModel

# Largest difference of a score, and of scores whose places may be exchanged.
ROUNDING = (1e-4, 1e-5)
HF_ROUNDING = (1e-3, 1e-4)  # Hugging Face pads on the left and sums in another order


@dataclass(frozen=True)
class Answer:
    """What a mode returned in one round.

    Attributes:
        rankings: (sequence, score) of each request, best first.
        stats: of each request; empty for Hugging Face.
        plan: that the planner chose; "" for other modes.
    """

    rankings: list[Ranking]
    stats: Sequence[DecodeStats] = ()
    plan: str = ""

    @classmethod
    def of(cls, beams: Beams, plan: str = "") -> Answer:
        """The answer of a search of this project."""
        columns = (beams.tokens.tolist(), beams.scores.tolist(), beams.rows.tolist())
        lists = [
            [(tuple(t), s) for t, s, row in zip(*request, strict=True) if row >= 0]
            for request in zip(*columns, strict=True)
        ]
        return cls(lists, beams.stats, plan)


@dataclass(frozen=True)
class Agreement:
    """How far answers agree with beam search's.

    Attributes:
        requests: share of lists that are the same, up to places within rounding.
        items: share of items in common.
        gap: largest difference of a common item's score.
    """

    requests: float
    items: float
    gap: float

    @classmethod
    def of(
        cls, answers: list[Ranking], expected: list[Ranking], tolerance: float, tie: float
    ) -> Agreement:
        """Compare the lists of a batch (`same_ranking`)."""
        same = common = total = 0
        gap = 0.0
        for mine, theirs in zip(answers, expected, strict=True):
            same += same_ranking(mine, theirs, tolerance=tolerance, tie=tie)
            scores = dict(theirs)
            gaps = [abs(score - scores[key]) for key, score in mine if key in scores]
            gap, total = max([gap, *gaps]), total + len(theirs)
            common += len(dict(mine).keys() & scores.keys())
        return cls(same / len(expected), common / max(1, total), gap)

    @classmethod
    def join(cls, parts: Sequence[Agreement]) -> Agreement:
        """The agreement of batches of one size."""
        return cls(
            round(float(np.mean([p.requests for p in parts])), 4),
            round(float(np.mean([p.items for p in parts])), 4),
            float(f"{max(p.gap for p in parts):.2g}"),
        )


class PerfectDraft(ModelDrafter):
    """Runs the draft, then proposes the tree that the target itself drafts in `find`.

    The tree lies in the same tensors each time, where a captured decode reads it. Its states are
    kept as numbers within their depth: a captured decode has room between depths (`FixedTrie`).
    """

    def __init__(self, draft: Any, target: TreeModel, nodes: int, batch: int) -> None:
        """Propose trees of `nodes` nodes for at most `batch` requests."""
        super().__init__(draft, nodes)
        self._target, self._batch = ModelDrafter(target, nodes), batch
        self._found: list[Frontier] = []

    @torch.inference_mode()
    def find(self, search: Search, num_beams: int) -> None:
        """Keep the tree to propose next."""
        levels = self._target.propose(search.prompts, search.step, num_beams).levels
        starts = search.step.trie.source.depth_start[1:]
        for level_filter, level, first in zip(self._kept(levels), levels, starts, strict=False):
            for old, new in zip(level_filter, _moved(level, -first), strict=True):
                old[: len(new)] = new
                old[len(new) :] = new[-1]  # requests that fill up a shape repeat the last one

    def draft(self, tree: TokenTree, step: Step, widths: Sequence[int]) -> Proposal:
        """See `ModelDrafter`."""
        proposal, batch = super().draft(tree, step, widths), len(tree.lengths)
        level_filter = self._kept(proposal.levels)
        levels = [Frontier(*(part[:batch] for part in level)) for level in level_filter]
        starts = step.trie.source.depth_start[1:]
        levels = [_moved(level, first) for level, first in zip(levels, starts, strict=False)]
        return replace(proposal, levels=levels)

    def _kept(self, levels: Sequence[Frontier]) -> list[Frontier]:
        """Tensors for levels of these widths, made in the first call."""
        if not self._found:
            self._found = [
                Frontier(*(part.new_zeros((self._batch, part.shape[1])) for part in level))
                for level in levels
            ]
        return self._found


def _moved(level: Frontier, by: int) -> Frontier:
    """A level with other numbers of states."""
    states = level.states
    return level._replace(states=torch.where(states == NO_STATE, states, states + by))
