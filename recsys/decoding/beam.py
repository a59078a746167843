"""Beam search over a shared-prefix cache: the reference that everything faster is held to.

The prompt is run once a request. Then, level by level, the K live beams are run as nodes of one
tree over one cache: a node sees the prompt, its ancestors and itself, and takes one slot. The last
level needs no forward, only its parents' logits, so a search is L passes and T + K (L - 1) slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from recsys.constraint import ItemTrie
from recsys.decoding.expand import Frontier, Normalize, TokenLogits, best_first, expand
from recsys.decoding.output import Beams, DecodeStats
from recsys.decoding.tree import ROOT, TokenTree, pad_prompts
from recsys.models.tree_forward import TreeModel

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import ArrayLike

    from recsys.constraint.transitions import DeviceTrie


@torch.inference_mode()
def beam_search(
    model: Any,
    prompts: Sequence[ArrayLike],
    trie: ItemTrie | DeviceTrie,
    num_beams: int = 20,
    *,
    exclude: Sequence[ArrayLike] | None = None,
    normalize: Normalize = "vocabulary",
    prompt_slots: int = 0,
) -> Beams:
    """The `num_beams` best catalogue sequences of each prompt.

    Equals `generate(num_beams=K, prefix_allowed_tokens_fn=...)` of Hugging Face (DESIGN 4.3).

    Args:
        model: a Hugging Face decoder-only causal LM, a peft model of one, or a `TreeModel`.
        prompts: token ids of each request, at least one token each; lengths may differ.
        trie: the catalogue.
        num_beams: K, at least 1; may exceed the catalogue.
        exclude: trie rows that each request must not get (`ItemTrie.excluded_rows`).
        normalize: `vocabulary` (default) or `allowed`, see `expand`.
        prompt_slots: prompt slots to reserve at least. With one number for all requests (that of
            the longest prompt) an answer has the same bits alone and beside any batch mates.

    Returns:
        Beams of shape (B, K); where fewer than K sequences exist, scores are -inf and rows -1.

    Raises:
        ValueError: no beams, an empty prompt, or a token outside the model's vocabulary.
    """
    model = TreeModel.of(model)
    tokens, lengths, trie, excluded = prepare(model, prompts, trie, num_beams, exclude)
    if not len(prompts):
        nothing = Frontier.root(0, model.score_dtype, model.device)
        return finish(nothing, trie, num_beams, [])
    levels = trie.source.num_levels
    # Beams that each level can have; all are known before the first pass.
    widths = [trie.source.width(depth, num_beams) for depth in range(1, levels + 1)]
    nodes = sum(widths[:-1])
    tree = TokenTree(model, tokens, lengths, nodes, prompt_slots=prompt_slots)
    *_, frontier = grow(tree, trie, widths, excluded=excluded, normalize=normalize)
    stats = [
        DecodeStats(
            target_passes=levels,
            target_tokens=n + nodes,
            kv_slots=n + nodes,
            kv_bytes=(n + nodes) * tree.cache.bytes_per_slot,
        )
        for n in lengths.tolist()
    ]
    return finish(frontier, trie, num_beams, stats)


def prepare(
    model: TreeModel,
    prompts: Sequence[ArrayLike],
    trie: ItemTrie | DeviceTrie,
    num_beams: int,
    exclude: Sequence[ArrayLike] | None,
) -> tuple[torch.Tensor, torch.Tensor, DeviceTrie, torch.Tensor | None]:
    """Checked inputs on the model's device: tokens, lengths, trie, excluded rows."""
    if num_beams < 1:
        raise ValueError(f"num_beams must be at least 1, got {num_beams}")
    if exclude is not None and len(exclude) != len(prompts):
        raise ValueError(f"exclude has {len(exclude)} entries for {len(prompts)} prompts")
    device = model.device
    trie = trie.to(device) if isinstance(trie, ItemTrie) else trie
    tokens, lengths = pad_prompts(prompts, model.vocabulary_size)
    excluded = None if exclude is None else trie.pad_excluded([np.asarray(e) for e in exclude])
    return tokens.to(device), lengths.to(device), trie, excluded


def grow(
    tree: TokenTree,
    trie: DeviceTrie,
    widths: Sequence[int],
    *,
    excluded: torch.Tensor | None,
    normalize: Normalize,
) -> Iterator[Frontier]:
    """Constrained search level by level; yields the best `widths[d]` prefixes of length d + 1.

    The prompts are run first; each yielded level but the last is then run as nodes of the tree.
    """
    frontier = Frontier.root(len(tree.lengths), tree.model.score_dtype, tree.lengths.device)
    nodes = None
    for depth, width in enumerate(widths):
        logits = TokenLogits.of(tree.forward(), trie)
        frontier = expand(
            frontier, logits, trie, depth, width, excluded=excluded, normalize=normalize
        )
        yield frontier
        if depth + 1 < len(widths):
            parents = frontier.parents
            parents = torch.full_like(parents, ROOT) if nodes is None else parents + nodes
            nodes = tree.add(frontier.tokens, parents, depth + 1)


def finish(frontier: Frontier, trie: DeviceTrie, num_beams: int, stats: list[DecodeStats]) -> Beams:
    """The answer that a frontier of complete sequences is: best first, padded to K."""
    frontier = frontier.padded(num_beams)
    order = best_first(frontier)
    scores = frontier.scores.gather(1, order)
    rows = trie.row_start[frontier.states.gather(1, order)]
    return Beams(trie.rows[rows], scores, rows.masked_fill(scores == -torch.inf, -1), stats)
