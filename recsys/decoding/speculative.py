"""Strict speculative beam search: a drafted tree, one target pass, the answer of beam search.

The target runs prompt and drafted tree in one pass. Then, level by level, the target's top K among
the children of the accepted beams is the next frontier. As long as all beams of a frontier have
been run, the next frontier is known (`verify`). If some have not, a *patch pass* runs these missing
beams, and below them the nodes that the next frontier can need. Nothing is run twice.

By induction each accepted frontier equals beam search's, so the answer does too, whatever was
drafted. A pass settles at least one level, so there are never more passes than in beam search.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from numpy.typing import ArrayLike

from recsys import arguments
from recsys.constraint import ItemTrie
from recsys.constraint.transitions import Children, DeviceTrie
from recsys.decoding.beam import finish, no_answers
from recsys.decoding.draft import Drafter, ExhaustiveDrafter, ModelDrafter, Proposal
from recsys.decoding.expand import Frontier, Step, stable_top
from recsys.decoding.output import Beams, DecodeStats
from recsys.decoding.relaxed import relaxed_beam_search
from recsys.decoding.request import Search, SearchRequest
from recsys.decoding.table import Table
from recsys.decoding.trace import trace
from recsys.decoding.tree import TokenTree, require_finite
from recsys.modes import Mode, Trace, check_mode
from recsys.transfers import download

PATCH_NODES = 128


@torch.inference_mode()
def speculative_beam_search(
    target: Any,
    drafter: Drafter | Any | None,
    request: Search | SearchRequest | Sequence[ArrayLike],
    trie: ItemTrie | DeviceTrie,
    num_beams: int = 20,
    verification: str = Mode.STRICT,
    *,
    patch_nodes: int = PATCH_NODES,
    traced: bool = False,
    released: bool = False,
) -> Beams:
    """`beam_search` in fewer passes of the target; the same answer.

    Args:
        target: as `beam_search`'s model.
        drafter: a `Drafter`, a model that drafts (`ModelDrafter`), or None for the exhaustive
            drafter, which needs no model.
        request: token ids of each prompt, or a `SearchRequest`.
        trie: the catalog.
        num_beams: K.
        verification: `strict`, the answer of beam search, or `relaxed`, which samples approximately
            from the target's distribution (`recsys.decoding.relaxed`). Relaxed verification needs
            seeds and a draft model, and scores no candidates.
        patch_nodes: most nodes that a patch pass adds for the next level: children of missing
            beams and of beams that have been run. On a GPU, the missing beams count, too.
        traced: also return how each answer was found.
        released: relaxed verification accepts and counts as AtSpeed's released code does
            (`recsys.decoding.relaxed`), so that its figures compare with published ones.

    Returns:
        Beams; `stats` counts passes, accepted levels and drafted nodes of each request.

    Raises:
        ValueError: as `beam_search`; an unknown verification, or one that lacks what it needs.
        NonFiniteError: as `beam_search`.
    """
    mode = check_mode("verification", verification, (Mode.STRICT, Mode.RELAXED))
    num_beams = arguments.whole_number("num_beams", num_beams)
    patch_nodes = arguments.whole_number("patch_nodes", patch_nodes)
    if traced and mode is Mode.RELAXED:
        raise ValueError("only strict verification can be traced")
    if released and mode is not Mode.RELAXED:
        raise ValueError("released: only relaxed verification has a released form")
    search = Search.of(request, target, trie)
    if not len(search):
        return no_answers(search, num_beams)
    if mode is Mode.RELAXED:
        return relaxed_beam_search(search, drafter, num_beams, released=released)
    if drafter is None:
        drafter = ExhaustiveDrafter()
    elif not hasattr(drafter, "propose"):
        drafter = ModelDrafter(drafter)
    step = search.step
    # A search is no wider than its catalog, however large num_beams is.
    width = min(num_beams, step.trie.source.num_rows)
    search.send()
    proposal = drafter.propose(search.prompts, step, width)
    with search.tree(proposal.nodes + patch_room(step.trie.source, width, patch_nodes)) as tree:
        verifying = verify_draft(search, tree, proposal, width)
        answers = Answers(verifying, len(search), traced=traced)
        waiting = answers.take(verifying, verifying.results())
        answers.run_patches(verifying, waiting, patch_nodes)
        return answers.beams(step, num_beams, tree)


def patch_room(trie: ItemTrie, width: int, patch_nodes: int = PATCH_NODES) -> int:
    """Most nodes that patch passes add to the tree of a search that keeps `width` beams."""
    return (trie.num_levels - 1) * (width + min(patch_nodes, trie.num_states))


def verify_draft(search: Search, tree: TokenTree, proposal: Proposal, width: int) -> Verification:
    """Run prompts, draft tree and candidates in an empty tree, and accept what is right.

    Nothing waits for the device, so it can be captured.
    """
    table, rows = Table(tree, search.step), search.rows
    table.add_levels(proposal.levels)
    if rows is not None:
        table.add_rows(rows)
    table.run_added()
    scores = None if rows is None else table.scores_of(rows)
    verifying = Verification(table, width, proposal, scores)
    verifying.verify(0)
    return verifying


def counts_nodes(device: torch.device) -> bool:
    """Whether a patch pass runs as few nodes as it can: on a CPU, where every token costs.

    Elsewhere their number would need a synchronisation.
    """
    return device.type == "cpu"


class Verification:
    """The state of a batch of searches between passes.

    Attributes:
        table: what has been run.
        num_beams: K.
        proposal: the draft tree.
        drafted: passes up to the one that verified the draft tree.
        scores: (B, C) of the candidates, for the original batch; None without any.
        level: (b,) depth of each frontier.
        accepted: (b,) drafted levels that the first pass accepted, at most L - 1.
        frontier: K beams each; `parents` are places in the table.
        position: (b, K) row of each beam of the frontier in the table; 0 where it has none.
        missing: (b, K) whether a beam has to be run before its search can go on.
    """

    def __init__(
        self,
        table: Table,
        num_beams: int,
        proposal: Proposal,
        scores: torch.Tensor | None,
    ) -> None:
        """Begin at the root, which is in the table."""
        self.table, self.num_beams = table, num_beams
        self.proposal, self.scores, self.drafted = proposal, scores, len(table.runs)
        root = Frontier.root(len(table.request), table.logits.total.dtype, table.states.device)
        self.frontier = root.padded(num_beams)
        self.level = self.accepted = torch.zeros_like(table.request)
        self.position = torch.zeros_like(self.frontier.states)
        self.missing = torch.zeros_like(self.position, dtype=torch.bool)

    def verify(self, first: int) -> None:
        """Advance every search from level `first` while all beams of its frontier have been run."""
        step = self.table.step
        for depth in range(first, step.levels):
            self._look_up()
            here = (self.level == depth) & ~self.missing.any(1)
            logits = self.table.logits.at(self.position)
            following = step.expand(self.frontier, logits, depth, self.num_beams)
            following = following._replace(parents=self.position.gather(1, following.parents))
            self.frontier = following.where(here, self.frontier)
            self.level = self.level + here
        self._look_up()
        if len(self.table.runs) == self.drafted:
            self.accepted = self.level - 1

    def continued(self, tree: TokenTree) -> Verification:
        """The same state, to go on with in another tree of the same nodes."""
        other, other.table = copy(self), copy(self.table)
        other.table.tree = tree
        return other

    def results(self) -> dict[str, torch.Tensor]:
        """What the host needs after a pass, (b, ...) each; once, the draft's too."""
        table, tree, draft = self.table, self.table.tree, self.proposal.tree
        missing = self.missing.sum(1)
        parts = [table.request, self.level, self.accepted, missing, tree.finite]
        results = {"counts": torch.stack(parts, 1), **self.frontier._asdict()}
        if len(table.runs) == self.drafted and draft is not None:
            results["draft finite"] = draft.finite
        if len(table.runs) == self.drafted and self.scores is not None:
            results["candidates"] = self.scores
        return results

    def _look_up(self) -> None:
        """Set `position` and `missing` for the frontier as it is."""
        self.position, known = self.table.find(self.frontier.states)
        self.missing = ~known & (self.frontier.scores > -torch.inf)

    def keep(self, going_on: torch.Tensor) -> None:
        """Drop the searches that are done; (b,) places of the others."""
        self.table.keep(going_on)
        self.level, self.accepted = self.level[going_on], self.accepted[going_on]
        self.position, self.missing = self.position[going_on], self.missing[going_on]
        self.frontier = self.frontier.take(going_on)

    def patch(self, levels: range, width: int, budget: int) -> None:
        """Add missing beams, and at most `budget` nodes that the next frontier can need.

        Below a beam that has been run these are its best children, which are known; below a missing
        one all children, best guesses first. With room for all of them the pass settles two levels.
        Frontiers are at `levels`, and a request misses at most `width` beams.
        """
        chosen, _ = stable_top(self.missing.float(), width)
        real = self.missing.gather(1, chosen)
        first = self.table.add(
            self.frontier.states.gather(1, chosen),
            self.frontier.tokens.gather(1, chosen),
            self.frontier.parents.gather(1, chosen),
            self.level[:, None],
            real,
        )
        new = torch.arange(first, first + width, device=real.device)
        new = torch.where(real, new, self.position.gather(1, chosen))
        self._add_children(self.position.scatter(1, chosen, new), levels, budget)

    def _add_children(self, position: torch.Tensor, levels: range, budget: int) -> None:
        """Add the best nodes below the beams at (b, K) places, at most `budget` a request."""
        table, step = self.table, self.table.step
        if levels.start >= step.levels - 1:
            return  # what follows the last level is no node
        pick = Frontier.nothing(self.frontier, budget)
        for depth in range(levels.start, min(levels.stop, step.levels - 1)):
            children = step.children(self.frontier.states, depth)
            worth = self._worth(position, children, depth).flatten(1)
            best, _ = stable_top(worth, min(budget, worth.shape[1]))
            above = position.unsqueeze(-1).expand_as(children.states).flatten(1)
            proposed = Frontier.proposed(
                children.states.flatten(1),
                worth,
                step.trie.alphabet[children.symbols].flatten(1),
                above,
            ).at(best)
            pick = proposed.padded(budget).where(self.level == depth, pick)
        _, run = table.find(pick.states)
        real = (pick.scores > -torch.inf) & ~run
        width = int(real.sum(1).max()) if counts_nodes(real.device) else real.shape[1]
        if width:
            chosen, _ = stable_top(real.float(), width)
            table.add(
                pick.states.gather(1, chosen),
                pick.tokens.gather(1, chosen),
                pick.parents.gather(1, chosen),
                self.level[:, None] + 1,
                real.gather(1, chosen),
            )

    def _worth(self, position: torch.Tensor, children: Children, depth: int) -> torch.Tensor:
        """(b, K, C) priority of each child of the frontier; -inf if it cannot be needed."""
        step, missing = self.table.step, self.missing
        # Of the children that are known, only the best K can be in the next frontier.
        logits = self.table.logits.at(torch.where(missing, 0, position))
        exact, _ = step.score(self.frontier, logits, children)
        known = exact.masked_fill(missing.unsqueeze(-1), -torch.inf)
        limit = known.flatten(1).topk(self.num_beams).values[:, -1:]
        known = known.masked_fill(known < limit.unsqueeze(-1), -torch.inf)
        # Children of a missing beam are unknown: one with more of the catalog below it is likelier.
        above = step.trie.sizes(self.frontier.states, depth).unsqueeze(-1)
        share = (step.trie.sizes(children.states, depth + 1) / above).to(exact.dtype).log()
        # the share of a child that is not alive is 0 / 0
        guess = (self.frontier.scores.unsqueeze(-1) + share).masked_fill(
            ~children.alive, -torch.inf
        )
        return torch.where(missing.unsqueeze(-1), guess, known)


class Answers:
    """The answers of the searches that are done, by place in the original batch.

    Attributes:
        frontier: complete sequences of each request, on the host.
        finite: (B,) bool, whether all logits of each request that is done were finite.
    """

    def __init__(self, search: Verification, requests: int, *, traced: bool = False) -> None:
        """Collect answers to the first `requests` of a batch; those behind only fill it up."""
        self.frontier = Frontier(
            *(part.new_empty((requests, *part.shape[1:]), device="cpu") for part in search.frontier)
        )
        self.finite = torch.ones(requests, dtype=torch.bool)
        self._scores: torch.Tensor | None = None
        self._proposal, self._traced = search.proposal, traced
        self._stats: dict[int, DecodeStats] = {}
        self._traces: dict[int, Trace] = {}

    def take(
        self, search: Verification, results: dict[str, torch.Tensor]
    ) -> tuple[range, int] | None:
        """Take the finished searches out of `search`; this synchronises once a pass.

        Args:
            search: after a pass.
            results: `search.results()`, on the device or on the host.

        Returns:
            The levels of the searches still going on and the most beams that one of them misses;
            None if all are done.
        """
        columns = [column[: len(self.finite)] for column in results.values()]
        results = dict(zip(results, download(columns), strict=True))
        table, draft = search.table, self._proposal.tree
        if "candidates" in results:
            self._scores = results["candidates"]
        if "draft finite" in results and draft is not None:
            draft.settle(results["draft finite"].tolist())
        counts = results["counts"]
        lines = counts.tolist()
        # a request whose logits are not finite ends here
        ended = [line[1] == table.step.levels or not line[-1] for line in lines]
        done = [i for i, end in enumerate(ended) if end]
        going_on = [i for i, end in enumerate(ended) if not end]
        device = search.level.device
        if done:
            positions = torch.tensor(done)
            requests = counts[positions, 0]
            for name, mine in self.frontier._asdict().items():
                mine[requests] = results[name][positions]
            if self._traced:
                traces = trace(table, positions.to(device), search.num_beams, self._proposal.levels)
                self._traces |= {lines[i][0]: t for i, t in zip(done, traces, strict=True)}
        for i in done:
            request, _, accepted, _, finite = lines[i]
            self.finite[request] = bool(finite)
            self._stats[request] = table.tree.stats(
                request,
                accepted_levels=accepted,
                drafted_nodes=self._proposal.nodes,
                draft_passes=self._proposal.passes,
            )
        if not going_on:
            return None
        if len(going_on) < len(search.level):
            search.keep(torch.tensor(going_on, device=device))
        levels = [lines[i][1] for i in going_on]
        return range(min(levels), max(levels) + 1), max(lines[i][3] for i in going_on)

    def run_patches(
        self, search: Verification, waiting: tuple[range, int] | None, patch_nodes: int
    ) -> None:
        """Run patch passes until all searches are done; `waiting` is what `take` returned."""
        while waiting is not None:
            levels, missing = waiting
            budget = min(patch_nodes, search.table.step.trie.source.num_states)
            if not counts_nodes(search.level.device):  # with the missing beams, whole tiles
                budget = max(1, budget - missing)
            search.patch(levels, missing, budget)
            search.table.run()
            search.verify(levels.start)
            waiting = self.take(search, search.results())

    def beams(self, step: Step, num_beams: int, tree: TokenTree) -> Beams:
        """All answers, padded to `num_beams`; NonFiniteError if logits were not finite."""
        tree.settle(self.finite.tolist())
        require_finite(self.finite)
        stats = [self._stats[i] for i in range(len(self._stats))]
        ranked = finish(self.frontier, step, num_beams, stats, self._scores)
        ranked.traces.extend(self._traces[i] for i in range(len(self._traces)))
        return ranked
