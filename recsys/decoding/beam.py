"""Beam search over a shared-prefix cache: the reference that everything faster is held to.

The prompt is run once a request. Then, level by level, the K live beams are run as nodes of one
tree over one cache: a node sees the prompt, its ancestors and itself, and takes one slot. The last
level needs no forward, only its parents' logits, so a search is L passes and T + K (L - 1) slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from numpy.typing import ArrayLike

from recsys import arguments
from recsys.constraint import ItemTrie
from recsys.constraint.boost import Boost
from recsys.constraint.mask import RowMask
from recsys.constraint.transitions import DeviceTrie
from recsys.decoding.expand import Frontier, Normalize, Step, TokenLogits, best_first
from recsys.decoding.output import Beams, DecodeStats
from recsys.decoding.row_tree import RowTree
from recsys.decoding.sampling import Noise
from recsys.decoding.tree import ROOT, Prompts, TokenTree, require_finite
from recsys.models.tree_forward import TreeModel

T = TypeVar("T")


@torch.inference_mode()
def beam_search(
    model: Any,
    prompts: Sequence[ArrayLike] | Prompts,
    trie: ItemTrie | DeviceTrie,
    num_beams: int = 20,
    *,
    exclude: Sequence[ArrayLike] | None = None,
    masks: Sequence[RowMask | None] | None = None,
    boosts: Sequence[Boost | None] | None = None,
    normalize: Normalize = "vocabulary",
    seeds: Sequence[int] | None = None,
    temperature: float = 1.0,
    prompt_slots: int = 0,
    candidates: Sequence[ArrayLike] | None = None,
    candidate_nodes: int | None = None,
) -> Beams:
    """The `num_beams` best catalog sequences of each prompt, or a sample of that many.

    Equals `generate(num_beams=K, prefix_allowed_tokens_fn=...)` of Hugging Face.

    Args:
        model: a Hugging Face decoder-only causal LM, a peft model of one, or a `TreeModel`.
        prompts: token ids of each request, at least one token each; lengths may differ.
        trie: the catalog.
        num_beams: K, at least 1; may exceed the catalog.
        exclude: trie rows that each request must not get (`ItemTrie.excluded_rows`).
        masks: what each request may get; None for everything.
        boosts: what each request's items gain; the best are then those of the largest sums of
            log-probability and boost, and `scores` are log-probabilities still.
        normalize: `vocabulary` (default) or `allowed`, see `Step`.
        seeds: one a request: sample K sequences without replacement from the model's distribution
            over what is allowed (`recsys.decoding.sampling`), in the order drawn. None searches.
        temperature: divides the logits, when sampling; at least `recsys.arguments.MIN_TEMPERATURE`.
        prompt_slots: prompt slots to reserve at least. With one number for all requests (that of
            the longest prompt) an answer has the same bits alone and beside any batch mates.
        candidates: trie rows of each request, most wanted first, that are scored in the first pass
            whether the search finds them or not (`Beams.candidate_scores`).
        candidate_nodes: exactly so many nodes for them, see `RowTree`; None for all they need. With
            a number, what holds for `prompt_slots` holds here.

    Returns:
        Beams of shape (B, K); where fewer than K sequences exist, scores are -inf and rows -1.

    Raises:
        ValueError: an argument that is not of its kind or range (the text names it), an empty
            prompt, a token (of a prompt or of the catalog) outside the model's vocabulary, a row
            outside the trie, a mask or boost of another trie, a sample with boosts or candidates,
            or candidates with `normalize` other than `vocabulary`.
        NonFiniteError: the model's logits are not finite for some of the requests.
    """
    num_beams = arguments.whole_number("num_beams", num_beams)
    model = TreeModel.of(model)
    ready = Prompts.of(prompts, model, num_levels(trie) - 1)
    step = prepare(
        model,
        len(ready),
        trie,
        num_beams,
        exclude,
        normalize,
        masks=masks,
        boosts=boosts,
        seeds=seeds,
        temperature=temperature,
    )
    wanted = row_tree(step, len(ready), candidates, candidate_nodes)
    if not len(ready):
        return finish(Frontier.root(0, model.score_dtype, model.device), step, num_beams, [])
    # Beams that each level can have; all are known before the first pass.
    source = step.trie.source
    widths = [source.width(depth, num_beams) for depth in range(1, step.levels + 1)]
    nodes = sum(widths[:-1]) + (0 if wanted is None else wanted.width)
    with TokenTree(model, ready, nodes, prompt_slots=prompt_slots) as tree:
        if wanted is not None:
            wanted.add_to(tree)
        first = TokenLogits.run(tree, step.trie)
        *_, frontier = grow(tree, step, widths, first)
        stats = [
            DecodeStats(
                target_passes=tree.passes,
                target_tokens=n - cached + tree.run,
                kv_slots=n + tree.run,
                kv_bytes=(n + tree.run) * tree.cache.bytes_per_slot,
                cached_tokens=cached,
                forced_levels=step.levels - tree.passes,
            )
            for n, cached in zip(ready.host_lengths.tolist(), tree.cached.tolist(), strict=True)
        ]
        scores = None if wanted is None else wanted.scores(first)
        require_finite(tree.finite)
        return finish(frontier, step, num_beams, stats, scores)


def prepare(
    model: TreeModel,
    requests: int,
    trie: ItemTrie | DeviceTrie,
    num_beams: int,
    exclude: Sequence[ArrayLike] | None,
    normalize: Normalize,
    *,
    masks: Sequence[RowMask | None] | None = None,
    boosts: Sequence[Boost | None] | None = None,
    seeds: Sequence[int] | None = None,
    temperature: float = 1.0,
) -> Step:
    """What is the same in every step, checked, on the model's device."""
    temperature = arguments.temperature(temperature)
    if seeds is not None and boosts is not None and any(boosts):
        raise ValueError("boosts: a sample is drawn from the model's distribution alone")
    if normalize not in ("vocabulary", "allowed"):
        raise ValueError(f"normalize {normalize!r} is neither 'vocabulary' nor 'allowed'")
    device = model.device
    trie = DeviceTrie.of(trie, device)
    check_vocabulary(model, trie)
    for name, given, kind in (("masks", masks, RowMask), ("boosts", boosts, Boost)):
        for request, one in enumerate(_one_each(name, given, requests)):
            if one is not None and not isinstance(one, kind):
                raise ValueError(
                    f"{name}: that of request {request} is a {type(one).__name__}, not a "
                    f"{kind.__name__}"
                )
            if one is not None and one.trie is not trie.source:
                raise ValueError(f"{name}: that of request {request} is made for another trie")
    excluded = None
    if exclude is not None:
        rows = arguments.rows_of_requests("exclude", exclude, requests, trie.source.num_rows)
        excluded = trie.pad_excluded(rows, masks)
    noise = None
    if seeds is not None:
        drawn = arguments.integers("seeds", _one_each("seeds", seeds, requests))
        noise = Noise(torch.from_numpy(drawn).to(device), temperature)
    return Step(
        trie,
        excluded,
        normalize,
        noise,
        None if masks is None else trie.allow(masks),
        None if boosts is None else trie.gain(boosts),
    )


def _one_each(name: str, values: Sequence[T] | None, requests: int) -> Sequence[T]:
    """The values, one a request; none for None."""
    if values is None:
        return []
    arguments.one_each(name, values, requests)
    return values


def num_levels(trie: ItemTrie | DeviceTrie) -> int:
    """L of the catalog."""
    return (trie if isinstance(trie, ItemTrie) else trie.source).num_levels


def row_tree(
    step: Step, requests: int, candidates: Sequence[ArrayLike] | None, nodes: int | None
) -> RowTree | None:
    """The tree of the candidates, if there are any to be scored.

    Raises:
        ValueError: their scores would not be log-probabilities over the whole vocabulary, another
            number of lists than requests, or rows that the trie does not have.
    """
    if candidates is None:
        return None
    if step.noise is not None or step.normalize != "vocabulary":
        raise ValueError("candidates: scored over the whole vocabulary, and in no sample")
    if nodes is not None:
        nodes = arguments.whole_number("candidate_nodes", nodes, 0, arguments.MOST_NODES)
    num_rows = step.trie.source.num_rows
    rows = arguments.rows_of_requests("candidates", candidates, requests, num_rows)
    return RowTree.of(step.trie, rows, nodes)


def check_vocabulary(model: TreeModel, trie: DeviceTrie) -> None:
    """Raise unless the model knows every token of the catalog.

    Raises:
        ValueError: it does not.
    """
    if (last := int(trie.source.alphabet[-1])) >= model.vocabulary_size:
        raise ValueError(
            f"the catalog has token {last}; the model knows 0 .. {model.vocabulary_size - 1}"
        )


def grow(
    tree: TokenTree, step: Step, widths: Sequence[int], first: TokenLogits | None = None
) -> Iterator[Frontier]:
    """Constrained search level by level; yields the best `widths[d]` prefixes of length d + 1.

    The prompts are run first, unless `first` is what they said already, (B, 1 or more); each
    yielded level but the last is then run as nodes of the tree. Where every beam of the batch has
    but one way on and that costs nothing (`Step.forced`), its level is run with the next that has
    to be, if any has: no forward for it, and the same scores but for rounding in those behind it.
    """
    frontier = Frontier.root(len(tree.lengths), tree.model.score_dtype, tree.lengths.device)
    nodes = None
    for depth, width in enumerate(widths):
        if depth == 0 and first is not None:
            logits = TokenLogits(*(part[:, :1] for part in first))
        elif depth and _forced(step, frontier, depth):
            logits = TokenLogits.nothing(frontier.scores, step.trie)
        else:
            beams = frontier.scores.shape[1]  # those of forced levels come before them
            logits = TokenLogits.run(tree, step.trie).last(beams)
        frontier = step.expand(frontier, logits, depth, width)
        yield frontier
        if depth + 1 < len(widths):
            parents = frontier.parents
            parents = torch.full_like(parents, ROOT) if nodes is None else parents + nodes
            nodes = tree.add(frontier.tokens, parents, depth + 1)


def _forced(step: Step, frontier: Frontier, depth: int) -> bool:
    """Whether no beam of the batch needs a forward; only asked where that can be."""
    forced = step.forced(frontier.states, depth)
    return forced is not None and bool((forced | (frontier.scores == -torch.inf)).all())


def finish(
    frontier: Frontier,
    step: Step,
    num_beams: int,
    stats: list[DecodeStats],
    candidate_scores: torch.Tensor | None = None,
) -> Beams:
    """The answer that a frontier of complete sequences is: best first, padded to K."""
    frontier = frontier.padded(num_beams)
    order = best_first(frontier)
    scores = frontier.scores.gather(1, order)
    rows = step.trie.rows_of(frontier.states.gather(1, order))
    # No descendant of a pruned prefix can score more than it: log-probabilities are at most 0.
    complete = (scores[:, -1:] > frontier.rest) | (frontier.rest == -torch.inf)
    return Beams(
        step.trie.sequences(rows),
        frontier.log_probs.gather(1, order),
        rows,
        stats,
        None if step.noise is not None else complete.squeeze(1),  # a sample is not the best K
        candidate_scores=candidate_scores,
    )
