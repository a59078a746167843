"""Items by their titles: beam search over a `TitleTrie`, for a model without new tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from recsys.text.beam import Texts, generate_text
from recsys.text.title_trie import TitleTrie


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
    texts = generate_text(
        model,
        prompts,
        num_beams,
        max_new_tokens,
        constraint=titles,
        length_penalty=0.0,
        num_return_sequences=num_beams,
    )
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
