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
from recsys.decoding.expand import Frontier, Normalize, best_first, expand
from recsys.decoding.output import Beams, DecodeStats
from recsys.models.mask import prompt_mask, tree_mask
from recsys.models.tree_forward import TreeModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike

    from recsys.constraint.transitions import DeviceTrie
    from recsys.models.cache import SlotCache


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
    tree_model = TreeModel.of(model)
    device = tree_model.device
    trie = trie.to(device) if isinstance(trie, ItemTrie) else trie
    if num_beams < 1:
        raise ValueError(f"num_beams must be at least 1, got {num_beams}")
    if not len(prompts):
        return _empty(num_beams, trie, device)
    tokens, lengths = pad_prompts(prompts, tree_model.vocabulary_size)
    tokens, lengths = tokens.to(device), lengths.to(device)
    excluded = None if exclude is None else trie.pad_excluded([np.asarray(e) for e in exclude])
    levels = trie.source.num_levels
    # Beams that each level can have; all are known before the first pass.
    widths = [trie.source.width(depth, num_beams) for depth in range(levels + 1)]
    nodes = sum(widths[1:levels])
    batch, prompt = tokens.shape
    cache = tree_model.new_cache(batch, nodes, max(prompt, prompt_slots))
    score_type = torch.float64 if tree_model.dtype == torch.float64 else torch.float32

    frontier = Frontier.root(batch, score_type, device)
    logits = prefill(tree_model, tokens, lengths, cache)
    # ancestors[b, w, s]: slot s is beam w's own or one of its ancestors'
    ancestors = torch.zeros((batch, 1, cache.nodes), dtype=torch.bool, device=device)
    node_depth = torch.zeros(cache.nodes, dtype=torch.int64, device=device)
    used = 0
    for depth in range(levels):
        width = widths[depth + 1]
        frontier = expand(
            frontier, logits, trie, depth, width, excluded=excluded, normalize=normalize
        )
        if depth == levels - 1:
            break
        write = torch.arange(used, used + width, device=device)
        own = torch.arange(cache.nodes, device=device) == write[:, None]  # (W, nodes)
        parents = frontier.parents.unsqueeze(-1).expand(-1, -1, cache.nodes)
        ancestors = ancestors.gather(1, parents) | own
        node_depth[used : used + width] = depth + 1
        used += width
        logits = _step(
            tree_model, frontier, lengths, cache, ancestors, node_depth, write, depth + 1
        )
    return _beams(frontier, trie, num_beams, cache, lengths, levels, nodes)


def pad_prompts(
    prompts: Sequence[ArrayLike], vocabulary_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, T) tokens, right-padded with 0, and (B,) lengths, on the host.

    Raises:
        ValueError: an empty prompt or a token outside [0, vocabulary_size).
    """
    arrays = [np.asarray(p, np.int64).reshape(-1) for p in prompts]
    lengths = np.asarray([len(a) for a in arrays], np.int64)
    if not lengths.all():
        raise ValueError(f"prompt {int(lengths.argmin())} is empty; it needs at least one token")
    padded = np.zeros((len(arrays), lengths.max()), np.int64)
    for line, array in zip(padded, arrays, strict=True):
        line[: len(array)] = array
    if padded.min() < 0 or padded.max() >= vocabulary_size:
        bad = np.argwhere((padded < 0) | (padded >= vocabulary_size))[0]
        raise ValueError(
            f"prompt {bad[0]} has token {padded[tuple(bad)]} at place {bad[1]}; "
            f"the model knows 0 .. {vocabulary_size - 1}"
        )
    return torch.from_numpy(padded), torch.from_numpy(lengths)


def prefill(
    model: TreeModel, tokens: torch.Tensor, lengths: torch.Tensor, cache: SlotCache
) -> torch.Tensor:
    """Run the prompts into the cache; (B, 1, V) logits at each prompt's last token."""
    prompt = tokens.shape[1]
    places = torch.arange(prompt, device=tokens.device)

    def mask(window: int | None) -> torch.Tensor:
        return prompt_mask(
            prompt, cache.prompt, window=window, dtype=model.dtype, device=tokens.device
        )

    return model.forward(
        tokens,
        places.expand_as(tokens),
        mask,
        cache,
        write=places + cache.nodes,
        view=(cache.nodes, cache.slots),
        rows=lengths[:, None] - 1,
    )


def _step(
    model: TreeModel,
    frontier: Frontier,
    lengths: torch.Tensor,
    cache: SlotCache,
    ancestors: torch.Tensor,
    node_depth: torch.Tensor,
    write: torch.Tensor,
    depth: int,
) -> torch.Tensor:
    """Run the frontier's nodes, all at `depth`; (B, W, V) logits."""

    def mask(window: int | None) -> torch.Tensor:
        return tree_mask(
            ancestors,
            lengths,
            cache.prompt,
            depth=torch.full((len(write),), depth, device=write.device),
            node_depth=node_depth,
            window=window,
            dtype=model.dtype,
        )

    return model.forward(
        frontier.tokens,
        (lengths[:, None] + depth - 1).expand_as(frontier.tokens),
        mask,
        cache,
        write=write,
        view=(0, cache.slots),
    )


def _beams(
    frontier: Frontier,
    trie: DeviceTrie,
    num_beams: int,
    cache: SlotCache,
    lengths: torch.Tensor,
    passes: int,
    nodes: int,
) -> Beams:
    """Best first, padded to K, with counters."""
    order = best_first(frontier)
    scores = frontier.scores.gather(1, order)
    rows = trie.row_start[frontier.states.gather(1, order)]
    missing = num_beams - scores.shape[1]
    if missing:
        scores = torch.nn.functional.pad(scores, (0, missing), value=-torch.inf)
        rows = torch.nn.functional.pad(rows, (0, missing))
    tokens = trie.rows[rows]
    rows = rows.masked_fill(scores == -torch.inf, -1)
    stats = [
        DecodeStats(passes, n + nodes, n + nodes, (n + nodes) * cache.bytes_per_slot)
        for n in lengths.tolist()
    ]
    return Beams(tokens, scores, rows, stats)


def _empty(num_beams: int, trie: DeviceTrie, device: torch.device) -> Beams:
    rows = torch.zeros((0, num_beams), dtype=torch.int64, device=device)
    return Beams(trie.rows[rows], rows.to(torch.float32), rows)
