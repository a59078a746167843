"""Strict speculative beam search: a drafted tree, one target pass, the answer of beam search.

The target runs prompt and drafted tree in one pass. Then, level by level, its own top-K among the
children of the beams it already accepted is the next frontier; while every beam of a frontier has
been run, the next frontier is known (`verify`). Where one has not, a *patch pass* runs the missing
beams, and below them what the next frontier can need; everything that has been run is kept.

By induction each accepted frontier is beam search's, so the answer is too, whatever was drafted.
A pass always settles at least one level: never more passes than beam search.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from numpy.typing import ArrayLike

from recsys import arguments
from recsys.constraint import ItemTrie
from recsys.constraint.boost import Boost
from recsys.constraint.mask import RowMask
from recsys.constraint.transitions import Children, DeviceTrie
from recsys.decoding.beam import finish, num_levels, prepare, row_tree
from recsys.decoding.draft import Drafter, ExhaustiveDrafter, ModelDrafter, Proposal
from recsys.decoding.expand import Frontier, Normalize, Step, stable_top
from recsys.decoding.output import Beams, DecodeStats
from recsys.decoding.relaxed import relaxed_beam_search
from recsys.decoding.table import Table
from recsys.decoding.trace import Trace, trace
from recsys.decoding.tree import Prompts, TokenTree, require_finite
from recsys.models.tree_forward import TreeModel

Verification = Literal["strict", "relaxed"]
PATCH_NODES = 128


@torch.inference_mode()
def speculative_beam_search(
    target: Any,
    drafter: Drafter | Any | None,
    prompts: Sequence[ArrayLike] | Prompts,
    trie: ItemTrie | DeviceTrie,
    num_beams: int = 20,
    verification: Verification = "strict",
    *,
    exclude: Sequence[ArrayLike] | None = None,
    masks: Sequence[RowMask | None] | None = None,
    boosts: Sequence[Boost | None] | None = None,
    normalize: Normalize = "vocabulary",
    seeds: Sequence[int] | None = None,
    temperature: float = 1.0,
    prompt_slots: int = 0,
    draft_beams: int | None = None,
    patch_nodes: int = PATCH_NODES,
    traced: bool = False,
    candidates: Sequence[ArrayLike] | None = None,
    candidate_nodes: int | None = None,
) -> Beams:
    """`beam_search` in fewer passes of the target; the same answer.

    Args:
        target: as `beam_search`'s model.
        drafter: a `Drafter`, a Hugging Face model that drafts (`ModelDrafter` with its defaults),
            or None for the exhaustive drafter, which needs no model.
        prompts: token ids of each request.
        trie: the catalog.
        num_beams: K.
        verification: `strict`, which loses nothing, or `relaxed`, which samples approximately from
            the target's distribution (`recsys.decoding.relaxed`); it needs seeds and a draft model.
        exclude: trie rows that each request must not get.
        masks: what each request may get; None for everything.
        boosts: what each request's items gain, as for `beam_search`.
        normalize: `vocabulary` (default) or `allowed`.
        seeds: one a request, to sample as `beam_search` does; the same sample.
        temperature: divides the logits, when sampling.
        prompt_slots: prompt slots to reserve at least.
        draft_beams: N of relaxed verification, sequences that the draft draws at each level; K by
            default, and more lean towards the draft.
        patch_nodes: most nodes below the missing beams in a patch pass.
        traced: also say how each answer was found.
        candidates: rows to be scored along, as for `beam_search`; not with `relaxed`.
        candidate_nodes: nodes for them, as there.

    Returns:
        Beams; `stats` counts passes, accepted levels and drafted nodes of each request.

    Raises:
        ValueError: as `beam_search`, an unknown verification, or one that lacks what it needs.
    """
    if verification not in ("strict", "relaxed"):
        raise ValueError(f"verification {verification!r} is neither 'strict' nor 'relaxed'")
    num_beams = arguments.whole_number("num_beams", num_beams)
    patch_nodes = arguments.whole_number("patch_nodes", patch_nodes)
    if traced and verification == "relaxed":
        raise ValueError("only strict verification can be traced")
    model = TreeModel.of(target)
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
    # A search is no wider than its catalog, however many beams are asked for.
    width = min(num_beams, step.trie.source.num_rows)
    patch_nodes = min(patch_nodes, step.trie.source.num_states)
    if verification == "relaxed":
        return relaxed_beam_search(
            model, drafter, ready, step, num_beams, draft_beams, prompt_slots=prompt_slots
        )
    if drafter is None:
        drafter = ExhaustiveDrafter()
    elif not hasattr(drafter, "propose"):
        drafter = ModelDrafter(drafter)
    proposal = drafter.propose(ready, step, width, prompt_slots=prompt_slots)
    capacity = proposal.nodes + (step.levels - 1) * (width + patch_nodes)
    capacity += 0 if wanted is None else wanted.width
    with TokenTree(model, ready, capacity, prompt_slots=prompt_slots) as tree:
        search = _Verification(Table(tree, step), width)
        search.table.add_levels(proposal.levels)
        if wanted is not None:
            search.table.add_rows(wanted)
        answers = _Answers(search, proposal, traced)
        scores = None
        while True:
            search.table.run()
            if wanted is not None and scores is None:
                scores = search.table.scores_of(wanted)
            search.verify()
            waiting = answers.take(search)
            if waiting is None:
                return answers.beams(step, num_beams, scores)
            search.patch(*waiting, patch_nodes)


class _Verification:
    """The state of a batch of searches between passes.

    Attributes:
        table: what has been run.
        level: (b,) depth of each frontier.
        accepted: (b,) drafted levels that the first pass accepted, at most L - 1.
        forced: (b,) whether a beam of the last level was spared its forward (`Step.forced`).
        frontier: K beams each; `parents` are places in the table.
    """

    def __init__(self, table: Table, num_beams: int) -> None:
        self.table, self.num_beams = table, num_beams
        root = Frontier.root(len(table.request), table.logits.total.dtype, table.states.device)
        self.frontier = root.padded(num_beams)
        self.level = self.accepted = torch.zeros_like(table.request)
        self.forced = torch.zeros_like(table.request, dtype=torch.bool)
        self.place, self.missing = self._find()
        self._levels = range(table.step.levels)  # that frontiers can be at

    def verify(self) -> None:
        """Advance every search while all beams of its frontier have been run."""
        for depth in range(self._levels.start, self.table.step.levels):
            place, missing = self._find()
            here = (self.level == depth) & ~missing.any(1)
            following = self.table.step.expand(
                self.frontier, self.table.logits.at(place), depth, self.num_beams
            )
            following = following._replace(parents=place.gather(1, following.parents))
            self.frontier = following.where(here, self.frontier)
            self.level = self.level + here
        self.place, self.missing = self._find()
        if len(self.table.runs) == 1:
            self.accepted = self.level - 1

    def _find(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Place in the table of each beam, and whether it has none and needs one."""
        place, found = self.table.find(self.frontier.states)
        missing = ~found & (self.frontier.scores > -torch.inf)
        last = self.table.step.levels - 1
        forced = self.table.step.forced(self.frontier.states, last)
        if forced is not None:  # any logits do, and nothing follows that would look for a parent
            spared = missing & forced & (self.level == last)[:, None]
            missing = missing & ~spared
            self.forced = self.forced | spared.any(1)
        return place, missing

    def keep(self, going_on: torch.Tensor) -> None:
        """Drop the searches that are done; (b,) places of the others."""
        self.table.keep(going_on)
        self.level, self.accepted = self.level[going_on], self.accepted[going_on]
        self.place, self.missing = self.place[going_on], self.missing[going_on]
        self.forced = self.forced[going_on]
        self.frontier = self.frontier.take(going_on)

    def patch(self, levels: range, width: int, budget: int) -> None:
        """Add the beams that are missing, and the nodes that the next frontier can need.

        Below a beam that has been run these are its best children, which are known; below a missing
        one all children, best guesses first. With room for all of them the pass settles two levels.

        Args:
            levels: that frontiers are at.
            width: most beams that a request misses.
            budget: most nodes below them.
        """
        self._levels = levels
        place, missing = self.place, self.missing
        chosen, _ = stable_top(missing.float(), width)
        real = missing.gather(1, chosen)
        first = self.table.add(
            self.frontier.states.gather(1, chosen),
            self.frontier.tokens.gather(1, chosen),
            self.frontier.parents.gather(1, chosen),
            self.level[:, None],
            real,
        )
        new = torch.arange(first, first + width, device=real.device)
        place = place.scatter(1, chosen, torch.where(real, new, place.gather(1, chosen)))
        self._add_children(place, missing, budget)

    def _add_children(self, place: torch.Tensor, missing: torch.Tensor, budget: int) -> None:
        """Add the best nodes below the frontier, at most `budget` a request.

        Args:
            place: (b, K) of each beam in the table, those just added included.
            missing: (b, K) the beams that were just added.
            budget: nodes.
        """
        table, step = self.table, self.table.step
        pick = Frontier.nothing(self.frontier, budget)
        for depth in self._levels[: step.levels - 1 - self._levels.start]:
            children = step.children(self.frontier.states, depth)
            worth = self._worth(place, missing, children, depth).flatten(1)
            best, _ = stable_top(worth, min(budget, worth.shape[1]))
            above = place.unsqueeze(-1).expand_as(children.states).flatten(1)
            found = Frontier.proposed(
                children.states.flatten(1),
                worth,
                step.trie.alphabet[children.symbols].flatten(1),
                above,
            ).at(best)
            pick = found.padded(budget).where(self.level == depth, pick)
        _, run = table.find(pick.states)
        real = (pick.scores > -torch.inf) & ~run
        # On a CPU every token costs; elsewhere the host would wait to know how many there are.
        width = int(real.sum(1).max()) if real.device.type == "cpu" else real.shape[1]
        if width:
            chosen, _ = stable_top(real.float(), width)
            table.add(
                pick.states.gather(1, chosen),
                pick.tokens.gather(1, chosen),
                pick.parents.gather(1, chosen),
                self.level[:, None] + 1,
                real.gather(1, chosen),
            )

    def _worth(
        self, place: torch.Tensor, missing: torch.Tensor, children: Children, depth: int
    ) -> torch.Tensor:
        """(b, K, C) how much each child of the frontier is wanted; -inf if it cannot be needed."""
        step = self.table.step
        # Of the children that are known, only the best K can be in the next frontier.
        logits = self.table.logits.at(torch.where(missing, 0, place))
        exact, _ = step.score(self.frontier, logits, children)
        known = exact.masked_fill(missing.unsqueeze(-1), -torch.inf)
        limit = known.flatten(1).topk(self.num_beams).values[:, -1:]
        known = known.masked_fill(known < limit.unsqueeze(-1), -torch.inf)
        # Those of a missing beam are not: a child with more of the catalog below it is likelier.
        above = step.trie.sizes(self.frontier.states, depth).unsqueeze(-1)
        share = (step.trie.sizes(children.states, depth + 1) / above).to(exact.dtype).log()
        # what is not alive has no share of anything, 0 / 0
        guess = (self.frontier.scores.unsqueeze(-1) + share).masked_fill(
            ~children.alive, -torch.inf
        )
        return torch.where(missing.unsqueeze(-1), guess, known)


class _Answers:
    """What the searches that are done have found, by place in the original batch."""

    def __init__(self, search: _Verification, proposal: Proposal, traced: bool) -> None:
        self.frontier = Frontier(*(part.clone() for part in search.frontier))
        self.num_beams, self._proposal, self._traced = search.num_beams, proposal, traced
        self._finite = torch.ones(len(search.level), dtype=torch.bool)
        self._stats: dict[int, DecodeStats] = {}
        self._traces: dict[int, Trace] = {}

    def take(self, search: _Verification) -> tuple[range, int] | None:
        """Take what is done out of `search`; here the host waits for the device, once a pass.

        Returns:
            Levels of the searches still going on and the most beams that one of them misses; None
            if all are done.
        """
        table, tree = search.table, search.table.tree
        missing = search.missing.sum(1)
        told = [table.request, search.level, search.accepted, tree.lengths, missing, search.forced]
        lines = torch.stack([*told, tree.finite], 1).tolist()
        # logits that are not finite decide nothing: such a request ends where it is
        ended = [line[1] == table.step.levels or not line[-1] for line in lines]
        done = [i for i, end in enumerate(ended) if end]
        going_on = [i for i, end in enumerate(ended) if not end]
        device = search.level.device
        if done:
            places = torch.tensor(done, device=device)
            requests = table.request[places]
            for mine, theirs in zip(self.frontier, search.frontier, strict=True):
                mine[requests] = theirs[places]
            if self._traced:
                found = trace(table, places, self.num_beams, self._proposal.levels)
                self._traces |= {lines[i][0]: t for i, t in zip(done, found, strict=True)}
        for i in done:
            request, _, accepted, length, _, forced, finite = lines[i]
            self._finite[request] = bool(finite)
            cached = int(tree.cached[request])
            self._stats[request] = DecodeStats(
                target_passes=tree.passes,
                target_tokens=length - cached + tree.nodes,
                kv_slots=length + tree.nodes,
                kv_bytes=(length + tree.nodes) * tree.cache.bytes_per_slot,
                accepted_levels=accepted,
                drafted_nodes=self._proposal.nodes,
                draft_passes=self._proposal.passes,
                cached_tokens=cached,
                forced_levels=forced,
            )
        if not going_on:
            return None
        if done:
            search.keep(torch.tensor(going_on, device=device))
        levels = [lines[i][1] for i in going_on]
        return range(min(levels), max(levels) + 1), max(lines[i][4] for i in going_on)

    def beams(self, step: Step, num_beams: int, candidate_scores: torch.Tensor | None) -> Beams:
        """All answers, padded to `num_beams`.

        Raises:
            NonFiniteError: the logits of a request were not finite.
        """
        require_finite(self._finite)
        stats = [self._stats[i] for i in range(len(self._stats))]
        found = finish(self.frontier, step, num_beams, stats, candidate_scores)
        found.traces.extend(self._traces[i] for i in range(len(self._traces)))
        return found
