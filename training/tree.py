"""Trees of tokens after prompts in one forward of a Hugging Face model, with gradients.

A node attends to its prompt, its ancestors and itself. (`recsys.decoding.tree` has no gradients.)

Shapes: B requests, T tokens of a window, L levels, K nodes a level, N = nodes of a tree.
"""

from __future__ import annotations

from typing import Any

import torch

from recsys.constraint.transitions import DeviceTrie


def causal_parts(model: Any) -> tuple[Any, Any]:
    """Decoder and LM head of a causal LM, or of a peft model of one."""
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    return causal.get_decoder(), causal.get_output_embeddings()


def descent(parents: torch.Tensor) -> torch.Tensor:
    """(B, N, N) bool: which nodes each node descends from, itself included.

    Args:
        parents: (B, D, K) place of each node's parent in the level above; those of the first level
            are ignored. Node k of level d has number d K + k.
    """
    batch, depth, width = parents.shape
    nodes = depth * width
    seen = torch.eye(nodes, dtype=torch.bool, device=parents.device).repeat(batch, 1, 1)
    for level in range(1, depth):
        here = slice(level * width, (level + 1) * width)
        above = (parents[:, level] + (level - 1) * width).unsqueeze(-1).expand(-1, -1, nodes)
        seen[:, here] |= seen.gather(1, above)
    return seen


def tree_mask(
    width: int, lengths: torch.Tensor, seen: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """(B, 1, T + N, T + N) additive attention mask of causal windows and the trees below them.

    Args:
        width: T, tokens of the padded window, which starts with the prompt.
        lengths: (B,) tokens of each prompt; nodes attend to them and not to the rest.
        seen: (B, N, N) from `descent`.
        dtype: of the mask.
    """
    batch, nodes, _ = seen.shape
    position = torch.arange(width, device=seen.device)
    allowed = torch.zeros(
        (batch, width + nodes, width + nodes), dtype=torch.bool, device=seen.device
    )
    allowed[:, :width, :width] = position[:, None] >= position
    allowed[:, width:, :width] = (position < lengths[:, None])[:, None, :]
    allowed[:, width:, width:] = seen
    mask = torch.zeros(allowed.shape, dtype=dtype, device=seen.device)
    return mask.masked_fill_(~allowed, -torch.inf)[:, None]


def tree_positions(width: int, lengths: torch.Tensor, depth: int, nodes: int) -> torch.Tensor:
    """(B, T + depth * nodes) positions: the window's own, and prompt length + depth of each node.

    Args:
        width: T.
        lengths: (B,) tokens of each prompt.
        depth: levels of the tree.
        nodes: nodes of each level.
    """
    window = torch.arange(width, device=lengths.device).expand(len(lengths), -1)
    level = torch.arange(depth, device=lengths.device).repeat_interleave(nodes)
    return torch.cat([window, lengths[:, None] + level], dim=1)


def child_tokens(
    trie: DeviceTrie, states: torch.Tensor, depth: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Children of (B, W) states, padded: their states, tokens and which are real.

    Args:
        trie: the catalog.
        states: (B, W) at `depth`; -1 for a missing beam, which has no children.
        depth: of the states.
    """
    real = states >= 0
    children = trie.children(states.clamp(min=0), depth)
    return children.states, trie.alphabet[children.symbols], children.alive & real[..., None]


def level_tokens(trie: DeviceTrie) -> list[torch.Tensor]:
    """L tensors (V,) of the tokens that occur at each level of the catalog, ascending."""
    return [torch.unique(level).long() for level in trie.rows.T]
