"""Titles: beam search for items by their titles, in every tokenisation.

Titles and vocabulary are byte tries. A token may follow a text if the path of its bytes also exists
in the trie of titles, starting at the text's node. Both tries are walked together, so that common
prefixes of titles and of tokens are visited once. After a token, the walk starts again at the root
of the vocabulary, so a state is a node of the trie of titles alone. The tokens that may follow a
state are computed on first use and kept.

    catalog  H-e-a-t        tokens  H He a at t        state "He": at -> "Heat", a -> "Hea"

After Koo et al., Automata-based constraints for language model decoding (COLM 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

    States are nodes of `trie`; the state after an end token at node s is `trie.num_nodes` + s.
    Equal states are equal texts, whatever their tokens.

    Attributes:
        trie: bytes of the titles.
        tokens: the vocabulary.
        items: items with a title, by the node at which it ends, ascending inside a node.
        item_start: (nodes + 1,) start of each node's items in `items`.
        alive: (nodes,) whether tokens of the vocabulary can complete a title from the node.
        merge_key: (nodes,) end node of the only title below a node; the node itself if there are
            several titles.
    """

    trie: ByteTrie
    tokens: TokenTrie
    items: NDArray[np.int64]
    item_start: NDArray[np.int64]
    alive: NDArray[np.bool_]
    merge_key: NDArray[np.int64]
    _following: dict[int, NDArray[np.int64]] = field(default_factory=dict, repr=False)

    @classmethod
    def build(cls, titles: Sequence[str] | Sequence[bytes], tokens: TokenTrie) -> TitleTrie:
        """Build from one title per item; several items may have the same title.

        Args:
            titles: titles of items 0, 1, ... An item with an empty title is never generated.
            tokens: the vocabulary, `TextTokenizer.tokens`. Titles that it cannot spell are never
                generated; a vocabulary with a token for every byte can spell all.

        Raises:
            ValueError: there is no title, or the vocabulary can spell none.
        """
        data = [t.encode() if isinstance(t, str) else t for t in titles]
        named = np.asarray([i for i, title in enumerate(data) if title], np.int64)
        if not len(named):
            raise ValueError("titles: no item has one")
        trie = ByteTrie.build([data[i] for i in named.tolist()])
        order = np.argsort(trie.end, kind="stable")
        item_start = np.searchsorted(trie.end[order], np.arange(trie.num_nodes + 1))
        alive = np.ones(trie.num_nodes, np.bool_)
        key = _only_title(trie)
        trie_of_titles = cls(trie, tokens, named[order], item_start, alive, key)
        if not tokens.bytes_alone[np.unique(trie.key & 255)].all():
            trie_of_titles._find_alive()
        if not alive[0]:
            raise ValueError("titles: the vocabulary can write none of them")
        return trie_of_titles

    @property
    def vocabulary_size(self) -> int:
        """Number of tokens, V."""
        return len(self.tokens)

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Tokens that end a title."""
        return self.tokens.end_tokens

    def initial(self) -> int:
        """The root."""
        return 0

    def allowed(self, states: ArrayLike) -> NDArray[np.bool_]:
        """(n, V) tokens that continue a title; end tokens where a title is complete."""
        states = np.asarray(states, np.int64)
        self._prepare(states)
        mask = np.zeros((len(states), self.vocabulary_size), np.bool_)
        for line, state in zip(mask, states.tolist(), strict=True):
            line[self._following.get(state, [])] = True
        return mask

    def advance(self, states: ArrayLike, tokens: ArrayLike) -> NDArray[np.int64]:
        """(n,) states after (n,) tokens."""
        states, tokens = np.asarray(states, np.int64), np.asarray(tokens, np.int64)
        inside = (states >= 0) & (states < self.trie.num_nodes)
        node = np.where(inside, states, NOWHERE)
        spelling = [self.tokens.spelling[token] for token in tokens.tolist()]
        length = np.asarray([len(data) for data in spelling], np.int64)
        width = int(length.max(initial=0))
        data = np.frombuffer(b"".join(s.ljust(width, b"\0") for s in spelling), np.uint8)
        byte = data.reshape(len(tokens), width).astype(np.int64)
        for step in range(width):
            on = np.flatnonzero(length > step)
            node[on] = self.trie.child(node[on], byte[on, step])
        node[(length == 0) | ~self.alive[node]] = DEAD  # special tokens have no bytes
        whole = np.flatnonzero(np.isin(tokens, self.end_tokens) & inside)
        whole = whole[self._is_title(states[whole])]
        node[whole] = self.trie.num_nodes + states[whole]
        return node

    def merge_keys(self, states: ArrayLike) -> NDArray[np.int64]:
        """(n,) the text so far, or the title if only one is possible.

        Otherwise, tokenisations of one title would crowd other titles out of the beam.
        """
        states = np.asarray(states, np.int64)
        inside = (states >= 0) & (states < self.trie.num_nodes)
        return np.where(inside, self.merge_key[np.where(inside, states, 0)], states)

    def forced(self, states: ArrayLike) -> list[list[int]]:
        """Runs of tokens without an alternative."""
        runs = []
        for state in np.asarray(states, np.int64).tolist():
            run: list[int] = []
            while len(following := np.flatnonzero(self.allowed([state])[0])) == 1:
                run.append(int(following[0]))
                state = int(self.advance([state], following)[0])
            runs.append(run)
        return runs

    def items_of(self, state: int) -> NDArray[np.int64]:
        """Items whose title is the text of a state, before or after the end token; ascending."""
        if state < 0:
            return self.items[:0]
        node = state % self.trie.num_nodes
        return self.items[self.item_start[node] : self.item_start[node + 1]]

    def _is_title(self, nodes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """(n,) whether a title ends at a node."""
        return np.asarray(self.item_start[nodes + 1] > self.item_start[nodes])

    def _prepare(self, states: NDArray[np.int64]) -> None:
        """Compute the tokens that may follow, for states without an entry."""
        inside = np.unique(states[(states >= 0) & (states < self.trie.num_nodes)]).tolist()
        new = np.asarray([s for s in inside if s not in self._following], np.int64)
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
        """Walk both tries from (n,) nodes: index in `nodes`, token, node after it."""
        owner, ours = np.arange(len(nodes)), nodes
        theirs = np.zeros(len(nodes), np.int64)
        parts = [(owner[:0], owner[:0], owner[:0])]
        while len(owner):
            parent, child, byte = self.trie.children(ours)
            below = self.tokens.trie.child(theirs[parent], byte)
            both = below != NOWHERE
            owner, ours, theirs = owner[parent[both]], child[both], below[both]
            start = self.tokens.token_start
            owner_number, token = spread(start[theirs], start[theirs + 1])
            parts.append((owner[owner_number], self.tokens.tokens[token], ours[owner_number]))
        owners, tokens, targets = (np.concatenate(part) for part in zip(*parts, strict=True))
        return owners, tokens, targets

    def _find_alive(self) -> None:
        """Mark nodes from which tokens lead to a title, deepest nodes first."""
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
        items: for each request, the items of each title; several items may share a title.
    """

    texts: Texts
    items: list[list[NDArray[np.int64]]]


def generate_titles(
    model: Any,
    prompts: Sequence[ArrayLike],
    titles: TitleTrie,
    num_beams: int = 10,
    max_new_tokens: int = 64,
    *,
    stopped: Callable[[], bool] | None = None,
) -> TitleBeams:
    """The at most `num_beams` best titles that beam search finds after each prompt.

    The score of a title is that of its best tokenisation found. One forward pass reproduces it, and
    it does not depend on the other tokenisations in the beam, as their sum would. `max_new_tokens`
    includes the end token. `StoppedError` if `stopped`, which is asked before each pass, returns
    True.
    """
    settings = BeamSettings(
        num_beams, max_new_tokens, length_penalty=0.0, num_return_sequences=num_beams
    )
    texts = generate_text(model, prompts, settings, constraint=titles, stopped=stopped)
    tokens, lengths = texts.tokens.cpu().numpy(), texts.lengths.cpu().numpy()
    states = np.full(lengths.shape, titles.initial(), np.int64)
    for step in range(tokens.shape[2]):
        on = lengths > step
        states[on] = titles.advance(states[on], tokens[..., step][on])
    items = [
        [titles.items_of(state) for state in row[written].tolist()]
        for row, written in zip(states, lengths > 0, strict=True)
    ]
    return TitleBeams(texts, items)


def _only_title(trie: ByteTrie) -> NDArray[np.int64]:
    """(nodes,) end of the only string below a node; the node itself if there are several."""
    count = np.zeros(trie.num_nodes, np.int64)
    count[trie.end] = 1
    last = np.where(count, np.arange(trie.num_nodes), -1)
    starts = trie.depth_start
    for first, stop in zip(starts[-2:0:-1], starts[:1:-1], strict=True):  # the deepest first
        parents = trie.key[first - 1 : stop - 1] >> 8
        np.add.at(count, parents, count[first:stop])
        np.maximum.at(last, parents, last[first:stop])
    return np.where(count == 1, last, np.arange(trie.num_nodes))
