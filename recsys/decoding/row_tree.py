"""RowTree: the prefixes of given rows as nodes of a tree, and the rows' scores from its logits.

The rows of a request share prefixes, so there is one node for each distinct prefix. Complete
sequences need no node, because their last token is scored by their parent's logits. The tree is
built with NumPy: rows are given on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from recsys.constraint import ItemTrie
from recsys.constraint.transitions import DeviceTrie
from recsys.decoding.expand import TokenLogits
from recsys.decoding.tree import NO_TOKEN, ROOT, TokenTree
from recsys.transfers import Upload


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
        known: (B, C) bool, False for padding and for rows that did not fit into `nodes`.
    """

    states: torch.Tensor
    tokens: torch.Tensor
    parents: torch.Tensor
    depth: torch.Tensor
    real: torch.Tensor
    places: torch.Tensor
    symbols: torch.Tensor
    known: torch.Tensor

    @classmethod
    def of(
        cls,
        trie: DeviceTrie,
        rows: Sequence[ArrayLike],
        nodes: int | None,
        upload: Upload,
    ) -> RowTree:
        """The tree of `rows`.

        Args:
            trie: the catalog.
            rows: trie rows of each request, most wanted first.
            nodes: exactly so many a request, padding included: rows are taken in their order while
                their prefixes fit, and the first that does not ends it. None for all rows.
            upload: takes the tensors to the trie's device, with the caller's `send`.

        Raises:
            ValueError: fewer nodes than none, or a row that the trie does not have.
        """
        if nodes is not None and nodes < 0:
            raise ValueError(f"nodes must be at least 0, got {nodes}")
        source = trie.source
        row, real = _padded(rows, source.num_rows)
        path = _paths(source, row)
        prefixes = _Prefixes.of(path[..., 1:-1], real, source.num_states)
        known = real if nodes is None else real & (prefixes.new.sum(-1).cumsum(-1) <= nodes)
        states, parents, positions = prefixes.numbered(known, nodes)
        real_node = states > 0
        depths = np.searchsorted(source.depth_start, states, side="right") - 1

        def on_device(array: NDArray[np.generic]) -> torch.Tensor:
            return upload.add(np.ascontiguousarray(array))

        return cls(
            states=on_device(states),
            tokens=on_device(np.where(real_node, source.alphabet[source.symbol[states]], NO_TOKEN)),
            parents=on_device(parents),
            depth=on_device(depths.clip(min=1)),
            real=on_device(real_node),
            places=on_device(positions),
            symbols=on_device(source.symbol[path[..., 1:]].astype(np.int64)),
            known=on_device(known),
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

        The logits are (B, 1 + W), those of the prompt and of the nodes.
        """
        values, total = logits
        size = values.shape[-1]
        flat = (self.places * size + self.symbols).flatten(1)
        chosen = values.flatten(1).gather(1, flat).view(self.places.shape)
        steps = chosen - total.gather(1, self.places.flatten(1)).view(self.places.shape)
        score = steps[..., 0]
        for step in steps.unbind(-1)[1:]:  # add up in the order of a search, for the same bits
            score = score + step
        return score.masked_fill(~self.known, -torch.inf)


def _padded(
    rows: Sequence[ArrayLike], num_rows: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """(B, C) rows, padded with 0 behind the end of each list, and (B, C) which are real."""
    lists = [np.asarray(r, np.int64).reshape(-1) for r in rows]
    lengths = np.array([len(r) for r in lists], np.int64)
    real = np.arange(lengths.max(initial=0)) < lengths[:, None]
    row = np.zeros(real.shape, np.int64)
    row[real] = np.concatenate([np.zeros(0, np.int64), *lists])
    if (bad := (row < 0) | (row >= num_rows)).any():
        raise ValueError(
            f"rows of request {int(bad.any(1).argmax())}: must lie in 0 .. {num_rows - 1}"
        )
    return row, real


def _paths(trie: ItemTrie, row: NDArray[np.int64]) -> NDArray[np.int64]:
    """(B, C, L + 1) states from the root to the leaf of each row."""
    levels = trie.num_levels
    path = np.zeros((*row.shape, levels + 1), np.int64)
    for depth in range(1, levels):
        starts = trie.starts_at(depth)
        path[..., depth] = np.searchsorted(starts, row.astype(starts.dtype), side="right") - 1
        path[..., depth] += trie.depth_start[depth]
    path[..., levels] = row + trie.depth_start[levels]
    return path


@dataclass(frozen=True)
class _Prefixes:
    """The distinct prefixes of 1 .. L - 1 tokens of all requests, by request and state.

    Attributes:
        shape: B, C, L - 1.
        state: (U,) trie state of each; -1 for what stands for padding.
        first: (U,) where each first stands in the flat (B, C, L - 1) array, in the order of rows.
        which: (B * C * (L - 1),) the distinct prefix that stands at each place.
        new: (B, C, L - 1) 1 where a prefix stands for the first time, else 0.
    """

    shape: tuple[int, ...]
    state: NDArray[np.int64]
    first: NDArray[np.int64]
    which: NDArray[np.int64]
    new: NDArray[np.int64]

    @classmethod
    def of(cls, states: NDArray[np.int64], real: NDArray[np.bool_], num_states: int) -> _Prefixes:
        """Find them among (B, C, L - 1) states, of the real rows only."""
        key = np.arange(len(states))[:, None, None] * num_states + states
        distinct, first, which = np.unique(
            np.where(real[..., None], key, -1), return_index=True, return_inverse=True
        )
        new = np.zeros(key.shape, np.int64)
        new.reshape(-1)[first] = distinct >= 0
        state = np.where(distinct >= 0, distinct % num_states, -1)
        return cls(states.shape, state, first, which.reshape(-1), new)

    def numbered(
        self, known: NDArray[np.bool_], nodes: int | None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Number the prefixes of the (B, C) known rows within their request, in W = `nodes` nodes.

        Returns:
            (B, W) states, 0 for padding; (B, W) parents, `ROOT` for the prompt and for padding; and
            (B, C, L) places of each row's prefixes, with the prompt's, 0, first.
        """
        batch, width, steps = self.shape
        owner = self.first // max(1, width * steps)
        is_node = (self.state >= 0) & known.reshape(-1)[self.first // max(1, steps)]
        begin = np.searchsorted(owner[is_node], np.arange(batch + 1))  # requests lie in order
        number = np.cumsum(is_node) - 1
        node = number - begin[owner] if len(owner) else number
        nodes_of = np.zeros((batch, width, steps + 1), np.int64)
        nodes_of[..., 1:] = np.where(is_node, node + 1, 0)[self.which].reshape(self.shape)
        sizes = np.diff(begin)
        real = np.arange(int(sizes.max(initial=0)) if nodes is None else nodes) < sizes[:, None]
        states, parents = np.zeros(real.shape, np.int64), np.full(real.shape, ROOT, np.int64)
        states[real] = self.state[is_node]
        parents[real] = nodes_of[..., :-1].reshape(-1)[self.first[is_node]] - 1
        return states, parents, nodes_of
