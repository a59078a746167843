"""Best-first completion: from beam search's list to the model's best K sequences of all.

A prefix's log-probability bounds those of all its descendants (they only multiply by at most 1), so
a search may stop when no prefix that was left out scores as much as the K-th answer.
Beam search's answer is often global already, and its K-th score prunes the rest of the search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from numpy.typing import ArrayLike

from recsys import arguments
from recsys.constraint import ItemTrie
from recsys.constraint.boost import Boost
from recsys.constraint.mask import RowMask
from recsys.constraint.transitions import DeviceTrie
from recsys.decoding.beam import finish, prepare
from recsys.decoding.candidates import CandidateDrafter
from recsys.decoding.expand import Frontier, Normalize, stable_top
from recsys.decoding.output import Beams, DecodeStats
from recsys.decoding.table import Table
from recsys.decoding.tree import Prompts, TokenTree, require_finite
from recsys.models.tree_forward import TreeModel


@torch.inference_mode()
def complete(
    target: Any,
    beams: Beams,
    prompts: Sequence[ArrayLike] | Prompts,
    trie: ItemTrie | DeviceTrie,
    *,
    exclude: Sequence[ArrayLike] | None = None,
    masks: Sequence[RowMask | None] | None = None,
    boosts: Sequence[Boost | None] | None = None,
    normalize: Normalize = "vocabulary",
    prompt_slots: int = 0,
    pass_nodes: int = 128,
    max_nodes: int = 2048,
) -> Beams:
    """The global top K of each request, where `beams` is not yet known to be it.

    Args:
        target: the model that gave `beams`.
        beams: of `beam_search` or `speculative_beam_search`, not sampled.
        prompts: as given there.
        trie: as given there.
        exclude: as given there.
        masks: as given there.
        boosts: as given there.
        normalize: as given there.
        prompt_slots: as given there.
        pass_nodes: prefixes looked into at a time.
        max_nodes: most a request; where they do not suffice, its answer stays what it was.

    Returns:
        Beams; `is_global` says which are proven, `stats` include the additional work.

    Raises:
        ValueError: as `beam_search`, approximate beams, beams of another number of prompts or of
            another trie, or fewer `max_nodes` than one pass needs.
        NonFiniteError: as `beam_search`.
    """
    if beams.approximate or beams.is_global is None:
        raise ValueError("beams: only an exact search can be completed")
    pass_nodes = arguments.whole_number("pass_nodes", pass_nodes)
    max_nodes = arguments.whole_number("max_nodes", max_nodes)
    source = trie if isinstance(trie, ItemTrie) else trie.source
    (requests, asked), levels = beams.rows.shape, source.num_levels
    if len(prompts) != requests:
        raise ValueError(f"beams of {requests} requests for {len(prompts)} prompts")
    num_beams = min(asked, source.num_rows)
    least = pass_nodes + num_beams * (levels - 1)
    if max_nodes < least:
        raise ValueError(f"max_nodes: want at least {least} for {num_beams} beams, got {max_nodes}")
    model = TreeModel.of(target)
    ready = Prompts.of(prompts, model, levels - 1)
    step = prepare(model, len(ready), trie, asked, exclude, normalize, masks=masks, boosts=boosts)
    rows = beams.rows.clamp(max=source.num_rows - 1)
    if not torch.equal(step.trie.sequences(rows), beams.tokens):
        raise ValueError("beams: found over another trie")
    todo = (~beams.is_global).nonzero().squeeze(1)
    if not len(todo):
        return beams
    places = todo.tolist()
    ready, step = ready.take(places), step.take(todo)
    found_rows = [r[r >= 0].cpu().numpy() for r in beams.rows[todo]]
    known = CandidateDrafter(found_rows, num_beams * (levels - 1))
    proposal = known.propose(ready, step, num_beams, prompt_slots=prompt_slots)
    found = Frontier.root(len(beams.rows), model.score_dtype, model.device).padded(num_beams)
    found = Frontier(*(part.clone() for part in found))  # its parts are written one by one
    finite = torch.ones(requests, dtype=torch.bool, device=model.device)
    proven = torch.zeros(len(beams.rows), dtype=torch.bool, device=model.device)
    stats = list(beams.stats)
    with TokenTree(model, ready, max_nodes, prompt_slots=prompt_slots) as tree:
        table = Table(tree, step)
        table.add_levels(proposal.levels)
        request = todo
        while len(request):
            table.run()
            finite[request] = tree.finite
            require_finite(finite)
            answer, wanted = _look(table, num_beams, pass_nodes)
            finished = ~(wanted.scores > -torch.inf).any(1)
            room = tree.nodes + pass_nodes <= max_nodes
            leave = finished if room else torch.ones_like(finished)
            for whole, part in zip(found, answer, strict=True):
                whole[request[finished]] = part[finished]
            proven[request[finished]] = True
            for i, n in zip(request[leave].tolist(), tree.lengths[leave].tolist(), strict=True):
                stats[i] = _add(stats[i], tree, n, int(tree.cached[todo.tolist().index(i)]))
            going_on = (~leave).nonzero().squeeze(1)
            request, wanted = request[going_on], wanted.take(going_on)
            table.keep(going_on)
            if len(going_on):
                real = wanted.scores > -torch.inf
                depth = table.depth.gather(1, wanted.parents) + 1
                table.add(wanted.states, wanted.tokens, wanted.parents, depth, real)
    best = finish(found, step, asked, [])
    mask = proven[:, None]
    return replace(
        beams,
        tokens=torch.where(mask[..., None], best.tokens, beams.tokens),
        scores=torch.where(mask, best.scores, beams.scores),
        rows=torch.where(mask, best.rows, beams.rows),
        stats=stats,
        is_global=beams.is_global | proven,
    )


def _look(table: Table, num_beams: int, pass_nodes: int) -> tuple[Frontier, Frontier]:
    """The best K complete sequences that the table knows, and the prefixes still to look into.

    Args:
        table: all of it has been run.
        num_beams: K.
        pass_nodes: most prefixes.
    """
    levels, nodes = table.step.levels, table.score()
    _, leaves = table.children(levels - 1, nodes)
    leaves = leaves.at(leaves.states.argsort(dim=1))  # row order settles ties
    best, _ = stable_top(leaves.scores, min(num_beams, leaves.scores.shape[1]))
    answer = leaves.at(best).padded(num_beams)
    limit = answer.scores.amin(1, keepdim=True)  # the known answers are in from the first pass
    open_ = []
    for depth in range(levels - 1):
        run, children = table.children(depth, nodes)
        # an equal score may hide an answer of a lower row
        scores = children.scores.masked_fill(run | (children.scores < limit), -torch.inf)
        children = children._replace(scores=scores)
        open_.append(children.at(stable_top(scores, min(pass_nodes, scores.shape[1]))[0]))
    if not open_:
        return answer, Frontier.nothing(answer, pass_nodes)
    every = Frontier.joined(open_)
    most, _ = stable_top(every.scores, min(pass_nodes, every.scores.shape[1]))
    return answer, every.at(most)


def _add(stats: DecodeStats, tree: TokenTree, length: int, cached: int) -> DecodeStats:
    """Counters with this search's work added."""
    slots = max(stats.kv_slots, length + tree.nodes)
    return replace(
        stats,
        target_passes=stats.target_passes + tree.passes,
        target_tokens=stats.target_tokens + length - cached + tree.nodes,
        kv_slots=slots,
        kv_bytes=slots * tree.cache.bytes_per_slot,
    )
