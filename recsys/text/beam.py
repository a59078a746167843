"""Beam search for free text, with Hugging Face's rules, over one cache that the beams share.

Beams share slots, and slots that no beam needs any more are collected (`recsys.text.nodes`). The
host reads from the device once in `collect_every` steps (whether all requests have ended, and which
slots are live) and at the end. On a CPU, where reading costs nothing, it looks for an end at every
step. A request that has ended waits for the others of its batch, as in Hugging Face's.

Under a constraint, only allowed tokens may follow and only complete texts are answers. If several
beams have the same merge key, such as two tokenisations of one title, only the best one goes on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike

from recsys.arguments import whole_number
from recsys.decoding.output import DecodeStats
from recsys.decoding.tree import PromptBatch, TokenTree, require_finite
from recsys.models.tree_forward import TreeModel
from recsys.text.batch import BatchConstraint, repeated
from recsys.text.constraint import DEAD, Constraint
from recsys.text.nodes import TextNodes, node_budget, pick
from recsys.text.stopping import raise_if_stopped

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
        collections: number of collections.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    scores: torch.Tensor
    stats: list[DecodeStats]
    live: list[int]
    collections: int


class _Finished(NamedTuple):
    """The K best finished texts of each request, best first; score -inf where there is none."""

    tokens: torch.Tensor  # (B, K, longest possible)
    lengths: torch.Tensor  # (B, K)
    scores: torch.Tensor  # (B, K)
    states: torch.Tensor  # (B, K) of the constraint

    def texts(
        self, count: int, stats: list[DecodeStats], live: list[int], collections: int
    ) -> Texts:
        """The best `count` texts of each request."""
        tokens, lengths, scores, _ = (part[:, :count] for part in self)
        lengths = lengths.masked_fill(scores == -torch.inf, 0)
        longest = max(lengths.flatten().tolist(), default=0)
        inside = torch.arange(longest, device=tokens.device) < lengths.unsqueeze(-1)
        return Texts(tokens[..., :longest] * inside, lengths, scores, stats, live, collections)


class _Beams(NamedTuple):
    """Live beams of each request, best first, and what has finished so far."""

    tokens: torch.Tensor  # (B, K, longest possible)
    scores: torch.Tensor  # (B, K) sums of log-probabilities
    parents: torch.Tensor  # (B, K) places in the step before
    states: torch.Tensor  # (B, K) of the constraint
    finished: _Finished
    done: torch.Tensor  # (B,) whether `finished` is final

    @classmethod
    def start(cls, batch: int, rules: _Rules, dtype: torch.dtype, device: torch.device) -> _Beams:
        """One empty beam per request with score 0; the other K - 1 beams do not exist."""
        shape = (batch, rules.settings.num_beams)
        tokens = torch.zeros(
            (*shape, rules.settings.max_new_tokens), dtype=torch.int64, device=device
        )
        scores = torch.full(shape, -torch.inf, dtype=dtype, device=device)
        zero = torch.zeros(shape, dtype=torch.int64, device=device)
        first = scores.clone()
        first[:, 0] = 0
        done = torch.zeros(batch, dtype=torch.bool, device=device)
        constraint = rules.constraint
        states = zero if constraint is None else constraint.initial(rules.settings.num_beams)
        return cls(tokens, first, zero, states, _Finished(tokens, zero, scores, zero), done)


@dataclass(frozen=True)
class _Rules:
    """Which beams go on, which texts are finished, and when to stop: Hugging Face's rules."""

    settings: BeamSettings
    end: torch.Tensor  # (E,) end tokens
    constraint: BatchConstraint | None

    @classmethod
    def of(
        cls,
        settings: BeamSettings,
        constraint: Constraint | Sequence[Constraint] | None,
        requests: int,
        model: TreeModel,
    ) -> _Rules:
        """Take the end tokens from the settings, or from the constraint.

        ValueError if they are outside the vocabulary or beside a constraint, or if there are more
        beams than tokens can follow a prompt.
        """
        vocabulary, together = model.vocabulary_size, None
        eos = [] if settings.eos_token_id is None else np.unique(settings.eos_token_id).tolist()
        if constraint is not None:
            together = BatchConstraint(constraint, requests, vocabulary, model.device)
            if eos:
                raise ValueError("eos_token_id: the constraint has end tokens of its own")
            eos = sorted(together.end_tokens)
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
        return cls(settings, end, together)

    def advance(self, beams: _Beams, logits: torch.Tensor, depth: int) -> _Beams:
        """Extend beams of `depth` - 1 tokens by one, given (B, K, V) logits; K = 1 at the prompts.

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
        done = beams.done | self._is_final(live[:, 0], finished.scores[:, -1], depth)
        # no constraint looks at the beams of a request that is done
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
        """The best K finished texts, given (B, K) new ones of `depth` tokens."""
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

    def _is_final(self, live: torch.Tensor, worst: torch.Tensor, depth: int) -> torch.Tensor:
        """(B,) whether no live beam can replace the worst of the K finished texts."""
        can: torch.Tensor = live / depth**self.settings.length_penalty > worst
        return ~can


@torch.inference_mode()
def generate_text(
    model: Any,
    prompts: Sequence[ArrayLike],
    settings: BeamSettings | None = None,
    *,
    constraint: Constraint | Sequence[Constraint] | None = None,
    stopped: Callable[[], bool] | None = None,
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
        stopped: whether to search no further; asked before each pass of the model.

    Returns:
        Texts of shape (B, R, longest).

    Raises:
        ValueError: an empty prompt, a token outside the model's vocabulary, or a constraint that
            does not fit.
        NonFiniteError: the model's logits are not finite for some of the requests.
        StoppedError: `stopped` returned True.
    """
    model, settings = TreeModel.of(model), settings or BeamSettings()
    longest, every = settings.max_new_tokens, settings.collect_every
    ready = PromptBatch.of(prompts, model, longest - 1)
    rules = _Rules.of(settings, constraint, len(ready), model)
    beams = _Beams.start(len(ready), rules, model.score_dtype, model.device)
    if not len(ready):
        return beams.finished.texts(settings.num_return_sequences, [], [], 0)
    lengths, K = ready.host_lengths, settings.num_beams
    live, depth = lengths.copy(), 0
    with TokenTree(model, ready, 0, reserve=settings.reserved_nodes) as tree:
        nodes = TextNodes(tree, K)
        raise_if_stopped(stopped)
        logits = tree.forward()
        tree.note(logits.amax(-1))
        for depth in range(1, longest + 1):
            beams = rules.advance(beams, logits, depth)
            # Reading costs nothing on a CPU, so a search stops at once there.
            read = depth % (every or _READ_EVERY) == 0 or depth == longest
            if read or model.device.type == "cpu":
                require_finite(tree.finite)
                if depth == longest or bool(beams.done.all()):
                    break
            if every is not None and depth % every == 0:
                live = np.maximum(live, lengths + nodes.collect(beams.parents))
                nodes.reserve(nodes.count + K * min(every, longest - depth))
            raise_if_stopped(stopped)
            logits = nodes.forward(beams.tokens[:, :, depth - 1], beams.parents, depth)
        slots, size = tree.cache.slots, tree.cache.bytes_per_slot
        stats = [
            DecodeStats(
                target_passes=depth,
                target_tokens=length - cached + K * (depth - 1),
                kv_slots=slots,
                kv_bytes=slots * size,
                cached_tokens=cached,
            )
            for length, cached in zip(lengths.tolist(), tree.cached.tolist(), strict=True)
        ]
    count = settings.num_return_sequences
    return beams.finished.texts(count, stats, live.tolist(), nodes.collections)
