"""Constraint: the protocol of everything that says which tokens may follow.

A state is one integer, and a constraint has no position of its own. To fork a beam, copy its state;
to rewind, use an older state. So `allowed` returns the masks of all nodes of a draft tree in one
call, in any order.

`TitleTrie` (titles in all their tokenisations) and `GrammarConstraint` (texts of a grammar)
implement it.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

DEAD = -1
"""The state after a token that is not allowed; no token may follow."""

ROOT = -1
"""In `tree_states`, the parent of nodes that follow the starting state."""


class Constraint(Protocol):
    """Which tokens may follow. A sequence is complete when it has an end token.

    Equal states have the same continuations.
    """

    @property
    def vocabulary_size(self) -> int:
        """Number of tokens, V."""

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Tokens that end a sequence, allowed where it may end; no token may follow them."""

    def initial(self) -> int:
        """The state of the empty sequence."""

    def allowed(self, states: ArrayLike) -> NDArray[np.bool_]:
        """(n, V) tokens that may follow (n,) states; each leads to some complete sequence."""

    def advance(self, states: ArrayLike, tokens: ArrayLike) -> NDArray[np.int64]:
        """(n,) states after (n,) tokens; `DEAD` for a token that is not allowed."""

    def merge_keys(self, states: ArrayLike) -> NDArray[np.int64]:
        """(n,) keys of (n,) states; among beams with equal keys, only the best goes on."""

    def forced(self, states: ArrayLike) -> list[list[int]]:
        """For each state, tokens with which every continuation may begin; often empty.

        They need no forward pass.
        """


def tree_states(
    constraint: Constraint, tokens: ArrayLike, parents: ArrayLike, start: int | None = None
) -> NDArray[np.int64]:
    """States at all nodes of a draft tree; `constraint.allowed(states)` gives their masks.

    Args:
        constraint: the constraint.
        tokens: (n,) token of each node.
        parents: (n,) parent of each node, an earlier node or `ROOT`.
        start: state above the tree; the initial state if None.

    Returns:
        (n,) states, `DEAD` at and below a node that is not allowed.

    Raises:
        ValueError: a parent that is not before its node.
    """
    tokens, parents = np.asarray(tokens, np.int64), np.asarray(parents, np.int64)
    late = np.flatnonzero((parents >= np.arange(len(parents))) | (parents < ROOT))
    if len(late):
        raise ValueError(f"node {late[0]} has parent {parents[late[0]]}; parents come first")
    states = np.empty(len(tokens) + 1, np.int64)
    states[ROOT] = constraint.initial() if start is None else start
    depth = np.zeros(len(tokens) + 1, np.int64)
    for node, parent in enumerate(parents.tolist()):
        depth[node] = depth[parent] + 1
    for level in range(1, int(depth.max(initial=0)) + 1):
        nodes = np.flatnonzero(depth == level)
        states[nodes] = constraint.advance(states[parents[nodes]], tokens[nodes])
    return states[:-1]
