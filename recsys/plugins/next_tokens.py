"""The tokens that may follow generated ones, as masks of an engine's logits.

Engines that sample call a logits processor with one row for each request. A processor here allows
the tokens that continue a semantic ID of the catalog. After a whole semantic ID the next one
begins, so a request for L tokens gets one item, and there is always an allowed token.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from recsys.bundle import Bundle
from recsys.constraint import ItemTrie
from recsys.errors import ConfigError
from recsys.hub import find_bundle

VARIABLE = "RECSYS_BUNDLE"
UNKNOWN = -1  # what an engine puts in place of a token that the host does not have yet


class NextTokens:
    """Allowed next tokens of a trie whose sequences all have its length, as semantic IDs have."""

    def __init__(self, trie: ItemTrie) -> None:
        self._trie = trie

    @classmethod
    def load(cls, source: Path | str) -> NextTokens:
        """Those of the catalog of a bundle, or of a folder or repository of the Hub.

        Raises:
            ArtifactError: as of `recsys.hub.find_bundle` and `Bundle.load`.
        """
        bundle = Bundle.load(find_bundle(source))
        return cls(ItemTrie.build(bundle.vocabulary.encode(bundle.catalog.codes)))

    def after(self, generated: Sequence[int]) -> NDArray[np.int32]:
        """The allowed tokens after all tokens that a request has generated, ascending.

        A token that continues no prefix cannot have passed the mask. If a request has one
        nevertheless, the tokens of the first level follow.

        Raises:
            RuntimeError: a token is not known yet, so nothing can be said about the next one.
        """
        trie, state = self._trie, 0
        for token in generated[len(generated) // trie.num_levels * trie.num_levels :]:
            if token == UNKNOWN:
                raise RuntimeError(
                    "the engine schedules a step before the tokens of the last one are known; turn "
                    "its asynchronous scheduling off"
                )
            first, stop = trie.first_child[state : state + 2].tolist()
            place = first + int(np.searchsorted(trie.token[first:stop], token))
            state = place if place < stop and trie.token[place] == token else 0
        first, stop = trie.first_child[state : state + 2].tolist()
        allowed: NDArray[np.int32] = trie.token[first:stop]
        return allowed

    def mask(self, logits: torch.Tensor, generated: Mapping[int, Sequence[int]]) -> torch.Tensor:
        """Set the logits of all other tokens to -inf, in place.

        Args:
            logits: (B, V), V at least the size of the vocabulary.
            generated: row -> the tokens that its request has generated. Other rows stay.

        Raises:
            RuntimeError: as of `after`.
        """
        if not generated:
            return logits
        allowed = [self.after(tokens) for tokens in generated.values()]
        rows = np.repeat(list(generated), [len(tokens) for tokens in allowed])
        kept = torch.from_numpy(np.stack([rows, np.concatenate(allowed)])).to(logits.device)
        values = logits[kept[0], kept[1]]
        logits[list(generated)] = float("-inf")
        logits[kept[0], kept[1]] = values
        return logits


@cache
def of_environment() -> NextTokens:
    """Those of the bundle that `RECSYS_BUNDLE` names, loaded once a process.

    Raises:
        ConfigError: the variable is not set.
        ArtifactError: as of `NextTokens.load`.
    """
    source = os.environ.get(VARIABLE)
    if not source:
        raise ConfigError(f"{VARIABLE} is not set; it names the bundle whose items are allowed")
    return NextTokens.load(source)
