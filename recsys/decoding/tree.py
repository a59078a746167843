"""TokenTree: one batch of prompts and the trees that grow from them, on one model.

Bookkeeping of nodes: who descends from whom, at which depth, in which slot. Nodes are numbered in
the order they are added and node i lies in the i-th slot behind the prompt's. All requests of the
batch add the same number of nodes at a time; what a node means is its own (padding is a node like
any other that nobody asks about). It runs the model and counts passes; it knows no trie.

          prompt ──┬── 0 ──┬── 2
                   │       └── 3         add([a, b], parents=-1), add([c, d, e], [0, 0, 1])
                   └── 1 ───── 4
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from recsys.models.cache import whole_blocks
from recsys.models.mask import prompt_mask, tree_mask

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike

    from recsys.models.tree_forward import TreeModel

ROOT = -1


class TokenTree:
    """Trees over a `SlotCache`.

    Attributes:
        model: what runs them.
        lengths: (B,) prompt tokens.
        nodes: nodes added so far, one number for the batch.
        passes: forwards so far.
        cache: keys and values.
    """

    def __init__(
        self,
        model: TreeModel,
        tokens: torch.Tensor,
        lengths: torch.Tensor,
        capacity: int,
        *,
        prompt_slots: int = 0,
    ) -> None:
        """Allocate for prompts and at most `capacity` nodes; nothing is run yet.

        Args:
            model: the model.
            tokens: (B, T) prompts, right-padded.
            lengths: (B,) their lengths.
            capacity: most nodes a request.
            prompt_slots: prompt slots at least.
        """
        batch, prompt = tokens.shape
        device = tokens.device
        self.model, self.lengths = model, lengths
        self.nodes = self.passes = 0
        self.cache = model.new_cache(batch, max(prompt, prompt_slots), capacity)
        self._prompt: torch.Tensor | None = tokens  # until it is run
        room = self.cache.slots - self.cache.prompt
        self._tokens = torch.zeros((batch, room), dtype=torch.int64, device=device)
        self._depth = torch.zeros((batch, room), dtype=torch.int64, device=device)
        # Row i: node i and its ancestors. The last row is the prompt's: no nodes.
        self._ancestors = torch.zeros((batch, room + 1, room), dtype=torch.bool, device=device)
        self._pending = 0

    def add(self, tokens: torch.Tensor, parents: torch.Tensor, depth: torch.Tensor | int) -> int:
        """Add nodes; they are run by the next `forward`.

        Args:
            tokens: (B, W) int64.
            parents: (B, W) node numbers added before this call; `ROOT` for the prompt.
            depth: of the nodes, (B, W) or one for all; 1 below the prompt.

        Returns:
            Number of the first new node.
        """
        first, width = self.nodes, tokens.shape[1]
        here = slice(first, first + width)
        self._tokens[:, here] = tokens
        self._depth[:, here] = depth
        room = self._ancestors.shape[2]
        rows = torch.where(parents == ROOT, room, parents).unsqueeze(-1).expand(-1, -1, room)
        own = torch.arange(room, device=tokens.device) == torch.arange(
            first, first + width, device=tokens.device
        ).unsqueeze(-1)
        self._ancestors[:, here] = self._ancestors.gather(1, rows) | own
        self.nodes += width
        return first

    def forward(self) -> torch.Tensor:
        """Run what has been added since the last call, and the prompt if it has not been run.

        Returns:
            (B, W, V) logits of the new nodes; with the prompt, its last token's come first.
        """
        first, last = self._pending, self.nodes
        self._pending, self.passes = last, self.passes + 1
        view = self.cache.prompt + whole_blocks(last)
        seen = view - self.cache.prompt
        tokens = self._tokens[:, first:last]
        depth = self._depth[:, first:last]
        positions = self.lengths[:, None] + depth - 1
        places = torch.arange(first, last, device=tokens.device)
        write = self.cache.prompt + places
        prompt, self._prompt = self._prompt, None
        rows = None
        if prompt is not None:
            length = prompt.shape[1]
            tokens = torch.cat([prompt, tokens], dim=1)
            order = torch.arange(length, device=tokens.device)
            positions = torch.cat([order.expand_as(prompt), positions], dim=1)
            write = torch.cat([order, write])
            rows = torch.cat(
                [self.lengths[:, None] - 1, (places + length).expand(len(tokens), -1)], dim=1
            )

        def mask(window: int | None) -> torch.Tensor:
            dtype, device = self.model.dtype, tokens.device
            parts = []
            if prompt is not None:
                part = prompt_mask(prompt.shape[1], view, window=window, dtype=dtype, device=device)
                parts.append(part.expand(len(tokens), -1, -1, -1))
            if last > first:
                parts.append(
                    tree_mask(
                        self._ancestors[:, first:last, :seen],
                        self.lengths,
                        self.cache.prompt,
                        depth=depth,
                        node_depth=self._depth[:, :seen],
                        window=window,
                        dtype=dtype,
                    )
                )
            return torch.cat(parts, dim=2)

        return self.model.forward(
            tokens, positions, mask, self.cache, write=write, view=view, rows=rows
        )

    def keep(self, requests: torch.Tensor) -> None:
        """Go on with some requests of the batch only; (b,) int64 places."""
        self.cache.keep(requests)
        self.lengths = self.lengths[requests]
        self._tokens, self._depth = self._tokens[requests], self._depth[requests]
        self._ancestors = self._ancestors[requests]


def pad_prompts(
    prompts: Sequence[ArrayLike], vocabulary_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, T) tokens, right-padded with 0, and (B,) lengths, on the host.

    Raises:
        ValueError: an empty prompt or a token outside [0, vocabulary_size).
    """
    arrays = [np.asarray(p, np.int64).reshape(-1) for p in prompts]
    lengths = np.asarray([len(a) for a in arrays], np.int64)
    if not lengths.all():
        raise ValueError(f"prompt {int(lengths.argmin())} is empty; it needs at least one token")
    padded = np.zeros((len(arrays), lengths.max(initial=1)), np.int64)
    for line, array in zip(padded, arrays, strict=True):
        line[: len(array)] = array
    bad = np.argwhere((padded < 0) | (padded >= vocabulary_size))
    if len(bad):
        row, place = bad[0]
        raise ValueError(
            f"prompt {row} has token {padded[row, place]} at place {place}; "
            f"the model knows 0 .. {vocabulary_size - 1}"
        )
    return torch.from_numpy(padded), torch.from_numpy(lengths)
