"""Sample text under a constraint. Forced tokens need no forward pass of their own.

After a drawn token, all tokens that the constraint forces are appended at once, and the next
forward pass runs them together. Tokens that are forced at the start become part of the prompt. A
request holds one slot per token. Requests that add fewer tokens than others in a pass repeat their
last one, in the same slot.

Tokens are drawn from the model's distribution over the allowed ones; a forced token has
probability 1.

A draft model may draw the next tokens in advance, under the same constraint and with the forced
tokens in between. One pass of the model then verifies all of them (speculative sampling, Leviathan
et al., 2023, over the allowed tokens): a drafted token y is kept with probability
min(1, p(y) / q(y)); the first one that is not kept is replaced by a draw from max(0, p - q),
normalised. The texts have the same distribution as without a draft, and at temperature 0 they are
the same texts. A constraint's states are integers, so what was not kept needs no undoing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike

from recsys.arguments import whole_number
from recsys.decoding.output import DecodeStats
from recsys.decoding.tree import PromptBatch, TokenTree, require_finite
from recsys.models.cache import whole_blocks
from recsys.models.mask import tree_mask
from recsys.models.tree_forward import TreeModel
from recsys.text.batch import BatchConstraint
from recsys.text.constraint import Constraint
from recsys.text.stopping import raise_if_stopped


@dataclass(frozen=True)
class SampledText:
    """One text.

    Attributes:
        tokens: without the prompt, the end token included.
        finished: whether the text is complete; otherwise it was cut at `max_new_tokens`.
        log_prob: sum of log-probabilities, each among the allowed tokens.
        forced: number of tokens that needed no forward pass of their own.
        stats: cost of the text.
    """

    tokens: list[int]
    finished: bool
    log_prob: float
    forced: int
    stats: DecodeStats


@dataclass(frozen=True)
class TextDraft:
    """A draft model for `sample_text`.

    Attributes:
        model: a model as `sample_text` takes, with the same vocabulary.
        tokens: most tokens that it draws before the model verifies them, without forced ones.
    """

    model: Any
    tokens: int = 4

    def __post_init__(self) -> None:
        whole_number("tokens", self.tokens)


class _Drawn(NamedTuple):
    """A token that the draft drew from its (V,) distribution q, and what it forces."""

    token: int
    forced: list[int]
    state: int  # after all of them
    q: torch.Tensor


class _Text:
    """A text that is being written.

    Attributes:
        tokens: so far.
        start: how many of them belong to the prompt that is run.
        cached: how many of them have been run, by the model and by the draft.
        drawn: what the draft has drawn to follow them.
        run: tokens that the model has run, those of the prompt not included.
        passes: forward passes that it took part in, of the model and of the draft.
        drafted: tokens that the draft has drawn.
    """

    def __init__(self, request: int, constraint: Constraint, limit: int, skip_forced: bool) -> None:
        self.request, self.constraint, self.limit = request, constraint, limit
        self.skip_forced = skip_forced
        self.state = constraint.initial()
        self.tokens: list[int] = []
        self.drawn: list[_Drawn] = []
        self.log_prob = 0.0
        self.forced = 0
        self._append_forced()
        self.start = len(self.tokens)
        self.cached, self.passes = [self.start, self.start], [0, 0]
        self.run = self.drafted = 0

    @property
    def finished(self) -> bool:
        """Whether the text is complete."""
        return bool(self.tokens) and self.tokens[-1] in self.constraint.end_tokens

    @property
    def open(self) -> bool:
        """Whether more tokens may follow."""
        return not self.finished and len(self.tokens) < self.limit

    @property
    def ahead(self) -> list[int]:
        """The tokens, and those that the draft has drawn."""
        return self.tokens + [t for drawn in self.drawn for t in (drawn.token, *drawn.forced)]

    @property
    def ahead_state(self) -> int:
        """The state after `ahead`."""
        return self.drawn[-1].state if self.drawn else self.state

    def may_draft(self) -> bool:
        """Whether the draft may draw one more token; the last one is the model's own."""
        ahead = self.ahead
        return len(ahead) < self.limit - 1 and ahead[-1] not in self.constraint.end_tokens

    def draft(self, token: int, q: torch.Tensor) -> None:
        """Add a token that the draft drew from `q`."""
        state = self._after(self.ahead_state, [token])
        forced = self._find_forced(state, len(self.ahead) + 1)
        self.drawn.append(_Drawn(token, forced, self._after(state, forced), q))
        self.drafted, self.passes[1] = self.drafted + 1, self.passes[1] + 1

    def keep(self, drawn: _Drawn) -> None:
        """Append what the draft drew."""
        self.tokens += [drawn.token, *drawn.forced]
        self.state, self.forced = drawn.state, self.forced + len(drawn.forced)

    def replace(self, token: int) -> None:
        """Append a token of the model's instead of what the draft drew next, if anything."""
        self.cached = [min(count, len(self.tokens)) for count in self.cached]
        self.drawn = []
        self.tokens.append(token)
        self.state = self._after(self.state, [token])
        self._append_forced()

    def _after(self, state: int, tokens: Sequence[int]) -> int:
        """The state after some tokens."""
        for token in tokens:
            state = int(self.constraint.advance([state], [token])[0])
        return state

    def _find_forced(self, state: int, length: int) -> list[int]:
        """Tokens without an alternative, as far as there is room behind `length` tokens."""
        if not self.skip_forced or length >= self.limit:
            return []
        return self.constraint.forced([state])[0][: self.limit - length]

    def _append_forced(self) -> None:
        """Append the tokens that have no alternative."""
        if self.open:
            run = self._find_forced(self.state, len(self.tokens))
            self.state, self.forced = self._after(self.state, run), self.forced + len(run)
            self.tokens += run


@torch.inference_mode()
def sample_text(
    model: Any,
    prompts: Sequence[ArrayLike],
    constraint: Constraint | Sequence[Constraint],
    max_new_tokens: int = 256,
    *,
    temperature: float = 1.0,
    seed: int = 0,
    skip_forced: bool = True,
    draft: TextDraft | None = None,
    stopped: Callable[[], bool] | None = None,
) -> list[SampledText]:
    """Draw one text after each prompt.

    Args:
        model: a Hugging Face decoder-only causal LM, a peft model of one, or a `TreeModel`.
        prompts: token ids of each request, at least one token each; lengths may differ.
        constraint: which texts are allowed, one constraint for all requests or one each.
        max_new_tokens: tokens of the longest text.
        temperature: temperature of the distribution; 0 takes the most probable token.
        seed: seed of the draws.
        skip_forced: append the tokens of `constraint.forced` without a forward pass. For a grammar,
            this fixes how forced bytes are split into tokens, and so the distribution: it is that
            of a model that always splits them this way. Without it, every token is drawn.
        draft: draws tokens ahead; the distribution of the texts stays the same. None for none.
        stopped: whether to write no further; asked before each pass of the model.

    Returns:
        One text per request.

    Raises:
        ValueError: an argument out of its range, an empty prompt, constraints that do not fit, or a
            draft with another number of tokens.
        NonFiniteError: the model's logits are not finite for some of the requests.
        StoppedError: `stopped` returned True.
    """
    model = TreeModel.of(model)
    whole_number("max_new_tokens", max_new_tokens)
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature must be finite and at least 0, got {temperature}")
    sketch = None if draft is None else TreeModel.of(draft.model)
    if sketch is not None and sketch.vocabulary_size != model.vocabulary_size:
        raise ValueError(
            f"draft: it has {sketch.vocabulary_size} tokens, the model {model.vocabulary_size}; "
            "they need one vocabulary"
        )
    plain = PromptBatch.of(prompts, model)
    together = BatchConstraint(constraint, len(plain), model.vocabulary_size, model.device)
    texts = [_Text(i, c, max_new_tokens, skip_forced) for i, c in enumerate(together.constraints)]
    stats = [DecodeStats(0, 0, 0, 0)] * len(texts)
    if live := [text for text in texts if text.open]:
        begun = [
            [*plain.host_tokens[t.request, : plain.host_lengths[t.request]].tolist(), *t.tokens]
            for t in live
        ]
        room = max(t.limit - t.start for t in live)
        with ExitStack() as stack:
            tree, *others = [
                stack.enter_context(TokenTree(m, PromptBatch.of(begun, m, room), 0, reserve=room))
                for m in (model, sketch)
                if m is not None
            ]
            slots, lengths, cached = tree.cache.slots, tree.prompts.host_lengths, tree.cached
            size = slots * tree.cache.bytes_per_slot
            width = 0 if draft is None else draft.tokens
            _Draws([tree, *others], temperature, seed).finish(live.copy(), width, stopped)
        for text, length, known in zip(live, lengths.tolist(), cached.tolist(), strict=True):
            stats[text.request] = DecodeStats(
                text.passes[0], length - known + text.run, slots, size,
                drafted_nodes=text.drafted, draft_passes=text.passes[1], cached_tokens=known,
            )  # fmt: skip
    return [
        SampledText(t.tokens, t.finished, t.log_prob, t.forced, s)
        for t, s in zip(texts, stats, strict=True)
    ]


class _Draws:
    """Draws texts, one or more tokens in a pass of the model.

    `trees` are those of the model and, if there is one, of the draft.
    """

    def __init__(self, trees: list[TokenTree], temperature: float, seed: int) -> None:
        self._trees, self._temperature = trees, temperature
        self._generator = torch.Generator(trees[0].model.device).manual_seed(seed)

    def finish(
        self, live: list[_Text], width: int, stopped: Callable[[], bool] | None = None
    ) -> None:
        """Write texts to their ends. The prompts of the trees are theirs, one each.

        The draft draws at most `width` tokens before each pass of the model.
        """
        raise_if_stopped(stopped)
        logits, *_ = [_begin(tree).unsqueeze(1) for tree in self._trees]
        while True:
            require_finite(self._trees[0].finite, [text.request for text in live])
            self._settle(live, logits)
            stay = [place for place, text in enumerate(live) if text.open]
            if not stay:
                return
            raise_if_stopped(stopped)
            if len(stay) < len(live):
                live = [live[place] for place in stay]
                for tree in self._trees:
                    tree.keep(torch.tensor(stay, dtype=torch.int64, device=tree.model.device))
            self._draft(live, width)
            logits = _forward(self._trees[0], live, 0)

    def _draft(self, live: list[_Text], width: int) -> None:
        """Let the draft draw at most `width` tokens for each text."""
        for _ in range(width):
            here = [place for place, text in enumerate(live) if text.may_draft()]
            if not here:
                return
            logits = _forward(self._trees[1], live, 1)[:, -1]
            require_finite(self._trees[1].finite, [text.request for text in live])
            texts = [live[place] for place in here]
            q = self._distribution(
                _masked(logits[here], texts, [text.ahead_state for text in texts])
            )
            tokens = q.multinomial(1, generator=self._generator)[:, 0].tolist()
            for text, token, own in zip(texts, tokens, q, strict=True):
                text.draft(token, own)

    def _settle(self, live: list[_Text], logits: torch.Tensor) -> None:
        """Keep drafted tokens up to the first that is not kept, and draw one instead of it.

        Args:
            live: the texts.
            logits: (B, R, V) before each drafted token, and after the last one.
        """
        for text in live:
            text.passes[0] += 1
        here = list(range(len(live)))
        for step in range(logits.shape[1]):
            texts = [live[place] for place in here]
            masked = _masked(logits[here, step], texts, [text.state for text in texts])
            drawn = [text.drawn[step] if step < len(text.drawn) else None for text in texts]
            tokens, kept = self._verify(self._distribution(masked), drawn)
            gains = masked.log_softmax(-1).gather(1, tokens[:, None])[:, 0].tolist()
            going = []
            for place, text, token, gain, own, keep in zip(
                here, texts, tokens.tolist(), gains, drawn, kept.tolist(), strict=True
            ):
                text.log_prob += gain
                if own is None or not keep:
                    text.replace(token)
                    continue
                text.keep(own)
                if text.open:
                    going.append(place)
            here = going
            if not here:
                return

    def _verify(
        self, p: torch.Tensor, drawn: Sequence[_Drawn | None]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(n,) tokens, each of its (V,) distribution in p, and whether they are the drafted ones.

        For this the drafted ones must have been drawn from their q.
        """
        known = torch.tensor([own is not None for own in drawn], device=p.device)
        if not any(own is not None for own in drawn):
            return p.multinomial(1, generator=self._generator)[:, 0], known
        q = torch.stack([torch.zeros_like(p[0]) if own is None else own.q for own in drawn])
        drafted = torch.tensor([0 if own is None else own.token for own in drawn], device=p.device)
        chance = torch.rand(len(p), generator=self._generator, device=p.device, dtype=p.dtype)
        here = drafted[:, None]
        kept = known & (chance * q.gather(1, here)[:, 0] < p.gather(1, here)[:, 0])
        left = (p - q).relu()
        left = torch.where(left.sum(1, keepdim=True) > 0, left, p)  # p = q: always kept
        own = left.multinomial(1, generator=self._generator)[:, 0]
        return torch.where(kept, drafted, own), kept

    def _distribution(self, logits: torch.Tensor) -> torch.Tensor:
        """(n, V) probabilities of tokens; at temperature 0 all on the most probable one."""
        if self._temperature:
            return (logits / self._temperature).softmax(-1)
        return torch.zeros_like(logits).scatter(1, logits.argmax(-1, keepdim=True), 1.0)


def _masked(logits: torch.Tensor, texts: Sequence[_Text], states: Sequence[int]) -> torch.Tensor:
    """(n, V) logits, -inf for tokens that may not follow the states of the texts."""
    mask = np.zeros(logits.shape, np.bool_)
    for line, text, state in zip(mask, texts, states, strict=True):
        allowed = text.constraint.allowed([state])[0]
        line[: len(allowed)] = allowed
    return logits.masked_fill(~torch.from_numpy(mask).to(logits.device), -torch.inf)


def _begin(tree: TokenTree) -> torch.Tensor:
    """(B, V) logits behind the prompts."""
    logits = tree.forward()[:, -1]
    tree.note(logits.amax(-1, keepdim=True))
    return logits


def _forward(tree: TokenTree, live: list[_Text], which: int) -> torch.Tensor:
    """Run what model number `which` has not run of `ahead`, for B texts in one pass.

    Returns:
        (B, R, V) logits of the model, number 0, before each drafted token and after the last one;
        the last ones again for texts with fewer drafted tokens. Of the draft, number 1, the last.
    """
    model, cache = tree.model, tree.cache
    tokens = [text.ahead for text in live]
    # A text that does not go on runs its last token once more, in the same slot.
    first = np.asarray(
        [min(t.cached[which], len(own) - 1) for t, own in zip(live, tokens, strict=True)]
    )
    last = np.asarray([len(own) - 1 for own in tokens])
    place = np.minimum(first[:, None] + np.arange((last - first).max() + 1), last[:, None])
    run = [[own[p] for p in row] for own, row in zip(tokens, place.tolist(), strict=True)]
    wanted = []
    for text, own in zip(live, tokens, strict=True):
        ends = [len(text.tokens) - 1]
        for drawn in text.drawn:
            ends.append(ends[-1] + 1 + len(drawn.forced))
        wanted.append(ends[-1:] if which else ends)
        text.run += 0 if which else len(own) - text.cached[0]
        text.cached[which] = len(own)
    rows = max(map(len, wanted))
    ends = np.asarray([[*row, *row[-1:] * (rows - len(row))] for row in wanted]) - first[:, None]
    slots = place - np.asarray([[text.start] for text in live])
    ids, slot = torch.from_numpy(np.stack([np.asarray(run), slots])).to(model.device)
    nodes = whole_blocks(int(slots.max()) + 1)
    node = torch.arange(nodes, device=model.device)

    def mask(window: int | None) -> torch.Tensor:
        return tree_mask(
            node <= slot.unsqueeze(-1),
            tree.lengths,
            cache.prompt,
            depth=slot + 1,
            node_depth=(node + 1).expand(len(live), -1),
            window=window,
            dtype=model.dtype,
        )

    logits = model.forward(
        ids,
        tree.lengths[:, None] + slot,
        mask,
        cache,
        write=cache.prompt + slot,
        view=cache.prompt + nodes,
        rows=torch.from_numpy(ends).to(model.device),
    )
    tree.note(logits.amax(-1))
    return logits
