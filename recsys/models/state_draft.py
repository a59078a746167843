"""StateDraft: predicts what a target will generate from its logits behind the prompt alone.

For each level behind the first, a network of one hidden layer sees the target's state behind the
prompt and the codes so far, and gives logits of the level's codes. (SID-MLP recommends by such
networks; here they draft, and the target verifies.) The state is read off the logits: they are its
products with the rows of the head, which are more than it has values in all but very wide models.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from recsys.errors import ArtifactError, ConfigError
from recsys.vocabulary import Vocabulary

FILE = "state_draft.safetensors"
MOST_LEVELS = 16
_DAMAGED = (LookupError, OSError, RuntimeError, SafetensorError, TypeError, ValueError)


class _Level(nn.Module):
    """The network of one level.

    A matrix product with the embedding of a code depends on the code alone, so each code before has
    its product as a row of a table.
    """

    def __init__(self, before: Sequence[int], size: int, width: int, hidden: int) -> None:
        super().__init__()
        self.state = nn.Linear(width, hidden)
        self.codes = nn.ModuleList(nn.Embedding(codes, hidden) for codes in before)
        self.out, self.norm = nn.Linear(hidden, width), nn.LayerNorm(width)
        self.head = nn.Linear(width, size, bias=False)

    def forward(self, state: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        """(B, W, V) logits from (B, D) states and (B, W, l) codes."""
        seen = self.state(state).unsqueeze(1)
        for table, code in zip(self.codes, codes.unbind(-1), strict=True):
            seen = seen + table(code)
        logits: torch.Tensor = self.head(
            self.norm(state.unsqueeze(1) + self.out(nn.functional.gelu(seen)))
        )
        return logits


class StateDraft(nn.Module):
    """The networks of levels 2 .. L - 1; the first level is the target's, the last has no nodes.

    Attributes:
        level_offsets: token of code 0 of each level.
        level_sizes: codes of each level.
        reader: (D, A) from the logits of all A codes to the state; fixed.
    """

    reader: torch.Tensor

    def __init__(
        self,
        level_offsets: Sequence[int],
        level_sizes: Sequence[int],
        width: int,
        hidden: int = 256,
    ) -> None:
        """Random networks of `hidden` units, and a reader of zeros to states of `width` D."""
        super().__init__()
        self.level_offsets, self.level_sizes, self._hidden = level_offsets, level_sizes, hidden
        self.levels = nn.ModuleList(
            _Level(level_sizes[:level], level_sizes[level], width, hidden)
            for level in range(1, len(level_sizes) - 1)
        )
        self.register_buffer("reader", torch.zeros(width, sum(level_sizes)))

    @classmethod
    @torch.no_grad()
    def of(cls, target: Any, vocabulary: Vocabulary) -> StateDraft:
        """A draft for `target`, a causal LM: it starts from the target's embeddings and head.

        ConfigError for fewer than three levels.
        """
        if vocabulary.num_levels < 3:
            raise ConfigError("draft.objective: state-kd needs three levels or more; use margin-kd")
        head = target.get_output_embeddings().weight.float()
        embedding = target.get_input_embeddings().weight.float()
        ranges = list(zip(vocabulary.level_offsets, vocabulary.level_sizes, strict=True))
        draft = cls(vocabulary.level_offsets, vocabulary.level_sizes, head.shape[1])
        rows = [slice(first, first + size) for first, size in ranges]
        draft.reader.copy_(torch.linalg.pinv(torch.cat([head[own] for own in rows])))
        level: Any
        for number, level in enumerate(draft.levels, start=1):
            level.head.weight.copy_(head[rows[number]])
            for own, table in zip(rows, level.codes.children(), strict=False):
                codes = embedding[own] / embedding[own].square().mean().sqrt().clamp(min=1e-12)
                to_hidden = nn.Linear(codes.shape[1], table.embedding_dim, bias=False)
                table.weight.copy_(to_hidden.to(codes.device)(codes))
        return draft.to(head.device)

    def states(self, logits: torch.Tensor) -> torch.Tensor:
        """(B, D) states from the target's (B, vocabulary) logits."""
        parts = zip(self.level_offsets, self.level_sizes, strict=True)
        codes = torch.cat([logits[:, first : first + size] for first, size in parts], dim=1)
        return codes.to(self.reader.dtype) @ self.reader.T

    def forward(self, states: torch.Tensor, prefixes: torch.Tensor) -> torch.Tensor:
        """Logits of the codes that follow prefixes.

        Args:
            states: (B, D).
            prefixes: (B, W, l) tokens, l from 1 to L - 2; others than the level's count as one.

        Returns:
            (B, W, V) of the codes of level l + 1.
        """
        codes = [
            (tokens - first).clamp(0, size - 1)
            for tokens, first, size in zip(
                prefixes.unbind(-1), self.level_offsets, self.level_sizes, strict=False
            )
        ]
        logits: torch.Tensor = self.levels[prefixes.shape[-1] - 1](states, torch.stack(codes, -1))
        return logits

    def of_trees(
        self, states: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor
    ) -> Iterator[torch.Tensor]:
        """(B, K, V) log-probabilities of the codes below the nodes of levels 1 .. L - 2.

        Args:
            states: (B, D).
            tokens: (B, L - 1, K) of the nodes of each level.
            parents: (B, L - 1, K) place of each node's parent in the level above.
        """
        prefixes = tokens[:, 0, :, None]
        for level in range(1, len(self.levels) + 1):
            yield self(states, prefixes).log_softmax(-1)
            above = parents[:, level].unsqueeze(-1).expand(-1, -1, level)
            prefixes = torch.cat([prefixes.gather(1, above), tokens[:, level, :, None]], dim=-1)

    def save_pretrained(self, folder: Path | str) -> None:
        """Write the weights, with the sizes in their header; the folder is created if needed."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        values = {name: value.contiguous() for name, value in self.state_dict().items()}
        width, sizes = len(self.reader), (self.level_offsets, self.level_sizes)
        config = json.dumps([*sizes, width, self._hidden])
        save_file(values, Path(folder, FILE), {"sizes": config})

    @classmethod
    def load(cls, folder: Path) -> StateDraft:
        """Read what `save_pretrained` wrote, in evaluation mode.

        Raises:
            ArtifactError: damaged, of other sizes than the header says, or not finite.
        """
        try:
            with safe_open(folder / FILE, "pt") as stored:
                sizes = json.loads((stored.metadata() or {})["sizes"])
            _check_sizes(*sizes)
            with torch.device("meta"):  # the weights are what takes memory
                draft = cls(*sizes)
            draft.load_state_dict(load_file(folder / FILE), assign=True)
        except _DAMAGED as error:
            raise ArtifactError(f"{folder}: not a loadable draft: {error}") from error
        weights = draft.state_dict().values()
        if not all(w.dtype == torch.float32 and w.isfinite().all() for w in weights):
            raise ArtifactError(f"{folder}: weights that are not finite float32; train it again")
        return draft.eval()


def _check_sizes(offsets: list[int], sizes: list[int], width: int, hidden: int) -> None:
    """ValueError unless they are those of a few levels: modules are made for each pair of them."""
    numbers = [*offsets, *sizes, width, hidden]
    if not 3 <= len(sizes) == len(offsets) <= MOST_LEVELS or any(
        type(n) is not int for n in numbers
    ):
        raise ValueError(f"levels: want 3 to {MOST_LEVELS}, each with an offset and a size")
    if min(offsets) < 0 or min(*sizes, width, hidden) < 1:
        raise ValueError(
            f"negative offsets, or empty levels: {offsets}, {sizes}, {width}, {hidden}"
        )


def is_state_draft(folder: Path) -> bool:
    """Whether a folder has a `StateDraft`, and no language model."""
    return (folder / FILE).is_file()
