"""TextNodes: nodes of a beam search over texts, in a shared cache whose dead slots are collected.

The beams form a tree below the prompt. Each node takes one slot, however many beams
share it. Most nodes soon have no beam below them, since the beams of a long text share a trunk. So
every few steps the dead nodes are collected: nodes that some beam attends to are live (mark), the
others are dropped (prune), and the live nodes move together, oldest first (compact). The trunk
keeps its slots, and only the recent part of the tree is copied. The cache holds the prompt, about
one slot per generated token, and the last few steps of every beam. That is close to greedy search;
one cache per beam would take K times as much.

The slots are allocated once. If the live nodes need more, because the beams share little, the cache
moves to a larger storage; meanwhile both are in memory.

After Chan et al., Efficient Beam Search for LLMs Using Trie-Based Decoding (EMNLP 2025).
"""

from __future__ import annotations

import torch

from recsys.decoding.tree import TokenTree
from recsys.models.cache import whole_blocks
from recsys.models.mask import tree_mask


class TextNodes:
    """The nodes after a prompt: their slots, and which of them each beam attends to.

    Attributes:
        count: number of slots in use.
    """

    def __init__(self, tree: TokenTree, num_beams: int) -> None:
        """Start without nodes, below the prompt of `tree`, which has no other."""
        self.tree, self.width = tree, num_beams
        self.count = 0
        room, device = self.room, tree.lengths.device
        self._seen = torch.zeros((1, num_beams, room), dtype=torch.bool, device=device)
        self._depth = torch.zeros((1, room), dtype=torch.int64, device=device)

    @property
    def room(self) -> int:
        """Number of node slots."""
        return self.tree.cache.slots - self.tree.cache.prompt

    def forward(self, tokens: torch.Tensor, parents: torch.Tensor, depth: int) -> torch.Tensor:
        """Run the (1, K) last tokens of the beams, each in a slot of its own; (1, K, V) logits.

        `parents` are the beams' places in the step before; `depth` is 1 for the first token.
        """
        model, cache = self.tree.model, self.tree.cache
        slot = torch.arange(self.count, self.count + self.width, device=tokens.device)
        self._seen = pick(self._seen, parents)
        self._seen[:, torch.arange(self.width, device=tokens.device), slot] = True
        self._depth[:, slot] = depth
        self.count += self.width
        nodes = whole_blocks(self.count)
        here = torch.full_like(tokens, depth)

        def mask(window: int | None) -> torch.Tensor:
            return tree_mask(
                self._seen[:, :, :nodes],
                self.tree.lengths,
                cache.prompt,
                depth=here,
                node_depth=self._depth[:, :nodes],
                window=window,
                dtype=model.dtype,
            )

        logits = model.forward(
            tokens,
            self.tree.lengths[:, None] + here - 1,
            mask,
            cache,
            write=(cache.prompt + slot).expand_as(tokens),
            view=cache.prompt + nodes,
        )
        self.tree.note(logits.amax(-1))
        return logits

    def collect(self, parents: torch.Tensor) -> int:
        """Drop all nodes without a beam below them, and move the others together.

        `parents` are the beams' places in the last step that was run. Returns the number of live
        nodes.
        """
        live = pick(self._seen, parents).any(1)[:, : self.count]
        first_dead = live.long().cumprod(1).sum(1)
        self.count, start = torch.cat([live.sum(1), first_dead]).tolist()
        order = live[0].nonzero()[start:, 0][None]  # oldest first, behind the trunk
        cache = self.tree.cache
        cache.gather(cache.prompt + order, cache.prompt + start)
        here = slice(start, self.count)
        self._depth[:, here] = self._depth.gather(1, order)
        self._seen[:, :, here] = self._seen.gather(2, order[:, None].expand(-1, self.width, -1))
        self._seen[:, :, self.count :] = False
        return self.count

    def reserve(self, nodes: int) -> None:
        """Make room for `nodes` nodes; the cache grows by at least a quarter."""
        if nodes > self.room:
            self.tree.move(max(nodes, self.room * 5 // 4))
            more = self.room - self._depth.shape[1]
            self._seen = torch.nn.functional.pad(self._seen, (0, more))
            self._depth = torch.nn.functional.pad(self._depth, (0, more))


def node_budget(num_beams: int, max_new_tokens: int, collect_every: int) -> int:
    """Node slots to allocate: a trunk, its live branches, and the nodes between two collections.

    Branches had 2 to 4 nodes per beam on models of perplexity 2.5 to 36
    (`git show e415fcb:benchmarks/text_memory.py` prints the measurement).
    """
    return max_new_tokens + num_beams * (6 + collect_every)


def pick(values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """(B, n, X) rows of (B, N, X) values at (B, n) indices."""
    return values.gather(1, positions.unsqueeze(-1).expand(-1, -1, values.shape[-1]))
