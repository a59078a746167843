"""Report on a set of semantic IDs: use of the codes, and the cost of making them unique."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recsys.semantic_ids.quantizer import Quantizer


def health(codes: NDArray[np.integer], sizes: Sequence[int] | None = None) -> dict[str, Any]:
    """Statistics of a set of codes.

    Args:
        codes: (n, L).
        sizes: V_l, the codes of each level l; by default its largest code + 1.

    Returns:
        `items`, `levels`, `codebook_size` (L,), `used_codes` (L,), `perplexity` (L,: exp of the
        entropy of the codes, V_l when all are equally common), `prefixes` (L,: distinct prefixes of
        each depth), `branching` (L,: mean children of a prefix), `colliding_items`,
        `colliding_leaves`, `largest_leaf`.
    """
    levels = codes.shape[1]
    used, perplexity = [], []
    for column in codes.T:
        counts = np.bincount(column)
        share = counts[counts > 0] / len(column)
        used.append(int((counts > 0).sum()))
        perplexity.append(round(float(np.exp(-(share * np.log(share)).sum())), 3))
    rows = codes[np.lexsort(codes.T[::-1])]
    new = np.logical_or.accumulate(rows[1:] != rows[:-1], axis=1)  # a new prefix of each depth
    prefixes = [1 + int(count) for count in new.sum(axis=0)]
    leaves = np.diff(np.flatnonzero(np.concatenate([[True], new[:, -1], [True]])))
    return {
        "items": len(codes),
        "levels": levels,
        "codebook_size": list(sizes or (int(column.max()) + 1 for column in codes.T)),
        "used_codes": used,
        "perplexity": perplexity,
        "prefixes": prefixes,
        "branching": [
            round(below / above, 3)
            for above, below in zip([1, *prefixes[:-1]], prefixes, strict=True)
        ],
        "colliding_items": int(leaves[leaves > 1].sum()),
        "colliding_leaves": int((leaves > 1).sum()),
        "largest_leaf": int(leaves.max()),
    }


def agreement(placed: NDArray[np.integer], codes: NDArray[np.integer]) -> dict[str, float]:
    """How often the first code by which items would be placed is their own.

    Args:
        placed: (n, L) codes that items would get if they were new.
        codes: (n, L) their own.

    Returns:
        `first_code`, the share of the items; `by_chance`, that of two items drawn at random.
    """
    share = np.bincount(codes[:, 0]) / len(codes)
    shares = {
        "first_code": float((placed[:, 0] == codes[:, 0]).mean()),
        "by_chance": float((share**2).sum()),
    }
    return {key: round(value, 4) for key, value in shares.items()}


def reconstruction_error(
    quantizer: Quantizer, features: NDArray[np.float32], codes: NDArray[np.integer]
) -> float:
    """Share of the features' variance that the codes do not explain (0 perfect, 1 the mean)."""
    error = quantizer.reconstruct(codes)
    error -= features
    centred = features - features.mean(axis=0)
    unexplained, whole = (float(np.square(v, out=v).sum()) for v in (error, centred))
    return round(unexplained / max(whole, 1e-12), 5)


def compare(
    before: NDArray[np.integer],
    after: NDArray[np.integer],
    quantizer: Quantizer,
    features: NDArray[np.float32],
) -> dict[str, Any]:
    """The report: statistics of the assigned codes, and what the assignment changed."""
    sizes = [len(book) for book in quantizer.centroids]
    raw = health(before, sizes)
    return {
        **health(after, sizes),
        "moved_items": int((before != after).any(axis=1).sum()),
        "reconstruction_error": reconstruction_error(quantizer, features, after),
        "before_assignment": {
            key: raw[key]
            for key in ("used_codes", "perplexity", "prefixes", "colliding_items", "largest_leaf")
        }
        | {"reconstruction_error": reconstruction_error(quantizer, features, before)},
    }
