"""Quality and time by beam width; differences to the widest search are paired by user."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recsys.evaluation.metrics import Hits, bootstrap, ndcg_at_k, paired_bootstrap, recall_at_k
from recsys.evaluation.protocol import EvaluationConfig
from recsys.interactions import Histories

METRICS = {"recall": recall_at_k, "ndcg": ndcg_at_k}


@dataclass(frozen=True)
class Swept:
    """The lists of one beam width.

    Attributes:
        beams: the width.
        items: ranker -> (n, k) int32 items, padded with -1.
        seconds: wall time of the search.
    """

    beams: int
    items: dict[str, NDArray[np.int32]]
    seconds: float


def measure(
    swept: Sequence[Swept], targets: Histories, config: EvaluationConfig
) -> list[dict[str, Any]]:
    """Measure beam widths at the headline K, from lists of the same users, narrowest width first.

    Returns:
        One row per width, ranker and metric: `mean`, `low`, `high`, `gap` (`mean`, `low` and `high`
        of the paired difference to the widest search) and `milliseconds` per user.
    """
    rows: list[dict[str, Any]] = []
    k = config.headline_k
    drawn = {"resamples": config.resamples, "seed": config.seed}
    values = [
        {
            (ranker, metric): function(Hits.of(items, targets), k)
            for ranker, items in one.items.items()
            for metric, function in METRICS.items()
        }
        for one in swept
    ]
    for one, mine in zip(swept, values, strict=True):
        for (ranker, metric), column in mine.items():
            widest = values[-1][ranker, metric]
            rows.append(
                {
                    "beams": one.beams,
                    "ranker": ranker,
                    "metric": metric,
                    "k": k,
                    **vars(bootstrap(column, **drawn)),
                    "gap": vars(paired_bootstrap(column, widest, **drawn)),
                    "milliseconds": round(1e3 * one.seconds / max(1, len(targets)), 3),
                }
            )
    return rows
