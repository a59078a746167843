"""What every constraint over text promises; a constraint gets these tests by a subclass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from recsys.text.constraint import DEAD, Constraint

ROOT = -1


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

    def random_tree(self, constraint: Any, rng: Any, size: int) -> Any:
        """A tree whose nodes are mostly allowed: tokens, parents and states."""
        tokens: list[int] = []
        parents: list[int] = []
        states: list[int] = []
        for _ in range(size):
            parent = int(rng.integers(ROOT, len(tokens)))
            state = constraint.initial() if parent == ROOT else states[parent]
            options = np.flatnonzero(constraint.allowed([state])[0])
            if not len(options) or rng.random() < 0.15:
                options = np.arange(constraint.vocabulary_size)
            token = int(rng.choice(options))
            tokens.append(token)
            parents.append(parent)
            states.append(int(constraint.advance([state], [token])[0]))
        return tokens, parents, np.asarray(states, np.int64)

    @given(seed=st.integers(0, 10_000), size=st.integers(0, 25))
    @settings(max_examples=60, deadline=None)
    def test_masks_in_any_order_equal_a_replay_from_the_root(self, seed: int, size: int) -> None:
        rng = np.random.default_rng(seed)
        constraint = self.make()
        tokens, parents, states = self.random_tree(constraint, rng, size)
        order = rng.permutation(size)
        masks = np.empty((size, constraint.vocabulary_size), np.bool_)
        masks[order] = constraint.allowed(states[order])
        assert masks.shape == (size, constraint.vocabulary_size)
        for node in range(size):
            path, at = [], node
            while at != ROOT:
                path.append(tokens[at])
                at = parents[at]
            fresh = self.make()
            state = fresh.initial()
            for token in path[::-1]:
                state = int(fresh.advance([state], [token])[0])
            np.testing.assert_array_equal(masks[node], fresh.allowed([state])[0])

    def test_it_passes_the_check_of_constraints(self) -> None:
        check_constraint(self.make())

    def test_nothing_is_allowed_at_a_dead_state(self) -> None:
        constraint = self.make()
        assert not constraint.allowed([DEAD]).any()
        ended = constraint.advance([DEAD, DEAD], [3, constraint.end_tokens[0]])
        assert ended.tolist() == [DEAD, DEAD]
        assert constraint.forced([DEAD]) == [[]]
        assert constraint.allowed([]).shape == (0, constraint.vocabulary_size)

    @given(seed=st.integers(0, 10_000))
    @settings(max_examples=60, deadline=None)
    def test_allowed_and_forced_tokens_lead_to_a_text(self, seed: int) -> None:
        constraint, rng = self.make(), np.random.default_rng(seed)
        everything, state = np.arange(constraint.vocabulary_size), constraint.initial()
        while True:
            for token in constraint.forced([state])[0]:
                assert constraint.allowed([state])[0, token]
                state = int(constraint.advance([state], [token])[0])
            mask = constraint.allowed([state])[0]
            found = constraint.advance(np.full(len(everything), state), everything)
            np.testing.assert_array_equal(found != DEAD, mask)
            if not mask.any():
                break
            token = int(rng.choice(np.flatnonzero(mask)))
            state = int(found[token])
        assert token in constraint.end_tokens  # only an end leads to where nothing follows
