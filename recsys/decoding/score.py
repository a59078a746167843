"""Exact scores of given rows, whatever a search would find.

A row's score is the sum of the log-probabilities of its tokens, as beam search adds them up. Here
it takes one pass of its own; the `candidates` of a `SearchRequest` are scored in the first pass of
a search instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import ArrayLike

from recsys import arguments
from recsys.constraint import ItemTrie
from recsys.constraint.transitions import DeviceTrie
from recsys.decoding.expand import TokenLogits
from recsys.decoding.request import Search, SearchRequest
from recsys.decoding.row_tree import RowTree
from recsys.decoding.tree import TokenTree, require_finite


@torch.inference_mode()
def score_rows(
    model: Any,
    prompts: Sequence[ArrayLike],
    trie: ItemTrie | DeviceTrie,
    rows: Sequence[ArrayLike],
    *,
    prompt_slots: int = 0,
) -> torch.Tensor:
    """Score given rows exactly, in one pass.

    Args:
        model: as for `beam_search`; if it has a prefix store, prompts are looked up there.
        prompts: token ids of each request.
        trie: the catalog.
        rows: trie rows to score for each request; repeated ones are scored again.
        prompt_slots: as in `SearchRequest`.

    Returns:
        (B, C) sums of log-probabilities over the whole vocabulary, in the order of `rows`, -inf
        behind the end of a list.

    Raises:
        ValueError: as `beam_search`; another number of lists than prompts, or an unknown row.
        NonFiniteError: as `beam_search`.
    """
    search = Search.of(SearchRequest(prompts, prompt_slots=prompt_slots), model, trie)
    lists = arguments.rows_of_requests("rows", rows, len(search), search.step.trie.source.num_rows)
    row_tree = RowTree.of(search.step.trie, lists, None, search.prompts.upload)
    search.send()
    if not len(search):
        return row_tree.known.to(search.model.score_dtype)
    with TokenTree(search.model, search.prompts, row_tree.width) as tree:
        row_tree.add_to(tree)
        scores = row_tree.scores(TokenLogits.run(tree, search.step.trie))
        require_finite(tree.finite)
        return scores
