"""Drafters: they propose the tree that the target verifies.

A proposal is one frontier a level, for levels 1 .. L - 1 (the last level never needs nodes, only
its parents' logits). Whatever is proposed, strict verification gives beam search's answer; a better
proposal only saves passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike

from recsys import arguments
from recsys.constraint.transitions import DeviceTrie, read
from recsys.constraint.trie import NO_STATE
from recsys.decoding.beam import grow
from recsys.decoding.expand import Frontier, Step
from recsys.decoding.request import check_vocabulary
from recsys.decoding.tree import PromptBatch, TokenTree
from recsys.models.tree_forward import TreeModel


@dataclass(frozen=True)
class Proposal:
    """A draft tree.

    Attributes:
        levels: nodes of levels 1, 2, ...; `parents` are places in the level above, and a node with
            score -inf is padding.
        passes: forward passes of the draft model.
        tree: of the draft model, whose `settle` the verification calls.
    """

    levels: list[Frontier]
    passes: int = 0
    tree: TokenTree | None = None

    @property
    def nodes(self) -> int:
        """Nodes, padding included."""
        return sum(level.states.shape[1] for level in self.levels)


class Drafter(Protocol):
    """Proposes a tree for a batch of prompts."""

    def propose(self, prompts: PromptBatch, step: Step, num_beams: int) -> Proposal:
        """Draft trees for the target's search with `num_beams` = K and this `step`."""


class ModelDrafter:
    """Drafts by constrained beam search of a smaller model; its scores rank each level's nodes."""

    def __init__(
        self,
        model: Any,
        nodes: int = 256,
        *,
        widths: Sequence[int] | None = None,
        draft_beams: int | None = None,
    ) -> None:
        """Draft with `model` (Hugging Face, same vocabulary as the target).

        Args:
            model: the draft.
            nodes: of a tree, split over its levels by `split_nodes`.
            widths: nodes of levels 1, 2, ... instead; [N] * (L - 1) is AtSpeed's tree.
            draft_beams: for relaxed verification, which needs neither of them: N sequences that the
                draft draws at each level; K by default, and larger ones favour the draft.

        Raises:
            ValueError: fewer nodes or beams than one, or no whole number of them.
        """
        arguments.whole_number("nodes", nodes)
        for width in widths or ():
            arguments.whole_number("widths", width)
        if draft_beams is not None:
            arguments.whole_number("draft_beams", draft_beams)
        self.model, self.nodes, self.widths = TreeModel.of(model), nodes, widths
        self.draft_beams = draft_beams

    def propose(self, prompts: PromptBatch, step: Step, num_beams: int) -> Proposal:
        """See `Drafter`."""
        self.check(prompts, step.trie)
        widths = self.split(step.trie, num_beams)
        if not widths:
            return Proposal([])
        with TokenTree(self.model, prompts, sum(widths[:-1])) as tree:
            return self.draft(tree, step, widths)

    def check(self, prompts: PromptBatch, trie: DeviceTrie) -> None:
        """Raise ValueError unless the draft model can run the prompts and the catalog."""
        check_vocabulary(self.model, trie)
        if len(prompts) and (most := prompts.host_tokens.max()) >= self.model.vocabulary_size:
            raise ValueError(
                f"a prompt has token {most}; the draft knows 0 .. {self.model.vocabulary_size - 1}"
            )
        PromptBatch.of(prompts, self.model, trie.source.num_levels - 2)

    def split(self, trie: DeviceTrie, num_beams: int) -> list[int]:
        """Nodes of levels 1, 2, ... of a tree for a search with K = `num_beams`."""
        if self.widths is None:
            return split_nodes(self.nodes, trie, num_beams)
        asked = enumerate(self.widths[: trie.source.num_levels - 1], start=1)
        return [min(width, trie.source.width(depth, width)) for depth, width in asked]

    def draft(self, tree: TokenTree, step: Step, widths: Sequence[int]) -> Proposal:
        """Draft in an empty tree of the draft model.

        Nothing waits for the device where all tokens of the vocabulary count, so it can be
        captured.
        """
        return Proposal(list(grow(tree, step, widths)), tree.passes, tree)


class ExhaustiveDrafter:
    """Drafts all nodes of level 1, without a model.

    A patch pass runs the missing beams and children of beams. A search over four levels takes two
    passes of the target while these children fit into `patch_nodes`, and three otherwise.
    """

    def propose(self, prompts: PromptBatch, step: Step, num_beams: int) -> Proposal:
        """See `Drafter`; the proposal depends on the trie and the exclusions only."""
        if step.levels == 1:
            return Proposal([])
        root = torch.zeros((len(prompts), 1), dtype=torch.int64, device=prompts.tokens.device)
        children = step.children(root, 0)
        alive = children.alive.flatten(1)
        states = children.states.flatten(1)
        level = Frontier.proposed(
            states,
            torch.zeros(alive.shape, device=states.device).masked_fill_(~alive, -torch.inf),
            step.trie.alphabet[children.symbols.flatten(1)],
            torch.zeros_like(states),
        )
        return Proposal([level])


class CandidateDrafter:
    """Drafts the prefixes of given rows, such as a retriever's candidates, best first.

    The target scores every candidate exactly in the pass that verifies the tree.
    """

    def __init__(self, rows: Sequence[ArrayLike], nodes: int = 256) -> None:
        """Draft `rows` (trie rows of each request, best first), at most `nodes` a tree.

        Raises:
            ValueError: fewer nodes than one.
        """
        self.rows, self.nodes = list(rows), arguments.whole_number("nodes", nodes)

    def propose(self, prompts: PromptBatch, step: Step, num_beams: int) -> Proposal:
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
            owner = torch.searchsorted(starts, row.to(starts.dtype), right=True)
            # rows ascend, so rows of one prefix lie together; the first of them is its node
            state = torch.where(real, first + owner - 1, NO_STATE)
            new = real.clone()
            new[:, 1:] &= state[:, 1:] != state[:, :-1]
            position = new.cumsum(1) - 1
            number = torch.arange(width, device=device)
            at = torch.where(new, number, width).sort(dim=1).values  # the nodes' places, ascending
            states = read(state, at, NO_STATE)
            token = step.trie.tokens_of(states.masked_fill(states == NO_STATE, 0))
            best = torch.full_like(rank, width).scatter_reduce(
                1, position.clamp(min=0), torch.where(real, rank, width), "amin"
            )
            score = (-best.float()).masked_fill(states == NO_STATE, -torch.inf)
            levels.append(Frontier.proposed(states, score, token, read(above, at, 0)))
            above = position
        return Proposal(levels)


def split_nodes(nodes: int, trie: DeviceTrie, num_beams: int = 1) -> list[int]:
    """Split a budget of nodes over levels 1 .. L - 1.

    Shares grow with the level as 1 : 2 : 3 ..., which measured best for four levels (43 / 85 / 128
    of 256). A level gets at least 1.25 K nodes if the budget allows it, because a level with fewer
    than K nodes can never be accepted. No level gets more nodes than it has states, or none.
    """
    levels = trie.source.num_levels - 1
    widths, left = [], nodes
    for level in range(levels):
        most = trie.source.width(level + 1, nodes)
        share = left * (level + 1) // sum(range(level + 1, levels + 1))
        least = min(num_beams + num_beams // 4, left // (levels - level))
        width = min(most, max(1, least, share))
        widths.append(width)
        left = max(0, left - width)
    return widths
