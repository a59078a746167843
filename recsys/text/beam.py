"""Free text: Hugging Face's beam search over one shared-prefix cache that is kept clean.

Beams share slots, and those that no beam needs any more are collected (`text_nodes`). The host
reads from the device once in `collect_every` steps (twice in a row: who has ended, and what is
live), and at the end; on a CPU, where it costs nothing, it looks for an end at every step.

Under a constraint, only what it allows may follow and only whole texts are answers. Of beams that
stand for the same, as those that write one title with unlike tokens, the best goes on alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from recsys.decoding.output import DecodeStats
from recsys.decoding.tree import Prompts, TokenTree, require_finite
from recsys.models.tree_forward import TreeModel
from recsys.text.constraint import Constraint
from recsys.text.guide import Guide, repeated
from recsys.text.nodes import TextNodes, node_budget, pick

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True)
class Texts:
    """The R best texts of each request, best first.

    Attributes:
        tokens: (B, R, longest) int64 without the prompt, the end token included, then 0.
        lengths: (B, R) int64; 0 where there are fewer than R texts.
        scores: (B, R) float32 or float64, sum of log-probabilities / length ** length_penalty;
            -inf where there are fewer than R texts, as may be under a constraint.
        stats: one entry a request; its slots are those that were allocated, used or not.
        live: of each request, the most slots that a collection found live, prompt included; the
            prompt's alone if there was none.
        collections: times that dead slots were collected.
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


class _Beams(NamedTuple):
    """Live beams of each request, best first, and what has finished so far."""

    tokens: torch.Tensor  # (B, K, longest possible)
    scores: torch.Tensor  # (B, K) sums of log-probabilities
    parents: torch.Tensor  # (B, K) places in the step before
    states: torch.Tensor  # (B, K) of the constraint
    finished: _Finished
    done: torch.Tensor  # (B,) nothing can change `finished` any more

    @classmethod
    def start(cls, batch: int, rules: _Rules, dtype: torch.dtype, device: torch.device) -> _Beams:
        """One beam a request, empty, with score 0; the other K - 1 do not exist."""
        shape = (batch, rules.num_beams)
        tokens = torch.zeros((*shape, rules.max_new_tokens), dtype=torch.int64, device=device)
        scores = torch.full(shape, -torch.inf, dtype=dtype, device=device)
        place = torch.zeros(shape, dtype=torch.int64, device=device)
        first = scores.clone()
        first[:, 0] = 0
        done = torch.zeros(batch, dtype=torch.bool, device=device)
        states = place if rules.guide is None else rules.guide.initial(rules.num_beams)
        return cls(tokens, first, place, states, _Finished(tokens, place, scores, place), done)

    def take(self, requests: torch.Tensor) -> _Beams:
        """Some requests of the batch; (b,) places."""
        return _Beams(
            self.tokens[requests],
            self.scores[requests],
            self.parents[requests],
            self.states[requests],
            _Finished(*(part[requests] for part in self.finished)),
            self.done[requests],
        )


@dataclass(frozen=True)
class _Rules:
    """Which beams go on, which texts are finished, and when to stop: Hugging Face's rules."""

    num_beams: int
    max_new_tokens: int
    min_new_tokens: int
    end: torch.Tensor  # (E,) end tokens
    length_penalty: float
    early_stopping: EarlyStopping
    guide: Guide | None = None

    def advance(self, beams: _Beams, logits: torch.Tensor, depth: int) -> _Beams:
        """One step.

        The best (E + 1) K continuations hold at least K that do not end. Those go on. Of the best K
        those that end are finished, if they are among the best K finished so far.

        Args:
            beams: of `depth` - 1 tokens.
            logits: (B, K, V) at their last tokens; (B, 1, V) at the prompt's.
            depth: tokens of a beam after this step.
        """
        K, vocabulary, guide = self.num_beams, logits.shape[-1], self.guide
        log_probs = logits.log_softmax(-1)
        if depth <= self.min_new_tokens:
            log_probs = log_probs.index_fill(-1, self.end, -torch.inf)
        if guide is not None:
            allowed = guide.allowed(beams.states[:, : logits.shape[1]])
            log_probs = log_probs.masked_fill_(~allowed, -torch.inf)
        total = (beams.scores.unsqueeze(-1) + log_probs).flatten(1)
        count = max(2, 1 + len(self.end)) * K
        if guide is None:
            scores, place = total.topk(count)
            states = torch.zeros_like(place)
        else:
            scores, place, states = guide.best(total, beams.states[:, : logits.shape[1]], count)
        parents, last = place // vocabulary, place % vocabulary
        ends = torch.isin(last, self.end)
        if guide is None:
            ends = ends | (depth == self.max_new_tokens)
        texts = pick(beams.tokens, parents)
        texts[:, :, depth - 1] = last

        new = ends[:, :K] & ~beams.done[:, None]
        ranked = (scores[:, :K] / depth**self.length_penalty).masked_fill(~new, -torch.inf)
        old = beams.finished
        both = torch.cat([old.scores, ranked], dim=1)
        whole = torch.cat([old.states, states[:, :K]], dim=1)
        if guide is not None:
            both = both.masked_fill(repeated(guide.merge_keys(whole), both), -torch.inf)
        best, kept = both.topk(K)
        finished = _Finished(
            pick(torch.cat([old.tokens, texts[:, :K]], dim=1), kept),
            torch.cat([old.lengths, torch.full_like(old.lengths, depth)], dim=1).gather(1, kept),
            best,
            whole.gather(1, kept),
        )

        live, on = scores.masked_fill(ends, -torch.inf).topk(K)
        # The best that a live beam can become, by the length it is assumed to end at.
        never = self.early_stopping == "never" and self.length_penalty > 0
        hope = live[:, 0] / (self.max_new_tokens if never else depth) ** self.length_penalty
        done = beams.done | ~(hope > best[:, -1])
        if self.early_stopping is True:
            done = done | (best[:, -1] > -torch.inf)
        parents, states = parents.gather(1, on), states.gather(1, on)
        return _Beams(pick(texts, on), live, parents, states, finished, done)


@torch.inference_mode()
def generate_text(
    model: Any,
    prompts: Sequence[ArrayLike],
    num_beams: int = 5,
    max_new_tokens: int = 100,
    *,
    constraint: Constraint | Sequence[Constraint] | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    min_new_tokens: int = 0,
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = False,
    num_return_sequences: int = 1,
    collect: bool = True,
    collect_every: int = 8,
    prompt_slots: int = 0,
) -> Texts:
    """The best texts that beam search of width `num_beams` finds after each prompt.

    Equals Hugging Face's `generate(num_beams=K, do_sample=False, ...)` with the same arguments, and
    with one beam its greedy search. Equal scores are ordered as `torch.topk` leaves them. A
    constraint leaves scores as they are, sums of log-probabilities over the whole vocabulary.

    Args:
        model: a Hugging Face decoder-only causal LM, a peft model of one, or a `TreeModel`.
        prompts: token ids of each request, at least one token each; lengths may differ.
        num_beams: K.
        max_new_tokens: longest text.
        constraint: which texts may be written, one for all requests or one each. Texts that are
            not whole at `max_new_tokens` are no answers.
        eos_token_id: token or tokens that end a text; None for none, or for the constraint's.
        min_new_tokens: tokens before a text may end.
        length_penalty: exponent of the length by which a text's log-probability is divided; above 0
            favours long texts, 0 compares sums.
        early_stopping: stop as soon as K texts are finished (True); when no live beam can beat them
            at its present length (False); or when none can at any length ("never").
        num_return_sequences: R, at most K.
        collect: reuse the slots of dead nodes. Without, every node keeps its slot: K a token.
        collect_every: steps between two collections. Few save memory, many save time.
        prompt_slots: prompt slots to reserve at least.

    Returns:
        Texts of shape (B, R, longest).

    Raises:
        ValueError: an argument out of its range, an empty prompt, or a token outside the model's
            vocabulary.
        NonFiniteError: the model's logits are not finite for some of the requests.
    """
    model = TreeModel.of(model)
    ready = Prompts.of(prompts, model, max_new_tokens - 1)
    guide, eos = _ends(constraint, eos_token_id, len(ready), model)
    _check(
        model.vocabulary_size,
        eos,
        num_beams=num_beams,
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        num_return_sequences=num_return_sequences,
        collect_every=collect_every,
    )
    rules = _Rules(
        num_beams,
        max_new_tokens,
        min_new_tokens,
        torch.tensor(eos, dtype=torch.int64, device=model.device),
        length_penalty,
        # with one beam the first text to finish is greedy's
        True if num_beams == 1 else early_stopping,
        guide,
    )
    beams = _Beams.start(len(ready), rules, model.score_dtype, model.device)
    if not len(ready):
        tokens, lengths, scores, _ = (part[:, :num_return_sequences] for part in beams.finished)
        return Texts(tokens[..., :0], lengths, scores, [], [], 0)
    room = num_beams * (max_new_tokens - 1)
    if collect:
        room = min(room, node_budget(num_beams, max_new_tokens, collect_every))
    with TokenTree(model, ready, 0, prompt_slots=prompt_slots, reserve=room) as tree:
        nodes = TextNodes(tree, num_beams)
        answers = _Answers(nodes, ready.host_lengths)
        logits = tree.forward()
        tree.note(logits.amax(-1))
        for depth in range(1, max_new_tokens + 1):
            beams = rules.advance(beams, logits, depth)
            look = depth % collect_every == 0
            # reading costs nothing on a CPU, so a search stops at once there
            if look or depth == max_new_tokens or model.device.type == "cpu":
                require_finite(tree.finite, answers.requests.tolist())
                done = np.asarray(beams.done.tolist()) | (depth == max_new_tokens)
                beams = answers.take(beams, done, depth, guide)
                if not len(answers.requests):
                    break
            if look and collect:
                answers.hold(nodes.collect(beams.parents))
                nodes.reserve(nodes.count + num_beams * min(collect_every, max_new_tokens - depth))
            logits = nodes.forward(beams.tokens[:, :, depth - 1], beams.parents, depth)
    return answers.texts(num_return_sequences)


class _Answers:
    """What the requests that are done have found, in the order in which they left the batch.

    Attributes:
        requests: places in the original batch of those still in it.
    """

    def __init__(self, nodes: TextNodes, lengths: NDArray[np.int64]) -> None:
        self.requests = np.arange(len(lengths))
        self._nodes, self._lengths, self._live = nodes, lengths, lengths.copy()
        self._order: list[int] = []
        self._found: list[_Finished] = []
        self._stats: list[DecodeStats] = []

    def take(
        self, beams: _Beams, done: NDArray[np.bool_], depth: int, guide: Guide | None
    ) -> _Beams:
        """Take requests out of the search; all else that knows of the batch goes on without them.

        Args:
            beams: of the batch.
            done: (b,) the requests of it that leave.
            depth: tokens of their texts at most.
            guide: that the batch is under.

        Returns:
            Beams of the others; as they were where nobody is left.
        """
        if not done.any():
            return beams
        tree = self._nodes.tree
        for i in self.requests[done].tolist():
            length, cached = int(self._lengths[i]), int(tree.cached[i])
            self._order.append(i)
            self._stats.append(
                DecodeStats(
                    target_passes=depth,
                    target_tokens=length - cached + self._nodes.width * (depth - 1),
                    kv_slots=tree.cache.slots,
                    kv_bytes=tree.cache.slots * tree.cache.bytes_per_slot,
                    cached_tokens=cached,
                )
            )
        leave, stay = (torch.from_numpy(np.flatnonzero(d)) for d in (done, ~done))
        self._found.append(beams.take(leave.to(beams.done.device)).finished)
        self.requests = self.requests[~done]
        if not len(self.requests):
            return beams
        going_on = stay.to(beams.done.device)
        self._nodes.keep(going_on)
        if guide is not None:
            guide.keep(stay)
        return beams.take(going_on)

    def hold(self, nodes: list[int]) -> None:
        """Note how many nodes of each request of the batch a collection found live."""
        here = self.requests
        self._live[here] = np.maximum(self._live[here], self._lengths[here] + nodes)

    def texts(self, wanted: int) -> Texts:
        """The best of every request, in the original order."""
        place = np.argsort(self._order)
        back = torch.from_numpy(place).to(self._found[0].tokens.device)
        tokens, lengths, scores, _ = (
            torch.cat(parts)[back, :wanted] for parts in zip(*self._found, strict=True)
        )
        lengths = lengths.masked_fill(scores == -torch.inf, 0)
        longest = int(lengths.max())
        kept = torch.arange(longest, device=tokens.device) < lengths.unsqueeze(-1)
        return Texts(
            tokens[..., :longest] * kept,
            lengths,
            scores,
            [self._stats[i] for i in place],
            self._live.tolist(),
            self._nodes.collections,
        )


def _ends(
    constraint: Constraint | Sequence[Constraint] | None,
    eos_token_id: int | Sequence[int] | None,
    requests: int,
    model: TreeModel,
) -> tuple[Guide | None, list[int]]:
    """What guides the texts, and the tokens that end one: the constraint's, or those given."""
    if constraint is None:
        given = [] if eos_token_id is None else np.unique(np.atleast_1d(eos_token_id)).tolist()
        return None, given
    guide = Guide(constraint, requests, model.vocabulary_size, model.device)
    if eos_token_id is not None:
        raise ValueError("eos_token_id: the constraint has end tokens of its own")
    return guide, np.unique(guide.end_tokens).tolist()


def _check(
    vocabulary: int,
    eos: Sequence[int],
    *,
    num_beams: int,
    max_new_tokens: int,
    min_new_tokens: int,
    length_penalty: float,
    early_stopping: EarlyStopping,
    num_return_sequences: int,
    collect_every: int,
) -> None:
    """Raise `ValueError` for the first argument out of its range."""
    for name, value, least in (
        ("num_beams", num_beams, 1),
        ("max_new_tokens", max_new_tokens, 1),
        ("min_new_tokens", min_new_tokens, 0),
        ("num_return_sequences", num_return_sequences, 1),
        ("collect_every", collect_every, 1),
    ):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    if num_return_sequences > num_beams:
        raise ValueError(
            f"num_return_sequences ({num_return_sequences}) must be at most num_beams ({num_beams})"
        )
    if early_stopping not in (True, False, "never"):
        raise ValueError(f"early_stopping must be True, False or 'never', got {early_stopping!r}")
    if not math.isfinite(length_penalty):
        raise ValueError(f"length_penalty must be finite, got {length_penalty}")
    bad = [token for token in eos if not 0 <= token < vocabulary]
    if bad:
        raise ValueError(f"eos_token_id {bad[0]} is outside the vocabulary 0 .. {vocabulary - 1}")
    if num_beams > vocabulary - len(eos):
        raise ValueError(
            f"num_beams must be at most the {vocabulary - len(eos)} tokens that can follow a "
            f"prompt without ending the text, got {num_beams}"
        )
