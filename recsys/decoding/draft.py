"""Drafters: who proposes the tree that the target verifies.

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
from recsys.decoding.beam import check_vocabulary, grow
from recsys.decoding.expand import Frontier, Step
from recsys.decoding.tree import Prompts, TokenTree
from recsys.models.tree_forward import TreeModel


@dataclass(frozen=True)
class Proposal:
    """A draft tree.

    Attributes:
        levels: nodes of levels 1, 2, ...; `parents` are places in the level above, and a node with
            score -inf is padding.
        passes: forwards of the draft model that it took.
    """

    levels: list[Frontier]
    passes: int = 0

    @property
    def nodes(self) -> int:
        """Nodes, padding included."""
        return sum(level.states.shape[1] for level in self.levels)


class Drafter(Protocol):
    """Proposes a tree for a batch of prompts."""

    def propose(
        self, prompts: Prompts, step: Step, num_beams: int, *, prompt_slots: int
    ) -> Proposal:
        """Draft trees.

        Args:
            prompts: the batch.
            step: trie, exclusions, normalisation and noise, as the target will be asked.
            num_beams: K that the target will keep.
            prompt_slots: prompt slots at least.
        """


class ModelDrafter:
    """Constrained beam search by a smaller model; its own scores rank the nodes of every level."""

    def __init__(
        self, model: Any, nodes: int = 256, *, widths: Sequence[int] | None = None
    ) -> None:
        """Draft with `model` (Hugging Face, same vocabulary as the target).

        Args:
            model: the draft.
            nodes: of a tree, split over its levels by `split_nodes`.
            widths: nodes of levels 1, 2, ... instead; [N] * (L - 1) is AtSpeed's tree.

        Raises:
            ValueError: fewer nodes than one, or no whole number of them.
        """
        arguments.whole_number("nodes", nodes)
        for width in widths or ():
            arguments.whole_number("widths", width)
        self.model, self.nodes, self.widths = TreeModel.of(model), nodes, widths

    def propose(
        self, prompts: Prompts, step: Step, num_beams: int, *, prompt_slots: int
    ) -> Proposal:
        """See `Drafter`."""
        check_vocabulary(self.model, step.trie)
        if len(prompts) and (most := prompts.host_tokens.max()) >= self.model.vocabulary_size:
            raise ValueError(
                f"a prompt has token {most}; the draft knows 0 .. {self.model.vocabulary_size - 1}"
            )
        Prompts.of(prompts, self.model, step.levels - 2)
        source = step.trie.source
        widths = split_nodes(self.nodes, step.trie, num_beams)
        if self.widths is not None:
            asked = enumerate(self.widths[: step.levels - 1], start=1)
            widths = [min(width, source.width(depth, width)) for depth, width in asked]
        if not widths:
            return Proposal([])
        with TokenTree(self.model, prompts, sum(widths[:-1]), prompt_slots=prompt_slots) as tree:
            return Proposal(list(grow(tree, step, widths)), tree.passes)


class ExhaustiveDrafter:
    """All nodes of level 1, without any model.

    The patch pass runs the children of the missing beams, so a search over four levels takes two
    passes of the target.
    """

    def propose(
        self, prompts: Prompts, step: Step, num_beams: int, *, prompt_slots: int
    ) -> Proposal:
        """See `Drafter`; only the trie and the exclusions matter."""
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


def split_nodes(nodes: int, trie: DeviceTrie, num_beams: int = 1) -> list[int]:
    """Nodes of levels 1 .. L - 1 that add up to `nodes` at most, but for one a level at least.

    Shares rise by level as 1 : 2 : 3 ..., the best measured for four levels (43 / 85 / 128 of 256),
    but a level gets a quarter more than K where that can be: with fewer than K nodes it cannot be
    accepted. No level gets more than it can have, nor less than one.
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
