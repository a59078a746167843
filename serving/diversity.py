"""Diversity: puts a list in an order in which neighbours differ (maximal marginal relevance).

Carbonell & Goldstein 1998: the next item is the one with the most (1 - d) relevance - d likeness,
where likeness is to the most alike of the items already listed. Two items are as alike as the share
of leading codes that their semantic IDs have in common.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MOST = 200


def pool(k: int) -> int:
    """How many items to choose k from."""
    return min(MOST, max(3 * k, k + 20))


def diversify(
    scores: Sequence[float], semantic_ids: Sequence[Sequence[int]], diversity: float, k: int
) -> list[int]:
    """The places of k items, in the order they are chosen.

    Args:
        scores: of n items, best first.
        semantic_ids: codes of each, L of them.
        diversity: d, 0 to 1.
        k: items wanted; fewer if there are no more.
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
