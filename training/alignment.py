"""Alignment of a draft with its target: batches of teacher trees, and the loss modules for `fit`.

One forward runs a batch of windows (a prompt followed by the next item) and the trees below the
prompts (`recsys.training.tree`). The next items carry the recommendation loss, the tree nodes the
alignment loss: alpha * align + (1 - alpha) * rec (AtSpeed, eq. 5 and 9).

This module weights and sums the losses of nodes; `recsys.training.losses` defines them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from recsys.constraint.transitions import DeviceTrie
from recsys.prompts import PromptEncoder
from recsys.training import losses
from recsys.training.batches import group_rows
from recsys.training.objective import smoothed_cross_entropy
from recsys.training.settings import AlignmentSettings
from recsys.training.teacher import Prompts, Trees
from recsys.training.tree import (
    causal_parts,
    child_tokens,
    descent,
    level_tokens,
    tree_mask,
    tree_positions,
)

# Objectives over the levels of a draft tree, 1 .. L - 1.
_DRAFTED = ("tree-kd", "margin-kd")


@dataclass(frozen=True)
class TreeBatch:
    """The arrays of one training batch.

    Attributes:
        window: (B, T) int64 prompt and next item, padded on the right.
        asked: (B, T) bool, tokens that carry the recommendation loss.
        lengths: (B,) int64 tokens of each prompt.
        states: (B, L, K) int64, -1 where there is no beam.
        parents: (B, L, K) int64.
        scores: (B, L, K) float32.
        log_probs: L arrays (B, 1 or K, C) float32, the target's, -inf for padding.
        level_log_probs: L arrays (B, 1 or K, V) float32, the target's of all tokens of a level; or
            none.
    """

    window: NDArray[np.int64]
    asked: NDArray[np.bool_]
    lengths: NDArray[np.int64]
    states: NDArray[np.int64]
    parents: NDArray[np.int64]
    scores: NDArray[np.float32]
    log_probs: list[NDArray[np.float32]]
    level_log_probs: list[NDArray[np.float32]]

    @property
    def inputs(self) -> tuple[NDArray[Any], ...]:
        """Arguments of `TreeAlignment.forward`."""
        return (
            self.window, self.asked, self.lengths, self.states, self.parents, self.scores,
            *self.log_probs, *self.level_log_probs,
        )  # fmt: skip

    @property
    def size(self) -> int:
        """Number of tokens of the forward, padding included."""
        levels, width = self.states.shape[1:]
        return int(self.window.size + len(self.states) * (levels - 1) * width)


@dataclass(frozen=True)
class TreeBatches:
    """The batches of all epochs over teacher data; (seed, epoch) determines their order.

    Attributes:
        prompts: of the teacher.
        trees: of the teacher's searches, in the same order.
        encoder: history -> prompt.
        trie: the catalog.
        max_tokens: most tokens of a batch, nodes and padding included.
        seed: of the order.
        level_tokens: whether batches have the log-probs of all tokens of a level, which the trees
            then have.
    """

    prompts: Prompts
    trees: Trees
    encoder: PromptEncoder
    trie: Any
    max_tokens: int
    seed: int = 0
    level_tokens: bool = False

    @cached_property
    def level_sizes(self) -> list[int]:
        """Number of tokens that occur at each level, if batches have their log-probs."""
        levels = self.trie.rows.T if self.level_tokens else ()
        return [len(np.unique(level)) for level in levels]

    def epoch(self, epoch: int, start: int = 0) -> Iterator[TreeBatch]:
        """Batches of one epoch from number `start` on."""
        for positions in self.groups(epoch)[start:]:
            yield self.batch(positions)

    def count(self, epoch: int = 0) -> int:
        """Number of batches of an epoch."""
        return len(self.groups(epoch))

    def groups(self, epoch: int) -> list[NDArray[np.int64]]:
        """Indices of the histories in each batch; see `group_rows`."""
        levels, lengths = self.encoder.item_tokens.shape[1], self.prompts.histories.lengths
        items = lengths - self.encoder.config.start(lengths)
        _, depth, width = self.trees.states.shape
        tokens = len(self.encoder.prefix) + (items + 1) * levels + (depth - 1) * width
        rng = np.random.default_rng([self.seed, epoch])
        return group_rows(items, tokens, self.max_tokens, rng)

    def batch(self, positions: NDArray[np.int64]) -> TreeBatch:
        """The batch of the prompts at `positions`."""
        levels, prefix = self.encoder.item_tokens.shape[1], len(self.encoder.prefix)
        chosen = self.prompts.take(positions)
        prompts = self.encoder.encode_all(chosen.histories)
        lengths = np.asarray([len(p) for p in prompts], np.int64)
        window = np.full((len(positions), lengths.max() + levels), self.encoder.pad, np.int64)
        loss = np.zeros(window.shape, np.bool_)
        for line, (prompt, item) in enumerate(zip(prompts, chosen.following.tolist(), strict=True)):
            stop = len(prompt)
            window[line, :stop] = prompt
            if item >= 0:
                window[line, stop : stop + levels] = self.encoder.item_tokens[item]
                stop += levels
            loss[line, prefix + levels : stop] = True  # the first item carries no loss
        trees = self.trees
        return TreeBatch(
            window, loss, lengths,
            trees.states[positions].astype(np.int64), trees.parents[positions].astype(np.int64),
            trees.scores[positions], trees.children_log_probs(positions, self.trie),
            trees.split_levels(positions, self.level_sizes) if self.level_tokens else [],
        )  # fmt: skip


@dataclass(frozen=True)
class TreeRows:
    """The token rows of one forward: windows, and the trees that hang from their prompts.

    Attributes:
        window: (B, T) prompt and next item, padded on the right.
        lengths: (B,) tokens of each prompt.
        tokens: (B, N) of the nodes, level by level.
        seen: (B, N, N) which nodes each node descends from, itself included.
        shape: levels of nodes, and nodes of each level.
    """

    window: torch.Tensor
    lengths: torch.Tensor
    tokens: torch.Tensor
    seen: torch.Tensor
    shape: torch.Size

    def run(self, decoder: Any, dtype: torch.dtype) -> torch.Tensor:
        """(B, T + N, H) last hidden states, with an attention mask in `dtype`."""
        width = self.window.shape[1]
        hidden: torch.Tensor = decoder(
            input_ids=torch.cat([self.window, self.tokens], dim=1),
            position_ids=tree_positions(width, self.lengths, *self.shape),
            attention_mask=tree_mask(width, self.lengths, self.seen, dtype),
            use_cache=False,
        ).last_hidden_state
        return hidden

    def ends(self, hidden: torch.Tensor) -> torch.Tensor:
        """(B, 1 + N, H) hidden states of the prompts' last tokens and of the nodes."""
        last = (self.lengths - 1)[:, None, None].expand(-1, 1, hidden.shape[-1])
        return torch.cat([hidden.gather(1, last), hidden[:, self.window.shape[1] :]], dim=1)


@dataclass(frozen=True)
class Levels:
    """The trees of a batch, level by level, with the log-probs of every node's children.

    The nodes of depth 0 are the roots (W = 1); those of depth d > 0 are the beams of level d
    (W = K). Children are padded to C.

    Attributes:
        states: (B, L, K), -1 where there is no beam.
        parents: (B, L, K) place of each beam's parent in the level above.
        scores: (B, L, K) of the teacher's search.
        children: L tensors (B, W, C) of child states.
        tokens: L tensors (B, W, C) of the children's tokens.
        real: L tensors (B, W, C) bool, False for padding.
        log_p: L tensors (B, W, C), the target's.
        log_q: L tensors (B, W, C), the draft's, over the whole vocabulary.
    """

    states: torch.Tensor
    parents: torch.Tensor
    scores: torch.Tensor
    children: list[torch.Tensor]
    tokens: list[torch.Tensor]
    real: list[torch.Tensor]
    log_p: list[torch.Tensor]
    log_q: list[torch.Tensor]

    @classmethod
    def of(
        cls,
        trie: DeviceTrie,
        trees: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        log_p: Sequence[torch.Tensor],
    ) -> Levels:
        """Look up the children of all nodes; `trees` are states, parents and scores.

        The caller adds the draft's log-probs, level by level.
        """
        states = trees[0]
        above = [torch.zeros_like(states[:, 0, :1]), *states[:, :-1].unbind(1)]
        below = [child_tokens(trie, nodes, depth) for depth, nodes in enumerate(above)]
        children, tokens, real = (list(part) for part in zip(*below, strict=True))
        p = [
            log_probs.masked_fill(~mask, losses.NOWHERE)
            for log_probs, mask in zip(log_p, real, strict=True)
        ]
        return cls(*trees, children, tokens, real, p, [])

    def nodes(self, depth: int) -> torch.Tensor:
        """(B, K) place of each beam's parent among the nodes of `depth`."""
        return self.parents[:, depth] if depth else torch.zeros_like(self.parents[:, 0])

    def places(self, depth: int) -> torch.Tensor:
        """(B, K) place of each beam among the W * C children of the nodes of `depth`."""
        nodes, width = self.nodes(depth), self.children[depth].shape[-1]
        first = self.children[depth][..., 0].gather(1, nodes)
        return nodes * width + (self.states[:, depth] - first).clamp(0, width - 1)

    def candidates(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Level by level: (B, W, C) scores of all candidates under p and q, and which are real."""
        prefix_p = torch.zeros_like(self.log_p[0][..., 0])
        prefix_q = torch.zeros_like(self.log_q[0][..., 0])
        for depth, real in enumerate(self.real):
            score_p = prefix_p[..., None] + self.log_p[depth].masked_fill(~real, 0.0)
            score_q = prefix_q[..., None] + self.log_q[depth].masked_fill(~real, 0.0)
            yield score_p, score_q, real
            if depth + 1 < len(self.real):
                positions = self.places(depth)
                prefix_p = score_p.flatten(1).gather(1, positions)
                prefix_q = score_q.flatten(1).gather(1, positions)


def sequence_weights(
    levels: Levels, log_p: list[torch.Tensor], *, last_beams: bool = False, top_k: bool = True
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The mean over a history's sequences, and over the levels of each, as weights of nodes.

    AtSpeed's losses are means over sequences of means over levels, and the loss of a level depends
    on the prefix alone. A sum over the sequences of a tree is therefore a weighted sum over its
    nodes.

    Args:
        levels: the trees. The K-th best sequence of a step is the one with the lowest score.
        log_p: L tensors (B, W, C), of which the second result is taken.
        last_beams: the sequences are the beams of the last step, instead of those of every step.
        top_k: all beams of a step, or only the best one.

    Returns:
        L tensors (B, W, C): share of the sequences' tokens that are this child's; and L tensors (B,
        W): log p of the K-th best sequence's token at that level, the mean where several steps'
        sequences share a node.
    """
    share = [torch.zeros_like(p) for p in log_p]
    total = [torch.zeros_like(p[..., 0]) for p in log_p]
    depth = levels.states.shape[1]
    steps = [depth - 1] if last_beams else range(depth)
    for step in steps:
        scores, alive = levels.scores[:, step], levels.states[:, step] >= 0
        if not top_k:
            best = scores.argmax(-1, keepdim=True)
            alive = torch.zeros_like(alive).scatter(1, best, True) & alive
        weight = alive / (alive.sum(-1, keepdim=True).clamp(min=1) * (step + 1) * len(steps))
        worst = scores.masked_fill(~alive, torch.inf).argmin(-1, keepdim=True)
        beam = torch.arange(alive.shape[1], device=alive.device).expand_as(alive)
        for level in range(step, -1, -1):
            node = levels.nodes(level).gather(1, beam)
            child = levels.places(level).gather(1, beam)
            share[level].flatten(1).scatter_add_(1, child, weight.to(share[level].dtype))
            kth = log_p[level].flatten(1).gather(1, child.gather(1, worst))
            total[level].scatter_add_(1, node, (weight * kth).to(total[level].dtype))
            beam = node
    last = [t / s.sum(-1).clamp(min=1e-12) for t, s in zip(total, share, strict=True)]
    return share, last


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
            target: gives p over the whole vocabulary where `settings.on_whole`.
            label_smoothing: of the recommendation loss.
            dtype: bfloat16 runs matrix products in it (autocast).
        """
        super().__init__()
        self.model = model
        self._trie, self._settings, self._smoothing = trie, settings, label_smoothing
        self._dtype = dtype
        self._target = (target,)  # in a tuple, so that it is not a part that is trained or saved
        self._level_tokens = level_tokens(trie) if settings.on_levels else []

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
        depth = states.shape[1] - (settings.objective in _DRAFTED)
        trees = states[:, :depth], parents[:, :depth], scores[:, :depth]
        nodes = states[:, : depth - 1]
        rows = TreeRows(
            window,
            lengths,
            self._trie.tokens_of(nodes.clamp(min=0)).flatten(1),
            descent(parents[:, : depth - 1]),
            nodes.shape[1:],
        )
        decoder, head = causal_parts(self.model)
        enabled = self._dtype != torch.float32
        with torch.autocast(window.device.type, self._dtype, enabled=enabled):
            hidden = rows.run(decoder, self._dtype if enabled else head.weight.dtype)
            logits = head(rows.ends(hidden))
            rec = logits.new_zeros(())
            if settings.align_weight < 1:
                predicted = head(hidden[:, : window.shape[1] - 1][asked[:, 1:]])
                rec = smoothed_cross_entropy(
                    predicted, window[:, 1:][asked[:, 1:]], self._smoothing
                )
        kind = torch.float64 if logits.dtype == torch.float64 else torch.float32
        log_q = logits.log_softmax(-1, dtype=kind)
        whole_p = self._ask_target(rows, kind) if settings.on_whole else None
        levels = Levels.of(self._trie, trees, [p.to(kind) for p in log_probs[:depth]])
        for depth, places in enumerate(_node_places(trees[0])):
            levels.log_q.append(log_q[:, places].gather(-1, levels.tokens[depth]))
        if settings.objective == "tree-kd":
            align = tree_kd(levels, settings.flatten)
        elif settings.objective == "margin-kd":
            align = tree_kd(levels, settings.flatten) + settings.margin * self._margin(levels)
        else:
            level_p = [p.to(kind) for p in log_probs[states.shape[1] :]]
            align = self._sequences(levels, log_q, whole_p, level_p)
        loss: torch.Tensor = settings.align_weight * align + (1 - settings.align_weight) * rec
        return loss

    @torch.no_grad()
    def _ask_target(self, rows: TreeRows, kind: torch.dtype) -> torch.Tensor:
        """(B, 1 + N, V) the target's log-probs over the whole vocabulary."""
        decoder, head = causal_parts(self._target[0])
        last = rows.ends(rows.run(decoder, head.weight.dtype))
        log_p: torch.Tensor = head(last).log_softmax(-1, dtype=kind)
        return log_p

    def _sequences(
        self,
        levels: Levels,
        log_q: torch.Tensor,
        whole_p: torch.Tensor | None,
        level_p: list[torch.Tensor],
    ) -> torch.Tensor:
        """SeqKD, AtSpeed-S or AtSpeed-R: the mean over histories of the weighted sum over nodes."""
        settings, width = self._settings, levels.states.shape[2]
        changes = settings.ablations
        p = [losses.allowed(*pair) for pair in zip(levels.log_p, levels.real, strict=True)]
        shares, lasts = sequence_weights(
            levels, p if whole_p is None else levels.log_p,
            last_beams="last-beams" in changes, top_k="top-1" not in changes,
        )  # fmt: skip
        total = log_q.new_zeros(())
        for depth, positions in enumerate(_node_places(levels.states)):
            q, share = levels.log_q[depth], shares[depth]
            if settings.objective == "seqkd":
                total = total + losses.sequence_cross_entropy(q, share).sum(-1).mean()
                continue
            if whole_p is not None:
                here_p, here_q = whole_p[:, positions], log_q[:, positions]
            elif self._level_tokens:
                here_p = level_p[depth].log_softmax(-1)
                here_q = log_q[:, positions][..., self._level_tokens[depth]].log_softmax(-1)
            else:
                here_p, here_q = p[depth], losses.allowed(q, levels.real[depth])
            if settings.objective == "atspeed-s":
                row = losses.atspeed_s(
                    here_p, here_q, width,
                    density="no-density" not in changes, released="released" in changes,
                )  # fmt: skip
            elif settings.objective == "atspeed-s-eq4":
                row = losses.atspeed_s_eq4(here_p, here_q, lasts[depth], width)
            elif "released" in changes:
                row = losses.atspeed_r(here_p, here_q, None, temperature=losses.SCRIPT)
            else:
                row = losses.atspeed_r(here_p, here_q, width)
            total = total + (share.sum(-1) * row).sum(-1).mean()
        return total

    def _margin(self, levels: Levels) -> torch.Tensor:
        """Mean over levels of `losses.margin` of the target's beams among all candidates."""
        total = levels.log_q[0].new_zeros(())
        for depth, (_, score_q, real) in enumerate(levels.candidates()):
            candidates = score_q.masked_fill(~real, losses.NOWHERE).flatten(1)
            beams = candidates.gather(1, levels.places(depth))
            row = losses.margin(
                beams, levels.states[:, depth] >= 0, candidates, self._settings.drafts
            )
            total = total + row.mean()
        return total / len(levels.real)


def tree_kd(levels: Levels, flatten: float) -> torch.Tensor:
    """Mean over levels of `losses.forward_kl` with a rest bucket.

    Nodes weigh p(prefix)^(1 / flatten).
    """
    total = levels.log_q[0].new_zeros(())
    for depth, (score_p, _, real) in enumerate(levels.candidates()):
        log_p = levels.log_p[depth]
        row = losses.forward_kl(
            losses.with_rest(log_p, real), losses.with_rest(levels.log_q[depth], real)
        )
        # The score of the prefix is the score of any child minus the child's own step.
        prefix = (score_p - log_p.masked_fill(~real, 0.0))[..., 0]
        weight = losses.allowed(prefix / flatten, real.any(-1)).exp()
        total = total + (weight * row).sum(-1).mean()
    return total / len(levels.real)


def _node_places(states: torch.Tensor) -> list[slice]:
    """Where the nodes of each depth lie among the 1 + N places of a tree with (B, L, K) states."""
    depth, width = states.shape[1:]
    return [slice(0, 1), *(slice(1 + d * width, 1 + (d + 1) * width) for d in range(depth - 1))]
