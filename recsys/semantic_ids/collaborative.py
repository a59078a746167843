"""Collaborative features of items from training histories, and their prediction from content."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy import linalg, sparse

from recsys.interactions import Histories
from recsys.semantic_ids.words import truncated_svd, unit_rows

FOLDS = 5  # of the items, for predictions of their own features
# Of events within the window: of more events, a narrower window counts, in less time and memory.
MOST_PAIRS, LEAST_WINDOW = 1 << 22, 2


def ppmi_block(
    histories: Histories, num_items: int, window: int, dim: int, seed: int
) -> NDArray[np.float32]:
    """(items, D) truncated SVD of the PPMI of co-occurrence; zeros for items never seen.

    After Levy and Goldberg, "Neural Word Embedding as Implicit Matrix Factorization" (2014): the
    context of an item are the items at most `window` events away, context counts are smoothed by
    the power 0.75, and each side gets the square roots of the singular values. From `MOST_PAIRS`
    pairs on, the window is narrower, but not below `LEAST_WINDOW`.
    """
    widest = max(LEAST_WINDOW, MOST_PAIRS // max(len(histories.items), 1))
    counts = _cooccurrence(histories, num_items, min(window, widest))
    if not counts.nnz:
        return np.zeros((num_items, 0), np.float32)
    item_mass = np.asarray(counts.sum(axis=1)).reshape(-1)
    context_mass = np.asarray(counts.sum(axis=0)).reshape(-1) ** 0.75
    pairs = counts.tocoo()
    expected = item_mass[pairs.row] * context_mass[pairs.col] / context_mass.sum()
    pairs.data = np.maximum(np.log(pairs.data / expected), 0)
    return unit_rows(truncated_svd(pairs.tocsr(), dim, seed)[0])


def sasrec_block(histories: Histories, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """(items, D) a model's vectors, centred, in rows of length 1; zeros for items never seen.

    The model's vectors of items unseen in training only result from initialisation and negative
    samples.
    """
    seen = np.bincount(histories.items, minlength=len(vectors)) > 0
    centred = vectors - vectors[seen].mean(axis=0)
    return np.where(seen[:, None], unit_rows(centred), np.float32(0))


def predict(
    collaborative: NDArray[np.float32], content: sparse.csr_array
) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """Collaborative features as content predicts them, by ridge regression.

    A known item is predicted without the items of its fold, so that predictions are as good for
    known items as for new ones. Rows have length 1, since short vectors lie between the codes.

    Args:
        collaborative: (items, D); rows of zeros for items never seen.
        content: (items, F) terms of the items.

    Returns:
        (items, D) predictions, zeros for items without content; and the (F, D) regression on all
        items, for new ones.
    """
    known = collaborative.any(axis=1) & (np.diff(content.indptr) > 0)
    regression = _ridge(collaborative[known], content[known])
    predicted = content @ regression
    fold = np.random.default_rng(0).permutation(len(known)) % FOLDS
    for number in range(FOLDS):
        own, others = known & (fold == number), known & (fold != number)
        predicted[own] = content[own] @ _ridge(collaborative[others], content[others])
    return unit_rows(predicted), regression


def _ridge(collaborative: NDArray[np.float32], content: sparse.csr_array) -> NDArray[np.float64]:
    """(F, D) ridge regression of (n, D) features on (n, F) content."""
    content = content.astype(np.float64)
    gram = (content.T @ content).toarray()
    gram.flat[:: len(gram) + 1] += 1
    product = content.T @ collaborative.astype(np.float64)
    return np.asarray(linalg.cho_solve(linalg.cho_factor(gram, overwrite_a=True), product))


def _cooccurrence(histories: Histories, num_items: int, window: int) -> sparse.csr_array:
    """(items, items) symmetric counts of pairs of items within `window` events of each other."""
    rows, items = histories.rows, histories.items
    counts = sparse.csr_array((num_items, num_items), dtype=np.float64)
    for gap in range(1, min(window, int(histories.lengths.max(initial=0)) - 1) + 1):
        same = (rows[gap:] == rows[:-gap]) & (items[gap:] != items[:-gap])
        left, other = items[:-gap][same], items[gap:][same]
        counts = counts + sparse.csr_array(
            (np.ones(len(left)), (left, other)), shape=(num_items, num_items)
        )
    return counts + counts.T
