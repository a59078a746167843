"""Scores of given rows: what the target says of items that somebody else has named.

A row's score is the sum of the log-probabilities of its tokens, as beam search sums them. Here it
takes one pass of its own; the `candidates` of `beam_search` and `speculative_beam_search` are
scored in the first pass of a search that is made anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import ArrayLike

from recsys import arguments
from recsys.constraint import ItemTrie
from recsys.constraint.transitions import DeviceTrie
from recsys.decoding.beam import check_vocabulary, num_levels
from recsys.decoding.expand import TokenLogits
from recsys.decoding.row_tree import RowTree
from recsys.decoding.tree import Prompts, TokenTree, require_finite
from recsys.models.tree_forward import TreeModel


@torch.inference_mode()
def score_rows(
    model: Any,
    prompts: Sequence[ArrayLike] | Prompts,
    trie: ItemTrie | DeviceTrie,
    rows: Sequence[ArrayLike],
    *,
    prompt_slots: int = 0,
) -> torch.Tensor:
    """Exact scores of given rows, in one pass.

    Args:
        model: as `beam_search`'s; where it has a prefix store, prompts are looked up there.
        prompts: token ids of each request.
        trie: the catalog.
        rows: trie rows to score for each request; repeated ones are scored again.
        prompt_slots: prompt slots to reserve at least.

    Returns:
        (B, C) sums of log-probabilities over the whole vocabulary, in the order of `rows`, -inf
        behind the end of a list.

    Raises:
        ValueError: as `beam_search`; rows of another number of requests, or unknown ones.
        NonFiniteError: as `beam_search`.
    """
    model = TreeModel.of(model)
    ready = Prompts.of(prompts, model, num_levels(trie) - 1)
    trie = DeviceTrie.of(trie, model.device)
    check_vocabulary(model, trie)
    named = arguments.rows_of_requests("rows", rows, len(ready), trie.source.num_rows)
    wanted = RowTree.of(trie, named)
    if not len(ready):
        return wanted.known.to(model.score_dtype)
    with TokenTree(model, ready, wanted.width, prompt_slots=prompt_slots) as tree:
        wanted.add_to(tree)
        scores = wanted.scores(TokenLogits.run(tree, trie))
        require_finite(tree.finite)
        return scores
