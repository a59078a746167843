"""Beam search over a shared-prefix cache: the reference that all faster searches must equal.

The prompt of each request is run once. Then, level by level, the K live beams are run as nodes of
one tree over one cache: a node attends to the prompt, its ancestors and itself, and takes one slot.
The last level needs no pass, only its parents' logits, so a search of L levels takes L passes and
T + K (L - 1) slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from numpy.typing import ArrayLike

from recsys import arguments
from recsys.constraint import ItemTrie
from recsys.constraint.transitions import DeviceTrie
from recsys.decoding.expand import Frontier, Step, TokenLogits
from recsys.decoding.native import native_decoder, native_search
from recsys.decoding.output import Beams, DecodeStats
from recsys.decoding.request import Search, SearchRequest
from recsys.decoding.tree import ROOT, TokenTree, require_finite
from recsys.transfers import download


@torch.inference_mode()
def beam_search(
    model: Any,
    request: Search | SearchRequest | Sequence[ArrayLike],
    trie: ItemTrie | DeviceTrie,
    num_beams: int = 20,
) -> Beams:
    """The `num_beams` best catalog sequences of each prompt, or a sample of that many.

    Equals `generate(num_beams=K, prefix_allowed_tokens_fn=...)` of Hugging Face.

    Args:
        model: a Hugging Face decoder-only causal LM, a peft model of one, or a `TreeModel`.
        request: token ids of each prompt, or a `SearchRequest` if there is more to ask.
        trie: the catalog.
        num_beams: K, at least 1; may exceed the catalog.

    Returns:
        Beams of shape (B, K); where fewer than K sequences exist, scores are -inf and rows -1.

    Raises:
        ValueError: `num_beams` is no whole number in its range; as `SearchRequest` and `Search.of`.
        NonFiniteError: the model's logits are not finite for some of the requests.
    """
    num_beams = arguments.whole_number("num_beams", num_beams)
    search = Search.of(request, model, trie)
    if not len(search):
        return no_answers(search, num_beams)
    step, widths = search.step, search.widths(num_beams)  # known before the first pass
    if (decoder := native_decoder(search)) is not None:
        return native_search(search, decoder, widths, num_beams)
    with search.tree(sum(widths[:-1])) as tree:
        frontier, scores = search_tree(search, tree, widths)
        stats = [tree.stats(i) for i in range(len(search))]
        return finish(frontier, step, num_beams, stats, scores, tree=tree)


def search_tree(
    search: Search, tree: TokenTree, widths: Sequence[int]
) -> tuple[Frontier, torch.Tensor | None]:
    """Run a search in an empty tree; the last frontier, and the scores of candidates if any."""
    if search.rows is not None:
        search.rows.add_to(tree)
    first = TokenLogits.run(tree, search.step.trie)
    *_, frontier = grow(tree, search.step, widths, first)
    return frontier, None if search.rows is None else search.rows.scores(first)


def no_answers(search: Search, num_beams: int) -> Beams:
    """The answer to a batch of no requests."""
    root = Frontier.root(0, search.model.score_dtype, search.model.device)
    return finish(root, search.step, num_beams, [])


def grow(
    tree: TokenTree,
    step: Step,
    widths: Sequence[int],
    first: TokenLogits | None = None,
    prune: Callable[[Frontier], Frontier] | None = None,
) -> Iterator[Frontier]:
    """Constrained search level by level; yields the best `widths[d]` prefixes of length d + 1.

    The prompts are run first, unless `first` holds their logits already, (B, 1 or more). Each
    yielded level but the last is then run as nodes of the tree, without what `prune` leaves out.
    """
    frontier = Frontier.root(len(tree.lengths), tree.model.score_dtype, tree.lengths.device)
    nodes = None
    for depth, width in enumerate(widths):
        if depth == 0 and first is not None:
            logits = TokenLogits(*(part[:, :1] for part in first))
        else:
            logits = TokenLogits.run(tree, step.trie).last(frontier.scores.shape[1])
        frontier = step.expand(frontier, logits, depth, width)
        is_last = depth + 1 == len(widths)
        if prune is not None and not is_last:
            frontier = prune(frontier)
        yield frontier
        if not is_last:
            parents = frontier.parents
            parents = torch.full_like(parents, ROOT) if nodes is None else parents + nodes
            nodes = tree.add(frontier.tokens, parents, depth + 1)


def finish(
    frontier: Frontier,
    step: Step,
    num_beams: int,
    stats: list[DecodeStats],
    candidate_scores: torch.Tensor | None = None,
    *,
    tree: TokenTree | None = None,
) -> Beams:
    """The answer of a frontier of complete sequences: best first, padded to K, on the host.

    NonFiniteError if the logits of `tree`, of the whole batch, were not finite for some requests.
    """
    ranked = answer(frontier, step, num_beams, candidate_scores)
    if tree is not None:
        ranked["finite"] = tree.finite
    ranked = dict(zip(ranked, download(list(ranked.values())), strict=True))
    if tree is not None:
        tree.settle(ranked["finite"].tolist())
        require_finite(ranked["finite"])
    return beams_of(ranked, step, stats)


def answer(
    frontier: Frontier,
    step: Step,
    num_beams: int,
    candidate_scores: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """What `beams_of` needs of a frontier of complete sequences, on the device."""
    frontier = frontier.padded(num_beams)
    # Equal scores keep row order.
    order = frontier.scores.sort(dim=-1, descending=True, stable=True).indices
    scores = frontier.scores.gather(1, order)
    rows = step.trie.rows_of(frontier.states.gather(1, order))
    # No descendant of a pruned prefix scores more than the prefix: log-probabilities are <= 0.
    complete = (scores[:, -1:] > frontier.rest) | (frontier.rest == -torch.inf)
    ranked = {"scores": frontier.log_probs.gather(1, order), "rows": rows, "complete": complete}
    if candidate_scores is not None:
        ranked["candidates"] = candidate_scores
    return ranked


def beams_of(values: dict[str, torch.Tensor], step: Step, stats: list[DecodeStats]) -> Beams:
    """The answer that `answer` describes, once it is on the host."""
    return Beams(
        step.trie.sequences(values["rows"]),
        values["scores"],
        values["rows"],
        stats,
        # not of a sample
        None if step.noise is not None else values["complete"].squeeze(1),
        candidate_scores=values.get("candidates"),
    )
