"""Training of a `StateDraft`: teacher trees and the target's states behind their prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from recsys.constraint import ItemTrie
from recsys.constraint.transitions import DeviceTrie
from recsys.decoding.tree import PromptBatch, TokenTree
from recsys.models.state_draft import StateDraft
from recsys.models.tree_forward import TreeModel
from recsys.training import losses
from recsys.training.alignment import Levels, tree_kd
from recsys.training.teacher import Trees
from recsys.training.tree import child_tokens

_PROMPTS = 64  # of a pass of the target


@torch.inference_mode()
def target_states(
    draft: StateDraft, target: Any, prompts: Sequence[NDArray[np.int64]]
) -> NDArray[np.float32]:
    """(n, D) states behind the prompts, as the draft reads them when it drafts."""
    model, states = TreeModel.of(target), []
    for first in range(0, len(prompts), _PROMPTS):
        part = PromptBatch.of(prompts[first : first + _PROMPTS], model)
        with TokenTree(model, part, 0) as tree:
            logits = tree.forward()[:, -1]
            tree.note(logits.amax(-1, keepdim=True))
        states.append(draft.states(logits).float().cpu().numpy())
    return np.concatenate(states)


class StateBatch(NamedTuple):
    """What the loss of one batch takes (`inputs`), and how many nodes it has (`size`)."""

    inputs: tuple[NDArray[Any], ...]
    size: int


@dataclass(frozen=True)
class StateBatches:
    """The batches of all epochs; (seed, epoch) determines their order.

    Attributes:
        states: (n, D) of the prompts of the trees.
        trees: of the teacher's searches.
        trie: the catalog.
        max_nodes: most nodes of a batch.
        seed: of the order.
    """

    states: NDArray[np.float32]
    trees: Trees
    trie: ItemTrie
    max_nodes: int
    seed: int = 0

    @property
    def _rows(self) -> int:
        """Trees of a batch."""
        _, depth, width = self.trees.states.shape
        return max(1, self.max_nodes // max(1, (depth - 2) * width))

    def count(self, epoch: int = 0) -> int:
        """Number of batches of an epoch, which all have as many."""
        return -(-len(self.trees) // self._rows)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[StateBatch]:
        """Batches of one epoch from number `start` on."""
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.trees))
        for first in range(start * self._rows, len(order), self._rows):
            here, trees = np.sort(order[first : first + self._rows]), self.trees
            inputs = (
                self.states[here], trees.states[here].astype(np.int64),
                trees.parents[here].astype(np.int64), trees.scores[here],
                *trees.children_log_probs(here, self.trie),
            )  # fmt: skip
            yield StateBatch(inputs, trees.states[here, 1:-1].size)


class StateAlignment(nn.Module):
    """`tree_kd` of a `StateDraft` at the nodes of levels 1 .. L - 2, whose children it proposes."""

    def __init__(self, model: StateDraft, trie: DeviceTrie, flatten: float) -> None:
        """Wrap `model`; `trie` is on its device, and `flatten` is that of `AlignmentSettings`."""
        super().__init__()
        self.model, self._trie, self._flatten = model, trie, flatten

    def forward(
        self,
        behind: torch.Tensor,
        states: torch.Tensor,
        parents: torch.Tensor,
        scores: torch.Tensor,
        *log_probs: torch.Tensor,
    ) -> torch.Tensor:
        """Loss of one `StateBatch`; a scalar in float32."""
        depths = states.shape[1] - 1
        levels = Levels(states[:, :depths], parents[:, :depths], scores[:, :depths], [], [], [], [])
        prefixes = states.new_zeros((len(states), 1, 0))
        for depth in range(depths):
            above = states[:, depth - 1] if depth else torch.zeros_like(states[:, 0, :1])
            below, tokens, real = child_tokens(self._trie, above, depth)
            log_p = log_probs[depth].masked_fill(~real, losses.NOWHERE)
            log_q = log_p  # the first level is the target's own
            if depth:
                parent = levels.nodes(depth - 1).unsqueeze(-1).expand(-1, -1, depth - 1)
                token = self._trie.tokens_of(above.clamp(min=0)).unsqueeze(-1)
                prefixes = torch.cat([prefixes.gather(1, parent), token], dim=-1)
                first = self.model.config.level_offsets[depth]
                place = (tokens - first).masked_fill(~real, 0)
                log_q = self.model(behind, prefixes).log_softmax(-1).gather(-1, place)
            for values, new in zip(
                (levels.children, levels.real, levels.log_p, levels.log_q),
                (below, real, log_p, log_q),
                strict=True,
            ):
                values.append(new)
        return tree_kd(levels, self._flatten)
