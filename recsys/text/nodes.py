"""The nodes of a search for texts: a shared-prefix cache that is kept clean.

The beams of a request form a tree below its prompt. Each token takes one slot, however many beams
share it, and most nodes soon have no beam below them: the beams of a long text share a trunk. Every
few steps the dead are therefore **collected**: live is what some beam still sees (mark), the rest
is forgotten (prune), and the live move together, oldest first (compact). So the trunk keeps its
slots for good and only the young end of the tree is ever copied. What is held is the prompt, about
one slot a generated token, and the last few steps of every beam: near greedy search, where one
cache a beam takes K times as much.

The slots come from a budget that is allocated once; should the live nodes ever outgrow it, as they
do where beams hardly differ and share little, the cache moves to a larger one (both are held while
it does). Knows no scores and no rules of search.

After: Chan et al., Efficient Beam Search for LLMs Using Trie-Based Decoding (EMNLP 2025).
"""

from __future__ import annotations

import torch

from recsys.decoding.tree import TokenTree
from recsys.models.cache import whole_blocks
from recsys.models.mask import tree_mask


class TextNodes:
    """The nodes behind the prompts: where they lie and which of them each beam sees.

    Attributes:
        count: slots in use, one number for the batch.
        collections: times that dead slots were collected.
    """

    def __init__(self, tree: TokenTree, num_beams: int) -> None:
        """No nodes yet, below the prompts of `tree`."""
        self.tree, self.width = tree, num_beams
        self.count = self.collections = 0
        batch, room, device = len(tree.lengths), self.room, tree.lengths.device
        self._seen = torch.zeros((batch, num_beams, room), dtype=torch.bool, device=device)
        self._depth = torch.zeros((batch, room), dtype=torch.int64, device=device)

    @property
    def room(self) -> int:
        """Node slots."""
        return self.tree.cache.slots - self.tree.cache.prompt

    def forward(self, tokens: torch.Tensor, parents: torch.Tensor, depth: int) -> torch.Tensor:
        """Run the beams' last tokens, each in a slot of its own.

        Args:
            tokens: (B, K) int64.
            parents: (B, K) places in the step before.
            depth: of these tokens, 1 below the prompt.

        Returns:
            (B, K, V) logits.
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

    def keep(self, requests: torch.Tensor) -> None:
        """Go on with some requests of the batch only; (b,) places."""
        self.tree.keep(requests)
        self._seen, self._depth = self._seen[requests], self._depth[requests]

    def collect(self, parents: torch.Tensor) -> list[int]:
        """Forget every node that no beam descends from, and move the others together.

        Args:
            parents: (B, K) the beams' places in the last step that was run.

        Returns:
            Live nodes of each request.
        """
        live = pick(self._seen, parents).any(1)[:, : self.count]
        first_dead = live.long().cumprod(1).sum(1)
        counts: list[int]
        counts, trunk = torch.stack([live.sum(1), first_dead]).tolist()
        self.count, start = max(counts), min(trunk)
        # Live before dead, oldest first. Requests with fewer live nodes keep some dead ones: nobody
        # sees them.
        order = (~live).long().argsort(dim=1, stable=True)[:, start : self.count]
        cache = self.tree.cache
        cache.gather(cache.prompt + order, cache.prompt + start)
        here = slice(start, self.count)
        self._depth[:, here] = self._depth.gather(1, order)
        self._seen[:, :, here] = self._seen.gather(2, order[:, None].expand(-1, self.width, -1))
        self._seen[:, :, self.count :] = False
        self.collections += 1
        return counts

    def reserve(self, nodes: int) -> None:
        """Have room for `nodes` nodes; where that is more than now, a quarter more at least."""
        if nodes > self.room:
            self.tree.move(max(nodes, self.room * 5 // 4))
            more = self.room - self._depth.shape[1]
            self._seen = torch.nn.functional.pad(self._seen, (0, more))
            self._depth = torch.nn.functional.pad(self._depth, (0, more))


def node_budget(num_beams: int, max_new_tokens: int, collect_every: int) -> int:
    """Node slots to allocate: a trunk, live branches of it, and the nodes of one period.

    Branches were 2 to 4 nodes a beam on models of perplexity 2.5 to 36 (`benchmarks/text_memory`).
    """
    return max_new_tokens + num_beams * (6 + collect_every)


def pick(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """(B, n, X) rows of (B, N, X) values at (B, n) places."""
    return values.gather(1, places.unsqueeze(-1).expand(-1, -1, values.shape[-1]))
