"""Beam search for free text, with Hugging Face's rules, over one cache that the beams share.

Requests are answered one after the other. Beams share slots, and slots that no beam needs any more
are collected (`recsys.text.nodes`). The host reads from the device once in `collect_every` steps
(whether the search has ended, and which slots are live) and at the end. On a CPU, where reading
costs nothing, it looks for an end at every step.

Under a constraint, only allowed tokens may follow and only complete texts are answers. If several
beams have the same merge key, such as two tokenisations of one title, only the best one goes on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike

from recsys.arguments import whole_number
from recsys.decoding.output import DecodeStats
from recsys.decoding.tree import PromptBatch, TokenTree, require_finite
from recsys.models.tree_forward import TreeModel
from recsys.text.constraint import DEAD, Constraint
from recsys.text.nodes import TextNodes, node_budget, pick
from recsys.text.tensors import TensorConstraint, answer_each, one_each, repeated

_READ_EVERY = 8  # steps between two reads from the device, where nothing is collected


@dataclass(frozen=True)
class BeamSettings:
    """Settings of `generate_text`, with the names and meanings of Hugging Face's `generate`.

    The search ends when no live beam can beat the K finished texts at its present length.

    Attributes:
        num_beams: beam width K.
        max_new_tokens: tokens of the longest text.
        eos_token_id: token or tokens that end a text; None for none, or for the constraint's.
        length_penalty: exponent of the length by which a text's log-probability is divided; above 0
            favours long texts, 0 compares sums.
        num_return_sequences: texts to return for each request, R, at most K.
        collect_every: steps between two collections of dead slots: few save memory, many save time.
            None never collects: every node keeps its slot, K per token.
    """

    num_beams: int = 5
    max_new_tokens: int = 100
    eos_token_id: int | Sequence[int] | None = None
    length_penalty: float = 1.0
    num_return_sequences: int = 1
    collect_every: int | None = 8

    def __post_init__(self) -> None:
        for name in ("num_beams", "max_new_tokens", "num_return_sequences", "collect_every"):
            value = getattr(self, name)
            if value is not None:
                whole_number(name, value)
        if self.num_return_sequences > self.num_beams:
            raise ValueError(
                f"num_return_sequences ({self.num_return_sequences}) must be at most num_beams "
                f"({self.num_beams})"
            )
        if not math.isfinite(self.length_penalty):
            raise ValueError(f"length_penalty must be finite, got {self.length_penalty}")

    @property
    def reserved_nodes(self) -> int:
        """Node slots to allocate."""
        most = self.num_beams * (self.max_new_tokens - 1)
        if self.collect_every is None:
            return most
        return min(most, node_budget(self.num_beams, self.max_new_tokens, self.collect_every))


@dataclass(frozen=True)
class Texts:
    """The R best texts of each request, best first.

    Attributes:
        tokens: (B, R, longest) int64 without the prompt, the end token included, then 0.
        lengths: (B, R) int64; 0 where there are fewer than R texts.
        scores: (B, R) float32 or float64, sum of log-probabilities / length ** length_penalty;
            -inf where there are fewer than R texts, which happens under a constraint.
        stats: one entry per request; its slots are those that were allocated, used or not.
        live: the most slots of each request that a collection found live, including the prompt's;
            only the prompt's if there was no collection.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    scores: torch.Tensor
    stats: list[DecodeStats]
    live: list[int]


class _Finished(NamedTuple):
    """The K best finished texts, best first; score -inf where there is none."""

    tokens: torch.Tensor  # (1, K, longest possible)
    lengths: torch.Tensor  # (1, K)
    scores: torch.Tensor  # (1, K)
    states: torch.Tensor  # (1, K) of the constraint


class _Beams(NamedTuple):
    """Live beams of a request, best first, and what has finished so far."""

    tokens: torch.Tensor  # (1, K, longest possible)
    scores: torch.Tensor  # (1, K) sums of log-probabilities
    parents: torch.Tensor  # (1, K) places in the step before
    states: torch.Tensor  # (1, K) of the constraint
    finished: _Finished
    done: torch.Tensor  # (1,) whether `finished` is final

    @classmethod
    def start(cls, rules: _Rules, dtype: torch.dtype, device: torch.device) -> _Beams:
        """One empty beam with score 0; the other K - 1 beams do not exist."""
        shape = (1, rules.settings.num_beams)
        tokens = torch.zeros(
            (*shape, rules.settings.max_new_tokens), dtype=torch.int64, device=device
        )
        scores = torch.full(shape, -torch.inf, dtype=dtype, device=device)
        zero = torch.zeros(shape, dtype=torch.int64, device=device)
        first = scores.clone()
        first[:, 0] = 0
        done = torch.zeros(1, dtype=torch.bool, device=device)
        constraint = rules.constraint
        states = zero if constraint is None else constraint.initial(rules.settings.num_beams)
        return cls(tokens, first, zero, states, _Finished(tokens, zero, scores, zero), done)


@dataclass(frozen=True)
class _Rules:
    """Which beams go on, which texts are finished, and when to stop: Hugging Face's rules."""

    settings: BeamSettings
    end: torch.Tensor  # (E,) end tokens
    constraint: TensorConstraint | None

    @classmethod
    def of(cls, settings: BeamSettings, constraint: Constraint | None, model: TreeModel) -> _Rules:
        """Take the end tokens from the settings, or from the constraint.

        ValueError if they are outside the vocabulary or beside a constraint, or if there are more
        beams than tokens can follow a prompt.
        """
        vocabulary, own = model.vocabulary_size, None
        eos = [] if settings.eos_token_id is None else np.unique(settings.eos_token_id).tolist()
        if constraint is not None:
            own = TensorConstraint(constraint, vocabulary, model.device)
            if eos:
                raise ValueError("eos_token_id: the constraint has end tokens of its own")
            eos = sorted(own.end_tokens)
        outside = [token for token in eos if not 0 <= token < vocabulary]
        if outside:
            raise ValueError(
                f"eos_token_id {outside[0]} is outside the vocabulary 0 .. {vocabulary - 1}"
            )
        if settings.num_beams > vocabulary - len(eos):
            raise ValueError(
                f"num_beams must be at most the {vocabulary - len(eos)} tokens that can follow a "
                f"prompt without ending the text, got {settings.num_beams}"
            )
        end = torch.tensor(eos, dtype=torch.int64, device=model.device)
        return cls(settings, end, own)

    def advance(self, beams: _Beams, logits: torch.Tensor, depth: int) -> _Beams:
        """Extend beams of `depth` - 1 tokens by one, given (1, K, V) logits; K = 1 at the prompt.

        The best (E + 1) K continuations contain at least K that do not end; those go on. Of the
        best K continuations, those that end are finished, if they are among the best K finished so
        far.
        """
        K, vocabulary, constraint = self.settings.num_beams, logits.shape[-1], self.constraint
        log_probs = logits.log_softmax(-1)
        before = beams.states[:, : logits.shape[1]]
        if constraint is not None:
            log_probs = log_probs.masked_fill_(~constraint.allowed(before), -torch.inf)
        total = (beams.scores.unsqueeze(-1) + log_probs).flatten(1)
        count = max(2, 1 + len(self.end)) * K
        if constraint is None:
            scores, column = total.topk(count)
            states = torch.zeros_like(column)
        else:
            scores, column, states = constraint.best(total, before, count)
        parents, last = column // vocabulary, column % vocabulary
        ends = torch.isin(last, self.end)
        if constraint is None:
            ends = ends | (depth == self.settings.max_new_tokens)
        texts = pick(beams.tokens, parents)
        texts[:, :, depth - 1] = last

        finished = self._finish(beams, texts[:, :K], scores[:, :K], ends[:, :K], states, depth)
        live, on = scores.masked_fill(ends, -torch.inf).topk(K)
        # No live beam can replace the worst of the K finished texts.
        best = live[:, 0] / depth**self.settings.length_penalty
        done = beams.done | ~(best > finished.scores[:, -1])
        # no constraint looks at the beams of a search that is done
        states = states.gather(1, on).masked_fill(done[:, None], DEAD)
        return _Beams(pick(texts, on), live, parents.gather(1, on), states, finished, done)

    def _finish(
        self,
        beams: _Beams,
        texts: torch.Tensor,
        scores: torch.Tensor,
        ends: torch.Tensor,
        states: torch.Tensor,
        depth: int,
    ) -> _Finished:
        """The best K finished texts, given (1, K) new ones of `depth` tokens."""
        new, old = ends & ~beams.done[:, None], beams.finished
        ranked = (scores / depth**self.settings.length_penalty).masked_fill(~new, -torch.inf)
        both = torch.cat([old.scores, ranked], dim=1)
        whole = torch.cat([old.states, states[:, : ends.shape[1]]], dim=1)
        if self.constraint is not None:
            both = both.masked_fill(repeated(self.constraint.merge_keys(whole), both), -torch.inf)
        best, column = both.topk(self.settings.num_beams)
        lengths = torch.cat([old.lengths, torch.full_like(old.lengths, depth)], dim=1)
        tokens = pick(torch.cat([old.tokens, texts], dim=1), column)
        return _Finished(tokens, lengths.gather(1, column), best, whole.gather(1, column))


@torch.inference_mode()
def generate_text(
    model: Any,
    prompts: Sequence[ArrayLike],
    settings: BeamSettings | None = None,
    *,
    constraint: Constraint | Sequence[Constraint] | None = None,
) -> Texts:
    """The best texts that beam search finds after each prompt.

    Equals Hugging Face's `generate(do_sample=False, ...)` with the same settings; with one beam it
    is greedy search. Equal scores are in the order of `torch.topk`. A constraint does not change
    scores, which are sums of log-probabilities over the whole vocabulary.

    Args:
        model: a Hugging Face decoder-only causal LM, a peft model of one, or a `TreeModel`.
        prompts: token ids of each request, at least one token each; lengths may differ.
        settings: width, lengths and rules of the search.
        constraint: which texts are allowed, one constraint for all requests or one each. Texts that
            are not complete at `max_new_tokens` are no answers.

    Returns:
        Texts of shape (B, R, longest).

    Raises:
        ValueError: an empty prompt, a token outside the model's vocabulary, or a constraint that
            does not fit.
        NonFiniteError: the model's logits are not finite for some of the requests.
    """
    model, settings = TreeModel.of(model), settings or BeamSettings()
    ready = PromptBatch.of(prompts, model, settings.max_new_tokens - 1)
    rules = [_Rules.of(settings, None, model)] * len(ready)
    if constraint is not None:
        own = one_each(constraint, len(ready), model.vocabulary_size)
        rules = [_Rules.of(settings, each, model) for each in own]

    def search(number: int) -> tuple[_Finished, DecodeStats, int]:
        return _search(model, ready.take([number]), rules[number])

    answers, count = answer_each(len(ready), search), settings.num_return_sequences
    shape = (0, count, settings.max_new_tokens)
    tokens = torch.zeros(shape, dtype=torch.int64, device=model.device)
    scores = torch.zeros(shape[:2], dtype=model.score_dtype, device=model.device)
    finished = [finished for finished, *_ in answers]
    tokens = torch.cat([tokens, *(each.tokens[:, :count] for each in finished)])
    lengths = torch.cat([scores.long(), *(each.lengths[:, :count] for each in finished)])
    scores = torch.cat([scores, *(each.scores[:, :count] for each in finished)])
    lengths = lengths.masked_fill(scores == -torch.inf, 0)
    longest = max(lengths.flatten().tolist(), default=0)
    inside = torch.arange(longest, device=tokens.device) < lengths.unsqueeze(-1)
    stats, live = [own for _, own, _ in answers], [slots for *_, slots in answers]
    return Texts(tokens[..., :longest] * inside, lengths, scores, stats, live)


def _search(
    model: TreeModel, prompt: PromptBatch, rules: _Rules
) -> tuple[_Finished, DecodeStats, int]:
    """The texts behind one prompt, their cost, and `Texts.live`."""
    settings = rules.settings
    longest, every, K = settings.max_new_tokens, settings.collect_every, settings.num_beams
    (length,) = prompt.host_lengths.tolist()
    live, depth = length, 0
    beams = _Beams.start(rules, model.score_dtype, model.device)
    with TokenTree(model, prompt, 0, reserve=settings.reserved_nodes) as tree:
        nodes = TextNodes(tree, K)
        logits = tree.forward()
        tree.note(logits.amax(-1))
        for depth in range(1, longest + 1):
            beams = rules.advance(beams, logits, depth)
            # Reading costs nothing on a CPU, so a search stops at once there.
            read = depth % (every or _READ_EVERY) == 0 or depth == longest
            if read or model.device.type == "cpu":
                require_finite(tree.finite)
                if depth == longest or bool(beams.done):
                    break
            if every is not None and depth % every == 0:
                live = max(live, length + nodes.collect(beams.parents))
                nodes.reserve(nodes.count + K * min(every, longest - depth))
            logits = nodes.forward(beams.tokens[:, :, depth - 1], beams.parents, depth)
        slots, cached = tree.cache.slots, int(tree.cached[0])
        run = length - cached + K * (depth - 1)
        size = slots * tree.cache.bytes_per_slot
        stats = DecodeStats(depth, run, slots, size, cached_tokens=cached)
    return beams.finished, stats, live
