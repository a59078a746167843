"""AsNew: some items of a catalog as if they had been added after training.

Their events are taken out of the histories, their rows out of every part of retrieval, and they
come back under numbers behind the catalog, with the codes that new items with their content get.
What was fitted before keeps what it learned from their events, which is little: the model, SASRec
and the quantiser, but no vector and no code of these items.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from scipy import sparse

from recsys.dataset import Examples
from recsys.retrieval.item_item import ItemItem
from recsys.retrieval.later import LaterItems
from recsys.retrieval.retrieval import Retrieval
from recsys.retrieval.vectors import VectorIndex

MOST = 1 << 14  # items that are drawn: each is compared with the whole catalog


@dataclass(frozen=True, eq=False)
class AsNew:
    """Items that count as new.

    Attributes:
        chosen: (m,) their dense numbers in the catalog, ascending.
        codes: (m, L) codes by which they are placed.
        retrieval: what is left without them.
        later: what is known of them, by content.
    """

    chosen: NDArray[np.int64]
    codes: NDArray[np.int32]
    retrieval: Retrieval
    later: LaterItems

    @classmethod
    def draw(
        cls,
        retrieval: Retrieval,
        items: pa.Table,
        placed: NDArray[np.int32],
        *,
        share: float,
        seed: int,
    ) -> AsNew | None:
        """Draw a share of the items with events, at most `MOST`.

        Args:
            retrieval: of the whole catalog.
            items: the catalog.
            placed: (items, L) codes that each item would get if it were new.
            share: of the items with events, in (0, 1).
            seed: of the draw.

        Returns:
            None if the items have no content, or too few have events.
        """
        known = np.flatnonzero(retrieval.counts > 0)
        count = min(int(share * len(known)), MOST)
        if not count:
            return None
        chosen = np.sort(np.random.default_rng(seed).choice(known, count, replace=False))
        rest = without(retrieval, chosen)
        later = rest.describe(items.take(pa.array(chosen)))
        return None if later is None else cls(chosen, placed[chosen], rest, later)

    @property
    def alive(self) -> NDArray[np.bool_]:
        """(items + m,) which numbers are in use."""
        alive = np.ones(len(self.retrieval) + len(self.chosen), np.bool_)
        alive[self.chosen] = False
        return alive

    def examples(self, examples: Examples) -> Examples:
        """Histories without the chosen items; targets and hidden items by their new numbers."""
        number = np.arange(len(self.retrieval), dtype=np.int32)
        number[self.chosen] = len(self.retrieval) + np.arange(len(self.chosen))
        histories, targets = examples.histories, examples.targets
        if (hidden := histories.hidden) is not None:
            histories = replace(histories, hidden=replace(hidden, items=number[hidden.items]))
        old = ~np.isin(histories.items, self.chosen)
        return replace(
            examples,
            histories=histories.where(old),
            targets=replace(targets, items=number[targets.items]),
        )


def without(retrieval: Retrieval, items: NDArray[np.integer]) -> Retrieval:
    """The same as if these items had never been in the catalog; their rows are empty."""
    there = np.ones(len(retrieval), np.float32)
    there[items] = 0
    keep = sparse.diags_array(there, format="csr")

    def blanked(model: ItemItem) -> ItemItem:
        weights = sparse.csr_array(keep @ model.weights @ keep)
        weights.eliminate_zeros()
        return replace(model, weights=weights.astype(np.float32))

    types, content = retrieval.types, retrieval.content
    if types is not None:
        to_targets = blanked(types.to_targets)
        types = replace(types, to_targets=to_targets, counts=types.counts * there)
    if content is not None:
        rows = sparse.csr_array(keep @ content.rows)
        rows.eliminate_zeros()
        content = replace(content, rows=rows)
    vectors, sasrec = retrieval.vectors, retrieval.sasrec
    if vectors is not None:
        vectors = VectorIndex(vectors.vectors * there[:, None])
    if sasrec is not None:
        sasrec = sasrec.without(items)
    return replace(
        retrieval,
        item_item=blanked(retrieval.item_item),
        counts=retrieval.counts * there,
        vectors=vectors,
        content=content,
        sasrec=sasrec,
        types=types,
        recent=None if retrieval.recent is None else retrieval.recent * there,
    )
