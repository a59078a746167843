"""Titles: beam search for items by their titles, in every tokenisation.

The titles are a `choice`, whose texts llguidance follows in every tokenisation. What is said here
is which texts become the same title, so that the tokenisations of one do not fill the beam.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from llguidance import LLParserLimits
from numpy.typing import ArrayLike, NDArray

from recsys.text.beam import BeamSettings, Texts, generate_text
from recsys.text.constraint import DEAD
from recsys.text.grammar import choice
from recsys.text.grammar_constraint import GrammarConstraint, Parser
from recsys.text.tokenizer import TextTokenizer

# The titles are the catalog's own, of any number: the library's limits are for strangers' grammars.
LIMITS = LLParserLimits(
    initial_lexer_fuel=1 << 40,
    step_lexer_fuel=1 << 40,
    max_grammar_size=1 << 40,
    verbose_errors=False,
)


class Titles:
    """The titles of items, compiled for one tokenizer; threads may share them.

    Attributes:
        texts: the different titles in UTF-8, ascending.
    """

    def __init__(self, titles: Sequence[str], tokenizer: TextTokenizer) -> None:
        """Compile the titles of items 0, 1, ...; several items may have the same title.

        An item with an empty title is never generated.

        Raises:
            ValueError: there is no title, or they are too large for the library.
        """
        items: dict[bytes, list[int]] = {}
        for item, title in enumerate(titles):
            if title:
                items.setdefault(title.encode(), []).append(item)
        if not items:
            raise ValueError("titles: no item has one")
        self.texts = sorted(items)
        self._items = {text: np.asarray(same, np.int64) for text, same in items.items()}
        self._tokenizer = tokenizer
        grammar = replace(choice([text.decode() for text in self.texts]), field="titles")
        self._parser = Parser.compile(grammar, tokenizer, LIMITS)

    def constraint(self) -> TitleConstraint:
        """A constraint for one search."""
        return TitleConstraint(self._parser.fork(), self._tokenizer, self.texts)

    def items_of(self, tokens: Sequence[int]) -> NDArray[np.int64]:
        """Items whose title some tokens write, with or without an end token; ascending."""
        text = b"".join(self._tokenizer.spelling[token] for token in tokens)
        return self._items.get(text, np.empty(0, np.int64))


class TitleConstraint(GrammarConstraint):
    """A `Constraint`: titles, each followed by an end token."""

    def __init__(self, parser: Parser, tokenizer: TextTokenizer, texts: Sequence[bytes]) -> None:
        """Use `parser`, which is at the beginning of one of the ascending `texts`."""
        super().__init__(parser, tokenizer, "titles")
        self._texts, self._text = texts, {0: b""}
        self._keys: dict[bytes, int] = {}  # of texts with which several titles begin

    def merge_keys(self, states: ArrayLike) -> NDArray[np.int64]:
        """(n,) the title if only one is possible, or else the text so far.

        Otherwise, tokenisations of one title would crowd other titles out of the beam.
        """
        keys = [self._key(state) for state in np.asarray(states, np.int64).tolist()]
        return np.asarray(keys, np.int64)

    def _key(self, state: int) -> int:
        if state == DEAD:
            return DEAD
        text, count = self._text_of(state), len(self._texts)
        first = bisect_left(self._texts, text)  # of the titles that begin with the text
        if self._has_ended(state):
            return count + first
        if first + 1 == count or not self._texts[first + 1].startswith(text):
            return first
        return self._keys.setdefault(text, 2 * count + len(self._keys))

    def _text_of(self, state: int) -> bytes:
        """The text of a state."""
        if state not in self._text:
            before = self._text_of(self._parent[state])
            self._text[state] = before + self._tokenizer.spelling[self._token[state]]
        return self._text[state]


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
    titles: Titles,
    num_beams: int = 10,
    max_new_tokens: int = 64,
) -> TitleBeams:
    """The at most `num_beams` best titles that beam search finds after each prompt.

    The score of a title is that of its best tokenisation found. One forward pass reproduces it, and
    it does not depend on the other tokenisations in the beam, as their sum would. `max_new_tokens`
    includes the end token.
    """
    settings = BeamSettings(
        num_beams, max_new_tokens, length_penalty=0.0, num_return_sequences=num_beams
    )
    constraint = titles.constraint()
    texts = generate_text(model, prompts, settings, constraint=constraint)
    written = zip(texts.tokens.tolist(), texts.lengths.tolist(), strict=True)
    items = [
        [titles.items_of(tokens[:length]) for tokens, length in zip(*row, strict=True) if length]
        for row in written
    ]
    return TitleBeams(texts, items)
