"""Sampled text under a constraint, where forced tokens cost no forward.

Every request goes at its own pace: behind a token that was drawn, all that the constraint forces is
appended at once, and the next forward runs the whole run. Tokens that are forced at the start
become part of the prompt. A request holds one slot a token; requests that add fewer tokens than
others in a pass repeat their last one, in the same slot.

Draws are from the model's distribution over what is allowed, and a forced token has probability 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from recsys.decoding.output import DecodeStats
from recsys.decoding.tree import Prompts, TokenTree, require_finite
from recsys.models.cache import whole_blocks
from recsys.models.mask import tree_mask
from recsys.models.tree_forward import TreeModel
from recsys.text.constraint import Constraint
from recsys.text.guide import Guide


@dataclass(frozen=True)
class SampledText:
    """One text.

    Attributes:
        tokens: without the prompt, the end token included.
        finished: whether it is whole; otherwise it was cut at `max_new_tokens`.
        log_prob: sum of log-probabilities over what was allowed.
        forced: of the tokens, those that needed no forward of their own.
        stats: what it took.
    """

    tokens: list[int]
    finished: bool
    log_prob: float
    forced: int
    stats: DecodeStats


class _Text:
    """A text being written.

    Attributes:
        run: tokens that were written last and have not been run.
        slots: node slots in use: tokens behind the prompt that have been run.
        stats: so far; the prompt's tokens are those that were not cached.
    """

    def __init__(self, request: int, constraint: Constraint, limit: int) -> None:
        self.request, self.constraint, self.limit = request, constraint, limit
        self.state = constraint.initial()
        self.tokens: list[int] = []
        self.run: list[int] = []
        self.log_prob = 0.0
        self.forced = self.slots = 0
        self.stats = DecodeStats(0, 0, 0, 0)

    @property
    def finished(self) -> bool:
        """Whether it has ended as the constraint wants."""
        return bool(self.tokens) and self.tokens[-1] in self.constraint.end_tokens

    @property
    def open(self) -> bool:
        """Whether it goes on."""
        return not self.finished and len(self.tokens) < self.limit

    def write(self, tokens: Sequence[int]) -> None:
        """Append tokens that are allowed, as far as there is room."""
        for token in tokens[: self.limit - len(self.tokens)]:
            self.state = int(self.constraint.advance([self.state], [token])[0])
            self.tokens.append(token)
            self.run.append(token)

    def force(self) -> None:
        """Append what has no alternative."""
        before = len(self.tokens)
        if self.open:
            self.write(self.constraint.forced([self.state])[0])
        self.forced += len(self.tokens) - before


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
        constraint: which texts may be written, one for all requests or one each.
        max_new_tokens: longest text.
        temperature: of the distribution; 0 takes the most probable token.
        seed: of the draws.
        skip_forced: take what `constraint.forced` says without asking the model. For a grammar this
            fixes how forced bytes are cut into tokens, and so the law of the texts: they are those
            of a model that always cuts so. Without, every token is drawn.

    Returns:
        One text a request.

    Raises:
        ValueError: an argument out of its range, an empty prompt, or constraints that do not fit.
        NonFiniteError: the model's logits are not finite for some of the requests.
    """
    model = TreeModel.of(model)
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature must be finite and at least 0, got {temperature}")
    plain = Prompts.of(prompts, model)
    constraints = Guide(constraint, len(plain), model.vocabulary_size, model.device).constraints
    texts = [_Text(i, c, max_new_tokens) for i, c in enumerate(constraints)]
    if skip_forced:
        for text in texts:
            text.force()
    live = [text for text in texts if text.open]
    begun = [
        [*plain.host_tokens[t.request, : plain.host_lengths[t.request]].tolist(), *t.run]
        for t in live
    ]
    room = max((t.limit - len(t.tokens) for t in live), default=0)
    generator = torch.Generator(model.device).manual_seed(seed)
    if live:
        ready = Prompts.of(begun, model, room)
        with TokenTree(model, ready, 0, reserve=room) as tree:
            for text, length, cached in zip(live, ready.host_lengths, tree.cached, strict=True):
                slots, size = tree.cache.slots, tree.cache.bytes_per_slot
                text.stats = DecodeStats(
                    0, int(length - cached), slots, slots * size, cached_tokens=int(cached)
                )
            logits = tree.forward()[:, -1]
            tree.note(logits.amax(-1, keepdim=True))
            while live:
                require_finite(tree.finite, [text.request for text in live])
                for text, token, log_prob in _draw(live, logits, temperature, generator):
                    text.stats = replace(text.stats, target_passes=text.stats.target_passes + 1)
                    text.log_prob += log_prob
                    text.run = []
                    text.write([token])
                    if skip_forced:
                        text.force()
                stay = [place for place, text in enumerate(live) if text.open]
                if len(stay) < len(live):
                    live = [live[place] for place in stay]
                    tree.keep(torch.tensor(stay, dtype=torch.int64, device=model.device))
                if live:
                    logits = _forward(tree, live)
    return [
        SampledText(
            t.tokens,
            t.finished,
            t.log_prob,
            t.forced,
            replace(t.stats, target_tokens=t.stats.target_tokens + t.slots),
        )
        for t in texts
    ]


def _draw(
    live: list[_Text], logits: torch.Tensor, temperature: float, generator: torch.Generator
) -> list[tuple[_Text, int, float]]:
    """A token for each text, with its log-probability over what is allowed.

    Args:
        live: B texts.
        logits: (B, V) at their last tokens.
        temperature: 0 for the best token.
        generator: on the device.
    """
    mask = np.zeros(logits.shape, np.bool_)
    for line, text in zip(mask, live, strict=True):
        allowed = text.constraint.allowed([text.state])[0]
        line[: len(allowed)] = allowed
    logits = logits.masked_fill(~torch.from_numpy(mask).to(logits.device), -torch.inf)
    if temperature:
        weights = (logits / temperature).softmax(-1)
        tokens = weights.multinomial(1, generator=generator)
    else:
        tokens = logits.argmax(-1, keepdim=True)
    log_probs = logits.log_softmax(-1).gather(1, tokens)
    pairs = zip(live, tokens[:, 0].tolist(), log_probs[:, 0].tolist(), strict=True)
    return [(text, token, log_prob) for text, token, log_prob in pairs]


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
