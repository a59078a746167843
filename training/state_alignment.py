"""Training of a `StateDraft` on teacher trees and the target's states behind their prompts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from recsys.constraint.transitions import DeviceTrie
from recsys.models.state_draft import StateDraft
from recsys.training.alignment import Levels, TreeBatches, tree_kd


class StateBatch(NamedTuple):
    """The arguments of `StateAlignment.forward`, and the number of nodes."""

    inputs: tuple[NDArray[Any], ...]
    size: int


@dataclass(frozen=True)
class StateBatches(TreeBatches):
    """Batches of trees with (n, D) `behind`, the target's states behind their prompts."""

    behind: NDArray[np.float32] = field(kw_only=True)

    def batch(self, positions: NDArray[np.int64]) -> Any:
        """The `StateBatch` of the prompts at `positions`."""
        trees = self.trees
        states, parents = (x[positions].astype(np.int64) for x in (trees.states, trees.parents))
        log_probs = trees.children_log_probs(positions, self.trie)
        inputs = (self.behind[positions], states, parents, trees.scores[positions], *log_probs)
        return StateBatch(inputs, states.size)


class StateAlignment(nn.Module):
    """`tree_kd` of a `StateDraft` at the nodes whose children it proposes."""

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
        drafted = slice(states.shape[1] - 1)
        trees = states[:, drafted], parents[:, drafted], scores[:, drafted]
        levels = Levels.of(self._trie, trees, log_probs[drafted])
        levels.log_q.append(levels.log_p[0])  # the first level is the target's own
        prefixes = states.new_zeros((len(states), 1, 0))
        for depth in range(1, states.shape[1] - 1):
            parent = levels.nodes(depth - 1).unsqueeze(-1).expand(-1, -1, depth - 1)
            token = self._trie.tokens_of(states[:, depth - 1].clamp(min=0)).unsqueeze(-1)
            prefixes = torch.cat([prefixes.gather(1, parent), token], dim=-1)
            log_q = self.model(behind, prefixes).log_softmax(-1)
            code = levels.tokens[depth] - self.model.config.level_offsets[depth]
            levels.log_q.append(log_q.gather(-1, code.masked_fill(~levels.real[depth], 0)))
        return tree_kd(levels, self._flatten)
