"""What a constraint on token sequences is, whatever it is made of.

A state is one integer. Nothing in a constraint moves: to fork a beam, copy its state; to rewind,
use an older one. So states may be asked about at any node of a draft tree, in any order, and
`allowed` gives the masks of a whole tree in one call.

Three things implement it: items' token sequences (`ItemConstraint`), titles in all their
tokenisations (`TitleTrie`), and texts of a grammar (`GrammarConstraint`).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

DEAD = -1
"""The state behind a token that is not allowed; it allows nothing."""

ROOT = -1
"""In `tree_states`, the parent of a node that follows the starting state."""


class Constraint(Protocol):
    """Which tokens may follow. A sequence is whole once an end token has been taken.

    Equal states have the same continuations.
    """

    @property
    def vocabulary_size(self) -> int:
        """V, tokens."""

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Tokens that end a sequence; allowed where it may end, and nothing is allowed behind."""

    def initial(self) -> int:
        """The state of the empty sequence."""

    def allowed(self, states: ArrayLike) -> NDArray[np.bool_]:
        """(n, V) tokens that may follow each of (n,) states; every one leads to some whole."""

    def advance(self, states: ArrayLike, tokens: ArrayLike) -> NDArray[np.int64]:
        """(n,) states behind (n,) tokens; `DEAD` for a token that is not allowed."""

    def merge_keys(self, states: ArrayLike) -> NDArray[np.int64]:
        """(n,) what each of (n,) states stands for; of beams with equal keys one need go on."""

    def forced(self, states: ArrayLike) -> list[list[int]]:
        """Of each state, the run of tokens with which every continuation may be begun.

        They need no forward. Often empty.
        """


def tree_states(
    constraint: Constraint, tokens: ArrayLike, parents: ArrayLike, start: int | None = None
) -> NDArray[np.int64]:
    """States at all nodes of a draft tree; `constraint.allowed` of them is the tree's mask.

    Args:
        constraint: of the tree's sequences.
        tokens: (n,) one a node.
        parents: (n,) an earlier node each, or `ROOT`.
        start: state that the tree grows from; the initial one if None.

    Returns:
        (n,) states, `DEAD` at and below a node that is not allowed.

    Raises:
        ValueError: a parent that does not come before its node.
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
