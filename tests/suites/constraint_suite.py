"""What every constraint over text promises; a constraint gets these tests by a subclass."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.text.constraint import DEAD, check_constraint

ROOT = -1


class ConstraintSuite:
    """Tests of one constraint; a subclass has `make`, which makes it anew."""

    forces_at_most_one = False  # whether only ends and forced tokens have no alternative

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
            assert mask.sum() > 1 or not self.forces_at_most_one
            token = int(rng.choice(np.flatnonzero(mask)))
            state = int(found[token])
        assert token in constraint.end_tokens  # only an end leads to where nothing follows
