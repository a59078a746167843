"""Items without events: how well items are recommended that were added after training.

A share of the items is removed from the bundle's catalog and added again under other ids, as a shop
would add them. Their events are taken out of the histories and of retrieval, and they are placed
by their content (`recsys.retrieval.as_new`). The users whose next event is on one of them are then
served, once so and once with the catalog as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from recsys.bundle import CATALOG, ITEM_ENCODER
from recsys.dataset import ITEM_COLUMNS, Examples
from recsys.evaluation.metrics import Hits, bootstrap, ndcg_at_k, recall_at_k
from recsys.evaluation.protocol import EvaluationConfig, Result
from recsys.interactions import Histories
from recsys.live import NewItem
from recsys.retrieval.as_new import AsNew
from recsys.retrieval.rows import WeightedItems, blocked_items, unit
from recsys.retrieval.vectors import nearest
from recsys.semantic_ids.encoder import PLACED

if TYPE_CHECKING:
    from recsys.recommender import Recommender

SHARE = 0.1  # of the items with events
LEAST_USERS = 20  # whose next event is on one of them; figures of fewer say nothing
AS_NEW, CONTENT, AS_KNOWN = "served, as new items", "content-kNN", "served, with their events"


@dataclass(frozen=True)
class NewItemLists:
    """Lists of the users whose next event is on an item that counts as new.

    Attributes:
        items: how many items count as new.
        rows: (n,) places of these users among those that are evaluated.
        lists: by ranker, (n, k) items and the target of each user.
    """

    items: int
    rows: NDArray[np.int64]
    lists: dict[str, tuple[NDArray[np.int32], Histories]]


def rank_with_new_items(
    recommender: Recommender,
    bundle: Path,
    examples: Examples,
    available: NDArray[np.bool_] | None,
    config: EvaluationConfig,
) -> NewItemLists | None:
    """Recommend from a catalog of which a share of the items is new, by content.

    Args:
        recommender: of the bundle under test; it does not change.
        bundle: the bundle's directory.
        examples: those that are evaluated.
        available: (items,) the items that lists may have; None for all.
        config: the protocol.

    Returns:
        None if new items cannot be placed or have no content, or if too few users have one of them
        next.
    """
    retrieval, placed = recommender.retrieval, bundle / CATALOG / ITEM_ENCODER / PLACED
    if retrieval is None or "masked" not in config.seen_modes or not placed.is_file():
        return None
    codes = np.load(placed, allow_pickle=False)
    items = recommender.bundle.catalog.items
    new = AsNew.draw(retrieval, items, codes, share=SHARE, seed=config.seed)
    if new is None:
        return None
    rows = np.flatnonzero(np.isin(examples.targets.items, new.chosen))
    if len(rows) < LEAST_USERS:
        return None
    known, renumbered = examples.take(rows), new.examples(examples.take(rows))
    without_new = replace(renumbered.histories, hidden=known.histories.hidden)
    if available is not None:
        without_new = without_new.hiding(np.flatnonzero(~available))
    k = config.headline_k
    found, _ = _with_new_items(recommender, new).rank(
        renumbered.histories, k, beams=config.beams, batch_size=config.batch_size
    )
    lists = {
        AS_NEW: (found, renumbered.targets),
        CONTENT: (_nearest(retrieval, without_new, k), known.targets),
    }
    return NewItemLists(len(new.chosen), rows, lists)


def measure_new_items(found: NewItemLists | None, result: Result) -> dict[str, Any] | None:
    """Figures of lists with new items, beside those of the catalog as it is.

    Args:
        found: what `rank_with_new_items` returned.
        result: of the whole evaluation, whose first ranker is what is served.

    Returns:
        `items` and `users`, their numbers; `share`, of the items; `k`; and `figures`, one row per
        ranker and metric with `mean`, `low` and `high`, seen items left out. None without lists.
    """
    if found is None:
        return None
    config, k = result.config, result.config.headline_k
    served = next(iter(result.rankings.values()))["masked"].items[found.rows, :k]
    targets = result.targets["next"].take(found.rows)
    figures = []
    for name, (listed, wanted) in (found.lists | {AS_KNOWN: (served, targets)}).items():
        hits = Hits.of(listed, wanted)
        for metric, function in (("recall", recall_at_k), ("ndcg", ndcg_at_k)):
            options = {"resamples": config.resamples, "seed": config.seed}
            about = {"ranker": name, "metric": metric}
            figures.append({**about, **vars(bootstrap(function(hits, k), **options))})
    return {
        "share": SHARE,
        "items": found.items,
        "users": len(found.rows),
        "k": k,
        "figures": figures,
    }


def _with_new_items(recommender: Recommender, new: AsNew) -> Recommender:
    """A recommender of the same models from whose catalog items were removed and added again."""
    from recsys.recommender import Recommender

    bundle = recommender.bundle
    changed = Recommender(bundle, recommender.model, retrieval=new.retrieval)
    table = bundle.catalog.items.take(new.chosen).to_pylist()
    items = [
        NewItem(
            f"new {row['item_id']}",
            "" if row["title"] == row["item_id"] else row["title"],
            row["text"] or "",
            {key: v for key, v in row.items() if key not in ITEM_COLUMNS and v is not None},
            codes.tolist(),
        )
        for row, codes in zip(table, new.codes, strict=True)
    ]
    changed.upsert(items)
    changed.remove([row["item_id"] for row in table])
    return changed


def _nearest(retrieval: Any, histories: Histories, k: int) -> NDArray[np.int32]:
    """(n, k) items whose content is nearest to the decayed sum of the history's."""
    size, content = len(retrieval), retrieval.content
    seen = blocked_items(len(histories), size, [histories.left_out(True)])
    recency = WeightedItems.decayed(histories, size, retrieval.item_item.decay)
    queries = unit(recency.dense(content.rows))
    return nearest(content.cosines(queries), k, seen)
