"""Table: every node that the target has been run on, by trie state, with its logits.

No node is computed twice: verification, patch passes and the trace all read this table. Place 0 is
the prompt (state 0, the root), and node i of the tree is place i + 1. All requests have the same
number of places. A place without a node has the state `PADDING`, which no beam has; beams that do
not exist have the state `NO_STATE`.
"""

from __future__ import annotations

import torch

from recsys.decoding.expand import Frontier, Step, TokenLogits
from recsys.decoding.row_tree import RowTree
from recsys.decoding.tree import NO_TOKEN, ROOT, TokenTree

PADDING = -1


class Table:
    """Nodes added to a tree, and the target's logits at them.

    Attributes:
        tree: runs the nodes.
        step: the constraints, for the same requests as the tree.
        request: (b,) place in the original batch of each request still here.
        states: (b, P) int64 trie state of each place.
        parents: (b, P) int64 place of its parent; 0 for the prompt itself.
        depth: (b, P) int64.
        logits: (b, P) entries for the places that have been run.
        runs: places after each pass.
    """

    def __init__(self, tree: TokenTree, step: Step) -> None:
        """Begin with the prompts, which are run by the first `run`."""
        batch, device = len(tree.lengths), tree.lengths.device
        self.tree, self.step = tree, step
        self.request = torch.arange(batch, device=device)
        self.states = torch.zeros((batch, 1), dtype=torch.int64, device=device)
        self.parents = self.depth = self.states
        nothing = torch.zeros((batch, 0), dtype=tree.model.score_dtype, device=device)
        alphabet = len(step.trie.alphabet)
        self.logits = TokenLogits(nothing.new_zeros((batch, 0, alphabet)), nothing)
        self.runs: list[int] = []

    @property
    def places(self) -> int:
        """P."""
        return self.states.shape[1]

    def add(
        self,
        states: torch.Tensor,
        tokens: torch.Tensor,
        parents: torch.Tensor,
        depth: torch.Tensor | int,
        real: torch.Tensor,
    ) -> int:
        """Add (b, W) nodes for the next pass; returns the place of the first.

        `parents` are places, and `real` is False for padding.
        """
        first = self.places
        states = states.masked_fill(~real, PADDING)
        if isinstance(depth, int):
            depth = torch.full_like(states, depth)
        depth = depth.expand_as(states)
        self.states = torch.cat([self.states, states], dim=1)
        self.parents = torch.cat([self.parents, parents], dim=1)
        self.depth = torch.cat([self.depth, depth], dim=1)
        # place 0 is the prompt, which is ROOT, -1
        self.tree.add(tokens.masked_fill(~real, NO_TOKEN), parents - 1, depth)
        return first

    def add_levels(self, levels: list[Frontier]) -> None:
        """Add a draft tree, level by level.

        A proposed node is added only if its parent in the trie is its parent in the tree. Whatever
        is proposed, the logits at a state are therefore those of the state's own tokens.
        """
        trie, first = self.step.trie, 0
        for depth, level in enumerate(levels, start=1):
            parents = level.parents + first
            above = self.states.gather(1, parents)
            real = (level.scores > -torch.inf) & (above != PADDING)
            states = level.states.masked_fill(~real, 1)  # a child of the root
            real &= (trie.parents_of(states) == above) & (trie.tokens_of(states) == level.tokens)
            first = self.add(states, level.tokens, parents, depth, real)

    def add_rows(self, rows: RowTree) -> None:
        """Add the tree of candidates for the next pass; drafted nodes may repeat there."""
        states = rows.states.masked_fill(~rows.real, PADDING)
        parents = rows.parents + 1 + (rows.parents != ROOT) * self.tree.nodes
        self.states = torch.cat([self.states, states], dim=1)
        self.parents = torch.cat([self.parents, parents], dim=1)
        self.depth = torch.cat([self.depth, rows.depth], dim=1)
        rows.add_to(self.tree)

    def scores_of(self, rows: RowTree) -> torch.Tensor:
        """(b, C) scores of rows that were added last and have been run."""
        first = self.places - rows.width
        own = (torch.cat([part[:, :1], part[:, first:]], dim=1) for part in self.logits)
        return rows.scores(TokenLogits(*own))

    def run(self) -> None:
        """Run one pass of the target over the nodes that were added."""
        new = TokenLogits.run(self.tree, self.step.trie)
        pairs = zip(self.logits, new, strict=True)
        self.logits = TokenLogits(*(torch.cat(pair, dim=1) for pair in pairs))
        self.runs = [*self.runs, self.places]

    def run_added(self) -> None:
        """Run the nodes that were added, if any; the first pass also runs the prompts."""
        if not self.runs or self.places > self.runs[-1]:
            self.run()

    def find(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(b, W) place of each state, 0 where it has none, and whether it has one."""
        match = self.states[:, None, :] == states[:, :, None]
        return match.to(torch.uint8).argmax(-1), match.any(-1)  # equal nodes have equal logits

    def keep(self, going_on: torch.Tensor) -> None:
        """Continue with some requests only; (b,) int64 places, ascending."""
        self.tree.keep(going_on)
        self.step = self.step.take(going_on)
        self.request, self.states = self.request[going_on], self.states[going_on]
        self.parents, self.depth = self.parents[going_on], self.depth[going_on]
        self.logits = TokenLogits(*(part[going_on] for part in self.logits))

    def log_probs(self) -> torch.Tensor:
        """(b, P) the target's log-probabilities of all places, which must have been run.

        A node's place among its parent's children is its state minus that of the first child.
        """
        trie, parents = self.step.trie, self.parents
        root = Frontier.root(len(self.request), self.logits.total.dtype, self.states.device)
        nodes = root.padded(self.places)._replace(states=self.states)
        real = self.states != PADDING
        position = self.states.masked_fill(~real, 0)
        position = position - trie.first_child[position.gather(1, parents)]
        for depth in range(self.step.levels - 1):
            children = self.step.children(self.states, depth)  # none of places at other depths
            _, log_probs = self.step.score(nodes, self.logits, children)
            below = (self.depth == depth + 1) & real
            at = torch.where(below, parents * children.states.shape[-1] + position, 0)
            chosen = log_probs.flatten(1).gather(1, at)
            nodes = nodes._replace(log_probs=torch.where(below, chosen, nodes.log_probs))
        return nodes.log_probs
