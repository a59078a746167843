"""Validation while training: full ranking of a fixed sample of validation users."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from recsys.constraint import ItemTrie
from recsys.dataset import Dataset, Examples
from recsys.decoding import beam_search
from recsys.prompts import PromptEncoder

BATCH = 64


@dataclass(frozen=True)
class Validation:
    """A callback for `recsys.training.loop.fit`.

    Beam search over the whole catalog, what a user has already seen left out. Users are ordered
    by history length, so that prompts pad little.

    Attributes:
        model: the model being trained.
        encoder: history -> prompt.
        examples: who is asked, and the right answers.
        trie: the catalog.
        num_beams: K of the beam search, at least 10.
    """

    model: Any
    encoder: PromptEncoder
    examples: Examples
    trie: ItemTrie
    num_beams: int = 20

    @classmethod
    def of(
        cls, model: Any, encoder: PromptEncoder, dataset: Dataset, users: int, num_beams: int
    ) -> Validation:
        """Validate on at most `users` users, drawn once and for all."""
        examples = dataset.examples("valid")
        chosen = np.random.default_rng(0).permutation(len(examples))[:users]
        chosen = chosen[np.argsort(examples.histories.lengths[chosen], kind="stable")]
        trie = ItemTrie.build(encoder.item_tokens)
        return cls(model, encoder, examples.take(chosen), trie, num_beams)

    def __call__(self) -> dict[str, float]:
        """`recall@10` and `ndcg@10`, means over users."""
        histories = self.examples.histories
        targets = self.examples.targets.items
        gains = np.zeros(len(targets))
        for start in range(0, len(targets), BATCH):
            part = histories.take(np.arange(start, min(start + BATCH, len(targets))))
            beams = beam_search(
                self.model,
                self.encoder.encode_all(part),
                self.trie,
                self.num_beams,
                exclude=[self.trie.excluded_rows(items) for items in part],
            )
            rows = beams.rows[:, :10].cpu().numpy()
            wanted = targets[start : start + BATCH]
            # A row that several items share counts for each at an equal part of its gain.
            hit = rows == self.trie.item_row[wanted][:, None]
            sharers = np.diff(self.trie.row_item_start)[self.trie.item_row[wanted]]
            gain = 1 / np.log2(np.arange(2, 2 + rows.shape[1]))
            gains[start : start + BATCH] = (hit @ gain) / sharers
        return {"recall@10": float((gains > 0).mean()), "ndcg@10": float(gains.mean())}
