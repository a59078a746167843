"""StateDraft: predicts what a target will generate from its logits behind the prompt alone.

For each level behind the first, a network of one hidden layer sees the target's state behind the
prompt and the codes so far, and gives logits of the level's codes. (SID-MLP recommends by such
networks; here they draft, and the target verifies.) The state is read off the logits: they are its
products with the rows of the head, which are more than it has values in all but very wide models.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from recsys.errors import ArtifactError
from recsys.vocabulary import Vocabulary

KIND = "state-draft"
CONFIG, WEIGHTS = "config.json", "model.safetensors"


@dataclass(frozen=True)
class StateDraftConfig:
    """Sizes of a `StateDraft`.

    Attributes:
        level_offsets: token of code 0 of each level.
        level_sizes: codes of each level.
        width: D, of the state.
        hidden: units of each network.
        model_type: tells the checkpoint from a language model's.
    """

    level_offsets: tuple[int, ...]
    level_sizes: tuple[int, ...]
    width: int
    hidden: int = 256
    model_type: str = KIND


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
        config: the sizes.
        reader: (D, A) from the logits of all A codes to the state; fixed.
    """

    reader: torch.Tensor

    def __init__(self, config: StateDraftConfig) -> None:
        """Random networks, and a reader of zeros."""
        super().__init__()
        self.config = config
        sizes, width = config.level_sizes, config.width
        self.levels = nn.ModuleList(
            _Level(sizes[:level], sizes[level], width, config.hidden)
            for level in range(1, len(sizes) - 1)
        )
        self.register_buffer("reader", torch.zeros(width, sum(sizes)))

    @classmethod
    @torch.no_grad()
    def of(cls, target: Any, vocabulary: Vocabulary) -> StateDraft:
        """A draft for `target`, a causal LM: it starts from the target's embeddings and head."""
        head = target.get_output_embeddings().weight.float()
        embedding = target.get_input_embeddings().weight.float()
        ranges = list(zip(vocabulary.level_offsets, vocabulary.level_sizes, strict=True))
        draft = cls(
            StateDraftConfig(vocabulary.level_offsets, vocabulary.level_sizes, head.shape[1])
        )
        rows = [slice(first, first + size) for first, size in ranges]
        draft.reader.copy_(torch.linalg.pinv(torch.cat([head[own] for own in rows])))
        for number, level in enumerate(draft.levels, start=1):
            level.head.weight.copy_(head[rows[number]])
            for own, table in zip(rows, level.codes, strict=False):
                codes = embedding[own] / embedding[own].square().mean().sqrt().clamp(min=1e-12)
                to_hidden = nn.Linear(codes.shape[1], table.embedding_dim, bias=False)
                table.weight.copy_(to_hidden.to(codes.device)(codes))
        return draft.to(head.device)

    def states(self, logits: torch.Tensor) -> torch.Tensor:
        """(B, D) states from the target's (B, vocabulary) logits."""
        parts = zip(self.config.level_offsets, self.config.level_sizes, strict=True)
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
        config, length = self.config, prefixes.shape[-1]
        codes = [
            (tokens - first).clamp(0, size - 1)
            for tokens, first, size in zip(
                prefixes.unbind(-1), config.level_offsets, config.level_sizes, strict=False
            )
        ]
        logits: torch.Tensor = self.levels[length - 1](states, torch.stack(codes, -1))
        return logits

    def save_pretrained(self, folder: Path | str) -> None:
        """Write `config.json` and `model.safetensors`; the folder is created if needed."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG).write_text(json.dumps(asdict(self.config), indent=2), encoding="utf-8")
        save_file({k: v.contiguous() for k, v in self.state_dict().items()}, folder / WEIGHTS)

    @classmethod
    def load(cls, folder: Path | str) -> StateDraft:
        """Read what `save_pretrained` wrote, in evaluation mode.

        Raises:
            ArtifactError: damaged, of other sizes than the config says, or not finite.
        """
        folder = Path(folder)
        try:
            values = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
            sizes = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
            with torch.device("meta"):  # the weights are what takes memory
                draft = cls(StateDraftConfig(**sizes))
            draft.load_state_dict(load_file(folder / WEIGHTS), assign=True)
        except (OSError, RuntimeError, SafetensorError, TypeError, ValueError) as error:
            raise ArtifactError(f"{folder}: not a loadable draft: {error}") from error
        if not all(values.isfinite().all() for values in draft.state_dict().values()):
            raise ArtifactError(f"{folder}: values that are not finite; train the draft again")
        return draft.eval()


def is_state_draft(folder: Path | str) -> bool:
    """Whether a folder is a `StateDraft`'s, by its config."""
    try:
        config = json.loads((Path(folder) / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and config.get("model_type") == KIND
