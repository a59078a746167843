"""On-policy teacher data: trees of the mixture of target and current draft, searched in training.

After a fixed number of batches the draft's weights are copied, and the following batches are
searched with that copy (AtSpeed's D' with an updated q, after Gu et al., 2024). The copy is also
written beside the checkpoints, so that a resumed run continues with the same copy.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file

from recsys.constraint.transitions import DeviceTrie
from recsys.training.alignment import TreeBatch, TreeBatches
from recsys.training.state import STATE
from recsys.training.teacher import search_trees
from recsys.training.tree import level_tokens


@dataclass
class OnPolicyBatches:
    """`TreeBatches` whose trees are searched with the target and a recent copy of the draft.

    Attributes:
        data: has the prompts; its trees are ignored.
        target: p.
        draft: q, the model being trained.
        folder: of the run's checkpoints.
        every: number of batches that are searched with one copy of the draft.
        num_beams: K.
        mixture: share of p.
    """

    data: TreeBatches
    target: Any
    draft: Any
    folder: Path
    every: int
    num_beams: int
    mixture: float
    _policy: Any = None

    def count(self, epoch: int = 0) -> int:
        """Number of batches of an epoch."""
        return self.data.count(epoch)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[TreeBatch]:
        """Batches of one epoch from number `start` on."""
        if start % self.every:
            self._restore(self._file(epoch, start - start % self.every))
        trie = DeviceTrie.of(self.data.trie, self.draft.device)
        levels_of = level_tokens(trie) if self.data.level_tokens else ()
        for number, places in enumerate(self.data.groups(epoch)[start:], start):
            if number % self.every == 0:
                self._copy(epoch, number)
            trees = search_trees(
                self.target,
                self.data.encoder.encode_all(self.data.prompts.take(places).histories),
                trie,
                self.num_beams,
                draft=self._policy,
                mixture=self.mixture,
                levels_of=levels_of,
            )
            yield self.data.batch(places, trees)

    def _file(self, epoch: int, number: int) -> Path:
        return self.folder / f"policy-{epoch}-{number}.safetensors"

    def _copy(self, epoch: int, number: int) -> None:
        """Copy the draft, write the copy, and delete the copies that no checkpoint needs."""
        self._policy = copy.deepcopy(self.draft).eval()
        if not Accelerator().is_main_process:
            return
        file = self._file(epoch, number)
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f".{file.name}")
        save_file({k: v.cpu().clone() for k, v in self._policy.state_dict().items()}, temporary)
        temporary.rename(file)
        kept = {file, *self._needed()}
        for other in self.folder.glob("policy-*"):
            if other not in kept:
                other.unlink()

    def _needed(self) -> list[Path]:
        """The files of the copies that a run resumed from a checkpoint would need."""
        stands = (
            json.loads(state.read_text(encoding="utf-8"))["progress"]
            for state in self.folder.glob(f"step-*/{STATE}")
        )
        return [self._file(s["epoch"], s["batch"] - s["batch"] % self.every) for s in stands]

    def _restore(self, file: Path) -> None:
        """Load the copy that was in use when the run was stopped."""
        self._policy = copy.deepcopy(self.draft).eval()
        state = load_file(file)
        with torch.no_grad():
            for name, value in self._policy.state_dict().items():
                value.copy_(state[name])
