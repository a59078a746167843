"""Relaxed verification: drafted samples are accepted at random (AtSpeed, algorithm 2).

In each round the draft draws N sequences without replacement at every level below the beams, the
target runs all of them in one pass, and levels are settled from the first one down. Let p and q be
the target's and the draft's distributions over all children of the current beams. A drawn child is
accepted with probability min(1, p / q). K of the accepted children are the next beams. If there are
fewer, sampling from norm(max(0, p - q)) fills the list, and from p once that is exhausted. A round
ends at the first level with a beam that was not drawn, and the next round drafts below the beams
that are then known. The last level needs no nodes, so the target draws it itself.

AtSpeed's released code differs in four points, which `released` reproduces. p and q of a child are
products of whole-vocabulary probabilities, each divided by the temperature as a log-probability,
and are normalised once, over all children of the level; not at each node over the allowed tokens. q
is not renormalised to the children of the current beams: it is over the children of all N drafted
beams. A level counts as accepted only if K drawn children passed the test, not if places were
filled with drawn ones. And accepted levels are counted over all rounds.

At N = K = 1 this reproduces the target's distribution. Otherwise it is approximate: drawing without
replacement is treated as drawing with replacement, every level draws again (a prefix counts twice
that `recsys.decoding.sampling` counts once), and with N > K the beams are biased towards the draft.
All randomness is keyed by (seed, state), as in sampling.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from recsys.constraint.transitions import Children, read
from recsys.decoding.beam import finish
from recsys.decoding.draft import ModelDrafter
from recsys.decoding.expand import Frontier, TokenLogits, stable_top
from recsys.decoding.output import Beams, DecodeStats
from recsys.decoding.request import Search
from recsys.decoding.sampling import Noise
from recsys.decoding.table import Table
from recsys.decoding.tree import PromptBatch, TokenTree, require_finite
from recsys.models.tree_forward import TreeModel

# Streams of noise for acceptance and filling; drawing uses that of plain sampling.
_ACCEPT, _FILL = 1, 2


def relaxed_beam_search(
    search: Search, drafter: Any, num_beams: int, *, released: bool = False
) -> Beams:
    """Sample K sequences of each prompt; see `speculative_beam_search`.

    Args:
        search: of at least one request, with seeds; its model is the one whose distribution is
            wanted. Candidates are not scored.
        drafter: a Hugging Face model, a `TreeModel`, or a `ModelDrafter`, of which the model and
            `draft_beams` (N, K by default) matter.
        num_beams: K.
        released: as AtSpeed's released code.

    Returns:
        Beams, best first by the target's log-probability, labelled `approximate`.

    Raises:
        ValueError: no seeds, no draft model, or N < K.
    """
    step, prompts = search.step, search.prompts
    if step.noise is None:
        raise ValueError("relaxed verification samples: give it seeds, one a request")
    draft, drafts = drafter, None
    if isinstance(drafter, ModelDrafter):
        draft, drafts = drafter.model, drafter.draft_beams
    drafts = num_beams if drafts is None else drafts
    if drafts < num_beams:
        raise ValueError(f"draft_beams must be at least num_beams ({num_beams}), got {drafts}")
    # No level has more than the catalog's sequences, however large K and N are.
    rows = step.trie.source.num_rows
    width, drafts = min(num_beams, rows), min(drafts, rows)
    if draft is None or hasattr(draft, "propose"):
        name = type(draft).__name__
        raise ValueError(f"relaxed verification needs a draft model that knows q, got {name}")
    draft = TreeModel.of(draft)
    PromptBatch.of(prompts, draft, step.levels - 2)
    # Each round starts at least one level lower; all but the first add beams that were not drawn.
    below = step.levels - 1
    capacity = below * width + drafts * below * (below + 1) // 2
    with (
        TokenTree(search.model, prompts, capacity) as tree,
        TokenTree(draft, prompts, capacity) as draft_tree,
    ):
        # p and q are plain log-probabilities; the noise enters in `_Rounds.draft` and `settle`
        plain = replace(step, normalize="vocabulary" if released else "allowed", noise=None)
        tables = Table(tree, plain), Table(draft_tree, plain)
        rounds = _Rounds(*tables, step.noise, width, drafts, released)
        while len(rounds.level):
            rounds.draft()
            rounds.verify()
            rounds.take_done()
        require_finite(rounds.finite)
        stats = [rounds.stats[i] for i in range(len(prompts))]
        sampled = finish(rounds.answers, step, num_beams, stats)
    scores = sampled.scores.to(search.model.score_dtype)
    return replace(sampled, scores=scores, is_global=None, approximate=True)


def settle(
    log_p: torch.Tensor,
    log_q: torch.Tensor,
    drawn: torch.Tensor,
    states: torch.Tensor,
    noise: Noise,
    count: int,
    mass: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Settle one level, given (B, M) values for all children of the beams.

    Args:
        log_p: the target's log-probabilities, up to a constant for each request; -inf for
            children that are not alive.
        log_q: the draft's.
        drawn: bool, those that were drawn from q.
        states: trie states, which key the noise.
        noise: of the requests.
        count: K, at most M.
        mass: (B,) log of what q adds up to over all drafted beams' children, for the released form;
            None normalises q over the given children.

    Returns:
        (B, K) places of the next beams, ascending, then M where fewer are alive; and (B,) whether
        the level is accepted: all of them had been drawn, or in the released form, K accepted (all
        that are alive, where they are fewer).
    """
    log_p = _normalized(log_p)
    log_q = _normalized(log_q) if mass is None else _less(log_q, mass[:, None])
    alive = log_p > -torch.inf
    accepted = drawn & alive & (noise.stream(_ACCEPT).uniform(states).log() <= log_p - log_q)
    residual = (log_p.exp() - log_q.exp()).relu().log()
    # one list in order of preference: accepted children in random order, then those sampled from
    # the residual without replacement, then from p, then children that are not alive
    kind = torch.where(residual > -torch.inf, 1, 2).masked_fill(accepted, 0)
    kind = kind.masked_fill(~alive, 3)
    weight = torch.where(kind == 1, residual, log_p).masked_fill(accepted, 0.0)
    by_weight = (weight + noise.stream(_FILL).gumbel(states)).argsort(1, descending=True)
    order = by_weight.gather(1, kind.gather(1, by_weight).argsort(stable=True, dim=1))
    chosen = order[:, :count]
    chosen = torch.where(alive.gather(1, chosen), chosen, log_p.shape[1]).sort(1).values
    if mass is None:
        return chosen, read(drawn, chosen, True).all(1)
    return chosen, accepted.sum(1) >= alive.sum(1).clamp(max=count)


def _normalized(log_probs: torch.Tensor) -> torch.Tensor:
    """(B, M) log-probabilities that add up to 1; -inf throughout where nothing is alive."""
    return _less(log_probs, log_probs.double().logsumexp(1, keepdim=True))


def _less(log_probs: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Log-probabilities less the log of their total, which may be that of nothing."""
    return log_probs.double() - total.clamp(min=torch.finfo(torch.float64).min)


class _Rounds:
    """The state of a batch between rounds.

    Frontiers here have their scores equal to their log-probabilities, and as `parents` the trie
    states of the parents, which mean the same in the target's table and in the draft's.

    Attributes:
        target: what the target has been run on.
        sketch: what the draft has been run on.
        level: (b,) depth of each frontier.
        accepted: (b,) levels that the first round settled, without its last; in the released form
            those of all rounds.
        drafted: (b,) nodes that the draft has drawn.
        frontier: K beams each.
        drawn: by depth, what the draft has drawn in this round.
        mass: by depth, (b,) log of what q adds up to over all children that it was drawn from.
        answers: frontiers of all requests, complete for those in `stats`.
        finite: whether the target's logits were finite, for each request in `stats`.
        stats: of the requests that are done.
    """

    def __init__(
        self,
        target: Table,
        sketch: Table,
        noise: Noise,
        num_beams: int,
        draft_beams: int,
        released: bool,
    ) -> None:
        """Begin at the root of both tables."""
        self.target, self.sketch = target, sketch
        self.noise, self.temperature = noise, noise.temperature
        self.num_beams, self.draft_beams, self.released = num_beams, draft_beams, released
        self.level = self.accepted = self.drafted = torch.zeros_like(target.request)
        root = Frontier.root(len(self.level), torch.float64, self.level.device)
        self.frontier = self.answers = root.padded(num_beams)
        self.drawn: dict[int, Frontier] = {}
        self.mass: dict[int, torch.Tensor] = {}
        self.finite = torch.ones_like(self.level, dtype=torch.bool)
        self.stats: dict[int, DecodeStats] = {}

    def draft(self) -> None:
        """Draw the levels below each frontier, and run the target on frontiers and drawn nodes."""
        beams = level = self.frontier.padded(self.draft_beams)
        levels = self.target.step.levels
        for depth in range(int(self.level.min()), levels):
            level = beams.where(self.level == depth, level)
            real = (level.scores > -torch.inf) & (self.level <= depth)[:, None]
            _add(self.target, level, real, depth)
            if depth < levels - 1:
                _add(self.sketch, level, real, depth)
                self.sketch.run_added()
                # requests at lower levels keep their beams
                level = self._draw(level, depth).where(self.level <= depth, level)
                self.drawn[depth + 1] = level
                news = (level.scores > -torch.inf).sum(1)
                self.drafted = self.drafted + torch.where(self.level <= depth, news, 0)
        self.target.run_added()

    def _draw(self, beams: Frontier, depth: int) -> Frontier:
        """Draw N children of the beams from the draft, without replacement."""
        children = self.target.step.children(beams.states, depth)
        log_q = self._log_probs(self.sketch, beams, children)
        self.mass[depth + 1] = log_q.double().logsumexp(1)
        noisy = log_q + self.noise.gumbel(children.states.flatten(1))
        return self._take(beams, children, log_q, stable_top(noisy, self.draft_beams)[0])

    def verify(self) -> None:
        """Settle levels, from the first down, while all beams of a level were drawn."""
        step, target = self.target.step, self.target
        beams = theirs = self.frontier  # with log-probabilities of the target, and of the draft
        going, before = torch.ones_like(self.level, dtype=torch.bool), self.level
        for depth in range(int(self.level.min()), step.levels):
            mass = None
            here = going & (self.level == depth)
            children = step.children(beams.states, depth)
            states = children.states.flatten(1)
            log_p = self._log_probs(target, beams, children)
            if depth < step.levels - 1:
                log_q = self._log_probs(self.sketch, theirs, children)
                drawn = self._among(self.drawn[depth + 1], beams, children)
                mass = self.mass[depth + 1] if self.released else None
            else:
                log_q, drawn = log_p, torch.zeros_like(states, dtype=torch.bool)
                own, _ = stable_top(log_p + self.noise.gumbel(states), self.num_beams)
                drawn = torch.nn.functional.pad(drawn, (0, 1)).scatter_(1, own, True)[:, :-1]
            chosen, known = settle(log_p, log_q, drawn, states, self.noise, self.num_beams, mass)
            beams = self._take(beams, children, log_p, chosen).where(here, beams)
            theirs = self._take(theirs, children, log_q, chosen).where(here, theirs)
            self.level = self.level + here
            going = going & (known | ~here)
        self.frontier = beams
        if self.released or len(target.runs) == 1:
            self.accepted = self.accepted + self.level - before - 1

    def _log_probs(self, table: Table, beams: Frontier, children: Children) -> torch.Tensor:
        """(b, W * C) log-probabilities of all children of the beams; -inf where not alive."""
        position, _ = table.find(beams.states)
        logits, total = table.logits.at(position)
        # Only the released form, which is normalised over the vocabulary, reads the total.
        tempered = TokenLogits(logits.double() / self.temperature, total / self.temperature)
        return self.target.step.score(beams, tempered, children)[1].flatten(1)

    def _take(
        self, beams: Frontier, children: Children, log_probs: torch.Tensor, chosen: torch.Tensor
    ) -> Frontier:
        """The children of the beams at (b, W) `chosen`."""
        parents = beams.states.unsqueeze(-1).expand_as(children.states).flatten(1)
        tokens = self.target.step.trie.alphabet[children.symbols].flatten(1)
        children_frontier = Frontier(
            children.states.flatten(1), log_probs, tokens, parents, log_probs, beams.rest
        )
        return children_frontier.at(chosen)

    def _among(self, drawn: Frontier, beams: Frontier, children: Children) -> torch.Tensor:
        """(b, W * C) which children of the beams were drawn; others' children are left out."""
        width = children.states.shape[-1]
        alive = (drawn.scores > -torch.inf)[:, :, None]
        match = (drawn.parents[:, :, None] == beams.states[:, None, :]) & alive
        drawn_below = match.any(-1)
        first = self.target.step.trie.first_child[drawn.parents.masked_fill(~drawn_below, 0)]
        column = match.to(torch.uint8).argmax(-1) * width + drawn.states - first
        nowhere = beams.states.shape[1] * width
        mask = torch.zeros_like(children.alive.flatten(1))
        mask = torch.nn.functional.pad(mask, (0, 1))
        return mask.scatter(1, torch.where(drawn_below, column, nowhere), True)[:, :-1]

    def take_done(self) -> None:
        """Remove finished requests; this synchronises with the device, once a round."""
        tree = self.target.tree
        # a request whose logits are not finite ends here
        done = (self.level == self.target.step.levels) | ~tree.finite
        self.finite[self.target.request[done]] = tree.finite[done]
        parts = [self.target.request, self.accepted, self.drafted]
        for request, accepted, drafted in torch.stack(parts, 1)[done].tolist():
            self.stats[request] = tree.stats(
                request,
                accepted_levels=accepted,
                drafted_nodes=drafted,
                draft_passes=self.sketch.tree.passes,
            )
        requests = self.target.request[done]
        self.answers = Frontier(
            *(
                mine.index_copy(0, requests, theirs[done])
                for mine, theirs in zip(self.answers, self.frontier, strict=True)
            )
        )
        going_on = (~done).nonzero().squeeze(1)
        self.target.keep(going_on)
        self.sketch.keep(going_on)
        self.level, self.accepted = self.level[going_on], self.accepted[going_on]
        self.drafted, self.noise = self.drafted[going_on], self.noise.take(going_on)
        self.frontier = self.frontier.take(going_on)


def _add(table: Table, beams: Frontier, needed: torch.Tensor, depth: int) -> None:
    """Add the wanted beams that are not in the table, in as few places as possible."""
    _, known = table.find(beams.states)
    missing = needed & ~known
    width = int(missing.sum(1).max())
    if width:
        chosen, _ = stable_top(missing.float(), width)
        parents, _ = table.find(beams.parents.gather(1, chosen))
        table.add(
            beams.states.gather(1, chosen),
            beams.tokens.gather(1, chosen),
            parents,
            depth,
            missing.gather(1, chosen),
        )
