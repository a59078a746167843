"""Sample text under a constraint. Forced tokens need no forward pass of their own.

After a drawn token, all tokens that the constraint forces are appended at once, and the next
forward pass runs them together. Tokens that are forced at the start become part of the prompt. A
request holds one slot per token.

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
from recsys.models.tree_forward import TreeModel
from recsys.text.constraint import Constraint
from recsys.text.tensors import answer_each, one_each

PROMPT_TOKENS = 256  # of a prompt in one pass, whose memory is proportional to them


class StoppedError(Exception):
    """The texts are not wanted any more."""


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
        state: of the constraint behind them.
        log_prob: as in `SampledText`.
        forced: as in `SampledText`.
    """

    def __init__(self, constraint: Constraint, limit: int, skip_forced: bool) -> None:
        self.constraint, self.limit, self.skip_forced = constraint, limit, skip_forced
        self.state = constraint.initial()
        self.tokens: list[int] = []
        self.log_prob = 0.0
        self.forced = 0
        self._append_forced()

    @property
    def finished(self) -> bool:
        """Whether the text is complete."""
        return bool(self.tokens) and self.tokens[-1] in self.constraint.end_tokens

    @property
    def open(self) -> bool:
        """Whether more tokens may follow."""
        return not self.finished and len(self.tokens) < self.limit

    def draw(self, logits: torch.Tensor, temperature: float, generator: torch.Generator) -> None:
        """Draw a token by (V,) logits, and append it with what it forces."""
        allowed = self.constraint.allowed([self.state])[0]
        mask = np.ones(len(logits), np.bool_)
        mask[: len(allowed)] = ~allowed
        masked = logits.masked_fill(torch.from_numpy(mask).to(logits.device), -torch.inf)
        if temperature:
            drawn = (masked / temperature).softmax(-1).multinomial(1, generator=generator)
        else:
            drawn = masked.argmax(-1, keepdim=True)
        self.log_prob += float(masked.log_softmax(-1)[drawn])
        self._append(drawn.tolist())
        self._append_forced()

    def _append(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.state = int(self.constraint.advance([self.state], [token])[0])
        self.tokens += tokens

    def _append_forced(self) -> None:
        """Append the tokens that have no alternative."""
        if self.skip_forced and self.open:
            run = self.constraint.forced([self.state])[0][: self.limit - len(self.tokens)]
            self.forced += len(run)
            self._append(run)


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
    """Draw one text after each prompt, one after the other.

    Args:
        model: a Hugging Face decoder-only causal LM, a peft model of one, or a `TreeModel`.
        prompts: token ids of each request, at least one token each.
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
    ready = PromptBatch.of(prompts, model)
    constraints = one_each(constraint, len(ready), model.vocabulary_size)
    generator = torch.Generator(model.device).manual_seed(seed)

    def write(number: int) -> SampledText:
        text = _Text(constraints[number], max_new_tokens, skip_forced)
        stats = DecodeStats(0, 0, 0, 0)
        if text.open:
            prompt = ready.host_tokens[number, : ready.host_lengths[number]].tolist()
            stats = _write(text, model, prompt, temperature, generator, stopped)
        return SampledText(text.tokens, text.finished, text.log_prob, text.forced, stats)

    return answer_each(len(ready), write)


def _write(
    text: _Text,
    model: TreeModel,
    prompt: list[int],
    temperature: float,
    generator: torch.Generator,
    stopped: Callable[[], bool] | None,
) -> DecodeStats:
    """Write a text to its end behind a prompt; its forced beginning belongs to the prompt."""
    start = run = len(text.tokens)
    before = [*prompt, *text.tokens]
    rest = before[PROMPT_TOKENS:]
    room = len(rest) + text.limit - start
    ready = PromptBatch.of([before[:PROMPT_TOKENS]], model, room)
    with TokenTree(model, ready, room) as tree:
        while True:
            if stopped is not None and stopped():
                raise StoppedError
            logits = tree.forward(only_last=True)
            if rest:
                path, rest = rest[:PROMPT_TOKENS], rest[PROMPT_TOKENS:]
            else:
                tree.note(logits.amax(-1))
                require_finite(tree.finite)
                text.draw(logits[0, -1], temperature, generator)
                if not text.open:
                    return tree.stats(0)
                path, run = text.tokens[run:], len(text.tokens)
            # The rest of the prompt, or what was drawn and forced, is a path below the last node.
            tokens = torch.tensor([path], device=model.device)
            node = torch.arange(tree.nodes, tree.nodes + len(path), device=model.device)[None]
            tree.add(tokens, node - 1, node + 1, is_path=True)
