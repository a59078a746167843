"""Two models, a catalog, requests and ways to search, which tests of decoding share."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from oracles import random_catalog, random_prompts, tiny_model

from recsys.constraint import ItemTrie
from recsys.constraint.boost import Boost
from recsys.constraint.mask import RowMask
from recsys.decoding import SearchRequest, beam_search, complete, speculative_beam_search

RNG = np.random.default_rng(0)
TRIE = ItemTrie.build(random_catalog(RNG, 300, 4))
TARGET = tiny_model("llama-gqa", dtype=torch.float64)
DRAFT = tiny_model("llama", layers=1, seed=9, dtype=torch.float64)
PROMPTS = random_prompts(RNG, 5, 24)
ROWS = [RNG.integers(0, TRIE.num_rows, 9) for _ in PROMPTS]
MASK = RowMask.of(TRIE, RNG.random(TRIE.num_items) < 0.5)
BOOST = Boost.of(TRIE, RNG.random(TRIE.num_items).astype(np.float32))
MASKS, BOOSTS = [MASK, None, MASK, None, MASK], [None, BOOST, BOOST, None, None]
K = 6
REQUESTS = {
    "plain": SearchRequest(PROMPTS),
    "excluded": SearchRequest(PROMPTS, exclude=ROWS),
    "all": SearchRequest(PROMPTS, exclude=ROWS, masks=MASKS, boosts=BOOSTS, candidates=ROWS),
    "sampled": SearchRequest(PROMPTS, exclude=ROWS, seeds=range(5)),
}
SEARCHES = {
    "beam": lambda target, draft, r: beam_search(target, r, TRIE, K),
    "exhaustive": lambda target, draft, r: speculative_beam_search(target, None, r, TRIE, K),
    "draft": lambda target, draft, r: speculative_beam_search(target, draft, r, TRIE, K),
    "complete": lambda target, draft, r: complete(target, beam_search(target, r, TRIE, K), r, TRIE),
    "relaxed": lambda target, draft, r: speculative_beam_search(
        target, draft, r, TRIE, K, "relaxed"
    ),
}


def assert_same(beams: Any, expected: Any, **tolerances: float) -> None:
    """Equal answers; with tolerances, in the values of another order of sums or another device."""
    for name in ("tokens", "scores", "rows", "is_global", "candidate_scores"):
        mine, theirs = getattr(beams, name), getattr(expected, name)
        assert (mine is None) == (theirs is None)
        if mine is not None:
            tolerances = tolerances or {"atol": 0, "rtol": 0}
            torch.testing.assert_close(mine.cpu(), theirs, **tolerances, msg=name)
