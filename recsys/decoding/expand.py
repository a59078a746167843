"""One constrained step: scores x log-probabilities x trie -> the best children.

Beam search, drafting and verification share this code, so they rank alike. Candidates are kept in
row order (ascending states), which makes "ties go to the lower row" a stable selection. If there
are too few candidates, the remaining places hold beams that do not exist: state `NO_STATE`, score
-inf. They have no children and are never part of an answer.

Shapes: B requests, W beams, C children a beam at most, V vocabulary, A tokens of the trie.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch

from recsys.constraint.restrictions import Allowed, Excluded, Gains
from recsys.constraint.transitions import Children, DeviceTrie
from recsys.constraint.trie import NO_STATE
from recsys.decoding.sampling import Noise
from recsys.decoding.tree import NO_TOKEN, TokenTree
from recsys.kernels import find_kernels
from recsys.native.decoder import log_sum_exp

_KERNELS = "recsys.decoding.level_kernel"
Normalize = Literal["vocabulary", "allowed"]


class TokenLogits(NamedTuple):
    """The part of a model's logits that a step needs: the trie's tokens, and the total over all.

    Attributes:
        logits: (B, W, A) of the trie's alphabet.
        total: (B, W) logsumexp over the whole vocabulary.
    """

    logits: torch.Tensor
    total: torch.Tensor

    @classmethod
    def of(cls, logits: torch.Tensor, trie: DeviceTrie) -> TokenLogits:
        """Select the alphabet from (B, W, V) logits; a view if its tokens are consecutive."""
        alphabet = trie.source.alphabet
        first, size = int(alphabet[0]), len(alphabet)
        kernels = find_kernels(_KERNELS, logits.device) if logits.dtype == torch.float32 else None
        total = log_sum_exp(logits) if kernels is None else kernels.log_sum_exp(logits)
        if int(alphabet[-1]) - first + 1 == size:
            return cls(logits.narrow(-1, first, size), total)
        return cls(logits.index_select(-1, trie.alphabet), total)

    @classmethod
    def run(cls, tree: TokenTree, trie: DeviceTrie) -> TokenLogits:
        """The logits of the tree's next pass."""
        logits = cls.of(tree.forward(), trie)
        tree.note(logits.total)
        return logits

    def last(self, rows: int) -> TokenLogits:
        """The last `rows` entries of each request."""
        return TokenLogits(*(part[:, -rows:] for part in self))

    @classmethod
    def nothing(cls, like: torch.Tensor, trie: DeviceTrie) -> TokenLogits:
        """Zeros in the shape, type and device of (B, W) `like`, where they make no difference."""
        total = torch.zeros_like(like)
        return cls(total.unsqueeze(-1).expand(-1, -1, len(trie.alphabet)), total)

    def at(self, positions: torch.Tensor) -> TokenLogits:
        """The (B, w) entries at `positions` of each request."""
        wide = positions.unsqueeze(-1).expand(-1, -1, self.logits.shape[-1])
        return TokenLogits(self.logits.gather(1, wide), self.total.gather(1, positions))


class Frontier(NamedTuple):
    """Live beams of each request at one depth, ascending by state, then beams that do not exist.

    >>> root = Frontier.root(2, torch.float32, torch.device("cpu"))
    >>> root.padded(3).scores.tolist()
    [[0.0, -inf, -inf], [0.0, -inf, -inf]]

    Attributes:
        states: (B, W) int64 trie states, those of live beams distinct; `NO_STATE` for a beam that
            does not exist.
        scores: (B, W) what beams are ranked by; -inf for a beam that does not exist.
        tokens: (B, W) int64 last token; `NO_TOKEN` for a beam that does not exist.
        parents: (B, W) int64 place of the parent in the previous frontier; any place for a beam
            that does not exist.
        log_probs: (B, W) sum of log-probabilities. Equal to the scores, except in sampling, where
            a score is a perturbed log-probability, and with boosts, which are part of scores.
        rest: (B, 1) best score of a prefix that was pruned on the way; complete sequences are not
            prefixes. -inf if none was.
    """

    states: torch.Tensor
    scores: torch.Tensor
    tokens: torch.Tensor
    parents: torch.Tensor
    log_probs: torch.Tensor
    rest: torch.Tensor

    @classmethod
    def root(cls, batch: int, dtype: torch.dtype, device: torch.device) -> Frontier:
        """One beam a request, at the root, with score 0."""
        zero = torch.zeros((batch, 1), dtype=torch.int64, device=device)
        score = torch.zeros((batch, 1), dtype=dtype, device=device)
        return cls(zero, score, zero, zero, score, score - torch.inf)

    @classmethod
    def proposed(
        cls,
        states: torch.Tensor,
        scores: torch.Tensor,
        tokens: torch.Tensor,
        parents: torch.Tensor,
    ) -> Frontier:
        """A level of a draft tree, without log-probabilities and `rest` of its own."""
        return cls(states, scores, tokens, parents, scores, scores[:, :1])

    @classmethod
    def nothing(cls, like: Frontier, width: int) -> Frontier:
        """`width` beams that do not exist, for the requests of another frontier."""
        none = like._replace(
            **{name: part[:, :0] for name, part in like._asdict().items() if name != "rest"}
        )
        return none.padded(width)

    def padded(self, width: int) -> Frontier:
        """The frontier, filled up to `width` with beams that do not exist."""
        missing = width - self.scores.shape[1]
        if missing <= 0:
            return self
        pad = torch.nn.functional.pad
        return Frontier(
            pad(self.states, (0, missing), value=NO_STATE),
            pad(self.scores, (0, missing), value=-torch.inf),
            pad(self.tokens, (0, missing), value=NO_TOKEN),
            pad(self.parents, (0, missing)),
            pad(self.log_probs, (0, missing), value=-torch.inf),
            self.rest,
        )

    def at(self, positions: torch.Tensor) -> Frontier:
        """The beams at (B, w) places; the place W, which `stable_top` gives, is no beam."""
        whole = self.padded(self.scores.shape[1] + 1)
        parts = [part if part is whole.rest else part.gather(1, positions) for part in whole]
        return Frontier(*parts)

    def take(self, requests: torch.Tensor) -> Frontier:
        """Some requests of the batch; (b,) places or a (B,) mask."""
        return Frontier(*(part[requests] for part in self))

    def where(self, requests: torch.Tensor, other: Frontier) -> Frontier:
        """This frontier for the requests where the (B,) mask is true, else `other`."""
        rows = requests[:, None]
        return Frontier(*(torch.where(rows, a, b) for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Step:
    """What all steps of a search share: the trie, and the constraints of the batch.

    >>> from recsys.constraint import ItemTrie
    >>> trie = DeviceTrie.of(ItemTrie.build([[1, 5], [1, 6], [2, 5]]))
    >>> logits = TokenLogits.of(torch.zeros(1, 1, 8), trie)  # every token is equally probable
    >>> root = Frontier.root(1, torch.float32, torch.device("cpu"))
    >>> Step(trie).expand(root, logits, depth=0, width=2).tokens.tolist()
    [[1, 2]]

    Attributes:
        trie: the catalog.
        excluded: states that must not be reached (`Excluded.of`), or None.
        normalize: log-probabilities over the whole vocabulary, or over the allowed tokens only, as
            in relaxed verification.
        noise: makes the search a sample; log-probabilities are then at its temperature, and over
            the allowed tokens.
        allowed: states that may be reached (`Allowed.of`), or None for all.
        gains: boosts, added to the scores (`Gains.of`), or None.
    """

    trie: DeviceTrie
    excluded: Excluded | None = None
    normalize: Normalize = "vocabulary"
    noise: Noise | None = None
    allowed: Allowed | None = None
    gains: Gains | None = None

    @property
    def levels(self) -> int:
        """L."""
        return self.trie.source.num_levels

    def take(self, requests: torch.Tensor) -> Step:
        """The same for some requests of the batch."""
        parts = {name: getattr(self, name) for name in ("excluded", "noise", "allowed", "gains")}
        return replace(self, **{name: part and part.take(requests) for name, part in parts.items()})

    def children(self, states: torch.Tensor, depth: int) -> Children:
        """Children of (B, W) states at `depth`."""
        return self.trie.children(states, depth, self.excluded, self.allowed)

    def expand(self, frontier: Frontier, logits: TokenLogits, depth: int, width: int) -> Frontier:
        """The `width` best children of a frontier at `depth`; 0 is the root's.

        Beams at other depths are ignored, and logits of beams that do not exist may have any value.
        If fewer children are alive, beams that do not exist follow them. A child with probability 0
        is not alive.

        On a GPU two kernels compute the same (`recsys.decoding.level_kernel`).
        """
        kernels = self._kernels(frontier, logits, depth)
        if kernels is not None:
            beams = (frontier.states, frontier.log_probs, frontier.rest)
            states, scores, tokens, parents, rest = kernels.expand_level(
                self.trie, depth, width, beams, logits, self.excluded, self.allowed
            )
            return Frontier(states, scores, tokens, parents, scores, rest)
        children = self.children(frontier.states, depth)
        scores, log_probs = self.score(frontier, logits, children)
        flat = scores.flatten(1)  # (B, W * C)
        best, rest = stable_top(flat, min(width, flat.shape[1]))  # ascending: row order
        rest = frontier.rest if depth + 1 == self.levels else torch.maximum(frontier.rest, rest)
        following = self.pick(best, children, scores, log_probs, rest)
        return following.padded(width)

    def pick(
        self,
        positions: torch.Tensor,
        children: Children,
        scores: torch.Tensor,
        log_probs: torch.Tensor,
        rest: torch.Tensor,
    ) -> Frontier:
        """The children at (B, w) places of all W * C; `stable_top` gives W * C for no beam.

        `scores` and `log_probs` are (B, W, C), and `rest` is that of the frontier that is made.
        """
        flat = scores.flatten(1)
        missing = positions == flat.shape[1]
        positions = positions.masked_fill(missing, 0)
        states, symbols = children.at(positions)
        chosen = flat.gather(1, positions).masked_fill_(missing, -torch.inf)
        sums = chosen
        if log_probs is not scores:
            sums = log_probs.flatten(1).gather(1, positions).masked_fill_(missing, -torch.inf)
        return Frontier(
            states.masked_fill_(missing, NO_STATE),
            chosen,
            self.trie.alphabet[symbols].masked_fill_(missing, NO_TOKEN),
            positions // scores.shape[-1],
            sums,
            rest,
        )

    def _kernels(self, frontier: Frontier, logits: TokenLogits, depth: int) -> Any | None:
        """The kernels that expand this level; None if the tensor code has to do it."""
        if self.noise is not None or self.gains is not None or self.normalize == "allowed":
            return None
        kernels, scores = find_kernels(_KERNELS, frontier.scores.device), frontier.log_probs
        if kernels is None or not kernels.covers(self.trie, depth, scores, logits, self.allowed):
            return None
        return kernels

    def score(
        self, frontier: Frontier, logits: TokenLogits, children: Children
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(B, W, C) scores and log-probabilities of all children; -inf for those not alive."""
        values, total = logits
        if self.noise is not None:
            values = values / self.noise.temperature
        chosen = children.masked(values)
        if self.noise is None and self.normalize == "vocabulary":
            total = total.unsqueeze(-1)
        else:
            # a dead beam has no allowed token: a finite total avoids -inf - -inf = NaN
            total = chosen.logsumexp(-1, keepdim=True).clamp(min=torch.finfo(chosen.dtype).min)
        steps = chosen - total
        log_probs = frontier.log_probs.unsqueeze(-1) + steps
        if self.gains is not None:
            return self.gains.scores(log_probs, children.states), log_probs
        if self.noise is None:
            return log_probs, log_probs
        return self.noise.perturb(frontier.scores, log_probs, children.states), log_probs


def stable_top(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Top-k in which ties go to the lower place.

    `torch.topk` does not define which of several equal values it returns. Here all values above the
    count-th largest are taken, then the first of those equal to it.

    >>> stable_top(torch.tensor([[1.0, 3.0, 3.0, -torch.inf]]), 3)[0].tolist()
    [[0, 1, 2]]

    Args:
        values: (B, n). Values that are -inf or NaN are never chosen, and displace no others.
        count: at most n.

    Returns:
        (B, count) places, ascending, followed by n where there are fewer values than `count`; and
        (B, 1) the best value that was not chosen, -inf if there is none.
    """
    size = values.shape[-1]
    values = values.nan_to_num(-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    most = values.topk(min(count + 1, size), dim=-1).values
    threshold, rest = most[:, count - 1 : count], most[:, count:]
    if not rest.shape[1]:
        rest = torch.full_like(threshold, -torch.inf)
    # NaN equals no value, so that -inf is never chosen
    limit = threshold.masked_fill(threshold == -torch.inf, torch.nan)
    above, equal = values > threshold, values == limit
    room = count - above.sum(-1, keepdim=True)
    taken = above | (equal & (equal.cumsum(-1) <= room))
    position = torch.arange(size, device=values.device)
    return torch.where(taken, position, size).topk(count, largest=False).values, rest
