"""Sample text under a constraint. Forced tokens need no forward pass of their own.

After a drawn token, all tokens that the constraint forces are appended at once, and the next
forward pass runs them together. Tokens that are forced at the start become part of the prompt. A
request holds one slot per token. Requests that add fewer tokens than others in a pass repeat their
last one, in the same slot.

Tokens are drawn from the model's distribution over the allowed ones; a forced token has
probability 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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


class _Text:
    """A text that is being written.

    `run` are tokens at its end that the model has not run yet, `slots` the node slots in use, and
    `passes` the forward passes that it took part in.
    """

    def __init__(self, request: int, constraint: Constraint, limit: int) -> None:
        self.request, self.constraint, self.limit = request, constraint, limit
        self.state = constraint.initial()
        self.tokens: list[int] = []
        self.run: list[int] = []
        self.log_prob = 0.0
        self.forced = self.slots = self.passes = 0

    @property
    def finished(self) -> bool:
        """Whether the text is complete."""
        return bool(self.tokens) and self.tokens[-1] in self.constraint.end_tokens

    @property
    def open(self) -> bool:
        """Whether more tokens may follow."""
        return not self.finished and len(self.tokens) < self.limit

    def append(self, tokens: Sequence[int]) -> None:
        """Append allowed tokens, as far as there is room."""
        for token in tokens[: self.limit - len(self.tokens)]:
            self.state = int(self.constraint.advance([self.state], [token])[0])
            self.tokens.append(token)
            self.run.append(token)

    def append_forced(self) -> None:
        """Append the tokens that have no alternative."""
        before = len(self.tokens)
        if self.open:
            self.append(self.constraint.forced([self.state])[0])
        self.forced += len(self.tokens) - before

    def draw(self, token: int, log_prob: float) -> None:
        """Append a token that was drawn from a forward pass."""
        self.passes, self.log_prob = self.passes + 1, self.log_prob + log_prob
        self.run = []
        self.append([token])


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

    Returns:
        One text per request.

    Raises:
        ValueError: an argument out of its range, an empty prompt, or constraints that do not fit.
        NonFiniteError: the model's logits are not finite for some of the requests.
    """
    model = TreeModel.of(model)
    whole_number("max_new_tokens", max_new_tokens)
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature must be finite and at least 0, got {temperature}")
    plain = PromptBatch.of(prompts, model)
    together = BatchConstraint(constraint, len(plain), model.vocabulary_size, model.device)
    texts = [_Text(i, c, max_new_tokens) for i, c in enumerate(together.constraints)]
    if skip_forced:
        for text in texts:
            text.append_forced()
    stats = [DecodeStats(0, 0, 0, 0)] * len(texts)
    if live := [text for text in texts if text.open]:
        begun = [
            [*plain.host_tokens[t.request, : plain.host_lengths[t.request]].tolist(), *t.run]
            for t in live
        ]
        room = max(t.limit - len(t.tokens) for t in live)
        ready = PromptBatch.of(begun, model, room)
        with TokenTree(model, ready, 0, reserve=room) as tree:
            slots, lengths, cached = tree.cache.slots, ready.host_lengths, tree.cached
            size = slots * tree.cache.bytes_per_slot
            _Draw(tree, temperature, seed, skip_forced).finish(live)
        for text, length, known in zip(live, lengths.tolist(), cached.tolist(), strict=True):
            run = length - known + text.slots
            stats[text.request] = DecodeStats(text.passes, run, slots, size, cached_tokens=known)
    return [
        SampledText(t.tokens, t.finished, t.log_prob, t.forced, s)
        for t, s in zip(texts, stats, strict=True)
    ]


class _Draw:
    """Draws texts token by token."""

    def __init__(self, tree: TokenTree, temperature: float, seed: int, skip_forced: bool) -> None:
        self._tree, self._temperature, self._skip_forced = tree, temperature, skip_forced
        self._generator = torch.Generator(tree.model.device).manual_seed(seed)

    def finish(self, live: list[_Text]) -> None:
        """Write texts to their ends. The prompts of the tree are theirs, one each."""
        tree = self._tree
        logits = tree.forward()[:, -1]
        tree.note(logits.amax(-1, keepdim=True))
        while live:
            require_finite(tree.finite, [text.request for text in live])
            for text, token, log_prob in zip(live, *self._tokens(live, logits), strict=True):
                text.draw(token, log_prob)
                if self._skip_forced:
                    text.append_forced()
            stay = [place for place, text in enumerate(live) if text.open]
            if len(stay) < len(live):
                live = [live[place] for place in stay]
                tree.keep(torch.tensor(stay, dtype=torch.int64, device=tree.model.device))
            if live:
                logits = _forward(tree, live)

    def _tokens(self, live: list[_Text], logits: torch.Tensor) -> tuple[list[int], list[float]]:
        """A token for each text, and its log-probability among those allowed, by (B, V) logits."""
        mask = np.zeros(logits.shape, np.bool_)
        for line, text in zip(mask, live, strict=True):
            allowed = text.constraint.allowed([text.state])[0]
            line[: len(allowed)] = allowed
        logits = logits.masked_fill(~torch.from_numpy(mask).to(logits.device), -torch.inf)
        if self._temperature:
            weights = (logits / self._temperature).softmax(-1)
            tokens = weights.multinomial(1, generator=self._generator)
        else:
            tokens = logits.argmax(-1, keepdim=True)
        log_probs = logits.log_softmax(-1).gather(1, tokens)
        return tokens[:, 0].tolist(), log_probs[:, 0].tolist()


def _forward(tree: TokenTree, live: list[_Text]) -> torch.Tensor:
    """(B, V) logits behind the runs of B texts, all of them in one pass."""
    model, cache = tree.model, tree.cache
    last = np.asarray([len(text.run) - 1 for text in live])
    place = np.minimum(np.arange(last.max() + 1), last[:, None])
    run = np.asarray(
        [[text.run[p] for p in row] for text, row in zip(live, place.tolist(), strict=True)]
    )
    first = np.asarray([text.slots for text in live])
    for text in live:
        text.slots += len(text.run)
    host = np.stack([run, first[:, None] + place])
    tokens, slot = torch.from_numpy(host).to(model.device)
    nodes = whole_blocks(max(text.slots for text in live))
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
        tokens,
        tree.lengths[:, None] + slot,
        mask,
        cache,
        write=cache.prompt + slot,
        view=cache.prompt + nodes,
        rows=torch.from_numpy(last[:, None]).to(model.device),
    )
    tree.note(logits.amax(-1))
    return logits[:, 0]
