"""Collaborative features of items from training histories, and their prediction from content."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from recsys.interactions import Histories
from recsys.semantic_ids.words import truncated_svd, unit_rows


def ppmi_block(
    histories: Histories, num_items: int, window: int, dim: int, seed: int
) -> NDArray[np.float32]:
    """(items, D) truncated SVD of the PPMI of co-occurrence; zeros for items never seen.

    After Levy and Goldberg, "Neural Word Embedding as Implicit Matrix Factorization" (2014): the
    context of an item are the items at most `window` events away, context counts are smoothed by
    the power 0.75, and each side gets the square roots of the singular values.
    """
    counts = _cooccurrence(histories, num_items, window)
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


def fill_unseen(
    collaborative: NDArray[np.float32], content: NDArray[np.floating]
) -> NDArray[np.float32]:
    """Fill the zero rows of (items, D) features by ridge regression on (items, F) content.

    Zero rows, of items without co-occurrence, would put all new items together, far from similar
    items. Predictions are short where content has little information; rows without any stay zero.
    """
    unseen = ~collaborative.any(axis=1) & content.any(axis=1)
    if not unseen.any():
        return collaborative
    out = collaborative.copy()
    out[unseen] = content[unseen] @ predict_from(collaborative, content)
    return out


def predict_from(
    collaborative: NDArray[np.float32], content: NDArray[np.floating]
) -> NDArray[np.float64]:
    """(F, D) ridge regression of collaborative features on content, over items with both."""
    both = collaborative.any(axis=1) & content.any(axis=1)
    x = content[both].astype(np.float64)
    gram = x.T @ x + np.eye(x.shape[1])
    return np.asarray(np.linalg.solve(gram, x.T @ collaborative[both]))


def _cooccurrence(histories: Histories, num_items: int, window: int) -> sparse.csr_array:
    """(items, items) symmetric counts of pairs of items within `window` events of each other."""
    rows, items = histories.rows, histories.items
    counts = sparse.csr_array((num_items, num_items), dtype=np.float64)
    for gap in range(1, min(window, int(histories.lengths.max(initial=0)) - 1) + 1):
        same = (rows[gap:] == rows[:-gap]) & (items[gap:] != items[:-gap])
        one, other = items[:-gap][same], items[gap:][same]
        counts = counts + sparse.csr_array(
            (np.ones(len(one)), (one, other)), shape=(num_items, num_items)
        )
    return counts + counts.T
