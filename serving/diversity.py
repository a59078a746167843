"""Diversity: reorders a list by maximal marginal relevance (Carbonell & Goldstein 1998).

The next item is the one with the largest (1 - d) relevance - d similarity, where similarity is the
largest one to the items chosen before. The similarity of two items is the share of leading codes
that their semantic IDs have in common.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MOST = 200


def pool(k: int) -> int:
    """Number of items to choose k from."""
    return min(MOST, max(3 * k, k + 20))


def diversify(
    scores: Sequence[float], semantic_ids: Sequence[Sequence[int]], diversity: float, k: int
) -> list[int]:
    """Choose k items (all, if there are fewer); returns their positions in the order of choice.

    >>> diversify([-1.0, -1.1, -1.2], [(0, 0), (0, 1), (1, 0)], diversity=0.5, k=2)
    [0, 2]

    Args:
        scores: (n,) log-probabilities, best first.
        semantic_ids: (n, L) codes.
        diversity: d, 0 to 1.
        k: number of items.
    """
    n = len(scores)
    if not n:
        return []
    relevance = np.exp(np.asarray(scores, np.float64) - max(scores))
    codes = np.asarray(semantic_ids)
    likeness = np.zeros(n)
    left = np.ones(n, np.bool_)
    chosen: list[int] = []
    for _ in range(min(k, n)):
        gain = np.where(left, (1 - diversity) * relevance - diversity * likeness, -np.inf)
        best = int(gain.argmax())
        chosen.append(best)
        left[best] = False
        likeness = np.maximum(likeness, _shared(codes, codes[best]))
    return chosen


def _shared(codes: NDArray[np.integer], of: NDArray[np.integer]) -> NDArray[np.float64]:
    """(n,) share of leading codes in common."""
    same = np.logical_and.accumulate(codes == of, axis=1)
    return np.asarray(same.mean(axis=1), np.float64)
