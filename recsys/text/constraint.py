"""Constraint: the protocol of everything that says which tokens may follow.

A state is one integer, and a constraint has no position of its own. To fork a beam, copy its state;
to rewind, use an older state. So `allowed` returns the masks of all nodes of a draft tree in one
call, in any order.

`TitleTrie` (titles in all their tokenisations) and `GrammarConstraint` (texts of a grammar)
implement it. `check_constraint` checks one of your own.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def check_constraint(
    constraint: Constraint, *, walks: int = 50, longest: int = 100, seed: int = 0
) -> None:
    """Check a constraint of your own by random walks: that it is deterministic and has no dead end.

    Args:
        constraint: any implementation of the protocol.
        walks: texts that are written at random.
        longest: tokens after which a walk ends.
        seed: of the walks.

    Raises:
        ValueError: a rule that it breaks, with the tokens that lead there.
    """
    rng, every = np.random.default_rng(seed), np.arange(constraint.vocabulary_size)
    ends, seen = set(constraint.end_tokens), list[tuple[list[int], int, NDArray[np.bool_]]]()

    def require(holds: bool, rule: str, path: Sequence[int]) -> None:
        if not holds:
            raise ValueError(f"{type(constraint).__name__}: {rule}, after tokens {list(path)}")

    for _ in range(walks):
        path, state = list[int](), constraint.initial()
        while len(path) < longest:
            mask = np.asarray(constraint.allowed([state, DEAD]))
            require(mask.shape == (2, len(every)), f"masks have shape {mask.shape}", path)
            require(not mask[1].any(), "a token may follow the state DEAD", path)
            seen.append((path.copy(), state, mask[0].copy()))
            ended = bool(path) and path[-1] in ends
            dead_end = "a token may follow an end token" if ended else "no token may follow"
            require(bool(mask[0].any()) != ended, dead_end, path)
            after = constraint.advance(np.full(len(every), state), every)
            wrong = np.flatnonzero((after != DEAD) != mask[0])
            require(not len(wrong), f"advance and allowed differ for tokens {wrong[:3]}", path)
            if ended:
                break
            begun = state
            for token in constraint.forced([state])[0]:
                allowed = constraint.allowed([begun])[0, token]
                require(bool(allowed), f"the forced token {token} may not follow", path)
                begun = int(constraint.advance([begun], [token])[0])
            token = int(rng.choice(np.flatnonzero(mask[0])))
            path.append(token)
            state = int(after[token])
    # The same again, in another order, from the states and from the root.
    order = rng.permutation(len(seen))
    masks = constraint.allowed([seen[place][1] for place in order])
    for place, mask in zip(order.tolist(), masks, strict=True):
        path, _, before = seen[place]
        require(bool((mask == before).all()), "a state's mask has changed", path)
        state = constraint.initial()
        for token in path:
            state = int(constraint.advance([state], [token])[0])
        again = constraint.allowed([state])[0]
        require(bool((again == before).all()), "the same tokens lead to another mask", path)
