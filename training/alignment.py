"""Alignment of a draft: batches of teacher trees, and the loss modules that `fit` trains.

One forward runs a batch of windows (a prompt and, behind it, the item that came next) and the trees
below the prompts (`recsys.training.tree`). The next items carry the recommendation loss, the tree
nodes the alignment loss: alpha * align + (1 - alpha) * rec, AtSpeed's eq. 5 and 9.

What is summed over which nodes is the business of this module; what a node's loss is, that of
`recsys.training.losses`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from recsys.constraint.transitions import DeviceTrie
from recsys.prompts import PromptEncoder
from recsys.training import losses
from recsys.training.objective import smoothed_cross_entropy
from recsys.training.teacher import Prompts, Trees
from recsys.training.tree import (
    causal_parts,
    child_tokens,
    descent,
    node_logits,
    tree_mask,
    tree_positions,
)

Objective = Literal[
    "sft", "wordkd", "tvdkd", "seqkd", "atspeed-s", "atspeed-r", "tree-kd", "beam-kd"
]
# What each objective learns from, besides the next items.
ON_WORDS = ("wordkd", "tvdkd")  # the target, asked at every token of the training windows
ON_TREES = ("seqkd", "atspeed-s", "atspeed-r", "tree-kd", "beam-kd")  # the teacher's trees
# Objectives that look at what a draft tree holds, levels 1 .. L - 1: nothing below level L - 1.
_DRAFTED = ("tree-kd", "beam-kd")


@dataclass(frozen=True)
class AlignmentSettings:
    """What a draft is aligned by.

    Attributes:
        objective: see the page on alignment.
        alpha: weight of the alignment loss; the rest is the recommendation loss.
        beam_steps: whether the sequences of a history are the beams of every step, or of the last.
        density: keep AtSpeed-S's density regularisation.
        constrained: compare distributions over allowed tokens; False takes the whole vocabulary,
            for which the target is asked again at every step of training.
        top_k: learn from all K sequences; False from the best one.
        tree_attention: one row a history; False runs every node as a row of its own.
        temperature: of beam-kd.
        flatten: nodes of tree-kd weigh p(prefix)^(1 / flatten).
    """

    objective: Objective = "sft"
    alpha: float = 0.5
    beam_steps: Literal["all", "last"] = "all"
    density: bool = True
    constrained: bool = True
    top_k: bool = True
    tree_attention: bool = True
    temperature: float = 2.0
    flatten: float = 2.0


@dataclass(frozen=True)
class TreeBatch:
    """Rows of one forward.

    Attributes:
        window: (B, T) int64 prompt and next item, padded on the right.
        asked: (B, T) bool, tokens that carry the recommendation loss.
        lengths: (B,) int64 tokens of each prompt.
        states: (B, L, K) int64, -1 where no beam is.
        parents: (B, L, K) int64.
        scores: (B, L, K) float32.
        log_probs: L arrays (B, 1 or K, C) float32, the target's, -inf for padding.
    """

    window: NDArray[np.int64]
    asked: NDArray[np.bool_]
    lengths: NDArray[np.int64]
    states: NDArray[np.int64]
    parents: NDArray[np.int64]
    scores: NDArray[np.float32]
    log_probs: list[NDArray[np.float32]]

    @property
    def inputs(self) -> tuple[NDArray[Any], ...]:
        """Arguments of `TreeAlignment.forward`."""
        return (
            self.window, self.asked, self.lengths, self.states, self.parents, self.scores,
            *self.log_probs,
        )  # fmt: skip

    @property
    def size(self) -> int:
        """Tokens of the forward, padding included."""
        levels, width = self.states.shape[1:]
        return int(self.window.size + len(self.states) * (levels - 1) * width)


@dataclass(frozen=True)
class TreeBatches:
    """All batches of all epochs over teacher data; their order follows from (seed, epoch).

    Attributes:
        prompts: what the teacher was asked.
        trees: its answers, in the same order.
        encoder: history -> prompt.
        trie: the catalog, as the teacher had it.
        max_tokens: most tokens of a batch, nodes and padding included.
        min_context: items of a window that carry no loss.
        seed: of the order.
    """

    prompts: Prompts
    trees: Trees
    encoder: PromptEncoder
    trie: Any
    max_tokens: int
    min_context: int = 1
    seed: int = 0

    def epoch(self, epoch: int, start: int = 0) -> Iterator[TreeBatch]:
        """Batches of one epoch from number `start` on."""
        for places in self.groups(epoch)[start:]:
            yield self.batch(places)

    def count(self, epoch: int = 0) -> int:
        """Batches of an epoch."""
        return len(self.groups(epoch))

    def groups(self, epoch: int) -> list[NDArray[np.int64]]:
        """Histories of each batch: alike in length, random among equals, in random order."""
        rng = np.random.default_rng([self.seed, epoch])
        config, levels = self.encoder.config, self.encoder.item_tokens.shape[1]
        lengths = self.prompts.histories.lengths
        items = lengths - config.start(lengths)
        order = np.lexsort((rng.random(len(items)), items))
        _, depth, width = self.trees.states.shape
        own = len(self.encoder.prefix) + (items[order] + 1) * levels + (depth - 1) * width
        groups, start = [], 0
        while start < len(order):
            # Rows get longer: the last one's width holds for all that come before it.
            near = own[start : start + self.max_tokens // int(own[start]) + 1]
            room = near * np.arange(1, len(near) + 1)
            stop = start + max(1, int(np.searchsorted(room, self.max_tokens, side="right")))
            groups.append(order[start:stop])
            start = stop
        return [groups[i] for i in rng.permutation(len(groups))]

    def batch(self, places: NDArray[np.int64], trees: Trees | None = None) -> TreeBatch:
        """The batch of the prompts at `places`, with other trees for them if given."""
        levels, prefix = self.encoder.item_tokens.shape[1], len(self.encoder.prefix)
        asked = self.prompts.take(places)
        prompts = self.encoder.encode_all(asked.histories)
        lengths = np.asarray([len(p) for p in prompts], np.int64)
        window = np.full((len(places), lengths.max() + levels), self.encoder.pad, np.int64)
        loss = np.zeros(window.shape, np.bool_)
        for line, (prompt, item) in enumerate(zip(prompts, asked.following.tolist(), strict=True)):
            stop = len(prompt)
            window[line, :stop] = prompt
            if item >= 0:
                window[line, stop : stop + levels] = self.encoder.item_tokens[item]
                stop += levels
            loss[line, prefix + levels * self.min_context : stop] = True
        if trees is None:
            trees = self.trees
        else:
            places = np.arange(len(places))
        return TreeBatch(
            window, loss, lengths,
            trees.states[places].astype(np.int64), trees.parents[places].astype(np.int64),
            trees.scores[places], trees.children_log_probs(places, self.trie),
        )  # fmt: skip


@dataclass(frozen=True)
class Weights:
    """How much each node and each child of it counts in the mean over sequences.

    Attributes:
        share: L tensors (B, 1 or K, C): share of the sequences' tokens that are this child's.
        last: L tensors (B, 1 or K): log p of the K-th best sequence's token at that level, its
            mean where several steps' sequences share a node.
    """

    share: list[torch.Tensor]
    last: list[torch.Tensor]


def sequence_weights(
    states: torch.Tensor,
    parents: torch.Tensor,
    scores: torch.Tensor,
    children: list[torch.Tensor],
    log_p: list[torch.Tensor],
    *,
    beam_steps: str = "all",
    top_k: bool = True,
) -> Weights:
    """The mean over a history's sequences, and over the levels of each, as weights of nodes.

    Losses of AtSpeed are means over sequences of means over levels, and a level's loss depends on
    the prefix alone. So what is summed over a tree's sequences is a weighted sum over its nodes.

    Args:
        states: (B, L, K), -1 where no beam is.
        parents: (B, L, K).
        scores: (B, L, K); the K-th best of a step is that with the least score.
        children: L tensors (B, 1 or K, C) of child states.
        log_p: L tensors (B, 1 or K, C).
        beam_steps: `all`: the beams of every step are sequences; `last`: those of the last.
        top_k: all of them, or only the best of each step.
    """
    share = [torch.zeros_like(p) for p in log_p]
    total = [torch.zeros_like(p[..., 0]) for p in log_p]
    levels = states.shape[1]
    steps = range(levels) if beam_steps == "all" else [levels - 1]
    for step in steps:
        alive = states[:, step] >= 0
        if not top_k:
            best = scores[:, step].argmax(-1, keepdim=True)
            alive = torch.zeros_like(alive).scatter(1, best, True) & alive
        weight = alive / (alive.sum(-1, keepdim=True).clamp(min=1) * (step + 1) * len(steps))
        worst = scores[:, step].masked_fill(~alive, torch.inf).argmin(-1, keepdim=True)
        place = torch.arange(alive.shape[1], device=alive.device).expand_as(alive)
        for level in range(step, -1, -1):
            state = states[:, level].gather(1, place)
            node = parents[:, level].gather(1, place) if level else torch.zeros_like(place)
            first = children[level][..., 0].gather(1, node)
            width = log_p[level].shape[-1]
            child = node * width + (state - first).clamp(0, width - 1)
            share[level].flatten(1).scatter_add_(1, child, weight.to(share[level].dtype))
            kth = log_p[level].flatten(1).gather(1, child.gather(1, worst))
            total[level].scatter_add_(1, node, (weight * kth).to(total[level].dtype))
            place = node
    last = [t / s.sum(-1).clamp(min=1e-12) for t, s in zip(total, share, strict=True)]
    return Weights(share, last)


class TreeAlignment(nn.Module):
    """alpha * alignment at tree nodes + (1 - alpha) * next-item loss, of one batch.

    Attributes:
        model: the draft.
    """

    def __init__(
        self,
        model: Any,
        trie: DeviceTrie,
        settings: AlignmentSettings,
        *,
        target: Any = None,
        label_smoothing: float = 0.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Wrap `model`.

        Args:
            model: the draft.
            trie: the catalog, on the draft's device.
            settings: the objective.
            target: asked for the whole vocabulary where `settings.constrained` is off.
            label_smoothing: of the recommendation loss.
            dtype: bfloat16 runs matrix products in it (autocast).
        """
        super().__init__()
        self.model = model
        self._trie, self._settings, self._smoothing = trie, settings, label_smoothing
        self._dtype = dtype
        self._target = (target,)  # in a tuple: not a part that is trained or saved

    def forward(
        self,
        window: torch.Tensor,
        asked: torch.Tensor,
        lengths: torch.Tensor,
        states: torch.Tensor,
        parents: torch.Tensor,
        scores: torch.Tensor,
        *log_probs: torch.Tensor,
    ) -> torch.Tensor:
        """Loss of one `TreeBatch`; a scalar in float32 (float64 from a float64 model)."""
        settings = self._settings
        levels = states.shape[1] - (settings.objective in _DRAFTED)
        nodes = states[:, : levels - 1]
        tokens = self._trie.tokens_of(nodes.clamp(min=0)).flatten(1)
        seen = descent(parents[:, : levels - 1])
        enabled = self._dtype != torch.float32
        with torch.autocast(window.device.type, self._dtype, enabled=enabled):
            hidden = self._hidden(self.model, window, lengths, tokens, seen, nodes.shape[1:])
            head = causal_parts(self.model)[1]
            width = window.shape[1]
            if settings.tree_attention:
                logits = head(self._tree(hidden, lengths, width))
            else:
                root = head(self._tree(hidden[:, :width], lengths, width))
                alone = node_logits(self.model, window, lengths, tokens, seen)
                logits = torch.cat([root, alone], dim=1)
            rec = logits.new_zeros(())
            if settings.alpha < 1:
                said = head(hidden[:, : width - 1][asked[:, 1:]])
                rec = smoothed_cross_entropy(said, window[:, 1:][asked[:, 1:]], self._smoothing)
        kind = torch.float64 if logits.dtype == torch.float64 else torch.float32
        log_q = logits.log_softmax(-1, dtype=kind)
        whole_p = None
        if not settings.constrained:
            whole_p = self._ask_target(window, lengths, tokens, seen, nodes.shape[1:], kind)
        align = self._align(
            states[:, :levels], parents[:, :levels], scores[:, :levels],
            [p.to(kind) for p in log_probs[:levels]], log_q, whole_p,
        )  # fmt: skip
        loss: torch.Tensor = settings.alpha * align + (1 - settings.alpha) * rec
        return loss

    def _hidden(
        self,
        model: Any,
        window: torch.Tensor,
        lengths: torch.Tensor,
        tokens: torch.Tensor,
        seen: torch.Tensor,
        shape: torch.Size,
    ) -> torch.Tensor:
        """(B, T + N, H) last hidden states of windows and trees; (B, T, H) where nodes are rows."""
        decoder, head = causal_parts(model)
        if not self._settings.tree_attention:
            hidden: torch.Tensor = decoder(input_ids=window, use_cache=False).last_hidden_state
            return hidden
        kind = head.weight.dtype if self._dtype == torch.float32 else self._dtype
        return self._run(decoder, window, lengths, tokens, seen, shape, kind)

    @staticmethod
    def _run(
        decoder: Any,
        window: torch.Tensor,
        lengths: torch.Tensor,
        tokens: torch.Tensor,
        seen: torch.Tensor,
        shape: torch.Size,
        kind: torch.dtype,
    ) -> torch.Tensor:
        """(B, T + N, H) last hidden states."""
        width = window.shape[1]
        hidden: torch.Tensor = decoder(
            input_ids=torch.cat([window, tokens], dim=1),
            position_ids=tree_positions(width, lengths, *shape),
            attention_mask=tree_mask(width, lengths, seen, kind),
            use_cache=False,
        ).last_hidden_state
        return hidden

    @staticmethod
    def _tree(hidden: torch.Tensor, lengths: torch.Tensor, width: int) -> torch.Tensor:
        """(B, 1 + N, H) hidden states of the prompts' ends and the nodes."""
        last = (lengths - 1)[:, None, None].expand(-1, 1, hidden.shape[-1])
        return torch.cat([hidden.gather(1, last), hidden[:, width:]], dim=1)

    @torch.no_grad()
    def _ask_target(
        self,
        window: torch.Tensor,
        lengths: torch.Tensor,
        tokens: torch.Tensor,
        seen: torch.Tensor,
        shape: torch.Size,
        kind: torch.dtype,
    ) -> torch.Tensor:
        """(B, 1 + N, V) the target's log-probs over the whole vocabulary."""
        decoder, head = causal_parts(self._target[0])
        hidden = self._run(decoder, window, lengths, tokens, seen, shape, head.weight.dtype)
        last = self._tree(hidden, lengths, window.shape[1])
        log_p: torch.Tensor = head(last).log_softmax(-1, dtype=kind)
        return log_p

    def _align(
        self,
        states: torch.Tensor,
        parents: torch.Tensor,
        scores: torch.Tensor,
        log_p: list[torch.Tensor],
        log_q: torch.Tensor,
        whole_p: torch.Tensor | None,
    ) -> torch.Tensor:
        """Mean over histories of the objective's sum over nodes."""
        settings, trie = self._settings, self._trie
        levels, width = states.shape[1:]
        places = [slice(0, 1)] + [slice(1 + d * width, 1 + (d + 1) * width) for d in range(levels)]
        children, real, q = [], [], []
        for depth in range(levels):
            above = torch.zeros_like(states[:, 0, :1]) if depth == 0 else states[:, depth - 1]
            below, tokens, alive = child_tokens(trie, above, depth)
            children.append(below)
            real.append(alive)
            q.append(log_q[:, places[depth]].gather(-1, tokens))
        log_p = [p.masked_fill(~mask, losses.NOWHERE) for p, mask in zip(log_p, real, strict=True)]
        if settings.objective == "beam-kd":
            return self._beam_kd(states, parents, children, real, log_p, q)
        if settings.objective == "tree-kd":
            return self._tree_kd(states, parents, children, real, log_p, q)
        p = [losses.allowed(values, mask) for values, mask in zip(log_p, real, strict=True)]
        weights = sequence_weights(
            states, parents, scores, children, p if whole_p is None else log_p,
            beam_steps=settings.beam_steps, top_k=settings.top_k,
        )  # fmt: skip
        total = log_q.new_zeros(())
        for depth in range(levels):
            if settings.objective == "seqkd":
                row = losses.sequence_cross_entropy(q[depth], weights.share[depth])
                total = total + row.sum(-1).mean()
                continue
            if whole_p is None:
                here_p, here_q = p[depth], losses.allowed(q[depth], real[depth])
            else:
                here_p, here_q = whole_p[:, places[depth]], log_q[:, places[depth]]
            if settings.objective == "atspeed-s":
                row = losses.atspeed_s(
                    here_p, here_q, weights.last[depth], width, density=settings.density
                )
            else:
                row = losses.atspeed_r(here_p, here_q, width)
            total = total + (weights.share[depth].sum(-1) * row).sum(-1).mean()
        return total

    def _beam_kd(
        self,
        states: torch.Tensor,
        parents: torch.Tensor,
        children: list[torch.Tensor],
        real: list[torch.Tensor],
        log_p: list[torch.Tensor],
        log_q: list[torch.Tensor],
    ) -> torch.Tensor:
        """Mean over levels of `losses.listwise` over all children of the level's beams."""
        total = log_q[0].new_zeros(())
        for score_p, score_q, mask in self._scored(states, parents, children, real, log_p, log_q):
            row = losses.listwise(
                score_p.flatten(1), score_q.flatten(1), mask.flatten(1), self._settings.temperature
            )
            total = total + row.mean()
        return total / len(children)

    def _tree_kd(
        self,
        states: torch.Tensor,
        parents: torch.Tensor,
        children: list[torch.Tensor],
        real: list[torch.Tensor],
        log_p: list[torch.Tensor],
        log_q: list[torch.Tensor],
    ) -> torch.Tensor:
        """Mean over levels of `losses.forward_kl` with a rest bucket, nodes by p(prefix)."""
        total = log_q[0].new_zeros(())
        scored = self._scored(states, parents, children, real, log_p, log_p)
        for depth, (score_p, _, mask) in enumerate(scored):
            row = losses.forward_kl(
                losses.with_rest(log_p[depth], mask), losses.with_rest(log_q[depth], mask)
            )
            # The prefix's own score is that of any child less the child's step.
            prefix = (score_p - log_p[depth].masked_fill(~mask, 0.0))[..., 0]
            weight = losses.allowed(prefix / self._settings.flatten, mask.any(-1)).exp()
            total = total + (weight * row).sum(-1).mean()
        return total / len(children)

    @staticmethod
    def _scored(
        states: torch.Tensor,
        parents: torch.Tensor,
        children: list[torch.Tensor],
        real: list[torch.Tensor],
        log_p: list[torch.Tensor],
        log_q: list[torch.Tensor],
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Level by level: (B, W, C) scores of all candidates under p and q, and which are real."""
        prefix_p = torch.zeros_like(log_p[0][..., 0])
        prefix_q = torch.zeros_like(log_q[0][..., 0])
        for depth, (below, mask) in enumerate(zip(children, real, strict=True)):
            score_p = prefix_p[..., None] + log_p[depth].masked_fill(~mask, 0.0)
            score_q = prefix_q[..., None] + log_q[depth].masked_fill(~mask, 0.0)
            yield score_p, score_q, mask
            if depth + 1 < len(children):
                node = parents[:, depth] if depth else torch.zeros_like(parents[:, 0])
                width = below.shape[-1]
                offset = states[:, depth] - below[..., 0].gather(1, node)
                child = node * width + offset.clamp(0, width - 1)
                prefix_p = score_p.flatten(1).gather(1, child)
                prefix_q = score_q.flatten(1).gather(1, child)


class WordDistillation(nn.Module):
    """alpha * KL or TVD over the whole vocabulary + (1 - alpha) * next-item loss, at every token.

    The target is asked as training goes: a vocabulary at every token is too much to store.

    Attributes:
        model: the draft.
    """

    def __init__(
        self,
        model: Any,
        target: Any,
        settings: AlignmentSettings,
        *,
        label_smoothing: float = 0.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Wrap `model`; `target` is asked under the same autocast."""
        super().__init__()
        self.model = model
        self._target = (target,)
        self._settings, self._smoothing, self._dtype = settings, label_smoothing, dtype

    def forward(self, tokens: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        """Loss of one `recsys.training.batches.Batch`."""
        settings, asked = self._settings, loss[:, 1:]
        enabled = self._dtype != torch.float32
        with torch.autocast(tokens.device.type, self._dtype, enabled=enabled):
            logits = self._logits(self.model, tokens, asked)
            with torch.no_grad():
                log_p = self._logits(self._target[0], tokens, asked)
            rec = smoothed_cross_entropy(logits, tokens[:, 1:][asked], self._smoothing)
        kind = torch.float64 if logits.dtype == torch.float64 else torch.float32
        row = losses.forward_kl if settings.objective == "wordkd" else losses.total_variation
        align = row(log_p.log_softmax(-1, dtype=kind), logits.log_softmax(-1, dtype=kind)).mean()
        total: torch.Tensor = settings.alpha * align + (1 - settings.alpha) * rec
        return total

    @staticmethod
    def _logits(model: Any, tokens: torch.Tensor, asked: torch.Tensor) -> torch.Tensor:
        decoder, head = causal_parts(model)
        hidden = decoder(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state
        logits: torch.Tensor = head(hidden[asked])
        return logits
