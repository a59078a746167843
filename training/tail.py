"""Lists with a share of their places from the tail of the catalog, at a limited loss of NDCG.

The tail is the items outside the head, the fewest items that hold half of the training events. Each
candidate's score is lowered by a penalty times log(1 + training events), which is a lower weight of
the reranker's feature `popularity`: lists are served as they are measured here. The penalty is the
one of a grid that meets both bounds with the highest NDCG@10 on validation users, whose scores are
cross-fitted. Seen items are left out, and so are items that are not available now.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from recsys.errors import ConfigError
from recsys.evaluation.metrics import coverage_at_k, gini_at_k, novelty_at_k, share_at_k
from recsys.retrieval.popularity import tail_of
from recsys.retrieval.reranker import POPULARITY, Reranker
from recsys.training.reranking import Candidates, gains, ranks_by
from recsys.training.validation import TOP

PENALTIES = (0.0, *(0.02 * 1.2**step for step in range(28)))


def measure_frontier(
    found: Candidates, scores: NDArray[np.float64], trained: NDArray[np.int64]
) -> list[dict[str, float]]:
    """What each of `PENALTIES` gives.

    Args:
        found: validation users.
        scores: (n, w) of their candidates, of `choose`.
        trained: (items,) training events.

    Returns:
        one point for each: `penalty`, and of the first ten places `tail_share`, `ndcg`, `recall`,
        `coverage`, `gini` and `novelty`.
    """
    popularity, tail = np.where(found.there, found.values[POPULARITY], 0), tail_of(trained)
    points = []
    for penalty in PENALTIES:
        lowered = np.where(found.there, scores - penalty * popularity, -np.inf)
        order = np.argsort(-lowered, axis=1, kind="stable")[:, :TOP]
        listed = np.take_along_axis(found.items, order, axis=1)
        gained = gains(ranks_by(found, lowered))
        point = {
            "penalty": penalty,
            "tail_share": share_at_k(listed, TOP, tail),
            "ndcg": float(gained.mean()),
            "recall": float((gained > 0).mean()),
            "coverage": coverage_at_k(listed, TOP, len(trained)),
            "gini": gini_at_k(listed, TOP, len(trained)),
            "novelty": novelty_at_k(listed, TOP, trained),
        }
        points.append({key: round(value, 6) for key, value in point.items()})
    return points


def constrain(
    reranker: Reranker, points: list[dict[str, float]], share: float, loss: float
) -> tuple[Reranker, dict[str, float]]:
    """The reranker with the penalty that meets both bounds, and the point of it.

    Args:
        reranker: how lists are ranked without a penalty.
        points: of `measure_frontier`.
        share: least share of the first ten places that are from the tail.
        loss: most share of NDCG@10 that this may cost.

    Raises:
        ConfigError: no penalty meets both bounds; the message says what can be had.
    """
    least = (1 - loss) * points[0]["ndcg"]
    allowed = [point for point in points if point["ndcg"] >= least]
    meets = [point for point in allowed if point["tail_share"] >= share]
    if not meets:
        most = max(allowed, key=lambda point: point["tail_share"])
        reached = next((point for point in points if point["tail_share"] >= share), None)
        cost = (
            "no penalty reaches it"
            if reached is None
            else f"it costs {1 - reached['ndcg'] / points[0]['ndcg']:.1%}"
        )
        raise ConfigError(
            f"retrieval.tail_share: {share:.1%} of the places from the tail cannot be had for "
            f"{loss:.1%} of NDCG@10 on validation ({cost}). Set tail_share to at most "
            f"{most['tail_share']:.1%}, or raise retrieval.tail_loss"
        )
    best = max(meets, key=lambda point: point["ndcg"])
    weight = reranker.weights.get(POPULARITY, 0.0) - best["penalty"]
    return replace(reranker, weights={**reranker.weights, POPULARITY: weight}), best
