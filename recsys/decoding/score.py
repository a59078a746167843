"""Exact scores of given rows, whatever a search would find, and of lists that a search found.

A row's score is the sum of the log-probabilities of its tokens, as beam search adds them up. Here
it takes one pass of its own; the `candidates` of a `SearchRequest` are scored in the first pass of
a search instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from recsys import arguments
from recsys.constraint import ItemTrie
from recsys.constraint.restrictions import Gains
from recsys.constraint.transitions import DeviceTrie
from recsys.decoding.expand import TokenLogits
from recsys.decoding.output import Beams, DecodeStats
from recsys.decoding.request import Search, SearchRequest
from recsys.decoding.row_tree import RowTree
from recsys.decoding.tree import TokenTree, require_finite
from recsys.transfers import Upload, download


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
    return _score(search, rows)[0]


@torch.inference_mode()
def rescore(model: Any, beams: Beams, request: SearchRequest, trie: ItemTrie) -> Beams:
    """The same items and candidates with the scores of another model, best first.

    Ties go to the lower row, as in a search. The answer stays approximate: the model might have
    found other items.

    Args:
        model: as for `beam_search`.
        beams: the answer to `request`, over `trie`, by weights of low precision.
        request: what was asked, neither a sample nor with sums over the allowed tokens.
        trie: the catalog.

    Raises:
        NonFiniteError: as `beam_search`.
    """
    search = Search.of(
        SearchRequest(request.prompts, prompt_slots=request.prompt_slots), model, trie
    )
    if not len(search):
        return beams
    count, missing = beams.rows.shape[1], beams.rows < 0
    rows = beams.rows.masked_fill(missing, 0)
    lists: list[ArrayLike] = list(rows.numpy())
    if request.candidates is not None:
        given = [np.asarray(candidates, np.int64) for candidates in request.candidates]
        lists = [np.concatenate(parts) for parts in zip(rows.numpy(), given, strict=True)]
    scores, stats = _score(search, lists)
    (scores,) = download([scores])
    found = scores[:, :count].masked_fill(missing, -torch.inf)
    ranked = found
    if (gains := Gains.of(trie, Upload("cpu"), request.boosts or ())) is not None:
        leaves = (rows + int(trie.depth_start[trie.num_levels])).unsqueeze(-1)
        ranked = found + gains.at(leaves).squeeze(-1)
    order = beams.rows.masked_fill(missing, trie.num_rows).argsort(dim=1)
    order = order.gather(1, ranked.gather(1, order).argsort(dim=1, descending=True, stable=True))
    told = beams.candidate_scores
    if told is not None:
        told = scores[:, count:].masked_fill(told == -torch.inf, -torch.inf)
    stats = [first.plus(more) for first, more in zip(beams.stats, stats, strict=True)]
    return replace(
        beams,
        tokens=beams.tokens.gather(1, order.unsqueeze(-1).expand_as(beams.tokens)),
        scores=found.gather(1, order),
        rows=beams.rows.gather(1, order),
        stats=stats,
        candidate_scores=told,
    )


def _score(search: Search, rows: Sequence[ArrayLike]) -> tuple[torch.Tensor, list[DecodeStats]]:
    """(B, C) scores of the rows for the prompts of a search, and what that took."""
    trie = search.step.trie
    lists = arguments.rows_of_requests("rows", rows, len(search), trie.source.num_rows)
    wanted = RowTree.of(trie, lists, upload=search.prompts.upload)
    search.send()
    if not len(search):
        return wanted.known.to(search.model.score_dtype), []
    with TokenTree(search.model, search.prompts, wanted.width) as tree:
        wanted.add_to(tree)
        scores = wanted.scores(TokenLogits.run(tree, trie))
        require_finite(tree.finite)
        return scores, [tree.stats(i) for i in range(len(search))]
