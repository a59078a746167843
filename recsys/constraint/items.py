"""ItemConstraint: the item trie behind the protocol that text has, for search that mixes them.

Beam search over items alone has its own way (`recsys.decoding.beam`): all items have L tokens, so
it needs no end token and no masks over a vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from recsys.constraint.protocol import DEAD

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from recsys.constraint.trie import ItemTrie


@dataclass(frozen=True)
class ItemConstraint:
    """Token sequences of items, each followed by an end token.

    States are the trie's; behind the end token of leaf s lies `trie.num_states` + s.

    Attributes:
        trie: the items.
        vocabulary_size: V; above every token of the trie.
        end_token: ends a sequence.
    """

    trie: ItemTrie
    vocabulary_size: int
    end_token: int

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """The end token."""
        return (self.end_token,)

    def initial(self) -> int:
        """The root."""
        return 0

    def allowed(self, states: ArrayLike) -> NDArray[np.bool_]:
        """(n, V) tokens of the children; the end token at a leaf."""
        states = np.asarray(states, np.int64)
        mask = np.zeros((len(states), self.vocabulary_size), np.bool_)
        for line, state in zip(mask, states.tolist(), strict=True):
            line[self._tokens(state)] = True
        return mask

    def advance(self, states: ArrayLike, tokens: ArrayLike) -> NDArray[np.int64]:
        """(n,) children."""
        states, tokens = np.asarray(states, np.int64), np.asarray(tokens, np.int64)
        found = np.full(len(states), DEAD, np.int64)
        for i, (state, token) in enumerate(zip(states.tolist(), tokens.tolist(), strict=True)):
            places = np.flatnonzero(self._tokens(state) == token)
            if len(places):
                leaf = state >= self._leaves
                first = self.trie.num_states + state if leaf else self.trie.first_child[state]
                found[i] = first + places[0]
        return found

    def merge_keys(self, states: ArrayLike) -> NDArray[np.int64]:
        """(n,) the states themselves."""
        return np.asarray(states, np.int64)

    def forced(self, states: ArrayLike) -> list[list[int]]:
        """Tokens of states with a single child, one after the other."""
        runs = []
        for state in np.asarray(states, np.int64).tolist():
            run: list[int] = []
            while len(tokens := self._tokens(state)) == 1:
                run.append(int(tokens[0]))
                state = int(self.advance([state], tokens)[0])
            runs.append(run)
        return runs

    @property
    def _leaves(self) -> int:
        """The first leaf."""
        return self.trie.depth_start[-2]

    def _tokens(self, state: int) -> NDArray[np.int64]:
        """Tokens that may follow, ascending."""
        if not 0 <= state < self.trie.num_states:
            return np.zeros(0, np.int64)
        if state >= self._leaves:
            return np.asarray([self.end_token])
        first, last = self.trie.first_child[state : state + 2].tolist()
        return self.trie.token[first:last].astype(np.int64)
