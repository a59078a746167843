"""Sample text under a constraint. Forced tokens need no forward pass of their own.

After a drawn token, all tokens that the constraint forces are appended at once, and the next
forward pass runs them together. Tokens that are forced at the start become part of the prompt. A
request holds one slot per token. Requests that add fewer tokens than others in a pass, or none any
more, repeat their last one, in the same slot.

Tokens are drawn from the model's distribution over the allowed ones; a forced token has
probability 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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


class _Text:
    """A text that is being written.

    Attributes:
        tokens: so far.
        start: how many of them belong to the prompt that is run.
        cached: how many of them have been run.
        passes: forward passes that it took part in.
    """

    def __init__(self, request: int, constraint: Constraint, limit: int, skip_forced: bool) -> None:
        self.request, self.constraint, self.limit = request, constraint, limit
        self.skip_forced = skip_forced
        self.state = constraint.initial()
        self.tokens: list[int] = []
        self.log_prob = 0.0
        self.forced = 0
        self._append_forced()
        self.start = len(self.tokens)
        self.cached, self.passes = self.start, 0

    @property
    def finished(self) -> bool:
        """Whether the text is complete."""
        return bool(self.tokens) and self.tokens[-1] in self.constraint.end_tokens

    @property
    def open(self) -> bool:
        """Whether more tokens may follow."""
        return not self.finished and len(self.tokens) < self.limit

    def append(self, token: int, gain: float) -> None:
        """Append a drawn token with its log-probability, and what it forces."""
        self.tokens.append(token)
        self.log_prob += gain
        self.state = self._after([token])
        self._append_forced()

    def _after(self, tokens: Sequence[int]) -> int:
        """The state after some tokens."""
        state = self.state
        for token in tokens:
            state = int(self.constraint.advance([state], [token])[0])
        return state

    def _append_forced(self) -> None:
        """Append the tokens that have no alternative."""
        if self.skip_forced and self.open:
            room = self.limit - len(self.tokens)
            run = self.constraint.forced([self.state])[0][:room]
            self.state, self.forced = self._after(run), self.forced + len(run)
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
        stopped: whether to write no further; asked before each pass of the model.

    Returns:
        One text per request.

    Raises:
        ValueError: an argument out of its range, an empty prompt, or constraints that do not fit.
        NonFiniteError: the model's logits are not finite for some of the requests.
        StoppedError: `stopped` returned True.
    """
    model = TreeModel.of(model)
    whole_number("max_new_tokens", max_new_tokens)
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature must be finite and at least 0, got {temperature}")
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
        with TokenTree(model, PromptBatch.of(begun, model, room), 0, reserve=room) as tree:
            slots, lengths, cached = tree.cache.slots, tree.prompts.host_lengths, tree.cached
            size = slots * tree.cache.bytes_per_slot
            generator = torch.Generator(model.device).manual_seed(seed)
            raise_if_stopped(stopped)
            logits = tree.forward()[:, -1]
            tree.note(logits.amax(-1, keepdim=True))
            while True:
                require_finite(tree.finite, [text.request for text in live])
                _draw(live, logits, temperature, generator)
                if not any(text.open for text in live):
                    break
                raise_if_stopped(stopped)
                logits = _forward(tree, live)
        for text, length, known in zip(live, lengths.tolist(), cached.tolist(), strict=True):
            run = length - known + text.cached - text.start
            stats[text.request] = DecodeStats(text.passes, run, slots, size, cached_tokens=known)
    return [
        SampledText(t.tokens, t.finished, t.log_prob, t.forced, s)
        for t, s in zip(texts, stats, strict=True)
    ]


def _draw(
    live: list[_Text], logits: torch.Tensor, temperature: float, generator: torch.Generator
) -> None:
    """Draw a token of each open text by (B, V) logits, and append it with what it forces."""
    mask = np.zeros(logits.shape, np.bool_)
    for line, text in zip(mask, live, strict=True):
        allowed = text.constraint.allowed([text.state])[0] if text.open else np.array([True])
        line[: len(allowed)] = allowed
    masked = logits.masked_fill(~torch.from_numpy(mask).to(logits.device), -torch.inf)
    if temperature:
        tokens = (masked / temperature).softmax(-1).multinomial(1, generator=generator)
    else:
        tokens = masked.argmax(-1, keepdim=True)
    gains = masked.log_softmax(-1).gather(1, tokens)[:, 0].tolist()
    for text, token, gain in zip(live, tokens[:, 0].tolist(), gains, strict=True):
        if text.open:
            text.passes += 1
            text.append(token, gain)


def _forward(tree: TokenTree, live: list[_Text]) -> torch.Tensor:
    """Run what the model has not run of B texts in one pass; (B, V) logits behind their ends."""
    model, cache = tree.model, tree.cache
    # A text with fewer new tokens than others runs its last token again, in the same slot.
    last = np.asarray([len(text.tokens) - 1 for text in live])
    first = np.minimum([text.cached for text in live], last)
    position = np.minimum(first[:, None] + np.arange((last - first).max() + 1), last[:, None])
    run = [[text.tokens[p] for p in row] for text, row in zip(live, position.tolist(), strict=True)]
    for text in live:
        text.cached = len(text.tokens)
    slots = position - np.asarray([[text.start] for text in live])
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
        rows=torch.from_numpy((last - first)[:, None]).to(model.device),
    )
    tree.note(logits.amax(-1))
    return logits[:, 0]
