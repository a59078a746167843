"""Training batches: turns windows of histories into padded token rows, within a budget of tokens.

The pair (seed, epoch) determines an epoch: which items are dropped, how rows are grouped by length,
and the order of batches. A position in the data is therefore two integers, and a run that was
stopped resumes with the next batch. NumPy only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recsys.interactions import Histories
from recsys.prompts import PromptConfig, Windows, training_windows
from recsys.training.soft_labels import SoftLabels


@dataclass(frozen=True)
class Batch:
    """The arrays of one training batch.

    Attributes:
        tokens: (B, T) int64, padded on the right.
        loss: (B, T) bool, the tokens that carry loss; never the prefix or padding.
        soft: soft labels of the N items with loss, in row order: the (N, k, L) int64 tokens of
            their items and the (N, k) float32 shares; None without soft labels.
    """

    tokens: NDArray[np.int64]
    loss: NDArray[np.bool_]
    soft: tuple[NDArray[np.int64], NDArray[np.float32]] | None = None

    @property
    def inputs(self) -> tuple[NDArray[Any], ...]:
        """Arguments of the loss module."""
        return self.tokens, self.loss, *(self.soft or ())

    @property
    def size(self) -> int:
        """Number of tokens, padding included."""
        return self.tokens.size


@dataclass(frozen=True)
class TrainingBatches:
    """The batches of all epochs.

    Attributes:
        windows: sequences of event numbers, and the start of each one's loss.
        items: (events,) int32 the item of each event.
        item_tokens: (items, L) int64 token ids.
        prefix: tokens in front of every row.
        pad: fills rows up to the longest of their batch.
        max_tokens: most tokens of a batch, padding included (a longer row is a batch of its own).
        item_dropout: share of items that are removed from a window.
        seed: of dropout and order.
        soft: soft labels of each event, or None.
    """

    windows: Windows
    items: NDArray[np.int32]
    item_tokens: NDArray[np.int64]
    prefix: tuple[int, ...]
    pad: int
    max_tokens: int
    item_dropout: float = 0.0
    seed: int = 0
    soft: SoftLabels | None = None

    @classmethod
    def of(
        cls,
        histories: Histories,
        prompt: PromptConfig,
        item_tokens: NDArray[np.int64],
        **settings: object,
    ) -> TrainingBatches:
        """Batches over training histories, cut into windows by `training_windows`."""
        events = Histories(histories.offsets, np.arange(len(histories.items), dtype=np.int32))
        windows = training_windows(events, prompt)
        return cls(windows, histories.items, item_tokens, **settings)  # type: ignore[arg-type]

    @property
    def predicted(self) -> NDArray[np.int64]:
        """Ascending numbers of the events that may carry loss, which each window has once."""
        sequences = self.windows.sequences
        carries = sequences.positions >= self.windows.first[sequences.rows]
        return np.sort(sequences.items[carries]).astype(np.int64)

    def sample(self, share: float) -> TrainingBatches:
        """Batches over a random share of the windows, at least one."""
        count = len(self.windows.first)
        rng = np.random.default_rng(self.seed)
        rows = np.sort(rng.choice(count, max(1, round(share * count)), replace=False))
        windows = Windows(self.windows.sequences.take(rows), self.windows.first[rows])
        return replace(self, windows=windows)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Batches of one epoch from number `start` on."""
        rng = np.random.default_rng([self.seed, epoch])
        windows, first = self._drop(rng)
        for rows in self._group(windows, rng)[start:]:
            yield self._batch(windows.take(rows), first[rows])

    def count(self, epoch: int = 0) -> int:
        """Number of batches of an epoch; it depends on the dropped items."""
        rng = np.random.default_rng([self.seed, epoch])
        return len(self._group(self._drop(rng)[0], rng))

    def _group(self, windows: Histories, rng: np.random.Generator) -> list[NDArray[np.int64]]:
        tokens = len(self.prefix) + windows.lengths * self.item_tokens.shape[1]
        return group_rows(windows.lengths, tokens, self.max_tokens, rng)

    def _drop(self, rng: np.random.Generator) -> tuple[Histories, NDArray[np.int64]]:
        """Windows without the dropped items and without windows that then have no loss."""
        sequences, first = self.windows.sequences, self.windows.first
        if self.item_dropout > 0:
            keep = rng.random(len(sequences.items)) >= self.item_dropout
            early = keep & (sequences.positions < first[sequences.rows])
            first = np.bincount(sequences.rows[early], minlength=len(sequences))
            sequences = sequences.where(keep)
            if not self.prefix:
                first = np.maximum(first, 1)  # the first item has no context
        rows = np.flatnonzero(sequences.lengths > first)
        return sequences.take(rows), first[rows]

    def _batch(self, sequences: Histories, first: NDArray[np.int64]) -> Batch:
        events = sequences.padded()
        levels, prefix = self.item_tokens.shape[1], len(self.prefix)
        tokens = np.full((len(events), prefix + events.shape[1] * levels), self.pad, np.int64)
        tokens[:, :prefix] = self.prefix
        real = events >= 0
        tokens[:, prefix:][np.repeat(real, levels, axis=1)] = self.item_tokens[
            self.items[events[real]]
        ].reshape(-1)
        loss = np.zeros(tokens.shape, np.bool_)
        asked = real & (np.arange(events.shape[1]) >= first[:, None])
        loss[:, prefix:] = np.repeat(asked, levels, axis=1)
        if self.soft is None:
            return Batch(tokens, loss)
        items, shares = self.soft.items[events[asked]], self.soft.shares[events[asked]]
        return Batch(tokens, loss, (self.item_tokens[items], shares))


def group_rows(
    lengths: NDArray[np.int64],
    tokens: NDArray[np.int64],
    max_tokens: int,
    rng: np.random.Generator,
) -> list[NDArray[np.int64]]:
    """Group rows of similar length into batches, in random order.

    Args:
        lengths: (n,) items; rows of equal length are mixed at random.
        tokens: (n,) tokens, which grow with the lengths.
        max_tokens: of a batch, padding included; a longer row is a batch of its own.
        rng: of the mixing and the order.

    Returns:
        the rows of each batch.
    """
    order = np.lexsort((rng.random(len(lengths)), lengths))
    tokens = tokens[order]
    groups, start = [], 0
    while start < len(order):
        # Rows get longer: the last one's width holds for all rows before it.
        nearest = tokens[start : start + max_tokens // int(tokens[start]) + 1]
        room = nearest * np.arange(1, len(nearest) + 1)
        stop = start + max(1, int(np.searchsorted(room, max_tokens, side="right")))
        groups.append(order[start:stop])
        start = stop
    return [groups[i] for i in rng.permutation(len(groups))]
