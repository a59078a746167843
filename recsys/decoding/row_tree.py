"""RowTree: the prefixes of given rows as nodes of a tree, and their scores read from its logits.

The rows of a request share prefixes, so there is a node for each distinct one; whole sequences need
none, since their last token is in their parent's logits. Arrays come from NumPy: rows are named on
the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from recsys.constraint.transitions import DeviceTrie
from recsys.decoding.expand import TokenLogits
from recsys.decoding.tree import NO_TOKEN, ROOT, TokenTree


@dataclass(frozen=True)
class RowTree:
    """Prefixes of the rows of each request, each prefix once; B requests, W nodes, C rows.

    Nodes of a request lie by depth, parents before children, then padding.

    Attributes:
        states: (B, W) int64 trie states.
        tokens: (B, W) int64 that lead into them; `NO_TOKEN` for padding.
        parents: (B, W) int64 places among these nodes; `ROOT` for the prompt.
        depth: (B, W) int64; 1 below the prompt.
        real: (B, W) bool, False for padding.
        places: (B, C, L) int64 for each row the prefixes of 0 .. L - 1 tokens: 0 is the prompt,
            place + 1 a node.
        symbols: (B, C, L) int64 the row's tokens, as places in the trie's alphabet.
        known: (B, C) bool, False for padding and for rows that `nodes` left no room for.
        free: (B, C, L) bool, steps behind an end, which cost nothing; None where none can.
    """

    states: torch.Tensor
    tokens: torch.Tensor
    parents: torch.Tensor
    depth: torch.Tensor
    real: torch.Tensor
    places: torch.Tensor
    symbols: torch.Tensor
    known: torch.Tensor
    free: torch.Tensor | None

    @classmethod
    def of(cls, trie: DeviceTrie, rows: Sequence[ArrayLike], nodes: int | None = None) -> RowTree:
        """The tree of `rows`.

        Args:
            trie: the catalog.
            rows: trie rows of each request, most wanted first.
            nodes: exactly so many a request, padding included: rows are taken in their order while
                their prefixes fit, and the first that does not ends it. None for all rows.

        Raises:
            ValueError: fewer nodes than none, or a row that the trie does not have.
        """
        if nodes is not None and nodes < 0:
            raise ValueError(f"nodes must be at least 0, got {nodes}")
        source, levels = trie.source, trie.source.num_levels
        lists = [np.asarray(r, np.int64).reshape(-1) for r in rows]
        batch, width = len(lists), max(map(len, lists), default=0)
        real = np.arange(width) < np.array([len(r) for r in lists], np.int64).reshape(-1, 1)
        row = np.zeros((batch, width), np.int64)
        row[real] = np.concatenate([np.zeros(0, np.int64), *lists])
        if (bad := (row < 0) | (row >= source.num_rows)).any():
            raise ValueError(
                f"rows of request {int(bad.any(1).argmax())}: must lie in 0 .. "
                f"{source.num_rows - 1}"
            )
        # (B, C, L + 1) states from the root to the leaf
        path = np.zeros((batch, width, levels + 1), np.int64)
        for depth in range(1, levels):
            starts = source.starts_at(depth)
            path[..., depth] = np.searchsorted(starts, row.astype(starts.dtype), side="right") - 1
            path[..., depth] += source.depth_start[depth]
        path[..., levels] = row + source.depth_start[levels]
        # Each prefix once, and where it first stands: in the order of the rows.
        key = np.arange(batch)[:, None, None] * source.num_states + path[..., 1:levels]
        distinct, first, which = np.unique(
            np.where(real[..., None], key, -1), return_index=True, return_inverse=True
        )
        new = np.zeros(key.shape, np.int64)
        new.reshape(-1)[first] = distinct >= 0
        needed = new.sum(-1).cumsum(-1)
        known = real if nodes is None else real & (needed <= nodes)
        owner = first // max(1, width * (levels - 1))
        kept = (distinct >= 0) & known.reshape(-1)[first // max(1, levels - 1)]
        begin = np.searchsorted(owner[kept], np.arange(batch + 1))  # requests lie in order
        number = np.cumsum(kept) - 1
        place = number - begin[owner] if len(distinct) else number
        of_rows = np.zeros((batch, width, levels), np.int64)
        of_rows[..., 1:] = np.where(kept, place + 1, 0)[which].reshape(key.shape)
        widths = np.diff(begin)
        room = int(widths.max(initial=0)) if nodes is None else nodes
        real_node = np.arange(room) < widths[:, None]
        states = np.zeros((batch, room), np.int64)
        parents = np.full((batch, room), ROOT, np.int64)
        states[real_node] = distinct[kept] % source.num_states
        above = of_rows[..., :-1].reshape(-1)  # of the prefixes' parents, as `key` is laid out
        parents[real_node] = above[first[kept]] - 1
        depths = np.searchsorted(source.depth_start, states, side="right") - 1
        free = None
        if source.end is not None:
            ended = source.alphabet[source.symbol[path]] == source.end
            free = (ended & (path > 0))[..., :-1]

        def there(array: NDArray[np.generic]) -> torch.Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(trie.device)

        return cls(
            there(states),
            there(np.where(real_node, source.alphabet[source.symbol[states]], NO_TOKEN)),
            there(parents),
            there(depths.clip(min=1)),
            there(real_node),
            there(of_rows),
            there(source.symbol[path[..., 1:]].astype(np.int64)),
            there(known),
            None if free is None else there(free),
        )

    @property
    def width(self) -> int:
        """W."""
        return self.states.shape[1]

    def add_to(self, tree: TokenTree) -> int:
        """Add the nodes to a tree, for its next pass; returns the number of the first."""
        parents = self.parents + (self.parents != ROOT) * tree.nodes
        return tree.add(self.tokens, parents, self.depth, within=max(0, self.places.shape[2] - 2))

    def scores(self, logits: TokenLogits) -> torch.Tensor:
        """(B, C) log-probabilities of the rows, -inf for those not `known`.

        Args:
            logits: (B, 1 + W) of the prompt and of the nodes.
        """
        values, total = logits
        size = values.shape[-1]
        flat = (self.places * size + self.symbols).flatten(1)
        chosen = values.flatten(1).gather(1, flat).view(self.places.shape)
        steps = chosen - total.gather(1, self.places.flatten(1)).view(self.places.shape)
        if self.free is not None:
            steps = steps.masked_fill(self.free, 0.0)
        score = steps[..., 0]
        for step in steps.unbind(-1)[1:]:  # in the order of a search, for the same bits
            score = score + step
        return score.masked_fill(~self.known, -torch.inf)
