"""Validation during training: ranking by a model, and acceptance of a draft by its target.

Both are callbacks for `recsys.training.loop.fit`. They measure a fixed sample of validation users;
the first metric that is returned decides which weights are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recsys.constraint import ItemTrie
from recsys.dataset import Dataset, Examples
from recsys.decoding import SearchRequest, beam_search, speculative_beam_search
from recsys.decoding.draft import ModelDrafter
from recsys.prompts import PromptEncoder

RANKED = 64  # users per batch of a ranking
DRAFTED = 25  # users per batch of a speculative search
TOP, BEAMS = 10, 20  # K of the metrics, and of the beam search


def discounted_gains(hits: NDArray[np.bool_]) -> NDArray[np.float64]:
    """(n,) DCG of (n, k) hits in the order of their ranks."""
    return np.asarray(hits @ (1 / np.log2(np.arange(2, 2 + hits.shape[1]))))


def ranking_metrics(gains: NDArray[np.float64]) -> dict[str, float]:
    """NDCG@10 and Recall@10 from the gain of each user's one target; 0 where it was not found."""
    return {"ndcg@10": float(gains.mean()), "recall@10": float((gains > 0).mean())}


@dataclass(frozen=True)
class Validation:
    """Full ranking by constrained beam search; items that a user has seen are excluded.

    Attributes:
        model: the model being trained.
        encoder: history -> prompt.
        examples: histories and targets, similar lengths together.
        trie: the catalog.
    """

    model: Any
    encoder: PromptEncoder
    examples: Examples
    trie: ItemTrie

    @classmethod
    def of(
        cls,
        model: Any,
        encoder: PromptEncoder,
        dataset: Dataset,
        users: int,
    ) -> Validation:
        """Validate on at most `users` users."""
        examples = dataset.validation().sample(users)
        return cls(model, encoder, examples, ItemTrie.build(encoder.item_tokens))

    def __call__(self) -> dict[str, float]:
        """`ndcg@10` and `recall@10`, means over users."""
        return ranking_metrics(self.gains())

    def gains(self) -> NDArray[np.float64]:
        """(users,) NDCG@10 of each user's next item."""
        histories = self.examples.histories
        targets = self.examples.targets.items
        gains = np.zeros(len(targets))
        for start in range(0, len(targets), RANKED):
            part = histories.take(np.arange(start, min(start + RANKED, len(targets))))
            excluded = [self.trie.excluded_rows(items) for items in part.left_out(True)]
            request = SearchRequest(self.encoder.encode_all(part), exclude=excluded)
            beams = beam_search(self.model, request, self.trie, BEAMS)
            rows = beams.rows[:, :TOP].cpu().numpy()
            wanted = self.trie.item_row[targets[start : start + RANKED]]
            # A row that n items share contributes 1 / n of its gain for each of them.
            sharers = np.diff(self.trie.row_item_start)[wanted]
            gains[start : start + RANKED] = discounted_gains(rows == wanted[:, None]) / sharers
        return gains


def acceptance(
    target: Any,
    draft: Any,
    prompts: Sequence[NDArray[np.int64]],
    trie: ItemTrie,
    num_beams: int,
    nodes: int,
) -> dict[str, float]:
    """`accepted_levels` and `target_passes` of a request by strict speculative search.

    Args:
        target: the model that verifies when serving, in float32.
        draft: the model being trained.
        prompts: of validation users, similar lengths together.
        trie: the catalog.
        num_beams: K.
        nodes: of a draft tree.
    """
    drafter, stats = ModelDrafter(draft, nodes), []
    for start in range(0, len(prompts), DRAFTED):
        part = prompts[start : start + DRAFTED]
        stats += speculative_beam_search(target, drafter, part, trie, num_beams).stats
    return {
        "accepted_levels": float(np.mean([s.accepted_levels for s in stats])),
        "target_passes": float(np.mean([s.target_passes for s in stats])),
    }
