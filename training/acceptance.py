"""Acceptance while a draft is trained: strict speculative search of held-out users.

Users are those of the validation split, a fixed sample. The target is the one that will verify, in
float32, so the figures are those of serving, on other users.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recsys.constraint import ItemTrie
from recsys.dataset import Dataset
from recsys.decoding import ModelDrafter, speculative_beam_search
from recsys.prompts import PromptEncoder

BATCH = 25
METRIC = "accepted_levels"


@dataclass(frozen=True)
class Acceptance:
    """A callback for `recsys.training.loop.fit`.

    Attributes:
        target: the model that verifies.
        draft: the model being trained.
        prompts: who is asked, alike in length.
        trie: the catalog.
        num_beams: K.
        nodes: of a draft tree.
    """

    target: Any
    draft: Any
    prompts: list[NDArray[np.int64]]
    trie: ItemTrie
    num_beams: int
    nodes: int

    @classmethod
    def of(
        cls,
        target: Any,
        draft: Any,
        encoder: PromptEncoder,
        dataset: Dataset,
        *,
        users: int,
        num_beams: int,
        nodes: int,
    ) -> Acceptance:
        """Ask at most `users` validation users, drawn once and for all."""
        examples = dataset.examples("valid")
        chosen = np.random.default_rng(0).permutation(len(examples))[:users]
        chosen = chosen[np.argsort(examples.histories.lengths[chosen], kind="stable")]
        prompts = encoder.encode_all(examples.histories.take(chosen))
        return cls(target, draft, prompts, ItemTrie.build(encoder.item_tokens), num_beams, nodes)

    def __call__(self) -> dict[str, float]:
        """`accepted_levels` and `target_passes` of a request, means over users."""
        drafter = ModelDrafter(self.draft, self.nodes)
        stats = [
            found
            for start in range(0, len(self.prompts), BATCH)
            for found in speculative_beam_search(
                self.target, drafter, self.prompts[start : start + BATCH], self.trie, self.num_beams
            ).stats
        ]
        return {
            METRIC: float(np.mean([s.accepted_levels for s in stats])),
            "target_passes": float(np.mean([s.target_passes for s in stats])),
        }
