"""TitleTrie: items by their titles, in every tokenisation.

The catalog is a byte trie, and so is the vocabulary. A token may follow where the vocabulary's
trie has a path from its root to the token and the catalog's trie has the same path from the text
so far; both are walked together, so that titles share the work of their prefixes and tokens that of
theirs. Behind each token the walk in the vocabulary starts over: a state is a node of the
catalog's trie alone. What follows a state is found when it is first asked for, and kept.

    catalog  H-e-a-t        tokens  H He a at t        state "He": at -> "Heat", a -> "Hea"

After: Koo et al., Automata-based constraints for language model decoding (COLM 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from recsys.text.beam import BeamSettings, Texts, generate_text
from recsys.text.byte_trie import NOWHERE, ByteTrie, spread
from recsys.text.constraint import DEAD
from recsys.text.token_trie import TokenTrie


@dataclass(frozen=True, eq=False)
class TitleTrie:
    """A `Constraint`: the titles of items, each followed by an end token.

    >>> tokens = TokenTrie.build([b"H", b"He", b"at", b""], end_tokens=[3])
    >>> titles = TitleTrie.build(["Heat", "Hat"], tokens)
    >>> titles.allowed([titles.initial()])[0].nonzero()[0].tolist()
    [0, 1]
    >>> (state,) = titles.advance(titles.advance([0], [1]), [2])
    >>> titles.items_of(state).tolist()
    [0]

    States are nodes of `trie`; behind an end token at node s lies `trie.num_nodes` + s. Equal
    states are equal texts, whatever their tokens.

    Attributes:
        trie: bytes of the titles.
        tokens: the vocabulary.
        items: items with a title, by the node at which it ends, ascending inside a node.
        item_start: (nodes + 1,) where each node's items begin in `items`.
        alive: (nodes,) whether some title can still be written from there.
        stands_for: (nodes,) where the title ends that is the only one below a node; the node itself
            where there are several.
    """

    trie: ByteTrie
    tokens: TokenTrie
    items: NDArray[np.int64]
    item_start: NDArray[np.int64]
    alive: NDArray[np.bool_]
    stands_for: NDArray[np.int64]
    _following: dict[int, NDArray[np.int64]] = field(default_factory=dict, repr=False)

    @classmethod
    def build(cls, titles: Sequence[str] | Sequence[bytes], tokens: TokenTrie) -> TitleTrie:
        """Build from one title an item; several items may have the same.

        Args:
            titles: of items 0, 1, ... An item with an empty title cannot be generated.
            tokens: the vocabulary, `TextTokenizer.tokens`. Titles that it cannot write cannot be
                generated either; one with a token for every byte can write all.

        Raises:
            ValueError: no title, or none that the vocabulary can write.
        """
        data = [t.encode() if isinstance(t, str) else t for t in titles]
        named = np.asarray([i for i, title in enumerate(data) if title], np.int64)
        if not len(named):
            raise ValueError("titles: no item has one")
        trie = ByteTrie.build([data[i] for i in named.tolist()])
        order = np.argsort(trie.end, kind="stable")
        item_start = np.searchsorted(trie.end[order], np.arange(trie.num_nodes + 1))
        alive = np.ones(trie.num_nodes, np.bool_)
        only = _only_title(trie)
        found = cls(trie, tokens, named[order], item_start, alive, only)
        if not tokens.bytes_alone[np.unique(trie.key & 255)].all():
            found._find_alive()
        if not alive[0]:
            raise ValueError("titles: the vocabulary can write none of them")
        return found

    @property
    def vocabulary_size(self) -> int:
        """V."""
        return len(self.tokens)

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Tokens that end a title."""
        return self.tokens.end_tokens

    def initial(self) -> int:
        """The root."""
        return 0

    def allowed(self, states: ArrayLike) -> NDArray[np.bool_]:
        """(n, V) tokens that go on with some title; end tokens where one is complete."""
        states = np.asarray(states, np.int64)
        self._prepare(states)
        mask = np.zeros((len(states), self.vocabulary_size), np.bool_)
        for line, state in zip(mask, states.tolist(), strict=True):
            line[self._following.get(state, [])] = True
        return mask

    def advance(self, states: ArrayLike, tokens: ArrayLike) -> NDArray[np.int64]:
        """(n,) states behind (n,) tokens."""
        states, tokens = np.asarray(states, np.int64), np.asarray(tokens, np.int64)
        inside = (states >= 0) & (states < self.trie.num_nodes)
        node = np.where(inside, states, NOWHERE)
        spelling = [self.tokens.spelling[token] for token in tokens.tolist()]
        length = np.asarray([len(data) for data in spelling], np.int64)
        width = int(length.max(initial=0))
        data = np.frombuffer(b"".join(s.ljust(width, b"\0") for s in spelling), np.uint8)
        byte = data.reshape(len(tokens), width).astype(np.int64)
        for place in range(width):
            on = np.flatnonzero(length > place)
            node[on] = self.trie.child(node[on], byte[on, place])
        node[(length == 0) | ~self.alive[node]] = DEAD  # special tokens write nothing
        whole = np.flatnonzero(np.isin(tokens, self.end_tokens) & inside)
        whole = whole[self._is_title(states[whole])]
        node[whole] = self.trie.num_nodes + states[whole]
        return node

    def merge_keys(self, states: ArrayLike) -> NDArray[np.int64]:
        """(n,) the text so far, or the title if it can only become that one.

        Beams that write one title in several tokenisations would otherwise push other titles out.
        """
        states = np.asarray(states, np.int64)
        inside = (states >= 0) & (states < self.trie.num_nodes)
        return np.where(inside, self.stands_for[np.where(inside, states, 0)], states)

    def forced(self, states: ArrayLike) -> list[list[int]]:
        """Tokens without an alternative, one after the other."""
        runs = []
        for state in np.asarray(states, np.int64).tolist():
            run: list[int] = []
            while len(following := np.flatnonzero(self.allowed([state])[0])) == 1:
                run.append(int(following[0]))
                state = int(self.advance([state], following)[0])
            runs.append(run)
        return runs

    def items_of(self, state: int) -> NDArray[np.int64]:
        """Items whose title is the text at a state, its end token taken or not; ascending."""
        if state < 0:
            return self.items[:0]
        node = state % self.trie.num_nodes
        return self.items[self.item_start[node] : self.item_start[node + 1]]

    def _is_title(self, nodes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """(n,) whether a title ends at a node."""
        return np.asarray(self.item_start[nodes + 1] > self.item_start[nodes])

    def _prepare(self, states: NDArray[np.int64]) -> None:
        """Find what follows those states that have not been asked about."""
        asked = np.unique(states[(states >= 0) & (states < self.trie.num_nodes)]).tolist()
        new = np.asarray([s for s in asked if s not in self._following], np.int64)
        if not len(new):
            return
        owner, token, target = self._walk(new)
        keep = self.alive[target]
        owner, token = owner[keep], token[keep]
        titles = np.flatnonzero(self._is_title(new))
        ends = np.asarray(self.end_tokens, np.int64)
        owner = np.concatenate([owner, np.repeat(titles, len(ends))])
        token = np.concatenate([token, np.tile(ends, len(titles))])
        order = np.lexsort((token, owner))
        parts = np.split(token[order], np.searchsorted(owner[order], np.arange(1, len(new))))
        self._following.update(zip(new.tolist(), parts, strict=True))

    def _walk(
        self, nodes: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Walk both tries together from (n,) nodes: place in `nodes`, token, node behind it."""
        owner, ours = np.arange(len(nodes)), nodes
        theirs = np.zeros(len(nodes), np.int64)
        found = [(owner[:0], owner[:0], owner[:0])]
        while len(owner):
            parent, child, byte = self.trie.children(ours)
            below = self.tokens.trie.child(theirs[parent], byte)
            both = below != NOWHERE
            owner, ours, theirs = owner[parent[both]], child[both], below[both]
            start = self.tokens.token_start
            place, token = spread(start[theirs], start[theirs + 1])
            found.append((owner[place], self.tokens.tokens[token], ours[place]))
        owners, tokens, targets = (np.concatenate(part) for part in zip(*found, strict=True))
        return owners, tokens, targets

    def _find_alive(self) -> None:
        """Mark nodes from which tokens lead to a title; the deepest first."""
        starts = self.trie.depth_start
        for first, last in zip(starts[-2::-1], starts[:0:-1], strict=True):
            nodes = np.arange(first, last)
            self.alive[nodes] = self._is_title(nodes)
            owner, _, target = self._walk(nodes)
            self.alive[nodes[owner[self.alive[target]]]] = True


@dataclass(frozen=True)
class TitleBeams:
    """The best titles of each request, best first, each once.

    Attributes:
        texts: their tokens, and the log-probability of the best tokenisation that was found.
        items: of each request, the items of each title; several may have the same.
    """

    texts: Texts
    items: list[list[NDArray[np.int64]]]


def generate_titles(
    model: Any,
    prompts: Sequence[ArrayLike],
    titles: TitleTrie,
    num_beams: int = 10,
    max_new_tokens: int = 64,
) -> TitleBeams:
    """The `num_beams` best titles that beam search finds after each prompt.

    A title's score is that of one sequence of tokens, the best that was found: one forward repeats
    it, and it does not depend on how many others happened to be in the beam, as their sum would.

    Args:
        model: as `generate_text`'s, like `prompts`.
        prompts: token ids of each request.
        titles: the catalog.
        num_beams: titles wanted, and the width of the search.
        max_new_tokens: tokens of the longest title, its end included.

    Returns:
        At most `num_beams` titles a request.
    """
    settings = BeamSettings(
        num_beams, max_new_tokens, length_penalty=0.0, num_return_sequences=num_beams
    )
    texts = generate_text(model, prompts, settings, constraint=titles)
    tokens, lengths = texts.tokens.cpu().numpy(), texts.lengths.cpu().numpy()
    states = np.full(lengths.shape, titles.initial(), np.int64)
    for place in range(tokens.shape[2]):
        on = lengths > place
        states[on] = titles.advance(states[on], tokens[..., place][on])
    items = [
        [titles.items_of(state) for state in row[written].tolist()]
        for row, written in zip(states, lengths > 0, strict=True)
    ]
    return TitleBeams(texts, items)


def _only_title(trie: ByteTrie) -> NDArray[np.int64]:
    """(nodes,) the end of the only string below a node, or the node where there are several."""
    count = np.zeros(trie.num_nodes, np.int64)
    count[trie.end] = 1
    last = np.where(count, np.arange(trie.num_nodes), -1)
    starts = trie.depth_start
    for first, stop in zip(starts[-2:0:-1], starts[:1:-1], strict=True):  # the deepest first
        parents = trie.key[first - 1 : stop - 1] >> 8
        np.add.at(count, parents, count[first:stop])
        np.maximum.at(last, parents, last[first:stop])
    return np.where(count == 1, last, np.arange(trie.num_nodes))
