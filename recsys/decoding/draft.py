"""Drafters: they propose the tree that the target verifies.

A proposal is one frontier a level, for levels 1 .. L - 1 (the last level never needs nodes, only
its parents' logits). Whatever is proposed, strict verification gives beam search's answer; a better
proposal only saves passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from recsys import arguments
from recsys.constraint.transitions import DeviceTrie
from recsys.decoding.beam import grow
from recsys.decoding.expand import Frontier, Step, TokenLogits
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
        root = Frontier.root(len(prompts), torch.float32, prompts.tokens.device)
        equal = TokenLogits.nothing(root.scores, step.trie)
        return Proposal([step.expand(root, equal, 0, step.trie.source.branching[0])])


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
