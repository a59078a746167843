"""Strict speculative beam search: a drafted tree, one target pass, the answer of beam search.

The target runs prompt and drafted tree in one pass. Then, level by level, its own top-K among the
children of the beams it already accepted is the next frontier; while every beam of a frontier has
been run, the next frontier is known (`verify`). Where one has not, a *patch pass* runs the missing
beams, and below them what the next frontier can need; everything that has been run is kept.

By induction each accepted frontier is beam search's, so the answer is too, whatever was drafted
(DESIGN 4.7). A pass always settles at least one level: never more passes than beam search.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from recsys.decoding.beam import finish, prepare
from recsys.decoding.draft import Drafter, ExhaustiveDrafter, ModelDrafter
from recsys.decoding.expand import (
    Frontier,
    Normalize,
    TokenLogits,
    child_scores,
    expand,
    stable_top,
)
from recsys.decoding.output import Beams, DecodeStats
from recsys.decoding.tree import ROOT, TokenTree
from recsys.models.tree_forward import TreeModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike

    from recsys.constraint import ItemTrie
    from recsys.constraint.transitions import Children, DeviceTrie

PATCH_NODES = 128


@torch.inference_mode()
def speculative_beam_search(
    target: Any,
    drafter: Drafter | Any | None,
    prompts: Sequence[ArrayLike],
    trie: ItemTrie | DeviceTrie,
    num_beams: int = 20,
    *,
    exclude: Sequence[ArrayLike] | None = None,
    normalize: Normalize = "vocabulary",
    prompt_slots: int = 0,
    patch_nodes: int = PATCH_NODES,
) -> Beams:
    """`beam_search` in fewer passes of the target; the same answer.

    Args:
        target: as `beam_search`'s model.
        drafter: a `Drafter`, a Hugging Face model that drafts (`ModelDrafter` with its defaults),
            or None for the exhaustive drafter, which needs no model.
        prompts: token ids of each request.
        trie: the catalogue.
        num_beams: K.
        exclude: trie rows that each request must not get.
        normalize: `vocabulary` (default) or `allowed`.
        prompt_slots: prompt slots to reserve at least.
        patch_nodes: most nodes below the missing beams in a patch pass.

    Returns:
        Beams; `stats` counts passes, accepted levels and drafted nodes of each request.

    Raises:
        ValueError: as `beam_search`.
    """
    model = TreeModel.of(target)
    tokens, lengths, trie, excluded = prepare(model, prompts, trie, num_beams, exclude)
    if not len(prompts):
        return finish(Frontier.root(0, model.score_dtype, model.device), trie, num_beams, [])
    if drafter is None:
        drafter = ExhaustiveDrafter()
    elif not hasattr(drafter, "propose"):
        drafter = ModelDrafter(drafter)
    proposal = drafter.propose(
        tokens,
        lengths,
        trie,
        excluded=excluded,
        normalize=normalize,
        prompt_slots=prompt_slots,
    )
    levels = trie.source.num_levels
    drafted = sum(level.states.shape[1] for level in proposal.levels)
    capacity = drafted + (levels - 1) * (num_beams + patch_nodes)
    tree = TokenTree(model, tokens, lengths, capacity, prompt_slots=prompt_slots)
    search = _Verification(tree, trie, num_beams, excluded, normalize)
    search.add_proposal(proposal.levels)
    answers = _Answers(tree, num_beams, drafted, proposal.passes)
    while True:
        search.run()
        search.verify()
        answers.take(search)
        if not len(search.request):
            return finish(answers.frontier, trie, num_beams, answers.stats)
        search.patch(patch_nodes)


class _Verification:
    """The state of a batch of searches between passes.

    Attributes:
        request: (b,) place in the original batch of each search still going on.
        level: (b,) depth of its frontier.
        accepted: (b,) drafted levels that the first pass accepted, at most L - 1.
        frontier: K beams each; `parents` are places in the table of run nodes.
    """

    def __init__(
        self,
        tree: TokenTree,
        trie: DeviceTrie,
        num_beams: int,
        excluded: torch.Tensor | None,
        normalize: Normalize,
    ) -> None:
        batch, device = len(tree.lengths), tree.lengths.device
        self.tree, self.trie, self.excluded, self.normalize = tree, trie, excluded, normalize
        self.levels, self.num_beams = trie.source.num_levels, num_beams
        self.request = torch.arange(batch, device=device)
        self.level = torch.zeros(batch, dtype=torch.int64, device=device)
        root = Frontier.root(batch, tree.model.score_dtype, device)
        self.frontier = root.padded(num_beams)
        # The table of what has been run: place 0 is the prompt (state 0), node i is place i + 1.
        self._states = torch.zeros((batch, 1), dtype=torch.int64, device=device)
        dtype = tree.model.score_dtype
        nothing = torch.zeros((batch, 0), dtype=dtype, device=device)
        self._logits = TokenLogits(nothing.new_zeros((batch, 0, len(trie.alphabet))), nothing)
        self.accepted = self.level
        self._first_level = self._last_level = 0

    def add_proposal(self, levels: list[Frontier]) -> None:
        """Add a drafted tree, level by level."""
        first = None
        for depth, level in enumerate(levels, start=1):
            parents = (
                torch.full_like(level.parents, ROOT) if first is None else level.parents + first
            )
            first = self._add(level.states, level.tokens, parents, depth, level.scores > -torch.inf)

    def _add(
        self,
        states: torch.Tensor,
        tokens: torch.Tensor,
        parents: torch.Tensor,
        depth: torch.Tensor | int,
        real: torch.Tensor,
    ) -> int:
        """Add nodes to the tree and their states to the table; padding gets a state of its own."""
        self._states = torch.cat([self._states, states.masked_fill(~real, -1)], dim=1)
        return self.tree.add(tokens, parents, depth)

    def run(self) -> None:
        """One pass of the target over what has been added."""
        new = TokenLogits.of(self.tree.forward(), self.trie)
        pairs = zip(self._logits, new, strict=True)
        self._logits = TokenLogits(*(torch.cat(pair, dim=1) for pair in pairs))

    def verify(self) -> None:
        """Advance every search while all beams of its frontier have been run."""
        for depth in range(self._first_level, self.levels):
            place, found = self._find()
            here = (self.level == depth) & found.all(1)
            following = self._expand(self.frontier, place, depth)
            self.frontier = _where(here, following, self.frontier)
            self.level = self.level + here
        if self.tree.passes == 1:
            self.accepted = self.level - 1

    def _find(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Place in the table of each beam, and whether it has one; dead beams need none."""
        match = self._states[:, None, :] == self.frontier.states[:, :, None]  # (b, K, places)
        dead = self.frontier.scores == -torch.inf
        return match.to(torch.uint8).argmax(-1), match.any(-1) | dead

    def _expand(self, frontier: Frontier, place: torch.Tensor, depth: int) -> Frontier:
        """The next frontier, with places in the table as parents."""
        following = expand(
            frontier,
            self._logits.at(place),
            self.trie,
            depth,
            self.num_beams,
            excluded=self.excluded,
            normalize=self.normalize,
        )
        return following._replace(parents=place.gather(1, following.parents))

    def keep(self, going_on: torch.Tensor) -> None:
        """Drop the searches that are done; (b,) places of the others."""
        self.tree.keep(going_on)
        self.request, self.level = self.request[going_on], self.level[going_on]
        self.accepted = self.accepted[going_on]
        self.frontier = Frontier(*(part[going_on] for part in self.frontier))
        self._states = self._states[going_on]
        self._logits = TokenLogits(*(part[going_on] for part in self._logits))
        self.excluded = None if self.excluded is None else self.excluded[going_on]

    def patch(self, budget: int) -> None:
        """Add the beams that are missing, and the nodes that the next frontier can need.

        Below a beam that has been run these are its best children, which are known; below a missing
        one all children, best parents first. With room for all of them the pass settles two levels.
        """
        place, found = self._find()
        missing = ~found
        bounds = torch.stack([self.level.min(), self.level.max(), missing.sum(1).max()])
        self._first_level, self._last_level, width = bounds.tolist()
        chosen = stable_top(missing.to(torch.uint8), width)
        real = missing.gather(1, chosen)
        first = self._add(
            self.frontier.states.gather(1, chosen),
            self.frontier.tokens.gather(1, chosen),
            self.frontier.parents.gather(1, chosen) - 1,  # ROOT is -1, place 0 the prompt
            self.level[:, None].expand(-1, width),
            real,
        )
        # Node of each beam, run or just added; place 0 of the table is the prompt.
        old = place - 1
        new = torch.arange(first, first + width, device=real.device)
        node = old.scatter(1, chosen, torch.where(real, new, old.gather(1, chosen)))
        self._add_children(place, missing, node, budget)

    def _add_children(
        self, place: torch.Tensor, missing: torch.Tensor, node: torch.Tensor, budget: int
    ) -> None:
        """Add the best nodes below the frontier, at most `budget` a request."""
        batch = len(self.level)
        pick = Frontier.root(batch, self.frontier.scores.dtype, self.level.device)
        pick = pick._replace(scores=pick.scores - torch.inf).padded(budget)
        for depth in range(self._first_level, min(self._last_level, self.levels - 2) + 1):
            children = self.trie.children(self.frontier.states, depth, self.excluded)
            worth = self._worth(place, missing, children).flatten(1)
            best = stable_top(worth, min(budget, worth.shape[1]))
            found = Frontier(
                children.states.flatten(1).gather(1, best),
                worth.gather(1, best),
                self.trie.alphabet[children.symbols.flatten(1).gather(1, best)],
                node.gather(1, best // children.states.shape[-1]),
            )
            pick = _where(self.level == depth, found.padded(budget), pick)
        run = (pick.states[:, :, None] == self._states[:, None, :]).any(-1)
        real = (pick.scores > -torch.inf) & ~run
        width = int(real.sum(1).max())
        if width:
            chosen = stable_top(real.to(torch.uint8), width)
            self._add(
                pick.states.gather(1, chosen),
                pick.tokens.gather(1, chosen),
                pick.parents.gather(1, chosen),
                (self.level[:, None] + 1).expand(-1, width),
                real.gather(1, chosen),
            )

    def _worth(
        self, place: torch.Tensor, missing: torch.Tensor, children: Children
    ) -> torch.Tensor:
        """(b, K, C) how much each child of the frontier is wanted; -inf if it cannot be needed."""
        logits = self._logits.at(place)
        exact = child_scores(self.frontier.scores, logits, children, self.normalize)
        # Of the children that are known, only the best K can be in the next frontier.
        known = exact.masked_fill(missing.unsqueeze(-1), -torch.inf)
        limit = known.flatten(1).topk(min(self.num_beams, known[0].numel())).values[:, -1:]
        known = known.masked_fill(known < limit.unsqueeze(-1), -torch.inf)
        # Those of a missing beam are not: rank them as if all were equally likely.
        count = children.alive.sum(-1, keepdim=True).clamp(min=1).log()
        guess = (self.frontier.scores.unsqueeze(-1) - count).expand_as(exact)
        guess = guess.masked_fill(~children.alive, -torch.inf)
        return torch.where(missing.unsqueeze(-1), guess, known)


class _Answers:
    """What the searches that are done have found, by place in the original batch."""

    def __init__(self, tree: TokenTree, num_beams: int, drafted: int, draft_passes: int) -> None:
        batch, device = len(tree.lengths), tree.lengths.device
        root = Frontier.root(batch, tree.model.score_dtype, device).padded(num_beams)
        self.frontier = Frontier(*(part.clone() for part in root))
        self.stats: list[DecodeStats] = [DecodeStats(0, 0, 0, 0)] * batch
        self._drafted, self._draft_passes = drafted, draft_passes

    def take(self, search: _Verification) -> None:
        """Take what is done out of `search`; here the host waits for the device, once a pass."""
        done = search.level == search.levels
        places = search.request[done]
        for mine, theirs in zip(self.frontier, search.frontier, strict=True):
            mine[places] = theirs[done]
        lengths, accepted = search.tree.lengths[done].tolist(), search.accepted[done].tolist()
        nodes, tree = search.tree.nodes, search.tree
        for place, length, levels in zip(places.tolist(), lengths, accepted, strict=True):
            self.stats[place] = DecodeStats(
                target_passes=tree.passes,
                target_tokens=length + nodes,
                kv_slots=length + nodes,
                kv_bytes=(length + nodes) * tree.cache.bytes_per_slot,
                accepted_levels=levels,
                drafted_nodes=self._drafted,
                draft_passes=self._draft_passes,
            )
        search.keep((~done).nonzero().squeeze(1))


def _where(rows: torch.Tensor, new: Frontier, old: Frontier) -> Frontier:
    """`new` for the requests where `rows` (b,) is true, else `old`."""
    return Frontier(*(torch.where(rows[:, None], n, o) for n, o in zip(new, old, strict=True)))
