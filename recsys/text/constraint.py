"""Constraint: the protocol of everything that says which tokens may follow.

A state is one integer, and a constraint has no position of its own. To fork a beam, copy its state;
to rewind, use an older state. So `allowed` returns the masks of all nodes of a draft tree in one
call, in any order.

`GrammarConstraint` (texts of a grammar) and `TitleConstraint` (titles of items) implement it.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

DEAD = -1
"""The state after a token that is not allowed; no token may follow."""


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
