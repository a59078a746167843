"""What every constraint over text promises; a constraint gets these tests by a subclass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recsys.text.constraint import DEAD, Constraint


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


class ConstraintSuite:
    """Tests of one constraint; a subclass has `make`, which makes it anew."""

    def make(self) -> Any:
        """The constraint under test, without any state that was reached before."""
        raise NotImplementedError

    def test_it_passes_the_check_of_constraints(self) -> None:
        check_constraint(self.make())

    def test_nothing_is_allowed_at_a_dead_state(self) -> None:
        constraint = self.make()
        assert not constraint.allowed([DEAD]).any()
        ended = constraint.advance([DEAD, DEAD], [3, constraint.end_tokens[0]])
        assert ended.tolist() == [DEAD, DEAD]
        assert constraint.forced([DEAD]) == [[]]
        assert constraint.allowed([]).shape == (0, constraint.vocabulary_size)
